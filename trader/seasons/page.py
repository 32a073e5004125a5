"""Page of the report of a season, or of a backtest."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from statistics import median
from typing import Any

from trader.agents.variants import VARIANTS, color_of
from trader.api.dashboard.reports import report_page
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.core.clock import iso
from trader.core.statistics import grouped, minutes
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.behaviour import is_within_minute
from trader.portfolio.evidence import EvidenceReport
from trader.seasons.standings import PercentCurve, SeasonReport, percent_curve

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
