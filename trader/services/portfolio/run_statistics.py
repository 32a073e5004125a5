"""Statistics of the current runs, from their trades and their hourly equity.

Both only grow while a run lasts, so they are read once and then from where the last reading ended; the figures of a run
are made again only when it has new rows. Medians, streaks and drawdowns of a season of a hundred models take the
database more than a second each time; reading what is new takes milliseconds.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from trader.domain.portfolio import statistics
from trader.domain.portfolio.evidence import EquitySeries, ReturnSeries
from trader.domain.portfolio.statistics import Drawdown, EquityPoint, Streaks, Summary
from trader.store.database.pool import Connection, Database
from trader.store.exchange import trades as trades_store
from trader.store.exchange.trades import RunTrade
from trader.store.portfolio import analytics as analytics_store
from trader.store.portfolio import snapshots as portfolio_store
from trader.store.portfolio.analytics import CurrentRun
from trader.store.portfolio.baselines import select_baselines
from trader.store.portfolio.snapshots import HourlyValue

NEW_RUNS_AT_ONCE = 10
"""Runs that are read from their beginning in one statement: of a long season one has two thousand hours and trades."""


class TradeFigures(NamedTuple):
    """Statistics of the completed trades of a run. Percentages are percent, times minutes, None is without a value."""

    pnls: Sequence[float]
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


class RunStatistics:
    """The trades and the hours of one run, and the figures made of them."""

    def __init__(self, run: CurrentRun) -> None:
        self.run = run
        self.trades: list[RunTrade] = []
        self.hours: list[HourlyValue] = []
        self.series: list[EquityPoint] = []
        self._trade_figures: TradeFigures | None = None
        self._equity_figures: EquityFigures | None = None
        self._equity = EquitySeries(float(run.initial_capital))

    @property
    def entrant_since(self) -> datetime:
        """When the model's present entrant began in the run."""
        began_at = self.run.entrant.began_at
        return self.run.started_at if began_at is None else max(began_at, self.run.started_at)

    @property
    def trades_since(self) -> datetime:
        return self.trades[-1].closed_at if self.trades else self.run.started_at

    @property
    def hours_since(self) -> datetime:
        if self.hours:
            return self.hours[-1].hour
        return self.run.started_at.replace(minute=0, second=0, microsecond=0)

    def add_trades(self, trades: Sequence[RunTrade]) -> None:
        """Add trades in order of closing, but for those that are known: the first were read from the last closing."""
        last = bisect_left(self.trades, self.trades_since, key=lambda trade: trade.closed_at)
        known = {trade.id for trade in self.trades[last:]}
        new = [trade for trade in trades if trade.id not in known]
        if new:
            self.trades += new
            self._trade_figures = None

    def set_hours(self, hours: Sequence[HourlyValue]) -> None:
        """Take ascending hours from the last known one on, which may have changed since."""
        if not hours or (self.hours and list(hours) == self.hours[-1:]):
            return
        known = len(self.hours) - (1 if self.hours and self.hours[-1].hour == hours[0].hour else 0)
        self.hours[known:] = hours
        self.series[known:] = [EquityPoint(value.hour, float(value.last)) for value in hours]
        self._equity.set(self.series[known:])
        self._equity_figures = None

    @property
    def trade_figures(self) -> TradeFigures:
        if self._trade_figures is None:
            self._trade_figures = figures_of_trades(self.trades)
        return self._trade_figures

    @property
    def equity_figures(self) -> EquityFigures:
        if self._equity_figures is None:
            self._equity_figures = figures_of_equity(self.series, float(self.run.initial_capital))
        return self._equity_figures

    @property
    def recovery_factor(self) -> float | None:
        return statistics.recovery_factor(self.trade_figures.pnls, self.equity_figures.drawdown)

    def returns(self, until: datetime) -> ReturnSeries | None:
        """Return the hourly log returns of the run before `until`, a whole hour."""
        return self._equity.returns(until)

    # -- within a window

    def start_value(self, since: datetime) -> Decimal:
        """Return the account's worth at the start of a window: a run that began within it starts with its capital."""
        before = self._hours_before(since)
        return self.hours[before - 1].last if before else self.run.initial_capital

    def window_drawdown(self, since: datetime, equity: Decimal) -> float:
        """Return the max drawdown in percent from the start of a window to the equity of now."""
        hours = self.series[self._hours_before(since) :]
        values = [float(self.start_value(since)), *(point.value for point in hours), float(equity)]
        fall = statistics.max_drawdown(values)
        assert fall is not None, "there are values"
        return fall.percent

    def trades_after(self, since: datetime) -> int:
        """Return how many trades closed in a window."""
        return len(self.trades) - bisect_left(self.trades, since, key=lambda trade: trade.closed_at)

    def _hours_before(self, since: datetime) -> int:
        return bisect_right(self.hours, since, key=lambda value: value.last_at)


def figures_of_equity(series: Sequence[EquityPoint], initial_capital: float) -> EquityFigures:
    """Return the statistics of an hourly series; the drawdown counts a fall below the capital in the first hour too."""
    if not series:
        return EquityFigures(None, None, None, None)
    drawdown = statistics.max_drawdown([initial_capital, *(point.value for point in series)])
    closes = statistics.daily_closes(series, initial_capital)
    return EquityFigures(
        drawdown,
        statistics.sharpe_ratio(closes),
        statistics.sortino_ratio(closes),
        statistics.calmar_ratio(closes, drawdown),
    )


def figures_of_trades(trades: Sequence[RunTrade]) -> TradeFigures:
    """Return the statistics of trades in the order in which they closed."""
    exact = [trade.net_pnl for trade in trades]
    pnls = [float(pnl) for pnl in exact]
    holds = [statistics.minutes(trade.opened_at, trade.closed_at) for trade in trades]
    decisions = [
        (float(trade.confidence), pnl) for trade, pnl in zip(trades, pnls, strict=True) if trade.confidence is not None
    ]
    held = list(zip(pnls, holds, strict=True))
    best, worst = max(exact, default=Decimal(0)), min(exact, default=Decimal(0))
    return TradeFigures(
        pnls=pnls,
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


class CurrentRuns:
    """The statistics of all current runs, by model, and of the baselines, which have hours and no trades."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._runs: dict[str, RunStatistics] = {}
        self.baselines: dict[str, RunStatistics] = {}
        """As of the last call of `refresh`."""
        self._lock = asyncio.Lock()

    async def refresh(self) -> dict[str, RunStatistics]:
        """Read what is new. A run that has ended is forgotten."""
        async with self._lock, self._database.connection() as conn:
            current = await analytics_store.select_current_runs(conn)
            runs = self._runs = {model_id: self._known_or_new(run) for model_id, run in current.items()}
            self.baselines = {
                found.baseline.id: self._known_or_new(
                    CurrentRun(found.baseline.id, found.run_id, found.initial_capital, found.started_at, 0, 0, 0)
                )
                for found in await select_baselines(conn)
            }
            for batch in _batches([*runs.values(), *self.baselines.values()]):
                await _read_new(conn, batch)
            return runs

    def _known_or_new(self, run: CurrentRun) -> RunStatistics:
        known = self._runs.get(run.model_id) or self.baselines.get(run.model_id)
        if known is None or known.run.run_id != run.run_id:
            return RunStatistics(run)
        known.run = run
        return known


def _batches(runs: Sequence[RunStatistics]) -> Iterator[Sequence[RunStatistics]]:
    """Yield the runs that were read before all at once, since each has little that is new; the others a few at a time.

    So even the first reading of a long season stays within the time of a statement.
    """
    known = [run for run in runs if run.hours]
    if known:
        yield known
    new = [run for run in runs if not run.hours]
    for start in range(0, len(new), NEW_RUNS_AT_ONCE):
        yield new[start : start + NEW_RUNS_AT_ONCE]


async def _read_new(conn: Connection, runs: Sequence[RunStatistics]) -> None:
    by_model = {run.run.model_id: run for run in runs}
    hours: dict[str, list[HourlyValue]] = {}
    since: list[tuple[str, UUID, datetime]]
    since = [(model_id, run.run.run_id, run.hours_since) for model_id, run in by_model.items()]
    for value in await portfolio_store.select_run_hours(conn, since):
        hours.setdefault(value.account_id, []).append(value)
    trades: dict[str, list[RunTrade]] = {}
    since = [(model_id, run.run.run_id, run.trades_since) for model_id, run in by_model.items()]
    for account_id, trade in await trades_store.select_run_trades(conn, since):
        trades.setdefault(account_id, []).append(trade)
    for model_id, run in by_model.items():
        run.set_hours(hours.get(model_id, ()))
        run.add_trades(trades.get(model_id, ()))


async def make_figures(runs: Iterable[RunStatistics]) -> None:
    """Make the figures that are missing, with a turn for other tasks after each run: thousands of trades take long."""
    for run in runs:
        _ = run.trade_figures, run.equity_figures
        await asyncio.sleep(0)
