"""Price path of the synthetic market: a function of seed, symbol and second, with random access to any moment.

Log prices are a sum: a constant level + beta × the common factor + the market's own walk. Both walks are nested
Brownian bridges, so that both sides of a joint share it:

    era (2,048 h)   independent, bounded levels: a price stays plausible for centuries
    block (8 h)     the regime decides the move: up, down, or almost none
    hour            noise, and in a range a swing out and back
    knot (5 s)      noise; its size is the volatility that a candle shows. The price is linear between knots

A crash is added to the factor: a fall within 20 minutes, a recovery of almost half within the next hour, and a decay of
the rest over ten days.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from math import log, pi, sin, sqrt
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.market.domain.markets import SIMULATED_MARKETS, SimulatedMarket

HOUR_S: Final = 3600
KNOT_S: Final = 5
KNOTS: Final = HOUR_S // KNOT_S
BLOCK_H: Final = 8
_ERA_BLOCKS: Final = 256
_YEAR_H: Final = 8766.0

_CRASH_FALL_S: Final = 1200
_CRASH_RECOVERY_S: Final = 3600
_CRASH_MEMORY_S: Final = 10 * 24 * HOUR_S
_CRASH_RECOVERED: Final = 0.45
_CRASH_BLOCKS: Final = (_CRASH_FALL_S + _CRASH_RECOVERY_S + _CRASH_MEMORY_S) // (BLOCK_H * HOUR_S) + 2


class Regime(StrEnum):
    """How the whole market behaves during a block of eight hours."""

    UP = "up"
    DOWN = "down"
    RANGE = "range"
    CRASH = "crash"


_REGIMES: Final = (Regime.UP, Regime.DOWN, Regime.RANGE, Regime.CRASH)
_WEIGHTS: Final = (27, 25, 45, 3)
_NOISE: Final = {Regime.UP: 0.9, Regime.DOWN: 1.0, Regime.RANGE: 0.9, Regime.CRASH: 1.8}
"""Volatility within a block of each regime, relative to the usual."""


class Crash(NamedTuple):
    """A crash of the common factor: the second at which it starts and how far the log price falls."""

    second: int
    depth: float

    def at(self, second: int) -> float:
        """Return what the crash adds to the log price: zero or negative."""
        since = second - self.second
        if since <= 0:
            return 0.0
        if since <= _CRASH_FALL_S:
            return -self.depth * _ease(since / _CRASH_FALL_S)
        since -= _CRASH_FALL_S
        if since <= _CRASH_RECOVERY_S:
            return -self.depth * (1 - _CRASH_RECOVERED * _ease(since / _CRASH_RECOVERY_S))
        left = max(0.0, 1 - (since - _CRASH_RECOVERY_S) / _CRASH_MEMORY_S)
        return -self.depth * (1 - _CRASH_RECOVERED) * left * left

    def is_sharp_in(self, hour: int) -> bool:
        """Return whether the crash's fall or recovery overlaps the hour."""
        start = hour * HOUR_S
        return self.second < start + HOUR_S and start < self.second + _CRASH_FALL_S + _CRASH_RECOVERY_S


def _ease(fraction: float) -> float:
    return fraction * fraction * (3 - 2 * fraction)


class Regimes:
    """The regimes of all blocks, and the crashes, for one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_block = lru_cache(maxsize=1024)(self._draw)

    def of_block(self, block: int) -> Regime:
        return self._of_block(block)[0]

    def crashes(self, hour: int) -> list[Crash]:
        """Return the crashes that still affect the hour."""
        block = hour // BLOCK_H
        crashes = (self._of_block(earlier)[1] for earlier in range(block - _CRASH_BLOCKS, block + 1))
        return [crash for crash in crashes if crash is not None]

    def _draw(self, block: int) -> tuple[Regime, Crash | None]:
        rng = Random(f"{self._seed}:regime:{block}")
        regime = rng.choices(_REGIMES, _WEIGHTS)[0]
        if regime is not Regime.CRASH:
            return regime, None
        start = block * BLOCK_H * HOUR_S + rng.randrange(HOUR_S, 5 * HOUR_S)
        return regime, Crash(start, -log(1 - rng.uniform(0.05, 0.105)))


class Walk:
    """A bounded random walk of log prices. `volatility` is per year; `trends` makes it follow the regimes."""

    def __init__(self, seed: int, name: str, volatility: float, regimes: Regimes, *, trends: bool) -> None:
        self._name = f"{seed}:{name}"
        self._volatility = volatility
        self._regimes = regimes
        self._trends = trends
        self._era = lru_cache(maxsize=4)(self._draw_era)
        self._block = lru_cache(maxsize=256)(self._draw_block)

    def _deviation(self, hours: float) -> float:
        """Return the standard deviation of the log price over this many hours."""
        return self._volatility * sqrt(hours / _YEAR_H)

    def _era_level(self, era: int) -> float:
        rng = Random(f"{self._name}:level:{era}")
        return self._deviation(BLOCK_H * _ERA_BLOCKS / 2) * max(-2.0, min(2.0, rng.gauss()))

    def _draw_era(self, era: int) -> list[float]:
        """Return the log price at the joints of the era's blocks, including both ends."""
        rng = Random(f"{self._name}:era:{era}")
        deviation = self._deviation(BLOCK_H)
        moves = [deviation * self._move(era * _ERA_BLOCKS + i, rng.gauss()) for i in range(_ERA_BLOCKS)]
        start, end = self._era_level(era), self._era_level(era + 1)
        correction = (end - start - sum(moves)) / _ERA_BLOCKS
        joints = list(accumulate((move + correction for move in moves), initial=start))
        joints[-1] = end
        return joints

    def _move(self, block: int, noise: float) -> float:
        """Return the move of one block in standard deviations."""
        if not self._trends:
            return noise
        match self._regimes.of_block(block):
            case Regime.UP:
                return 0.8 + 0.6 * abs(noise)
            case Regime.DOWN:
                return -0.8 - 0.6 * abs(noise)
            case _:
                return 0.35 * noise

    def _draw_block(self, block: int) -> list[float]:
        """Return the log price at the joints of the block's hours, including both ends."""
        era, place = divmod(block, _ERA_BLOCKS)
        start, end = self._era(era)[place : place + 2]
        rng = Random(f"{self._name}:block:{block}")
        steps = [0.6 * self._deviation(1) * rng.gauss() for _ in range(BLOCK_H)]
        drift = (end - start - sum(steps)) / BLOCK_H
        joints = list(accumulate((step + drift for step in steps), initial=start))
        joints[-1] = end
        if self._trends and self._regimes.of_block(block) is Regime.RANGE:
            height = self._deviation(BLOCK_H) * rng.uniform(0.25, 0.55) * rng.choice((-1, 1))
            turns = rng.choice((1, 2))
            for hour in range(1, BLOCK_H):
                joints[hour] += height * sin(2 * pi * turns * hour / BLOCK_H)
        return joints

    def hour(self, hour: int) -> NDArray[np.float64]:
        """Return the log price at an hour's knots, including both ends, without crashes."""
        block, place = divmod(hour, BLOCK_H)
        start, end = self._block(block)[place : place + 2]
        noise = _NOISE[self._regimes.of_block(block)] * (1 + 0.25 * sin(2 * pi * (hour % 24 - 9) / 24))
        # A uniform step has the deviation 1/√12; sums of many are nearly normal and five times cheaper.
        scale = noise * self._deviation(1 / KNOTS) * sqrt(12)
        random = Random(f"{self._name}:{hour}").random
        steps = np.array([random() for _ in range(KNOTS)])
        drift = (end - start - scale * steps.cumsum()[-1]) / KNOTS  # added in order, unlike by `sum`
        path = np.concatenate(([start], scale * steps + drift)).cumsum()
        path[-1] = end
        return path


_FACTOR_VOLATILITY: Final = 0.36
_FACTOR_HOURS_KEPT: Final = 1250
"""Enough for three hundred 4 h candles, read market by market; 7 MB."""

_HOURS_KEPT: Final = 24
"""Prices, volumes and the candles of each interval are read in sequence; 0.5 MB."""


class Paths:
    """The prices of all synthetic markets of one seed."""

    def __init__(self, seed: int, rows: Mapping[str, SimulatedMarket] = SIMULATED_MARKETS) -> None:
        self._rows = rows
        self.regimes = Regimes(seed)
        self._factor = Walk(seed, "factor", _FACTOR_VOLATILITY, self.regimes, trends=True)
        self._own = {
            symbol: Walk(seed, symbol, row.character.own_volatility, self.regimes, trends=False)
            for symbol, row in rows.items()
        }
        self._factor_hour: Callable[[int], NDArray[np.float64]] = lru_cache(maxsize=_FACTOR_HOURS_KEPT)(
            self._draw_factor
        )
        self.hour: Callable[[str, int], Sequence[float]] = lru_cache(maxsize=_HOURS_KEPT)(self._draw_hour)
        """Returns the log price of a market at the knots of an hour since 1970, including both ends."""

    def _draw_factor(self, hour: int) -> NDArray[np.float64]:
        path = self._factor.hour(hour)
        seconds = range(hour * HOUR_S, (hour + 1) * HOUR_S + 1, KNOT_S)
        for crash in self.regimes.crashes(hour):
            if crash.is_sharp_in(hour):
                path = path + [crash.at(second) for second in seconds]
            else:
                start, end = crash.at(seconds[0]), crash.at(seconds[-1])
                slope = (end - start) / KNOTS
                path = path + start + slope * np.arange(KNOTS + 1)
        return path

    def _draw_hour(self, symbol: str, hour: int) -> Sequence[float]:
        character = self._rows[symbol].character
        level, beta = log(character.level), character.beta
        prices: list[float] = (level + beta * self._factor_hour(hour) + self._own[symbol].hour(hour)).tolist()
        return prices
