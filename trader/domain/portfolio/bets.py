"""Bets: a sequential test of a mean that bounds the loss which has not come yet, and what both sequences can show.

A confidence sequence knows only the variance that it has seen, so many small gains with a rare large loss look certain
until the loss comes. A bet on bounded returns knows the loss that may still come: if the mean is not above zero, the
wealth of whoever bets on it is a non-negative supermartingale, whatever the distribution, and by Ville's inequality it
ever reaches 1/α with probability α at most. Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", Journal of the Royal Statistical Society B 86:1 (2024).
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trader.domain.portfolio.intervals import (
    HOURS_PER_DAY,
    SEQUENCE_HOURS_MIN,
    Estimate,
    Returns,
    freedom_of,
    sequence_deviations,
)

HOURLY_MOVE_MAX: Final = 0.20
"""The most that a price is taken to move in an hour, in parts of it. The worst clock hours of the 2025 candles are
−15.0 % (ETH, 3 February) and +16.1 % (SOL, 2 March)."""

STAKES: Final = np.linspace(0.05, 0.95, 24)
"""The bets, in parts of the largest that no bounded loss can ruin."""

POWER_DEVIATIONS: Final = 0.842
"""The 80 % quantile of the normal distribution: what is called visible is found in four of five seasons."""

_DAYS_SEARCHED: Final = np.unique(np.round(np.geomspace(3, 3650, 90)).astype(np.int64))
_NEVER_RUINED: Final = 1e-300
_SEARCH_STEPS: Final = 40


def loss_bounds(leverages: Returns) -> Returns:
    """Return the most that an account can lose in each hour, in parts of its equity, known before the hour.

    That is the largest price move times the largest notional over equity that the account had before, at least one
    time its equity, and all of it at most. `leverages` are the largest of each hour; what is not known (NaN) is taken
    to be without bound.
    """
    known = np.where(np.isnan(leverages), np.inf, leverages)
    before = np.maximum.accumulate(np.concatenate([[1.0], known[:-1]])) if len(known) else known
    return np.minimum(1.0, HOURLY_MOVE_MAX * before)


def bet_level(returns: Returns, bounds: Returns) -> float:
    """Return the level at which the bets on a mean above zero were ever won: one over their largest wealth so far.

    `returns` are simple hourly returns or differences, `bounds` the most that can be lost in each hour.
    """
    return min(1.0, math.exp(-float(np.max(log_wealth(returns, bounds)))))


def log_wealth(returns: Returns, bounds: Returns) -> Returns:
    """Return the logarithm of the wealth after each hour: the mean over the stakes."""
    shares = np.divide(returns, bounds, out=np.zeros_like(returns), where=bounds > 0)
    factors = np.maximum(1 + STAKES[:, None] * shares, _NEVER_RUINED)
    return _log_mean(np.cumsum(np.log(factors), axis=1))


@lru_cache(maxsize=4096)
def smallest_visible(estimate: Estimate, bound: float, level: float) -> float | None:
    """Return the mean hourly difference that four of five seasons like this one would have called at this level.

    `bound` is the most that can be lost in an hour. Both sequences must call it. None before the first verdict.
    """
    hours = estimate.hours
    if hours < SEQUENCE_HOURS_MIN:
        return None
    low, high = 0.0, (sequence_deviations(hours, level, estimate.freedom) + POWER_DEVIATIONS) * estimate.error
    needed = -math.log(level)
    times, variance = np.array([float(hours)]), estimate.variance
    while _expected_wealth(high, variance, bound, times)[0] < needed:
        low, high = high, 2 * high
        if high > bound:
            return None  # not even what is at most gained in every hour
    if not low:
        return high
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _expected_wealth(middle, variance, bound, times)[0] >= needed else (middle, high)
    return high


@lru_cache(maxsize=4096)
def days_needed(estimate: Estimate, bound: float, level: float) -> int | None:
    """Return after how many days four of five seasons would call a true difference as large as the one that was seen.

    To 8 %; None when ten years are not enough.
    """
    mean = abs(estimate.mean)
    hours = np.array(_DAYS_SEARCHED * HOURS_PER_DAY, dtype=np.float64)
    is_seen = mean * np.sqrt(hours / estimate.variance) >= _sequence_bars(level)
    is_seen &= _expected_wealth(mean, estimate.variance, bound, hours) >= -math.log(level)
    return int(_DAYS_SEARCHED[np.argmax(is_seen)]) if is_seen.any() else None


def _expected_wealth(mean: float, variance: float, bound: float, hours: Returns) -> Returns:
    """Return the logarithm of the wealth after so many hours that four of five seasons with this mean exceed."""
    stakes = STAKES[:, None] / bound
    growth = hours * (stakes * mean - stakes**2 * (variance + mean**2) / 2)
    return _log_mean(growth - POWER_DEVIATIONS * stakes * np.sqrt(hours * variance))


def _log_mean(logs: NDArray[np.float64]) -> Returns:
    """Return the logarithm of the mean over the first axis."""
    highest = logs.max(axis=0)
    mean: Returns = highest + np.log(np.mean(np.exp(logs - highest), axis=0))
    return mean


@lru_cache(maxsize=256)
def _sequence_bars(level: float) -> Returns:
    """Return how many standard errors the searched days need by the confidence sequence."""
    return POWER_DEVIATIONS + np.array(
        [sequence_deviations(hours, level, freedom_of(hours)) for hours in (_DAYS_SEARCHED * HOURS_PER_DAY).tolist()]
    )
