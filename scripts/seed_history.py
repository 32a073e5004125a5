"""Histories of rule models: the real service core, run in lockstep over past days of the synthetic market.

Exchange, agents, guard, records and snapshots are those of the service. Prices are seen every few seconds instead of
every second and models decide every few minutes instead of every minute, so that a day takes seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Final

from trader.clock import Clock, LockstepClock, epoch_second, iso
from trader.domain.market.markets import Tick
from trader.domain.market.presets import PRESET_MARKETS
from trader.gateways.agents.providers import Providers, RuleProvider
from trader.gateways.market.synthetic import SyntheticSource
from trader.schedulers import Job, Schedulers
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.snapshots import Portfolio
from trader.settings import Settings
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database

STEP: Final = timedelta(seconds=5)
SNAPSHOTS_EVERY: Final = timedelta(minutes=1)


class PastMarket(SyntheticSource):
    """The synthetic market from `start` to `end`, as fast as the service can follow. Sets `finished` at its end."""

    def __init__(self, settings: Settings, start: datetime, end: datetime) -> None:
        super().__init__(settings.seed, settings.market_symbols, PRESET_MARKETS[settings.venue_preset])
        self.finished = asyncio.Event()
        self._start = start
        self._end = end

    def clock(self, resume_at: datetime | None) -> Clock:
        return LockstepClock(resume_at or self._start)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        at = after
        while (at := at + STEP) <= self._end:
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
    cycle: timedelta,
    progress: Callable[[datetime, int], None],
) -> str:
    """Let the rule models trade from `start` to `end`. Return a line for the operator.

    No service may use the database. `progress` is called with the time reached and the number of accounts.
    """
    async with database.connection() as conn:
        await ensure_partitions(conn, start, end)
    source = PastMarket(settings, start, end)
    clock, events = source.clock(None), EventBus()
    market = MarketFeed(source, clock, patience=2 * STEP + timedelta(milliseconds=settings.latency_ms))
    accounts, halts = Accounts(database, LedgerWriter(database), events), Halts(database, clock, events)
    exchange = PaperExchange(database, market, clock, settings, accounts, halts)
    portfolio = Portfolio(database, exchange, clock, settings)
    agents = Agents(database, exchange, market, clock, events, settings, Providers(RuleProvider()))

    async def take_snapshots(now: datetime) -> None:
        await portfolio.take_snapshots(now)
        progress(now, len(exchange.accounts))

    jobs = (
        Job("tradeExecutor", cycle, agents.start_batch),
        Job("portfolioSnapshot", SNAPSHOTS_EVERY, take_snapshots),
    )
    async with AsyncExitStack() as stack:
        await exchange.lead()
        stack.push_async_callback(exchange.resign)
        await agents.start()
        stack.push_async_callback(agents.close)
        schedulers = Schedulers(jobs, clock)
        await schedulers.start()
        stack.push_async_callback(schedulers.close)
        feed = asyncio.create_task(market.run(exchange.on_tick, start))
        finished = asyncio.create_task(source.finished.wait())
        try:
            await asyncio.wait([feed, finished], return_when=asyncio.FIRST_COMPLETED)
            if feed.done():
                feed.result()
        finally:
            feed.cancel()
            finished.cancel()
            await asyncio.wait([feed, finished])
        progress(end, len(exchange.accounts))
    return f"The history from {iso(start)} to {iso(end)} is written."
