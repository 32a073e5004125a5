"""Recorded 1-minute candles traded again, second by second.

Within its minute the price goes open → nearer extreme → further extreme → close, so that resting orders, triggers and
liquidation see what the market saw, though nobody knows the true order. Books are made around that path.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Final

from trader.clock import Clock, LockstepClock, iso
from trader.domain.market.markets import (
    INTERVALS,
    MARKETS,
    PLAIN_FUNDING_RATE,
    STALE_AFTER,
    Book,
    Candle,
    Interval,
    Market,
    Quote,
    Tick,
)
from trader.errors import MarketDataError, MarketUnavailable, StartError
from trader.gateways.market.books import Grid, levels
from trader.gateways.market.candles import ceil_time, epoch_second, floor_time, moment_of
from trader.gateways.market.files import Minutes, Row, find_files, read_market
from trader.gateways.market.pace import PacedClock

NEARER_S: Final = 20
FURTHER_S: Final = 40
CLOSE_S: Final = 59
"""The seconds of the minute at which the path touches its nearer extreme, its further one, and its close."""

_WARM_UP: Final = timedelta(hours=24)
_WARM_UP_FROM: Final = timedelta(days=2)
"""Data this long is traded only after a warm-up, so that indicators work at once."""

_LEVELS: Final = 10
_TICKS_MIN: Final = 100
"""A market below so many ticks would move in steps of over one percent."""


class ReplaySource:
    """The candles of a folder or file. `speed` is a factor of real time; 0 is as fast as the service can follow."""

    name = "replay"

    def __init__(
        self,
        place: Path,
        symbols: Sequence[str],
        *,
        speed: float = 1.0,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> None:
        self._place = place
        self._speed = speed
        self._wanted_start = start
        self._wanted_end = end
        if unknown := [symbol for symbol in symbols if symbol not in MARKETS]:
            raise StartError(
                f"MARKET_SYMBOLS names {', '.join(unknown)}; there are trading rules for {', '.join(MARKETS)}"
            )
        self.markets: Mapping[str, Market] = {symbol: MARKETS[symbol] for symbol in symbols}
        self.identity = "replay"
        self.ends_at: datetime | None = None
        self._recordings: dict[str, _Recording] = {}
        self._first_minute = 0
        self._last_second = 0
        self._begin = 0

    async def open(self) -> None:
        """Read the files. Raises `MarketDataError` and `StartError`."""
        files = find_files(self._place)
        if missing := [symbol for symbol in self.markets if symbol not in files]:
            raise StartError(
                f"{self._place} has no candles of {', '.join(missing)}, only of {', '.join(files)}; "
                "MARKET_SYMBOLS says which to trade"
            )
        for symbol, market in self.markets.items():
            minutes = await asyncio.to_thread(read_market, files[symbol])
            lowest = min(minutes.low)
            if lowest < _TICKS_MIN * market.tick:
                raise MarketDataError(
                    f"{files[symbol][0]}: a price of {lowest} is too low for the tick {market.tick} of {symbol}"
                )
            self._recordings[symbol] = _Recording(market, minutes)
        self._set_range()

    def _set_range(self) -> None:
        recordings = self._recordings.values()
        self._first_minute = max(recording.minutes.minute[0] for recording in recordings)
        last_minute = min(recording.minutes.minute[-1] for recording in recordings)
        if self._first_minute > last_minute:
            raise StartError(f"{self._place}: the markets {', '.join(self.markets)} have no time in common")
        first, last = moment_of(self._first_minute * 60), moment_of(last_minute * 60 + CLOSE_S)
        warm_up = _WARM_UP if last - first >= _WARM_UP_FROM else timedelta(0)
        begin = self._wanted_start or first + warm_up
        end = min(last, self._wanted_end or last)
        if not first <= begin < end:
            raise StartError(
                f"{self._place} is of {iso(first)} to {iso(last)}; REPLAY_START and REPLAY_END leave nothing of it"
            )
        self.identity = f"replay:{iso(first)}"
        self._begin = epoch_second(begin)
        self._last_second = self._last_pushed(epoch_second(end))
        self.ends_at = moment_of(self._last_second)

    def _last_pushed(self, second: int) -> int:
        """The last second up to `second` at which there is a tick: the end may be asked for within a gap."""
        ends = (recording.last_second(second) for recording in self._recordings.values())
        return max(end for end in ends if end is not None)

    async def close(self) -> None:
        """Let go of the candles."""
        self._recordings.clear()

    def clock(self, resume_at: datetime | None) -> Clock:
        start = resume_at or moment_of(self._begin)
        return PacedClock(start, self._speed) if self._speed else LockstepClock(start)

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        for tick in self._walk(epoch_second(after), self._last_second):
            await clock.lead(tick.at)
            await asyncio.sleep(0)  # a feed that is behind its clock must not keep others from running
            yield tick
        # Time goes on until everybody can see that prices are old; then nothing is left to wait for.
        await clock.lead(moment_of(self._last_second) + STALE_AFTER + timedelta(seconds=1))
        if isinstance(clock, PacedClock):
            clock.release()
        await asyncio.Event().wait()

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for tick in self._walk(epoch_second(after), min(epoch_second(until), self._last_second)):
            yield tick

    def _walk(self, after: int, until: int) -> Iterator[Tick]:
        """The ticks of the seconds in (after, until]. A second at which no market has a candle has none."""
        second = max(after + 1, self._first_minute * 60)
        while second <= until:
            minute = second // 60
            playing = [recording.minute(minute) for recording in self._recordings.values()]
            present = [played for played in playing if played is not None]
            next_minute = minute + 1 if present else self._next_minute(minute)
            for moment in range(second, min(until, minute * 60 + CLOSE_S) + 1) if present else ():
                at = moment_of(moment)
                yield Tick(at, {played.symbol: played.quote(moment % 60, at) for played in present})
            second = next_minute * 60

    def _next_minute(self, minute: int) -> int:
        """The first minute after a gap."""
        return min(
            (found for recording in self._recordings.values() if (found := recording.next_minute(minute)) is not None),
            default=self._last_second // 60 + 1,
        )

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        recording = self._recordings.get(symbol)
        if recording is None:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span = INTERVALS[interval]
        minutes = recording.minutes
        # A candle of which the beginning or the end was not recorded is none.
        first = ceil_time(max(start, moment_of(minutes.minute[0] * 60)), span)
        last = floor_time(min(end, moment_of(minutes.minute[-1] * 60 + 60)), span)
        width = span // timedelta(minutes=1)
        candles = []
        stop = bisect_left(minutes.minute, epoch_second(first) // 60)
        for minute in range(epoch_second(first) // 60, epoch_second(last) // 60, width):
            begin, stop = stop, bisect_left(minutes.minute, minute + width, stop)
            if begin < stop:
                candles.append(Candle(moment_of(minute * 60), *minutes.join(begin, stop)))
        return candles

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return PLAIN_FUNDING_RATE

    def trouble(self, symbol: str) -> str | None:
        return None


class _Recording:
    """The candles of one market, and where to find a minute in them."""

    def __init__(self, market: Market, minutes: Minutes) -> None:
        self.minutes = minutes
        self._grid = Grid(market)

    def minute(self, minute: int) -> "PlayedMinute | None":
        """The minute's path; None within a gap."""
        place = bisect_left(self.minutes.minute, minute)
        if place == len(self.minutes) or self.minutes.minute[place] != minute:
            return None
        return PlayedMinute(self._grid, self.minutes[place])

    def next_minute(self, minute: int) -> int | None:
        place = bisect_left(self.minutes.minute, minute)
        return self.minutes.minute[place] if place < len(self.minutes) else None

    def last_second(self, second: int) -> int | None:
        place = bisect_left(self.minutes.minute, second // 60 + 1) - 1
        return min(second, self.minutes.minute[place] * 60 + CLOSE_S) if place >= 0 else None


class PlayedMinute:
    """One candle as sixty quotes. Spread and depth are fixed functions of its price and its volume.

    The spread is 0.2 basis points of the price, up to 2 more the less is traded; a side of the book shows, over ten
    levels, as much as the geometric mean of 160,000 in quote currency and what the minute traded, and at least 10,000.
    """

    def __init__(self, grid: Grid, row: Row) -> None:
        self.symbol = grid.market.symbol
        self._grid = grid
        self.marks = path(grid, row)
        tick = float(grid.market.tick)
        traded = row.volume * row.close
        self._spread = max(1, round(row.close * (0.00002 + 0.0002 / (1 + traded / 20_000)) / tick))
        self._step = max(1, round(row.close * 0.00002 / tick))
        self._side = max(10_000.0, sqrt(160_000 * traded)) / row.close

    def quote(self, second: int, at: datetime) -> Quote:
        return self._grid.quote(at, self.marks[second], self._spread, self._book)

    def _book(self, at: datetime, bid: int, ask: int) -> Book:
        market = self._grid.market
        sizes = [self._side * (place + 1) / 55 for place in range(_LEVELS)]
        bids = levels(market, bid, [-self._step] * _LEVELS, sizes)
        asks = levels(market, ask, [self._step] * _LEVELS, sizes)
        return Book(market.symbol, at, bids, asks)


def path(grid: Grid, row: Row) -> list[int]:
    """The sixty marks of a candle in half ticks: within its low and high, and touching both.

    The extreme nearer to the open comes first; when both are as near, the one away from the close.
    """
    low, high = grid.within(row.low, row.high)
    opened = min(max(grid.nearest(row.open), low), high)
    close = min(max(grid.nearest(row.close), low), high)
    is_low_first = opened - low < high - opened or (opened - low == high - opened and close >= opened)
    nearer, further = (low, high) if is_low_first else (high, low)
    corners = ((0, opened), (NEARER_S, nearer), (FURTHER_S, further), (CLOSE_S, close))
    marks = [opened]
    for (begin, start), (end, goal) in pairwise(corners):
        length = end - begin
        marks += [start + round((goal - start) * step / length) for step in range(1, length + 1)]
    return marks
