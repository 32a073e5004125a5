"""Report of a season, or of a backtest: accounts with their statistics, best first, and their page as HTML."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from trader.agents.domain.models import Model
from trader.agents.variants import VARIANTS, color_of
from trader.api.dashboard.reports import report_page
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.core.clock import iso
from trader.core.money import ZERO
from trader.core.statistics import grouped, minutes
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.behaviour import is_within_minute
from trader.portfolio.domain.evidence import (
    Pair,
    Statement,
    Verdict,
    compare_all,
    comparisons_among,
    judge_family,
    missing_trades,
    state_returns,
)
from trader.portfolio.domain.seasons import Season
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.tables import Table
from trader.seasons.bundle import Basis, SeasonRows
from trader.seasons.sql.report import AccountReport

PercentCurve = Sequence[tuple[datetime, float]]


def percent_curve(run: RunStatistics) -> PercentCurve:
    """Return the hourly equity of a run in percent above its capital."""
    capital = float(run.run.initial_capital)
    return [(point.hour, 100 * point.value / capital - 100) for point in run.points()]


class RankedModel(NamedTuple):
    """A model's place; the verdict is against the next."""

    account: AccountReport
    run: RunStatistics
    evidence: Statement
    verdict: Verdict | None = None

    @property
    def drawdown(self) -> float:
        fall = self.run.equity_figures.drawdown
        return 0.0 if fall is None else fall.percent

    @property
    def return_percent(self) -> float:
        return float(100 * self.account.change / self.account.initial_capital)


class SeasonReport(NamedTuple):
    """Content of the page. `standings` are ordered best first; runs without a place count only with their trades.

    `references` are what the models are compared with. With a `season`, everything is of the season. `backtest` is
    what only the report of a backtest shows.
    """

    name: str
    standings: Sequence[RankedModel]
    models: Mapping[str, Model]
    runs: Mapping[str, RunStatistics]
    evidence: EvidenceReport | None = None
    season: Season | None = None
    references: Mapping[str, PercentCurve] = {}
    backtest: Mapping[str, Any] | None = None

    @property
    def accounts(self) -> list[AccountReport]:
        return [standing.account for standing in self.standings]

    @property
    def trades(self) -> list[tuple[str, RunTrade]]:
        """The trades with the variants of their models."""
        return [(self.models[key].variant.value, trade) for key, run in self.runs.items() for trade in run.trades]

    @property
    def unvalued(self) -> list[Model]:
        """The models without a place: their run has no snapshot yet."""
        valued = {account.model_id for account in self.accounts}
        return [self.models[key] for key in self.runs if key not in valued]

    @property
    def unexplained(self) -> list[AccountReport]:
        """The accounts whose books do not explain the equity to the last digit."""
        return [account for account in self.accounts if account.explained != account.change]


def make_standings(accounts: Sequence[AccountReport], runs: Mapping[str, RunStatistics]) -> list[RankedModel]:
    """Return the accounts with their statistics, best return first."""
    ranked = sorted(accounts, key=lambda account: (-account.change / account.initial_capital, account.model_id))
    of = [runs[account.model_id] for account in ranked]
    series = [run.returns(run.hours[-1].hour + timedelta(hours=1)) if run.hours else None for run in of]
    statements = state_returns(zip(series, (account.trades for account in ranked), strict=True))
    missing = [missing_trades(account.trades) for account in ranked]
    pairs = pairwise(zip(series, missing, strict=True))
    compared = compare_all(Pair(own, other, (lacks, lacking)) for (own, lacks), (other, lacking) in pairs)
    verdicts = [*judge_family(list(compared), comparisons_among(len(ranked))), None][: len(ranked)]
    return list(map(RankedModel, ranked, of, statements, verdicts))


def season_report(basis: Basis, rows: SeasonRows, evidence: EvidenceReport) -> SeasonReport:
    """Return the report on a season: its entrants, hours and trades, and no others."""
    runs = {key: run for key, run in rows.runs.items() if run.hours}
    standings = make_standings([_account(run, rows, basis.tables) for run in runs.values()], runs)
    shown = [standing._replace(verdict=None) for standing in standings]  # the evidence has them by the season's rules
    return SeasonReport(basis.season.rules.name, shown, rows.models, runs, evidence, season=basis.season)


def _account(run: RunStatistics, rows: SeasonRows, tables: Mapping[str, Table]) -> AccountReport:
    """Return an account within the season; its price gains that no closed part has are those still open."""
    model, parts = rows.models[run.run.model_id], rows.parts.get(run.run.model_id, ())
    equity, capital = run.hours[-1].last, run.run.initial_capital
    fills, payments = tables["fills"], tables["payments"]
    own = payments["account"] == model.id
    paid = {
        kind: _decimal(payments["amount"][own & (payments["kind"] == kind)].tolist())
        for kind in ("funding", "insurance", "liquidation")
    }
    fees = _decimal(fills["fee"][fills["account"] == model.id].tolist()) + paid["liquidation"]
    gross = _decimal(part.gross or 0 for part in parts)
    others = gross - fees + paid["liquidation"] + paid["funding"] + paid["insurance"]
    return AccountReport.of(
        model,
        run,
        unrealized=equity - capital - others,
        gross=gross,
        fees=fees,
        liquidation_fees=-paid["liquidation"],
        funding=paid["funding"],
        insurance=paid["insurance"],
    )


def _decimal(values: Iterable[float]) -> Decimal:
    return sum((Decimal(repr(float(value))) for value in values), ZERO)


CLOSE_REASONS = {
    "by decision": ("order", "limit"),
    "by stop": ("stop", "invalidation"),
    "by target": ("target",),
    "by time": ("time",),
    "liquidated": ("liquidation",),
    "by operator": ("operator", "manual"),
}


def page(season: SeasonReport) -> str:
    """Return the report as HTML."""
    kind = "Season report" if season.backtest is None else "Backtest"
    return report_page(
        "season" if season.backtest is None else "backtest",
        f"{kind}: {season.name}",
        {"kind": kind, "name": season.name, **_of_accounts(season), **(season.backtest or {})},
    )


def _of_accounts(season: SeasonReport) -> dict[str, Any]:
    accounts, trades_of = season.accounts, grouped(season.trades, itemgetter(0))
    hours = sorted({value.hour for standing in season.standings for value in standing.run.hours})
    start = min(account.started_at for account in accounts) if season.season is None else season.season.rules.start
    return {
        "start": iso(start),
        "end": iso(max(account.at for account in accounts)),
        "isSeason": season.season is not None,
        "times": [int(hour.timestamp()) for hour in hours],
        "variants": [{"id": each.id, "label": each.label, "color": each.color} for each in VARIANTS.values()],
        "models": [
            {
                "account": standing.account,
                "change": standing.account.change,
                "values": _values(percent_curve(standing.run), hours),
                "returnPercent": standing.return_percent,
                "interval": standing.evidence.interval_percent,
                "reason": standing.evidence.reason,
                "verdict": None if standing.verdict is None else [standing.verdict.word, standing.verdict.why],
                "drawdown": standing.drawdown,
            }
            for standing in season.standings
        ],
        "unvalued": [
            {
                "modelId": model.id,
                "name": model.name,
                "variant": model.variant,
                "initialCapital": season.runs[model.id].run.initial_capital,
                "startedAt": season.runs[model.id].run.started_at,
            }
            for model in season.unvalued
        ],
        "references": [{"name": name, "values": _values(curve, hours)} for name, curve in season.references.items()],
        "trades": [
            {"variant": each} | _trades([trade for _, trade in trades_of[each]])
            for each in VARIANTS
            if each in trades_of
        ],
        "unexplained": [account.model_id for account in season.unexplained],
        **({} if season.evidence is None else _evidence(season, season.evidence)),
    }


def _values(curve: PercentCurve, hours: Sequence[datetime]) -> list[float | None]:
    values = dict(curve)
    return [None if (value := values.get(hour)) is None else round(value, 3) for hour in hours]


def _trades(trades: Sequence[RunTrade]) -> dict[str, Any]:
    """Return the net profits of trades in percent of their entry notional, and shares of the trades in percent."""
    nets = [100 * float(trade.net_pnl) / float(trade.entry_notional) for trade in trades]

    def share(*which: bool) -> float:
        return 100 * sum(which) / len(trades)

    return {
        "values": [round(net, 3) for net in nets],
        "median": median(nets),
        "won": share(*(net > 0 for net in nets)),
        "held": median(minutes(trade.opened_at, trade.closed_at) for trade in trades),
        "brief": share(*(is_within_minute(trade.opened_at, trade.closed_at) for trade in trades)),
        "closed": {
            head: share(*(trade.close_reason in group for trade in trades)) for head, group in CLOSE_REASONS.items()
        },
    }


def _evidence(season: SeasonReport, report: EvidenceReport) -> dict[str, Any]:
    """Return the output of getEvidence, and the color of each model.

    For a model with one entrant, use the leaderboard's return, so that the report has one return per model: the
    evidence ends with the last full hour, the account with the last price.
    """
    whole = {standing.account.model_id: standing.return_percent for standing in season.standings}
    entrants = Counter(entrant.id for entrant in report.entrants)
    shown = [
        entrant._replace(return_percent=whole[entrant.id])
        if entrants[entrant.id] == 1 and entrant.return_percent is not None and entrant.id in whole
        else entrant
        for entrant in report.entrants
    ]
    return {
        "evidence": GetEvidenceOutput.of("run", report._replace(entrants=shown)),
        "colors": {entrant.id: color_of(entrant.model) for entrant in report.entrants},
    }
