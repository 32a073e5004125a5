"""Output of a running backtest: the progress bar, and the ledger file and database, with disk-full handling."""

import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from trader.clock import iso
from trader.commands.command import show
from trader.domain.exchange.account import Marks
from trader.errors import Unavailable
from trader.services.backtest.database import DatabaseJournal
from trader.services.backtest.ledger import Lines

_CLEAR_LINE: Final = "\r\x1b[2K"
_BAR_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 10.0
_RESERVE_BYTES: Final = 2 << 20
"""Room for the rest of the ledger and of the decisions, the result and the report of a long backtest."""


class Reserve:
    """Disk space reserved until the end, so that the result can be written to a full disk. Raises `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / ".reserve"
        try:
            self._file.write_bytes(bytes(_RESERVE_BYTES))
        except OSError:
            self.free()
            raise

    def free(self) -> None:
        """Release the reserved space. Safe to repeat."""
        self._file.unlink(missing_ok=True)


class Output:
    """Writes buffered lines and transactions, whole ones only, at times that all accounts have reached.

    `files` has the lines of each file.
    """

    def __init__(self, files: Mapping[Path, Lines], books: DatabaseJournal | None) -> None:
        self._files = files
        self._books = books
        self.database_until: datetime | None = None
        """Until when the database has everything."""

    async def keep(self, reached: datetime, marks: Marks, *, is_end: bool = False) -> str | None:
        """Write the buffers that are full, or all of them at the end. Return why writing failed, else None."""
        for file, lines in self._files.items():
            try:
                if is_end or lines.is_full:
                    lines.flush()
            except OSError as error:
                place = f"{file}, after line {lines.lines} (byte {lines.size})"
                return f"{place}: nothing can be written: {error.strerror}."
        if self._books is None or not (is_end or self._books.is_full):
            return None
        try:
            await self._books.write(reached, marks)
        except Unavailable as error:
            until = "nothing" if self.database_until is None else f"everything until {iso(self.database_until)}"
            return f"{error} The database has {until}."
        self.database_until = reached
        return None


class Progress:
    """Progress from `start` to `end`, of market time or of a count of `unit`, with the estimated real time left."""

    def __init__(self, start: Any, end: Any, unit: str = "") -> None:
        self._start = start
        self._end = end
        self._unit = unit
        self._began_s = self._shown_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, reached: Any) -> None:
        """Print the time or the count reached, at a limited rate."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S):
            return
        self._shown_s = now_s
        part = (reached - self._start) / (self._end - self._start)
        left = _left(part, now_s - self._began_s)
        place = (
            f"{reached:%Y-%m-%d %H:%M}" if isinstance(reached, datetime) else f"{reached} of {self._end} {self._unit}"
        )
        if self._is_terminal:
            text = f"{_CLEAR_LINE}{'█' * round(30 * part):·<30} {100 * part:3.0f} %  {place}  {left}"
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            show(f"{100 * part:.0f} %, {place}, {left}", on_stderr=True)

    def end(self) -> None:
        """Clear the progress bar."""
        if self._is_terminal:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()


def _left(part: float, seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds / part - seconds))} left" if part > 0 else "begins"
