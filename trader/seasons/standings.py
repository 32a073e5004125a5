"""Content of the report of a season, or of a backtest: accounts with their statistics, best first."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple

from trader.agents.domain.models import Model
from trader.core.money import ZERO
from trader.exchange.sql.trades import RunTrade
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
