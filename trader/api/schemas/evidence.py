"""Evidence on the wire: the result of each entrant compared with its references."""

from trader.api.schemas.analytics import IntervalPercent, Percent, Replicates, day
from trader.api.schemas.common import UNSET, Input, Timestamp, UnsetType, VariantFilter, VariantId, Wire, iso
from trader.api.schemas.positions import ModelId
from trader.domain.models import Contamination, contamination
from trader.domain.portfolio.board import Comparison, Reference
from trader.domain.portfolio.evidence import Word
from trader.domain.portfolio.histories import RunWindow
from trader.domain.portfolio.luck import TRADERS, Luck
from trader.services.portfolio.evidence import EntrantEvidence, EvidenceReport


class GetEvidenceInput(Input, kw_only=True):
    """`run` is all hours of the current runs."""

    window: RunWindow = "run"
    variant: VariantFilter = "all"
    model_id: ModelId | UnsetType = UNSET


class Difference(Wire, kw_only=True):
    """An entrant's paired hourly differences to one reference, over the whole hours that both have.

    `referenceId` is the baseline or the model; null for `holdNothing`, and where there is none. `hours`,
    `differencePercent` and its 95 % `interval` are of the window, for one look. `verdict` and `pValue` are of all
    common hours of the run: a confidence sequence, corrected for all comparisons on the board, which holds however
    often one looks. `smallestDifference` is what all this data could show, in percent a day, and in percent a year.
    `reason` says why there is no figure, or why the two cannot be told apart.
    """

    reference: Reference
    reference_id: str | None
    hours: int
    difference_percent: Percent | None
    interval: IntervalPercent | None
    verdict: Word
    p_value: float | None
    smallest_difference: Percent | None
    smallest_difference_per_year: Percent | None
    reason: str | None

    @classmethod
    def of(cls, found: Comparison) -> "Difference":
        window, verdict = found.window, found.verdict
        return cls(
            reference=found.reference,
            reference_id=None if found.reference_key is None else found.reference_key.partition("#")[0],
            hours=window.hours,
            difference_percent=window.percent,
            interval=IntervalPercent.of(window.interval_percent),
            verdict=verdict.word,
            p_value=None if verdict.statement.estimate is None else verdict.p_value,
            smallest_difference=verdict.statement.detectable_percent_per_day,
            smallest_difference_per_year=verdict.statement.detectable_percent_per_year,
            reason=verdict.why or window.reason,
        )


class LuckRow(Wire, kw_only=True):
    """An entrant against random traders who make its trades at random moments of the same period.

    Each makes as many trades, on the same sides, as large in parts of its equity and held as long, by the rules of the
    exchange on the candles that it saw. `returnPercent` is the model's own by its `tradesCount` completed trades;
    `quantile` the part of the random traders that made less, in percent, `pValue` the chance that one of them makes as
    much (for one look). `low`, `median` and `high` are quantiles of their returns: 2.5, 50 and 97.5 %.
    """

    traders: int
    trades_count: int
    return_percent: Percent
    quantile: Percent
    p_value: float
    low: Percent
    median: Percent
    high: Percent

    @classmethod
    def of(cls, found: Luck) -> "LuckRow":
        return cls(
            traders=TRADERS,
            trades_count=found.trades,
            return_percent=found.return_percent,
            quantile=found.quantile_percent,
            p_value=found.p_value,
            low=found.low_percent,
            median=found.median_percent,
            high=found.high_percent,
        )


class EntrantRow(Wire, kw_only=True):
    """An entrant: a model as it was configured, in its part of the current run. `entrant` 0 is one that is not known.

    `hours`, `returnPercent`, its 95 % `interval`, `tradesCount` and `losingTradesCount` are of the whole hours of the
    window; `reason` says why there is no interval. Gains without a loss among few trades say little: no interval sees
    a loss that has not come. `coverage` is how many of the cycles that were due it decided, in percent; below 95 it is
    not `ranked`. `amongBest` says whether it cannot be told from the best entrant. `luck` is computed
    after it was first asked for; `luckReason` says why it is null. `replicates` is there when several models are one
    configuration. `contamination` says whether all of it is after the end of what the model was trained on
    (`trainingCutoff`, from the models file).
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
    differences: list[Difference]
    luck: LuckRow | None
    luck_reason: str | None
    replicates: Replicates | UnsetType = UNSET

    @classmethod
    def of(cls, found: EntrantEvidence) -> "EntrantRow":
        return cls(
            model_id=found.model.id,
            model_name=found.model.name,
            variant=found.model.variant,
            entrant=found.record.number,
            run_number=found.attempt,
            fingerprint=found.record.fingerprint,
            started_at=iso(found.started_at),
            ended_at=None if found.ended_at is None else iso(found.ended_at),
            coverage=found.record.coverage_percent,
            training_cutoff=day(found.model.configuration.training_cutoff),
            contamination=contamination(found.model.configuration.training_cutoff, found.started_at),
            ranked=found.record.is_ranked,
            hours=found.statement.hours,
            trades_count=found.trades,
            losing_trades_count=found.losing_trades,
            return_percent=found.return_percent,
            interval=IntervalPercent.of(found.statement.interval_percent),
            reason=found.statement.reason,
            among_best=found.is_among_best,
            differences=[Difference.of(each) for each in found.comparisons],
            luck=None if isinstance(found.luck, str) else LuckRow.of(found.luck),
            luck_reason=found.luck if isinstance(found.luck, str) else None,
            replicates=UNSET if found.replicates is None else Replicates.of(found.replicates),
        )


class GetEvidenceOutput(Wire, kw_only=True):
    """Those that cannot be told from the best come first. `until` is the end of the last whole hour.

    `best` is the model with the highest mean hourly return; null without one that has 24 hours and 10 trades.
    """

    window: RunWindow
    until: Timestamp
    best: str | None
    entrants: list[EntrantRow]

    @classmethod
    def of(cls, window: RunWindow, report: EvidenceReport) -> "GetEvidenceOutput":
        return cls(
            window=window,
            until=iso(report.until),
            best=report.best,
            entrants=[EntrantRow.of(each) for each in report.entrants],
        )
