"""Evidence: what the hours of an account say about its return, and whether it differs from another's.

A statement is a value or the reason why there is none. Intervals are for one look at one window; verdicts, which people
look at every day, come from the confidence sequence over all hours that both accounts have, corrected for the number of
comparisons that are made at once.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.domain.portfolio.intervals import (
    HOURS_MIN,
    HOURS_PER_DAY,
    HOURS_PER_YEAR,
    LEVEL,
    SEQUENCE_HOURS_MIN,
    TRADES_MIN,
    Estimate,
    Interval,
    Returns,
    estimates,
    holm,
    percent,
    percent_interval,
)
from trader.domain.portfolio.statistics import EquityPoint

Word = Literal["better", "worse", "not distinguishable yet"]

_HOUR: Final = timedelta(hours=1)


Observed = NDArray[np.bool_]


class ReturnSeries(NamedTuple):
    """Hourly log returns of an account; the first is of the hour that begins at `start`.

    Hours that nobody observed have 0, and the first one after them has the return since. `observed` says which were;
    None: all.
    """

    start: datetime
    values: Returns
    observed: Observed | None = None

    @property
    def end(self) -> datetime:
        return self.start + len(self.values) * _HOUR

    @property
    def mask(self) -> Observed:
        """Which hours were observed."""
        return np.ones(len(self.values), dtype=np.bool_) if self.observed is None else self.observed

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
        return ReturnSeries(self.start + first * _HOUR, self.values[first:after], observed)


def mean_series(series: Sequence[ReturnSeries]) -> ReturnSeries | None:
    """Return the mean of the log returns of several accounts, in each hour over those that had begun; None without any.

    So an account that begins later, or anew, does not make the past of the others disappear.
    """
    if not series:
        return None
    start, end = min(replicate.start for replicate in series), max(replicate.end for replicate in series)
    hours = (end - start) // _HOUR
    total, count, observed = np.zeros(hours), np.zeros(hours), np.zeros(hours, dtype=np.bool_)
    for replicate in series:
        first = (replicate.start - start) // _HOUR
        part = slice(first, first + len(replicate.values))
        total[part] += replicate.values
        count[part] += 1
        observed[part] |= replicate.mask
    return ReturnSeries(start, total / np.maximum(count, 1), observed)


def _observed(values: Returns, mask: Observed | None) -> Returns:
    """Return the returns from one observed hour to the next."""
    if mask is None or mask.all():
        return values
    with np.errstate(invalid="ignore"):  # an account that lost everything
        returns: Returns = np.diff(np.cumsum(values)[mask], prepend=0.0)
    return returns


class EquitySeries:
    """The equity of an account hour by hour; an hour without a value keeps that of the hour before."""

    def __init__(self, initial_capital: float) -> None:
        self._start: datetime | None = None
        self._logs = array("d")
        self._observed = array("b")
        self._capital = math.log(initial_capital) if initial_capital > 0 else None  # an account not opened yet

    def set(self, points: Iterable[EquityPoint]) -> None:
        """Take ascending hours; those that are known from the first of them on are replaced."""
        for point in points:
            if self._start is None:
                self._start = point.hour
            place = (point.hour - self._start) // _HOUR
            del self._logs[place:], self._observed[place:]
            missing = place - len(self._logs)
            self._logs.extend([self._logs[-1]] * missing if missing else [])
            self._observed.extend([0] * missing)
            self._logs.append(math.log(point.value) if point.value > 0 else -math.inf)
            self._observed.append(1)

    def returns(self, until: datetime) -> ReturnSeries | None:
        """Return the log returns of the hours before `until`, the first since the initial capital; None without any."""
        if self._start is None or until <= self._start:
            return None
        hours = (until - self._start) // _HOUR
        logs, observed = np.array(self._logs)[:hours], np.array(self._observed, dtype=np.bool_)[:hours]
        with np.errstate(invalid="ignore"):  # equity that stays at zero
            values = np.diff(logs, prepend=logs[0] if self._capital is None else self._capital)
        return ReturnSeries(self._start, values, None if observed.all() else observed)


class Statement(NamedTuple):
    """An estimate, or the reason why there is none.

    `attempts` is how often what is compared was begun anew, plus one. Whoever begins anew after each loss will be lucky
    once, so the p value of the n-th attempt is multiplied by n².
    """

    hours: int
    estimate: Estimate | None
    reason: str | None = None
    attempts: int = 1

    @property
    def interval_percent(self) -> Interval | None:
        """The 95 % interval of the return over these hours, in percent, for one look."""
        return None if self.estimate is None else percent_interval(self.estimate.interval, self.hours)

    @property
    def detectable_percent_per_day(self) -> float | None:
        """The smallest difference that this much data could show, in percent a day."""
        return None if self.estimate is None else percent(HOURS_PER_DAY * self.estimate.detectable)

    @property
    def detectable_percent_per_year(self) -> float | None:
        return None if self.estimate is None else percent(HOURS_PER_YEAR * self.estimate.detectable)

    @property
    def percent(self) -> float | None:
        """The return over these hours, in percent."""
        return None if self.estimate is None else percent(self.hours * self.estimate.mean)

    def reversed(self) -> "Statement":
        """Return the statement about the other account of a comparison."""
        estimate = self.estimate
        return self if estimate is None else self._replace(estimate=estimate._replace(mean=-estimate.mean))

    @property
    def p_value(self) -> float:
        """The level of the confidence sequence that excludes zero, before any correction; 1 while it says nothing."""
        if self.estimate is None or self.hours < SEQUENCE_HOURS_MIN:
            return 1.0
        return min(1.0, self.attempts**2 * self.estimate.p_value())

    def word(self, corrected_p: float) -> Word:
        """Return the verdict at a p value that is corrected for its family."""
        if self.estimate is None or corrected_p > LEVEL:
            return "not distinguishable yet"
        return "better" if self.estimate.mean > 0 else "worse"

    def why(self, corrected_p: float) -> str | None:
        """Return why the two cannot be told apart, in words; None when they can."""
        if self.estimate is None or self.word(corrected_p) != "not distinguishable yet":
            return self.reason
        if self.hours < SEQUENCE_HOURS_MIN:
            return f"{self.hours} common hours; a verdict needs {SEQUENCE_HOURS_MIN}"
        return (
            f"with this much data a difference under {self.detectable_percent_per_day:.2g} % a day cannot be seen; "
            f"p {corrected_p:.2g} after correction"
        )


class Pair(NamedTuple):
    """Two accounts that are compared. A reason that is given stands in the way of any statement."""

    first: ReturnSeries | None
    other: ReturnSeries | None
    reasons: Sequence[str | None] = ()


def state_return(series: ReturnSeries | None, trades: int | None) -> Statement:
    """Return what the hours of an account say about its return. `trades` are its completed ones; None: no model's."""
    return state_returns([(series, trades)])[0]


def state_returns(accounts: Iterable[tuple[ReturnSeries | None, int | None]]) -> list[Statement]:
    """Return what `state_return` says about each account, computed together."""
    return _state_all([_own_returns(series, trades) for series, trades in accounts])


def compare(first: ReturnSeries | None, other: ReturnSeries | None, *reasons: str | None) -> Statement:
    """Return what the paired differences of two accounts say, over the hours that both have."""
    return compare_all([Pair(first, other, reasons)])[0]


def compare_all(pairs: Iterable[Pair]) -> list[Statement]:
    """Return what `compare` says about each pair, computed together."""
    return _state_all([_differences(*pair) for pair in pairs])


def _own_returns(series: ReturnSeries | None, trades: int | None) -> Returns | Statement:
    if series is None:
        return Statement(0, None, "there are no whole hours yet")
    return _checked(_observed(series.values, series.observed), "whole hour", missing_trades(trades))


def _differences(
    first: ReturnSeries | None, other: ReturnSeries | None, reasons: Sequence[str | None]
) -> Returns | Statement:
    """Return the paired differences, or a statement that has only a reason."""
    if first is None or other is None:
        return Statement(0, None, next(filter(None, reasons), "there are no whole hours of both yet"))
    start, end = max(first.start, other.start), min(first.end, other.end)
    if start >= end:
        return Statement(0, None, "the two have no hour in common")
    first, other = first.within(start, end), other.within(start, end)
    with np.errstate(invalid="ignore"):  # two accounts that lost everything in the same hour
        difference = first.values - other.values
    mask = None if first.observed is None and other.observed is None else first.mask & other.mask
    return _checked(_observed(difference, mask), "common hour", *reasons)


def missing_trades(trades: int | None) -> str | None:
    """Return why so many completed trades are too few, or None."""
    if trades is None or trades >= TRADES_MIN:
        return None
    return f"{trades} completed trade{'' if trades == 1 else 's'}; a statement about a model needs {TRADES_MIN}"


def _checked(returns: Returns, what: str, *reasons: str | None) -> Returns | Statement:
    """Return the returns, or the reason why nothing can be stated about them. `what` names one of them."""
    hours = len(returns)
    if hours < HOURS_MIN:
        return Statement(hours, None, f"{hours} {what}{'' if hours == 1 else 's'}; an interval needs {HOURS_MIN}")
    if (reason := next(filter(None, reasons), None)) is not None:
        return Statement(hours, None, reason)
    if not np.isfinite(returns).all():
        return Statement(hours, None, "the equity reached zero, after which there is no return")
    return returns


def _state_all(samples: Sequence[Returns | Statement]) -> list[Statement]:
    computed = iter(estimates([sample for sample in samples if not isinstance(sample, Statement)]))
    return [sample if isinstance(sample, Statement) else _stated(next(computed)) for sample in samples]


def _stated(estimate: Estimate) -> Statement:
    if not estimate.has_spread:
        return Statement(estimate.hours, None, "no hour differs from another")
    return Statement(estimate.hours, estimate)


class Verdict(NamedTuple):
    """A statement and its p value, corrected for all comparisons of its family."""

    statement: Statement
    p_value: float

    @property
    def word(self) -> Word:
        return self.statement.word(self.p_value)

    @property
    def why(self) -> str | None:
        return self.statement.why(self.p_value)

    def reversed(self) -> "Verdict":
        """Return the verdict on the other account of the comparison."""
        return self._replace(statement=self.statement.reversed())


def judge_family(
    statements: Sequence[Statement], against_best: Sequence[Statement] = (), choices: int = 1
) -> list[Verdict]:
    """Return the verdicts of comparisons that are read together: all of them together err in 5 % of cases at most.

    Those `against_best` come last. Their reference is the best of `choices` accounts, chosen by its result, so that
    every comparison of two of them could have been made: their p values are multiplied by half of the choices. That is
    enough, since only differences to the disadvantage of what is compared with the best count.
    """
    weighted = [1.0 if _is_ahead(each) else min(1.0, max(1.0, choices / 2) * each.p_value) for each in against_best]
    corrected = holm([*(statement.p_value for statement in statements), *weighted])
    return [Verdict(each, p_value) for each, p_value in zip([*statements, *against_best], corrected, strict=True)]


def judge_neighbours(statements: Sequence[Statement], entrants: int | None = None) -> list[Verdict]:
    """Return the verdicts on neighbours in an order that changes: each pair may be neighbours some day.

    So the p values are corrected for the number of pairs that there are of so many entrants, earlier ones of the same
    models included (None: one for each place in the order).
    """
    if not statements:
        return []
    count = len(statements) + 1 if entrants is None else entrants
    weight = count * (count - 1) / 2 / len(statements)
    corrected = holm([min(1.0, weight * statement.p_value) for statement in statements])
    return [Verdict(each, p_value) for each, p_value in zip(statements, corrected, strict=True)]


def _is_ahead(statement: Statement) -> bool:
    return statement.estimate is not None and statement.estimate.mean > 0


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
