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

from trader.core.intervals import LEVEL, ConfidenceInterval, Returns, student_quantile
from trader.exam.domain.law import GAIN_MAX, LOSS_MAX, RISK_BUDGET
from trader.exam.domain.worlds import USUAL_VALUE, Edge, Kind
from trader.portfolio.domain.bets import bet

WORLDS: Final = LOSS_MAX + GAIN_MAX
"""The largest difference of two scores in worlds, in units of the oracle's usual value."""

OUTCOME_MAX: Final = 4.0
"""The largest score in moments of a recording, in units of the volatility."""

MOMENTS: Final = 2 * OUTCOME_MAX
"""The largest difference of two scores in moments of a recording, in units of the volatility."""

STATES_MIN: Final = 5
"""The states that an interval needs."""

SIZED: Final = (0.8, 1.25)
"""Sizes between these count as the oracle's."""

BASIS_POINTS: Final = 1e4


BoundedScore = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class Scored(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The decision of one entrant in one state, and its score. All values are fractions of equity.

    `value` is the expected value of the decision beyond doing nothing, `risk` the deviation over the horizon of what it
    changed, `score` the value credited within the risk budget, and `oracle` what the oracle's decision is worth.
    `sample` counts the decisions of one entrant in one state from 0. In moments of a recording, `value` is the gain,
    and `score` and `selection` are in units of the volatility: net of drift, and net of beta times the market.
    """

    state: int
    entrant: str
    edge: Edge | None
    kind: Kind | Literal["recorded"]
    value: BoundedScore
    risk: BoundedScore
    score: BoundedScore
    oracle: BoundedScore
    selection: BoundedScore = 0.0
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
    """How large an entrant's positions were, relative to the oracle's; `median` None: it never held any.

    `under` and `over` are the shares of states with a position that was smaller or larger than the oracle's.
    """

    median: float | None
    under: float
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
    return Share(count, share, _around(share, (scores - share * oracles) * count / total))


def mean_of(scored: Sequence[Scored], name: Literal["score", "selection"]) -> MeanOfStates | None:
    """Return the mean of a figure over the states; None without any."""
    return _figure(_of_states(scored, name))


def burnt(scored: Sequence[Scored]) -> MeanOfStates | None:
    """Return the mean cost of a decision in null worlds in basis points of equity; None without any."""
    return _figure(-_of_states(scored, "value") * BASIS_POINTS)


def _figure(values: Returns) -> MeanOfStates | None:
    if not len(values):
        return None
    mean = float(values.mean()) + 0.0  # no negative zero
    return MeanOfStates(mean, _around(mean, values))


def _of_states(scored: Iterable[Scored], name: Literal["score", "oracle", "value", "selection"]) -> Returns:
    """Return the figure of each state; several samples count as their mean."""
    states = _by_state(scored).values()
    return np.array([math.fsum(getattr(each, name) for each in samples) / len(samples) for samples in states])


def _by_state(scored: Iterable[Scored]) -> dict[int, list[Scored]]:
    states: dict[int, list[Scored]] = {}
    for each in scored:
        states.setdefault(each.state, []).append(each)
    return states


def _around(mean: float, influences: Returns) -> ConfidenceInterval | None:
    """Return the 95% interval of a mean from the influences of independent states; None if they are too few."""
    count = len(influences)
    if count < STATES_MIN:
        return None
    half = student_quantile(LEVEL / 2, count - 1) * float(influences.std(ddof=1)) / math.sqrt(count)
    return ConfidenceInterval(mean - half, mean + half)


def sizes(scored: Iterable[Scored]) -> Sizes:
    """Return how large positions were, relative to the risk budget."""
    held = np.array([each.risk / RISK_BUDGET for each in scored if each.risk > 0])
    if not len(held):
        return Sizes(None, 0.0, 0.0)
    low, high = SIZED
    return Sizes(float(np.median(held)), float((held < low).mean()), float((held > high).mean()))


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


class PairComparison(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The verdict on two entrants after some states, and the mean of their differences in their units.

    The levels are one over the largest wealth of either bet so far.
    """

    states: int
    mean: float
    better_level: float
    worse_level: float
    verdict: PairVerdict


def compare(differences: Sequence[float], bound: float = WORLDS, level: float = LEVEL) -> PairComparison:
    """Return whether differences within this bound have a mean above or below zero; valid at every look, each side at
    half the level."""
    values = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return PairComparison(0, 0.0, 1.0, 1.0, "not distinguishable yet")
    bounds = np.full(len(values), bound)
    better, worse = bet(values, bounds).level, bet(-values, bounds).level
    verdict: PairVerdict = "not distinguishable yet"
    if min(better, worse) <= level / 2:
        verdict = "better" if better < worse else "worse"
    return PairComparison(len(values), float(values.mean()), better, worse, verdict)
