"""Analytics: statistics, leaderboard and failures of models and variants in their current runs."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.invocations import Invocation, Step, ToolCall
from trader.agents.domain.models import Model
from trader.agents.payloads import answers_of
from trader.agents.sql import invocations as agents_store
from trader.agents.sql.models import select_models
from trader.core import statistics
from trader.core.clock import Clock
from trader.core.intervals import ConfidenceInterval
from trader.core.money import ZERO, divide
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Database, Page
from trader.exchange.protocol import Exchange
from trader.exchange.sql.trades import TradeFilter
from trader.portfolio.domain.histories import RunWindow, minute_end, value_account, window_start
from trader.portfolio.domain.seasons import Season, SeasonState
from trader.portfolio.figures import Figures
from trader.portfolio.leaderboard import LeaderboardEntry, RankedEntrant, SortKey, make_board, make_entries
from trader.portfolio.run_statistics import (
    CurrentRuns,
    EntrantPeriod,
    RunStatistics,
    WindowStart,
    count_contenders,
    make_figures,
    window_starts,
)
from trader.portfolio.seasons import SeasonStanding, read_standing
from trader.portfolio.sql import analytics as store
from trader.portfolio.sql.analytics import CurrentRun, InvocationTotals
from trader.portfolio.sql.seasons import select_latest_season

RUN_ANSWERS_BYTES_MAX: Final = 256 * 1024
ANSWERS_BYTES_MAX: Final = 8 * 1024 * 1024
"""Size limits for the raw answers of one failure, and of all failures in a list."""


class ModelStats(NamedTuple):
    """A model in its current run, or one of its entrants in its part of the run.

    `account_value` is live, or the account's value when the entrant ended; None if its markets have no price yet.
    `start_value` is the run's capital, or the account's value when the entrant started. An entrant has its `period`.
    """

    model: Model
    start_value: Decimal
    account_value: Decimal | None
    figures: Figures
    totals: InvocationTotals
    period: EntrantPeriod | None = None
    entrants: Sequence["ModelStats"] = ()

    @property
    def return_percent(self) -> float | None:
        if self.account_value is None:
            return None
        return statistics.return_percent(float(self.start_value), float(self.account_value))

    @property
    def cost_usd(self) -> Decimal | None:
        """Return its providers' charges: 0 for a rule agent, None if no provider reported a cost."""
        return self.totals.cost_usd if self.model.is_ai else ZERO

    @property
    def is_cost_partial(self) -> bool:
        """Whether the true cost exceeds the known cost."""
        totals = self.totals
        return totals.cost_usd is not None and bool(totals.unmetered_attempts or totals.unpriced_steps)

    @property
    def is_cost_declared(self) -> bool:
        """Whether an external agent declared the known cost."""
        return self.model.is_external and self.totals.cost_usd is not None

    @property
    def net_after_cost(self) -> Decimal | None:
        """Return its gain, including open positions, minus that cost; one USD counts as one unit of quote currency."""
        if self.account_value is None or self.cost_usd is None:
            return None
        return self.account_value - self.start_value - self.cost_usd


class Failures(NamedTuple):
    """The latest failures with all their stored data, and the counts of every model.

    `answers` are the provider's raw JSON answers, for invocations whose answers are retained and not too long.
    """

    invocations: Sequence[Invocation]
    tool_calls: Mapping[UUID, Sequence[ToolCall]]
    steps: Mapping[UUID, Sequence[Step]]
    answers: Mapping[UUID, msgspec.Raw]
    models: Mapping[str, Model]
    counts: Sequence[tuple[Model, InvocationTotals]]


class RunInfo(NamedTuple):
    """Totals of the current runs of all models. `started_at` is the earliest start; None without any run."""

    started_at: datetime | None
    models: int
    invocations: int
    trades: int
    periods: Sequence[tuple[Model, EntrantPeriod]]
    """The entrants of each model in its run, in order."""


class VariantStats(NamedTuple):
    """The completed trades of a variant's models in their current runs. `win_rate` is in percent."""

    variant: VariantId
    model_count: int
    trades: int
    win_rate: float | None
    win_rate_interval: ConfidenceInterval | None
    total_pnl: Decimal
    average_pnl: Decimal | None


class Analytics:
    """Statistics of models and variants."""

    def __init__(self, database: Database, exchange: Exchange, clock: Clock, runs: CurrentRuns) -> None:
        self._database = database
        self._exchange = exchange
        self._clock = clock
        self._runs = runs

    async def _models(self, variant: VariantId | None = None) -> dict[str, Model]:
        async with self._database.connection() as conn:
            models = await select_models(conn)
        return {model.id: model for model in models if variant in (None, model.variant)}

    def _run(self, runs: Mapping[str, RunStatistics], model: Model) -> RunStatistics:
        """Return the statistics of the model's run; empty ones for an account as it would open."""
        if model.id in runs:
            return runs[model.id]
        run = self._exchange.account(model.id).run
        return RunStatistics(CurrentRun(model.id, run.id, run.initial_capital, self._clock.now()))

    def _equity(self, model: Model) -> Decimal | None:
        account = self._exchange.account(model.id)
        value = value_account(account, self._exchange.marks(), self._clock.now())
        return None if value is None else value.net_portfolio

    async def model_stats(self, variant: VariantId | None = None) -> list[ModelStats]:
        """Return all models, or a variant's models, oldest first."""
        models, runs = await self._models(variant), await self._runs.refresh()
        await make_figures(runs.values())
        model_stats = []
        for model in models.values():
            run, equity = self._run(runs, model), self._equity(model)
            entrants = [_entrant_stats(model, period, equity) for period in run.periods]
            totals, figures = run.run.totals, run.figures
            model_stats.append(ModelStats(model, run.run.initial_capital, equity, figures, totals, entrants=entrants))
        return model_stats

    async def leaderboard(
        self, window: RunWindow, sort_by: SortKey, variant: VariantId | None = None, *, is_merged: bool = True
    ) -> list[LeaderboardEntry]:
        """Return the current entrants (or a variant's) that have a value, best first; replicates merged, or not."""
        standing, now, runs = await self._standing()
        models = await self._models()  # after the runs: each has its model
        entrants = [
            RankedEntrant(model, run, equity, standing.absence_of(run))
            for model in models.values()
            if variant in {None, model.variant} and standing.has(model)
            for run, equity in self._standing_of(runs, model, standing.ended_at)
        ]
        async with self._database.reading() as conn:
            entrants = await in_window(conn, entrants, window, now)
        entries = make_entries(entrants, window, now, standing.rules)
        contenders = count_contenders(run for key, run in runs.items() if standing.has(models[key]))
        rules = standing.board
        return await asyncio.to_thread(
            make_board, entries, window, sort_by, now, contenders, rules, is_merged=is_merged
        )

    async def _standing(self) -> tuple[SeasonStanding, datetime, dict[str, RunStatistics]]:
        """Return what is on the board, the end of its windows, and the runs."""
        now = minute_end(self._clock.now())
        async with self._database.reading() as conn:
            standing = await read_standing(conn, now)
        return standing, standing.ended_at or now, await self._runs.within(standing.scope).refresh()

    async def window(self, window: RunWindow | datetime) -> tuple[datetime, datetime, dict[str, WindowStart]]:
        """Return the start and end of a window, and where each account and baseline starts in it, as on the board.

        A moment begins a window of its own.
        """
        standing, now, runs = await self._standing()
        since = window if isinstance(window, datetime) else window_start(window, now)
        every = [*runs.values(), *self._runs.within(standing.scope).baselines.values()]
        async with self._database.reading() as conn:
            starts = await window_starts(conn, every, since)
        begun = min((starts[key].at for key in runs), default=now)
        return begun if window == "run" else since, now, starts

    def _standing_of(
        self, runs: Mapping[str, RunStatistics], model: Model, ended_at: datetime | None
    ) -> Iterator[tuple[RunStatistics, Decimal]]:
        """Yield the run of a model and its equity, now or at the end of a season, if it has both."""
        if ended_at is None:
            equity = self._equity(model)
            if equity is not None:
                yield self._run(runs, model), equity
        elif model.id in runs:
            yield runs[model.id], runs[model.id].worth_at(ended_at)

    async def latest_season(self) -> tuple[Season, SeasonState] | None:
        """Return the latest season and its state; None before the first."""
        async with self._database.connection() as conn:
            season = await select_latest_season(conn)
        return None if season is None else (season, season.state(self._clock.now()))

    async def failures(self, page: Page, variant: VariantId | None = None, *, with_answers: bool = True) -> Failures:
        """Return the latest invocations that failed or in which a tool call failed, newest first."""
        models = await self._models(variant)
        async with self._database.reading() as conn:
            runs = await store.select_current_runs(conn)
            if variant is None:
                invocations = await store.select_failures(conn, page)
            else:
                invocations = await store.select_model_failures(conn, list(models), page)
            ids = [invocation.id for invocation in invocations]
            tool_calls = await agents_store.select_tool_calls(conn, ids)
            steps = await agents_store.select_steps(conn, ids)
            payloads = await agents_store.select_payloads(conn, invocations) if with_answers else {}
        counts = [
            (model, runs[model.id].totals if model.id in runs else InvocationTotals()) for model in models.values()
        ]
        answers = await asyncio.to_thread(answers_of, invocations, payloads, RUN_ANSWERS_BYTES_MAX, ANSWERS_BYTES_MAX)
        return Failures(invocations, tool_calls, steps, answers, models, counts)

    async def trade_totals(
        self, by: str, model_id: str | None, variant: VariantId | None, chosen: TradeFilter
    ) -> list[SimpleNamespace]:
        """Return totals of the completed trades in the models' current runs that fit the filter, by group."""
        async with self._database.connection() as conn:
            return await store.select_trade_totals(conn, by, model_id, variant, chosen)

    async def run_info(self) -> RunInfo:
        """Return the totals of the current runs of all models."""
        models, runs = await self._models(), await self._runs.refresh()
        return RunInfo(
            started_at=min((run.run.started_at for run in runs.values()), default=None),
            models=len(models),
            invocations=sum(run.run.totals.finished for run in runs.values()),
            trades=sum(len(run.trades) for run in runs.values()),
            periods=[
                (model, period) for model in models.values() if model.id in runs for period in runs[model.id].periods
            ],
        )

    async def variant_stats(self) -> list[VariantStats]:
        """Return every variant, including those without models."""
        models, runs = await self._models(), await self._runs.refresh()
        await make_figures(runs.values())
        return [
            _variant_stats(variant, [self._run(runs, m) for m in models.values() if m.variant is variant])
            for variant in VariantId
        ]


async def in_window(
    conn: Connection, entrants: Sequence[RankedEntrant], window: RunWindow, now: datetime
) -> list[RankedEntrant]:
    """Return the entrants with their start in the window, and the cost of their invocations within it.

    The invocations of an entrant that started within the window are counted already; others are read.
    """
    since = window_start(window, now)
    costs = {
        each.model.id: each.run.entrant_cost_usd if each.model.is_ai else ZERO
        for each in entrants
        if not each.model.is_ai or each.run.entrant_since >= since
    }
    if older := [each.model.id for each in entrants if each.model.id not in costs]:
        costs |= await agents_store.select_costs_between(conn, older, since, now)
    starts = await window_starts(conn, [each.run for each in entrants], since)
    return [
        each._replace(cost_usd=costs.get(each.model.id), start=starts.get(each.run.run.model_id)) for each in entrants
    ]


def _entrant_stats(model: Model, period: EntrantPeriod, equity: Decimal | None) -> ModelStats:
    """Return the statistics of an entrant; for the current one, with the live equity of its account."""
    value = equity if period.ended_at is None else period.end_value
    return ModelStats(model, period.start_value, value, period.figures, period.entrant.totals, period)


def _variant_stats(variant: VariantId, runs: Sequence[RunStatistics]) -> VariantStats:
    figures = [run.trade_figures for run in runs]
    trades, wins = sum(each.trades for each in figures), sum(each.wins for each in figures)
    total = sum((each.total_net for each in figures), ZERO)
    return VariantStats(
        variant=variant,
        model_count=len(runs),
        trades=trades,
        win_rate=statistics.percent(wins, trades),
        win_rate_interval=statistics.win_rate_interval(wins, trades),
        total_pnl=total,
        average_pnl=divide(total, Decimal(trades)) if trades else None,
    )
