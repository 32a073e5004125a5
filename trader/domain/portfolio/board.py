"""Board: every entrant compared with its references, corrected so that all statements hold together.

The references are its variant's rule agent on the same ticks, holding nothing, buying and holding, and the best other
entrant. All comparisons of a board are one family: they err in 5 % of cases together, however often one looks.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import BUY_AND_HOLD, rule_agent
from trader.domain.portfolio.evidence import (
    Pair,
    ReturnSeries,
    Statement,
    Verdict,
    compare_all,
    judge_family,
    missing_trades,
)
from trader.domain.portfolio.intervals import HOURS_MIN, TRADES_MIN

Reference = Literal["ruleAgent", "holdNothing", "buyAndHold", "bestOther"]

_NOT_BEGUN: Final = "this baseline has no whole hours yet"
_NO_OTHER: Final = "there are no two entrants with enough hours and trades"


class Contender(NamedTuple):
    """An entrant: its hours within the run of its model, its completed trades, and the number of the run.

    Replicates are one contender: the mean of their returns, and the mean of their trades.
    """

    key: str
    variant: VariantId
    series: ReturnSeries | None
    trades: int
    attempt: int = 1

    @property
    def mean(self) -> float | None:
        """The mean hourly return; None while nothing can be said about it."""
        if self.series is None or len(self.series.values) < HOURS_MIN or self.trades < TRADES_MIN:
            return None
        found = float(np.mean(self.series.values))
        return found if np.isfinite(found) else None


class Comparison(NamedTuple):
    """An entrant against one reference: the difference within the window for one look, and the verdict on all hours."""

    reference: Reference
    reference_key: str | None
    window: Statement
    verdict: Verdict


class Board(NamedTuple):
    """The comparisons of each entrant; the best one, and all that cannot be told from it."""

    comparisons: Mapping[str, Sequence[Comparison]]
    best: str | None
    among_best: frozenset[str]


class _Matched(NamedTuple):
    """An entrant and the series that it is compared with."""

    reference: Reference
    contender: Contender
    reference_key: str | None
    other: ReturnSeries | None
    reason: str | None = None
    other_attempt: int = 1

    def within(self, since: datetime | None) -> Pair:
        one, other = self.contender.series, self.other
        if since is not None:
            one = one and one.within(since, one.end)
            other = other and other.within(since, other.end)
        return Pair(one, other, (self.reason, missing_trades(self.contender.trades)))


def judge_board(
    contenders: Sequence[Contender], baselines: Mapping[str, ReturnSeries | None], since: datetime | None
) -> Board:
    """Compare entrants with their references. `baselines` are by id; the window begins at `since` (None: all hours)."""
    pairs = [
        pair
        for each in contenders
        for pair in (
            _with_baseline("ruleAgent", each, baselines, rule_agent(each.variant).id),
            _Matched("holdNothing", each, None, each.series and _nothing(each.series)),
            _with_baseline("buyAndHold", each, baselines, BUY_AND_HOLD.id),
        )
    ]
    rated = sorted(((mean, each) for each in contenders if (mean := each.mean) is not None), key=lambda one: -one[0])
    best, second = (rated[0][1], rated[1][1]) if len(rated) > 1 else (None, None)
    behind = [
        _Matched("bestOther", each, best.key, best.series, None, best.attempt)
        for each in contenders
        if best and each is not best
    ]
    every = [*pairs, *behind]
    statements = _state(every, None)
    verdicts = judge_family(statements[: len(pairs)], statements[len(pairs) :], len(rated))
    windows = statements if since is None else _state(every, since)
    found: dict[str, list[Comparison]] = {contender.key: [] for contender in contenders}
    worse = set()
    for pair, verdict, window in zip(every, verdicts, windows, strict=True):
        found[pair.contender.key].append(Comparison(pair.reference, pair.reference_key, window, verdict))
        if pair.reference == "bestOther" and verdict.word == "worse":
            worse.add(pair.contender.key)
        if best is not None and pair.reference == "bestOther" and pair.contender is second:
            own = Comparison("bestOther", second.key, window.reversed(), verdict.reversed())
            found[best.key].append(own)
    if best is None:
        nothing = Statement(0, None, _NO_OTHER)
        for comparisons in found.values():
            comparisons.append(Comparison("bestOther", None, nothing, Verdict(nothing, 1.0)))
        return Board(found, rated[0][1].key if rated else None, frozenset())
    return Board(found, best.key, frozenset(found) - worse)


def _state(pairs: Sequence[_Matched], since: datetime | None) -> list[Statement]:
    found = compare_all([pair.within(since) for pair in pairs])
    return [
        statement._replace(attempts=pair.contender.attempt + pair.other_attempt - 1)
        for pair, statement in zip(pairs, found, strict=True)
    ]


def _with_baseline(
    reference: Reference, contender: Contender, baselines: Mapping[str, ReturnSeries | None], baseline_id: str
) -> _Matched:
    series = baselines.get(baseline_id)
    return _Matched(reference, contender, baseline_id, series, _NOT_BEGUN if series is None else None)


def _nothing(series: ReturnSeries) -> ReturnSeries:
    return series._replace(values=np.zeros_like(series.values))
