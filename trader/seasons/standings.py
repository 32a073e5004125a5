"""Standings of a report: accounts with the statistics of their hours, and the report on a season from its rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

from trader.core.money import ZERO
from trader.core.statistics import EquityPoint, max_drawdown
from trader.portfolio.domain.evidence import compare, comparisons_among, judge_family, missing_trades, state_return
from trader.portfolio.domain.returns import EquitySeries, ReturnSeries
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.tables import Table
from trader.seasons.bundle import Basis, SeasonRows
from trader.seasons.page import RankedModel, SeasonReport, percent_curve
from trader.seasons.sql.report import AccountReport


def make_standings(accounts: Sequence[AccountReport], hours: Mapping[str, Sequence[EquityPoint]]) -> list[RankedModel]:
    """Return the accounts with their statistics, best return first."""
    standings: list[RankedModel] = []
    series: dict[str, ReturnSeries | None] = {}
    for account in accounts:
        points, capital = hours.get(account.model_id, ()), float(account.initial_capital)
        fall = max_drawdown([capital, *(point.value for point in points)])
        returns = series[account.model_id] = _returns(points, capital)
        evidence = state_return(returns, account.trades)
        standings.append(RankedModel(account, percent_curve(points, capital), evidence, fall.percent if fall else 0.0))
    standings.sort(
        key=lambda standing: (-standing.account.change / standing.account.initial_capital, standing.account.model_id)
    )
    statements = [
        compare(
            series[account.model_id],
            series[other.model_id],
            missing_trades(account.trades),
            missing_trades(other.trades),
        )
        for account, other in pairwise(standing.account for standing in standings)
    ]
    verdicts = judge_family(statements, comparisons_among(len(standings)))
    return [standing._replace(verdict=verdict) for standing, verdict in zip(standings, [*verdicts, None], strict=True)]


def _returns(points: Sequence[EquityPoint], capital: float) -> ReturnSeries | None:
    if not points:
        return None
    equity = EquitySeries(capital)
    equity.set(points)
    return equity.returns(points[-1].hour + timedelta(hours=1))


def season_report(basis: Basis, rows: SeasonRows, evidence: EvidenceReport) -> SeasonReport:
    """Return the report on a season: its entrants, hours and trades, and no others."""
    runs = {key: run for key, run in rows.runs.items() if run.hours}
    accounts = [_account(run, rows, basis.tables) for run in runs.values()]
    standings = make_standings(accounts, {key: run.points() for key, run in runs.items()})
    trades = [(rows.models[key].variant.value, trade) for key, run in runs.items() for trade in run.trades]
    shown = [standing._replace(verdict=None) for standing in standings]  # the evidence has them by the season's rules
    return SeasonReport(basis.season.rules.name, shown, [], trades, evidence, season=basis.season)


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
    return AccountReport(
        model_id=model.id,
        name=model.name,
        variant=model.variant,
        initial_capital=capital,
        started_at=run.run.started_at,
        at=run.hours[-1].last_at,
        equity=equity,
        unrealized=equity - capital - others,
        gross=gross,
        fees=fees,
        liquidation_fees=-paid["liquidation"],
        funding=paid["funding"],
        insurance=paid["insurance"],
        model_cost=run.run.totals.cost_usd,
        invocations=run.run.totals.finished,
        trades=len(run.trades),
        within_minute=run.brief[-1],
    )


def _decimal(values: Iterable[float]) -> Decimal:
    return sum((Decimal(repr(float(value))) for value in values), ZERO)
