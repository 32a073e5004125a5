"""Histories of rule models: the real service core, run in lockstep over past days of the synthetic market.

Exchange, agents, guard, records and snapshots are those of the service. Prices and decisions are less frequent
than in the service (`Pace`), so that a day takes seconds.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from trader.clock import Clock, LockstepClock, SystemClock, epoch_second, floor_time, iso
from trader.domain.market.markets import Tick
from trader.external import ExternalSystems, settle_seed
from trader.gateways.agents.providers import Providers, RuleProvider
from trader.gateways.market.rows import preset_rows
from trader.gateways.market.synthetic import SyntheticSource
from trader.schedulers import Job, Schedulers
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.baselines import Baselines
from trader.services.portfolio.snapshots import Portfolio
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.leadership import LeaderLock
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database

DEMO_SPAN: Final = timedelta(days=3)

PROGRESS_EVERY_S: Final = 2.0
"""How often the progress of a demo's history is logged, in real time."""

_MINUTE: Final = timedelta(minutes=1)

log = logging.getLogger("trader")


class Pace(NamedTuple):
    """How often prices are seen, snapshots are taken, and models decide."""

    ticks: timedelta
    snapshots: timedelta
    cycle: timedelta


DEMO_PACE: Final = Pace(ticks=timedelta(seconds=30), snapshots=15 * _MINUTE, cycle=30 * _MINUTE)
"""Coarse enough for a start within seconds; rule agents decide on closed candles of 15 minutes or more."""


class PastMarket(SyntheticSource):
    """The synthetic market from `start` to `end`, as fast as the service can follow. Sets `finished` at its end."""

    def __init__(self, settings: Settings, start: datetime, end: datetime, step: timedelta) -> None:
        super().__init__(settings.seed, settings.markets, preset_rows(settings.venue_preset, settings.markets_file))
        self.finished = asyncio.Event()
        self._start = start
        self._end = end
        self._step = step

    def clock(self, resume_at: datetime | None) -> Clock:
        return LockstepClock(resume_at or self._start)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        at = after
        while (at := at + self._step) <= self._end:
            await clock.advance_to(at)
            await asyncio.sleep(0)
            yield self.tick(epoch_second(at))
        await clock.advance_to(self._end)
        self.finished.set()
        await asyncio.Event().wait()


async def write_history(
    database: Database,
    settings: Settings,
    start: datetime,
    end: datetime,
    pace: Pace,
    progress: Callable[[datetime, int], None],
) -> str:
    """Let the rule models trade from `start` to `end`. Return a line for the operator.

    No service may use the database. `progress` is called with the time reached and the number of accounts.
    """
    await _make_partitions(database, start, end)
    source = PastMarket(settings, start, end, pace.ticks)
    await settle_seed(source, database, is_written=True)
    clock, events = source.clock(None), EventBus()
    market = MarketFeed(source, clock, patience=2 * pace.ticks + timedelta(milliseconds=settings.latency_ms))
    accounts = Accounts(database, LedgerWriter(database), events)
    halts = Halts(database, clock, events)
    exchange = PaperExchange(database, market, clock, settings, accounts, halts, checkpoint_every=pace.snapshots)
    portfolio = Portfolio(database, exchange, clock, settings)
    baselines = Baselines(database, exchange, market, clock, settings)
    agents = Agents(database, exchange, market, clock, events, settings, Providers(RuleProvider()))

    async def take_snapshots(now: datetime) -> None:
        await portfolio.take_snapshots(now)
        if not now.minute:
            await baselines.decide(now, ())  # no rule agents: those are what trades here
            await baselines.record(now)
        progress(now, len(exchange.accounts))

    async def on_tick(tick: Tick) -> None:
        await exchange.on_tick(tick)
        await baselines.on_tick(tick)

    batches = Job("tradeExecutor", pace.cycle, agents.start_batch)
    snapshots = Job("portfolioSnapshot", pace.snapshots, take_snapshots)
    async with AsyncExitStack() as stack:
        await exchange.lead()
        stack.push_async_callback(exchange.resign)
        await baselines.lead()
        await agents.start()
        stack.push_async_callback(agents.close)
        schedulers = Schedulers((batches, snapshots), clock)
        await schedulers.start()
        stack.push_async_callback(schedulers.close)
        await _until_finished(source, market.run(on_tick, start))
        await baselines.record(end)
        progress(end, len(exchange.accounts))
    return f"The history from {iso(start)} to {iso(end)} is written."


async def _make_partitions(database: Database, start: datetime, end: datetime) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, start, end)


async def _until_finished(source: PastMarket, run: Coroutine[Any, Any, None]) -> None:
    """Follow the market until its end, or until that fails."""
    feed, finished = asyncio.create_task(run), asyncio.create_task(source.finished.wait())
    try:
        await asyncio.wait([feed, finished], return_when=asyncio.FIRST_COMPLETED)
        if feed.done():
            feed.result()
    finally:
        feed.cancel()
        finished.cancel()
        await asyncio.wait([feed, finished])


def log_progress(
    start: datetime, end: datetime, timer: Callable[[], float] = time.monotonic
) -> Callable[[datetime, int], None]:
    """Return a callback of `write_history` that logs a bar and the time left, every `PROGRESS_EVERY_S` seconds."""
    began_s = logged_s = timer()

    def progress(reached: datetime, _: int) -> None:
        nonlocal logged_s
        now_s, part = timer(), (reached - start) / (end - start)
        if part <= 0 or now_s - logged_s < PROGRESS_EVERY_S:
            return
        logged_s = now_s
        left_s = (now_s - began_s) * (1 - part) / part
        log.info("[%-20s] %3.0f %% of the history, about %.0f s left", "#" * round(20 * part), 100 * part, left_s)

    return progress


async def write_demo_history(settings: Settings, external: ExternalSystems) -> None:
    """Let the rule agents of a demo trade the last three days, when its database is empty and no service uses it."""
    if not settings.demo_history or settings.market_source != "synthetic" or not external.is_written:
        return
    async with AsyncExitStack() as stack:
        lock = LeaderLock(external.dsn)
        stack.push_async_callback(lock.release)
        if not await lock.try_acquire():
            return
        async with external.database.connection() as conn:
            if await select_models(conn):
                return
        # A crash of the server may lose the last moments: then the service goes on from those before.
        database = await Database.connect(f"{external.dsn}{'&' if '?' in external.dsn else '?'}synchronous_commit=off")
        stack.push_async_callback(database.close)
        end = floor_time(SystemClock().now(), _MINUTE)
        log.info("the rule agents trade the last %d days; --demo=fresh leaves them out", DEMO_SPAN.days)
        began_s = time.monotonic()
        progress = log_progress(end - DEMO_SPAN, end)
        await write_history(database, settings, end - DEMO_SPAN, end, DEMO_PACE, progress)
        log.info("the history took %.1f s", time.monotonic() - began_s)
