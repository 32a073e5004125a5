"""Evidence on the wire: the result of each entrant compared with its references."""

from datetime import timedelta
from typing import Final

from trader.agents.domain.models import Contamination, contamination
from trader.api.schemas.analytics import IntervalPercent, Percent, Replicates, day
from trader.api.schemas.common import UNSET, Input, Timestamp, UnsetType, VariantFilter, VariantId, Wire, iso
from trader.api.schemas.models import DeclaredView, entrant_fields
from trader.api.schemas.seasons import SeasonView
from trader.portfolio.domain.behaviour import HeldSide
from trader.portfolio.domain.board import Comparison, PrimaryComparison, Reference
from trader.portfolio.domain.evidence import Verdict, Word
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.evidence import EntrantEvidence, EvidenceReport, PairEvidence
from trader.portfolio.seasons import AccountPast

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
    reference_id: str | None
    hours: int
    difference_percent: Percent | None
    interval: IntervalPercent | None
    verdict: Word
    p_value: float | None
    e_value: float | None
    smallest_difference: Percent | None
    days_needed: int | None
    reason: str | None
    verdict_before: Word | UnsetType = UNSET
    p_value_before: float | UnsetType | None = UNSET

    @classmethod
    def of(cls, comparison: Comparison, before: Verdict | None = None) -> "Difference":
        window, verdict = comparison.window, comparison.verdict
        return cls(
            reference=comparison.reference,
            reference_id=None if comparison.reference_key is None else comparison.reference_key.partition("#")[0],
            hours=window.hours,
            difference_percent=window.percent,
            interval=IntervalPercent.of(window.interval_percent),
            verdict=verdict.word,
            p_value=None if verdict.statement.estimate is None else verdict.p_value,
            e_value=None if verdict.statement.estimate is None else verdict.statement.e_value,
            smallest_difference=verdict.visible_percent,
            days_needed=verdict.days_needed,
            reason=verdict.why or window.reason,
            verdict_before=UNSET if before is None else before.word,
            p_value_before=UNSET if before is None else None if before.statement.estimate is None else before.p_value,
        )


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
    difference_percent: Percent | None
    interval: IntervalPercent | None


class Disagreement(Wire, kw_only=True):
    """A time in which one of them held a side of a market that the other did not; null is a flat one."""

    symbol: str
    since: Timestamp
    until: Timestamp
    side: HeldSide | None
    against_side: HeldSide | None


class GetComparisonOutput(Wire, kw_only=True):
    """Two entrants, the first against the other, up to the end of the last full hour (`until`).

    `difference` is as in `getEvidence`, with the other as the best one: its `interval` covers the window for one look,
    and its verdict all common hours, corrected with all comparisons of the board. Its `referenceId` is the other model,
    or the first of its replicates, which are compared by their mean; null if the two cannot be compared, for the given
    `reason`. `curve` has at most 120 points. `agreedHours` and `disagreedHours` add up the hours of all markets that
    one of them held within the window: both on the same side, or not. `disagreements` are the latest 200.
    """

    window: RunWindow
    until: Timestamp
    difference: Difference
    curve: list[CurvePoint]
    agreed_hours: float
    disagreed_hours: float
    disagreements: list[Disagreement]

    @classmethod
    def of(cls, window: RunWindow, pair: PairEvidence) -> "GetComparisonOutput":
        apart = [each for each in pair.stances if each.is_disagreement]
        held, disagreed = (sum((each.end - each.start) / _HOUR for each in some) for some in (pair.stances, apart))
        return cls(
            window=window,
            until=iso(pair.until),
            difference=Difference.of(pair.comparison),
            curve=[
                CurvePoint(at=iso(each.at), difference_percent=each.percent, interval=IntervalPercent.of(each.interval))
                for each in pair.curve
            ],
            agreed_hours=round(held - disagreed, 6),
            disagreed_hours=round(disagreed, 6),
            disagreements=[
                Disagreement(
                    symbol=each.symbol,
                    since=iso(each.start),
                    until=iso(each.end),
                    side=each.first,
                    against_side=each.other,
                )
                for each in reversed(apart[-DISAGREEMENTS_MAX:])
            ],
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
    difference_percent: Percent | None
    interval: IntervalPercent | None
    verdict: Word
    p_value: float | None
    smallest_difference: Percent | None
    days_needed: int | None
    reason: str | None

    @classmethod
    def of(cls, primary: PrimaryComparison, verdict: Verdict) -> "PrimaryResult":
        statement = verdict.statement
        return cls.from_attributes(
            primary,
            hours=statement.hours,
            difference_percent=statement.percent,
            interval=IntervalPercent.of(statement.interval_percent),
            verdict=verdict.word,
            p_value=None if statement.estimate is None else verdict.p_value,
            smallest_difference=verdict.visible_percent,
            days_needed=verdict.days_needed,
            reason=verdict.why,
        )


class Rank(Wire, kw_only=True):
    """The possible places of an entrant, from `first` to `last` of `among`."""

    first: int
    last: int
    among: int


class PastEntrantRow(Wire, kw_only=True):
    """An entrant in a run of its account; `endedAt` is null for the current one."""

    run_number: int
    entrant: int
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

    @classmethod
    def of(cls, past: AccountPast) -> "AccountOverRuns":
        return cls.from_attributes(
            past, entrants=[PastEntrantRow.from_attributes(each, entrant=each.number) for each in past.entrants]
        )


class EntrantRow(Wire, kw_only=True):
    """An entrant: a model in one configuration, in its part of the current run. `entrant` 0 is an unknown one.

    `hours`, `returnPercent`, its 95 % `interval`, `tradesCount` and `losingTradesCount` cover the whole hours of the
    window; `reason` says why there is no interval. Gains without a loss among few trades mean little: no interval
    reflects a loss that has not occurred. `coverage` is the share of due cycles that it decided, in percent; below 95
    it is not `ranked`. `amongBest` says whether it is indistinguishable from the best entrant, and `rank` gives its
    possible places; null if it is excluded from the board, for the reason `offBoard`. `ageHours` counts all its whole
    hours, and `account` covers the whole history of the account. Replicates share the row of the first of them, with
    combined figures; `account` is its own. `replicates` is present if several models share one configuration.
    `contamination` says whether the whole part is after the model's training cutoff (`trainingCutoff`, from the models
    file). `declared` is the external agent's declaration at that time.
    """

    model_id: str
    model_name: str
    variant: VariantId
    entrant: int
    run_number: int
    fingerprint: str | None
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Percent | None
    training_cutoff: str | None
    contamination: Contamination
    ranked: bool
    hours: int
    trades_count: int
    losing_trades_count: int
    return_percent: Percent | None
    interval: IntervalPercent | None
    reason: str | None
    among_best: bool
    rank: Rank | None
    account: AccountOverRuns
    age_hours: int
    owner: str | None
    declared: DeclaredView | UnsetType = UNSET
    differences: list[Difference]
    replicates: Replicates | UnsetType = UNSET
    off_board: str | UnsetType = UNSET
    rank_before: Rank | UnsetType | None = UNSET

    @classmethod
    def of(cls, entrant: EntrantEvidence) -> "EntrantRow":
        before = entrant.before
        return cls.from_attributes(
            entrant,
            model_id=entrant.model.id,
            model_name=entrant.model.name,
            variant=entrant.model.variant,
            **entrant_fields(entrant.record),
            run_number=entrant.attempt,
            training_cutoff=day(entrant.model.configuration.training_cutoff),
            contamination=contamination(entrant.model.configuration.training_cutoff, entrant.started_at),
            ranked=entrant.record.is_ranked,
            hours=entrant.statement.hours,
            trades_count=entrant.trades,
            losing_trades_count=entrant.losing_trades,
            interval=IntervalPercent.of(entrant.statement.interval_percent),
            reason=entrant.statement.reason,
            among_best=entrant.is_among_best,
            rank=None if entrant.rank is None else Rank.from_attributes(entrant.rank),
            rank_before=UNSET if before is None else None if before.rank is None else Rank.from_attributes(before.rank),
            account=AccountOverRuns.of(entrant.account),
            owner=entrant.model.configuration.owner,
            differences=[
                Difference.of(each, None if before is None else before.verdicts.get(each.reference))
                for each in entrant.comparisons
            ],
            replicates=None if entrant.replicates is None else Replicates.from_attributes(entrant.replicates),
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
    until: Timestamp
    best: str | None
    resolution: SharpeResolution
    market_return: Percent | None
    entrants: list[EntrantRow]
    season: SeasonView | UnsetType = UNSET
    primary: PrimaryResult | UnsetType = UNSET

    @classmethod
    def of(cls, window: RunWindow, report: EvidenceReport) -> "GetEvidenceOutput":
        rule = None if report.season is None else report.season.rules.primary
        first = {each.model.id for each in report.entrants if each.rank is not None and each.rank.last == 1}
        return cls.from_attributes(
            report,
            window=window,
            best=report.best if report.best in first else None,
            resolution=SharpeResolution.from_attributes(report.resolution),
            market_return=report.market_percent,
            entrants=[EntrantRow.of(each) for each in report.entrants],
            season=None if report.season is None else SeasonView.of(report.season, report.state),
            primary=UNSET if rule is None or report.primary is None else PrimaryResult.of(rule, report.primary),
        )
