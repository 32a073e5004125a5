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


class Trade(NamedTuple):
    """A fill: minutes since the state, the row of its market, its signed notional at the prices of the state, and its
    cost; both as fractions of equity."""

    minute: float
    market: int
    weight: float
    cost: float


class Judged(NamedTuple):
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
        self._minutes = np.arange(MINUTES + 1)
        nothing = np.zeros((len(prices), 1))
        self._drifted = np.concatenate([nothing, np.cumsum(prices[:, :-1] * np.expm1(drift), axis=1)], axis=1)
        is_paid = (self._minutes % _HOUR == 0) & (self._minutes > 0)
        self._paid = np.cumsum(funding[:, None] * prices * is_paid, axis=1)

    def _earned(self, minute: float) -> Floats:
        """Return what a long of each market has earned since the state."""
        place = min(int(minute), MINUTES - 1)
        part = minute - place
        drifted = (1 - part) * self._drifted[:, place] + part * self._drifted[:, place + 1]
        earned: Floats = drifted - self._paid[:, int(minute)]
        return earned

    def judge(self, trades: Sequence[Trade], stood: Sequence[PlannedPosition], unit: float) -> Judged:
        """Return the value of fills, ascending, beyond those of an account that keeps what `stood`, per response.

        Gains of a step at more than the risk budget are scaled down to the budget.
        """
        before = np.zeros(len(self.prices))
        for each in stood:
            before[each.market] += each.side * each.weight
        changed, total, credited, largest, left = np.zeros_like(before), 0.0, 0.0, 0.0, list(trades)
        for step in range(STEPS):
            begin, end = step * STEP_MINUTES, (step + 1) * STEP_MINUTES
            until = self._earned(end)
            value, risk = float(changed @ (until - self._earned(begin))), self._risk(changed)
            while left and (left[0].minute < end or step == STEPS - 1):
                trade = left.pop(0)
                gained = until - self._earned(min(trade.minute, end))
                changed[trade.market] += trade.weight
                value += trade.weight * float(gained[trade.market]) - trade.cost
                risk = max(risk, self._risk(changed))
            if step == STEPS - 1:
                more = np.abs(before + changed) - np.abs(before)
                value -= float(more @ (self._filling * self.prices[:, -1]))
            total, largest = total + value, max(largest, risk)
            credited += within_budget(value, risk)
        return Judged(total / RESPONSES, bounded(credited / RESPONSES, largest, unit), largest)

    def _risk(self, changed: Floats) -> float:
        return float(np.abs(changed) @ self._deviation)

    def oracle(self, stood: Sequence[PlannedPosition]) -> float:
        """Return the most that can be earned in units of one response, by dynamic programme over the minutes.

        It opens positions at steps, one at a time and of the risk budget, closes them at any minute, and keeps what
        `stood` or closes it at a step; from then on, that takes its part of the budget.
        """
        never = np.full(MINUTES, -np.inf)
        if not stood:
            return float(self._best(RISK_BUDGET, never)[0]) / RESPONSES
        (held,) = stood
        rest = max(0.0, RISK_BUDGET - held.weight * float(self._deviation[held.market]))
        earned = held.side * (self._drifted - self._paid)[held.market]
        costs = float(self._filling[held.market]) * self.prices[held.market]
        leaving = self._best(rest, never) + held.weight * (earned - earned[-1] + costs[-1] - costs)
        leaving = np.where(self._minutes % STEP_MINUTES == 0, leaving, -np.inf)
        return float(self._best(RISK_BUDGET, leaving)[0]) / RESPONSES

    def _best(self, budget: float, leaving: Floats) -> Floats:
        """Return the most that can be earned from each minute on by who holds nothing; `leaving` is what it is worth to
        stop at each minute."""
        weights = np.repeat(budget / self._deviation, 2)[:, None]
        sides = np.tile((1.0, -1.0), len(self._deviation))[:, None]
        gains = weights * sides * np.repeat(np.diff(self._drifted - self._paid, axis=1), 2, axis=0)
        costs = weights * np.repeat(self._filling[:, None] * self.prices, 2, axis=0)
        held, flat = -costs[:, -1], np.zeros(MINUTES + 1)
        for minute in range(MINUTES - 1, -1, -1):
            held = held + gains[:, minute]
            best = max(flat[minute + 1], leaving[minute])
            if minute % STEP_MINUTES == 0:
                best = max(best, float((held - costs[:, minute]).max()))
            flat[minute] = best
            held = np.maximum(held, best - costs[:, minute])
        return flat
