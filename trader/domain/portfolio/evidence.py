"""Evidence: what the hours of an account say about its return, and whether it differs from another's.

A statement is a value or the reason why there is none. Intervals are for one look at one window; verdicts, which people
look at every day, come from two sequences over all hours that both accounts have, corrected for the number of
comparisons that are made at once: a confidence sequence of the mean, and a bet that bounds the loss not seen yet.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.domain.portfolio.bets import HOURLY_MOVE_MAX, bet_level, days_needed, smallest_visible
from trader.domain.portfolio.intervals import (
    HOURS_MIN,
    HOURS_PER_DAY,
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
from trader.domain.portfolio.returns import Observed, ReturnSeries

Word = Literal["better", "worse", "not distinguishable yet"]

REFERENCES: Final = 3
"""What every entrant is compared with: its rule agent, holding nothing, and buying and holding."""

_RUINED: Final = "the equity reached zero, after which there is no return"


def _observed(values: Returns, mask: Observed | None) -> Returns:
    """Return the returns from one observed hour to the next."""
    if mask is None or mask.all():
        return values
    with np.errstate(invalid="ignore"):  # an account that lost everything
        returns: Returns = np.diff(np.cumsum(values)[mask], prepend=0.0)
    return returns


class Statement(NamedTuple):
    """An estimate, or the reason why there is none.

    `attempts` is how often what is compared was begun anew, plus one. Whoever begins anew after each loss will be lucky
    once, so the p value of the n-th attempt is multiplied by n². `bet_level` is that of the bet on the side of the
    mean, and `bound` the most that can be lost on that side in an hour. `certain` is what needs no statistics: who lost
    everything is worse than who did not.
    """

    hours: int
    estimate: Estimate | None
    reason: str | None = None
    attempts: int = 1
    bet_level: float = 1.0
    bound: float = HOURLY_MOVE_MAX
    certain: Word | None = None

    @property
    def interval_percent(self) -> Interval | None:
        """The 95 % interval of the return over these hours, in percent, for one look."""
        return None if self.estimate is None else percent_interval(self.estimate.interval, self.hours)

    @property
    def percent(self) -> float | None:
        """The return over these hours, in percent."""
        return None if self.estimate is None else percent(self.hours * self.estimate.mean)

    def reversed(self) -> "Statement":
        """Return the statement about the other account of a comparison."""
        estimate, certain = self.estimate, self.certain
        return self._replace(
            estimate=None if estimate is None else estimate._replace(mean=-estimate.mean),
            certain=certain and ("worse" if certain == "better" else "better"),
        )

    @property
    def p_value(self) -> float:
        """The level at which both sequences exclude zero, before any correction; 1 while they say nothing."""
        if self.certain is not None:
            return 0.0
        if self.estimate is None or self.hours < SEQUENCE_HOURS_MIN:
            return 1.0
        return min(1.0, self.attempts**2 * max(self.estimate.p_value(), self.bet_level))

    def word(self, corrected_p: float, level: float = LEVEL) -> Word:
        """Return the verdict at a p value that is corrected for its family, which may err in this part of cases."""
        if corrected_p > level:
            return "not distinguishable yet"
        if self.estimate is None:
            return self.certain or "not distinguishable yet"
        return "better" if self.estimate.mean > 0 else "worse"


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


def compare_all(pairs: Iterable[Pair], level: float = 1.0) -> list[Statement]:
    """Return what `compare` says about each pair, computed together.

    Where the confidence sequence alone does not reach the level, nothing is bet: both must agree.
    """
    return _state_all([_differences(*pair) for pair in pairs], level)


class _Sample(NamedTuple):
    """The log returns of an account, or of two that are compared, from one observed hour to the next.

    `bounds` are the most that can be lost between these hours: of two, what one can lose and the other gain.
    """

    returns: Returns
    other: Returns | None
    bounds: Returns

    @property
    def logs(self) -> Returns:
        return self.returns if self.other is None else self.returns - self.other

    def bet_level(self, mean: float) -> float:
        """Return the level of the bet on the side of the mean."""
        simple = np.expm1(self.returns) - (0.0 if self.other is None else np.expm1(self.other))
        return bet_level(simple if mean > 0 else -simple, self.bounds)


def _own_returns(series: ReturnSeries | None, trades: int | None) -> _Sample | Statement:
    if series is None:
        return Statement(0, None, "there are no whole hours yet")
    sample = _Sample(_observed(series.values, series.observed), None, _bounds(series, series.observed))
    return _checked(sample, "whole hour", missing_trades(trades))


def _differences(
    first: ReturnSeries | None, other: ReturnSeries | None, reasons: Sequence[str | None]
) -> _Sample | Statement:
    """Return the paired differences, or a statement that has only a reason."""
    if first is None or other is None:
        return Statement(0, None, next(filter(None, reasons), "there are no whole hours of both yet"))
    start, end = max(first.start, other.start), min(first.end, other.end)
    if start >= end:
        return Statement(0, None, "the two have no hour in common")
    first, other = first.within(start, end), other.within(start, end)
    is_ruined, is_other_ruined = (bool(np.isneginf(series.values).any()) for series in (first, other))
    if is_ruined != is_other_ruined:
        return Statement(len(first.values), None, _RUINED, certain="worse" if is_ruined else "better")
    mask = None if first.observed is None and other.observed is None else first.mask & other.mask
    sample = _Sample(
        _observed(first.values, mask), _observed(other.values, mask), _bounds(first, mask) + _bounds(other, mask)
    )
    return _checked(sample, "common hour", *reasons)


def _bounds(series: ReturnSeries, mask: Observed | None) -> Returns:
    """Return the most that an account can lose from one observed hour to the next."""
    return np.minimum(1.0, _observed(series.loss_bounds, mask))


def missing_trades(trades: int | None) -> str | None:
    """Return why so many completed trades are too few, or None."""
    if trades is None or trades >= TRADES_MIN:
        return None
    return f"{trades} completed trade{'' if trades == 1 else 's'}; a statement about a model needs {TRADES_MIN}"


def _checked(sample: _Sample, what: str, *reasons: str | None) -> _Sample | Statement:
    """Return the sample, or the reason why nothing can be stated about it. `what` names one of its hours."""
    hours = len(sample.returns)
    if hours < HOURS_MIN:
        return Statement(hours, None, f"{hours} {what}{'' if hours == 1 else 's'}; an interval needs {HOURS_MIN}")
    if (reason := next(filter(None, reasons), None)) is not None:
        return Statement(hours, None, reason)
    if not np.isfinite(sample.returns).all() or not (sample.other is None or np.isfinite(sample.other).all()):
        return Statement(hours, None, _RUINED)
    return sample


def _state_all(samples: Sequence[_Sample | Statement], level: float = 1.0) -> list[Statement]:
    computed = iter(estimates([sample.logs for sample in samples if isinstance(sample, _Sample)]))
    return [_stated(next(computed), sample, level) if isinstance(sample, _Sample) else sample for sample in samples]


def _stated(estimate: Estimate, sample: _Sample, level: float) -> Statement:
    if not estimate.has_spread:
        return Statement(estimate.hours, None, "no hour differs from another")
    p_value = estimate.p_value() if estimate.hours >= SEQUENCE_HOURS_MIN else 1.0
    bet = sample.bet_level(estimate.mean) if p_value < 1 and p_value <= level else 1.0
    return Statement(estimate.hours, estimate, bet_level=bet, bound=float(sample.bounds[-1]))


class Verdict(NamedTuple):
    """A statement and its p value, corrected for all comparisons of its family.

    `family` is how many comparisons there are in it, and `level` the part of cases in which any of them may err.
    """

    statement: Statement
    p_value: float
    family: int = 1
    level: float = LEVEL

    @property
    def word(self) -> Word:
        return self.statement.word(self.p_value, self.level)

    @property
    def visible_percent(self) -> float | None:
        """The smallest true difference that four of five such seasons would have called, in percent of these hours."""
        statement = self.statement
        if statement.estimate is None:
            return None
        visible = smallest_visible(statement.estimate, statement.bound, self._share)
        return None if visible is None else percent(statement.hours * visible)

    @property
    def days_needed(self) -> int | None:
        """After how many days four of five seasons would call a true difference as large as the one that was seen."""
        statement = self.statement
        return None if statement.estimate is None else days_needed(statement.estimate, statement.bound, self._share)

    @property
    def _share(self) -> float:
        return self.level / (self.family * self.statement.attempts**2)

    @property
    def why(self) -> str | None:
        """Return why the two cannot be told apart, in words, or why they surely can; None when the figures say it."""
        statement = self.statement
        if statement.estimate is None or self.word != "not distinguishable yet":
            return statement.reason
        if statement.hours < SEQUENCE_HOURS_MIN:
            return f"{statement.hours} common hours; a verdict needs {SEQUENCE_HOURS_MIN}"
        visible, days = self.visible_percent, self.days_needed
        shown = "no difference" if visible is None else f"only a difference from {visible:,.1f} % on"
        needed = "more than ten years" if days is None else f"about {days} days"
        return (
            f"in {statement.hours / HOURS_PER_DAY:.3g} days {shown} can be seen; a true difference as large as the "
            f"present one needs {needed}; p {self.p_value:.2g} after correction"
        )

    def reversed(self) -> "Verdict":
        """Return the verdict on the other account of the comparison."""
        return self._replace(statement=self.statement.reversed())


def comparisons_among(entrants: int, references: int = REFERENCES, *, has_pairs: bool = True) -> int:
    """Return how many comparisons the boards of so many entrants can show: every pair, and each with its references.

    All boards together are one family: those of every variant and window show parts of it, and who is the best or a
    neighbour changes from day to day.
    """
    return (entrants * (entrants - 1) // 2 if has_pairs else 0) + references * entrants


def judge_family(
    statements: Sequence[Statement], comparisons: int | None = None, level: float = LEVEL
) -> list[Verdict]:
    """Return the verdicts of statements of a family of so many comparisons (None: these), corrected by Holm.

    All of the family together err in this part of cases at most.
    """
    family = len(statements) if comparisons is None else comparisons
    corrected = holm([statement.p_value for statement in statements], family)
    return [Verdict(each, p_value, family, level) for each, p_value in zip(statements, corrected, strict=True)]
