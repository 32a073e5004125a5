"""Standings of a report: accounts with the statistics of their runs, and the report on a season from its rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise

from trader.core.money import ZERO
from trader.portfolio.domain.evidence import (
    Pair,
    compare_all,
    comparisons_among,
    judge_family,
    missing_trades,
    state_returns,
)
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.tables import Table
from trader.seasons.bundle import Basis, SeasonRows
from trader.seasons.page import RankedModel, SeasonReport
from trader.seasons.sql.report import AccountReport


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
