"""Report the drift between paper and venue: the error of each fill against its simulation, in basis points.

Positive is where the venue was dearer than paper. p95 is of the errors without sign, worst the largest of them. Prints
a table per market, side and size, and draws it as one HTML file. Without --database-url: DATABASE_URL (of the
environment or of .env), or the one database of the embedded PostgreSQL of this folder. Exit code 0: there are figures;
1: there are none.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path

from report_document import document, interval, minus, table
from tool_database import add_database_options, reading

from trader.errors import StartError, TraderError
from trader.store.live import drift as store
from trader.store.live.drift import DriftFigures, Uncompared

SIZES = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
COLUMNS = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_database_options(parser)
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
    async with reading(options) as (conn, place):
        figures = await store.select_drift_figures(conn, since)
        uncompared = await store.select_uncompared(conn, since)
    if not figures:
        raise StartError(f"{place} has no fill of a venue that was simulated: there is nothing to compare.")
    return place.rpartition("/")[2], figures, uncompared


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
    rows = [
        [*(minus(escape(text)) for text in _cells(one)), interval((one.low, one.high), one.median, least, most)]
        for one in figures
    ]
    body = (
        f"<h1>Paper against the venue</h1><p>{escape(name)}: each fill of the venue, simulated on the book at "
        "which its order was sent. Errors are in basis points of the paper price; right of zero the venue is dearer. "
        "The line spans the middle 90 % of the errors, the dot is their median; p95 is of the errors without sign.</p>"
        f"{table((*COLUMNS, f'{least:+.1f} to {most:+.1f}'), rows, text_columns=3)}<p>{'. '.join(notes)}</p>"
    )
    return document(f"Paper against the venue: {name}", body)


if __name__ == "__main__":
    sys.exit(main())
