"""Output of a running backtest: its ledger, decisions and tables, its database, and the handling of a full disk.

The database has the rows that a service would have written, by the same statements, in batches.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from io import RawIOBase
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from trader.agents.domain.entrants import Entrant
from trader.agents.entrants import Entrants
from trader.agents.payloads import PayloadPacker
from trader.agents.record import InvocationRecord
from trader.agents.sql.entrants import upsert_cycles
from trader.agents.sql.invocations import insert_invocation, insert_payload
from trader.agents.sql.models import upsert_model
from trader.backtest.accounts import Idle, ModelAccount
from trader.backtest.advance import Journal
from trader.backtest.baselines import BaselineAccount
from trader.backtest.run import Backtest
from trader.backtest.sources import AiSource, RecordingStrategySource, ReplayedDecisions
from trader.backtest.values import AccountValues
from trader.core.clock import iso
from trader.core.errors import StartError, Unavailable
from trader.core.files import append
from trader.database.leadership import update_term
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import AppliedTick, Marks, Trade
from trader.exchange.domain.ledger import Posting
from trader.exchange.sql.accounts import (
    DatabaseIdentity,
    insert_account,
    select_identity,
    update_lived_until,
    update_processed_until,
    upsert_service_state,
)
from trader.exchange.sql.ledger import posting_rows, write_postings
from trader.market.domain.markets import STALE_AFTER
from trader.portfolio.domain.histories import Snapshot
from trader.portfolio.sql.snapshots import SavedBaseline, insert_snapshots, upsert_baselines
from trader.portfolio.tables import Results, empty
from trader.settings.settings import Settings

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
        append(self._file, content)
        self._digest.update(content)
        self.lines, self.size = self.lines + self._kept, self.size + len(content)
        self._kept = 0
        self._buffer.clear()

    def digest(self) -> str:
        """Return the SHA-256 of all lines, in hexadecimal."""
        self.flush()
        return self._digest.hexdigest()


class LedgerLines(Lines, Journal):
    """Journal that writes a line `{"table": …, "row": …}` for each row: amounts are decimal text, times ISO 8601.

    Every change of a position writes its row again; its last line has the final state.
    """

    _encoder = msgspec.json.Encoder()

    def open(self, followed: ModelAccount) -> None:
        """Write the row of an account's first run."""
        run = msgspec.structs.asdict(followed.account.run)
        self._add("runs", {"account_id": followed.account.id, **run, "ended_at": None})

    def post(self, posting: Posting) -> None:
        """Write the rows of a posting."""
        for table, row in posting_rows(posting):
            self._add(table, row)

    def _add(self, table: str, row: dict[str, Any]) -> None:
        self.add(self._encoder.encode({"table": table, "row": row}))


class DecisionLines(Lines):
    """One JSON line per invocation with decisions, in order of time for each model."""

    def take(self, accounts: Iterable[ModelAccount]) -> None:
        """Add the invocations since the last call."""
        for followed in accounts:
            if isinstance(followed.source, AiSource | RecordingStrategySource | ReplayedDecisions):
                for recorded in followed.source.recorded:
                    self.add(msgspec.json.encode(recorded))
                followed.source.recorded.clear()


class TableJournal(Journal):
    """Journal that fills the tables of a result: for the accounts, everything; for the baselines, their equity."""

    def __init__(self) -> None:
        self._tables = empty()
        self._values: list[AccountValues] = []
        self.closed: list[Trade] = []  # as in the table of trades

    def post(self, posting: Posting) -> None:
        account_id = posting.account.id
        for fill in posting.fills:
            fee = fill.fee + fill.liquidation_fee
            self._tables.fills.add(
                fill.at, account_id, fill.symbol, fill.side.value, fill.quantity, fill.price, fee, fill.maker,
                fill.cause.value,
            )  # fmt: skip
        self.closed += posting.trades

    def snapshots(self, values: AccountValues) -> None:
        self._values.append(values)

    def finish(self, accounts: Sequence[ModelAccount]) -> None:
        """Add the completed trades, and the decisions of the accounts by time."""
        by_id = {followed.account.id: followed for followed in accounts}
        for trade in self.closed:
            self._tables.trades.add(
                trade.account_id, trade.symbol, trade.side.value, trade.quantity, trade.entry_price, trade.exit_price,
                trade.leverage, trade.gross_pnl, trade.fees, trade.funding, trade.net_pnl, trade.close_reason.value,
                trade.confidence, trade.opened_at, trade.closed_at, *by_id[trade.account_id].tags_of(trade),
            )  # fmt: skip
        outcomes = [(outcome, followed.account.id) for followed in accounts for outcome in followed.outcomes]
        for (at, *rest), account_id in sorted(outcomes, key=lambda pair: (pair[0].at, pair[1])):
            self._tables.decisions.add(at, account_id, *rest)

    @cached_property
    def results(self) -> Results:
        """The tables. The equity table is filled on first access."""
        for values in self._values:
            account, count = values.account, len(values.times_ms)
            gains, worths, _ = zip(*values.values(), strict=True)
            self._tables.equity.extend(values.times, [account.id] * count, worths, [account.cash] * count, gains)
        self._values.clear()
        self._tables.equity.sort("at")
        return self._tables


BATCH: Final = 4_000
"""Maximum number of buffered postings and snapshots."""

_SEEN_TO_THE_END: Final = STALE_AFTER + timedelta(seconds=1)
"""How long after the last tick a replay ends. A service that resumes there repeats no minute."""


class DatabaseJournal(Journal):
    """Journal that buffers a backtest until `write`, so the database is always complete up to one moment.

    For sources that run the workflow, the database has everything that a service records. For others it has the number
    of invocations, and those that called more than `holding`, without their views.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._entrants = Entrants(database, settings)
        self._packer = PayloadPacker()
        self._accounts: dict[str, ModelAccount] = {}
        self._baselines: Sequence[BaselineAccount] = ()
        self._present: dict[str, Entrant] = {}
        self._postings: dict[str, list[Posting]] = {}
        self._snapshots: list[Snapshot] = []
        self._kept = 0
        self._term = self._tick_number = 0

    def open(self, followed: ModelAccount) -> None:
        """Receive a model's account; `begin` inserts both."""
        self._accounts[followed.account.id] = followed
        followed.finished = []

    def post(self, posting: Posting) -> None:
        """Buffer a posting."""
        self._postings.setdefault(posting.account.id, []).append(posting)
        self._kept += 1

    def snapshots(self, values: AccountValues) -> None:
        self._snapshots += values.snapshots()
        self._kept += len(values.times_ms)

    @property
    def is_full(self) -> bool:
        """Whether the buffer should be written."""
        return self._kept >= BATCH

    async def begin(
        self, market_identity: str, start: datetime, end: datetime, baselines: Sequence[BaselineAccount]
    ) -> None:
        """Initialize an empty database for the market of [start, end], with the models, their entrants and accounts.

        `baselines` are the reference accounts besides the models.

        :raises StartError: the database is already in use
        """
        async with self._database.transaction() as conn:
            if await select_identity(conn) is not None:
                raise StartError("The database of this backtest is not empty; give --out another folder.")
            await upsert_service_state(conn, DatabaseIdentity(market_identity, "simulated"))
            await ensure_partitions(conn, start, end)
            term = await update_term(conn)
            for followed in self._accounts.values():
                await upsert_model(conn, followed.model)
                await insert_account(conn, followed.account.id, followed.account.run)
        await self.enter(start, term, baselines)

    async def enter(
        self, start: datetime, term: int, baselines: Sequence[BaselineAccount], tick_number: int = 0
    ) -> None:
        """Write in a term from `start` on; the database has the models and their accounts, and partitions.

        `tick_number` is the place of the last tick in the order of the ticks.
        """
        self._term, self._baselines, self._tick_number = term, baselines, tick_number
        for followed in self._accounts.values():
            if isinstance(followed.source, Idle):
                continue
            entrant = await self._entrants.enter(followed.model, start)
            if not isinstance(followed.source, AiSource):
                entrant = await self._entrants.answered(entrant, followed.model.router_model_name, start)
            self._present[followed.model.id] = entrant

    async def write(self, until: datetime, marks: Marks) -> None:
        """Write the buffer, which is complete up to `until`, and the marks of that time in one transaction.

        :raises Unavailable: the database did not confirm it
        """
        records = await self._take_records()
        async with self._database.transaction() as conn:
            for record in records:
                await self._write_record(conn, record)
            await self._write_open_invocations(conn)
            await self._write_postings(conn)
            await insert_snapshots(conn, self._snapshots)
            for followed in self._accounts.values():
                if not followed.source.is_counted_by_rows:
                    await upsert_cycles(conn, self._present[followed.model.id], followed.decisions, followed.missed)
            baselines = [SavedBaseline(each.baseline, each.state.saved(), until) for each in self._baselines]
            await upsert_baselines(conn, baselines)
            await update_processed_until(conn, self._term, AppliedTick(self._tick_number, until), marks)
            await update_lived_until(conn, until + _SEEN_TO_THE_END)
        self._postings, self._snapshots, self._kept = {}, [], 0

    async def _take_records(self) -> list[InvocationRecord]:
        """Return the records since the last call, each with its model's entrant at that time."""
        records: list[InvocationRecord] = []
        for followed in self._accounts.values():
            records += followed.finished or ()
            followed.finished = []
        for record in records:
            entrant, started_at = self._present[record.model.id], record.invocation.started_at
            if record.answered_by is not None:
                entrant = await self._entrants.answered(entrant, record.answered_by, started_at)
                self._present[record.model.id] = entrant
            record.set_entrant(entrant)
        return records

    async def _write_record(self, conn: Connection, record: InvocationRecord) -> None:
        await insert_invocation(conn, record.invocation)
        await record.write(conn)
        if record.payload is not None:
            content = await self._packer.pack(record.payload)
            await insert_payload(conn, record.id, content, record.invocation.started_at)

    async def _write_open_invocations(self, conn: Connection) -> None:
        """Insert the open invocations with a finished call, so that a service that starts here can recover them."""
        for followed in self._accounts.values():
            if followed.invocation is not None and (record := followed.invocation.record).calls:
                record.set_entrant(self._present[followed.model.id])
                await insert_invocation(conn, record.invocation)

    async def _write_postings(self, conn: Connection) -> None:
        """Write the postings in order per account: each statement takes one posting per account."""
        for rank in zip_longest(*self._postings.values()):
            postings = [posting for posting in rank if posting is not None]
            written = await write_postings(conn, postings, self._term)
            if missing := {posting.account.id for posting in postings} - written:
                raise StartError(f"Another process has traded {', '.join(sorted(missing))} in this database.")


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

    async def keep(self, run: Backtest, *, is_end: bool = False) -> str | None:
        """Write the full buffers of a run, or all of them at the end. Return None, or why writing failed."""
        for file, lines in self._files.items():
            try:
                if is_end or lines.is_full:
                    lines.flush()
            except OSError as error:
                place = f"{file}, after line {lines.lines} (byte {lines.size})"
                return f"{place}: nothing can be written: {error.strerror}."
        if self._books is None or not (is_end or self._books.is_full):
            return None
        run.engine.complete()
        try:
            await self._books.write(run.reached, run.marks())
        except Unavailable as error:
            until = "nothing" if self.database_until is None else f"everything until {iso(self.database_until)}"
            return f"{error} The database has {until}."
        self.database_until = run.reached
        return None
