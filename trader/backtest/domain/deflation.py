"""Deflation: the significance of a Sharpe ratio after many trials on the same data.

Among many rules tried on the same past, some look good by luck. The best of N trials without any skill has an expected
Sharpe ratio of σ · ((1 − γ) Φ⁻¹(1 − 1/N) + γ Φ⁻¹(1 − 1/(N e))), with σ the standard deviation of the ratios of the
trials and γ the Euler-Mascheroni constant. Bailey and López de Prado, "The Deflated Sharpe Ratio: Correcting for
Selection Bias, Backtest Overfitting and Non-Normality", Journal of Portfolio Management 40:5 (2014).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, stdev
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_NORMAL: Final = NormalDist()
_EULER: Final = 0.5772156649015329
HOURS_MIN: Final = 24
"""Minimum hours of returns for a figure."""


class Deflated(NamedTuple):
    """A Sharpe ratio per hour after `trials`: `expected_best` is the expected best of that many trials without skill.

    `probability` is the probability, given the observed returns, that the true ratio exceeds `expected_best`.
    """

    trials: int
    sharpe_per_hour: float
    expected_best: float
    probability: float


def hourly_sharpe(returns: npt.NDArray[np.float64]) -> float | None:
    """Return mean / standard deviation (ddof 1) of hourly returns; None below 24 hours, or without variation."""
    if len(returns) < HOURS_MIN or not np.all(np.isfinite(returns)):
        return None
    spread = float(np.std(returns, ddof=1))
    return float(np.mean(returns)) / spread if spread > 0 else None


def expected_best(ratios: Sequence[float], trials: int) -> float:
    """Return the expected highest Sharpe ratio of this many trials without skill, given the spread of `ratios`."""
    if trials < 2 or len(ratios) < 2:
        return 0.0
    quantiles = _NORMAL.inv_cdf(1 - 1 / trials), _NORMAL.inv_cdf(1 - 1 / (trials * math.e))
    return stdev(ratios) * ((1 - _EULER) * quantiles[0] + _EULER * quantiles[1])


def deflate(returns: npt.NDArray[np.float64], ratios: Sequence[float], trials: int) -> Deflated | None:
    """Return the deflated Sharpe ratio of hourly returns.

    `ratios` are the Sharpe ratios of all trials that have one.
    """
    ratio = hourly_sharpe(returns)
    if ratio is None:
        return None
    scaled = (returns - np.mean(returns)) / np.std(returns)
    skewness, kurtosis = float(np.mean(scaled**3)), float(np.mean(scaled**4))
    best = expected_best(ratios, trials)
    deviation = math.sqrt(max(1e-12, 1 - skewness * ratio + (kurtosis - 1) / 4 * ratio**2))
    return Deflated(trials, ratio, best, _NORMAL.cdf((ratio - best) * math.sqrt(len(returns) - 1) / deviation))
