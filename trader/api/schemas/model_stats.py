"""Statistics of models on the wire: for their current runs, and for each entrant within its run.

Percentages are in percent, durations in minutes, amounts in the quote currency.
"""

import math
from decimal import Decimal
from typing import Annotated, Literal

from trader.agents.domain.shares import Budget
from trader.api.schemas.analytics import Bounds, IntervalPercent, Percent
from trader.api.schemas.common import (
    UNSET,
    BudgetUse,
    From,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    or_absent,
)
from trader.api.schemas.models import DeclaredView
from trader.portfolio.analytics import ModelStats, RunInfo


def figure(value: float | Decimal | None) -> float | str:
    """Return the figure on the wire. A Decimal becomes a float, as when reading a JSON number."""
    if value is None:
        return "N/A"
    return "Infinity" if value == math.inf else float(value)


Figure = Annotated[float | Literal["N/A", "Infinity"], From(convert=figure)]
"""A figure of getModelStats: `N/A` means no value, `Infinity` unbounded."""


class GetModelStatsInput(Input, kw_only=True):
    mode: Literal["overall", "advanced"] = "overall"
    variant: VariantFilter = "all"


class OverallFigures(Wire, kw_only=True):
    """`totalPnl` is the net pnl of the completed trades; `startValue` is the capital of the run, or the account's value
    at the start of the entrant.

    The tokens and `costUsd` are the providers' charges (`N/A`: none reported a cost); `unmeteredAttempts`, if any,
    counts the requests that may have cost unreported tokens, and `costIsPartial` is true if part of the cost is
    unknown. `costIsDeclared`: it is an external agent's declaration, like its tokens. `netAfterCost` is the account's
    gain, including open positions, minus that cost. The intervals contain the true value in 95 % of cases, for one
    look; null for under 10 trades or days.
    """

    model_id: Annotated[str, From("model.id")]
    model_name: Annotated[str, From("model.name")]
    variant: Annotated[VariantId, From("model.variant")]
    account_value: Figure
    start_value: Annotated[float, From(convert=float)]
    return_percent: Figure
    total_pnl: Annotated[float, From("figures.trades.total_net", float)]
    win_rate: Annotated[Figure, From("figures.trades.win_rate")]
    win_rate_interval: Annotated[IntervalPercent | None, From("figures.trades.win_rate_interval")]
    biggest_win: Annotated[Figure, From("figures.trades.biggest_win")]
    biggest_loss: Annotated[Figure, From("figures.trades.biggest_loss")]
    trades_count: Annotated[int, From("figures.trades.trades")]
    sharpe_ratio: Annotated[Figure, From("figures.equity.sharpe")]
    sharpe_interval: Annotated[Bounds | None, From("figures.equity.sharpe_interval")]
    max_drawdown: Annotated[Figure, From("figures.equity.drawdown.percent")]
    trade_signal_to_noise: Annotated[Figure, From("figures.trades.signal_to_noise")]
    input_tokens: Annotated[int, From("totals.input_tokens")]
    output_tokens: Annotated[int, From("totals.output_tokens")]
    unmetered_attempts: Annotated[int | UnsetType, From("totals.unmetered_attempts", or_absent)] = UNSET
    cost_usd: Figure
    cost_is_partial: Annotated[bool | UnsetType, From("is_cost_partial")] = UNSET
    cost_is_declared: Annotated[bool | UnsetType, From("is_cost_declared")] = UNSET
    net_after_cost: Figure


class AdvancedFigures(Wire, kw_only=True):
    """`failedCount` counts each failed invocation once: those that failed, and those in which a tool call failed.

    The tokens, `costUsd` and `netAfterCost` are the same as in the overall figures.
    """

    model_id: Annotated[str, From("model.id")]
    model_name: Annotated[str, From("model.name")]
    variant: Annotated[VariantId, From("model.variant")]
    account_value: Figure
    avg_trade_size: Annotated[Figure, From("figures.trades.sizes.average")]
    median_trade_size: Annotated[Figure, From("figures.trades.sizes.median")]
    max_trade_size: Annotated[Figure, From("figures.trades.sizes.maximum")]
    avg_hold_time_minutes: Annotated[Figure, From("figures.trades.holds.average")]
    median_hold_time_minutes: Annotated[Figure, From("figures.trades.holds.median")]
    max_hold_time_minutes: Annotated[Figure, From("figures.trades.holds.maximum")]
    long_percent: Annotated[Figure, From("figures.trades.long_percent")]
    expectancy: Annotated[Figure, From("figures.trades.expectancy")]
    recovery_factor: Annotated[Figure, From("figures.recovery_factor")]
    avg_confidence: Annotated[Figure, From("figures.trades.confidences.average")]
    median_confidence: Annotated[Figure, From("figures.trades.confidences.median")]
    max_confidence: Annotated[Figure, From("figures.trades.confidences.maximum")]
    failed_workflow_count: Annotated[int, From("totals.failed")]
    failed_tool_call_count: Annotated[int, From("totals.tool_failed")]
    failed_count: Annotated[int, From("totals.failures")]
    invocation_count: Annotated[int, From("totals.finished")]
    failure_rate: Annotated[Figure, From("totals.failure_percent")]
    profit_factor: Annotated[Figure, From("figures.trades.profit_factor")]
    profit_factor_interval: Annotated[Bounds | None, From("figures.trades.profit_factor_interval")]
    avg_r_multiple: Annotated[Figure, From("figures.trades.average_r_multiple")]
    decision_quality_score: Annotated[Figure, From("figures.trades.decision_quality")]
    sharpe_ratio: Annotated[Figure, From("figures.equity.sharpe")]
    sharpe_interval: Annotated[Bounds | None, From("figures.equity.sharpe_interval")]
    sortino_ratio: Annotated[Figure, From("figures.equity.sortino")]
    calmar_ratio: Annotated[Figure, From("figures.equity.calmar")]
    longest_win_streak: Annotated[int, From("figures.trades.streaks.longest_win")]
    longest_loss_streak: Annotated[int, From("figures.trades.streaks.longest_loss")]
    current_streak_count: Annotated[int, From("figures.trades.streaks.current_count")]
    current_streak_type: Annotated[Literal["win", "loss", "none"], From("figures.trades.streaks.current_type")]
    avg_win_duration_minutes: Annotated[Figure, From("figures.trades.average_win_minutes")]
    avg_loss_duration_minutes: Annotated[Figure, From("figures.trades.average_loss_minutes")]
    input_tokens: Annotated[int, From("totals.input_tokens")]
    output_tokens: Annotated[int, From("totals.output_tokens")]
    unmetered_attempts: Annotated[int | UnsetType, From("totals.unmetered_attempts", or_absent)] = UNSET
    cost_usd: Figure
    cost_is_partial: Annotated[bool | UnsetType, From("is_cost_partial")] = UNSET
    cost_is_declared: Annotated[bool | UnsetType, From("is_cost_declared")] = UNSET
    net_after_cost: Figure


class EntrantOverall(OverallFigures, kw_only=True):
    """The figures of an entrant: the model in one configuration, from `startedAt` until the next change.

    They start with the account's value at that time, including its predecessor's positions. `endedAt` is null for the
    current entrant, whose `accountValue` is live. `entrant` 0 is an unknown one. `coverage` is the share of due cycles
    that it decided, in percent; below 95 it is not `ranked`. `declared` is the external agent's declaration at that
    time.
    """

    entrant: Annotated[int, From("record.number")]
    fingerprint: Annotated[str | None, From("record.fingerprint")]
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Annotated[Percent | None, From("record.coverage_percent")]
    ranked: Annotated[bool, From("record.is_ranked")]
    declared: Annotated[DeclaredView | UnsetType, From("record.declared")] = UNSET


class EntrantAdvanced(AdvancedFigures, kw_only=True):
    """The advanced figures of an entrant, with the same description as the overall ones."""

    entrant: Annotated[int, From("record.number")]
    fingerprint: Annotated[str | None, From("record.fingerprint")]
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Annotated[Percent | None, From("record.coverage_percent")]
    ranked: Annotated[bool, From("record.is_ranked")]
    declared: Annotated[DeclaredView | UnsetType, From("record.declared")] = UNSET


class OverallStats(OverallFigures, kw_only=True):
    """A model in its current run; `entrants` are its parts, one for each configuration, the present one last."""

    budget: BudgetUse | UnsetType = UNSET
    entrants: list[EntrantOverall]

    @classmethod
    def of(cls, stats: ModelStats, budget: Budget | None) -> "OverallStats":
        entrants = [EntrantOverall.from_attributes(each, each.period) for each in stats.entrants]
        return cls.from_attributes(stats, budget=budget, entrants=entrants)


class AdvancedStats(AdvancedFigures, kw_only=True):
    """A model in its current run; `entrants` are its parts, one for each configuration, the present one last."""

    budget: BudgetUse | UnsetType = UNSET
    entrants: list[EntrantAdvanced]

    @classmethod
    def of(cls, stats: ModelStats, budget: Budget | None) -> "AdvancedStats":
        entrants = [EntrantAdvanced.from_attributes(each, each.period) for each in stats.entrants]
        return cls.from_attributes(stats, budget=budget, entrants=entrants)


class GetModelStatsOutput(Wire, kw_only=True):
    """Only the list of the requested mode is present."""

    overall: list[OverallStats] | UnsetType = UNSET
    advanced: list[AdvancedStats] | UnsetType = UNSET


class EntrantInfo(Wire, kw_only=True):
    """An entrant in its model's run: `endedAt` is null for the current one; `trades` were completed in its time."""

    model_id: str
    entrant: Annotated[int, From("record.number")]
    fingerprint: Annotated[str | None, From("record.fingerprint")]
    started_at: Timestamp
    ended_at: Timestamp | None
    invocations: Annotated[int, From("totals.finished")]
    trades: Annotated[int, From("trades_count")]
    coverage: Annotated[Percent | None, From("record.coverage_percent")]
    ranked: Annotated[bool, From("record.is_ranked")]
    declared: Annotated[DeclaredView | UnsetType, From("record.declared")] = UNSET


class GetRunInfoOutput(Wire, kw_only=True):
    """Totals of the current runs of all models, since the first of them started, and each entrant within its run."""

    run_start_time: Annotated[Timestamp | None, From("started_at")]
    trading_mode: str
    models: int
    invocations: int
    trades: int
    entrants: list[EntrantInfo]

    @classmethod
    def of(cls, info: RunInfo, trading_mode: str) -> "GetRunInfoOutput":
        entrants = [
            EntrantInfo.from_attributes(period, period.entrant, model_id=model.id) for model, period in info.periods
        ]
        return cls.from_attributes(info, trading_mode=trading_mode, entrants=entrants)
