"""Bets: a sequential test of a mean that bounds losses not yet seen, and what both sequences can detect.

A confidence sequence knows only the observed variance, so many small gains with a rare large loss look certain until
the loss occurs. A bet on bounded returns accounts for the possible loss: if the mean is not above zero, the wealth of
the bettor is a non-negative supermartingale for any distribution, and by Ville's inequality it ever reaches 1/α with
probability at most α. Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", Journal of the Royal Statistical Society B 86:1 (2024).
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.core.intervals import (
    HOURS_PER_DAY,
    SEQUENCE_HOURS_MIN,
    Estimate,
    Returns,
    freedom_of,
    sequence_deviations,
)

HOURLY_MOVE_MAX: Final = 0.20
"""The assumed largest hourly price move, as a fraction. The worst clock hours of the 2025 candles are
−15.0 % (ETH, 3 February) and +16.1 % (SOL, 2 March)."""

UNKNOWN_LEVERAGE: Final = 1 / HOURLY_MOVE_MAX
"""The leverage of an hour in which it was not recorded: the whole equity may be lost."""

STAKES: Final = np.geomspace(0.01, 0.95, 8)
"""The bets, as fractions of the largest one that no bounded loss can ruin: over two decades in equal ratios, so that
the bet is as good for an account that risks little of its bound as for one that risks much."""

POWER_DEVIATIONS: Final = 0.842
"""The 80 % quantile of the normal distribution: a visible difference is detected in four of five seasons."""

HOURS_PER_YEAR: Final = 365 * HOURS_PER_DAY

_DAYS_SEARCHED: Final = np.array(sorted({round(days) for days in np.geomspace(3, 3650, 90).tolist()}))
_NEVER_RUINED: Final = 1e-300
_SEARCH_PARTS: Final = 64
_SEARCH_ROUNDS: Final = 4
_LARGEST_LOG: Final = 700.0


class Bet(NamedTuple):
    """The outcome of the bets on a mean above zero: one over their largest wealth so far, and their present wealth."""

    level: float = 1.0
    wealth: float = 0.0


NO_BET: Final = Bet()


def move_bounds(leverages: Returns, before: float = 1.0) -> Returns:
    """Return an account's largest possible move in each hour, as a fraction of its equity, known before the hour.

    This is the largest price move times the account's largest earlier notional over equity (at least 1). Gains may be
    as large; a loss is at most the whole equity. `leverages` are the largest of each hour, and `before` is the largest
    before the first; unknown ones (NaN) count as `UNKNOWN_LEVERAGE`.
    """
    known = np.where(np.isnan(leverages), UNKNOWN_LEVERAGE, leverages)
    largest = np.maximum.accumulate(np.concatenate([[max(1.0, before)], known[:-1]])) if len(known) else known
    return HOURLY_MOVE_MAX * largest


def bet(returns: Returns, bounds: Returns) -> Bet:
    """Bet on a mean above zero.

    `returns` are simple hourly returns or differences, `bounds` the largest possible loss in each hour.
    """
    logs = log_wealth(returns, bounds)
    return Bet(min(1.0, math.exp(-float(np.max(logs)))), math.exp(min(_LARGEST_LOG, float(logs[-1]))))


def log_wealth(returns: Returns, bounds: Returns) -> Returns:
    """Return the logarithm of the wealth after each hour: the mean over the stakes."""
    shares = np.divide(returns, bounds, out=np.zeros_like(returns), where=bounds > 0)
    factors = np.maximum(1 + STAKES[:, None] * shares, _NEVER_RUINED)
    return _log_mean(np.cumsum(np.log(factors), axis=1))


@lru_cache(maxsize=4096)
def smallest_visible(estimate: Estimate, bound: float, level: float) -> float | None:
    """Return the mean hourly difference that four of five seasons like this one would detect at this level.

    `bound` is the largest possible hourly loss. Both sequences must call it. It is accurate to 1e-7 of itself. None
    before the first verdict.
    """
    hours = estimate.hours
    if hours < SEQUENCE_HOURS_MIN:
        return None
    needed, times, variance = -math.log(level), np.array([float(hours)]), estimate.variance
    least = (sequence_deviations(hours, level, estimate.freedom) + POWER_DEVIATIONS) * estimate.error
    doubled: Returns = least * np.exp2(np.arange(1 + max(0, math.floor(math.log2(bound / least)))))
    is_seen = _expected_wealth(doubled, variance, bound, times) >= needed
    if not is_seen.any():
        return None  # not even about the largest possible gain in every hour
    first = int(np.argmax(is_seen))
    if not first:
        return least
    low, high = float(doubled[first - 1]), float(doubled[first])
    for _ in range(_SEARCH_ROUNDS):
        means = np.linspace(low, high, _SEARCH_PARTS + 1)
        first = int(np.argmax(_expected_wealth(means[1:], variance, bound, times) >= needed))
        low, high = means[first : first + 2].tolist()
    return high


@lru_cache(maxsize=4096)
def days_needed(estimate: Estimate, bound: float, level: float) -> int | None:
    """Return the days until four of five seasons would detect a true difference as large as the observed one.

    Accurate to 8 %; None if ten years are not enough.
    """
    mean = abs(estimate.mean)
    hours = np.array(_DAYS_SEARCHED * HOURS_PER_DAY, dtype=np.float64)
    is_seen = mean * np.sqrt(hours / estimate.variance) >= _sequence_bars(level)
    is_seen &= _expected_wealth(mean, estimate.variance, bound, hours) >= -math.log(level)
    return int(_DAYS_SEARCHED[np.argmax(is_seen)]) if is_seen.any() else None


def separable_sharpe(hours: int, volatility: float, bound: float, level: float) -> float | None:
    """Return the difference of two annual Sharpe ratios that four of five seasons of these hours would detect.

    Both accounts have this hourly volatility and are independent; `bound` is the largest possible hourly difference.
    None if no difference can be detected.
    """
    visible = smallest_visible(Estimate(hours, 0.0, 2 * volatility**2, freedom_of(hours)), bound, level)
    return None if visible is None else visible / volatility * math.sqrt(HOURS_PER_YEAR)


def _expected_wealth(mean: float | Returns, variance: float, bound: float, hours: Returns) -> Returns:
    """Return the log wealth that four of five seasons exceed, for one mean after each of these hours or vice versa."""
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
    """Return how many standard errors the confidence sequence requires on each searched day."""
    return POWER_DEVIATIONS + np.array(
        [sequence_deviations(hours, level, freedom_of(hours)) for hours in (_DAYS_SEARCHED * HOURS_PER_DAY).tolist()]
    )
