"""Leaderboard and failures on the wire. Percentages are in percent, amounts in the quote currency."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from msgspec import Meta

from trader.agents.domain.invocations import Invocation, Step, ToolCallType
from trader.agents.domain.models import Contamination, Model, contamination
from trader.agents.variants import color_of
from trader.api.schemas.common import (
    ENCODER,
    UNSET,
    From,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
)
from trader.api.schemas.models import DeclaredView
from trader.api.schemas.paging import PageInput, PageOutput
from trader.api.schemas.seasons import SeasonView
from trader.api.schemas.trades import TradeFilterInput
from trader.portfolio.analytics import Failures
from trader.portfolio.domain.evidence import Word
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.leaderboard import LeaderboardEntry, SortKey

Percent = Annotated[float, Meta(description="in percent")]


class GetLeaderboardInput(Input, kw_only=True):
    """The window `run` covers the whole current runs; with `details` each entry has details; `separate` replicates have
    a row each. All are additions to the specification."""

    window: RunWindow = "7d"
    sort_by: SortKey = "pnlPercent"
    variant: VariantFilter = "all"
    details: bool = False
    replicates: Literal["merged", "separate"] = "merged"


class Bounds(Wire, kw_only=True):
    """Bounds that contain the true value in 95 % of cases, for one look."""

    low: float
    high: float


class IntervalPercent(Bounds, kw_only=True):
    """Bounds in percent that contain the true value in 95 % of cases, for one look."""


class Neighbour(Wire, kw_only=True):
    """A verdict on an entry of the board against an adjacent one, over the common whole hours of their runs.

    `smallestDifference` is the true difference that four of five such seasons would detect, in percent over these
    hours; null with too little data for any figure. `reason` says why the two are indistinguishable; null if they are
    not.
    """

    model_id: Annotated[str, From("neighbour.id")]
    verdict: Annotated[Word, From("verdict.word")]
    smallest_difference: Annotated[float | None, From("verdict.visible_percent")]
    reason: Annotated[str | None, From("verdict.why")]


class Neighbours(Wire, kw_only=True):
    """The verdicts against the model ranked above (null for the first) and against the one below (null for the last).

    They stay valid for daily looks: at any time, the verdicts of a board are wrong in at most 5 % of cases together.
    """

    above: Neighbour | None
    below: Neighbour | None


def ids_of(models: Sequence[Model]) -> list[str]:
    return [model.id for model in models]


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

    model_ids: Annotated[list[str], From("models", ids_of)]
    lowest_percent: Percent | None
    highest_percent: Percent | None
    noise: Replicates | None
    cost_usd: Decimal | None


class LeaderboardDetails(Wire, kw_only=True):
    """Reliability and composition of a leaderboard entry.

    `ci95Reason` says why there is no `ci95`. `tie`: an adjacent entry has the same figure. `verdict` is null if sorted
    by maxDrawdown. A `runNumber` above 1 means that the account was reset; p values are multiplied by its square.
    `coverage` is the share of due cycles that the entrant decided, in percent. `contamination` says whether the entry
    starts after the model's training cutoff (`trainingCutoff` of the models file). `declared` is an external agent's
    declaration. `offBoard` says why the season gives it no rank; absent without such a reason.

    `withinMinute` counts the trades of `tradesCount` that were held for less than a minute: in a replay of candles
    their results depend on drawn prices.

    `fees` are those of these trades, and `costUsd` is the cost of the model's invocations within the window, null if no
    provider reported one (for replicates the means); `netAfterCost` is `pnlAbsolute` minus that cost.
    """

    ci95_reason: Annotated[str | None, From("evidence.reason")]
    tie: bool
    verdict: Neighbours | None
    entrant: Annotated[int, From("record.number")]
    run_number: Annotated[int, From("attempt")]
    fingerprint: Annotated[str | None, From("record.fingerprint")]
    coverage: Annotated[Percent | None, From("record.coverage_percent")]
    within_minute: int
    training_cutoff: Annotated[str | None, From("model.configuration.training_cutoff")]
    contamination: Contamination
    owner: Annotated[str | None, From("model.configuration.owner")]
    fees: Decimal
    cost_usd: Decimal | None
    net_after_cost: Decimal | None
    declared: Annotated[DeclaredView | UnsetType, From("record.declared")] = UNSET
    replicates: ReplicatesRow | UnsetType = UNSET
    off_board: str | UnsetType = UNSET

    @classmethod
    def of(cls, entry: LeaderboardEntry, sort_by: SortKey) -> "LeaderboardDetails":
        cutoff = entry.model.configuration.training_cutoff
        return cls.from_attributes(
            entry,
            verdict=None if sort_by == "maxDrawdown" else Neighbours.from_attributes(entry),
            contamination=contamination(cutoff, entry.since),
        )


class LeaderboardRow(Wire, kw_only=True):
    """A model's current entrant within the window, live at its end.

    An entrant that decided less than 95 % of its due cycles, or is excluded from the board of the current season, is
    listed without a `rank`, after the ranked ones. Replicates of one configuration share a row with their means and the
    sum of their trades: `replicates` is their number (1: a single account), `modelIds` are all of them, and `modelId`
    is their fingerprint, which no account has. The figures start at `since` (null for an
    agent, whose dates may be masked). `ci95` is the 95 % interval of the return
    in the whole hours of the window, for one look. It needs 24 hours and 10 completed trades in the window; before that
    it is null.
    """

    rank: int | None
    model_id: Annotated[str, From("id")]
    model_name: Annotated[str, From("name")]
    model_ids: Annotated[list[str], From("models", ids_of)]
    replicates: Annotated[int, From("models", len)]
    since: Timestamp | None
    variant: Annotated[VariantId, From("model.variant")]
    color: Annotated[str, From("model", color_of)]
    pnl_percent: float | None
    pnl_absolute: Decimal
    max_drawdown: float
    start_value: Decimal
    end_value: Decimal
    trades_count: int
    ci95: Annotated[IntervalPercent | None, From("evidence.interval_percent")]
    details: LeaderboardDetails | UnsetType = UNSET


class GetLeaderboardOutput(Wire, kw_only=True):
    """While a season runs, and until it is closed, its entrants in its hours by its rules (`season`).

    `start` is the first moment that a figure covers, to the minute as long as snapshots are retained; null without one.
    `bestTradeId`, with `details`, is the completed trade of the first entry with the largest profit in the window;
    absent if none has a profit.
    """

    entries: list[LeaderboardRow]
    window: RunWindow
    start: Timestamp | None
    best_trade_id: str | UnsetType = UNSET
    season: SeasonView | UnsetType = UNSET


class GetFailuresInput(PageInput, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 50
    variant: VariantFilter = "all"


class FailureToolCall(Wire, kw_only=True):
    """`metadata` is JSON text."""

    id: str
    tool_call_type: Annotated[ToolCallType, From("type")]
    metadata: Annotated[str, From(convert=lambda metadata: ENCODER.encode(metadata).decode())]
    created_at: Timestamp


class StepTelemetry(Wire, kw_only=True):
    """One exchange with the provider. Tokens that it did not report are null."""

    step_number: Annotated[int, From("number")]
    tool_names: list[str]
    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    timestamp: Annotated[Timestamp, From("created_at")]

    @classmethod
    def of(cls, step: Step) -> "StepTelemetry":
        return cls.from_attributes(step, total_tokens=_total(step.input_tokens, step.output_tokens))


class Failure(Wire, kw_only=True):
    """An invocation that failed, or in which a tool call failed (then `failureReason` is null).

    `responsePayload` holds the provider's raw answers as long as they are retained: at most 256 KiB each and 8 MiB in
    total, newest first; longer ones are null. The steps and their totals are absent if no step ended; a total is absent
    if part of it was not reported.
    """

    invocation_id: Annotated[str, From("id")]
    model_id: str
    model_name: str
    response: str | None
    response_payload: Any
    created_at: Annotated[Timestamp, From("started_at")]
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
            model_name=failures.models[invocation.model_id].name,
            response_payload=failures.answers.get(invocation.id),
            tool_calls=failures.tool_calls.get(invocation.id, []),
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

    model_id: Annotated[str, From("id")]
    model_name: Annotated[str, From("name")]
    variant: VariantId
    failed_workflow_count: Annotated[int, From("failed")]
    failed_tool_call_count: Annotated[int, From("tool_failed")]
    failed_count: Annotated[int, From("failures")]
    invocation_count: Annotated[int, From("finished")]
    failure_rate: Annotated[float | None, From("failure_percent")]


class GetFailuresOutput(PageOutput, kw_only=True):
    failures: list[Failure]
    model_stats: list[FailureStats]


class GetTradeTotalsInput(TradeFilterInput, kw_only=True):
    """A week is named by its Monday; trades count on the day or week of their close."""

    by: Literal["day", "week", "market", "side", "reason", "model"]


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
