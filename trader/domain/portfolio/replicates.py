"""Replicates: how much of a model's hourly variance is the market's, and how much is the model's own noise."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trader.domain.portfolio.evidence import ReturnSeries
from trader.domain.portfolio.intervals import HOURS_MIN, percent


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
    start, end = max(one.start for one in replicates.values()), min(one.end for one in replicates.values())
    if start >= end:
        return None
    common = [one.within(start, end) for one in replicates.values()]
    returns = np.stack([one.values for one in common])[:, np.all([one.mask for one in common], axis=0)]
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
