"""Behavior of entrants: reads the accounts' activity in the current runs, and describes how they traded."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from trader.core.clock import floor_time
from trader.database.pool import Connection
from trader.portfolio.domain.behaviour import (
    VOLATILITY_HOURS,
    Behaviour,
    Conduct,
    PlanChange,
    PositionPart,
    describe,
)
from trader.portfolio.run_statistics import EntrantPeriod, RunStatistics
from trader.portfolio.sql import analytics as store

_HOUR: Final = timedelta(hours=1)

Closes = Mapping[str, Mapping[datetime, float]]
"""Hourly closes by market."""


class EntrantBehaviour(NamedTuple):
    """How the current entrant of a model traded from `since` until `until`; `replicates` are the compared models."""

    since: datetime
    until: datetime
    replicates: Sequence[str]
    behaviour: Behaviour


def present_period(run: RunStatistics) -> EntrantPeriod | None:
    """Return the current entrant's part of a run; None before the first."""
    return run.periods[-1] if run.periods else None


def replicates_of(period: EntrantPeriod, runs: Mapping[str, RunStatistics]) -> list[EntrantPeriod]:
    """Return the current entrants with the same fingerprint, by model, the given one first."""
    others = (present_period(runs[model_id]) for model_id in sorted(runs))
    same = [each for each in others if each is not None and each.contender == period.contender and each is not period]
    return [period, *same]


def make_behaviour(
    period: EntrantPeriod,
    runs: Mapping[str, RunStatistics],
    parts: Mapping[str, Sequence[PositionPart]],
    changes: Mapping[str, Sequence[PlanChange]],
    closes: Closes,
    until: datetime,
) -> EntrantBehaviour:
    """Return how the current entrant of a model traded until a time, compared with its replicates.

    Positions and plans are given by model; only the closes of markets that they traded count.
    """
    periods = replicates_of(period, runs)
    conducts = [
        Conduct(
            start=each.started_at,
            end=min(until, each.ended_at or until),
            start_equity=float(each.start_value),
            parts=parts.get(each.run.run.model_id, ()),
            plan_changes=changes.get(each.run.run.model_id, ()),
            hours=each.points(until),
        )
        for each in periods
    ]
    traded = {part.symbol for conduct in conducts for part in conduct.parts}
    behaviour = describe(conducts[0], {key: closes[key] for key in sorted(traded & closes.keys())}, conducts)
    return EntrantBehaviour(period.started_at, until, [each.run.run.model_id for each in periods[1:]], behaviour)


async def describe_entrant(
    conn: Connection, period: EntrantPeriod, runs: Mapping[str, RunStatistics], until: datetime
) -> EntrantBehaviour:
    """Return the result of `make_behaviour` for the database rows."""
    group = replicates_of(period, runs)
    account_of = {each.run.run.run_id: each.run.run.model_id for each in group}
    since = min(each.started_at for each in group)
    by_run = await store.select_position_parts(conn, list(account_of))
    parts = {account_of[run_id]: each for run_id, each in by_run.items()}
    changes = await store.select_plan_changes(conn, list(account_of.values()), since)
    symbols = sorted({part.symbol for each in parts.values() for part in each})
    closes = await store.select_hourly_closes(conn, symbols, first_close(since), until)
    return await asyncio.to_thread(make_behaviour, period, runs, parts, changes, closes, until)


def first_close(since: datetime) -> datetime:
    """Return the first hour whose close a period's volatility needs."""
    return floor_time(since, _HOUR) - (VOLATILITY_HOURS + 1) * _HOUR
