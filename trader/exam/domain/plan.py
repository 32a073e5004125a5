"""The plan of an exam: how many states a difference of two entrants takes, by simulation of exams."""

import math
from typing import Final, NamedTuple

import numpy as np

from trader.core.intervals import LEVEL
from trader.exam.domain.scores import MOMENTS, WORLDS
from trader.portfolio.domain.bets import log_wealth

EXAMS: Final = 400
"""Simulated exams."""

NULL_SHARE: Final = 5 / 9
"""The part of the states of worlds in which nothing pays."""

POWER: Final = 0.8

_MINUTES_PER_YEAR: Final = 365 * 1440


class Design(NamedTuple):
    """The differences of two entrants: their mean and deviation in a state, the part of states without any, and the
    largest possible one. `states_max` is the longest exam that is simulated."""

    mean: float
    deviation: float
    equal: float
    bound: float
    states_max: int


def in_worlds(first: float, second: float, noise: float) -> Design:
    """Return the design of two entrants with these shares of the oracle in planted worlds; in null worlds both do the
    same.

    `noise` is the standard deviation of an entrant's share from state to state.
    """
    return Design(abs(first - second), noise * math.sqrt(2), NULL_SHARE, WORLDS, 3_000)


def in_moments(first: float, second: float, correlation: float, minutes: int) -> Design:
    """Return the design of two entrants with these annual Sharpe ratios, whose outcomes of a moment are correlated."""
    mean = abs(first - second) * math.sqrt(minutes / _MINUTES_PER_YEAR)
    return Design(mean, math.sqrt(2 * (1 - correlation)), 0.0, MOMENTS, 40_000)


class Outlook(NamedTuple):
    """How many states half of the exams, and four of five, need to tell two entrants apart; None: more than are tried.

    `called` is the part of exams that do within the states asked for.
    """

    median: int | None
    most: int | None
    called: float


def outlook(design: Design, states: int, *, exams: int = EXAMS, level: float = LEVEL, seed: int = 0) -> Outlook:
    """Return the outlook of exams of this design."""
    rng, bounds = np.random.default_rng(seed), np.full(design.states_max, design.bound)
    needed = np.full(exams, math.inf)
    for exam in range(exams):
        differences = design.mean + design.deviation * rng.standard_normal(design.states_max)
        differences[rng.random(design.states_max) < design.equal] = 0
        wealth = log_wealth(np.clip(differences, -design.bound, design.bound), bounds)
        reached = np.flatnonzero(wealth >= -math.log(level / 2))
        if len(reached):
            needed[exam] = reached[0] + 1
    found = (float(np.quantile(needed, part, method="inverted_cdf")) for part in (0.5, POWER))
    median, most = (int(each) if math.isfinite(each) else None for each in found)
    return Outlook(median, most, float((needed <= states).mean()))
