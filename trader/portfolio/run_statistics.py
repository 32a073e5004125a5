"""Statistics of the current runs, from their trades and their hourly equity.

Both only grow during a run, so they are read once and then incrementally; the figures of a run are recomputed only
when it has new rows. For a season of a hundred models, medians, streaks and drawdowns take the database more than a
second each time; reading the new rows takes milliseconds.
"""

import asyncio
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import numpy as np

from trader.agents.domain.entrants import EntrantRecord
from trader.core import statistics
from trader.core.clock import ceil_time, floor_time
from trader.core.statistics import EquityPoint, grouped
from trader.database.pool import Connection, Database
from trader.exchange.sql import trades as trades_store
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.behaviour import is_within_minute
from trader.portfolio.domain.bets import UNKNOWN_LEVERAGE
from trader.portfolio.domain.board import BoardRules
from trader.portfolio.domain.histories import HourlyValue
from trader.portfolio.domain.returns import EquitySeries, Exposures, ReturnSeries
from trader.portfolio.figures import (
    DailyFigures,
    EquityFigures,
    Figures,
    TradeFigures,
    figures_of_days,
    figures_of_equity,
    figures_of_trades,
)
from trader.portfolio.sql import analytics as analytics_store
from trader.portfolio.sql import snapshots as portfolio_store
from trader.portfolio.sql.analytics import AccountRun, Changes, CurrentRun, RunEntrant, Worth, select_changes
from trader.portfolio.sql.snapshots import select_baselines

_TURN_S: Final = 0.001
"""How often the computation of figures yields to other tasks, and for how long: due timers need a moment."""

_CLOSED_AT: Final = attrgetter("closed_at")
_HOUR: Final = timedelta(hours=1)


class RunStatistics:
    """The trades and hours of one run, and the figures computed from them."""

    def __init__(self, run: CurrentRun) -> None:
        self.run = run
        self.trades: list[RunTrade] = []
        self.hours: list[HourlyValue] = []
        self.values = array("d")
        """The values of the hours."""
        self.losing = array("L", [0])
        """How many of the first n trades had no profit."""
        self.brief = array("L", [0])
        """How many of the first n trades were held for less than a minute."""
        self.open: Sequence[tuple[Decimal | float, datetime]] = ()
        """The entry notional and the opening of each open position."""
        self.later: dict[int, RunTrade] = {}
        """The trades closed after its end in a season: until then they were open."""

        self.periods: list[EntrantPeriod] = []
        """The entrants that decided in it, the current one last; none for a baseline."""

        self._trade_figures: TradeFigures | None = None
        self._equity_figures: EquityFigures | None = None
        self._days: DailyFigures | None = None
        self._exposures: Exposures | None = None
        self._made_of: tuple[object, ...] = ()
        self._equity = EquitySeries(float(run.initial_capital), run.leverage)

    @property
    def entrant_since(self) -> datetime:
        """When the model's current entrant started in the run."""
        began_at = self.run.entrant.began_at
        return self.run.started_at if began_at is None else max(began_at, self.run.started_at)

    @property
    def entrant_cost_usd(self) -> Decimal | None:
        """What the invocations of the current entrant cost in the run; None if no provider reported a cost."""
        return self.periods[-1].entrant.totals.cost_usd if self.periods else None

    @property
    def trades_since(self) -> datetime:
        return self.trades[-1].closed_at if self.trades else self.run.started_at

    def add_trades(self, trades: Sequence[RunTrade]) -> None:
        """Add trades in closing order. Reads start at the last known closing time, whose trades these replace."""
        if self.run.until is not None:
            self.later |= {trade.id: trade for trade in trades if trade.closed_at >= self.run.until}
            trades = [trade for trade in trades if trade.closed_at < self.run.until]
        last = bisect_left(self.trades, self.trades_since, key=_CLOSED_AT)
        if len(trades) > len(self.trades) - last:
            losing = accumulate((trade.net_pnl <= 0 for trade in trades), initial=self.losing[last])
            within = (is_within_minute(each.opened_at, each.closed_at) for each in trades)
            brief = accumulate(within, initial=self.brief[last])
            self.losing[last:] = array("L", losing)  # first, because a thread may be counting the trades
            self.brief[last:] = array("L", brief)
            self.trades[last:] = trades
            self._trade_figures = None

    def set_hours(self, hours: Sequence[HourlyValue]) -> None:
        """Replace the hourly values from the first of these ascending hours on."""
        hours = [value for value in hours if self.run.until is None or value.hour < self.run.until]
        if not hours or (self.hours and list(hours) == self.hours[-1:]):
            return
        known = len(self.hours) - (1 if self.hours and self.hours[-1].hour == hours[0].hour else 0)
        if not self.hours or hours[-1].hour.date() != self.hours[-1].hour.date():
            self._days = None
        self.hours[known:] = hours
        self.values[known:] = array("d", [float(value.last) for value in hours])
        self._equity.set(self.points(known))
        self._equity_figures = None

    def points(self, first: int = 0, after: int | None = None) -> list[EquityPoint]:
        """Return the hours from `first` up to, but excluding, `after`, with their values."""
        part = slice(first, after)
        return [
            EquityPoint(point.hour, value, point.leverage)
            for point, value in zip(self.hours[part], self.values[part], strict=True)
        ]

    @property
    def trade_figures(self) -> TradeFigures:
        if self._trade_figures is None:
            self._trade_figures = figures_of_trades(self.trades)
        return self._trade_figures

    @property
    def equity_figures(self) -> EquityFigures:
        if self._days is None:
            self._days = figures_of_days(self.points(), float(self.run.initial_capital))
        if self._equity_figures is None:
            self._equity_figures = figures_of_equity(self.values, self._days)
        return self._equity_figures

    @property
    def figures(self) -> Figures:
        return Figures(self.trade_figures, self.equity_figures)

    def set_entrants(self, entrants: Sequence[RunEntrant]) -> None:
        """Set the entrants of the run, in order; known ones keep their figures."""
        known = {period.record.number: period for period in self.periods}
        self.periods = [known.get(entrant.record.number) or EntrantPeriod(self, entrant) for entrant in entrants]
        for period, entrant in zip(self.periods, entrants, strict=True):
            period.entrant = entrant

    def returns(self, until: datetime) -> ReturnSeries | None:
        """Return the hourly log returns of the run before `until`, a whole hour.

        Their bounds also count positions that were opened and closed between two values of the equity.
        """
        made_of = len(self.trades), len(self.later), tuple(self.open)
        if self._exposures is None or self._made_of != made_of:
            closed = [(float(each.entry_notional), each.opened_at, each.closed_at) for each in self.trades]
            held = [(float(notional), opened_at, None) for notional, opened_at in self.open]
            later = [(float(each.entry_notional), each.opened_at, None) for each in self.later.values()]
            self._exposures, self._made_of = Exposures([*closed, *held, *later]), made_of
        return self._equity.returns(until, self._exposures)

    # -- within a window

    def start_value(self, since: datetime) -> Decimal:
        """Return the account's value at the start of a window, to the hour.

        A run that started within the window starts with its capital, and an entrant with the value it inherited.
        """
        if self.periods and since == self.periods[-1].started_at:
            return self.periods[-1].start_value
        return self.worth_at(since)

    def worth_at(self, since: datetime) -> Decimal:
        """Return the account's value at the end of the last hour before a moment."""
        before = self.hours_before(since)
        return self.hours[before - 1].last if before else self.run.initial_capital

    def as_account_run(self) -> AccountRun:
        """Return the run as a run of its account, with its last recorded equity."""
        run = self.run
        last = self.hours[-1].last if self.hours else run.initial_capital
        return AccountRun(run.model_id, run.started_at, run.initial_capital, last)

    def window_drawdown(self, since: datetime, start: Decimal, equity: Decimal) -> float:
        """Return the max drawdown in percent from a window's start, with the value `start`, to its end.

        `equity` is the value at the end.
        """
        hours = self.values[self.hours_before(since) :]
        fall = statistics.max_drawdown(np.concatenate([[float(start)], hours, [float(equity)]]))
        assert fall is not None, "there are values"
        return fall.percent

    def trades_after(self, since: datetime) -> int:
        """Return how many trades closed since a moment."""
        return len(self.trades) - bisect_left(self.trades, since, key=_CLOSED_AT)

    def brief_after(self, since: datetime) -> int:
        """Return how many trades closed since a moment were held for less than a minute."""
        return self.brief[-1] - self.brief[len(self.trades) - self.trades_after(since)]

    def closed_after(self, since: datetime) -> Sequence[RunTrade]:
        """Return the trades closed since a moment, in closing order."""
        return self.trades[len(self.trades) - self.trades_after(since) :]

    def hours_before(self, since: datetime) -> int:
        """Return how many hours have their last value at or before a moment."""
        return bisect_right(self.hours, since, key=lambda value: value.last_at)


class EntrantPeriod:
    """An entrant's part of a run: from its start to the start of the next, including inherited positions."""

    def __init__(self, run: RunStatistics, entrant: RunEntrant) -> None:
        self.run = run
        self.entrant = entrant
        self._figures: Figures | None = None
        self._made_of: tuple[object, ...] = ()

    @property
    def record(self) -> EntrantRecord:
        return self.entrant.record

    @property
    def started_at(self) -> datetime:
        return max(self.run.run.started_at, self.record.began_at or self.run.run.started_at)

    @property
    def ended_at(self) -> datetime | None:
        """When the next entrant started; None for the current one."""
        return self.entrant.ended_at

    @property
    def contender(self) -> str:
        """The unit of comparison: current entrants with the same fingerprint are replicates, declared or not."""
        return contender(self.run.run.model_id, self.record, is_present=self.ended_at is None)

    @property
    def start_value(self) -> Decimal:
        """The account's value when the entrant started: to the minute, as long as its snapshots are retained."""
        known = self.entrant.equity
        return self.run.worth_at(self.started_at) if known is None else known

    @property
    def end_value(self) -> Decimal | None:
        """The account's value when the next entrant started; None for the current one."""
        following = next((period for period in self.run.periods if period.started_at == self.ended_at), None)
        return None if following is None else following.start_value

    def returns(self, until: datetime, rules: BoardRules) -> ReturnSeries | None:
        """Return its whole hours before `until`, with the bounds that are enforced on them.

        The first hour of a run counts even if the run started within it.
        """
        series, began_at = rules.bounded(self.run.returns(until)), self.started_at
        if series is None:
            return None
        start = series.start if began_at < series.start + _HOUR else ceil_time(began_at, _HOUR)
        return series.within(start, until if self.ended_at is None else floor_time(self.ended_at, _HOUR))

    def points(self, until: datetime) -> list[EquityPoint]:
        """Return its hours before a time, with their values."""
        run, end = self.run, self.ended_at
        return run.points(
            run.hours_before(self.started_at), run.hours_before(until if end is None else min(until, end))
        )

    @property
    def trades(self) -> Sequence[RunTrade]:
        """The trades completed in it, in closing order."""
        return self.run.trades[slice(*self._bounds(self.started_at))]

    @property
    def trades_count(self) -> int:
        return self.count_after(self.started_at)[0]

    def count_after(self, since: datetime) -> tuple[int, int]:
        """Return how many trades were completed in it since a moment, and how many of them had no profit."""
        first, after = self._bounds(since)
        return after - first, self.run.losing[after] - self.run.losing[first]

    def _bounds(self, since: datetime) -> tuple[int, int]:
        """Return the slice of the run's trades that are its own since a moment: the first index, and the end."""
        trades, end = self.run.trades, self.ended_at
        first = bisect_left(trades, max(since, self.started_at), key=_CLOSED_AT)
        return first, len(trades) if end is None else bisect_left(trades, end, first, key=_CLOSED_AT)

    @property
    def figures(self) -> Figures:
        """The statistics of its trades and hours; the only entrant of a run shares the run's."""
        run, end = self.run, self.ended_at
        if end is None and self.started_at == run.run.started_at:
            return run.figures
        first, after = run.hours_before(self.started_at), None if end is None else run.hours_before(end)
        trades, start = self.trades, self.start_value
        made_of = (end, start, len(trades), run.hours[first:after][-1:])
        if self._figures is None or self._made_of != made_of:
            days = figures_of_days(run.points(first, after), float(start))
            equity = figures_of_equity(run.values[first:after], days)
            self._figures, self._made_of = Figures(figures_of_trades(trades), equity), made_of
        return self._figures


class RunScope(NamedTuple):
    """Which part of the runs counts: as of the moment `at` (None: now), and in a `season` its hours since `start`."""

    at: datetime | None = None
    season: int = 0
    start: datetime | None = None
    end: datetime | None = None

    def cut(self, run: CurrentRun, before: Worth | None) -> CurrentRun:
        """Return the part of a run in the season, or the run without one; every figure of a season is made of these.

        `before` is what the account was worth before the season, if the run had begun.
        """
        if self.start is None:
            return run
        return msgspec.structs.replace(
            run,
            initial_capital=run.initial_capital if before is None else before.last,
            started_at=max(run.started_at, self.start),
            until=self.end,
            leverage=max(1.0, UNKNOWN_LEVERAGE if before.leverage is None else before.leverage) if before else 1.0,
        )


NO_SCOPE: Final = RunScope()
"""All of the present runs."""


def contender(model_id: str, record: EntrantRecord, *, is_present: bool = True) -> str:
    """Return the name of an entrant's unit of comparison: a current entrant's fingerprint, otherwise its own name."""
    return record.fingerprint if is_present and record.fingerprint else f"{model_id}#{record.number}"


def count_contenders(runs: Iterable[RunStatistics]) -> int:
    """Return the number of entrants in the runs, replicates as one."""
    return len({period.contender for run in runs for period in run.periods})


class CurrentRuns:
    """The statistics of all current runs, by model, and of the baselines, which have hours and no trades.

    With a moment `at` in the scope, the runs and their entrants are those at that time, regardless of later resets and
    changes; in a season they are cut to it.
    """

    def __init__(self, database: Database, scope: RunScope = NO_SCOPE) -> None:
        self._database = database
        self.scope = scope
        self._past: CurrentRuns | None = None
        self._runs: dict[str, RunStatistics] = {}
        self.baselines: dict[str, RunStatistics] = {}
        """As of the last call of `refresh`."""
        self._worths: dict[UUID, Worth | None] = {}
        self._changes: Changes | None = None
        self._lock = asyncio.Lock()

    def within(self, scope: RunScope) -> "CurrentRuns":
        """Return the runs in a scope, cached until another scope is requested; in the own scope, these runs."""
        if self._past is not None and self._past.scope != scope:
            self._past = None
        if scope == self.scope:
            return self
        if self._past is None:
            self._past = CurrentRuns(self._database, scope)
        return self._past

    async def refresh(self) -> dict[str, RunStatistics]:
        """Read the new rows of all current runs, and drop runs that have ended; do nothing if nothing has changed.

        Missed cycles alone do not count as a change: they are read with the next snapshot, within a minute.
        """
        async with self._lock, self._database.reading() as conn:
            changes = await select_changes(conn)
            if changes == self._changes:
                return self._runs
            scope, season = self.scope, self.scope.season or None
            current = await analytics_store.select_current_runs(conn, scope.at, season)
            baselines = await select_baselines(conn)
            if scope.start is not None:
                new = [run for run in (*current.values(), *baselines) if run.run_id not in self._worths]
                worths = await analytics_store.select_worths(conn, new, scope.start) if new else {}
                self._worths |= {run.run_id: worths.get(run.model_id) for run in new}
            found = await analytics_store.select_run_entrants(conn, scope.at, season, scope.start)
            entrants = grouped(found, lambda entrant: entrant.model_id)
            runs = self._runs = {
                key: self._known_or_new(msgspec.structs.replace(run, entrant=entrants[key][-1].record))
                for key, run in current.items()
            }
            self.baselines = {run.model_id: self._known_or_new(run) for run in baselines}
            positions = grouped(await trades_store.select_open_positions(conn), itemgetter(0))
            for model_id, run in runs.items():
                run.set_entrants(entrants[model_id])
                run.open = [position[1:] for position in positions.get(model_id, ())]
            for batch in _batches([*runs.values(), *self.baselines.values()]):
                await _read_new(conn, batch)
            self._changes = changes  # only now, so that a failed read is repeated
            return runs

    def _known_or_new(self, run: CurrentRun) -> RunStatistics:
        run = self.scope.cut(run, self._worths.get(run.run_id))
        known = self._runs.get(run.model_id) or self.baselines.get(run.model_id)
        if known is None or known.run.run_id != run.run_id:
            return RunStatistics(run)
        known.run = run
        return known


class WindowStart(NamedTuple):
    """When the current entrant of a run begins in a window, and what its account was worth then."""

    at: datetime
    value: Decimal


async def window_starts(conn: Connection, runs: Iterable[RunStatistics], since: datetime) -> dict[str, WindowStart]:
    """Return the starts of the runs in the window from `since` on, by account: every figure of a window is from these.

    They are to the minute where snapshots are retained, and to the hour before.
    """
    begun = {run.run.model_id: (max(since, run.entrant_since), run) for run in runs}
    older = [run.run for at, run in begun.values() if at > run.entrant_since]
    worths = await analytics_store.select_worths_at(conn, older, since) if older else {}
    return {key: WindowStart(at, worths.get(key, run.start_value(at))) for key, (at, run) in begun.items()}


def _batches(runs: Sequence[RunStatistics]) -> Iterator[Sequence[RunStatistics]]:
    """Yield the already known runs in one batch, because each has few new rows; the others one by one.

    In a long season each has two thousand hours and trades, so reading one takes a few milliseconds.
    """
    known = [run for run in runs if run.hours]
    if known:
        yield known
    yield from ([run] for run in runs if not run.hours)


async def _read_new(conn: Connection, runs: Sequence[RunStatistics]) -> None:
    by_model = {run.run.model_id: run for run in runs}
    since = [
        (model_id, run.run.run_id, run.hours[-1].hour if run.hours else floor_time(run.run.started_at, _HOUR))
        for model_id, run in by_model.items()
    ]
    hours = grouped(await portfolio_store.select_run_hours(conn, since), lambda value: value.account_id)
    since = [(model_id, run.run.run_id, run.trades_since) for model_id, run in by_model.items()]
    trades = grouped(await trades_store.select_run_trades(conn, since), itemgetter(0))
    for model_id, run in by_model.items():
        run.set_hours(hours.get(model_id, ()))
        run.add_trades([trade for _, trade in trades.get(model_id, ())])
        if len(hours.get(model_id, ())) > 1:  # from its beginning
            await asyncio.sleep(0)


async def make_figures(runs: Iterable[RunStatistics]) -> None:
    """Compute the missing figures, yielding to other tasks between runs."""
    turn_until_s = time.monotonic() + _TURN_S
    for run in runs:
        parts: Sequence[RunStatistics | EntrantPeriod] = (run, *run.periods)
        for part in parts:
            _ = part.figures
            if time.monotonic() > turn_until_s:
                await asyncio.sleep(_TURN_S)
                turn_until_s = time.monotonic() + _TURN_S
