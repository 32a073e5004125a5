"""A market source with scripted ticks, and the settings of a service under test."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal

from support.books import DEFAULT_MARKETS
from support.manual_clock import ManualClock

from trader.core.clock import Clock
from trader.market.domain.markets import (
    MARKETS,
    PLAIN_FUNDING_RATE,
    Book,
    Candle,
    Interval,
    Level,
    Market,
    Quote,
    Tick,
)
from trader.settings.settings import Settings

START = datetime(2025, 1, 1, 12, 0, 30, tzinfo=UTC)


def make_book(symbol: str, mid: str | Decimal, at: datetime, *, size: str = "1", levels: int = 10) -> Book:
    """A book around a mid price, with one tick of spread on each side and the same size at every level."""
    price, tick = Decimal(mid), MARKETS[symbol].tick
    return Book(
        symbol,
        at,
        bids=tuple(Level(price - tick * n, Decimal(size)) for n in range(1, levels + 1)),
        asks=tuple(Level(price + tick * n, Decimal(size)) for n in range(1, levels + 1)),
    )


def make_tick(at: datetime, mids: Mapping[str, str | Decimal], *, size: str = "1") -> Tick:
    return Tick(at, {symbol: Quote.of(make_book(symbol, mid, at, size=size)) for symbol, mid in mids.items()})


class ScriptedSource:
    """A source whose ticks the test lists in advance; `history` repeats them."""

    name = "scripted"
    identity = "scripted:1"
    markets: Mapping[str, Market] = DEFAULT_MARKETS
    ends_at: datetime | None = None

    def __init__(self) -> None:
        self.script: list[Tick] = []
        self.troubles: dict[str, str] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def clock(self, resume_at: datetime | None) -> Clock:
        return ManualClock(resume_at or START)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        for tick in self.script:
            if tick.at > after:
                await clock.advance_to(tick.at)
                yield tick

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for tick in self.script:
            if after < tick.at <= until:
                yield tick

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        return []

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return PLAIN_FUNDING_RATE

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        return None

    def open_interest(self, symbol: str) -> Decimal | None:
        return None

    def trouble(self, symbol: str) -> str | None:
        return self.troubles.get(symbol)


class HangingSource(ScriptedSource):
    """A source whose history the test withholds; `asked` has the starts of the spans read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[datetime] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        self.asked.append(after)
        await self.answers.wait()
        async for tick in super().history(after, until):
            yield tick


def make_settings(**changes: str) -> Settings:
    """The demo's settings without latency, so that an order meets the current book."""
    return Settings.load({"SIM_LATENCY_MS": "0", **changes}, None, demo=True)
