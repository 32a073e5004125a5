"""Leaderboard and failures on the wire. Percentages are in percent, amounts in the quote currency."""

from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from trader.agents.domain.invocations import Invocation, Step, ToolCall, ToolCallType
from trader.agents.domain.models import Contamination, contamination
from trader.agents.variants import color_of
from trader.api.schemas.common import (
    ENCODER,
    UNSET,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
)
from trader.api.schemas.models import DeclaredView, entrant_fields
from trader.api.schemas.paging import PageInput, PageOutput
from trader.api.schemas.seasons import SeasonView
from trader.api.schemas.trades import TradeFilterInput
from trader.core.intervals import ConfidenceInterval
from trader.portfolio.analytics import FailureCounts, Failures
from trader.portfolio.domain.evidence import Word
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.leaderboard import LeaderboardEntry, NeighbourVerdict, ReplicatesEntry, SortKey

Percent = Annotated[float, Meta(description="in percent")]


def day(moment: date | None) -> str | None:
    """Return a date in its wire format, such as 2025-06-30."""
    return None if moment is None else moment.isoformat()


class GetLeaderboardInput(Input, kw_only=True):
    """The window `run` covers the whole current runs; with `details` each entry has details. Both are additions to the
    specification."""

    window: RunWindow = "7d"
    sort_by: SortKey = "pnlPercent"
    variant: VariantFilter = "all"
    details: bool = False


class Bounds(Wire, kw_only=True):
    """Bounds that contain the true value in 95 % of cases, for one look."""

    low: float
    high: float

    @classmethod
    def of(cls, interval: ConfidenceInterval | None) -> Self | None:
        return None if interval is None else cls.from_attributes(interval)


class IntervalPercent(Bounds, kw_only=True):
    """Bounds in percent that contain the true value in 95 % of cases, for one look."""


class Neighbour(Wire, kw_only=True):
    """A verdict on a model of the board against an adjacent one, over the common whole hours of their runs.

    `smallestDifference` is the true difference that four of five such seasons would detect, in percent over these
    hours; null with too little data for any figure. `reason` says why the two are indistinguishable; null if they are
    not.
    """

    model_id: str
    verdict: Word
    smallest_difference: float | None
    reason: str | None

    @classmethod
    def of(cls, neighbour: NeighbourVerdict | None) -> "Neighbour | None":
        if neighbour is None:
            return None
        return cls(
            model_id=neighbour.neighbour.id,
            verdict=neighbour.verdict.word,
            smallest_difference=neighbour.verdict.visible_percent,
            reason=neighbour.verdict.why,
        )


class Neighbours(Wire, kw_only=True):
    """The verdicts against the model ranked above (null for the first) and against the one below (null for the last).

    They stay valid for daily looks: at any time, the verdicts of a board are wrong in at most 5 % of cases together.
    """

    above: Neighbour | None
    below: Neighbour | None


class Replicates(Wire, kw_only=True):
    """Accounts of one configuration, in their common hours.

    `spreadPercent` is the standard deviation of their returns. `noisePercent` is the share of an hour's variance in
    which they differ, which is the model's own noise; the rest is the market's. Null if nothing varied.
    """

    model_ids: list[str]
    hours: int
    lowest_percent: Percent
    highest_percent: Percent
    spread_percent: Percent
    noise_percent: Percent | None


class ReplicatesRow(Wire, kw_only=True):
    """The models of a leaderboard row, and the spread of their returns in the window.

    `noise` covers all their common hours; null while there are fewer than 24. `costUsd` is the cost of all of them
    together, null if it is unknown.
    """

    model_ids: list[str]
    lowest_percent: Percent | None
    highest_percent: Percent | None
    noise: Replicates | None
    cost_usd: Decimal | None

    @classmethod
    def of(cls, entry: ReplicatesEntry) -> "ReplicatesRow":
        return cls.from_attributes(
            entry,
            model_ids=[model.id for model in entry.models],
            noise=None if entry.noise is None else Replicates.from_attributes(entry.noise),
        )


class LeaderboardDetails(Wire, kw_only=True):
    """Reliability and composition of a leaderboard entry.

    `ci95Reason` says why there is no `ci95`. `tie`: an adjacent entry has the same figure. `verdict` is null if sorted
    by maxDrawdown. A `runNumber` above 1 means that the account was reset; p values are multiplied by its square.
    `coverage` is the share of due cycles that the entrant decided, in percent. `contamination` says whether the entry
    starts after the model's training cutoff (`trainingCutoff` of the models file). `declared` is an external agent's
    declaration. `offBoard` says why the season gives it no rank; absent without such a reason.

    `withinMinute` counts the trades of `tradesCount` that were held for less than a minute: in a replay of candles
    their results depend on drawn prices.

    `costUsd` is the cost of the model's invocations within the window (for replicates the mean), null if no provider
    reported a cost, and `netAfterCost` is `pnlAbsolute` minus that cost.
    """

    ci95_reason: str | None
    tie: bool
    verdict: Neighbours | None
    entrant: int
    run_number: int
    fingerprint: str | None
    coverage: Percent | None
    within_minute: int
    training_cutoff: str | None
    contamination: Contamination
    owner: str | None
    cost_usd: Decimal | None
    net_after_cost: Decimal | None
    declared: DeclaredView | UnsetType = UNSET
    replicates: ReplicatesRow | UnsetType = UNSET
    off_board: str | UnsetType = UNSET

    @classmethod
    def of(cls, entry: LeaderboardEntry, sort_by: SortKey) -> "LeaderboardDetails":
        neighbours = Neighbours(above=Neighbour.of(entry.above), below=Neighbour.of(entry.below))
        training_cutoff = entry.model.configuration.training_cutoff
        return cls.from_attributes(
            entry,
            ci95_reason=entry.evidence.reason,
            verdict=None if sort_by == "maxDrawdown" else neighbours,
            **entrant_fields(entry.record),
            run_number=entry.attempt,
            training_cutoff=day(training_cutoff),
            contamination=contamination(training_cutoff, entry.since),
            owner=entry.model.configuration.owner,
            replicates=None if entry.replicates is None else ReplicatesRow.of(entry.replicates),
        )


class LeaderboardRow(Wire, kw_only=True):
    """A model's current entrant within the window, live at its end.

    An entrant that decided less than 95 % of its due cycles, or is excluded from the board of the current season, is
    listed without a `rank`, after the ranked ones. Replicates of one configuration share a row with their means, the
    sum of their trades, and the first of them as `modelId`. `ci95` is the 95 % interval of the return in the whole
    hours of the window, for one look. It needs 24 hours and 10 completed trades in the window; before that it is null.
    """

    rank: int | None
    model_id: str
    model_name: str
    variant: VariantId
    color: str
    pnl_percent: float | None
    pnl_absolute: Decimal
    max_drawdown: float
    start_value: Decimal
    end_value: Decimal
    trades_count: int
    ci95: IntervalPercent | None
    details: LeaderboardDetails | UnsetType = UNSET

    @classmethod
    def of(cls, entry: LeaderboardEntry, details: LeaderboardDetails | UnsetType = UNSET) -> "LeaderboardRow":
        return cls.from_attributes(
            entry,
            model_id=entry.model.id,
            model_name=entry.model.name,
            variant=entry.model.variant,
            color=color_of(entry.model),
            ci95=IntervalPercent.of(entry.evidence.interval_percent),
            details=details,
        )


class GetLeaderboardOutput(Wire, kw_only=True):
    """While a season runs, and until it is closed, its entrants in its hours by its rules (`season`).

    `bestTradeId`, with `details`, is the completed trade of the first entry with the largest profit in the window;
    absent if none has a profit.
    """

    entries: list[LeaderboardRow]
    window: RunWindow
    best_trade_id: str | UnsetType = UNSET
    season: SeasonView | UnsetType = UNSET


class GetFailuresInput(PageInput, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 50
    variant: VariantFilter = "all"


class FailureToolCall(Wire, kw_only=True):
    """`metadata` is JSON text."""

    id: str
    tool_call_type: ToolCallType
    metadata: str
    created_at: Timestamp

    @classmethod
    def of(cls, call: ToolCall) -> "FailureToolCall":
        return cls.from_attributes(call, tool_call_type=call.type, metadata=ENCODER.encode(call.metadata).decode())


class StepTelemetry(Wire, kw_only=True):
    """One exchange with the provider. Tokens that it did not report are null."""

    step_number: int
    tool_names: list[str]
    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    timestamp: Timestamp

    @classmethod
    def of(cls, step: Step) -> "StepTelemetry":
        return cls.from_attributes(
            step,
            step_number=step.number,
            total_tokens=_total(step.input_tokens, step.output_tokens),
            timestamp=step.created_at,
        )


class Failure(Wire, kw_only=True):
    """An invocation that failed, or in which a tool call failed (then `failureReason` is null).

    `responsePayload` holds the provider's raw answers as long as they are retained: at most 256 KiB each and 8 MiB in
    total, newest first; longer ones are null. The steps and their totals are absent if no step ended; a total is absent
    if part of it was not reported.
    """

    invocation_id: str
    model_id: str
    model_name: str
    response: str | None
    response_payload: Any
    created_at: Timestamp
    failure_reason: str | None
    tool_calls: list[FailureToolCall]
    step_telemetry: list[StepTelemetry] | UnsetType = UNSET
    total_steps: int | UnsetType = UNSET
    total_input_tokens: int | UnsetType = UNSET
    total_output_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, invocation: Invocation, failures: Failures) -> "Failure":
        steps = [StepTelemetry.of(step) for step in failures.steps.get(invocation.id, ())]
        return cls.from_attributes(
            invocation,
            invocation_id=invocation.id,
            model_name=failures.models[invocation.model_id].name,
            response_payload=failures.answers.get(invocation.id),
            created_at=invocation.started_at,
            tool_calls=[FailureToolCall.of(call) for call in failures.tool_calls.get(invocation.id, ())],
            step_telemetry=steps or None,
            total_steps=len(steps) or None,
            total_input_tokens=_total(*(step.input_tokens for step in steps)) if steps else None,
            total_output_tokens=_total(*(step.output_tokens for step in steps)) if steps else None,
        )


def _total(*tokens: int | None) -> int | None:
    """Return the sum; None if part of it is unknown."""
    known = [count for count in tokens if count is not None]
    return sum(known) if len(known) == len(tokens) else None


class FailureStats(Wire, kw_only=True):
    """`failedCount` counts each failed invocation of the run once; `failureRate` is in percent."""

    model_id: str
    model_name: str
    variant: VariantId
    failed_workflow_count: int
    failed_tool_call_count: int
    failed_count: int
    invocation_count: int
    failure_rate: float | None

    @classmethod
    def of(cls, counts: FailureCounts) -> "FailureStats":
        return cls(
            model_id=counts.model.id,
            model_name=counts.model.name,
            variant=counts.model.variant,
            failed_workflow_count=counts.workflows,
            failed_tool_call_count=counts.tool_calls,
            failed_count=counts.failed,
            invocation_count=counts.invocations,
            failure_rate=counts.rate_percent,
        )


class GetFailuresOutput(PageOutput, kw_only=True):
    failures: list[Failure]
    model_stats: list[FailureStats]


class GetTradeTotalsInput(TradeFilterInput, kw_only=True):
    """A week is named by its Monday; trades count on the day or week of their close."""

    by: Literal["day", "week", "market", "side", "reason"]


class TradeTotalsRow(Wire, kw_only=True):
    """A group of completed trades. `netPnl = grossPnl − fees + funding`."""

    key: str
    trades: int
    won: int
    gross_pnl: Decimal
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal


class GetTradeTotalsOutput(Wire, kw_only=True):
    rows: list[TradeTotalsRow]
