"""Ledger of a backtest as JSON lines: every row of every posting, in order, and the SHA-256 over all of them."""

import hashlib
from typing import Any, BinaryIO

import msgspec

from trader.domain.exchange.ledger import Posting
from trader.domain.portfolio.snapshots import Snapshot
from trader.services.backtest.participant import Participant
from trader.store.exchange.ledger import posting_rows

_BUFFER_MAX = 1 << 16


class LedgerLines:
    """Writes a line `{"table": …, "row": …}` for each row. Amounts are decimal text, times ISO 8601 in UTC.

    A position's row is written again with every change of it; its last line says what became of it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self.rows = 0

    def open(self, one: Participant) -> None:
        """Take the beginning of an account's run."""
        run = msgspec.structs.asdict(one.account.run)
        self._add("runs", {"account_id": one.account.id, **run, "ended_at": None})

    def snapshot(self, snapshot: Snapshot) -> None:
        """Leave out what follows from the ledger and the prices."""

    def post(self, posting: Posting) -> None:
        """Take a change of an account."""
        for table, row in posting_rows(posting):
            self._add(table, row)

    def _add(self, table: str, row: dict[str, Any]) -> None:
        self._buffer += self._encoder.encode({"table": table, "row": row}) + b"\n"
        self.rows += 1
        if len(self._buffer) > _BUFFER_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. Raises `OSError`."""
        self._digest.update(self._buffer)
        self._file.write(self._buffer)
        self._buffer.clear()

    def digest(self) -> str:
        """Return the SHA-256 of all lines, in hexadecimal."""
        self.flush()
        return self._digest.hexdigest()
