"""Report of a season, or of a backtest, as an HTML file."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from statistics import median
from typing import Any, NamedTuple

from trader.agents.variants import VARIANTS, color_of
from trader.api.dashboard.reports import report_page
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.core.clock import iso
from trader.core.money import ZERO
from trader.core.statistics import EquityPoint
from trader.portfolio.domain.evidence import Statement, Verdict
from trader.portfolio.domain.seasons import Season
from trader.portfolio.evidence import EvidenceReport
from trader.seasons.sql.report import AccountReport, TradeOutcome, UnvaluedModel

PercentCurve = Sequence[tuple[datetime, float]]


def percent_curve(points: Sequence[EquityPoint], capital: float) -> PercentCurve:
    """Return hourly equity in percent above the capital."""
    return [(point.hour, 100 * point.value / capital - 100) for point in points]


class RankedModel(NamedTuple):
    """A model's place. `curve` is its hourly equity in percent above the start; the verdict is against the next."""

    account: AccountReport
    curve: PercentCurve
    evidence: Statement
    drawdown: float
    verdict: Verdict | None = None

    @property
    def return_percent(self) -> float:
        return float(100 * self.account.change / self.account.initial_capital)


class ReferenceCurve(NamedTuple):
    """An account that the models are compared with, as a dashed line beside their equity."""

    name: str
    curve: PercentCurve


class SeasonReport(NamedTuple):
    """Content of the page. `standings` are ordered best first; `unvalued` models count only with their trades.

    A report without a database has no `evidence`. With a `season`, everything is of the season. `backtest` is what only
    the report of a backtest shows.
    """

    name: str
    standings: Sequence[RankedModel]
    unvalued: Sequence[UnvaluedModel]
    trades: Sequence[TradeOutcome]
    evidence: EvidenceReport | None = None
    season: Season | None = None
    references: Sequence[ReferenceCurve] = ()
    backtest: Mapping[str, Any] | None = None

    @property
    def accounts(self) -> list[AccountReport]:
        return [standing.account for standing in self.standings]

    @property
    def unexplained(self) -> list[AccountReport]:
        """The accounts whose books do not explain the equity to the last digit."""
        return [account for account in self.accounts if account.explained != account.change]


CLOSE_REASONS = {
    "by decision": ("order", "limit"),
    "by stop": ("stop", "invalidation"),
    "by target": ("target",),
    "by time": ("time",),
    "liquidated": ("liquidation",),
    "by operator": ("operator",),
}

PARTS: Mapping[str, Callable[[AccountReport], Decimal]] = {
    "gross": lambda account: account.gross,
    "unrealized": lambda account: account.unrealized,
    "fees": lambda account: -account.fees,
    "funding": lambda account: account.funding,
    "liquidationFees": lambda account: -account.liquidation_fees,
    "insurance": lambda account: account.insurance,
    "change": lambda account: account.change,
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
    accounts, hours = season.accounts, sorted({hour for standing in season.standings for hour, _ in standing.curve})
    start = min(account.started_at for account in accounts) if season.season is None else season.season.rules.start
    whole, capital = _costs(accounts), sum((account.initial_capital for account in accounts), ZERO)
    groups = {variant: [each for each in accounts if each.variant == variant] for variant in VARIANTS}
    return {
        "start": iso(start),
        "end": iso(max(account.at for account in accounts)),
        "isSeason": season.season is not None,
        "changePercent": float(100 * whole["change"] / capital),
        "times": [int(hour.timestamp()) for hour in hours],
        "variants": [{"id": each.id, "label": each.label, "color": each.color} for each in VARIANTS.values()],
        "models": [_model(standing, hours) for standing in season.standings],
        "unvalued": [
            {
                "name": model.name,
                "variant": model.variant,
                "startedAt": iso(model.started_at),
                "initialCapital": model.initial_capital,
            }
            for model in season.unvalued
        ],
        "references": [{"name": each.name, "values": _values(each.curve, hours)} for each in season.references],
        "trades": [
            {"variant": variant} | _trades(trades)
            for variant in VARIANTS
            if (trades := [trade for trade in season.trades if trade.variant == variant])
        ],
        "costs": [*({"variant": variant} | _costs(group) for variant, group in groups.items() if group), whole],
        "unexplained": [account.model_id for account in season.unexplained],
        **({} if season.evidence is None else _evidence(season, season.evidence)),
    }


def _values(curve: PercentCurve, hours: Sequence[datetime]) -> list[float | None]:
    values = dict(curve)
    return [None if (value := values.get(hour)) is None else round(value, 3) for hour in hours]


def _model(standing: RankedModel, hours: Sequence[datetime]) -> dict[str, Any]:
    account, verdict = standing.account, standing.verdict
    return {
        "name": account.name,
        "variant": account.variant,
        "values": _values(standing.curve, hours),
        "returnPercent": standing.return_percent,
        "interval": standing.evidence.interval_percent,
        "reason": standing.evidence.reason,
        "verdict": None if verdict is None else verdict.word,
        "why": None if verdict is None else verdict.why,
        "drawdown": standing.drawdown,
        "invocations": account.invocations,
        "trades": account.trades,
        "withinMinute": account.within_minute,
        "change": account.change,
        "equity": account.equity,
        "modelCost": account.model_cost,
    }


def _trades(trades: Sequence[TradeOutcome]) -> dict[str, Any]:
    """Return the net profits of trades, in percent of their entry notional, and how they were held and closed."""
    nets, minute = [trade.net_percent for trade in trades], timedelta(minutes=1)
    reasons = Counter(trade.close_reason for trade in trades)
    return {
        "values": [round(float(net), 3) for net in nets],
        "median": float(median(nets)),
        "won": sum(net > 0 for net in nets),
        "held": median(trade.held / minute for trade in trades),
        "brief": sum(trade.held < minute for trade in trades),
        "closed": {head: sum(reasons[reason] for reason in group) for head, group in CLOSE_REASONS.items()},
    }


def _costs(accounts: Sequence[AccountReport]) -> dict[str, Decimal]:
    """Return the parts of the change of equity of accounts, and the cost of their models, if any is known."""
    known = [account.model_cost for account in accounts if account.model_cost is not None]
    parts = {name: sum(map(part, accounts), ZERO) for name, part in PARTS.items()}
    return parts | ({"modelCost": sum(known, ZERO)} if known else {})


def _evidence(season: SeasonReport, report: EvidenceReport) -> dict[str, Any]:
    """Return the output of getEvidence, and the color of each model.

    For a model with one entrant, use the leaderboard's return, so that the report has one return per model: the
    evidence ends with the last full hour, the account with the last price.
    """
    whole = {standing.account.model_id: standing.return_percent for standing in season.standings}
    entrants = Counter(entrant.model.id for entrant in report.entrants)
    shown = [
        entrant._replace(return_percent=whole[entrant.model.id])
        if entrants[entrant.model.id] == 1 and entrant.return_percent is not None and entrant.model.id in whole
        else entrant
        for entrant in report.entrants
    ]
    return {
        "evidence": GetEvidenceOutput.of("run", report._replace(entrants=shown)),
        "colors": {entrant.model.id: color_of(entrant.model) for entrant in report.entrants},
    }
