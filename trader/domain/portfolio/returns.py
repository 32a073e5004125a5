"""Returns: the hourly log returns of an account, and the equity by which they are reckoned."""

import math
from array import array
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.domain.portfolio.bets import HOURLY_MOVE_MAX, loss_bounds
from trader.domain.portfolio.intervals import Returns, percent
from trader.domain.portfolio.statistics import EquityPoint

_HOUR: Final = timedelta(hours=1)

Observed = NDArray[np.bool_]


class ReturnSeries(NamedTuple):
    """Hourly log returns of an account; the first is of the hour that begins at `start`.

    Hours that nobody observed have 0, and the first one after them has the return since. `observed` says which were;
    None: all. `bounds` are the most that the account could lose in each hour, in parts of its equity; None: as without
    leverage.
    """

    start: datetime
    values: Returns
    observed: Observed | None = None
    bounds: Returns | None = None

    @property
    def end(self) -> datetime:
        return self.start + len(self.values) * _HOUR

    @property
    def mask(self) -> Observed:
        """Which hours were observed."""
        return np.ones(len(self.values), dtype=np.bool_) if self.observed is None else self.observed

    @property
    def loss_bounds(self) -> Returns:
        """The most that the account could lose in each hour, in parts of its equity."""
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
        return ReturnSeries(self.start + first * _HOUR, self.values[first:after], observed, bounds)


def holding_nothing(series: ReturnSeries) -> ReturnSeries:
    """Return the returns of who holds nothing in the same hours, and can lose nothing."""
    zeros = np.zeros(len(series.values))
    return series._replace(values=zeros, bounds=zeros)


class EquitySeries:
    """The equity of an account hour by hour; an hour without a value keeps that of the hour before."""

    def __init__(self, initial_capital: float) -> None:
        self._start: datetime | None = None
        self._logs = array("d")
        self._observed = array("b")
        self._leverages = array("d")
        self._capital = math.log(initial_capital) if initial_capital > 0 else None  # an account not opened yet

    def set(self, points: Iterable[EquityPoint]) -> None:
        """Take ascending hours; those that are known from the first of them on are replaced."""
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

    def returns(self, until: datetime) -> ReturnSeries | None:
        """Return the log returns of the hours before `until`, the first since the initial capital; None without any."""
        if self._start is None or until <= self._start:
            return None
        hours = (until - self._start) // _HOUR
        logs, observed = np.array(self._logs)[:hours], np.array(self._observed, dtype=np.bool_)[:hours]
        with np.errstate(invalid="ignore"):  # equity that stays at zero
            values = np.diff(logs, prepend=logs[0] if self._capital is None else self._capital)
        bounds = loss_bounds(np.array(self._leverages)[:hours])
        return ReturnSeries(self._start, values, None if observed.all() else observed, bounds)
