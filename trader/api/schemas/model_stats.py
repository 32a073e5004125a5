"""Statistics of models on the wire: for their current runs, and for each entrant within its run.

Percentages are in percent, durations in minutes, amounts in the quote currency.
"""

import math
from decimal import Decimal
from typing import Any, Literal

from trader.agents.domain.models import Model
from trader.agents.domain.shares import Budget
from trader.api.schemas.analytics import Bounds, IntervalPercent, Percent
from trader.api.schemas.common import (
    UNSET,
    BudgetUse,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
)
from trader.api.schemas.models import DeclaredView, entrant_fields
from trader.portfolio.analytics import EntrantStats, ModelStats, RunInfo
from trader.portfolio.run_statistics import EntrantPeriod

Figure = float | Literal["N/A", "Infinity"]
"""A figure of getModelStats: `N/A` means no value, `Infinity` unbounded."""


def figure(value: float | Decimal | None) -> Figure:
    """Return the figure on the wire. A Decimal becomes a float, as when reading a JSON number."""
    if value is None:
        return "N/A"
    return "Infinity" if value == math.inf else float(value)


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

    model_id: str
    model_name: str
    variant: VariantId
    account_value: Figure
    start_value: float
    return_percent: Figure
    total_pnl: float
    win_rate: Figure
    win_rate_interval: IntervalPercent | None
    biggest_win: Figure
    biggest_loss: Figure
    trades_count: int
    sharpe_ratio: Figure
    sharpe_interval: Bounds | None
    max_drawdown: Figure
    trade_signal_to_noise: Figure
    input_tokens: int
    output_tokens: int
    unmetered_attempts: int | UnsetType = UNSET
    cost_usd: Figure
    cost_is_partial: bool | UnsetType = UNSET
    cost_is_declared: bool | UnsetType = UNSET
    net_after_cost: Figure


class AdvancedFigures(Wire, kw_only=True):
    """`failedCount` counts each failed invocation once: those that failed, and those in which a tool call failed.

    The tokens, `costUsd` and `netAfterCost` are the same as in the overall figures.
    """

    model_id: str
    model_name: str
    variant: VariantId
    account_value: Figure
    avg_trade_size: Figure
    median_trade_size: Figure
    max_trade_size: Figure
    avg_hold_time_minutes: Figure
    median_hold_time_minutes: Figure
    max_hold_time_minutes: Figure
    long_percent: Figure
    expectancy: Figure
    recovery_factor: Figure
    avg_confidence: Figure
    median_confidence: Figure
    max_confidence: Figure
    failed_workflow_count: int
    failed_tool_call_count: int
    failed_count: int
    invocation_count: int
    failure_rate: Figure
    profit_factor: Figure
    profit_factor_interval: Bounds | None
    avg_r_multiple: Figure
    decision_quality_score: Figure
    sharpe_ratio: Figure
    sharpe_interval: Bounds | None
    sortino_ratio: Figure
    calmar_ratio: Figure
    longest_win_streak: int
    longest_loss_streak: int
    current_streak_count: int
    current_streak_type: Literal["win", "loss", "none"]
    avg_win_duration_minutes: Figure
    avg_loss_duration_minutes: Figure
    input_tokens: int
    output_tokens: int
    unmetered_attempts: int | UnsetType = UNSET
    cost_usd: Figure
    cost_is_partial: bool | UnsetType = UNSET
    cost_is_declared: bool | UnsetType = UNSET
    net_after_cost: Figure


def _common(stats: ModelStats) -> dict[str, Any]:
    """Return the fields that both kinds of figures have."""
    equity, totals = stats.figures.equity, stats.totals
    return {
        "model_id": stats.model.id,
        "model_name": stats.model.name,
        "variant": stats.model.variant,
        "account_value": figure(stats.account_value),
        "sharpe_ratio": figure(equity.sharpe),
        "sharpe_interval": Bounds.of(equity.sharpe_interval),
        "input_tokens": totals.input_tokens,
        "output_tokens": totals.output_tokens,
        "unmetered_attempts": totals.unmetered_attempts or UNSET,
        "cost_usd": figure(stats.cost_usd),
        "cost_is_partial": stats.is_cost_partial or UNSET,
        "cost_is_declared": stats.is_cost_declared or UNSET,
        "net_after_cost": figure(stats.net_after_cost),
    }


def _overall(stats: ModelStats) -> dict[str, Any]:
    """Return the fields of the usual figures."""
    trades, equity = stats.figures
    return _common(stats) | {
        "start_value": float(stats.start_value),
        "return_percent": figure(stats.return_percent),
        "total_pnl": float(trades.total_net),
        "win_rate": figure(trades.win_rate),
        "win_rate_interval": IntervalPercent.of(trades.win_rate_interval),
        "biggest_win": figure(trades.biggest_win),
        "biggest_loss": figure(trades.biggest_loss),
        "trades_count": trades.trades,
        "max_drawdown": figure(None if equity.drawdown is None else equity.drawdown.percent),
        "trade_signal_to_noise": figure(trades.signal_to_noise),
    }


def _advanced(stats: ModelStats) -> dict[str, Any]:
    """Return the fields of the advanced figures."""
    (trades, equity), failures = stats.figures, stats.failures
    return _common(stats) | {
        "avg_trade_size": figure(trades.sizes.average),
        "median_trade_size": figure(trades.sizes.median),
        "max_trade_size": figure(trades.sizes.maximum),
        "avg_hold_time_minutes": figure(trades.holds.average),
        "median_hold_time_minutes": figure(trades.holds.median),
        "max_hold_time_minutes": figure(trades.holds.maximum),
        "long_percent": figure(trades.long_percent),
        "expectancy": figure(trades.expectancy),
        "recovery_factor": figure(stats.figures.recovery_factor),
        "avg_confidence": figure(trades.confidences.average),
        "median_confidence": figure(trades.confidences.median),
        "max_confidence": figure(trades.confidences.maximum),
        "failed_workflow_count": failures.workflows,
        "failed_tool_call_count": failures.tool_calls,
        "failed_count": failures.failed,
        "invocation_count": failures.invocations,
        "failure_rate": figure(failures.rate_percent),
        "profit_factor": figure(trades.profit_factor),
        "profit_factor_interval": Bounds.of(trades.profit_factor_interval),
        "avg_r_multiple": figure(trades.average_r_multiple),
        "decision_quality_score": figure(trades.decision_quality),
        "sortino_ratio": figure(equity.sortino),
        "calmar_ratio": figure(equity.calmar),
        "longest_win_streak": trades.streaks.longest_win,
        "longest_loss_streak": trades.streaks.longest_loss,
        "current_streak_count": trades.streaks.current_count,
        "current_streak_type": trades.streaks.current_type,
        "avg_win_duration_minutes": figure(trades.average_win_minutes),
        "avg_loss_duration_minutes": figure(trades.average_loss_minutes),
    }


class EntrantOverall(OverallFigures, kw_only=True):
    """The figures of an entrant: the model in one configuration, from `startedAt` until the next change.

    They start with the account's value at that time, including its predecessor's positions. `endedAt` is null for the
    current entrant, whose `accountValue` is live. `entrant` 0 is an unknown one. `coverage` is the share of due cycles
    that it decided, in percent; below 95 it is not `ranked`. `declared` is the external agent's declaration at that
    time.
    """

    entrant: int
    fingerprint: str | None
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Percent | None
    ranked: bool
    declared: DeclaredView | UnsetType = UNSET

    @classmethod
    def of(cls, entrant: EntrantStats) -> "EntrantOverall":
        fields = _overall(entrant.stats) | entrant_fields(entrant.record)
        return cls.from_attributes(entrant, **fields, ranked=entrant.record.is_ranked)


class EntrantAdvanced(AdvancedFigures, kw_only=True):
    """The advanced figures of an entrant, with the same description as the overall ones."""

    entrant: int
    fingerprint: str | None
    started_at: Timestamp
    ended_at: Timestamp | None
    coverage: Percent | None
    ranked: bool
    declared: DeclaredView | UnsetType = UNSET

    @classmethod
    def of(cls, entrant: EntrantStats) -> "EntrantAdvanced":
        fields = _advanced(entrant.stats) | entrant_fields(entrant.record)
        return cls.from_attributes(entrant, **fields, ranked=entrant.record.is_ranked)


class OverallStats(OverallFigures, kw_only=True):
    """A model in its current run; `entrants` are its parts, one for each configuration, the present one last."""

    budget: BudgetUse | UnsetType = UNSET
    entrants: list[EntrantOverall]

    @classmethod
    def of(cls, stats: ModelStats, budget: Budget | None) -> "OverallStats":
        entrants = [EntrantOverall.of(each) for each in stats.entrants]
        return cls(**_overall(stats), budget=_budget(budget), entrants=entrants)


class AdvancedStats(AdvancedFigures, kw_only=True):
    """A model in its current run; `entrants` are its parts, one for each configuration, the present one last."""

    budget: BudgetUse | UnsetType = UNSET
    entrants: list[EntrantAdvanced]

    @classmethod
    def of(cls, stats: ModelStats, budget: Budget | None) -> "AdvancedStats":
        entrants = [EntrantAdvanced.of(each) for each in stats.entrants]
        return cls(**_advanced(stats), budget=_budget(budget), entrants=entrants)


def _budget(budget: Budget | None) -> BudgetUse | UnsetType:
    return UNSET if budget is None else BudgetUse.of(budget)


class GetModelStatsOutput(Wire, kw_only=True):
    """Only the list of the requested mode is present."""

    overall: list[OverallStats] | UnsetType = UNSET
    advanced: list[AdvancedStats] | UnsetType = UNSET


class EntrantInfo(Wire, kw_only=True):
    """An entrant in its model's run: `endedAt` is null for the current one; `trades` were completed in its time."""

    model_id: str
    entrant: int
    fingerprint: str | None
    started_at: Timestamp
    ended_at: Timestamp | None
    invocations: int
    trades: int
    coverage: Percent | None
    ranked: bool
    declared: DeclaredView | UnsetType = UNSET

    @classmethod
    def of(cls, model: Model, period: EntrantPeriod) -> "EntrantInfo":
        record = period.entrant.record
        return cls.from_attributes(
            period,
            **entrant_fields(record),
            model_id=model.id,
            invocations=period.entrant.totals.finished,
            trades=period.trades_count,
            ranked=record.is_ranked,
        )


class GetRunInfoOutput(Wire, kw_only=True):
    """Totals of the current runs of all models, since the first of them started, and each entrant within its run."""

    run_start_time: Timestamp | None
    trading_mode: str
    models: int
    invocations: int
    trades: int
    entrants: list[EntrantInfo]

    @classmethod
    def of(cls, info: RunInfo, trading_mode: str) -> "GetRunInfoOutput":
        return cls.from_attributes(
            info,
            run_start_time=info.started_at,
            trading_mode=trading_mode,
            entrants=[EntrantInfo.of(model, period) for model, period in info.periods],
        )
