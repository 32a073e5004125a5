"""Replicates: accounts of one configuration as one series, and how much of their variance is their own noise."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import numpy as np

from trader.domain.portfolio.intervals import HOURS_MIN, percent
from trader.domain.portfolio.returns import ReturnSeries

_HOUR: Final = timedelta(hours=1)


def mean_series(series: Sequence[ReturnSeries]) -> ReturnSeries | None:
    """Return the mean of the log returns of several accounts, in each hour over those that had begun; None without any.

    So an account that begins later, or anew, does not make the past of the others disappear. Together they can lose
    what the most leveraged of them can.
    """
    if not series:
        return None
    start, end = min(replicate.start for replicate in series), max(replicate.end for replicate in series)
    hours = (end - start) // _HOUR
    total, count, observed = np.zeros(hours), np.zeros(hours), np.zeros(hours, dtype=np.bool_)
    bounds = np.zeros(hours)
    for replicate in series:
        first = (replicate.start - start) // _HOUR
        part = slice(first, first + len(replicate.values))
        total[part] += replicate.values
        count[part] += 1
        observed[part] |= replicate.mask
        bounds[part] = np.maximum(bounds[part], replicate.loss_bounds)
    return ReturnSeries(start, total / np.maximum(count, 1), observed, bounds)


class ReplicateNoise(NamedTuple):
    """What several accounts of one configuration did in the hours that all of them have.

    `spread_percent` is the standard deviation (ddof 1) of their returns over these hours, in percent. `noise_percent`
    is the share of the variance of an hour in which they differ from each other; the rest they have in common.
    """

    model_ids: Sequence[str]
    hours: int
    lowest_percent: float
    highest_percent: float
    spread_percent: float
    noise_percent: float | None


def split_variance(replicates: Mapping[str, ReturnSeries]) -> ReplicateNoise | None:
    """Return the split of the variance; None when they have too few hours in common.

    A one-way analysis of variance with the hours as groups: the mean square within hours is the replicates' own noise,
    the mean square between hours, less that, the market's part times the number of replicates.
    """
    series = replicates.values()
    start, end = max(each.start for each in series), min(each.end for each in series)
    if start >= end:
        return None
    common = [each.within(start, end) for each in series]
    returns = np.stack([each.values for each in common])[:, np.all([each.mask for each in common], axis=0)]
    if (hours := returns.shape[1]) < HOURS_MIN:
        return None
    if not np.isfinite(returns).all():
        return None
    totals = [percent(float(total)) for total in returns.sum(axis=1)]
    own = float(np.mean(np.var(returns, axis=0, ddof=1)))
    shared = max(0.0, float(np.var(returns.mean(axis=0), ddof=1)) - own / len(replicates))
    return ReplicateNoise(
        model_ids=sorted(replicates),
        hours=hours,
        lowest_percent=min(totals),
        highest_percent=max(totals),
        spread_percent=float(np.std(totals, ddof=1)),
        noise_percent=100 * own / (own + shared) if own + shared > 0 else None,
    )
