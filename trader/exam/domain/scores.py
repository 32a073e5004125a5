"""Scores of an exam: the share of the oracle per edge, what was burned in null worlds, and which of two entrants is
better.

The test bets on the paired differences, so that an exam may be looked at after every state: Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society B 86:1 (2024).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from trader.core.intervals import LEVEL, ConfidenceInterval, Returns
from trader.exam.domain.law import GAIN_MAX, LOSS_MAX, RISK_BUDGET
from trader.exam.domain.worlds import USUAL_VALUE, Edge, Kind
from trader.portfolio.domain.bets import bet

WORLDS: Final = LOSS_MAX + GAIN_MAX
"""The largest difference of two scores in worlds, in units of the oracle's usual value."""

OUTCOME_MAX: Final = 4.0
"""The largest score in moments of a recording, in units of the volatility."""

MOMENTS: Final = 2 * OUTCOME_MAX
"""The largest difference of two scores in moments of a recording, in units of the volatility."""

STATES_MIN: Final = 20
"""The states that an interval needs."""

ENTRANTS_MIN: Final = 5
"""The entrants that a rank correlation needs."""

OVERSIZED: Final = 1.25
"""The size from which on a position is larger than the oracle's."""

BASIS_POINTS: Final = 1e4


BoundedScore = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Scored(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The decision of one entrant in one state, and its score. All values are fractions of equity.

    `value` is the expected value of the decision beyond doing nothing, `risk` the deviation over the horizon of what it
    changed, `score` the value credited within the risk budget, and `oracle` what the oracle's decision is worth.
    `sample` counts the decisions of one entrant in one state from 0. In moments of a recording, `value` is the gain,
    and `score` is net of drift, in units of the volatility.
    """

    state: int
    entrant: str
    edge: Edge | None
    kind: Kind | Literal["recorded"]
    value: BoundedScore
    risk: BoundedScore
    score: BoundedScore
    oracle: BoundedScore
    sample: int = 0


class MeanOfStates(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A mean over states with its 95% interval; `interval` None: too few states."""

    mean: float
    interval: ConfidenceInterval | None


class Share(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The share of the oracle that an entrant earned in some states; `interval` None: too few states."""

    states: int
    share: float
    interval: ConfidenceInterval | None


class Sizes(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How large an entrant's positions were, relative to the oracle's, and which part of them was larger; `median`
    None: it never held any."""

    median: float | None
    over: float


def share_of_oracle(scored: Sequence[Scored]) -> Share | None:
    """Return the share of the oracle's gains that was earned; None where the oracle earned nothing.

    A state with several samples counts with their mean.
    """
    scores, oracles = (_of_states(scored, name) for name in ("score", "oracle"))
    total, count = float(oracles.sum()), len(oracles)
    if total <= 0:
        return None
    share = float(scores.sum()) / total
    return Share(count, share, interval_of(scores / USUAL_VALUE, LOSS_MAX, GAIN_MAX, oracles / USUAL_VALUE, GAIN_MAX))


def mean_of(scored: Sequence[Scored]) -> MeanOfStates | None:
    """Return the mean score in moments of a recording; None without any."""
    return _figure(_of_states(scored, "score"), OUTCOME_MAX, OUTCOME_MAX)


def burnt(scored: Sequence[Scored]) -> MeanOfStates | None:
    """Return the mean cost of a decision in null worlds in basis points of equity; None without any."""
    gain, loss = (most * USUAL_VALUE * BASIS_POINTS for most in (LOSS_MAX, GAIN_MAX))
    return _figure(-_of_states(scored, "score") * BASIS_POINTS, loss, gain)


def _figure(values: Returns, loss: float, gain: float) -> MeanOfStates | None:
    if not len(values):
        return None
    return MeanOfStates(float(values.mean()) + 0.0, interval_of(values, loss, gain))  # no negative zero


def _of_states(scored: Iterable[Scored], name: Literal["score", "oracle"]) -> Returns:
    """Return the figure of each state; several samples count as their mean."""
    states = _by_state(scored).values()
    return np.array([math.fsum(getattr(each, name) for each in samples) / len(samples) for samples in states])


def _by_state(scored: Iterable[Scored]) -> dict[int, list[Scored]]:
    states: dict[int, list[Scored]] = {}
    for each in scored:
        states.setdefault(each.state, []).append(each)
    return states


def interval_of(
    values: Returns, loss: float, gain: float, weights: Returns | float = 1.0, weight_max: float = 1.0
) -> ConfidenceInterval | None:
    """Return the 95% interval of the c with E[value] = c · E[weight]: of all c against which no bet has won.

    Values are between -`loss` and `gain`, weights between 0 and `weight_max`. It holds for any such distribution, rare
    losses included, and at every look. None: too few states.
    """
    weighing = np.broadcast_to(weights, values.shape)
    if len(values) < STATES_MIN or not weighing.any():
        return None

    def is_refuted(c: float, side: int) -> bool:
        most = (gain if side > 0 else loss) + max(0.0, -side * c) * weight_max
        return bet(side * (c * weighing - values), np.full(len(values), most)).level <= LEVEL / 2

    def limit(side: int) -> float:
        near, width = float(values.sum() / weighing.sum()), 0.01 * (loss + gain)
        while not is_refuted(near + side * width, side):
            near, width = near + side * width, 2 * width
        for _ in range(10):
            width /= 2
            near += 0.0 if is_refuted(near + side * width, side) else side * width
        return near + side * width

    return ConfidenceInterval(limit(-1), limit(1))


def sizes(scored: Iterable[Scored]) -> Sizes:
    """Return how large positions were, relative to the risk budget."""
    held = np.array([each.risk / RISK_BUDGET for each in scored if each.risk > 0])
    return Sizes(float(np.median(held)), float((held > OVERSIZED).mean())) if len(held) else Sizes(None, 0.0)


def noise(scored: Iterable[Scored]) -> float:
    """Return the standard deviation of the share from one planted state to the next; 0 with fewer than two."""
    shares = [each.score / USUAL_VALUE for each in scored if each.kind == "planted"]
    return float(np.std(shares, ddof=1)) if len(shares) > 1 else 0.0


def agreement(scored: Sequence[Scored], samples: int) -> float | None:
    """Return pass^k: the share of states in which all k samples are as good as half the oracle; null worlds: burn
    nothing.

    None if no state has `samples` samples.
    """
    whole = [
        all(each.score >= each.oracle / 2 if each.oracle else each.value >= 0 for each in own)
        for own in _by_state(scored).values()
        if len(own) >= samples
    ]
    return sum(whole) / len(whole) if whole else None


def differences(ours: Iterable[Scored], theirs: Iterable[Scored], samples: int = 1) -> list[float]:
    """Return the paired differences of the mean scores of each state, in order of the states.

    A state counts once both have all their samples in it: a look in between would be one more look at the same state.
    In worlds they are in units of the oracle's usual value.
    """
    left, right = (
        {
            state: math.fsum(each.score / (1 if each.kind == "recorded" else USUAL_VALUE) for each in own) / samples
            for state, own in _by_state(scored).items()
            if len(own) == samples
        }
        for scored in (ours, theirs)
    )
    return [left[state] - right[state] for state in sorted(left.keys() & right.keys())]


PairVerdict = Literal["better", "worse", "not distinguishable yet"]
UNDECIDED: Final = "not distinguishable yet"


class PairComparison(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The verdict on two entrants after some states, and the mean of their differences in their units.

    The levels are one over the largest wealth of either bet so far, and the e-values their present wealth. The mean
    is biased away from zero where a verdict has ended the exam.
    """

    states: int
    mean: float
    better_level: float
    worse_level: float
    better_e_value: float
    worse_e_value: float
    verdict: PairVerdict


def compare(differences: Sequence[float], bound: float = WORLDS, level: float = LEVEL) -> PairComparison:
    """Return whether differences within this bound have a mean above or below zero; valid at every look, each side at
    half the level."""
    values = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return PairComparison(0, 0.0, 1.0, 1.0, 1.0, 1.0, UNDECIDED)
    bounds = np.full(len(values), bound)
    better, worse = bet(values, bounds), bet(-values, bounds)
    verdict: PairVerdict = UNDECIDED
    if min(better.level, worse.level) <= level / 2:
        verdict = "better" if better.level < worse.level else "worse"
    mean = float(values.mean())
    return PairComparison(len(values), mean, better.level, worse.level, better.wealth, worse.wealth, verdict)


def together(compared: Sequence[PairComparison], level: float = LEVEL) -> list[PairComparison]:
    """Return comparisons with the verdicts that hold for the family of all of them: at most this part is false.

    Wang and Ramdas, "False discovery rate control with e-values", Journal of the Royal Statistical Society B 84:3
    (2022). Each comparison has two hypotheses.
    """
    best = sorted((max(each.better_e_value, each.worse_e_value) for each in compared), reverse=True)
    needed = 2 * len(compared) / level
    bar = min((e_value for rank, e_value in enumerate(best, 1) if rank * e_value >= needed), default=math.inf)

    def verdict(each: PairComparison) -> PairVerdict:
        if max(each.better_e_value, each.worse_e_value) < bar:
            return UNDECIDED
        return "better" if each.better_e_value > each.worse_e_value else "worse"

    return [replace(each, verdict=verdict(each)) for each in compared]


class RankCorrelation(msgspec.Struct, frozen=True, rename="camel"):
    """Spearman's rank correlation of two results of the same entrants, and its 95% interval."""

    entrants: int
    correlation: float
    interval: ConfidenceInterval


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> RankCorrelation | None:
    """Return how far two results rank entrants alike; None for fewer than 5, or if all are equal in one of them.

    Bonett and Wright, "Sample size requirements for estimating Pearson, Kendall and Spearman correlations",
    Psychometrika 65:1 (2000). So few entrants prove no perfect correlation, so the interval is never of a larger one
    than 1 - 1/n.
    """
    count, ranks = len(first), [_ranks(np.asarray(each)) for each in (first, second)]
    if count < ENTRANTS_MIN or any(np.ptp(each) == 0 for each in ranks):
        return None
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    most = min(abs(correlation), 1 - 1 / count)
    middle, half = math.copysign(math.atanh(most), correlation), 1.96 * math.sqrt((1 + most**2 / 2) / (count - 3))
    return RankCorrelation(count, correlation, ConfidenceInterval(math.tanh(middle - half), math.tanh(middle + half)))


def _ranks(values: Returns) -> Returns:
    """Return the rank of each value; equal ones share their mean rank."""
    ranks: Returns = (values[:, None] > values).sum(axis=1) + (values[:, None] == values).sum(axis=1) / 2
    return ranks
