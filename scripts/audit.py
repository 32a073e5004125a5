"""Recompute every account from its fills, funding and insurance, and compare with the rows of `orders`.

In live trading, fills are also compared with the venue's trades that they were booked from.

Without --database-url: DATABASE_URL (of the environment or of .env), or every database of the embedded PostgreSQL of
this folder, where a service may be running. Exit code 0: the books are clean; 1: they are not, or cannot be read.
"""

import argparse
import asyncio
import os
import sys

from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError, TraderError
from trader.services.exchange.audit import audit
from trader.settings import read_database_url
from trader.store.database.pool import place
from trader.store.database.schema import open_database

PROBLEMS_SHOWN_MAX = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/audit", description=__doc__)
    parser.add_argument("--database-url", help="default: DATABASE_URL, of the environment or of .env")
    add_env_file_option(parser)
    options = parser.parse_args()
    try:
        return asyncio.run(_audit(options.database_url or read_database_url(os.environ, options.env_file)))
    except TraderError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1


async def _audit(database_url: str | None) -> int:
    if database_url:
        return await _audit_database(database_url)
    async with EmbeddedPostgres(EMBEDDED_FOLDER).attach() as server:
        names = await server.databases()
        if not names:
            print("audit: the embedded PostgreSQL of this folder has no database of trader", file=sys.stderr)
            return 1
        return max([await _audit_one(server.dsn(name)) for name in names])


async def _audit_one(dsn: str) -> int:
    """Audit one of several databases; an unreadable one must not prevent the others' audit."""
    try:
        return await _audit_database(dsn)
    except StartError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1


async def _audit_database(dsn: str) -> int:
    async with open_database(dsn) as database:
        report = await audit(database, _show_progress)
    counts = f"{report.runs} runs, {report.orders} orders, {report.entries} ledger entries"
    print(f"{place(dsn)}: {counts}{f', {report.trades} trades of the venue' if report.trades else ''}")
    for problem in report.problems[:PROBLEMS_SHOWN_MAX]:
        print(f"  {problem}")
    if len(report.problems) > PROBLEMS_SHOWN_MAX:
        print(f"  and {len(report.problems) - PROBLEMS_SHOWN_MAX} more")
    print("clean" if report.is_clean else f"NOT clean: {len(report.problems)} problems")
    return 0 if report.is_clean else 1


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} runs", end="" if done < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
