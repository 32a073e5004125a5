"""The current runs of all models, as their statistics need them: trades and hourly equity.

Both only ever grow while a run lasts, so they are read once and then from where the last reading ended; a request
costs what happened since the one before, not what happened in a season.
"""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from trader.domain.portfolio import statistics
from trader.domain.portfolio.statistics import Confidence95, Drawdown, EquityPoint, Falling, Streaks, Summary
from trader.store.database.pool import Connection, Database
from trader.store.exchange import trades as trades_store
from trader.store.exchange.trades import RunTrade
from trader.store.portfolio import analytics as analytics_store
from trader.store.portfolio import snapshots as portfolio_store
from trader.store.portfolio.analytics import CurrentRun
from trader.store.portfolio.snapshots import HourlyValue

RUNS_AT_ONCE = 25
DRAWDOWNS_KEPT = 8
"""Of a run: one for each window that is asked for."""


class TradeFigures(NamedTuple):
    """Statistics of the completed trades of a run. Percentages are percent, times minutes, None is without a value."""

    trades: int
    wins: int
    total_net: Decimal
    win_rate: float | None
    biggest_win: Decimal | None
    biggest_loss: Decimal | None
    signal_to_noise: float | None
    sizes: Summary
    holds: Summary
    confidences: Summary
    long_percent: float | None
    expectancy: float | None
    profit_factor: float | None
    average_r_multiple: float | None
    decision_quality: float | None
    streaks: Streaks
    average_win_minutes: float | None
    average_loss_minutes: float | None


class EquityFigures(NamedTuple):
    """Statistics of the hourly equity series of a run. None is without a value."""

    drawdown: Drawdown | None
    sharpe: float | None
    sortino: float | None
    calmar: float | None


class _DayFigures(NamedTuple):
    """What of the equity figures changes with the day only. `day` is the one that is running."""

    day: date | None
    closes: Sequence[float]
    sharpe: float | None
    sortino: float | None


class RunStatistics:
    """What one run has come to. Its figures are made again only when what they are made of has changed."""

    def __init__(self, run: CurrentRun) -> None:
        self.run = run
        self.trades: list[RunTrade] = []
        self.hours: list[HourlyValue] = []
        self.series: list[EquityPoint] = []
        self._trade_figures: TradeFigures | None = None
        self._equity_figures: EquityFigures | None = None
        self._recovery: tuple[float | None] | None = None
        self._falling = Falling()
        self._falling.add([float(run.initial_capital)])  # else a fall in the first hour would be none
        self._fallen = 0
        self._of_days: _DayFigures | None = None
        self._drawdowns: dict[tuple[int, int, float], Falling] = {}
        self.intervals: dict[tuple[datetime, datetime], Confidence95 | None] = {}

    @property
    def trades_since(self) -> datetime:
        return self.trades[-1].closed_at if self.trades else self.run.started_at

    @property
    def hours_since(self) -> datetime:
        if self.hours:
            return self.hours[-1].hour
        return self.run.started_at.replace(minute=0, second=0, microsecond=0)

    def add_trades(self, trades: Sequence[RunTrade]) -> None:
        """Take trades in order of closing; those that are known already, from the last closing time, are left out."""
        known = {trade.id for trade in _closed_at_last(self.trades)}
        new = [trade for trade in trades if trade.id not in known]
        if new:
            self.trades += new
            self._trade_figures = self._recovery = None

    @property
    def has_figures(self) -> bool:
        """Whether the figures of the trades are those of all trades."""
        return self._trade_figures is not None

    def set_hours(self, hours: Sequence[HourlyValue]) -> None:
        """Take ascending hours from the last known one on, which may have changed since."""
        if not hours or (self.hours and list(hours) == self.hours[-1:]):
            return
        kept = len(self.hours) - (1 if self.hours and self.hours[-1].hour == hours[0].hour else 0)
        self.hours[kept:] = hours
        self.series[kept:] = [EquityPoint(value.hour, float(value.last)) for value in hours]
        self._equity_figures = self._recovery = None

    def make_figures(self) -> TradeFigures:
        self._trade_figures = figures_of_trades(self.trades)
        return self._trade_figures

    @property
    def trade_figures(self) -> TradeFigures:
        return self._trade_figures or self.make_figures()

    @property
    def equity_figures(self) -> EquityFigures:
        if self._equity_figures is None:
            self._equity_figures = self._make_equity_figures()
        return self._equity_figures

    def _make_equity_figures(self) -> EquityFigures:
        """Those of all hours. Only the last hour changes, and daily closes only with the day: the rest is kept."""
        series = self.series
        over = len(series) - 1
        if over > self._fallen:
            self._falling.add(point.value for point in series[self._fallen : over])
            self._fallen = over
        drawdown = self._falling.then(*(point.value for point in series[self._fallen :])) if series else None
        day = series[-1].hour.date() if series else None
        if self._of_days is None or self._of_days.day != day:
            closes = statistics.daily_closes(series)
            self._of_days = _DayFigures(day, closes, statistics.sharpe_of(closes), statistics.sortino_of(closes))
        kept = self._of_days
        return EquityFigures(drawdown, kept.sharpe, kept.sortino, statistics.calmar_of(kept.closes, drawdown))

    @property
    def recovery_factor(self) -> float | None:
        if self._recovery is None:
            pnls = [float(trade.net_pnl) for trade in self.trades]
            self._recovery = (statistics.recovery_factor(pnls, self.equity_figures.drawdown),)
        return self._recovery[0]

    def window_drawdown(self, first: int, start: float, last: float) -> float:
        """The max drawdown, in percent, of `start`, the hours from the `first`-th on, and `last`.

        That of the hours that are over is kept; the last one may change with every snapshot.
        """
        over = max(first, len(self.series) - 1)
        key = first, over, start
        falling = self._drawdowns.get(key)
        if falling is None:
            falling = Falling()
            falling.add([start, *(point.value for point in self.series[first:over])])
            if len(self._drawdowns) >= DRAWDOWNS_KEPT:
                self._drawdowns.clear()
            self._drawdowns[key] = falling
        fall = falling.then(*(point.value for point in self.series[over:]), last)
        assert fall is not None, "there is a value"
        return fall.percent


def _batches(records: Sequence[RunStatistics]) -> Iterator[Sequence[RunStatistics]]:
    """Those with a past all at once, since each has little that is new.

    The others a few at a time, so that even the first reading of a long season answers within a statement's time.
    """
    known = [record for record in records if record.hours]
    if known:
        yield known
    new = [record for record in records if not record.hours]
    for start in range(0, len(new), RUNS_AT_ONCE):
        yield new[start : start + RUNS_AT_ONCE]


def _closed_at_last(trades: Sequence[RunTrade]) -> list[RunTrade]:
    found: list[RunTrade] = []
    for trade in reversed(trades):
        if trade.closed_at != trades[-1].closed_at:
            break
        found.append(trade)
    return found


def figures_of_trades(trades: Sequence[RunTrade]) -> TradeFigures:
    """The statistics of trades that are given in the order in which they closed."""
    exact = [trade.net_pnl for trade in trades]
    pnls = [float(pnl) for pnl in exact]
    holds = [statistics.minutes(trade.opened_at, trade.closed_at) for trade in trades]
    decisions = [
        (float(trade.confidence), pnl) for trade, pnl in zip(trades, pnls, strict=True) if trade.confidence is not None
    ]
    held = list(zip(pnls, holds, strict=True))
    best, worst = max(exact, default=Decimal(0)), min(exact, default=Decimal(0))
    return TradeFigures(
        trades=len(trades),
        wins=sum(pnl > 0 for pnl in exact),
        total_net=sum(exact, Decimal(0)),
        win_rate=statistics.win_rate(pnls),
        biggest_win=best if best > 0 else None,
        biggest_loss=worst if worst < 0 else None,
        signal_to_noise=statistics.trade_signal_to_noise(pnls),
        sizes=statistics.summary([float(trade.entry_notional) for trade in trades]),
        holds=statistics.summary(holds),
        confidences=statistics.summary([confidence for confidence, _ in decisions]),
        long_percent=statistics.percent(sum(trade.is_long for trade in trades), len(trades)),
        expectancy=statistics.expectancy(pnls),
        profit_factor=statistics.profit_factor(pnls),
        average_r_multiple=statistics.average_r_multiple(pnls),
        decision_quality=statistics.decision_quality(decisions),
        streaks=statistics.streaks(pnls),
        average_win_minutes=statistics.average_minutes(held, won=True),
        average_loss_minutes=statistics.average_minutes(held, won=False),
    )


class RunRecords:
    """The records of all current runs, by model."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._records: dict[str, RunStatistics] = {}
        self._lock = asyncio.Lock()

    async def refresh(self) -> dict[str, RunStatistics]:
        """Read what is new. A run that has ended is forgotten."""
        async with self._lock, self._database.connection() as conn:
            runs = await analytics_store.select_current_runs(conn)
            records = self._records = {model_id: self._record(run) for model_id, run in runs.items()}
            for batch in _batches(list(records.values())):
                await _read_new(conn, batch)
            return records

    def _record(self, run: CurrentRun) -> RunStatistics:
        known = self._records.get(run.model_id)
        if known is None or known.run.run_id != run.run_id:
            return RunStatistics(run)
        known.run = run
        return known


async def _read_new(conn: Connection, records: Sequence[RunStatistics]) -> None:
    """Read what is new in these runs, and make the figures of those that have new trades."""
    by_model = {record.run.model_id: record for record in records}
    hours: dict[str, list[HourlyValue]] = {}
    since: list[tuple[str, UUID, datetime]]
    since = [(model_id, record.run.run_id, record.hours_since) for model_id, record in by_model.items()]
    for value in await portfolio_store.select_run_hours(conn, since):
        hours.setdefault(value.account_id, []).append(value)
    trades: dict[str, list[RunTrade]] = {}
    since = [(model_id, record.run.run_id, record.trades_since) for model_id, record in by_model.items()]
    for account_id, trade in await trades_store.select_run_trades(conn, since):
        trades.setdefault(account_id, []).append(trade)
    for model_id, record in by_model.items():
        record.set_hours(hours.get(model_id, ()))
        record.add_trades(trades.get(model_id, ()))
        if not record.has_figures:
            record.make_figures()
            await asyncio.sleep(0)  # thousands of trades take milliseconds, a hundred such models would be felt
