"""Synthetic source: a simulated market whose every moment, past or future, is a function of its seed."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from itertools import pairwise
from math import exp
from random import Random

from trader.clock import EPOCH, Clock, SystemClock, ceil_time, epoch_second, floor_time, moment_of
from trader.domain.market.markets import (
    INTERVALS,
    MARKETS,
    PLAIN_FUNDING_RATE,
    Book,
    Candle,
    Interval,
    Market,
    Quote,
    Tick,
)
from trader.errors import MarketUnavailable, StartError
from trader.gateways.market.books import Grid, levels
from trader.gateways.market.path import CHARACTERS, HOUR_S, KNOT_S, KNOTS, Paths

_HOUR = timedelta(hours=1)
_HOURS_KEPT = 48
_LEVELS = 10
_MINUTE_KNOTS = 60 // KNOT_S


class SyntheticSource:
    """Seeded and correlated markets with trends, ranges and crashes. Pushes a tick once a second."""

    name = "synthetic"
    ends_at: datetime | None = None

    def __init__(self, seed: int, symbols: Sequence[str]) -> None:
        if unknown := [symbol for symbol in symbols if symbol not in CHARACTERS]:
            raise StartError(
                f"MARKET_SYMBOLS names {', '.join(unknown)}; the synthetic market has {', '.join(CHARACTERS)}"
            )
        self.identity = f"synthetic:{seed}"
        self.markets: Mapping[str, Market] = {symbol: MARKETS[symbol] for symbol in symbols}
        paths = Paths(seed)
        self._makers = {symbol: _MarketMaker(seed, market, paths) for symbol, market in self.markets.items()}

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    def clock(self, resume_at: datetime | None) -> Clock:
        return SystemClock()

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        second = epoch_second(after)
        while True:
            second += 1
            await clock.advance_to(moment_of(second))
            second = min(second, epoch_second(clock.now()))  # the clock may have been set back
            await asyncio.sleep(0)  # a feed that is behind its clock must not starve other tasks
            yield self.tick(second)

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for second in range(epoch_second(after) + 1, epoch_second(until) + 1):
            yield self.tick(second)

    def tick(self, second: int) -> Tick:
        """Return the tick that is pushed at a second since 1970."""
        at = moment_of(second)
        return Tick(at, {symbol: maker.quote(second, at) for symbol, maker in self._makers.items()})

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
            await asyncio.sleep(0)  # one hour takes less than a millisecond, a thousand of them would block the loop
        return aggregate(parts, interval)

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return PLAIN_FUNDING_RATE

    def trouble(self, symbol: str) -> str | None:
        return None


def aggregate(candles: Iterable[Candle], interval: Interval) -> list[Candle]:
    """Join ascending candles into those of `interval`, which is not shorter than theirs."""
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


class _MarketMaker:
    """The quotes, books and candles of one synthetic market."""

    def __init__(self, seed: int, market: Market, paths: Paths) -> None:
        self._name = f"{seed}:{market.symbol}"
        self._market = market
        self._grid = Grid(market)
        self._character = CHARACTERS[market.symbol]
        self._paths = paths
        self._prices = lru_cache(maxsize=_HOURS_KEPT)(self._make_prices)
        self._is_stressed = lru_cache(maxsize=_HOURS_KEPT)(paths.is_stressed)

    def _mark(self, log_price: float) -> int:
        """The price in half ticks."""
        return self._grid.nearest(exp(log_price))

    def _make_prices(self, hour: int) -> "array[int]":
        path = self._paths.hour(self._market.symbol, hour)
        return array(
            "q", (self._mark(_between(*knots, second)) for knots in pairwise(path) for second in range(KNOT_S))
        )

    def quote(self, second: int, at: datetime) -> Quote:
        hour, place = divmod(second, HOUR_S)
        mark = self._prices(hour)[place]
        # Mostly one tick, now and then three or more, drawn by multiplicative hashing of price and second.
        draw = ((mark + second) * 2654435761 >> 16) & 15
        spread = 1 + 2 * (draw == 15) + 2 * (draw >= 12) + (10 * (draw & 3) if self._is_stressed(hour) else 0)
        return self._grid.quote(at, mark, spread, partial(self._book, second))

    def _book(self, second: int, at: datetime, bid: int, ask: int) -> Book:
        rng = Random(f"{self._name}:book:{second}")
        thinness = 0.3 if self._is_stressed(second // HOUR_S) else 1.0
        price = bid * float(self._market.tick)
        sides = []
        for best, direction in ((bid, -1), (ask, 1)):
            total = self._character.side_depth / price * thinness * rng.uniform(0.6, 1.4)
            weights = [(0.5 + 0.15 * place) * rng.lognormvariate(0, 0.5) for place in range(_LEVELS)]
            sizes = [total * weight / sum(weights) for weight in weights]
            steps = [direction * rng.choice((1, 1, 1, 2, 2, 3)) for _ in range(_LEVELS)]
            sides.append(levels(self._market, best, steps, sizes))
        return Book(self._market.symbol, at, sides[0], sides[1])

    def candles(self, hour: int, width: int) -> list[Candle]:
        """Return the candles of an hour, `width` minutes each, of the same marks as its ticks."""
        path = self._paths.hour(self._market.symbol, hour)
        volumes = self._volumes(hour, path)
        number, mark = self._grid.number, self._mark
        candles = []
        for minute in range(0, 60, width):
            begin, end = minute * _MINUTE_KNOTS, (minute + width) * _MINUTE_KNOTS
            # The mark grows with the log price and the path is straight between knots, so extremes lie on knots.
            seen = path[begin:end]
            seen.append(_between(path[end - 1], path[end], KNOT_S - 1))
            opened, high, low, close = (number(mark(value)) for value in (seen[0], max(seen), min(seen), seen[-1]))
            open_time = moment_of(hour * HOUR_S + minute * 60)
            candles.append(Candle(open_time, opened, high, low, close, sum(volumes[minute : minute + width])))
        return candles

    def _volumes(self, hour: int, path: list[float]) -> list[float]:
        """Return the volume of each minute of an hour in base units: more when the price moves more."""
        random = Random(f"{self._name}:volume:{hour}").random
        usual = self._character.minute_volume / exp(path[0])
        volumes = []
        for begin in range(0, KNOTS, _MINUTE_KNOTS):
            knots = path[begin : begin + _MINUTE_KNOTS]
            busy = 0.4 + (max(knots) - min(knots)) / 0.0008  # a quiet minute of these markets moves by 0.08 %
            volumes.append(round(usual * busy * (0.3 + 2 * random() ** 2), 3))
        return volumes


def _between(start: float, end: float, second: int) -> float:
    """Return the log price `second` seconds after the knot at `start`."""
    return start + (end - start) * second / KNOT_S
