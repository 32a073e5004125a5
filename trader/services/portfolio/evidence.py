"""Evidence: every entrant of the current runs against its references, and what replicates say about its own noise."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Final, NamedTuple, Protocol

from trader.clock import Clock, ceil_time, floor_time
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.models import Model, VariantId
from trader.domain.portfolio.board import Board, Comparison, JudgedEntrant, RankInterval, judge_board
from trader.domain.portfolio.evidence import Statement, state_returns
from trader.domain.portfolio.histories import RESOLUTIONS, WINDOWS, RunWindow, minute_end
from trader.domain.portfolio.luck import Luck
from trader.domain.portfolio.replicates import ReplicateNoise, mean_series, split_variance
from trader.domain.portfolio.returns import ReturnSeries
from trader.services.portfolio.behaviour import EntrantBehaviour, describe_entrant, present_period
from trader.services.portfolio.luck import COMPUTING, LuckRequest
from trader.services.portfolio.run_statistics import CurrentRuns, EntrantPeriod, RunStatistics, count_contenders
from trader.store.agents.models import select_models
from trader.store.database.pool import Database
from trader.store.portfolio.analytics import AccountRun, select_account_runs

_HOUR: Final = RESOLUTIONS["1h"]


class AccountPast(NamedTuple):
    """What an account has made over all its runs, in percent, whatever was reset or configured anew in between."""

    runs: int
    started_at: datetime
    return_percent: float

    @classmethod
    def of(cls, runs: Sequence[AccountRun]) -> "AccountPast":
        growth = math.prod(float(run.last / run.initial_capital) for run in runs if run.initial_capital > 0)
        return cls(len(runs), runs[0].started_at, 100 * growth - 100)


class EntrantEvidence(NamedTuple):
    """An entrant in its part of the current run of its model. `ended_at` is None of the present entrant.

    `statement`, `trades` and `losing_trades` are of the window. `comparisons` have the verdicts on all hours, those of
    replicates on all of them together, and `luck` is of the last look. `attempt` is the number of the run.
    """

    model: Model
    record: EntrantRecord
    started_at: datetime
    ended_at: datetime | None
    statement: Statement
    return_percent: float | None
    trades: int
    losing_trades: int
    comparisons: Sequence[Comparison]
    is_among_best: bool
    luck: Luck | str
    replicates: ReplicateNoise | None
    attempt: int
    rank: RankInterval | None
    account: AccountPast


class EvidenceReport(NamedTuple):
    """The evidence of all entrants up to the end of the last whole hour, and the model of the best of them.

    `contenders` is the number of entrants of all boards.
    """

    until: datetime
    best: str | None
    entrants: Sequence[EntrantEvidence]
    contenders: int


class _Judged(NamedTuple):
    """An entrant's part of a run, with its whole hours."""

    model: Model
    period: EntrantPeriod
    series: ReturnSeries | None

    @property
    def key(self) -> str:
        return f"{self.model.id}#{self.record.number}"

    @property
    def record(self) -> EntrantRecord:
        return self.period.entrant.record

    @property
    def decided_too_little(self) -> bool:
        """Whether it is known to have missed too many of its cycles for a rank."""
        return self.record.cycles_due > 0 and not self.record.is_ranked

    def luck_until(self, until: datetime) -> LuckRequest:
        """Return what is compared with luck: the period up to a whole hour."""
        period = self.period
        end = until if period.ended_at is None else floor_time(period.ended_at, _HOUR)
        return LuckRequest(period.run, self.record.number, period.started_at, end, period.start_value)


class _Part:
    """The hours and the trades of an entrant within a window (None: all)."""

    def __init__(self, judged: _Judged, since: datetime | None) -> None:
        series, period = judged.series, judged.period
        self.judged = judged
        self.series = series if series is None or since is None else series.within(since, series.end)
        self.trades, self.losing_trades = period.count_after(since or period.started_at)


class LuckSource(Protocol):
    """Compares entrants with luck, or says why it does not (yet)."""

    async def results(self, requests: Sequence[LuckRequest], models: int, /) -> Sequence[Luck | str]: ...


class Evidence:
    """Makes the evidence of entrants from the statistics of the current runs."""

    def __init__(self, database: Database, runs: CurrentRuns, luck: LuckSource, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._luck = luck
        self._clock = clock

    async def report(
        self, window: RunWindow, variant: VariantId | None = None, model_id: str | None = None
    ) -> EvidenceReport:
        """Return the evidence of all entrants, of those of a variant, or of one model.

        All boards are corrected together as one family: that of all entrants, even when a part of them is shown.
        """
        runs = await self._runs.refresh()
        async with self._database.connection() as conn:  # after the runs, so that each has its model
            models = {model.id: model for model in await select_models(conn)}
            accounts = {
                account_id: AccountPast.of(list(rows))
                for account_id, rows in groupby(await select_account_runs(conn), key=lambda row: row.account_id)
            }
        family = {key: run for key, run in runs.items() if variant in {None, models[key].variant}}
        until = last_whole_hour(self._clock.now())
        since = None if window == "run" else until - WINDOWS[window]
        baselines, contenders = self._runs.baselines, count_contenders(runs.values())
        report = await make_report(models, family, baselines, self._luck, until, since, model_id, contenders)
        return report._replace(
            entrants=[each._replace(account=accounts.get(each.model.id, each.account)) for each in report.entrants]
        )

    async def behaviour(self, model_id: str) -> EntrantBehaviour | None:
        """Return how the present entrant of a model traded until now; None before it is known."""
        runs = await self._runs.refresh()
        period = present_period(runs[model_id]) if model_id in runs else None
        if period is None:
            return None
        async with self._database.reading() as conn:
            return await describe_entrant(conn, period, runs, minute_end(self._clock.now()))


def last_whole_hour(now: datetime) -> datetime:
    """Return until when there is evidence at a moment: the end of the last whole hour."""
    return floor_time(minute_end(now), _HOUR)


async def make_report(
    models: Mapping[str, Model],
    runs: Mapping[str, RunStatistics],
    baselines: Mapping[str, RunStatistics],
    luck: LuckSource,
    until: datetime,
    since: datetime | None = None,
    model_id: str | None = None,
    contenders: int | None = None,
) -> EvidenceReport:
    """Return the evidence of all runs, corrected together, or of one model among them; the window begins at `since`.

    Runs in which an account was traded by hand are not judged.

    `contenders` is the number of entrants of all boards (None: those of these runs).
    """
    contenders = count_contenders(runs.values()) if contenders is None else contenders
    alone = {key: run for key, run in runs.items() if run.run.entrant.manual_since is None}
    periods = [_judged(models[key], period, until) for key, run in alone.items() for period in run.periods]
    returns = {key: run.returns(until) for key, run in baselines.items()}
    best, judged = await asyncio.to_thread(_judge, periods, returns, since, model_id, contenders)
    tried = await luck.results([period.luck_until(until) for period, _ in judged], contenders)
    shown = [entrant._replace(luck=each) for (_, entrant), each in zip(judged, tried, strict=True)]
    shown.sort(key=lambda entrant: (not entrant.is_among_best, entrant.model.id, -entrant.record.number))
    return EvidenceReport(until, None if best is None else best.rpartition("#")[0], shown, contenders)


def _judged(model: Model, period: EntrantPeriod, until: datetime) -> _Judged:
    """Return an entrant with its whole hours; the first hour of a run counts even when it began within it."""
    series, began_at, ended_at = period.run.returns(until), period.entrant.record.began_at, period.ended_at
    if series is not None:
        start = series.start if began_at is None or began_at < series.start + _HOUR else ceil_time(began_at, _HOUR)
        series = series.within(start, until if ended_at is None else floor_time(ended_at, _HOUR))
    return _Judged(model, period, series)


def _judge(
    periods: Sequence[_Judged],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    model_id: str | None,
    contenders: int,
) -> tuple[str | None, list[tuple[_Judged, EntrantEvidence]]]:
    """Return the best entrant, and the evidence of all or of one model: of a hundred models a tenth of a second."""
    groups: dict[str, list[_Judged]] = {}
    for entrant in periods:
        groups.setdefault(entrant.period.contender, []).append(entrant)
    board = judge_board([_entrant(group) for group in groups.values()], baselines, since, contenders)
    shown = [(entrant, group) for group in groups.values() for entrant in group if model_id in {None, entrant.model.id}]
    parts = [_Part(entrant, since) for entrant, _ in shown]
    statements = state_returns((part.series, part.trades) for part in parts)
    noise = {group[0].key: _noise(group) for group in groups.values()}
    return board.best, [
        (entrant, _evidence(part, statement, board, group[0].key, noise[group[0].key]))
        for (entrant, group), part, statement in zip(shown, parts, statements, strict=True)
    ]


def _noise(group: Sequence[_Judged]) -> ReplicateNoise | None:
    series = {entrant.model.id: entrant.series for entrant in group if entrant.series is not None}
    return split_variance(series) if len(series) > 1 else None


def _entrant(group: Sequence[_Judged]) -> JudgedEntrant:
    """Return what is compared with others: an entrant, or its replicates together."""
    series = [entrant.series for entrant in group if entrant.series is not None]
    return JudgedEntrant(
        key=group[0].key,
        variant=group[0].model.variant,
        series=series[0] if len(series) == 1 else mean_series(series),
        trades=sum(entrant.period.trades_count for entrant in group) // len(group),
        attempt=max(entrant.period.run.run.number for entrant in group),
        is_eligible=group[0].period.ended_at is None and not any(entrant.decided_too_little for entrant in group),
    )


def _evidence(
    part: _Part, statement: Statement, board: Board, key: str, noise: ReplicateNoise | None
) -> EntrantEvidence:
    """Return the evidence of an entrant, which is compared as `key`."""
    judged, period = part.judged, part.judged.period
    return EntrantEvidence(
        model=judged.model,
        record=judged.record,
        started_at=period.started_at,
        ended_at=period.entrant.ended_at,
        statement=statement,
        return_percent=None if part.series is None else part.series.percent,
        trades=part.trades,
        losing_trades=part.losing_trades,
        comparisons=board.comparisons[key],
        is_among_best=key in board.among_best,
        luck=COMPUTING,
        replicates=noise,
        attempt=period.run.run.number,
        rank=board.ranks.get(key),
        account=AccountPast.of([period.run.as_account_run()]),
    )
