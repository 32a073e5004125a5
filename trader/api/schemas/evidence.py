"""Evidence on the wire: the result of each entrant compared with its references."""

from trader.api.schemas.analytics import IntervalPercent, Percent, Replicates, day
from trader.api.schemas.common import UNSET, Input, Timestamp, UnsetType, VariantFilter, VariantId, Wire, iso, or_unset
from trader.api.schemas.models import DeclaredView
from trader.api.schemas.positions import ModelId
from trader.api.schemas.seasons import SeasonView
from trader.domain.models import Contamination, contamination
from trader.domain.portfolio.board import Comparison, Reference
from trader.domain.portfolio.evidence import Word
from trader.domain.portfolio.histories import RunWindow
from trader.domain.portfolio.luck import Luck
from trader.services.portfolio.evidence import EntrantEvidence, EvidenceReport
from trader.services.portfolio.seasons import AccountPast
from trader.store.portfolio.analytics import PastEntrant


class GetEvidenceInput(Input, kw_only=True):
    """`run` is all hours of the current runs."""

    window: RunWindow = "run"
    variant: VariantFilter = "all"
    model_id: ModelId | UnsetType = UNSET


class Difference(Wire, kw_only=True):
    """An entrant's paired hourly differences to one reference, over the whole hours that both have.

    `referenceId` is the baseline or the model; null for `holdNothing`, and where there is none. `hours`,
    `differencePercent` and its 95 % `interval` are of the window, for one look. `verdict` and `pValue` are of all
    common hours of the run: a confidence sequence and a bet that bounds the hourly loss not seen yet must agree,
    corrected for all comparisons on the board, which holds however often one looks. `smallestDifference` is the true
    difference that four of five such seasons would have called, in percent over these hours; `daysNeeded` after how
    many days they would call one as large as was seen (null: more than ten years). `reason` says why there is no
    figure, or why the two cannot be told apart.
    """

    reference: Reference
    reference_id: str | None
    hours: int
    difference_percent: Percent | None
    interval: IntervalPercent | None
    verdict: Word
    p_value: float | None
    smallest_difference: Percent | None
    days_needed: int | None
    reason: str | None

    @classmethod
    def of(cls, comparison: Comparison) -> "Difference":
        window, verdict = comparison.window, comparison.verdict
        return cls(
            reference=comparison.reference,
            reference_id=None if comparison.reference_key is None else comparison.reference_key.partition("#")[0],
            hours=window.hours,
            difference_percent=window.percent,
            interval=IntervalPercent.of(window.interval_percent),
            verdict=verdict.word,
            p_value=None if verdict.statement.estimate is None else verdict.p_value,
            smallest_difference=verdict.visible_percent,
            days_needed=verdict.days_needed,
            reason=verdict.why or window.reason,
        )


class LuckRow(Wire, kw_only=True):
    """An entrant against random traders who make its trades at random moments of the same period.

    Each makes as many trades, on the same sides, as large in parts of its equity and held as long, by the rules of the
    exchange on the candles that it saw. `returnPercent` is that of the model's equity over its first `hours`, the last
    age at which it was compared, with `tradesCount` positions, open ones included; `quantile` the part of the random
    traders that made less, in percent. `pValue` is the chance that one of them makes as much, corrected for all looks
    and all models. `low`, `median` and `high` are quantiles of their returns: 2.5, 50 and 97.5 %.
    """

    hours: int
    traders: int
    trades_count: int
    return_percent: Percent
    quantile: Percent
    p_value: float
    low: Percent
    median: Percent
    high: Percent

    @classmethod
    def of(cls, luck: Luck, models: int) -> "LuckRow":
        return cls(
            hours=luck.hours,
            traders=luck.traders,
            trades_count=luck.trades,
            return_percent=luck.return_percent,
            quantile=luck.quantile_percent,
            p_value=luck.corrected_p(models),
            low=luck.low_percent,
            median=luck.median_percent,
            high=luck.high_percent,
        )


class Rank(Wire, kw_only=True):
    """The places, from `first` to `last` of `among`, that cannot be told from an entrant's own."""

    first: int
    last: int
    among: int


class PastEntrantRow(Wire, kw_only=True):
    """An entrant in a run of its account; `endedAt` is null of the present one."""

    run_number: int
    entrant: int
    fingerprint: str
    began_at: Timestamp
    ended_at: Timestamp | None

    @classmethod
    def of(cls, past: PastEntrant) -> "PastEntrantRow":
        return cls.from_attributes(past, entrant=past.number)


class AccountOverRuns(Wire, kw_only=True):
    """An account over all its runs: its return in percent, whatever was reset or configured anew in between.

    In a season, all of it is of the hours of the season. `entrants` are all that it has had, the present one last.
    """

    runs: int
    started_at: Timestamp
    return_percent: Percent
    entrants: list[PastEntrantRow]

    @classmethod
    def of(cls, past: AccountPast) -> "AccountOverRuns":
        return cls.from_attributes(past, entrants=[PastEntrantRow.of(each) for each in past.entrants])


class EntrantRow(Wire, kw_only=True):
    """An entrant: a model as it was configured, in its part of the current run. `entrant` 0 is one that is not known.

    `hours`, `returnPercent`, its 95 % `interval`, `tradesCount` and `losingTradesCount` are of the whole hours of the
    window; `reason` says why there is no interval. Gains without a loss among few trades say little: no interval sees
    a loss that has not come. `coverage` is how many of the cycles that were due it decided, in percent; below 95 it is
    not `ranked`. `amongBest` says whether it cannot be told from the best entrant, and `rank` which places are possible
    for it; null without a place on the board, for the reason `offBoard`. `ageHours` are all its whole hours, and
    `account` is all that the account has done. Replicates are one row, of the first of them, with the figures of all
    together; `account` and `luck` are its own. `luck` is computed
    after it was first asked for; `luckReason` says why it is null. `replicates` is there when several models are one
    configuration. `contamination` says whether all of it is after the end of what the model was trained on
    (`trainingCutoff`, from the models file). `declared` is what an external agent said of itself.
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
    luck: LuckRow | None
    luck_reason: str | None
    replicates: Replicates | UnsetType = UNSET
    off_board: str | UnsetType = UNSET

    @classmethod
    def of(cls, entrant: EntrantEvidence, contenders: int) -> "EntrantRow":
        return cls(
            model_id=entrant.model.id,
            model_name=entrant.model.name,
            variant=entrant.model.variant,
            entrant=entrant.record.number,
            run_number=entrant.attempt,
            fingerprint=entrant.record.fingerprint,
            started_at=iso(entrant.started_at),
            ended_at=None if entrant.ended_at is None else iso(entrant.ended_at),
            coverage=entrant.record.coverage_percent,
            training_cutoff=day(entrant.model.configuration.training_cutoff),
            contamination=contamination(entrant.model.configuration.training_cutoff, entrant.started_at),
            ranked=entrant.record.is_ranked,
            hours=entrant.statement.hours,
            trades_count=entrant.trades,
            losing_trades_count=entrant.losing_trades,
            return_percent=entrant.return_percent,
            interval=IntervalPercent.of(entrant.statement.interval_percent),
            reason=entrant.statement.reason,
            among_best=entrant.is_among_best,
            rank=None if entrant.rank is None else Rank.from_attributes(entrant.rank),
            account=AccountOverRuns.of(entrant.account),
            age_hours=entrant.age_hours,
            off_board=or_unset(entrant.off_board),
            owner=entrant.model.configuration.owner,
            declared=DeclaredView.of_entrant(entrant.record),
            differences=[Difference.of(each) for each in entrant.comparisons],
            luck=None if isinstance(entrant.luck, str) else LuckRow.of(entrant.luck, contenders),
            luck_reason=entrant.luck if isinstance(entrant.luck, str) else None,
            replicates=UNSET if entrant.replicates is None else Replicates.of(entrant.replicates),
        )


class GetEvidenceOutput(Wire, kw_only=True):
    """Those that cannot be told from the best come first. `until` is the end of the last whole hour.

    `best` is the model with the highest mean hourly return; null without one that has 168 hours and 10 trades. While a
    season runs, and until it is closed, all of it is of the hours of the season and by its rules (`season`).
    """

    window: RunWindow
    until: Timestamp
    best: str | None
    entrants: list[EntrantRow]
    season: SeasonView | UnsetType = UNSET

    @classmethod
    def of(cls, window: RunWindow, report: EvidenceReport) -> "GetEvidenceOutput":
        return cls(
            window=window,
            until=iso(report.until),
            best=report.best,
            entrants=[EntrantRow.of(each, report.contenders) for each in report.entrants],
            season=UNSET if report.season is None else SeasonView.of(report.season, report.state),
        )
