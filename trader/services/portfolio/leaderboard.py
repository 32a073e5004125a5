"""Leaderboard: the present entrants ranked by their results within a window, replicates as one row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from trader.clock import ceil_time
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.models import Model
from trader.domain.money import ZERO, divide
from trader.domain.portfolio import statistics
from trader.domain.portfolio.board import NO_SEASON, BoardRules
from trader.domain.portfolio.evidence import (
    Pair,
    Statement,
    Verdict,
    compare_all,
    judge_family,
    missing_trades,
    state_returns,
)
from trader.domain.portfolio.histories import RESOLUTIONS, RunWindow, floor_to_bucket, window_start
from trader.domain.portfolio.replicates import ReplicateNoise, mean_series, split_variance
from trader.domain.portfolio.returns import ReturnSeries
from trader.domain.portfolio.seasons import SeasonRules, season_part
from trader.services.portfolio.run_statistics import RunStatistics, contender

SortKey = Literal["pnlPercent", "pnlAbsolute", "maxDrawdown"]

_HOUR = RESOLUTIONS["1h"]


class RankedEntrant(NamedTuple):
    """A model in its current run, with the live equity of its account. `off_board` is why a season gives it no rank."""

    model: Model
    run: RunStatistics
    equity: Decimal
    off_board: str | None = None


class NeighbourVerdict(NamedTuple):
    """What is known about a model against a neighbour in the order."""

    neighbour: Model
    verdict: Verdict


class ReplicatesEntry(NamedTuple):
    """The models of a row that is of several: the lowest and highest return, and the split of its variance.

    `noise` is over the hours that all of them have; None while there are too few.
    """

    models: Sequence[Model]
    lowest_percent: float | None
    highest_percent: float | None
    noise: ReplicateNoise | None


class LeaderboardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model's present entrant within the window. Values are equity; the drawdown is in percent, and positive.

    An entry of replicates has their means, the sum of their trades, and the first of their models. `rank` is None when
    the entrant decided too few of its cycles, or has no place on the board of a season (`off_board` says why). `since`
    is where the entry begins; `series` are all hours of the entrant, and `trades` all its trades, of replicates the
    mean. `attempt` is the number of its run, of replicates the highest. `evidence` is of the whole hours of the window,
    `trades_stated` their trades. `tie`: a neighbour in the order has the same figure. `above` and `below` are the
    verdicts on this model against those neighbours, over all hours of both; None where there is no neighbour, and in an
    order that is not one of returns.
    """

    model: Model
    record: EntrantRecord
    pnl_percent: float | None
    pnl_absolute: Decimal
    max_drawdown: float
    start_value: Decimal
    end_value: Decimal
    trades_count: int
    evidence: Statement = Statement(0, None)
    since: datetime
    series: ReturnSeries | None
    trades: int
    trades_stated: int
    attempt: int = 1
    replicates: ReplicatesEntry | None = None
    rank: int | None = None
    tie: bool = False
    above: NeighbourVerdict | None = None
    below: NeighbourVerdict | None = None
    off_board: str | None = None

    @property
    def is_ranked(self) -> bool:
        return self.record.is_ranked and self.off_board is None


def make_entries(
    entrants: Iterable[RankedEntrant], window: RunWindow, now: datetime, rules: SeasonRules | None = None
) -> list[LeaderboardEntry]:
    """Return an entry of each entrant, in no order and without evidence: all that is read of the runs.

    A model whose account was traded by hand in its run has none, but in a season, where it is listed with that reason.
    In a season only its hours count.
    """
    hour = floor_to_bucket(now, _HOUR)
    listed = [each for each in entrants if rules is not None or each.run.run.entrant.manual_since is None]
    return [_entry(entrant, window_start(window, now), hour, window, rules) for entrant in listed]


def make_board(
    single: Sequence[LeaderboardEntry],
    window: RunWindow,
    sort_by: SortKey,
    now: datetime,
    contenders: int,
    rules: BoardRules = NO_SEASON,
) -> list[LeaderboardEntry]:
    """Return the entries best first: highest pnl, smallest drawdown; those without a rank after those with one.

    `contenders` is the number of entrants of all boards, which are corrected together.
    Of a hundred models it takes some 30 ms, and may do so in a thread.
    """
    start = window_start(window, hour := floor_to_bucket(now, _HOUR))
    entries = [_merged(group) for group in _groups(single)]
    statements = state_returns(
        (each.series and each.series.within(start, hour), each.trades_stated) for each in entries
    )
    entries = [
        msgspec.structs.replace(entry, evidence=statement) for entry, statement in zip(entries, statements, strict=True)
    ]
    entries.sort(key=lambda entry: (not entry.is_ranked, *_sort_key(entry, sort_by)))
    ranked = [
        msgspec.structs.replace(entry, rank=place if entry.is_ranked else None)
        for place, entry in enumerate(entries, start=1)
    ]
    marked = _with_ties(ranked, sort_by)
    if sort_by == "maxDrawdown" or "bestOther" not in rules.compared:
        return marked
    return _with_verdicts(marked, max(contenders, len(marked)), rules)


def _entry(
    entrant: RankedEntrant, since: datetime, hour: datetime, window: RunWindow, rules: SeasonRules | None
) -> LeaderboardEntry:
    model, run, equity, off_board = entrant
    began_at = run.entrant_since if rules is None else max(run.entrant_since, rules.start)
    since, end = max(since, began_at), None if rules is None else rules.end
    start, series = run.start_value(since), season_part(_entrant_returns(run, hour), rules)
    trades = run.trades_after(since, end)
    return LeaderboardEntry(
        model=model,
        record=run.run.entrant,
        pnl_percent=statistics.return_percent(float(start), float(equity)),
        pnl_absolute=equity - start,
        max_drawdown=run.window_drawdown(since, start, equity, end),
        start_value=start,
        end_value=equity,
        trades_count=trades,
        trades_stated=run.trades_after(max(window_start(window, hour), since), end),
        since=since,
        series=series,
        trades=run.trades_after(began_at, end),
        attempt=run.run.number,
        off_board=off_board,
    )


def _entrant_returns(run: RunStatistics, hour: datetime) -> ReturnSeries | None:
    """Return the whole hours of the present entrant; the first hour of a run counts even when it began within it."""
    series, began_at = run.returns(hour), run.entrant_since
    if series is None or began_at < series.start + _HOUR:
        return series
    return series.within(ceil_time(began_at, _HOUR), hour)


# Replicates


def _groups(entries: Sequence[LeaderboardEntry]) -> list[list[LeaderboardEntry]]:
    """Return the entries that are one row: replicates with the same fingerprint, or a single one."""
    groups: dict[str, list[LeaderboardEntry]] = {}
    for entry in entries:
        groups.setdefault(contender(entry.model.id, entry.record), []).append(entry)
    return list(groups.values())


def _merged(group: list[LeaderboardEntry]) -> LeaderboardEntry:
    if len(group) == 1:
        return group[0]
    series = {entry.model.id: entry.series for entry in group if entry.series is not None}
    noise = split_variance(series) if len(series) == len(group) else None
    joint = mean_series(list(series.values()))
    trades_count = sum(entry.trades_count for entry in group)
    returns = [entry.pnl_percent for entry in group if entry.pnl_percent is not None]
    began = [entry.record.began_at for entry in group if entry.record.began_at is not None]
    return LeaderboardEntry(
        model=group[0].model,
        record=EntrantRecord(
            number=group[0].record.number,
            fingerprint=group[0].record.fingerprint,
            began_at=max(began, default=None),
            cycles_decided=sum(entry.record.cycles_decided for entry in group),
            cycles_due=sum(entry.record.cycles_due for entry in group),
            declared=group[0].record.declared,
        ),
        pnl_percent=fmean(returns) if len(returns) == len(group) else None,
        pnl_absolute=_mean(group, lambda entry: entry.pnl_absolute),
        max_drawdown=fmean(entry.max_drawdown for entry in group),
        start_value=_mean(group, lambda entry: entry.start_value),
        end_value=_mean(group, lambda entry: entry.end_value),
        trades_count=trades_count,
        trades_stated=trades_count // len(group),
        since=min(entry.since for entry in group),
        series=joint,
        trades=sum(entry.trades for entry in group) // len(group),
        attempt=max(entry.attempt for entry in group),
        replicates=ReplicatesEntry(
            [entry.model for entry in group], min(returns, default=None), max(returns, default=None), noise
        ),
        off_board=next((f"{entry.model.id}: {entry.off_board}" for entry in group if entry.off_board), None),
    )


def _mean(group: Sequence[LeaderboardEntry], value: Callable[[LeaderboardEntry], Decimal]) -> Decimal:
    return divide(sum(map(value, group), ZERO), Decimal(len(group)))


# Order and neighbours


def _sort_key(entry: LeaderboardEntry, sort_by: SortKey) -> tuple[float | Decimal, Decimal, str]:
    """Return the key that sorts best first; ties by pnl, then by id, so that the order is always the same."""
    if sort_by == "maxDrawdown":
        first: float | Decimal = entry.max_drawdown
    elif sort_by == "pnlAbsolute":
        first = -entry.pnl_absolute
    else:
        first = float("inf") if entry.pnl_percent is None else -entry.pnl_percent
    return first, -entry.pnl_absolute, entry.model.id


def _with_ties(entries: Sequence[LeaderboardEntry], sort_by: SortKey) -> list[LeaderboardEntry]:
    """Return the ordered entries, each marked whether a neighbour has the same figure."""
    figures = [None, *(_sort_key(entry, sort_by)[0] for entry in entries), None]
    return [
        msgspec.structs.replace(entry, tie=figures[place] in {figures[place - 1], figures[place + 1]})
        for place, entry in enumerate(entries, start=1)
    ]


def _with_verdicts(entries: Sequence[LeaderboardEntry], contenders: int, rules: BoardRules) -> list[LeaderboardEntry]:
    """Return the ordered entries with a verdict on each pair of neighbours."""
    missing: Mapping[str, str | None] = {entry.model.id: missing_trades(entry.trades) for entry in entries}
    compared = compare_all(
        Pair(first.series, other.series, (missing[first.model.id], missing[other.model.id]))
        for first, other in pairwise(entries)
    )
    upper = judge_family(
        [
            statement._replace(attempts=first.attempt + other.attempt - 1)
            for statement, (first, other) in zip(compared, pairwise(entries), strict=True)
        ],
        rules.family(contenders),
        rules.level,
    )
    ranked = list(entries)
    for place, verdict in enumerate(upper):
        first, other = ranked[place], ranked[place + 1]
        ranked[place] = msgspec.structs.replace(first, below=NeighbourVerdict(other.model, verdict))
        ranked[place + 1] = msgspec.structs.replace(other, above=NeighbourVerdict(first.model, verdict.reversed()))
    return ranked
