"""Selection: what the best of many trials on the same data is worth.

Among many rules tried on the same past, some look good by luck. Two measures say how many, and how good:

Deflation. The best of N trials without any skill has an expected Sharpe ratio of
σ · ((1 − γ) Φ⁻¹(1 − 1/N) + γ Φ⁻¹(1 − 1/(N e))), with σ the standard deviation of the ratios of trials of one family and
γ the Euler-Mascheroni constant. Bailey and López de Prado, "The Deflated Sharpe Ratio: Correcting for Selection Bias,
Backtest Overfitting and Non-Normality", Journal of Portfolio Management 40:5 (2014). The error of a ratio falls with
the square root of its hours, so the ratios of shorter and longer runs are scaled to the length of this one. Families
differ in their mean, for example by the fees that they pay, and that is not luck. So σ is pooled within the families.
Where none has two trials, it is 1/√(T − 1), the standard error of the ratio of T returns without skill: Lo, "The
Statistics of Sharpe Ratios", Financial Analysts Journal 58:4 (2002).

Overfitting: how often the best of many configurations on one half of the past is below the median on the other.
Combinatorially symmetric cross-validation cuts the hours into an even number of blocks. For each choice of half of the
blocks, the configuration with the best Sharpe ratio on them has a rank among all N on the other half. With ω = rank /
(N + 1) and λ = ln(ω / (1 − ω)), the probability of backtest overfitting is the share of choices with λ ≤ 0. Bailey,
Borwein, López de Prado and Zhu, "The Probability of Backtest Overfitting", Journal of Computational Finance 20:4
(2017).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import NormalDist, variance
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trader.core.statistics import Floats

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


def spread_within(families: Iterable[Sequence[float]]) -> float | None:
    """Return the standard deviation of Sharpe ratios within families; None unless one has two."""
    several = [ratios for ratios in families if len(ratios) > 1]
    if not several:
        return None
    squares = sum((len(ratios) - 1) * variance(ratios) for ratios in several)
    return math.sqrt(squares / sum(len(ratios) - 1 for ratios in several))


def expected_best(spread: float, trials: int) -> float:
    """Return the expected highest of this many Sharpe ratios without skill, whose standard deviation is `spread`."""
    if trials < 2:
        return 0.0
    quantiles = _NORMAL.inv_cdf(1 - 1 / trials), _NORMAL.inv_cdf(1 - 1 / (trials * math.e))
    return spread * ((1 - _EULER) * quantiles[0] + _EULER * quantiles[1])


def deflate(returns: npt.NDArray[np.float64], spread: float | None, trials: int) -> Deflated | None:
    """Return the deflated Sharpe ratio of hourly returns.

    `spread` is the standard deviation of the Sharpe ratios of trials within one family of strategies.
    """
    ratio = hourly_sharpe(returns)
    if ratio is None:
        return None
    scaled = (returns - np.mean(returns)) / np.std(returns)
    skewness, kurtosis = float(np.mean(scaled**3)), float(np.mean(scaled**4))
    best = expected_best(1 / math.sqrt(len(returns) - 1) if spread is None else spread, trials)
    deviation = math.sqrt(max(1e-12, 1 - skewness * ratio + (kurtosis - 1) / 4 * ratio**2))
    return Deflated(trials, ratio, best, _NORMAL.cdf((ratio - best) * math.sqrt(len(returns) - 1) / deviation))


_BLOCKS_MAX: Final = 16
_BLOCK_HOURS_MIN: Final = 6
_AT_ONCE: Final = 4_000_000
"""Sharpe ratios computed at once: 32 MB."""


class Overfitting(NamedTuple):
    """The probability of overfitting, over all choices of half of the blocks."""

    probability: float
    configurations: int
    blocks: int
    choices: int


def overfitting(returns: Floats, blocks: int | None = None) -> Overfitting | None:
    """Return the probability of overfitting of configurations from their hourly returns, one column for each.

    None with fewer than two configurations, fewer than 24 hours, or an account without equity. By default there are 16
    blocks, or fewer so that each has six hours. Hours at the beginning that fill no block are left out. A ratio without
    variation is 0.
    """
    hours, count = returns.shape
    blocks = blocks or min(_BLOCKS_MAX, hours // _BLOCK_HOURS_MIN // 2 * 2)
    if count < 2 or blocks < 4 or not np.all(np.isfinite(returns)):
        return None
    length = hours // blocks
    parts = returns[hours - blocks * length :].reshape(blocks, length, count)
    sums, squares = parts.sum(axis=1), (parts**2).sum(axis=1)
    chosen = [list(each) for each in combinations(range(blocks), blocks // 2)]
    halves = np.zeros((len(chosen), blocks))
    np.put_along_axis(halves, np.array(chosen), 1.0, axis=1)
    overfitted = 0
    step = max(1, _AT_ONCE // count)
    for half in np.split(halves, range(step, len(halves), step)):
        inside, outside = (_ratios(each @ sums, each @ squares, length * blocks // 2) for each in (half, 1 - half))
        best = np.take_along_axis(outside, inside.argmax(axis=1)[:, None], axis=1)
        ranks = (outside < best).sum(axis=1) + ((outside == best).sum(axis=1) + 1) / 2
        overfitted += int((ranks <= (count + 1) / 2).sum())  # λ ≤ 0
    return Overfitting(overfitted / len(chosen), count, blocks, len(chosen))


def _ratios(sums: Floats, squares: Floats, hours: int) -> Floats:
    """Return the hourly Sharpe ratios of series given by the sum and the sum of squares of their returns."""
    means = sums / hours
    variances = (squares - hours * means**2) / (hours - 1)
    varies = variances > 1e-12 * squares / hours
    return np.where(varies, means, 0.0) / np.sqrt(np.where(varies, variances, 1.0))
