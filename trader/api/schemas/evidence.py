"""Evidence on the wire: the result of each entrant compared with its references."""

from datetime import timedelta
from typing import Annotated, Final

from trader.agents.domain.models import Contamination, contamination
from trader.api.schemas.analytics import IntervalPercent, Percent, Replicates, ids_of
from trader.api.schemas.common import UNSET, From, Input, Timestamp, UnsetType, VariantFilter, VariantId, Wire, iso
from trader.api.schemas.models import DeclaredView
from trader.api.schemas.seasons import SeasonView
from trader.portfolio.domain.behaviour import HeldSide
from trader.portfolio.domain.board import Comparison, PrimaryComparison, Reference
from trader.portfolio.domain.evidence import Verdict, Word
from trader.portfolio.domain.histories import WINDOWS, RunWindow
from trader.portfolio.evidence import EntrantEvidence, EvidenceReport, PairEvidence

DISAGREEMENTS_MAX: Final = 200
"""The latest disagreements of a comparison."""

_HOUR: Final = timedelta(hours=1)


class GetEvidenceInput(Input, kw_only=True):
    """`run` covers all hours of the current runs."""

    window: RunWindow = "run"
    variant: VariantFilter = "all"
    model_id: str | UnsetType = UNSET


class Difference(Wire, kw_only=True):
    """An entrant's paired hourly differences from one reference, over their common whole hours.

    `referenceId` is the baseline or the model; null for `holdNothing`, or if there is none. `hours`,
    `differencePercent` and its 95 % `interval` cover the window, for one look. `verdict` and `pValue` cover all common
    hours of the run: a confidence sequence and a bet that bounds hourly losses not yet seen must agree, corrected for
    all comparisons on the board; they stay valid however often one looks. In a season with a primary comparison they
    are exploratory: `pValue` is the smallest false discovery rate at which e-BH finds the difference. `eValue` is what
    e-BH weighs: without a difference, its expectation is at most 1. `smallestDifference` is the true difference that
    four of five such seasons would detect, in percent over these hours; `daysNeeded` is the number of days until they
    would detect one as large as the observed one (null: not within the season, or ten years). `reason` says why there
    is no figure, or why the two are indistinguishable.
    """

    reference: Reference
    reference_id: Annotated[str | None, From("reference_key", lambda key: key.partition("#")[0])]
    hours: Annotated[int, From("window.hours")]
    difference_percent: Annotated[Percent | None, From("window.percent")]
    interval: Annotated[IntervalPercent | None, From("window.interval_percent")]
    verdict: Annotated[Word, From("verdict.word")]
    p_value: float | None
    e_value: float | None
    smallest_difference: Annotated[Percent | None, From("verdict.visible_percent")]
    days_needed: Annotated[int | None, From("verdict.days_needed")]
    reason: str | None
    verdict_before: Word | UnsetType = UNSET
    p_value_before: float | UnsetType | None = UNSET

    @classmethod
    def of(cls, comparison: Comparison, before: Verdict | None = None) -> "Difference":
        return cls.from_attributes(
            comparison,
            p_value=_p_value(comparison.verdict),
            e_value=None if _p_value(comparison.verdict) is None else comparison.verdict.statement.e_value,
            reason=comparison.verdict.why or comparison.window.reason,
            verdict_before=None if before is None else before.word,
            p_value_before=None if before is None else _p_value(before),
        )


def _p_value(verdict: Verdict) -> float | None:
    return None if verdict.statement.estimate is None else verdict.p_value


class GetComparisonInput(Input, kw_only=True):
    """`modelId` is compared with `against`, another model. `run` covers all their common hours."""

    model_id: str
    against: str
    window: RunWindow = "run"


class CurvePoint(Wire, kw_only=True):
    """How far the first entrant was ahead of the other since the start of the window, in percent, at an hour's end.

    `interval` is its 95 % interval for one look at this hour; null while there are too few hours or trades.
    """

    at: Timestamp
    difference_percent: Annotated[Percent | None, From("percent")]
    interval: IntervalPercent | None


class Disagreement(Wire, kw_only=True):
    """A time in which one of them held a side of a market that the other did not; null is a flat one."""

    symbol: str
    since: Annotated[Timestamp, From("start")]
    until: Annotated[Timestamp, From("end")]
    side: Annotated[HeldSide | None, From("first")]
    against_side: Annotated[HeldSide | None, From("other")]


class GetComparisonOutput(Wire, kw_only=True):
    """Two entrants, the first against the other, up to the end of the last full hour (`until`).

    `modelIds` are the accounts of each: several if it is the mean of replicates. `start` is null for the whole run.
    `difference` is as in `getEvidence`, with the other as the best one: its `interval` covers the window for one look,
    and its verdict all common hours, corrected with all comparisons of the board. Its `referenceId` is the other model,
    or the first of its replicates, which are compared by their mean; null if the two cannot be compared, for the given
    `reason`. `curve` has at most 120 points. `agreedHours` and `disagreedHours` add up the hours of all markets that
    one of them held within the window: both on the same side, or not. `disagreements` are the latest 200.
    """

    window: RunWindow
    start: Timestamp | None
    until: Timestamp
    model_ids: list[list[str]]
    difference: Difference
    curve: list[CurvePoint]
    agreed_hours: float
    disagreed_hours: float
    disagreements: list[Disagreement]

    @classmethod
    def of(cls, window: RunWindow, pair: PairEvidence) -> "GetComparisonOutput":
        apart = [each for each in pair.stances if each.is_disagreement]
        held, disagreed = (sum((each.end - each.start) / _HOUR for each in some) for some in (pair.stances, apart))
        return cls.from_attributes(
            pair,
            window=window,
            start=None if window == "run" else iso(pair.until - WINDOWS[window]),
            difference=Difference.of(pair.comparison),
            agreed_hours=round(held - disagreed, 6),
            disagreed_hours=round(disagreed, 6),
            disagreements=apart[: -DISAGREEMENTS_MAX - 1 : -1],
        )


class PrimaryResult(Wire, kw_only=True):
    """The result of the season's primary comparison, over all hours that both have in the season.

    `entrant`, `against` and `alpha` are as registered. `verdict` is on the entrant, and errs with probability `alpha`
    at most, however often one looks; `pValue` is not corrected for other comparisons. The other figures are as in a
    difference of an entrant; `interval` is for one look.
    """

    entrant: str
    against: str
    alpha: float
    hours: int
    difference_percent: Annotated[Percent | None, From("percent")]
    interval: Annotated[IntervalPercent | None, From("interval_percent")]
    verdict: Annotated[Word, From("word")]
    p_value: float | None
    smallest_difference: Annotated[Percent | None, From("visible_percent")]
    days_needed: int | None
    reason: Annotated[str | None, From("why")]

    @classmethod
    def of(cls, primary: PrimaryComparison, verdict: Verdict) -> "PrimaryResult":
        return cls.from_attributes(primary, verdict, verdict.statement, p_value=_p_value(verdict))


class Rank(Wire, kw_only=True):
    """The possible places of an entrant, from `first` to `last` of `among`."""

    first: int
    last: int
    among: int


class PastEntrantRow(Wire, kw_only=True):
    """An entrant in a run of its account; `endedAt` is null for the current one."""

    run_number: int
    entrant: Annotated[int, From("number")]
    fingerprint: str
    began_at: Timestamp
    ended_at: Timestamp | None


class AccountOverRuns(Wire, kw_only=True):
    """An account over all its runs: its return in percent, across resets and configuration changes.

    In a season, everything covers the season's hours. `entrants` are all its entrants, the current one last.
    """

    runs: int
    started_at: Timestamp
    return_percent: Percent
    entrants: list[PastEntrantRow]


class EntrantRow(Wire, kw_only=True):
    """An entrant: a model in one configuration, in its part of the current run. `entrant` 0 is an unknown one.

    `hours`, `returnPercent`, its 95 % `interval`, `tradesCount` and `losingTradesCount` cover the whole hours of the
    window; `reason` says why there is no interval. Gains without a loss among few trades mean little: no interval
    reflects a loss that has not occurred. `coverage` is the share of due cycles that it decided, in percent; below 95
    it is not `ranked`. `amongBest` says whether it is indistinguishable from the best entrant, and `rank` gives its
    possible places; null if it is excluded from the board, for the reason `offBoard`. `ageHours` counts all its whole
    hours, and `account` covers the whole history of the account. Replicates share a row with combined figures, whose
    `modelId` is their fingerprint and whose `account` is of the first; `modelIds` are all of them. `replicates` is
    present if several models share one configuration.
    `contamination` says whether the whole part is after the model's training cutoff (`trainingCutoff`, from the models
    file). `declared` is the external agent's declaration at that time.
    """

    model_id: Annotated[str, From("id")]
    model_name: Annotated[str, From("name")]
    model_ids: Annotated[list[str], From("models", ids_of)]
    variant: Annotated[VariantId, From("model.variant")]
    entrant: Annotated[int, From("record.number")]
    run_number: Annotated[int, From("attempt")]
    fingerprint: Annotated[str | None, From("record.fingerprint")]
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Annotated[Percent | None, From("record.coverage_percent")]
    training_cutoff: Annotated[str | None, From("model.configuration.training_cutoff")]
    contamination: Contamination
    ranked: Annotated[bool, From("record.is_ranked")]
    hours: Annotated[int, From("statement.hours")]
    trades_count: Annotated[int, From("trades")]
    losing_trades_count: Annotated[int, From("losing_trades")]
    return_percent: Percent | None
    interval: Annotated[IntervalPercent | None, From("statement.interval_percent")]
    reason: Annotated[str | None, From("statement.reason")]
    among_best: Annotated[bool, From("is_among_best")]
    rank: Rank | None
    account: AccountOverRuns
    age_hours: int
    owner: Annotated[str | None, From("model.configuration.owner")]
    declared: Annotated[DeclaredView | UnsetType, From("record.declared")] = UNSET
    differences: list[Difference]
    replicates: Replicates | UnsetType = UNSET
    off_board: str | UnsetType = UNSET
    rank_before: Annotated[Rank | UnsetType | None, From("before.rank")] = UNSET

    @classmethod
    def of(cls, entrant: EntrantEvidence) -> "EntrantRow":
        earlier = () if entrant.before is None else entrant.before.comparisons
        before = {each.reference: each.verdict for each in earlier}
        return cls.from_attributes(
            entrant,
            contamination=contamination(entrant.model.configuration.training_cutoff, entrant.started_at),
            differences=[Difference.of(each, before.get(each.reference)) for each in entrant.comparisons],
        )


class SharpeResolution(Wire, kw_only=True):
    """The smallest difference of annual Sharpe ratios that a board can detect between two entrants.

    `now`, and `atEnd` of the season; null if it cannot detect any, or has no end.
    """

    now: float | None
    at_end: float | None


class GetEvidenceOutput(Wire, kw_only=True):
    """Entrants indistinguishable from the best come first. `until` is the end of the last full hour.

    `best` is the only model that can still hold first place; null while there are several. `resolution` says which
    entrants the board cannot separate. Every figure is of one market path, in which buying and holding returned
    `marketReturn` percent. While a season runs, and until it is closed, everything covers the season's hours by its
    rules (`season`); `primary` is its primary comparison, on the board of all entrants. If a rule was loosened after
    the start, `verdictBefore`, `pValueBefore` and `rankBefore` are by the rules at the start.
    """

    window: RunWindow
    start: Timestamp | None
    until: Timestamp
    best: str | None
    resolution: SharpeResolution
    market_return: Annotated[Percent | None, From("market_percent")]
    entrants: list[EntrantRow]
    season: SeasonView | UnsetType = UNSET
    primary: PrimaryResult | UnsetType = UNSET

    @classmethod
    def of(cls, window: RunWindow, report: EvidenceReport) -> "GetEvidenceOutput":
        rule = None if report.season is None else report.season.rules.primary
        first = {each.id for each in report.entrants if each.rank is not None and each.rank.last == 1}
        return cls.from_attributes(
            report,
            window=window,
            start=None if window == "run" else iso(report.until - WINDOWS[window]),
            best=report.best if report.best in first else None,
            entrants=[EntrantRow.of(each) for each in report.entrants],
            season=None if report.season is None else SeasonView.of(report.season, report.state),
            primary=UNSET if rule is None or report.primary is None else PrimaryResult.of(rule, report.primary),
        )
