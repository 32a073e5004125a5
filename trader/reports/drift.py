"""The page of the drift between paper and venue, and the cells that it shares with the table of the command."""

from collections.abc import Sequence
from html import escape

from trader.reports.document import document, interval, minus, table
from trader.store.live.drift import DriftFigures, Uncompared

SIZES = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
COLUMNS = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")


def cells(one: DriftFigures) -> tuple[str, ...]:
    size = "" if one.size is None else SIZES[one.size]
    errors = (f"{one.mean:+.2f}", f"{one.median:+.2f}", f"{one.p95:.2f}", f"{one.worst:+.2f}")
    return one.symbol or "all", one.side or "", size, f"{one.fills:,}", *errors


def notes_of(uncompared: Uncompared) -> list[str]:
    counts = (
        (uncompared.too_large, "fills were larger than the book that was shown: no price on paper"),
        (uncompared.unsimulated, "fills were never simulated (on paper none is)"),
    )
    return [f"{count} {words}" for count, words in counts if count]


def page(name: str, figures: Sequence[DriftFigures], notes: Sequence[str]) -> str:
    """Return the HTML page: the table, and in each row the middle 90 % of the errors with the median."""
    least, most = min(one.low for one in figures), max(one.high for one in figures)
    rows = [
        [*(minus(escape(text)) for text in cells(one)), interval((one.low, one.high), one.median, least, most)]
        for one in figures
    ]
    body = (
        f"<h1>Paper against the venue</h1><p>{escape(name)}: each fill of the venue, simulated on the book at "
        "which its order was sent. Errors are in basis points of the paper price; right of zero the venue is dearer. "
        "The line spans the middle 90 % of the errors, the dot is their median; p95 is of the errors without sign.</p>"
        f"{table((*COLUMNS, f'{least:+.1f} to {most:+.1f}'), rows, text_columns=3)}<p>{'. '.join(notes)}</p>"
    )
    return document(f"Paper against the venue: {name}", body)
