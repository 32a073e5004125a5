"""A past for rule models: the real service core, run in lockstep over days of the synthetic market that are gone.

Exchange, agents, guard, records and snapshots are those of the service; only time is another. Markets are looked at
every few seconds instead of every second, and models are asked every few minutes instead of every minute, so that a
day takes seconds.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta

from trader.clock import Clock, LockstepClock, iso
from trader.domain.market.markets import Tick
from trader.errors import StartError
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
from trader.store.agents.invocations import select_models
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_accounts, select_processed_until

SNAPSHOTS_EVERY = timedelta(minutes=1)
BAR_WIDTH = 30


@dataclass(frozen=True)
class Pace:
    """How closely the past is followed: markets by `step`, decisions by `cycle`."""

    step: timedelta = timedelta(seconds=5)
    cycle: timedelta = timedelta(minutes=5)


class PastMarket(SyntheticSource):
    """The synthetic market from `start` to `end`, as fast as everybody can follow. `finished` is set at its end."""

    def __init__(self, settings: Settings, start: datetime, end: datetime, step: timedelta) -> None:
        super().__init__(settings.seed, settings.market_symbols)
        self.start = start
        self.end = end
        self.finished = asyncio.Event()
        self._step = step

    def clock(self, resume_at: datetime | None) -> Clock:
        return LockstepClock(resume_at or self.start)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        at = after
        while (at := at + self._step) <= self.end:
            await clock.lead(at)
            await asyncio.sleep(0)
            yield self.tick(int(at.timestamp()))
        await clock.lead(self.end)
        self.finished.set()
        await asyncio.Event().wait()


class Progress:
    """A bar on a terminal; elsewhere a line per tenth. At every change of time that is seen."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self._start = start
        self._end = end
        self._began_s = time.monotonic()
        self._shown = -1

    def show(self, now: datetime, account_count: int) -> None:
        part = (now - self._start) / (self._end - self._start)
        is_terminal = sys.stderr.isatty()
        stage = int(part * (1000 if is_terminal else 10))
        if stage == self._shown:
            return
        self._shown = stage
        spent_s = time.monotonic() - self._began_s
        left = "" if part < 0.005 else f", {timedelta(seconds=round(spent_s / part - spent_s))} left"
        bar = "#" * int(part * BAR_WIDTH)
        days = (now - self._start) / timedelta(days=1)
        line = f"[{bar:<{BAR_WIDTH}}] {part:4.0%} {days:.1f} days of {account_count} accounts{left}"
        print(f"\r{line:<90}" if is_terminal else line, end="" if is_terminal and part < 1 else "\n", file=sys.stderr)


async def write_history(database: Database, settings: Settings, start: datetime, end: datetime, pace: Pace) -> str:
    """Let the rule models trade from `start` to `end`; a history that is there already is continued.

    Nobody else may be at work on the database, and `refuse_history` must have let it pass.
    """
    async with database.connection() as conn:
        past_end = await select_processed_until(conn)
        start = floor_to_minute(past_end or start)
        await ensure_partitions(conn, start, end)
    if start >= end:
        return f"The history is complete up to {iso(start)}."
    await _run(database, settings, PastMarket(settings, start, end, pace.step), pace)
    where = "" if past_end is None else ", where the past of this database ended,"
    return f"The history from {iso(start)}{where} to {iso(end)} is written."


def floor_to_minute(moment: datetime) -> datetime:
    """The full minute at or before the moment."""
    return moment.replace(second=0, microsecond=0)


async def refuse_history(conn: Connection, start: datetime) -> None:
    """See whether these models and accounts can have a past from `start`, or from where theirs ended.

    :raises StartError: a model is not a rule agent, or an account was opened later
    """
    start = floor_to_minute(await select_processed_until(conn) or start)
    others = [model.id for model in await select_models(conn) if model.active and model.provider != "rules"]
    if others:
        raise StartError(f"--history is traded by rule agents; these models are none: {', '.join(others[:10])}.")
    late = [one.id for one in (await select_accounts(conn)).values() if one.run.started_at > start]
    if late:
        raise StartError(f"These accounts were opened after the history begins: {', '.join(late[:10])}.")


async def _run(database: Database, settings: Settings, source: PastMarket, pace: Pace) -> None:
    clock, events = source.clock(None), EventBus()
    market = MarketFeed(source, clock, patience=2 * pace.step + timedelta(milliseconds=settings.latency_ms))
    accounts, halts = Accounts(database, LedgerWriter(database), events), Halts(database, clock, events)
    exchange = PaperExchange(database, market, clock, settings, accounts, halts)
    portfolio = Portfolio(database, exchange, clock, settings)
    agents = Agents(database, exchange, market, clock, events, settings, Providers(RuleProvider()))
    progress = Progress(source.start, source.end)

    async def take_snapshots(now: datetime) -> None:
        await portfolio.take_snapshots(now)
        progress.show(now, len(exchange.accounts))

    jobs = (
        Job("tradeExecutor", pace.cycle, agents.start_batch),
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
        await _follow(market, exchange, source)
        progress.show(source.end, len(exchange.accounts))


async def _follow(market: MarketFeed, exchange: PaperExchange, source: PastMarket) -> None:
    """Feed the market to the exchange until the past is over."""
    feed = asyncio.create_task(market.run(exchange.on_tick, source.start))
    end = asyncio.create_task(source.finished.wait())
    try:
        await asyncio.wait([feed, end], return_when=asyncio.FIRST_COMPLETED)
        if feed.done():
            feed.result()
    finally:
        feed.cancel()
        end.cancel()
        await asyncio.wait([feed, end])
