"""The plan of an exam: how many states a difference of two entrants takes, by simulation of exams."""

import math
from typing import Final, NamedTuple

import numpy as np

from trader.core.intervals import LEVEL
from trader.exam.domain.scores import WORLDS
from trader.portfolio.domain.bets import log_wealth

EXAMS: Final = 400
"""Simulated exams."""

STATES_MAX: Final = 3000
"""The longest exam that is simulated."""

NULL_SHARE: Final = 2 / 9
"""The part of the states in which nothing pays."""

POWER: Final = 0.8


class Outlook(NamedTuple):
    """How many states half of the exams, and four of five, need to tell two entrants apart; None: more than are tried.

    `called` is the part of exams that do within the states asked for.
    """

    median: int | None
    most: int | None
    called: float


def outlook(first: float, second: float, noise: float, states: int, *, level: float = LEVEL, seed: int = 0) -> Outlook:
    """Return the outlook for two entrants with these shares of the oracle in planted worlds.

    `noise` is the standard deviation of an entrant's share from state to state. In null worlds both do the same.
    """
    rng, bounds = np.random.default_rng(seed), np.full(STATES_MAX, WORLDS.clip)
    needed = np.full(EXAMS, math.inf)
    for exam in range(EXAMS):
        differences = first - second + noise * math.sqrt(2) * rng.standard_normal(STATES_MAX)
        differences[rng.random(STATES_MAX) < NULL_SHARE] = 0
        wealth = log_wealth(np.clip(differences, -WORLDS.clip, WORLDS.clip), bounds)
        reached = np.flatnonzero(wealth >= -math.log(level / 2))
        if len(reached):
            needed[exam] = reached[0] + 1
    median, most = (float(np.quantile(needed, part, method="inverted_cdf")) for part in (0.5, POWER))
    return Outlook(
        int(median) if math.isfinite(median) else None,
        int(most) if math.isfinite(most) else None,
        float((needed <= states).mean()),
    )
