"""Tell how far paper is from the venue: the error of each fill against its simulation, in basis points.

Positive is where the venue was dearer than paper. p95 is of the errors without their sign, worst the largest of them.
Prints a table per market, side and size, and draws it as one HTML file. Without --database-url: DATABASE_URL (of
the environment or of .env), or the one database of the embedded PostgreSQL of this folder. Exit code 0: there are
figures; 1: there are none.
"""

import argparse
import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

from drift_page import Group, page

from trader.domain.live.drift import LARGEST, SIZES, figures, size_of
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError, TraderError
from trader.settings import read_database_url
from trader.store.database.pool import place
from trader.store.database.schema import open_database
from trader.store.live import drift as store
from trader.store.live.drift import FillError

SIZE_NAMES = [*(name for _, name in SIZES), LARGEST]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database-url", help="default: DATABASE_URL, of the environment or of .env")
    parser.add_argument("--database", metavar="NAME", help="of the embedded PostgreSQL, if it has several")
    parser.add_argument("--days", type=float, metavar="N", help="only the last N days; default: all")
    parser.add_argument("output", nargs="?", type=Path, default=Path("drift.html"), help="default: drift.html")
    options = parser.parse_args(arguments)
    try:
        name, errors, unsimulated = asyncio.run(_read(options))
    except TraderError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 1
    groups = make_groups(errors)
    thin = sum(error.bps is None for error in errors)
    print("\n".join(table(groups)))
    if thin:
        print(f"{thin} fills were larger than the book that was shown: no price on paper")
    if unsimulated:
        print(f"{unsimulated} fills were never simulated (on paper none is)")
    try:
        options.output.write_text(page(name, groups, thin, unsimulated), encoding="utf-8")
    except OSError as error:
        print(f"drift: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {sum(len(group.errors) for group in groups)} fills")
    return 0


async def _read(options: argparse.Namespace) -> tuple[str, list[FillError], int]:
    since = datetime(1970, 1, 1, tzinfo=UTC)
    if options.days is not None:
        since = datetime.now(UTC) - timedelta(days=options.days)
    async with AsyncExitStack() as stack:
        dsn = options.database_url or read_database_url(os.environ, Path(".env"))
        dsn = dsn or await _embedded_dsn(stack, options.database)
        database = await stack.enter_async_context(open_database(dsn))
        async with database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            errors = await store.select_fill_errors(conn, since)
            unsimulated = await store.select_unsimulated(conn, since)
    if not any(error.bps is not None for error in errors):
        raise StartError(f"{place(dsn)} has no fill of a venue that was simulated: there is nothing to compare.")
    return place(dsn).rpartition("/")[2], errors, unsimulated


async def _embedded_dsn(stack: AsyncExitStack, name: str | None) -> str:
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
    names = [name] if name else await server.databases()
    if len(names) != 1:
        raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")
    return server.dsn(names[0])


def make_groups(errors: Sequence[FillError]) -> list[Group]:
    """The errors per market, side and size, in that order."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for error in errors:
        if error.bps is not None:
            found[error.symbol, error.side, size_of(error.notional)].append(error.bps)
    ordered = sorted(found, key=lambda key: (key[0], key[1], SIZE_NAMES.index(key[2])))
    return [Group(*key, found[key], figures(found[key])) for key in ordered]


def table(groups: Sequence[Group]) -> list[str]:
    """The figures as lines of text, with one for all."""
    head = f"{'market':<8}{'side':<6}{'size':<14}{'fills':>7}{'mean':>10}{'median':>10}{'p95':>10}{'worst':>10}  bps"
    every = [error for group in groups for error in group.errors]
    lines = [(group.symbol, group.side, group.size, group.figures) for group in groups]
    lines.append(("all", "", "", figures(every)))
    return [head] + [
        f"{symbol:<8}{side:<6}{size:<14}{one.fills:>7}{one.mean:>+10.2f}{one.median:>+10.2f}{one.p95:>10.2f}"
        f"{one.worst:>+10.2f}"
        for symbol, side, size, one in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
