"""Board: every entrant compared with its references, corrected so that all statements hold together.

The references are its variant's rule agent on the same ticks, holding nothing, buy and hold, and the best other
entrant. All comparisons of all boards are one family: together they err in 5 % of cases, however often one looks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import combinations
from typing import Annotated, Final, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import Meta

from trader.agents.domain.models import ModelId
from trader.core.intervals import LEVEL, TRADES_MIN, ConfidenceInterval, percent
from trader.core.variant_id import VariantId
from trader.portfolio.domain.baselines import BUY_AND_HOLD, rule_agent
from trader.portfolio.domain.evidence import (
    Pair,
    Statement,
    Verdict,
    compare_all,
    comparisons_among,
    judge_family,
    missing_trades,
)
from trader.portfolio.domain.returns import ReturnSeries, holding_nothing

Reference = Literal["ruleAgent", "holdNothing", "buyAndHold", "bestOther"]

AGE_MIN: Final = 168
"""Minimum age in hours for a rank or for being the best: after a few days the luckiest is always ahead."""


class PrimaryComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one comparison that a season registers before its start.

    `entrant` is a model's id or the common id of replicates; `against` is another one, or `ruleAgent`, `holdNothing` or
    `buyAndHold`. Its verdict alone errs with probability `alpha` at most.
    """

    entrant: ModelId
    against: ModelId
    alpha: Annotated[float, Meta(gt=0, le=0.5)]

    def __str__(self) -> str:
        return f"{self.entrant} against {self.against} at α {self.alpha:g}"


CURVE_POINTS: Final = 120
"""The most points of a curve of differences: as many as a picture shows apart."""

_HOUR: Final = timedelta(hours=1)


class BoardRules(NamedTuple):
    """The comparisons of a board, their joint error probability, and the age in hours that a rank requires.

    `hours_min_percent`: the best one has at least this share of the hours of the oldest ranked entrant. `hours` is the
    length of the season (None: it has no end). `loss_max` and `gain_max` are the enforced bounds of an entrant's hour,
    as fractions of its equity. Beside a `primary` comparison all others are exploratory.
    """

    compared: Sequence[Reference] = get_args(Reference)
    level: float = LEVEL
    age_min: int = AGE_MIN
    hours_min_percent: float = 0.0
    hours: int | None = None
    loss_max: float | None = None
    gain_max: float | None = None
    primary: PrimaryComparison | None = None

    def bounded(self, series: ReturnSeries | None) -> ReturnSeries | None:
        """Return the hours of an entrant with the bounds that are enforced on it."""
        return series and series._replace(loss_max=self.loss_max, gain_max=self.gain_max)

    def judge(self, statements: Sequence[Statement], contenders: int) -> list[Verdict]:
        """Return the verdicts of statements from the boards of this number of entrants."""
        family, is_exploratory = self.family(contenders), self.primary is not None
        return judge_family(statements, family, self.level, self.hours, is_exploratory=is_exploratory)

    def family(self, contenders: int) -> int:
        """Return the number of possible comparisons for a number of entrants."""
        has_pairs = "bestOther" in self.compared
        return comparisons_among(contenders, len(self.compared) - has_pairs, has_pairs=has_pairs)


NO_SEASON: Final = BoardRules()
"""The rules of boards outside a season."""

_NOT_BEGUN: Final = "this baseline has no whole hours yet"
_NO_PAIRS: Final = "this season compares no two entrants with each other"
_NO_OTHER: Final = "there are no two entrants old enough for a rank, with enough trades"


class JudgedEntrant(NamedTuple):
    """An entrant: its hours within the run of its model, its completed trades, and the number of the run.

    Replicates are one entrant, with the mean of their returns and of their trades. `is_eligible`: it is current and
    decided enough of its cycles.
    """

    key: str
    variant: VariantId
    series: ReturnSeries | None
    trades: int
    attempt: int = 1
    is_eligible: bool = True
    age_min: int = AGE_MIN

    @property
    def is_ruined(self) -> bool:
        """Whether it has lost everything."""
        return self.series is not None and bool(np.isneginf(self.series.values).any())

    @property
    def is_ranked(self) -> bool:
        """Whether it is old enough for a rank; an entrant that has lost everything always is."""
        is_old = self.series is not None and len(self.series.values) >= self.age_min and self.trades >= TRADES_MIN
        return self.is_eligible and (is_old or self.is_ruined)

    @property
    def mean(self) -> float | None:
        """The mean hourly return; None while it has no rank."""
        if self.series is None or not self.is_ranked:
            return None
        mean = float(np.mean(self.series.values))
        return mean if np.isfinite(mean) else None


class Comparison(NamedTuple):
    """An entrant and one reference: the difference within the window for one look, and the verdict on all hours."""

    reference: Reference
    reference_key: str | None
    window: Statement
    verdict: Verdict


class RankInterval(NamedTuple):
    """The possible places of an entrant, from `first` to `last` `among` the ranked ones.

    `first` − 1 others are better, and `among` − `last` are worse: all these statements hold together in 95 % of cases,
    however often one looks. Mogstad, Romano, Shaikh and Wilhelm, "Inference for Ranks with Applications to
    Mobility across Neighbourhoods and Academic Achievement across Countries", Review of Economic Studies 91:1 (2024).
    """

    first: int
    last: int
    among: int


class Board(NamedTuple):
    """The comparisons of each entrant; the best one, all indistinguishable from it, and the ranks."""

    comparisons: Mapping[str, Sequence[Comparison]]
    best: str | None
    among_best: frozenset[str]
    ranks: Mapping[str, RankInterval]


class DifferencePoint(NamedTuple):
    """The difference of two accounts since the start of a window at the end of an hour, and its 95 % interval.

    Both in percent; the interval is for one look at this hour.
    """

    at: datetime
    percent: float | None
    interval: ConfidenceInterval | None


class _Matched(NamedTuple):
    """An entrant and the series that it is compared with."""

    reference: Reference
    entrant: JudgedEntrant
    reference_key: str | None
    other: ReturnSeries | None
    reason: str | None = None
    other_attempt: int = 1

    def within(self, since: datetime | None) -> Pair:
        own, other = self.entrant.series, self.other
        if since is not None:
            own = own and own.within(since, own.end)
            other = other and other.within(since, other.end)
        attempts = self.entrant.attempt + self.other_attempt - 1
        return Pair(own, other, (self.reason, missing_trades(self.entrant.trades)), attempts)


def judge_board(
    entrants: Sequence[JudgedEntrant],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    contenders: int | None = None,
    rules: BoardRules = NO_SEASON,
) -> Board:
    """Compare entrants with their references. `baselines` are keyed by id; the window starts at `since` (None: all).

    `contenders` is the number of entrants of all boards (None: these).
    """
    entrants = [each._replace(age_min=rules.age_min) for each in entrants]
    rated = _rated(entrants, rules)
    best, second = (rated[0][1], rated[1][1]) if len(rated) > 1 else (None, None)
    pairs = _match(entrants, best, baselines, rules)
    statements = _state(pairs, None)
    contenders = len(entrants) if contenders is None else contenders
    verdicts = rules.judge(statements, contenders)
    ranks = rank_intervals(entrants, rules.family(contenders), rules)
    windows = statements if since is None else _state(pairs, since)
    comparisons_of: dict[str, list[Comparison]] = {entrant.key: [] for entrant in entrants}
    worse = set()
    for pair, verdict, window in zip(pairs, verdicts, windows, strict=True):
        comparisons_of[pair.entrant.key].append(Comparison(pair.reference, pair.reference_key, window, verdict))
        if pair.reference == "bestOther" and verdict.word == "worse":
            worse.add(pair.entrant.key)
        if best is not None and pair.reference == "bestOther" and pair.entrant is second:
            own = Comparison("bestOther", second.key, window.reversed(), verdict.reversed())
            comparisons_of[best.key].append(own)
    if best is None and "bestOther" in rules.compared:
        nothing = Statement(0, None, _NO_OTHER)
        for comparisons in comparisons_of.values():
            comparisons.append(Comparison("bestOther", None, nothing, Verdict(nothing, 1.0)))
    if best is None:
        return Board(comparisons_of, rated[0][1].key if rated else None, frozenset(), ranks)
    return Board(comparisons_of, best.key, frozenset(comparisons_of) - worse, ranks)


def _rated(entrants: Sequence[JudgedEntrant], rules: BoardRules) -> list[tuple[float, JudgedEntrant]]:
    """Return the ranked entrants with their mean hourly returns, best first.

    In a season a newcomer may be compared, but is not the best: its mean is of fewer hours.
    """
    means = [
        (mean, len(each.series.values), each)
        for each in entrants
        if each.series is not None and (mean := each.mean) is not None
    ]
    oldest = max((hours for _, hours, _ in means), default=0)
    old = [(mean, each) for mean, hours, each in means if 100 * hours >= rules.hours_min_percent * oldest]
    return sorted(old, key=lambda item: -item[0])


def rank_intervals(
    entrants: Sequence[JudgedEntrant], family: int, rules: BoardRules = NO_SEASON
) -> dict[str, RankInterval]:
    """Return the rank interval of each ranked entrant, from verdicts on every pair over their common hours.

    If pairs are not compared, every place is possible for everyone.
    """
    ranked = [each for each in entrants if each.is_ranked]
    pairs = list(combinations(ranked, 2)) if "bestOther" in rules.compared else []
    statements = compare_all(
        (Pair(first.series, other.series, attempts=first.attempt + other.attempt - 1) for first, other in pairs),
        rules.level / max(1, family),
    )
    better, worse = Counter[str](), Counter[str]()
    for verdict, (first, other) in zip(judge_family(statements, family, rules.level), pairs, strict=True):
        if verdict.word != "not distinguishable yet":
            above, below = (first, other) if verdict.word == "better" else (other, first)
            better[below.key] += 1
            worse[above.key] += 1
    count = len(ranked)
    return {each.key: RankInterval(1 + better[each.key], count - worse[each.key], count) for each in ranked}


def judge_primary(
    primary: PrimaryComparison,
    first: JudgedEntrant,
    other: JudgedEntrant | None,
    baselines: Mapping[str, ReturnSeries | None],
    hours_max: int | None = None,
) -> Verdict:
    """Return the verdict of a primary comparison at its own level; `other` is what it names if that is an entrant."""
    pair: _Matched
    match primary.against:
        case "holdNothing":
            pair = _Matched("holdNothing", first, None, first.series and holding_nothing(first.series))
        case "buyAndHold":
            pair = _with_baseline("buyAndHold", first, baselines, BUY_AND_HOLD.id)
        case "ruleAgent":
            pair = _with_baseline("ruleAgent", first, baselines, rule_agent(first.variant).id)
        case _:
            series, attempt = (None, 1) if other is None else (other.series, other.attempt)
            reason = f"{primary.against} is not an entrant" if other is None else missing_trades(other.trades)
            pair = _Matched("bestOther", first, primary.against, series, reason, attempt)
    (statement,) = _state([pair], None)
    (verdict,) = judge_family([statement], 1, primary.alpha, hours_max)
    return verdict


def compare_entrants(
    first: JudgedEntrant,
    other: JudgedEntrant,
    entrants: Sequence[JudgedEntrant],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    contenders: int,
    rules: BoardRules = NO_SEASON,
) -> Comparison:
    """Compare two of the entrants of a board: its own comparison, or one more that is corrected with all of it.

    The pair belongs to the board's family, which counts every pair of entrants.
    """
    if "bestOther" not in rules.compared:
        nothing = Statement(0, None, _NO_PAIRS)
        return Comparison("bestOther", other.key, nothing, Verdict(nothing, 1.0))
    entrants = [each._replace(age_min=rules.age_min) for each in entrants]
    rated = _rated(entrants, rules)
    pairs = _match(entrants, rated[0][1] if len(rated) > 1 else None, baselines, rules)
    sides = {first.key, other.key}
    shown = [place for place, pair in enumerate(pairs) if {pair.entrant.key, pair.reference_key} == sides]
    (place,) = shown or [len(pairs)]
    if not shown:
        reason = missing_trades(other.trades)
        pairs.append(_Matched("bestOther", first, other.key, other.series, reason, other.attempt))
    pair = pairs[place]
    (window,) = _state([pair], since)
    verdict = rules.judge(_state(pairs, None), contenders)[place]
    if pair.entrant.key == other.key:
        window, verdict = window.reversed(), verdict.reversed()
    return Comparison("bestOther", other.key, window, verdict)


def difference_curve(first: JudgedEntrant, other: JudgedEntrant, since: datetime | None) -> list[DifferencePoint]:
    """Return the difference over the common hours of a window, at no more than `CURVE_POINTS` of them."""
    if first.series is None or other.series is None:
        return []
    start = max(first.series.start, other.series.start, since or first.series.start)
    end = min(first.series.end, other.series.end)
    if start >= end:
        return []
    own, others = first.series.within(start, end), other.series.within(start, end)
    with np.errstate(invalid="ignore"):  # accounts that lost everything
        sums = np.cumsum(own.values - others.values)
    hours = np.unique(np.linspace(1, len(sums), min(len(sums), CURVE_POINTS)).round().astype(int)).tolist()
    ends = [start + hour * _HOUR for hour in hours]
    reasons = missing_trades(first.trades), missing_trades(other.trades)
    stated = compare_all((Pair(own.within(start, at), others.within(start, at), reasons) for at in ends), level=0.0)
    return [
        DifferencePoint(at, percent(total) if math.isfinite(total) else None, statement.interval_percent)
        for at, total, statement in zip(ends, sums[np.array(hours) - 1].tolist(), stated, strict=True)
    ]


def _state(pairs: Sequence[_Matched], since: datetime | None) -> list[Statement]:
    """Return the statement of each pair on all hours; those within a window are for one look and need no bet."""
    return compare_all([pair.within(since) for pair in pairs], level=1.0 if since is None else 0.0)


def _match(
    entrants: Sequence[JudgedEntrant],
    best: JudgedEntrant | None,
    baselines: Mapping[str, ReturnSeries | None],
    rules: BoardRules,
) -> list[_Matched]:
    """Return every entrant with each of its references: the baselines, and the best other entrant."""
    pairs = [
        pair
        for each in entrants
        for pair in (
            _with_baseline("ruleAgent", each, baselines, rule_agent(each.variant).id),
            _Matched("holdNothing", each, None, each.series and holding_nothing(each.series)),
            _with_baseline("buyAndHold", each, baselines, BUY_AND_HOLD.id),
        )
        if pair.reference in rules.compared
    ]
    behind = [
        _Matched("bestOther", each, best.key, best.series, None, best.attempt)
        for each in entrants
        if best and each is not best and "bestOther" in rules.compared
    ]
    return [*pairs, *behind]


def _with_baseline(
    reference: Reference, entrant: JudgedEntrant, baselines: Mapping[str, ReturnSeries | None], baseline_id: str
) -> _Matched:
    series = baselines.get(baseline_id)
    return _Matched(reference, entrant, baseline_id, series, _NOT_BEGUN if series is None else None)
