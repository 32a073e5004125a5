"""Histories: past days of the synthetic market, traded by a backtest that writes to a service's database.

The rule agents decide through the service's own workflow.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

import msgspec

from trader.agents.domain.models import Model, rule_model
from trader.agents.observer import TRADES_SHOWN
from trader.agents.providers.provider import RuleProvider
from trader.agents.sql.agent_view import select_run_past
from trader.agents.sql.models import lock_history, select_models, upsert_model
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import BacktestAccount, DecisionSource, Idle, ModelAccount, model_account
from trader.backtest.baselines import BaselineAccount, open_baselines
from trader.backtest.market import BacktestMarket
from trader.backtest.output import DatabaseJournal
from trader.backtest.run import Backtest
from trader.backtest.sources import WorkflowSource
from trader.core.clock import SystemClock, epoch_second, floor_time, iso, moment_of
from trader.core.events import EventBus
from trader.core.variant_id import VariantId
from trader.database.leadership import LeaderLock
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.protocol import rules_of
from trader.exchange.sql.accounts import DatabaseIdentity, insert_account
from trader.market.sources.rows import preset_rows
from trader.market.sources.source import MarketSource
from trader.market.sources.synthetic import SyntheticPast, SyntheticSource
from trader.portfolio.domain.baselines import BaselineState
from trader.portfolio.sql.snapshots import select_baseline_states, select_run_hours
from trader.settings.settings import Settings

DEMO_SPAN: Final = timedelta(days=3)
DEMO_CYCLE: Final = timedelta(minutes=30)
"""Long enough for a start within seconds; rule agents decide on closed candles of 15 minutes or more."""

ESTIMATED_FROM: Final = 0.01
"""The share of a history after which the remaining time can be estimated."""

PROGRESS_EVERY_S: Final = 2.0
"""How often the progress of a demo's history is logged, in real time."""

log = logging.getLogger("trader")


class PastAgent(WorkflowSource):
    """A rule agent that decides through the service's workflow before `ends_at`, at most once per `cycle`."""

    is_counted_by_rows = True

    def __init__(self, model: Model, settings: Settings, ends_at: datetime, cycle: timedelta) -> None:
        super().__init__(model, RuleProvider(), settings, ends_at)
        self.strategy = VARIANTS[model.variant].agent()
        self._every_s = max(self._every_s, int(cycle.total_seconds()))
        self._ends = epoch_second(ends_at)

    def next_after(self, second: int) -> int | None:
        due = super().next_after(second)
        return due if due is not None and due < self._ends else None


@asynccontextmanager
async def history_database(dsn: str) -> AsyncIterator[Database]:
    """Open a database to write a history into it; commands that add models wait until it is closed.

    Its commits do not wait for the disk: rows lost in a server crash are written again.
    """
    async with AsyncExitStack() as stack:
        database = await Database.connect(f"{dsn}{'&' if '?' in dsn else '?'}synchronous_commit=off")
        stack.push_async_callback(database.close)
        conn = await stack.enter_async_context(database.transaction())
        await lock_history(conn)
        yield database


def past_of(source: SyntheticSource, settings: Settings, start: datetime, end: datetime) -> SyntheticPast:
    """Return the past of the synthetic market from `start` to `end`, both included."""
    assert source.seed is not None, "a past is traded only in a database with a seed"
    rows = preset_rows(settings.venue_preset, settings.markets_file)
    span = range(epoch_second(start), epoch_second(end) + 1)
    past = SyntheticPast(None, settings.markets, rows, span)
    past.use_seed(source.seed)
    return past


async def write_history(
    database: Database,
    settings: Settings,
    source: SyntheticPast,
    cycle: timedelta,
    progress: Callable[[datetime], None],
) -> str:
    """Let the rule models trade a past. Return a line for the operator.

    No service may use the database. `progress` is called with the time reached.

    :raises StartError: the database belongs to another market, or its books do not balance
    """
    start, end = moment_of(source.span.start), moment_of(source.span.stop - 1)
    intervals = {each for variant in VARIANTS.values() for each in variant.agent.intervals}
    market = await BacktestMarket.open(source, intervals)
    books = Accounts(database, LedgerWriter(database), EventBus())
    await books.lead(DatabaseIdentity(source.identity, "simulated"), settings.markets, end)
    try:
        async with database.transaction() as conn:
            await ensure_partitions(conn, start, end)
            models = [model for model in await select_models(conn) if model.id in books.by_id]
            seen = max(start, books.processed_until or start)
            accounts = [
                model_account(model, _source_of(model, settings, end, cycle), settings, books.by_id[model.id])
                for model in models
            ]
            for followed in accounts:
                if followed.account.run.started_at < start:
                    await _read_past(conn, followed, market, seen)
            baselines = await _reopen_baselines(conn, market, seen) or open_baselines(market, settings, ())
        journal = DatabaseJournal(database, settings)
        run = Backtest(market, rules_of(settings, market.markets), accounts, baselines, [journal])
        assert books.term is not None, "it has just begun"
        await journal.enter(start, books.term, baselines, books.next_tick(start).number)
        for reached in run.run():
            if journal.is_full and not run.is_ahead:
                await journal.write(reached, run.marks())
            if run.engine.is_due:
                await run.engine.invoke()
            progress(reached)
        await journal.write(run.ends_at, run.marks())
    finally:
        await books.resign()
    return f"The history from {iso(start)} to {iso(end)} is written."


def _source_of(model: Model, settings: Settings, end: datetime, cycle: timedelta) -> DecisionSource:
    is_agent = model.active and model.provider == "rules"
    return PastAgent(model, settings, end, cycle) if is_agent else Idle()


async def _read_past(conn: Connection, followed: ModelAccount, market: BacktestMarket, seen: datetime) -> None:
    """Read the history of an account that has processed every tick until a time."""
    account = followed.account
    _, record = await select_run_past(conn, account.id, account.run.id, TRADES_SHOWN, list(market.markets))
    followed.state = BaselineState(account=account, **msgspec.structs.asdict(record))
    await _resume(conn, followed, seen)


async def _reopen_baselines(conn: Connection, market: BacktestMarket, seen: datetime) -> list[BaselineAccount]:
    """Return the saved baselines whose positions are all in this market. None of them makes any more decisions."""
    baselines = []
    for baseline, state, _ in await select_baseline_states(conn):
        if state.account.positions.keys() <= market.markets.keys():
            followed = BaselineAccount(baseline, Idle(), state.account)
            followed.state = state
            await _resume(conn, followed, seen)
            baselines.append(followed)
    return baselines


async def _resume(conn: Connection, followed: BacktestAccount, seen: datetime) -> None:
    run = followed.account.run
    first_hour = floor_time(run.started_at, timedelta(hours=1))
    followed.resume(await select_run_hours(conn, [(followed.account.id, run.id, first_hour)]), seen)
    await followed.read_equity(conn, seen)


def log_progress(
    start: datetime, end: datetime, timer: Callable[[], float] = time.monotonic
) -> Callable[[datetime], None]:
    """Return a callback of `write_history` that logs a bar and the time left, every `PROGRESS_EVERY_S` seconds."""
    began_s = logged_s = timer()

    def progress(reached: datetime) -> None:
        nonlocal logged_s
        now_s, part = timer(), (reached - start) / (end - start)
        if part < ESTIMATED_FROM or now_s - logged_s < PROGRESS_EVERY_S:
            return
        logged_s = now_s
        left_s = (now_s - began_s) * (1 - part) / part
        log.info("[%-20s] %3.0f %% of the history, about %.0f s left", "#" * round(20 * part), 100 * part, left_s)

    return progress


async def write_demo_history(settings: Settings, source: MarketSource, dsn: str) -> None:
    """Let the rule agents of a demo trade the last three days, when its database is empty and no service uses it."""
    if not settings.demo_history or not isinstance(source, SyntheticSource):
        return
    async with AsyncExitStack() as stack:
        lock = LeaderLock(dsn)
        stack.push_async_callback(lock.release)
        if not await lock.try_acquire():
            return
        database = await stack.enter_async_context(history_database(dsn))
        end = floor_time(SystemClock().now(), timedelta(minutes=1))
        start = end - DEMO_SPAN
        async with database.transaction() as conn:
            if await select_models(conn):
                return
            await open_models(conn, [rule_model(variant, start) for variant in VariantId], settings, start)
        log.info("the rule agents trade the last %d days; --demo=fresh leaves them out", DEMO_SPAN.days)
        began_s = time.monotonic()
        past = past_of(source, settings, start, end)
        await write_history(database, settings, past, DEMO_CYCLE, log_progress(start, end))
        log.info("the history took %.1f s", time.monotonic() - began_s)


async def open_models(conn: Connection, models: Sequence[Model], settings: Settings, at: datetime) -> None:
    """Add models with their accounts, which open at a time."""
    for model in models:
        account = unopened_account(model.id, settings.initial_capital, settings.quote_currency, at)
        await upsert_model(conn, model)
        await insert_account(conn, model.id, account.run)
