"""Overfitting: how often the best of many configurations on one half of the past is below the median on the other.

Combinatorially symmetric cross-validation cuts the hours into an even number of blocks. For each choice of half of the
blocks, the configuration with the best Sharpe ratio on them has a rank among all N on the other half. With ω = rank /
(N + 1) and λ = ln(ω / (1 − ω)), the probability of backtest overfitting is the share of choices with λ ≤ 0. Bailey,
Borwein, López de Prado and Zhu, "The Probability of Backtest Overfitting", Journal of Computational Finance 20:4
(2017).
"""

from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from trader.core.statistics import Floats

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
