"""Evidence: every entrant of the current runs against its references, and what replicates say about its own noise."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from trader.clock import Clock, ceil_time, floor_time
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.models import Model, VariantId
from trader.domain.portfolio.board import Board, Comparison, Contender, judge_board
from trader.domain.portfolio.evidence import (
    ReplicateNoise,
    ReturnSeries,
    Statement,
    mean_series,
    split_variance,
    state_returns,
)
from trader.domain.portfolio.histories import RESOLUTIONS, WINDOWS, RunWindow, minute_end
from trader.domain.portfolio.luck import Luck
from trader.services.portfolio.luck import COMPUTING, LuckRequest
from trader.services.portfolio.run_statistics import CurrentRuns, RunStatistics, Stint
from trader.store.agents import invocations as agents_store
from trader.store.database.pool import Database

_HOUR: Final = RESOLUTIONS["1h"]


class EntrantEvidence(NamedTuple):
    """An entrant in its part of the current run of its model. `ended_at` is None of the present entrant.

    `statement`, `trades` and `losing_trades` are of the window. `comparisons` have the verdicts on all hours, those of
    replicates on all of them together, and `luck` is of all completed trades. `attempt` is the number of the run.
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


class EvidenceReport(NamedTuple):
    """The evidence of all entrants up to the end of the last whole hour, and the model of the best of them."""

    until: datetime
    best: str | None
    entrants: Sequence[EntrantEvidence]


class _Judged(NamedTuple):
    """An entrant's part of a run, with its whole hours."""

    model: Model
    stint: Stint
    series: ReturnSeries | None

    @property
    def key(self) -> str:
        return f"{self.model.id}#{self.record.number}"

    @property
    def record(self) -> EntrantRecord:
        return self.stint.entrant.record

    @property
    def replicates(self) -> tuple[str, str] | None:
        """The group and the fingerprint of a present entrant that is one of several replicates."""
        group, fingerprint = self.model.configuration.replicate_of, self.record.fingerprint
        return None if group is None or fingerprint is None or self.stint.ended_at is not None else (group, fingerprint)

    def trades_until(self, until: datetime) -> LuckRequest:
        """Return what is compared with luck: all trades, in the period up to a whole hour."""
        stint = self.stint
        return LuckRequest(
            stint.run, self.record.number, stint.trades, stint.started_at, stint.ended_at or until, stint.start_value
        )


class _Part:
    """The hours and the trades of an entrant within a window (None: all)."""

    def __init__(self, judged: _Judged, since: datetime | None) -> None:
        series, stint = judged.series, judged.stint
        self.judged = judged
        self.series = series if series is None or since is None else series.within(since, series.end)
        self.trades, self.losing_trades = stint.count_after(since or stint.started_at)


class LuckSource(Protocol):
    """Compares entrants with luck, or says why it does not (yet)."""

    async def results(self, requests: Sequence[LuckRequest], /) -> Sequence[Luck | str]: ...


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

        The family that is corrected together is the board: all entrants, or those of the variant, even when only one
        model is shown.
        """
        runs = await self._runs.refresh()
        async with self._database.connection() as conn:  # after the runs, so that each has its model
            models = {model.id: model for model in await agents_store.select_models(conn)}
        family = {key: run for key, run in runs.items() if variant in {None, models[key].variant}}
        until = last_whole_hour(self._clock.now())
        since = None if window == "run" else until - WINDOWS[window]
        return await make_report(models, family, self._runs.baselines, self._luck, until, since, model_id)


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
) -> EvidenceReport:
    """Return the evidence of all runs, corrected together, or of one model among them; the window begins at `since`."""
    stints = [_judged(models[key], stint, until) for key, run in runs.items() for stint in run.stints]
    returns = {key: run.returns(until) for key, run in baselines.items()}
    best, judged = await asyncio.to_thread(_judge, stints, returns, since, model_id)
    tried = await luck.results([stint.trades_until(until) for stint, _ in judged])
    shown = [found._replace(luck=each) for (_, found), each in zip(judged, tried, strict=True)]
    shown.sort(key=lambda one: (not one.is_among_best, one.model.id, -one.record.number))
    return EvidenceReport(until, None if best is None else best.rpartition("#")[0], shown)


def _judged(model: Model, stint: Stint, until: datetime) -> _Judged:
    """Return an entrant with its whole hours; the first hour of a run counts even when it began within it."""
    series, began_at, ended_at = stint.run.returns(until), stint.entrant.record.began_at, stint.ended_at
    if series is not None:
        start = series.start if began_at is None or began_at < series.start + _HOUR else ceil_time(began_at, _HOUR)
        series = series.within(start, until if ended_at is None else floor_time(ended_at, _HOUR))
    return _Judged(model, stint, series)


def _judge(
    stints: Sequence[_Judged],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    model_id: str | None,
) -> tuple[str | None, list[tuple[_Judged, EntrantEvidence]]]:
    """Return the best entrant, and the evidence of all or of one model: of a hundred models a tenth of a second."""
    groups: dict[object, list[_Judged]] = {}
    for one in stints:
        groups.setdefault(one.replicates or one.key, []).append(one)
    board = judge_board([_contender(group) for group in groups.values()], baselines, since)
    shown = [(one, group) for group in groups.values() for one in group if model_id in {None, one.model.id}]
    parts = [_Part(one, since) for one, _ in shown]
    statements = state_returns((part.series, part.trades) for part in parts)
    noise = {group[0].key: _noise(group) for group in groups.values()}
    return board.best, [
        (one, _evidence(part, statement, board, group[0].key, noise[group[0].key]))
        for (one, group), part, statement in zip(shown, parts, statements, strict=True)
    ]


def _noise(group: Sequence[_Judged]) -> ReplicateNoise | None:
    series = {one.model.id: one.series for one in group if one.series is not None}
    return split_variance(series) if len(series) > 1 else None


def _contender(group: Sequence[_Judged]) -> Contender:
    """Return what is compared with others: an entrant, or its replicates together."""
    series = [one.series for one in group if one.series is not None]
    return Contender(
        key=group[0].key,
        variant=group[0].model.variant,
        series=series[0] if len(series) == 1 else mean_series(series),
        trades=sum(one.stint.trades_count for one in group) // len(group),
        attempt=max(one.stint.run.run.number for one in group),
    )


def _evidence(
    part: _Part, statement: Statement, board: Board, key: str, noise: ReplicateNoise | None
) -> EntrantEvidence:
    """Return the evidence of an entrant, which is compared as `key`."""
    judged, stint = part.judged, part.judged.stint
    return EntrantEvidence(
        model=judged.model,
        record=judged.record,
        started_at=stint.started_at,
        ended_at=stint.entrant.ended_at,
        statement=statement,
        return_percent=None if part.series is None else part.series.percent,
        trades=part.trades,
        losing_trades=part.losing_trades,
        comparisons=board.comparisons[key],
        is_among_best=key in board.among_best,
        luck=COMPUTING,
        replicates=noise,
        attempt=stint.run.run.number,
    )
