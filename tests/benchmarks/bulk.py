"""Histories in bulk for benchmarks: months of many models in minutes, with simulated decisions and exact books.

Each process trades some of the models through the whole period, in one transaction, and copies their rows.
"""

import asyncio
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from benchmarks.simulated_decisions import WIDE_LIMITS, InventedDecisions
from msgspec.structs import replace

from trader.agents.domain.entrants import FIRST
from trader.agents.domain.invocations import Invocation, Step, ToolCall
from trader.agents.domain.models import Model
from trader.agents.entrants import Entrants
from trader.agents.models_file import ModelEntry
from trader.agents.payloads import Payload
from trader.agents.record import InvocationRecord
from trader.agents.sql.models import select_models
from trader.backtest.accounts import ModelAccount
from trader.backtest.advance import Journal
from trader.backtest.history import history_database, past_of
from trader.backtest.market import BacktestMarket
from trader.backtest.run import Backtest
from trader.backtest.values import AccountValues
from trader.commands.models_seed import Opening, create_models
from trader.commands.progress import Progress
from trader.composition.external import make_source, settle_seed
from trader.core.clock import SystemClock, floor_time, iso, moment_of
from trader.core.errors import StartError
from trader.core.money import ZERO
from trader.core.variant_id import VariantId
from trader.database.leadership import update_term
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database, connect_alone
from trader.database.schema import apply_schema, open_database
from trader.exchange.domain.account import Account, AppliedTick
from trader.exchange.domain.ledger import ExchangeRules, Posting, merge
from trader.exchange.protocol import rules_of
from trader.exchange.sql.accounts import (
    DatabaseIdentity,
    select_accounts,
    update_processed_until,
    upsert_service_state,
)
from trader.exchange.sql.ledger import LedgerRow, request_row, write_postings
from trader.market.domain.markets import SimulatedMarket
from trader.market.sources.rows import preset_rows
from trader.market.sources.synthetic import SyntheticPast, SyntheticSource
from trader.portfolio.domain.histories import Snapshot
from trader.settings.settings import Settings

CYCLE_MINUTES: Final = 13
"""Default minutes between decisions: a hundred models make a million decisions in 90 days."""

BATCH: Final = 20_000
"""Number of snapshots buffered before they are copied."""

MODELS_PER_PROCESS_MIN: Final = 4
TIMEOUT_S: Final = 600.0

LANGUAGE_MODELS: Final = (
    ("DeepSeek", "deepseek/deepseek-chat"),
    ("Qwen", "qwen/qwen3-max"),
    ("GPT", "openai/gpt-5-mini"),
    ("Claude", "anthropic/claude-sonnet"),
    ("Gemini", "google/gemini-flash"),
    ("Grok", "x-ai/grok-fast"),
    ("Llama", "meta-llama/llama-4-maverick"),
    ("Mistral", "mistralai/mistral-medium"),
)

# The sums come from the rollup of the accounts.
UPSERT_ALL_VARIANT_HOURS: Final = """
INSERT INTO variant_hourly (hour, variant, total, count)
SELECT h.hour, m.variant, sum(h.total), sum(h.count)
FROM portfolio_hourly h JOIN models m ON m.id = h.account_id
GROUP BY h.hour, m.variant
"""


class Plan(NamedTuple):
    """The work of one process. Payloads are written for invocations since `payloads_from`."""

    dsn: str
    term: int
    seed: int
    rows: Mapping[str, SimulatedMarket]
    span: range
    rules: ExchangeRules
    cycle: int
    payloads_from: datetime
    accounts: tuple[tuple[Model, Account], ...]


async def seed_season(
    dsn: str, days: float, entries: Sequence[ModelEntry], *, cycle: int = CYCLE_MINUTES, shown: bool = True
) -> None:
    """Trade the last days of the synthetic market for these models, in a database without a history or a service."""
    settings = Settings.load({"SNAPSHOT_RETENTION_DAYS": "365"}, None, demo=True)
    source = make_source(settings)
    assert isinstance(source, SyntheticSource)
    end = floor_time(SystemClock().now(), timedelta(minutes=1))
    start = end - timedelta(days=days)
    progress = Progress(start, end)
    async with open_database(dsn, of_any_version=True) as database:
        await apply_schema(database)
        async with database.transaction() as conn:
            opening = Opening(settings.initial_capital, settings.quote_currency, settings.max_accounts, is_live=False)
            await create_models(conn, entries, start, opening)
    async with history_database(dsn) as database:
        await settle_seed(source, database, is_written=True)
        past = past_of(source, settings, start, end)
        await _write_season(database, dsn, settings, past, cycle, progress.show if shown else lambda _: None)
    progress.end()


def language_models(count: int) -> list[ModelEntry]:
    """Return inactive language models, spread over the variants: their history needs no key, but their trading does."""
    entries = []
    for number in range(count):
        rank, place = divmod(number, len(VariantId))
        variant = list(VariantId)[place]
        rank, place = divmod(rank, len(LANGUAGE_MODELS))
        name, router_model = LANGUAGE_MODELS[place]
        model_id = f"{name.lower()}-{variant.lower()}"
        if rank:
            model_id, name = f"{model_id}-{rank + 1}", f"{name} {rank + 1}"
        entries.append(
            ModelEntry(
                id=model_id, name=name, variant=variant, provider="openrouter", router_model=router_model, active=False
            )
        )
    return entries


async def _write_season(
    database: Database,
    dsn: str,
    settings: Settings,
    source: SyntheticPast,
    cycle: int,
    progress: Callable[[datetime], None],
) -> None:
    """Trade a history for all models. `progress` is called with the time reached."""
    start, end = moment_of(source.span.start), moment_of(source.span.stop - 1)
    async with database.transaction() as conn:
        accounts = await select_accounts(conn)
        pairs = [(model, accounts[model.id]) for model in await select_models(conn)]
        await ensure_partitions(conn, start, end)
        await upsert_service_state(conn, DatabaseIdentity(source.identity, "simulated"))
        term = await update_term(conn)
    entrants = Entrants(database, settings)
    for model, _ in pairs:
        await entrants.answered(await entrants.enter(model, start), model.router_model_name, start)
    count = max(1, min(os.cpu_count() or 1, len(pairs) // MODELS_PER_PROCESS_MIN))
    rules, payloads_from = rules_of(settings, source.markets), end - timedelta(days=settings.snapshot_retention_days)
    rows = preset_rows(settings.venue_preset, settings.markets_file)
    rows = {symbol: rows[symbol] for symbol in source.markets}
    assert source.seed is not None
    seed = source.seed.value
    plans = [
        Plan(dsn, term, seed, rows, source.span, rules, cycle, payloads_from, tuple(pairs[number::count]))
        for number in range(count)
    ]
    await _run(plans, lambda part: progress(start + (end - start) * part))
    marks = {symbol: quote.mark for symbol, quote in source.tick(source.span.stop - 1).quotes.items()}
    async with database.transaction() as conn:
        await conn.execute(UPSERT_ALL_VARIANT_HOURS, timeout=TIMEOUT_S)
        await update_processed_until(conn, term, AppliedTick(0, end), marks)
    async with database.connection() as conn:  # otherwise autovacuum does it later, competing with the first readers
        await conn.execute("VACUUM (ANALYZE)", timeout=TIMEOUT_S)


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
    market = await BacktestMarket.open(SyntheticPast(plan.seed, list(plan.rows), plan.rows, plan.span), ())
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


class BulkJournal(Journal):
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

    def snapshots(self, values: AccountValues) -> None:
        self._snapshots += values.snapshots()

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
        await self._conn.copy_records_to_table(table, records=rows, columns=columns, timeout=TIMEOUT_S)


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
