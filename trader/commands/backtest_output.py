"""Output of a backtest while it runs: its ledger and its database, written until the disk is full."""

from datetime import datetime
from pathlib import Path
from typing import Final

from trader.clock import iso
from trader.domain.exchange.account import Marks
from trader.errors import Unavailable
from trader.services.backtest.database import DatabaseJournal
from trader.services.backtest.ledger import LedgerLines

_RESERVE_BYTES: Final = 2 << 20
"""Room for the rest of the ledger, the result and the report of a long backtest."""


class Reserve:
    """Space of the disk that is given back at the end, so that a full disk still takes the result. Raises `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / ".reserve"
        try:
            self._file.write_bytes(bytes(_RESERVE_BYTES))
        except OSError:
            self.free()
            raise

    def free(self) -> None:
        """Give the space back. May be called again."""
        self._file.unlink(missing_ok=True)


class Output:
    """Writes what is kept at times that all accounts have reached: whole lines, and whole transactions."""

    def __init__(self, place: Path, ledger: LedgerLines, books: DatabaseJournal | None) -> None:
        self._place = place
        self._ledger = ledger
        self._books = books
        self.database_until: datetime | None = None
        """Until when the database has everything."""

    async def keep(self, reached: datetime, marks: Marks, *, is_end: bool = False) -> str | None:
        """Write what is kept if it is much, or if this is the end. Return why it cannot be written, else None."""
        try:
            if is_end or self._ledger.is_full:
                self._ledger.flush()
        except OSError as error:
            place = f"{self._place}, after line {self._ledger.lines} (byte {self._ledger.size})"
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
