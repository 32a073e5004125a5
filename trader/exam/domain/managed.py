"""The second part of an exam: positions are managed for some steps, on one path of the world that all entrants share.

The score is the predictable part of what an account gains: what it holds at each moment times the drift of the market,
less funding and the costs of its fills. The rest of its gain is a martingale, so the mean of scores over worlds is the
mean of expected gains, whatever the decisions depend on. Given the path, nothing is simulated.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from trader.core.statistics import Floats
from trader.exam.domain.law import RISK_BUDGET, PlannedPosition, bounded, within_budget

STEPS: Final = 12
"""The decisions of an entrant in a managed world."""

STEP_MINUTES: Final = 30
"""The minutes between them. A pattern occurs between two of them, and its response begins with one."""

MINUTES: Final = STEPS * STEP_MINUTES

RESPONSES: Final = 3
"""The times that something follows in a planted world. Values are divided by it, so that units and bounds are those of
single decisions."""

_HOUR: Final = 60
_NEVER: Final = np.full(MINUTES + 1, -np.inf)


class PricedFill(NamedTuple):
    """A fill: minutes since the state, the row of its market, its signed notional at the prices of the state, and its
    cost; both as fractions of equity."""

    minute: float
    market: int
    weight: float
    cost: float


class Valued(NamedTuple):
    """What was decided in a world: its value, its score and its largest risk, as fractions of equity."""

    value: float
    score: float
    risk: float


class Course:
    """What positions earn on one path. Rows are markets, columns minutes.

    `prices` are relative to those of the state, from it on; `drift` and `funding` are those of the law, `filling` is
    the cost of a fill as a fraction of notional, and `deviation` that of a usual horizon.
    """

    def __init__(self, prices: Floats, drift: Floats, funding: Floats, filling: Floats, deviation: Floats) -> None:
        self.prices, self._filling, self._deviation = prices, filling, deviation
        is_paid = np.arange(1, MINUTES + 1) % _HOUR == 0
        gains = prices[:, :-1] * np.expm1(drift) - funding[:, None] * prices[:, 1:] * is_paid
        self._earned = np.pad(np.cumsum(gains, axis=1), ((0, 0), (1, 0)))
        """What a long of each market has earned until each minute."""

    def judge(self, trades: Sequence[PricedFill], stood: Sequence[PlannedPosition], unit: float) -> Valued:
        """Return the value of fills, ascending, beyond those of an account that keeps what `stood`, per response.

        Gains of a step at more than the risk budget are scaled down to the budget.
        """
        changed, before = np.zeros(len(self.prices)), np.zeros(len(self.prices))
        for each in stood:
            before[each.market] += each.side * each.weight
        total, scaled, largest, left = 0.0, 0.0, 0.0, list(trades)
        for begin in range(0, MINUTES, STEP_MINUTES):
            end = begin + STEP_MINUTES
            value = float(changed @ (self._earned[:, end] - self._earned[:, begin]))
            risk = float(np.abs(changed) @ self._deviation)
            while left and left[0].minute < end:
                minute, market, weight, cost = left.pop(0)
                earned = self._earned[market]
                # Funding is paid at the end of a minute, so a fill within one has missed nothing.
                value += weight * float(earned[end] - earned[int(minute)]) - cost
                changed[market] += weight
                risk = max(risk, float(np.abs(changed) @ self._deviation))
            if end == MINUTES:
                more = np.abs(before + changed) - np.abs(before)
                value -= float(more @ (self._filling * self.prices[:, -1]))
            total, scaled, largest = total + value, scaled + within_budget(value, risk), max(largest, risk)
        return Valued(total / RESPONSES, bounded(scaled / RESPONSES, largest, unit), largest)

    def oracle(self, stood: Sequence[PlannedPosition]) -> float:
        """Return the most that can be earned per response, by dynamic programme over the minutes.

        It opens positions at steps, one at a time and of the risk budget, closes them at any minute, and keeps what
        `stood` or closes it at a step; from then on, that takes its part of the budget.
        """
        leaving = _NEVER
        for market, side, weight, *_ in stood:
            rest = max(0.0, RISK_BUDGET - weight * float(self._deviation[market]))
            earned, costs = side * self._earned[market], self._filling[market] * self.prices[market]
            leaving = self._best(rest, _NEVER) + weight * (earned - earned[-1] + costs[-1] - costs)
        return float(self._best(RISK_BUDGET, leaving)[0]) / RESPONSES

    def _best(self, budget: float, leaving: Floats) -> Floats:
        """Return the most that can be earned from each minute on by who holds nothing; `leaving` is what it is worth to
        stop at each step."""
        weights = np.repeat(budget / self._deviation, 2)[:, None]
        sides = np.tile((1.0, -1.0), len(self._deviation))[:, None]
        gains = weights * sides * np.repeat(np.diff(self._earned, axis=1), 2, axis=0)
        costs = weights * np.repeat(self._filling[:, None] * self.prices, 2, axis=0)
        held, flat = -costs[:, -1], np.zeros(MINUTES + 1)
        for minute in range(MINUTES - 1, -1, -1):
            held, best = held + gains[:, minute], flat[minute + 1]
            if minute % STEP_MINUTES == 0:
                best = max(best, leaving[minute], float((held - costs[:, minute]).max()))
            flat[minute] = best
            held = np.maximum(held, best - costs[:, minute])
        return flat
