"""A market source that yields the test's ticks, and a feed loop that follows it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from support import scripted
from support.manual_clock import ManualClock
from support.waiting import turns

from trader.core.clock import Clock
from trader.market.domain.markets import (
    INTERVALS,
    Book,
    Candle,
    Interval,
    Level,
    Quote,
    Tick,
)

START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def tick(seconds: float, *symbols: str) -> Tick:
    at = after(seconds)
    level = Level(Decimal(100) + Decimal(str(seconds)), Decimal(1))
    quotes = {
        symbol: Quote.of(Book(symbol, at, (level,), (Level(level.price + 1, Decimal(1)),)))
        for symbol in symbols or ("BTC", "ETH")
    }
    return Tick(at, quotes)


class ScriptedSource(scripted.ScriptedSource):
    """Yields the items that the test puts into its queue: ticks, or errors to fail with."""

    def __init__(self, ends_at: datetime | None = None) -> None:
        super().__init__()
        self.ends_at = ends_at
        self.queue: asyncio.Queue[Tick | Exception | None] = asyncio.Queue()
        self.asked_after: list[datetime] = []
        self.asked_candles: list[tuple[str, Interval, datetime, datetime]] = []
        self.candle_error: Exception | None = None
        self.late = timedelta(0)

    def clock(self, resume_at: datetime | None) -> Clock:
        return ManualClock(resume_at or START)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        self.asked_after.append(after)
        while (given := await self.queue.get()) is not None:
            if isinstance(given, Exception):
                raise given
            await clock.advance_to(given.at)
            yield given

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for ticks in (tick(1), tick(2), tick(3)):
            if after < ticks.at <= until:
                yield ticks

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        self.asked_candles.append((symbol, interval, start, end))
        await turns(1)  # other tasks run during a request
        if self.candle_error is not None:
            raise self.candle_error
        span = INTERVALS[interval]
        last = end - self.late
        return [
            Candle(start + n * span, 1.0, 2.0, 0.5, 1.5, float(n))
            for n in range((end - start) // span)
            if start + (n + 1) * span <= last
        ]
