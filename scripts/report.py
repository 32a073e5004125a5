"""Render a season report: one HTML file with equity curves, drawdowns, trades, costs and the leaderboard.

Without --database-url: DATABASE_URL (of the environment or of .env), or the one database of the embedded PostgreSQL of
this folder. Exit code 0: the report is written; 1: it cannot be, or the books do not explain the equity (the report
says of which accounts).
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from report_page import Season, Standing, page
from tool_database import add_database_options, reading

from trader.domain.portfolio.evidence import (
    EquitySeries,
    ReturnSeries,
    compare,
    judge_family,
    missing_trades,
    state_return,
)
from trader.domain.portfolio.statistics import EquityPoint, max_drawdown
from trader.errors import StartError, TraderError
from trader.store.portfolio import season as store


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    add_database_options(parser)
    parser.add_argument("--name", help="of the season, for its title; default: the database")
    parser.add_argument("output", nargs="?", type=Path, default=Path("season.html"), help="default: season.html")
    options = parser.parse_args(arguments)
    try:
        season = asyncio.run(_read(options))
        options.output.write_text(page(season), encoding="utf-8")
    except TraderError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"report: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(season.standings)} models, {len(season.trades)} trades")
    if season.unvalued:
        names = ", ".join(model.model_id for model in season.unvalued[:10])
        print(f"Without a snapshot in their current run, so in no figure: {len(season.unvalued)} models: {names}")
    if season.unexplained:
        print(f"report: the books do not explain the equity of {len(season.unexplained)} accounts", file=sys.stderr)
    return 1 if season.unexplained else 0


async def _read(options: argparse.Namespace) -> Season:
    async with reading(options) as (conn, place):
        accounts = await store.select_report_accounts(conn)
        hours = await store.select_report_hours(conn, [account.model_id for account in accounts])
        trades = await store.select_report_trades(conn)
        unvalued = await store.select_unvalued_models(conn)
    if not accounts:
        raise StartError(f"{place} has no model with a snapshot: there is nothing to report.")
    return Season(options.name or place.rpartition("/")[2], make_standings(accounts, hours), unvalued, trades)


def make_standings(
    accounts: Sequence[store.AccountReport], hours: Mapping[str, Sequence[tuple[datetime, float]]]
) -> list[Standing]:
    """Return the accounts with their statistics, best return first."""
    standings: list[Standing] = []
    series: dict[str, ReturnSeries | None] = {}
    for account in accounts:
        points, capital = hours.get(account.model_id, ()), float(account.initial_capital)
        fall = max_drawdown([capital, *(value for _, value in points)])
        returns = series[account.model_id] = _returns(points, capital)
        curve = [(hour, 100 * value / capital - 100) for hour, value in points]
        evidence = state_return(returns, account.trades)
        standings.append(Standing(account, curve, evidence, fall.percent if fall else 0.0))
    standings.sort(key=lambda one: (-one.account.change / one.account.initial_capital, one.account.model_id))
    statements = [
        compare(series[one.model_id], series[other.model_id], missing_trades(one.trades), missing_trades(other.trades))
        for one, other in pairwise(standing.account for standing in standings)
    ]
    verdicts = judge_family(statements)
    return [one._replace(verdict=verdict) for one, verdict in zip(standings, [*verdicts, None], strict=True)]


def _returns(points: Sequence[tuple[datetime, float]], capital: float) -> ReturnSeries | None:
    if not points:
        return None
    equity = EquitySeries(capital)
    equity.set(EquityPoint(*point) for point in points)
    return equity.returns(points[-1][0] + timedelta(hours=1))


if __name__ == "__main__":
    sys.exit(main())
