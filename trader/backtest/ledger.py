"""Ledger of a backtest as JSON lines: every row of every posting, in order, and the SHA-256 over all of them."""

import hashlib
from io import RawIOBase
from typing import Any, BinaryIO, Final

import msgspec

from trader.backtest.accounts import ModelAccount
from trader.exchange.domain.ledger import Posting
from trader.exchange.sql.ledger import posting_rows
from trader.portfolio.domain.histories import Snapshot

BUFFER_MAX: Final = 1 << 16
"""Maximum bytes buffered before a write."""


class Lines:
    """Lines of an unbuffered file: `flush` writes only complete lines, even on a full disk."""

    def __init__(self, file: BinaryIO | RawIOBase) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._kept = 0
        self.lines = 0
        self.size = 0
        """Number of lines and bytes written."""

    def add(self, line: bytes) -> None:
        """Buffer a line until the next flush."""
        self._buffer += line + b"\n"
        self._kept += 1

    @property
    def is_full(self) -> bool:
        """Whether the buffer should be flushed."""
        return len(self._buffer) > BUFFER_MAX

    def flush(self) -> None:
        """Write the buffered lines. After an `OSError`, none of them is in the file, and the call may be repeated."""
        content = bytes(self._buffer)
        written = 0
        try:
            while written < len(content):
                written += self._file.write(content[written:]) or 0
        except OSError:
            self._file.seek(self.size)
            self._file.truncate()
            raise
        self._digest.update(content)
        self.lines, self.size = self.lines + self._kept, self.size + len(content)
        self._kept = 0
        self._buffer.clear()

    def digest(self) -> str:
        """Return the SHA-256 of all lines, in hexadecimal."""
        self.flush()
        return self._digest.hexdigest()


class LedgerLines(Lines):
    """Journal that writes a line `{"table": …, "row": …}` for each row: amounts are decimal text, times ISO 8601.

    Every change of a position writes its row again; its last line has the final state.
    """

    _encoder = msgspec.json.Encoder()

    def open(self, followed: ModelAccount) -> None:
        """Write the row of an account's first run."""
        run = msgspec.structs.asdict(followed.account.run)
        self._add("runs", {"account_id": followed.account.id, **run, "ended_at": None})

    def snapshot(self, snapshot: Snapshot) -> None:
        """Ignore snapshots: they follow from the ledger and the prices."""

    def post(self, posting: Posting) -> None:
        """Write the rows of a posting."""
        for table, row in posting_rows(posting):
            self._add(table, row)

    def _add(self, table: str, row: dict[str, Any]) -> None:
        self.add(self._encoder.encode({"table": table, "row": row}))
