"""Output of a running backtest: its ledger file and database, and the handling of a full disk."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from trader.backtest.database import DatabaseJournal
from trader.backtest.ledger import Lines
from trader.core.clock import iso
from trader.core.errors import Unavailable
from trader.exchange.domain.account import Marks

_RESERVE_BYTES: Final = 2 << 20
"""Bytes reserved for the rest of the ledger and the decisions, the result and the report of a long backtest."""


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
    """Writes complete buffered lines and transactions, at times that all accounts have reached.

    `files` has the lines of each file.
    """

    def __init__(self, files: Mapping[Path, Lines], books: DatabaseJournal | None) -> None:
        self._files = files
        self._books = books
        self.database_until: datetime | None = None
        """The time up to which the database is complete."""

    async def keep(self, reached: datetime, marks: Marks, *, is_end: bool = False) -> str | None:
        """Write the full buffers, or all of them at the end. Return None, or why writing failed."""
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
