"""Synthetic source: a simulated market in which every moment, past or future, is a function of its seed."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from math import exp, log, sqrt
from random import Random

import numpy as np
from numpy.typing import NDArray

from trader.core.clock import EPOCH, Clock, JumpWatch, SystemClock, ceil_time, epoch_second, floor_time, moment_of
from trader.core.errors import MarketUnavailable
from trader.market.domain.markets import (
    INTERVALS,
    SIMULATED_MARKETS,
    Candle,
    Interval,
    Market,
    Quote,
    SimulatedMarket,
    Tick,
)
from trader.market.sources.books import BookModel, Grid, HalfTickCandle, stress_after
from trader.market.sources.path import HOUR_S, KNOT_S, KNOTS, Paths
from trader.market.sources.rows import chosen_rows
from trader.market.sources.source import QuietSource, Seed

_HOUR = timedelta(hours=1)
_HOURS_KEPT = 48
_HOURS_OF_CANDLES_KEPT = 256
"""Per market: the candles that agents look at, which are read for every one of them."""

_DAY_H = 24
_RANGE_MIN = 1e-6
_USUAL_VOLUME = 1.3
"""The mean volume of a minute, relative to a quiet one."""
_MINUTE_KNOTS = 60 // KNOT_S


class SyntheticSource(QuietSource):
    """Seeded and correlated markets with trends, ranges and crashes. Pushes one tick per second."""

    name = "synthetic"
    ends_at: datetime | None = None

    def __init__(
        self, seed: int | None, symbols: Sequence[str], rows: Mapping[str, SimulatedMarket] = SIMULATED_MARKETS
    ) -> None:
        """Create the source of these markets; None leaves the seed to be set later (`use_seed`).

        :raises StartError: a market has no row
        """
        self._rows = chosen_rows(symbols, rows)
        self.identity = self.name
        self.markets: Mapping[str, Market] = {symbol: row.rules for symbol, row in self._rows.items()}
        self.seed: Seed | None = None
        self._makers: Mapping[str, MarketMaker] = {}
        if seed is not None:
            self.use_seed(Seed(seed))

    def use_seed(self, seed: Seed) -> None:
        self.seed = seed
        self.identity = f"{self.name}:{seed.name}"
        paths = Paths(seed.value, self._rows)
        self._makers = {symbol: MarketMaker(seed.value, row, paths) for symbol, row in self._rows.items()}

    def clock(self, resume_at: datetime | None) -> Clock:
        return SystemClock()

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        second, jumps = epoch_second(after), JumpWatch(clock.now, clock.steady_s)
        while True:
            if jumps.jump() is not None:  # the time in between has not passed, or comes once more
                second = epoch_second(clock.now())
            second += 1
            await clock.advance_to(moment_of(second))
            second = min(second, epoch_second(clock.now()))  # the clock may have been set back
            await asyncio.sleep(0)  # a feed that is behind its clock must not starve other tasks
            yield self.tick(second)

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for second in range(epoch_second(after) + 1, epoch_second(until) + 1):
            yield self.tick(second)

    def tick(self, second: int) -> Tick:
        """Return the tick pushed at a second since 1970."""
        at = moment_of(second)
        return Tick(at, {symbol: maker.quote(second) for symbol, maker in self._makers.items()})

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        maker = self._makers.get(symbol)
        if maker is None:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span = INTERVALS[interval]
        first, last = ceil_time(start, span), floor_time(end, span)
        width = min(60, span // timedelta(minutes=1))
        parts: list[Candle] = []
        for hour in range((first - EPOCH) // _HOUR, -((EPOCH - last) // _HOUR)):
            parts += (candle for candle in maker.candles(hour, width) if first <= candle.open_time < last)
            await asyncio.sleep(0)  # one hour takes less than a millisecond, but a thousand would block the loop
        return aggregate(parts, interval)

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return self.markets[symbol].funding_rate


def aggregate(candles: Iterable[Candle], interval: Interval) -> list[Candle]:
    """Join ascending candles into candles of `interval`, which must not be shorter than theirs."""
    span = INTERVALS[interval]
    joined: list[Candle] = []
    for candle in candles:
        open_time = floor_time(candle.open_time, span)
        if joined and joined[-1].open_time == open_time:
            last = joined[-1]
            joined[-1] = Candle(
                open_time,
                last.open,
                max(last.high, candle.high),
                min(last.low, candle.low),
                candle.close,
                last.volume + candle.volume,
            )
        else:
            joined.append(candle._replace(open_time=open_time))
    return joined


class SyntheticPast(SyntheticSource):
    """The seconds of `span` of the synthetic market, for a backtest."""

    def __init__(
        self, seed: int | None, symbols: Sequence[str], rows: Mapping[str, SimulatedMarket], span: range
    ) -> None:
        super().__init__(seed, symbols, rows)
        self.span = span

    @property
    def recordings(self) -> Mapping[str, "MarketMaker"]:
        return self._makers

    async def prepare_paths(self, at: datetime) -> None:
        """Do nothing: every price is a function of its time."""


class MarketMaker:
    """The quotes, books and candles of one synthetic market."""

    def __init__(self, seed: int, row: SimulatedMarket, paths: Paths) -> None:
        self._name = f"{seed}:{row.rules.symbol}"
        self._market = row.rules
        self.grid = Grid(row.rules)
        self._character = row.character
        self._paths = paths
        self._prices = lru_cache(maxsize=_HOURS_KEPT)(self._make_prices)
        self._model = BookModel(self.grid, row.calm)
        self._busyness = lru_cache(maxsize=4)(self._hour_busyness)
        self._log_range = lru_cache(maxsize=_HOURS_KEPT)(self._mean_log_range)
        self._usual_range = lru_cache(maxsize=4)(self._day_range)
        self._corners = lru_cache(maxsize=4)(self._make_corners)
        self.candles = lru_cache(maxsize=_HOURS_OF_CANDLES_KEPT)(self._make_candles)
        """Returns the candles of an hour, `width` minutes each, made of the same marks as its ticks."""

    def _mark(self, log_price: float) -> int:
        """Return the price in half ticks."""
        return self.grid.nearest(exp(log_price))

    def _make_prices(self, hour: int) -> "array[int]":
        path = self._paths.hour(self._market.symbol, hour)
        return array(
            "q", (self._mark(_between(*knots, second)) for knots in pairwise(path) for second in range(KNOT_S))
        )

    def quote(self, second: int, opened: int | None = None) -> Quote:
        """Return the quote at a second. Its book needs the earlier marks, so `opened` alone is not enough."""
        hour, place = divmod(second, HOUR_S)
        marks = self._prices(hour)[max(0, place - 60) : place + 1]
        if place < 60:
            marks = self._prices(hour - 1)[place - 60 :] + marks
        earlier, minute = divmod(second // 60 - 1, 60)
        tension = stress_after(marks, self._usual_range(hour))
        return self._model.quote(moment_of(second), marks[-1], tension, self._busyness(earlier)[minute])

    def _day_range(self, hour: int) -> float:
        """Return the geometric mean of the minute ranges of the preceding 24 hours, relative to the price."""
        return exp(sum(self._log_range(earlier) for earlier in range(hour - _DAY_H, hour)) / _DAY_H)

    def _mean_log_range(self, hour: int) -> float:
        path = self._paths.hour(self._market.symbol, hour)
        minutes = (path[begin : begin + _MINUTE_KNOTS + 1] for begin in range(0, KNOTS, _MINUTE_KNOTS))
        return sum(log(max(max(minute) - min(minute), _RANGE_MIN)) for minute in minutes) / 60

    def _hour_busyness(self, hour: int) -> list[float]:
        """Return the square root of each minute's volume, relative to a usual minute."""
        path = self._paths.hour(self._market.symbol, hour)
        usual = _USUAL_VOLUME * self._character.minute_volume / exp(path[0])
        return [sqrt(volume / usual) for volume in self._volumes(hour, path)]

    def _make_candles(self, hour: int, width: int) -> Sequence[Candle]:
        path = self._paths.hour(self._market.symbol, hour)
        volumes = self._volumes(hour, path)
        candles = []
        for minute, corners in zip(range(0, 60, width), self._make_corners(hour, width), strict=True):
            low, high, opened, close = map(self.grid.number, corners)
            open_time = moment_of(hour * HOUR_S + minute * 60)
            candles.append(Candle(open_time, opened, high, low, close, sum(volumes[minute : minute + width])))
        return candles

    def _make_corners(self, hour: int, width: int) -> Sequence[HalfTickCandle]:
        """Return low, high, open and close of an hour's candles, `width` minutes each."""
        path, mark, corners = self._paths.hour(self._market.symbol, hour), self._mark, []
        for begin in range(0, KNOTS, width * _MINUTE_KNOTS):
            end = begin + width * _MINUTE_KNOTS
            # The mark grows with the log price and the path is straight between knots, so extremes lie on knots.
            seen = [*path[begin:end], _between(path[end - 1], path[end], KNOT_S - 1)]
            corners.append((mark(min(seen)), mark(max(seen)), mark(seen[0]), mark(seen[-1])))
        return corners

    def corners(self, minutes: range) -> NDArray[np.int64]:
        """Return the low, high, open and close of successive minutes since 1970 in half ticks, a row for each."""
        return np.array([self._corners(minute // 60, 1)[minute % 60] for minute in minutes])

    def marks(self, minute: int) -> Sequence[int]:
        """Return the marks of the seconds of a minute since 1970, in half ticks."""
        hour, place = divmod(minute, 60)
        return self._prices(hour)[place * 60 : place * 60 + 60]

    def _volumes(self, hour: int, path: Sequence[float]) -> list[float]:
        """Return the volume of each minute of an hour in base units; larger price moves bring more volume."""
        random = Random(f"{self._name}:volume:{hour}").random
        usual = self._character.minute_volume / exp(path[0])
        knots = np.reshape(path[:KNOTS], (-1, _MINUTE_KNOTS))
        busy = 0.4 + np.ptp(knots, axis=1) / 0.0008  # a quiet minute of these markets moves by 0.08%
        return [round(usual * each * (0.3 + 2 * random() ** 2), 3) for each in busy.tolist()]


def _between(start: float, end: float, second: int) -> float:
    """Return the log price `second` seconds after the knot at `start`."""
    return start + (end - start) * second / KNOT_S
