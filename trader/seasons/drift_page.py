"""Page of the drift between paper and venue, with the table cells that the command also prints."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from trader.api.dashboard.document import document, interval, minus, table
from trader.live.sql.drift import DriftFigures, Uncompared

SIZES = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
COLUMNS = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")


def cells(figures: DriftFigures) -> tuple[str, ...]:
    size = "" if figures.size is None else SIZES[figures.size]
    errors = (f"{figures.mean:+.2f}", f"{figures.median:+.2f}", f"{figures.p95:.2f}", f"{figures.worst:+.2f}")
    return figures.symbol or "all", figures.side or "", size, f"{figures.fills:,}", *errors


def notes_of(uncompared: Uncompared) -> list[str]:
    counts = (
        (uncompared.too_large, "fills were larger than the visible book: no price on paper"),
        (uncompared.unsimulated, "fills were never simulated (in paper trading none are)"),
    )
    return [f"{count} {words}" for count, words in counts if count]


class Section(NamedTuple):
    """A table of the page. `compared` describes the comparison, `unit` the items. The last figures are totals."""

    title: str
    compared: str
    unit: str
    figures: Sequence[DriftFigures]
    notes: Sequence[str]


def of_fills(figures: Sequence[DriftFigures], uncompared: Uncompared) -> Section:
    """Return the section of a venue's fills."""
    compared = "Each fill of the venue, simulated on the book at which its order was sent."
    return Section("Fills of the venue", compared, "fills", figures, notes_of(uncompared))


def of_books(figures: Sequence[DriftFigures], notes: Sequence[str]) -> Section:
    """Return the section of recorded books."""
    compared = (
        "Orders of 500, 5,000, 50,000 and 500,000 on the recorded book, every 10 seconds, and on the book that the "
        "market model generates around the same mid."
    )
    return Section("Recorded books", compared, "orders", figures, notes)


def page(name: str, sections: Sequence[Section]) -> str:
    """Return the HTML page: a table per section, with the middle 90 % and the median of the errors in each row."""
    body = (
        f"<h1>Paper versus venue</h1><p>{escape(name)}. Errors are in basis points of the paper price; right of zero "
        "the venue is more expensive. The line spans the middle 90 % of the errors, the dot is their median; p95 "
        "refers to absolute errors.</p>"
    )
    return document(f"Paper versus venue: {name}", body + "".join(map(_section, sections)))


def _section(section: Section) -> str:
    figures = section.figures
    least, most = min(row.low for row in figures), max(row.high for row in figures)
    rows = [
        [*(minus(escape(text)) for text in cells(row)), interval((row.low, row.high), row.median, least, most)]
        for row in figures
    ]
    columns = [section.unit if column == "fills" else column for column in COLUMNS]
    head = (*columns, f"{least:+.1f} to {most:+.1f}")
    return (
        f"<h2>{section.title}</h2><p>{section.compared}</p>{table(head, rows, text_columns=3)}"
        f"<p>{'. '.join(section.notes)}</p>"
    )
