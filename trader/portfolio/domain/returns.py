"""Returns: the hourly log returns of an account and of several of one configuration, and the equity behind them."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.core.intervals import HOURS_MIN, Returns, percent
from trader.core.statistics import EquityPoint
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, UNKNOWN_LEVERAGE, move_bounds

_HOUR: Final = timedelta(hours=1)

Observed = NDArray[np.bool_]


class ReturnSeries(NamedTuple):
    """Hourly log returns of an account; the first belongs to the hour that begins at `start`.

    Unobserved hours have 0, and the next observed hour has the return since. `observed` marks the observed hours; None:
    all. `bounds` are the account's largest possible moves in each hour, as fractions of its equity, by what it held
    before; None: as without leverage. `loss_max` and `gain_max` are the bounds that a season enforces, if it does.
    """

    start: datetime
    values: Returns
    observed: Observed | None = None
    bounds: Returns | None = None
    loss_max: float | None = None
    gain_max: float | None = None

    @property
    def end(self) -> datetime:
        return self.start + len(self.values) * _HOUR

    @property
    def mask(self) -> Observed:
        """The mask of observed hours."""
        return np.ones(len(self.values), dtype=np.bool_) if self.observed is None else self.observed

    @property
    def gain_bounds(self) -> Returns:
        """The account's largest possible gain in each hour, as a fraction of its equity."""
        return self.held_bounds if self.gain_max is None else np.full(len(self.values), self.gain_max)

    @property
    def loss_bounds(self) -> Returns:
        """The account's largest possible loss in each hour, as a fraction of its equity: at most all of it."""
        return np.minimum(1.0, self.held_bounds) if self.loss_max is None else np.full(len(self.values), self.loss_max)

    @property
    def held_bounds(self) -> Returns:
        """The account's largest possible move in each hour by what it held before, as a fraction of its equity."""
        return np.full(len(self.values), HOURLY_MOVE_MAX) if self.bounds is None else self.bounds

    @property
    def percent(self) -> float | None:
        """The return over all hours, in percent; None without any."""
        return percent(float(np.sum(self.values))) if len(self.values) else None

    def within(self, start: datetime, end: datetime) -> "ReturnSeries":
        """Return the part in the hours [start, end)."""
        if start <= self.start and end >= self.end:
            return self
        first = min(max(0, (start - self.start) // _HOUR), len(self.values))
        after = max(first, (end - self.start) // _HOUR)
        observed = None if self.observed is None else self.observed[first:after]
        bounds = None if self.bounds is None else self.bounds[first:after]
        values, start = self.values[first:after], self.start + first * _HOUR
        return self._replace(start=start, values=values, observed=observed, bounds=bounds)


def holding_nothing(series: ReturnSeries) -> ReturnSeries:
    """Return the returns of holding nothing in the same hours, without any possible loss."""
    zeros = np.zeros(len(series.values))
    return ReturnSeries(series.start, zeros, series.observed, zeros)


class Exposures:
    """The entry notional of all positions of an account at each moment, as its trades prove."""

    def __init__(self, held: Iterable[tuple[float, datetime, datetime | None]]) -> None:
        """Take the entry notional of each part of a position, its opening, and its close (None: it is open)."""
        changes: list[tuple[float, float]] = []
        for notional, opened_at, closed_at in held:
            changes.append((opened_at.timestamp(), notional))
            if closed_at is not None:
                changes.append((closed_at.timestamp(), -notional))
        changes.sort()
        self._times = np.array([at for at, _ in changes])
        self._held = np.cumsum([change for _, change in changes])

    def largest(self, start: datetime, hours: int) -> Returns:
        """Return the largest exposure in each of the hours from `start`."""
        edges = start.timestamp() + 3600.0 * np.arange(hours + 1)
        changed = np.searchsorted(self._times, edges, "right")
        largest = np.concatenate([[0.0], self._held])[changed[:-1]]
        busy = changed[1:] > changed[:-1]
        if busy.any():
            within = np.maximum.reduceat(self._held[: changed[-1]], changed[:-1][busy])
            largest[busy] = np.maximum(largest[busy], within)
        return largest


class EquitySeries:
    """The equity of an account hour by hour; an hour without a value keeps the previous one.

    `leverage` is the account's largest before its first hour.
    """

    def __init__(self, initial_capital: float, leverage: float = 1.0) -> None:
        self._leverage = leverage
        self._start: datetime | None = None
        self._logs = array("d")
        self._observed = array("b")
        self._leverages = array("d")
        self._capital = math.log(initial_capital) if initial_capital > 0 else None  # not opened yet

    def set(self, points: Iterable[EquityPoint]) -> None:
        """Take ascending hours, replacing the known ones from the first of them on."""
        for point in points:
            if self._start is None:
                self._start = point.hour
            place = (point.hour - self._start) // _HOUR
            del self._logs[place:], self._observed[place:], self._leverages[place:]
            missing = place - len(self._logs)
            self._logs.extend([self._logs[-1]] * missing if missing else [])
            self._observed.extend([0] * missing)
            self._leverages.extend([0.0] * missing)
            self._logs.append(math.log(point.value) if point.value > 0 else -math.inf)
            self._observed.append(1)
            self._leverages.append(math.nan if point.leverage is None else point.leverage)

    def returns(self, until: datetime, exposures: Exposures | None = None) -> ReturnSeries | None:
        """Return the log returns of the hours before `until`, the first from the initial capital; None without any.

        `exposures` are what the account held between the values of its hours.
        """
        if self._start is None or until <= self._start:
            return None
        hours = (until - self._start) // _HOUR
        logs, observed = np.array(self._logs)[:hours], np.array(self._observed, dtype=np.bool_)[:hours]
        before = np.concatenate([[logs[0] if self._capital is None else self._capital], logs[:-1]])
        with np.errstate(invalid="ignore"):  # from zero, nothing returns anything
            values = np.nan_to_num(logs - before, nan=0.0, posinf=0.0, neginf=-np.inf)
        leverages = np.array(self._leverages)[:hours]
        if exposures is not None:
            equity, held = np.exp(before), exposures.largest(self._start, len(logs))
            proved = np.divide(held, equity, out=np.full(len(logs), UNKNOWN_LEVERAGE), where=equity > 0)
            leverages = np.where(held > 0, np.maximum(leverages, proved), leverages)
        bounds = move_bounds(leverages, self._leverage)
        return ReturnSeries(self._start, values, None if observed.all() else observed, bounds)


# --- replicates -------------------------------------------------------------------------------------------------------


def mean_series(series: Sequence[ReturnSeries]) -> ReturnSeries | None:
    """Return the log returns of the money of several accounts together; None without any.

    Each starts with the same amount: the mean of their equity counts, so one that loses everything costs its share and
    no more. An account that starts or restarts later joins then, and does not hide the past of the others. Their joint
    bounds are the most leveraged one's, or the bounds that their season enforces on all of them.
    """
    if not series:
        return None
    start, end = min(replicate.start for replicate in series), max(replicate.end for replicate in series)
    hours = (end - start) // _HOUR
    money, gains, observed = np.zeros(hours), np.zeros(hours), np.zeros(hours, dtype=np.bool_)
    bounds = np.zeros(hours)
    for replicate in series:
        first = (replicate.start - start) // _HOUR
        part = slice(first, first + len(replicate.values))
        after = np.exp(np.cumsum(replicate.values))
        before = np.concatenate([[1.0], after[:-1]])
        money[part] += before
        gains[part] += after - before
        observed[part] |= replicate.mask
        bounds[part] = np.maximum(bounds[part], replicate.held_bounds)
    with np.errstate(divide="ignore"):  # all have lost everything
        values = np.log1p(np.divide(gains, money, out=np.zeros(hours), where=money > 0))
    return ReturnSeries(start, values, observed, bounds, series[0].loss_max, series[0].gain_max)


class ReplicateNoise(NamedTuple):
    """The split of the variance of several accounts of one configuration, over their common hours.

    `spread_percent` is the standard deviation (ddof 1) of their returns over these hours, in percent. `noise_percent`
    is the share of an hour's variance in which they differ from each other; they share the rest.
    """

    model_ids: Sequence[str]
    hours: int
    lowest_percent: float
    highest_percent: float
    spread_percent: float
    noise_percent: float | None


def split_variance(replicates: Mapping[str, ReturnSeries]) -> ReplicateNoise | None:
    """Return the split of the variance; None if they have too few common hours.

    A one-way analysis of variance with the hours as groups: the mean square within hours is the replicates' own noise;
    the mean square between hours minus that is the market's share times the number of replicates.
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
