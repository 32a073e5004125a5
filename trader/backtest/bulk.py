"""Histories in bulk: months of many models in minutes, with simulated decisions.

Each process trades some of the models through the whole period, in one transaction, and copies their rows.
"""

import asyncio
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from msgspec.structs import replace

from trader.agents.domain.entrants import FIRST
from trader.agents.domain.invocations import Invocation, Step, ToolCall
from trader.agents.domain.models import Model
from trader.agents.entrants import Entrants
from trader.agents.payloads import Payload
from trader.agents.record import InvocationRecord
from trader.agents.sql.models import select_models
from trader.backtest.accounts import ModelAccount
from trader.backtest.market import BacktestMarket
from trader.backtest.run import Backtest
from trader.backtest.simulated_decisions import WIDE_LIMITS, InventedDecisions
from trader.core.clock import floor_time, iso, moment_of
from trader.core.errors import StartError
from trader.core.money import ZERO
from trader.database.leadership import update_term
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database, connect_alone
from trader.exchange.domain.account import Account, AppliedTick
from trader.exchange.domain.ledger import ExchangeRules, Posting, merge
from trader.exchange.protocol import rules_of
from trader.exchange.sql.accounts import (
    DatabaseIdentity,
    select_accounts,
    update_processed_until,
    upsert_service_state,
)
from trader.exchange.sql.ledger import write_postings
from trader.exchange.sql.ledger_rows import LedgerRow, request_row
from trader.market.sources.synthetic import PastParts, SyntheticPast
from trader.portfolio.domain.histories import Snapshot
from trader.seasons.sql.report import SEASON_TIMEOUT_S, upsert_all_variant_hours
from trader.settings.settings import Settings

CYCLE_MINUTES: Final = 13
"""Default minutes between decisions: a hundred models make a million decisions in 90 days."""

BATCH: Final = 20_000
"""Number of snapshots buffered before they are copied."""

MODELS_PER_PROCESS_MIN: Final = 4


class Plan(NamedTuple):
    """The work of one process. Payloads are written for invocations since `payloads_from`."""

    dsn: str
    term: int
    past: PastParts
    rules: ExchangeRules
    cycle: int
    payloads_from: datetime
    accounts: tuple[tuple[Model, Account], ...]


async def write_season(
    database: Database,
    dsn: str,
    settings: Settings,
    source: SyntheticPast,
    cycle: int,
    progress: Callable[[datetime], None],
) -> str:
    """Trade a history for all models whose accounts never traded. Return a line for the operator.

    The database must have no history, and no service may use it. `progress` is called with the time reached.
    """
    start, end = moment_of(source.span.start), moment_of(source.span.stop - 1)
    async with database.transaction() as conn:
        accounts = await select_accounts(conn)
        models = [model for model in await select_models(conn) if model.id in accounts]
        pairs = [(model, accounts[model.id]) for model in models if accounts[model.id].sequence == 1]
        await ensure_partitions(conn, start, end)
        await upsert_service_state(conn, DatabaseIdentity(source.identity, "simulated"))
        term = await update_term(conn)
    entrants = Entrants(database, settings)
    for model, _ in pairs:
        await entrants.answered(await entrants.enter(model, start), model.router_model_name, start)
    count = max(1, min(os.cpu_count() or 1, len(pairs) // MODELS_PER_PROCESS_MIN))
    rules, payloads_from = rules_of(settings, source.markets), end - timedelta(days=settings.snapshot_retention_days)
    plans = [
        Plan(dsn, term, source.parts, rules, cycle, payloads_from, tuple(pairs[number::count]))
        for number in range(count)
    ]
    await _run(plans, lambda part: progress(start + (end - start) * part))
    marks = {symbol: quote.mark for symbol, quote in source.tick(source.span.stop - 1).quotes.items()}
    async with database.transaction() as conn:
        await upsert_all_variant_hours(conn)
        await update_processed_until(conn, term, AppliedTick(0, end), marks)
    async with database.connection() as conn:  # otherwise autovacuum does it later, competing with the first readers
        await conn.execute("VACUUM (ANALYZE)", timeout=SEASON_TIMEOUT_S)
    return f"The season from {iso(start)} to {iso(end)} is written."


async def _run(plans: Sequence[Plan], progress: Callable[[float], None]) -> None:
    """Run each plan in a separate process; run a single plan in this process."""
    if len(plans) == 1:
        await _write(plans[0], progress)
        return
    spawned = multiprocessing.get_context("spawn")
    loop = asyncio.get_running_loop()
    with spawned.Manager() as manager, ProcessPoolExecutor(len(plans), spawned) as pool:
        parts = manager.dict(dict.fromkeys(range(len(plans)), 0.0))
        pending = {
            loop.run_in_executor(pool, _write_alone, plan, partial(parts.__setitem__, number))
            for number, plan in enumerate(plans)
        }
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
                progress(sum(parts.values()) / len(plans))
        except BaseException:  # also on an interrupt: the pool would wait until its processes are done
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _write_alone(plan: Plan, progress: Callable[[float], None]) -> None:
    asyncio.run(_write(plan, progress))


async def _write(plan: Plan, progress: Callable[[float], None]) -> None:
    """Trade a period for some models and write it, all or nothing. `progress` is called with the written share."""
    market = await BacktestMarket.open(SyntheticPast(*plan.past), ())
    accounts = [
        ModelAccount(model, InventedDecisions(model, market, plan.cycle), account, WIDE_LIMITS)
        for model, account in plan.accounts
    ]
    conn = await connect_alone(plan.dsn)
    try:
        async with conn.transaction():
            journal = BulkJournal(conn, plan.term, plan.payloads_from)
            run = Backtest(market, plan.rules, accounts, (), [journal])
            for reached in run.run():
                if journal.is_full:
                    await journal.write(floor_time(reached, timedelta(hours=1)))
                progress((reached - run.starts_at) / (run.ends_at - run.starts_at))
            await journal.write(run.ends_at + timedelta(minutes=1))
    finally:
        await conn.close()


class BulkJournal:
    """Journal that copies the rows that a service would have written, without links of the chain."""

    def __init__(self, conn: Any, term: int, payloads_from: datetime) -> None:
        self._conn = conn
        self._term = term
        self._payloads_from = payloads_from
        self._accounts: list[ModelAccount] = []
        self._postings: dict[str, list[Posting]] = {}
        self._snapshots: list[Snapshot] = []

    def open(self, followed: ModelAccount) -> None:
        """Receive the account of a model; both are in the database."""
        self._accounts.append(followed)
        followed.finished = []

    def post(self, posting: Posting) -> None:
        """Buffer a posting."""
        self._postings.setdefault(posting.account.id, []).append(posting)

    def snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)

    @property
    def is_full(self) -> bool:
        """Whether the buffer should be written."""
        return len(self._snapshots) >= BATCH

    async def write(self, until: datetime) -> None:
        """Write the buffer, with the snapshots before `until`, a full hour or the end of the period.

        :raises StartError: an account was traded meanwhile
        """
        written = [snapshot for snapshot in self._snapshots if snapshot.created_at < until]
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.created_at >= until]
        written.sort(key=attrgetter("created_at"))  # as a service would write them
        await self._copy_structs("portfolio_snapshots", Snapshot, written)
        await self._copy_structs("portfolio_hourly", _Hour, _hours(written))
        await self._write_records()
        postings, self._postings = self._postings, {}
        requests = list(_request_rows(chain.from_iterable(postings.values())))
        if requests:
            columns = tuple(requests[0])
            await self._copy("order_requests", columns, (tuple(row[name] for name in columns) for row in requests))
        merged = [replace(merge(each), answers=()) for each in postings.values()]
        if len(await write_postings(self._conn, merged, self._term)) < len(merged):
            raise StartError("An account was traded meanwhile; nothing of its past is written.")

    async def _write_records(self) -> None:
        records: list[InvocationRecord] = []
        for followed in self._accounts:
            records += followed.finished or ()
            followed.finished = []
        await self._copy_structs(
            "invocations", Invocation, (replace(record.invocation, entrant=FIRST) for record in records)
        )
        await self._copy_structs("invocation_steps", Step, (step for record in records for step in record.steps))
        calls = (call for record in records for call in record.calls)
        await self._copy_structs(
            "tool_calls", ToolCall, (replace(call, metadata=_json(call.metadata)) for call in calls)
        )
        await self._copy_structs("invocation_payloads", _StoredPayload, filter(None, map(self._payload, records)))

    def _payload(self, record: InvocationRecord) -> "_StoredPayload | None":
        """Return the row of an invocation's payload; None if it has none, or if the payload would have been deleted."""
        invocation, model = record.invocation, record.model
        if not model.is_ai or invocation.response is None or invocation.started_at < self._payloads_from:
            return None
        messages = [{"role": "user", "content": f"{model.name} at {iso(invocation.started_at)}"}]
        payload = Payload(messages=messages, answers=[invocation.response])
        return _StoredPayload(record.id, zlib.compress(msgspec.json.encode(payload), 1), invocation.started_at)

    async def _copy_structs(self, table: str, kind: type[msgspec.Struct], structs: Iterable[msgspec.Struct]) -> None:
        await self._copy(table, kind.__struct_fields__, map(msgspec.structs.astuple, structs))

    async def _copy(self, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
        await self._conn.copy_records_to_table(table, records=rows, columns=columns, timeout=SEASON_TIMEOUT_S)


class _Hour(msgspec.Struct):
    """A row of `portfolio_hourly`."""

    account_id: str
    hour: datetime
    run_id: UUID
    total: Decimal
    count: int
    last: Decimal
    last_at: datetime
    leverage: float


class _StoredPayload(msgspec.Struct):
    """A row of `invocation_payloads`."""

    invocation_id: UUID
    payload: bytes
    created_at: datetime


def _hours(snapshots: Iterable[Snapshot]) -> Iterator[_Hour]:
    """Yield the `portfolio_hourly` rows of snapshots, which are ascending and complete hours."""

    def hour_of(snapshot: Snapshot) -> tuple[str, datetime]:
        return snapshot.account_id, snapshot.created_at.replace(minute=0, second=0, microsecond=0)

    for (account_id, hour), group in groupby(sorted(snapshots, key=hour_of), key=hour_of):
        members = list(group)
        last = members[-1]
        yield _Hour(
            account_id=account_id,
            hour=hour,
            run_id=last.run_id,
            total=sum((each.net_portfolio for each in members), ZERO),
            count=len(members),
            last=last.net_portfolio,
            last_at=last.created_at,
            leverage=max(each.leverage or 0.0 for each in members),
        )


def _request_rows(postings: Iterable[Posting]) -> Iterator[LedgerRow]:
    for posting in postings:
        for answer in posting.answers:
            yield request_row(posting, answer) | {"answer": _json(answer)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
