"""Behaviour of entrants: reads what accounts did in the current runs, and describes how they traded."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from trader.clock import floor_time
from trader.domain.portfolio.behaviour import VOLATILITY_HOURS, Behaviour, Conduct, describe
from trader.services.portfolio.run_statistics import EntrantPeriod, RunStatistics
from trader.store.database.pool import Connection
from trader.store.portfolio import behaviour as store

_HOUR: Final = timedelta(hours=1)

Closes = Mapping[str, Mapping[datetime, float]]
"""Closes of the hours by market."""


class EntrantBehaviour(NamedTuple):
    """How the present entrant of a model traded from `since` until `until`; `replicates` are the models compared."""

    since: datetime
    until: datetime
    replicates: Sequence[str]
    behaviour: Behaviour


def present_period(run: RunStatistics) -> EntrantPeriod | None:
    """Return the present entrant's part of a run; None before the first."""
    return run.periods[-1] if run.periods else None


def replicates_of(period: EntrantPeriod, runs: Mapping[str, RunStatistics]) -> list[EntrantPeriod]:
    """Return the present entrants of one fingerprint, by model, that of the period first."""
    others = (present_period(runs[model_id]) for model_id in sorted(runs))
    same = [each for each in others if each is not None and each.contender == period.contender and each is not period]
    return [period, *same]


async def read_conducts(
    conn: Connection, periods: Sequence[EntrantPeriod], until: datetime
) -> tuple[list[Conduct], Closes]:
    """Return what entrants did in their parts of the runs until a time, and the closes of the markets they traded."""
    runs = [period.run.run for period in periods]
    since = min(period.started_at for period in periods)
    parts = await store.select_position_parts(conn, [run.run_id for run in runs])
    changes = await store.select_plan_changes(conn, [run.model_id for run in runs], since)
    symbols = sorted({part.symbol for each in parts.values() for part in each})
    first = floor_time(since, _HOUR) - (VOLATILITY_HOURS + 1) * _HOUR
    closes = await store.select_hourly_closes(conn, symbols, first, until)
    conducts = [
        Conduct(
            start=period.started_at,
            end=min(until, period.ended_at or until),
            start_equity=float(period.start_value),
            parts=parts.get(run.run_id, ()),
            plan_changes=changes.get(run.model_id, ()),
            hours=period.points(until),
        )
        for period, run in zip(periods, runs, strict=True)
    ]
    return conducts, closes


async def describe_entrant(
    conn: Connection, period: EntrantPeriod, runs: Mapping[str, RunStatistics], until: datetime
) -> EntrantBehaviour:
    """Return how the present entrant of a model traded, compared with its replicates."""
    periods = replicates_of(period, runs)
    conducts, closes = await read_conducts(conn, periods, until)
    behaviour = await asyncio.to_thread(describe, conducts[0], closes, conducts)
    return EntrantBehaviour(period.started_at, until, [each.run.run.model_id for each in periods[1:]], behaviour)
