"""The law of a market from a moment on, and the exact expected value under it of an account's positions.

Log prices follow dX = (m − σ²/2) dt + σ dB with drift m and deviation σ known per minute. The martingale part of a
price has no expectation at a bounded stopping time, so the expected gain of a position is the expected integral of its
drift while it is open. Only the probability of being open is simulated, never the price at which a plan closes it.
"""

import math
from collections.abc import Container, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.core.statistics import Floats

HORIZON: Final = 240
"""Minutes after which every position is closed."""

RISK_BUDGET: Final = 0.01
"""The largest standard deviation over the horizon that earns in full, as a fraction of equity."""

SIZE_MAX: Final = 2.1
"""The largest risk that is taken, in risk budgets: two, and what rounding to lots adds."""

LOSS_MAX: Final = 3.25
"""The largest loss of a decision, in units of the oracle's usual value. No positions within `SIZE_MAX` lose as much at
usual costs."""

GAIN_MAX: Final = 1.25
"""The largest gain of a decision in the same units; the oracle gains less."""

PAIRS: Final = 512
"""Number of antithetic pairs of paths on which a plan is valued: the standard error of a value is below 1% of the
oracle's usual value in 99 of 100 plans, and at most 1.5%."""

STEP: Final = 10
"""Minutes per step of these paths: laws change only between steps, and an hour is a whole number of steps."""

_HOUR: Final = 60
_MONITORED_SHIFT: Final = 0.5826
"""Barriers monitored in steps act like continuous ones moved outward by this many standard deviations of a step:
Broadie, Glasserman and Kou, "A continuity correction for discrete barrier options", Mathematical Finance 7:4 (1997)."""

_LOOKS_PER_MINUTE: Final = 60


class PlannedPosition(NamedTuple):
    """A position: the row of its market in the law, its side (1 or -1), its notional as a fraction of equity, and its
    plan.

    `below` and `above` are the log distances of the prices that close it (minus and plus infinity: none), and `minutes`
    is the time of its time exit.
    """

    market: int
    side: int
    weight: float
    below: float = -math.inf
    above: float = math.inf
    minutes: int = HORIZON


class Law:
    """The law of several markets over the horizon. Rows are markets, columns minutes.

    `drift` is the log of the expected growth per minute, `deviation` the standard deviation of a minute's log return,
    `funding` the hourly rate that longs pay, `closing` the cost of closing per minute as a fraction of notional. `seed`
    draws the paths, which all plans share. `usual` is the deviation of a minute in usual hours, by which risk is
    measured.
    """

    def __init__(
        self,
        drift: Floats,
        deviation: Floats,
        funding: Floats,
        closing: Floats,
        seed: int,
        usual: Floats,
    ) -> None:
        self.drift, self.deviation = drift, deviation
        self.horizon_deviation: Floats = usual * math.sqrt(HORIZON)
        """The standard deviation of each market's return over a usual horizon."""
        self.funding, self.closing = funding, closing
        self._seed = seed
        self._of_one = cache(self._valued)  # all entrants have the same standing position
        self._draws: dict[int, Floats] = {}

    def risk(self, held: Sequence[PlannedPosition], before: Sequence[PlannedPosition] = ()) -> float:
        """Return the risk of a change of positions: the sum over the markets of the deviation over the horizon of what
        changed, as a fraction of equity.

        Positions that hedge each other count in full: otherwise a pair could earn beyond the oracle's single position.
        """
        changes = np.zeros(len(self.drift))
        for sign, positions in ((1, held), (-1, before)):
            for each in positions:
                changes[each.market] += sign * each.side * each.weight
        return float(np.abs(changes) @ self.horizon_deviation)

    def value(self, held: Sequence[PlannedPosition]) -> float:
        """Return the expected gain of positions, with funding and the costs of closing them, as a fraction of
        equity."""
        return math.fsum(each.weight * self._of_one(each._replace(weight=1.0)) for each in held)

    def _valued(self, held: PlannedPosition) -> float:
        """Return the expected gain of a position per unit of its notional."""
        minutes = max(0, min(held.minutes, HORIZON))
        if not minutes:
            return -float(self.closing[held.market, 0])
        if held.below == -math.inf and held.above == math.inf:
            return float(self.unplanned(held.market, held.side)[minutes - 1])
        stops = np.array([*range(STEP, minutes, STEP), minutes])
        starts = stops - np.diff(stops, prepend=0)
        drift, variance = (
            np.add.reduceat(column[held.market, :minutes], starts) for column in (self.drift, self.deviation**2)
        )
        deviation = np.sqrt(variance)
        ends = np.cumsum(drift - variance / 2 + deviation * self._normals(held.market)[:, : len(stops)], axis=1)
        begins = np.concatenate([np.zeros((len(ends), 1)), ends[:, :-1]], axis=1)
        stays = np.ones_like(ends)
        looked = _MONITORED_SHIFT * deviation / np.sqrt((stops - starts) * _LOOKS_PER_MINUTE)
        for barrier, side in ((held.below, 1), (held.above, -1)):
            if math.isfinite(barrier):
                before, after = side * (begins - barrier) + looked, side * (ends - barrier) + looked
                crossed = np.exp(np.minimum(0.0, -2 * before * after / variance))
                stays *= np.where((before > 0) & (after > 0), 1 - crossed, 0.0)
        chance = np.cumprod(stays, axis=1)
        prices = np.exp(ends)
        is_open = np.concatenate([[1.0], (chance * prices).mean(axis=0)])
        closed = (np.concatenate([np.ones((len(ends), 1)), chance[:, :-1]], axis=1) - chance) * prices
        costs = self.closing[held.market, stops - 1]
        gain = float((is_open[:-1] + is_open[1:]) @ np.tanh(drift / 2)) - self._paid(held.market, stops, is_open[1:])
        return held.side * gain - float(closed.mean(axis=0) @ costs) - float(is_open[-1] * costs[-1])

    def unplanned(self, market: int, side: int) -> Floats:
        """Return the expected gain of a position without stop or target, per unit of notional, by minute of its
        exit."""
        growth = np.exp(np.cumsum(self.drift[market]))
        hours = np.zeros(len(growth))
        hours[_HOUR - 1 :: _HOUR] = self.funding[market] * growth[_HOUR - 1 :: _HOUR]
        gains: Floats = side * (growth - 1 - np.cumsum(hours)) - growth * self.closing[market]
        return gains

    def _paid(self, market: int, stops: NDArray[np.int64], is_open: Floats) -> float:
        """Return the funding that a long pays at full hours while it is open."""
        return float(self.funding[market] * is_open[stops % _HOUR == 0].sum())

    def _normals(self, market: int) -> Floats:
        if market not in self._draws:
            half = np.random.default_rng((self._seed, market)).standard_normal((PAIRS, HORIZON // STEP))
            self._draws[market] = np.concatenate([half, -half])
        return self._draws[market]

    def oracle(self, filling: Floats, held: Sequence[PlannedPosition] = ()) -> "Choice":
        """Return the best decision: to keep or close what is held, and to open at most one position with the rest of
        the risk budget.

        `filling` is the cost of a fill in each market now. No position is reversed. The value is the gain over keeping
        what is held.
        """
        against = {(each.market, -each.side) for each in held}
        kept = max(self._openings(filling, RISK_BUDGET, against), key=lambda choice: choice.value)
        if not held:
            return kept
        gain = -math.fsum(each.weight * float(filling[each.market]) for each in held) - self.value(held)
        risk = self.risk(held)
        rest = max(self._openings(filling, max(0.0, RISK_BUDGET - risk), against), key=lambda choice: choice.value)
        closed = Choice(rest.held, gain * min(1.0, RISK_BUDGET / risk) + rest.value)
        return max(Choice((*held, *kept.held), kept.value), closed, key=lambda choice: choice.value)

    def _openings(self, filling: Floats, budget: float, against: Container[tuple[int, int]]) -> "Iterator[Choice]":
        yield Choice((), 0.0)
        for market, deviation in enumerate(self.horizon_deviation.tolist()):
            weight = budget / deviation
            for side in (side for side in (1, -1) if (market, side) not in against):
                gains = self.unplanned(market, side) - filling[market]
                best = int(np.argmax(gains))
                yield Choice((PlannedPosition(market, side, weight, minutes=best + 1),), weight * float(gains[best]))


class Choice(NamedTuple):
    """The oracle's positions after its decision, and the value of the decision as a fraction of equity."""

    held: tuple[PlannedPosition, ...]
    value: float


def within_budget(value: float, risk: float) -> float:
    """Return a value with a gain at more than the risk budget scaled down to the budget; losses count in full."""
    return value * RISK_BUDGET / risk if value > 0 and risk > RISK_BUDGET else value


def credited(value: float, risk: float, unit: float) -> float:
    """Return the score of a decision, between -`LOSS_MAX` and `GAIN_MAX` units."""
    return bounded(within_budget(value, risk), risk, unit)


def bounded(value: float, risk: float, unit: float) -> float:
    """Return the score of a value within the risk budget, between -`LOSS_MAX` and `GAIN_MAX` units.

    A position beyond `SIZE_MAX` budgets is refused: it counts as the largest loss, whatever its value.
    """
    return -LOSS_MAX * unit if risk > SIZE_MAX * RISK_BUDGET else min(max(value, -LOSS_MAX * unit), GAIN_MAX * unit)
