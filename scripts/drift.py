"""Report the drift between paper and venue: the error of each fill against its simulation, in basis points.

Positive is where the venue was dearer than paper. p95 is of the errors without sign, worst the largest of them. Prints
a table per market, side and size, and draws it as one HTML file. Without --database-url: DATABASE_URL (of the
environment or of .env), or the one database of the embedded PostgreSQL of this folder. Exit code 0: there are figures;
1: there are none.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path

from report import embedded_dsn
from report_charts import interval
from report_page import STYLE

from trader.errors import StartError, TraderError
from trader.settings import read_database_url
from trader.store.database.pool import place
from trader.store.database.schema import open_database
from trader.store.live import drift as store
from trader.store.live.drift import DriftFigures, Uncompared

SIZES = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
COLUMNS = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")


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
        name, figures, uncompared = asyncio.run(_read(options))
    except TraderError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 1
    notes = _notes(uncompared)
    for row in (COLUMNS, *map(_cells, figures)):
        market, side, size, fills, *errors = row
        print(f"{market:<8}{side:<6}{size:<14}{fills:>7}" + "".join(f"{text:>10}" for text in errors))
    print(*notes, sep="\n", end="\n" if notes else "")
    try:
        options.output.write_text(page(name, figures, notes), encoding="utf-8")
    except OSError as error:
        print(f"drift: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {figures[-1].fills} fills")
    return 0


async def _read(options: argparse.Namespace) -> tuple[str, list[DriftFigures], Uncompared]:
    since = datetime(1970, 1, 1, tzinfo=UTC)
    if options.days is not None:
        since = datetime.now(UTC) - timedelta(days=options.days)
    async with AsyncExitStack() as stack:
        dsn = options.database_url or read_database_url(os.environ, Path(".env"))
        dsn = dsn or await embedded_dsn(stack, options.database)
        database = await stack.enter_async_context(open_database(dsn))
        async with database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            figures = await store.select_drift_figures(conn, since)
            uncompared = await store.select_uncompared(conn, since)
    if not figures:
        raise StartError(f"{place(dsn)} has no fill of a venue that was simulated: there is nothing to compare.")
    return place(dsn).rpartition("/")[2], figures, uncompared


def _cells(one: DriftFigures) -> tuple[str, ...]:
    size = "" if one.size is None else SIZES[one.size]
    errors = (f"{one.mean:+.2f}", f"{one.median:+.2f}", f"{one.p95:.2f}", f"{one.worst:+.2f}")
    return one.symbol or "all", one.side or "", size, f"{one.fills:,}", *errors


def _notes(uncompared: Uncompared) -> list[str]:
    counts = (
        (uncompared.too_large, "fills were larger than the book that was shown: no price on paper"),
        (uncompared.unsimulated, "fills were never simulated (on paper none is)"),
    )
    return [f"{count} {words}" for count, words in counts if count]


def page(name: str, figures: Sequence[DriftFigures], notes: Sequence[str]) -> str:
    """Return the HTML page: the table, and in each row the middle 90 % of the errors with the median."""
    least, most = min(one.low for one in figures), max(one.high for one in figures)
    heads = "".join(f'<th class="{"text" if place < 3 else ""}">{title}</th>' for place, title in enumerate(COLUMNS))
    rows = "".join(
        f'<tr class="{"" if one.symbol else "sum"}">'
        + "".join(
            f'<td class="{"text" if place < 3 else ""}">{escape(text).replace("-", "−")}</td>'
            for place, text in enumerate(_cells(one))
        )
        + f"<td>{interval(one.low, one.median, one.high, least, most)}</td></tr>"
        for one in figures
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Paper against the venue: {escape(name)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>Paper against the venue</h1><p>{escape(name)}: each fill of the venue, simulated on the book at "
        "which its order was sent. Errors are in basis points of the paper price; right of zero the venue is dearer. "
        "The line spans the middle 90 % of the errors, the dot is their median; p95 is of the errors without sign.</p>"
        f'<div class="scroll"><table><tr>{heads}<th>{least:+.1f} to {most:+.1f}</th></tr>{rows}</table></div>'
        f"<p>{'. '.join(notes)}</p></main></body></html>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
