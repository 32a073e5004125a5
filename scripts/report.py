"""Render a season report: one HTML file with equity curves, drawdowns, trades, costs and the leaderboard.

Without --database-url: DATABASE_URL (of the environment or of .env), or the one database of the embedded PostgreSQL of
this folder. Exit code 0: the report is written; 1: it cannot be, or the books do not explain the equity (the report
says of which accounts).
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path

from report_page import Season, page

from trader.domain.portfolio import statistics
from trader.domain.portfolio.statistics import Confidence95, EquityPoint
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError, TraderError
from trader.settings import read_database_url
from trader.store.database.pool import place
from trader.store.database.schema import open_database
from trader.store.portfolio import season as store
from trader.store.portfolio.season import Account, Unseen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--database-url", help="default: DATABASE_URL, of the environment or of .env")
    parser.add_argument("--database", metavar="NAME", help="of the embedded PostgreSQL, if it has several")
    parser.add_argument("--name", help="of the season, for its title; default: the database")
    parser.add_argument("output", nargs="?", type=Path, default=Path("season.html"), help="default: season.html")
    options = parser.parse_args(arguments)
    try:
        season = asyncio.run(_read(options))
    except TraderError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    try:
        options.output.write_text(page(season), encoding="utf-8")
    except OSError as error:
        print(f"report: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(season.accounts)} models, {len(season.trades)} trades")
    if season.unseen:
        names = ", ".join(one.model_id for one in season.unseen[:10])
        print(f"Without a snapshot in their current run, so in no figure: {len(season.unseen)} models: {names}")
    if season.unexplained:
        print(f"report: the books do not explain the equity of {len(season.unexplained)} accounts", file=sys.stderr)
    return 1 if season.unexplained else 0


async def _read(options: argparse.Namespace) -> Season:
    async with AsyncExitStack() as stack:
        dsn = options.database_url or read_database_url(os.environ, Path(".env"))
        dsn = dsn or await embedded_dsn(stack, options.database)
        database = await stack.enter_async_context(open_database(dsn))
        async with database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            accounts = await store.select_report_accounts(conn)
            hours = await store.select_report_hours(conn, [account.model_id for account in accounts])
            trades = await store.select_report_trades(conn)
            unseen = await store.select_report_unseen(conn)
    if not accounts:
        raise StartError(f"{place(dsn)} has no model with a snapshot: there is nothing to report.")
    return make_season(options.name or place(dsn).rpartition("/")[2], accounts, unseen, hours, trades)


async def embedded_dsn(stack: AsyncExitStack, name: str | None) -> str:
    """Attach to this folder's embedded server; return the address of the named database, or of its only one."""
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
    names = [name] if name else await server.databases()
    if len(names) != 1:
        raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")
    return server.dsn(names[0])


def make_season(
    name: str,
    accounts: Sequence[Account],
    unseen: Sequence[Unseen],
    hours: Mapping[str, Sequence[tuple[datetime, float]]],
    trades: Sequence[store.TradeShape],
) -> Season:
    """The figures of a season, its models ordered by their return."""
    ordered = sorted(accounts, key=lambda account: (-account.change / account.initial_capital, account.model_id))
    intervals: dict[str, Confidence95 | None] = {}
    drawdowns = {}
    for account in ordered:
        points = [EquityPoint(hour, value) for hour, value in hours.get(account.model_id, ())]
        intervals[account.model_id] = statistics.return_confidence(points)
        fall = statistics.max_drawdown([float(account.initial_capital), *(point.value for point in points)])
        drawdowns[account.model_id] = 0.0 if fall is None else fall.percent
    return Season(name, ordered, unseen, hours, trades, intervals, drawdowns, _certain(ordered, intervals))


def _certain(ordered: Sequence[Account], intervals: Mapping[str, Confidence95 | None]) -> dict[str, bool]:
    """Whether an interval touches neither of those of its neighbours."""
    found = {}
    for number, account in enumerate(ordered):
        own = intervals[account.model_id]
        beside = [intervals[ordered[other].model_id] for other in (number - 1, number + 1) if 0 <= other < len(ordered)]
        found[account.model_id] = own is not None and all(
            other is not None and (own.low > other.high or other.low > own.high) for other in beside
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
