"""Figures: statistics of trades and of hourly equity, for a whole run or a part of it."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from trader.core import statistics
from trader.core.intervals import ConfidenceInterval
from trader.core.statistics import Drawdown, EquityPoint, Streaks, Summary
from trader.exchange.sql.trades import RunTrade


class TradeFigures(NamedTuple):
    """Statistics of completed trades. Percentages are in percent, times in minutes; None means no value.

    `total` is the sum of the net pnl as a float, `total_net` the exact sum.
    """

    total: float | None
    trades: int
    wins: int
    total_net: Decimal
    win_rate: float | None
    win_rate_interval: ConfidenceInterval | None
    biggest_win: Decimal | None
    biggest_loss: Decimal | None
    signal_to_noise: float | None
    sizes: Summary
    holds: Summary
    confidences: Summary
    long_percent: float | None
    expectancy: float | None
    profit_factor: float | None
    profit_factor_interval: ConfidenceInterval | None
    average_r_multiple: float | None
    decision_quality: float | None
    streaks: Streaks
    average_win_minutes: float | None
    average_loss_minutes: float | None


class EquityFigures(NamedTuple):
    """Statistics of an hourly equity series. None means no value."""

    drawdown: Drawdown | None
    sharpe: float | None
    sharpe_interval: ConfidenceInterval | None
    sortino: float | None
    calmar: float | None


class Figures(NamedTuple):
    """The statistics of a run, or of a part of it."""

    trades: TradeFigures
    equity: EquityFigures

    @property
    def recovery_factor(self) -> float | None:
        return statistics.recovery_factor(self.trades.total, self.equity.drawdown)


class DailyFigures(NamedTuple):
    """Statistics of closed days, which stay the same until the next day closes."""

    closes: Sequence[float]
    sharpe: float | None
    sharpe_interval: ConfidenceInterval | None
    sortino: float | None


def figures_of_days(series: Sequence[EquityPoint], initial_capital: float) -> DailyFigures:
    """Return the statistics of the closed days of an hourly series."""
    closes = statistics.daily_closes(series, initial_capital)
    sharpe, interval = statistics.sharpe_ratio(closes), statistics.sharpe_interval(closes)
    return DailyFigures(closes, sharpe, interval, statistics.sortino_ratio(closes))


def figures_of_equity(values: Sequence[float], days: DailyFigures) -> EquityFigures:
    """Return the statistics of hourly values; the drawdown also counts a fall below the capital in the first hour."""
    if not values:
        return EquityFigures(None, None, None, None, None)
    drawdown = statistics.max_drawdown(np.concatenate([days.closes[:1], values]))
    calmar = statistics.calmar_ratio(days.closes, drawdown)
    return EquityFigures(drawdown, days.sharpe, days.sharpe_interval, days.sortino, calmar)


def figures_of_trades(trades: Sequence[RunTrade]) -> TradeFigures:
    """Return the statistics of trades given in closing order."""
    exact = [trade.net_pnl for trade in trades]
    pnls = [float(pnl) for pnl in exact]
    holds = [statistics.minutes(trade.opened_at, trade.closed_at) for trade in trades]
    decisions = [
        (float(trade.confidence), pnl) for trade, pnl in zip(trades, pnls, strict=True) if trade.confidence is not None
    ]
    held = list(zip(pnls, holds, strict=True))
    wins = sum(pnl > 0 for pnl in exact)
    best, worst = max(exact, default=Decimal(0)), min(exact, default=Decimal(0))
    return TradeFigures(
        total=math.fsum(pnls) if pnls else None,
        trades=len(trades),
        wins=wins,
        total_net=sum(exact, Decimal(0)),
        win_rate=statistics.win_rate(pnls),
        win_rate_interval=statistics.win_rate_interval(wins, len(pnls)),
        biggest_win=best if best > 0 else None,
        biggest_loss=worst if worst < 0 else None,
        signal_to_noise=statistics.trade_signal_to_noise(pnls),
        sizes=statistics.summary([float(trade.entry_notional) for trade in trades]),
        holds=statistics.summary(holds),
        confidences=statistics.summary([confidence for confidence, _ in decisions]),
        long_percent=statistics.percent(sum(trade.is_long for trade in trades), len(trades)),
        expectancy=statistics.mean(pnls),
        profit_factor=statistics.profit_factor(pnls),
        profit_factor_interval=statistics.profit_factor_interval(pnls),
        average_r_multiple=statistics.average_r_multiple(pnls),
        decision_quality=statistics.decision_quality(decisions),
        streaks=statistics.streaks(pnls),
        average_win_minutes=statistics.average_minutes(held, won=True),
        average_loss_minutes=statistics.average_minutes(held, won=False),
    )
