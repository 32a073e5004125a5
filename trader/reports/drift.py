"""Page of the drift between paper and venue, with the table cells that the command prints too."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from trader.reports.document import document, interval, minus, table
from trader.store.live.drift import DriftFigures, Uncompared

SIZES = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
COLUMNS = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")


def cells(figures: DriftFigures) -> tuple[str, ...]:
    size = "" if figures.size is None else SIZES[figures.size]
    errors = (f"{figures.mean:+.2f}", f"{figures.median:+.2f}", f"{figures.p95:.2f}", f"{figures.worst:+.2f}")
    return figures.symbol or "all", figures.side or "", size, f"{figures.fills:,}", *errors


def notes_of(uncompared: Uncompared) -> list[str]:
    counts = (
        (uncompared.too_large, "fills were larger than the book that was shown: no price on paper"),
        (uncompared.unsimulated, "fills were never simulated (on paper none is)"),
    )
    return [f"{count} {words}" for count, words in counts if count]


class Section(NamedTuple):
    """A table of the page. `compared` says what with what, `unit` what is counted. The last of `figures` are of all."""

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
        "market model draws around the same mid."
    )
    return Section("Recorded books", compared, "orders", figures, notes)


def page(name: str, sections: Sequence[Section]) -> str:
    """Return the HTML page: a table for each section, and in each row the middle 90 % of the errors with the median."""
    body = (
        f"<h1>Paper against the venue</h1><p>{escape(name)}. Errors are in basis points of the paper price; right of "
        "zero the venue is dearer. The line spans the middle 90 % of the errors, the dot is their median; p95 is of "
        "the errors without sign.</p>"
    )
    return document(f"Paper against the venue: {name}", body + "".join(map(_section, sections)))


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
