"""Evidence: what an account's hours show about its return, and whether it differs from another's.

A statement is a value or the reason for its absence. Intervals are valid for one look at one window. Verdicts, which
people check every day, come from two sequences over the common hours of both accounts, corrected for the number of
simultaneous comparisons: a confidence sequence of the mean, and a bet that bounds losses not yet seen.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.core.intervals import (
    HOURS_MIN,
    HOURS_PER_DAY,
    LEVEL,
    SEQUENCE_HOURS_MIN,
    TRADES_MIN,
    ConfidenceInterval,
    Estimate,
    Returns,
    e_bh,
    estimates,
    holm,
    percent,
    percent_interval,
)
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, NO_BET, Bet, bet, days_needed, smallest_visible
from trader.portfolio.domain.returns import Observed, ReturnSeries

Word = Literal["better", "worse", "not distinguishable yet"]

REFERENCES: Final = 3
"""The references of every entrant: its rule agent, holding nothing, and buy and hold."""

VISIBLE_PERCENT_MAX: Final = 1000.0
"""A smallest visible difference beyond this says no more than that none is visible."""

E_VALUE_MAX: Final = 1e12
"""E values are cut here: no decision depends on larger ones."""

_ROUNDING: Final = 1e-9

_RUINED: Final = "the equity reached zero, after which there is no return"


def _observed(values: Returns, mask: Observed | None) -> Returns:
    """Return the returns from one observed hour to the next."""
    if mask is None:
        return values
    with np.errstate(invalid="ignore"):  # an account that lost everything
        returns: Returns = np.diff(np.cumsum(values)[mask], prepend=0.0)
    return returns


class Statement(NamedTuple):
    """An estimate, or the reason for its absence.

    `attempts` is the number of restarts of the compared accounts, plus one. Restarting after each loss succeeds by luck
    eventually, so the p value of the n-th attempt is multiplied by n². `bet` is the bet on the side of
    the mean, and `bound` is the largest possible hourly move against it; after a larger one (`breach`) there is no
    verdict, and an earlier one is withdrawn. `certain` needs no statistics: an account
    that lost everything is worse than one that did not.
    """

    hours: int
    estimate: Estimate | None
    reason: str | None = None
    attempts: int = 1
    bet: Bet = NO_BET
    bound: float = HOURLY_MOVE_MAX
    certain: Word | None = None
    breach: str | None = None

    @property
    def interval_percent(self) -> ConfidenceInterval | None:
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
        """The level at which both sequences exclude zero, before any correction; 1 while they do not."""
        if self.certain is not None:
            return 0.0
        if self.estimate is None or self.hours < SEQUENCE_HOURS_MIN:
            return 1.0
        return min(1.0, self.attempts**2 * max(self.estimate.p_value(), self.bet.level))

    @property
    def e_value(self) -> float:
        """The evidence now that the mean is not zero: under "no difference" its expectation is at most 1.

        The smaller one of the two sequences: one over the level of the confidence sequence, and half of the wealth of
        the bet, since the side of the bet follows the mean.
        """
        if self.certain is not None:
            return E_VALUE_MAX
        if self.estimate is None or self.hours < SEQUENCE_HOURS_MIN:
            return 0.0
        level = max(self.estimate.p_value(), 1 / E_VALUE_MAX)
        return min(1 / level, self.bet.wealth / 2, E_VALUE_MAX) / self.attempts**2

    def word(self, corrected_p: float, level: float = LEVEL) -> Word:
        """Return the verdict at a p value corrected for its family, which errs with probability `level` at most."""
        if corrected_p > level:
            return "not distinguishable yet"
        if self.estimate is None:
            return self.certain or "not distinguishable yet"
        return "better" if self.estimate.mean > 0 else "worse"


class Pair(NamedTuple):
    """Two accounts to compare. Any given reason prevents a statement. `attempts` is as in `Statement`."""

    first: ReturnSeries | None
    other: ReturnSeries | None
    reasons: Sequence[str | None] = ()
    attempts: int = 1


def state_returns(accounts: Iterable[tuple[ReturnSeries | None, int | None]]) -> list[Statement]:
    """Return the statement about each account's return. Its number counts completed trades; None: not a model's."""
    return _state_all([_own_returns(series, trades) for series, trades in accounts])


def compare(first: ReturnSeries | None, other: ReturnSeries | None, *reasons: str | None) -> Statement:
    """Return the statement about the paired differences of two accounts, over their common hours."""
    return compare_all([Pair(first, other, reasons)])[0]


def compare_all(pairs: Iterable[Pair], level: float = 1.0) -> list[Statement]:
    """Return the result of `compare` for each pair, computed together.

    If the confidence sequence alone does not reach the level, the bet is skipped, because both must agree.
    """
    pairs = list(pairs)
    statements = _state_all([_differences(*pair[:3]) for pair in pairs], level)
    return [each._replace(attempts=pair.attempts) for each, pair in zip(statements, pairs, strict=True)]


class _Sample(NamedTuple):
    """The log returns of an account, or the differences of two, from one observed hour to the next.

    `losses` are the largest possible losses between these hours, and `gains` the largest possible gains: for two
    accounts, the loss of one plus the gain of the other.
    """

    returns: Returns
    other: Returns | None
    losses: Returns
    gains: Returns

    @property
    def logs(self) -> Returns:
        return self.returns if self.other is None else self.returns - self.other

    @property
    def simple(self) -> Returns:
        """The simple returns, or their differences."""
        simple: Returns = np.expm1(self.returns) - (0.0 if self.other is None else np.expm1(self.other))
        return simple

    def bounds(self, mean: float) -> Returns:
        """Return the largest possible moves against the direction of the mean."""
        return self.losses if mean > 0 else self.gains

    def bet(self, mean: float) -> Bet:
        """Return the bet in the direction of the mean."""
        return bet(self.simple if mean > 0 else -self.simple, self.bounds(mean))

    def breach(self, mean: float) -> str | None:
        """Return which hour moved further against the mean than the bet on it allows, if one did."""
        moves = -self.simple if mean > 0 else self.simple
        beyond = moves - self.bounds(mean)
        if (beyond <= _ROUNDING).all():
            return None
        hour = int(np.argmax(beyond))
        kind, allowed = "loss" if mean > 0 else "gain", 100 * self.bounds(mean)[hour]
        return f"withdrawn: an hour had a {kind} of {100 * moves[hour]:.1f} %, beyond its bound of {allowed:.1f} %"


def _own_returns(series: ReturnSeries | None, trades: int | None) -> _Sample | Statement:
    if series is None:
        return Statement(0, None, "there are no whole hours yet")
    mask = _incomplete(series.observed)
    losses, gains = _bounds(series.loss_bounds, mask, 1.0), _bounds(series.gain_bounds, mask)
    sample = _Sample(_observed(series.values, mask), None, losses, gains)
    return _checked(sample, "whole hour", missing_trades(trades))


def _differences(
    first: ReturnSeries | None, other: ReturnSeries | None, reasons: Sequence[str | None]
) -> _Sample | Statement:
    """Return the paired differences, or a statement with only a reason."""
    if first is None or other is None:
        return Statement(0, None, next(filter(None, reasons), "there are no whole hours of both yet"))
    start, end = max(first.start, other.start), min(first.end, other.end)
    if start >= end:
        return Statement(0, None, "the two have no hour in common")
    first, other = first.within(start, end), other.within(start, end)
    is_ruined, is_other_ruined = (bool(np.isneginf(series.values).any()) for series in (first, other))
    if is_ruined != is_other_ruined:
        return Statement(len(first.values), None, _RUINED, certain="worse" if is_ruined else "better")
    mask = None if first.observed is None and other.observed is None else _incomplete(first.mask & other.mask)
    sample = _Sample(
        _observed(first.values, mask),
        _observed(other.values, mask),
        _bounds(first.loss_bounds, mask, 1.0) + _bounds(other.gain_bounds, mask),
        _bounds(first.gain_bounds, mask) + _bounds(other.loss_bounds, mask, 1.0),
    )
    return _checked(sample, "common hour", *reasons)


def _incomplete(mask: Observed | None) -> Observed | None:
    """Return the mask unless it is of all hours."""
    return None if mask is None or mask.all() else mask


def _bounds(bounds: Returns, mask: Observed | None, most: float = math.inf) -> Returns:
    """Return the largest possible moves from one observed hour to the next."""
    return np.minimum(most, _observed(bounds, mask))


def missing_trades(trades: int | None) -> str | None:
    """Return why the number of completed trades is too small, or None."""
    if trades is None or trades >= TRADES_MIN:
        return None
    return f"{trades} completed trade{'' if trades == 1 else 's'}; a statement about a model needs {TRADES_MIN}"


def _checked(sample: _Sample, what: str, *reasons: str | None) -> _Sample | Statement:
    """Return the sample, or the reason why it allows no statement. `what` names one of its hours."""
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
    breach = sample.breach(estimate.mean)
    bet = sample.bet(estimate.mean) if breach is None and p_value < 1 and p_value <= level else NO_BET
    bound = float(sample.bounds(estimate.mean)[-1])
    return Statement(estimate.hours, estimate, bet=bet, bound=bound, breach=breach)


class Verdict(NamedTuple):
    """A statement and its p value, corrected for all comparisons of its family.

    `family` is the number of its comparisons, and `level` their joint error probability, or their false discovery rate
    if they are exploratory: then the p value is the smallest such rate. `hours_max` is the length of the season, if
    there is one.
    """

    statement: Statement
    p_value: float
    family: int = 1
    level: float = LEVEL
    hours_max: int | None = None

    @property
    def word(self) -> Word:
        return self.statement.word(self.p_value, self.level)

    @property
    def visible_percent(self) -> float | None:
        """The smallest true difference that four of five such seasons would detect, in percent over these hours."""
        statement = self.statement
        if statement.estimate is None:
            return None
        visible = smallest_visible(statement.estimate, statement.bound, self._share)
        shown = None if visible is None else percent(statement.hours * visible)
        return None if shown is None or shown > VISIBLE_PERCENT_MAX else shown

    @property
    def days_needed(self) -> int | None:
        """The days until four of five seasons would detect a true difference as large as the observed one."""
        statement = self.statement
        if statement.estimate is None:
            return None
        days = days_needed(statement.estimate, statement.bound, self._share)
        return None if days is None or (self.hours_max is not None and 24 * days > self.hours_max) else days

    @property
    def _share(self) -> float:
        return self.level / (self.family * self.statement.attempts**2)

    @property
    def why(self) -> str | None:
        """Return why the two are indistinguishable or certainly different, in words; None if the figures suffice."""
        statement = self.statement
        if statement.estimate is None or self.word != "not distinguishable yet":
            return statement.reason
        if statement.breach is not None:
            return statement.breach
        if statement.hours < SEQUENCE_HOURS_MIN:
            return f"{statement.hours} common hours; a verdict needs {SEQUENCE_HOURS_MIN}"
        visible, days = self.visible_percent, self.days_needed
        elapsed = statement.hours / HOURS_PER_DAY
        if days is None:
            more = "not within ten years" if self.hours_max is None else "not within this season"
        else:
            more = f"about {max(1, round(days - elapsed))} days more"
        shown = "no difference" if visible is None else f"only a difference from {visible:,.1f} % on"
        return (
            f"cannot tell yet; {more} for a true difference as large as the present one; in {elapsed:.3g} days {shown} "
            f"can be seen; p {self.p_value:.2g} after correction"
        )

    def reversed(self) -> "Verdict":
        """Return the verdict on the other account of the comparison."""
        return self._replace(statement=self.statement.reversed())


def comparisons_among(entrants: int, references: int = REFERENCES, *, has_pairs: bool = True) -> int:
    """Return how many comparisons the boards can show for a number of entrants: every pair, and all references.

    All boards together are one family: the boards of variants and windows show parts of it, and the best entrant and
    the adjacent ones change from day to day.
    """
    return (entrants * (entrants - 1) // 2 if has_pairs else 0) + references * entrants


def judge_family(
    statements: Sequence[Statement],
    comparisons: int | None = None,
    level: float = LEVEL,
    hours_max: int | None = None,
    *,
    is_exploratory: bool = False,
) -> list[Verdict]:
    """Return the corrected verdicts of statements from a family of `comparisons` (None: only these).

    By Holm's method, the whole family errs with probability `level` at most. In an exploratory one, by e-BH, at most
    this share of the verdicts for or against is expected to be false.
    """
    family = len(statements) if comparisons is None else comparisons
    if is_exploratory:
        corrected = e_bh([statement.e_value for statement in statements], max(family, len(statements)))
    else:
        corrected = holm([statement.p_value for statement in statements], family)
    return [
        Verdict(each, p_value, family, level, hours_max) for each, p_value in zip(statements, corrected, strict=True)
    ]
