"""Leaderboard: the current entrants ranked by their results within a window, replicates as one row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from trader.agents.domain.entrants import EntrantRecord, joint_id, joint_name, joint_record
from trader.agents.domain.models import Model
from trader.core import statistics
from trader.core.clock import floor_time
from trader.core.money import ZERO, divide
from trader.core.statistics import grouped
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.board import NO_SEASON, BoardRules
from trader.portfolio.domain.evidence import (
    Pair,
    Statement,
    Verdict,
    compare_all,
    missing_trades,
    state_returns,
)
from trader.portfolio.domain.histories import RESOLUTIONS, RunWindow, window_start
from trader.portfolio.domain.returns import ReplicateNoise, ReturnSeries, mean_series, split_variance
from trader.portfolio.domain.seasons import SeasonRules
from trader.portfolio.run_statistics import RunStatistics, WindowStart, contender

SortKey = Literal["pnlPercent", "pnlAbsolute", "maxDrawdown"]

_HOUR = RESOLUTIONS["1h"]


class RankedEntrant(NamedTuple):
    """A model in its current run, with its account's live equity. `off_board` is why a season gives it no rank.

    `cost_usd` is what its invocations in the window cost; None if no provider reported a cost. `start` is that of the
    window; None: to the hour.
    """

    model: Model
    run: RunStatistics
    equity: Decimal
    off_board: str | None = None
    cost_usd: Decimal | None = None
    start: WindowStart | None = None


class NeighbourVerdict(NamedTuple):
    """The verdict on an entry against an adjacent one in the order."""

    neighbour: "LeaderboardEntry"
    verdict: Verdict


class ReplicatesEntry(NamedTuple):
    """The models of a row of replicates, with the lowest and highest return and the split of the variance.

    `noise` covers their common hours; None while there are too few. `cost_usd` is the cost of all of them together.
    """

    models: Sequence[Model]
    lowest_percent: float | None
    highest_percent: float | None
    noise: ReplicateNoise | None
    cost_usd: Decimal | None


class LeaderboardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model's current entrant within the window. Values are equity; the drawdown is in percent, and positive.

    An entry of replicates has their means, all of their trades, and the first of their models. `rank` is None if the
    entrant decided too few of its cycles or is excluded from the board of a season (`off_board` says why). `closed` are
    the trades completed within the window, `within_minute` counts those held for less than a minute,
    and `since` is the start of the entry; `series` are all hours of the entrant, and `trades` all its trades, for
    replicates the mean. `attempt` is the number of its run, for replicates the highest. `evidence` covers the whole
    hours of the window, `trades_stated` their trades. `tie`: an adjacent entry has the same figure. `above` and `below`
    are the verdicts on this model against the adjacent ones, over all hours of both; None without an adjacent entry, or
    if the board is not sorted by return. `cost_usd` is the cost of the model's invocations within the window, for
    replicates the mean; None if it is unknown.
    """

    model: Model
    record: EntrantRecord
    pnl_percent: float | None
    pnl_absolute: Decimal
    max_drawdown: float
    start_value: Decimal
    end_value: Decimal
    closed: Sequence[RunTrade]
    within_minute: int
    cost_usd: Decimal | None = None
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
    def models(self) -> Sequence[Model]:
        return (self.model,) if self.replicates is None else self.replicates.models

    @property
    def id(self) -> str:
        return joint_id(self.models, self.record)

    @property
    def name(self) -> str:
        return joint_name(self.models)

    @property
    def trades_count(self) -> int:
        return len(self.closed)

    @property
    def fees(self) -> Decimal:
        """Return the fees of its completed trades, for replicates the mean."""
        return divide(sum((trade.fees for trade in self.closed), ZERO), Decimal(len(self.models)))

    @property
    def best_trade(self) -> RunTrade | None:
        """Return the trade with the largest profit; None if none has a profit."""
        won = (trade for trade in self.closed if trade.net_pnl > 0)
        return max(won, key=lambda trade: trade.net_pnl, default=None)

    @property
    def net_after_cost(self) -> Decimal | None:
        """Return the gain minus the cost of the model; one USD counts as one unit of quote currency."""
        return None if self.cost_usd is None else self.pnl_absolute - self.cost_usd

    @property
    def is_ranked(self) -> bool:
        return self.record.is_ranked and self.off_board is None


def make_entries(
    entrants: Iterable[RankedEntrant], window: RunWindow, now: datetime, rules: SeasonRules | None = None
) -> list[LeaderboardEntry]:
    """Return an entry for each entrant, unordered and without evidence: everything that must be read from the runs.

    A manually traded model has no entry, except in a season, where it is listed with that reason. The runs of a season
    are cut to it.
    """
    hour, board = floor_time(now, _HOUR), NO_SEASON if rules is None else rules.board
    listed = [each for each in entrants if rules is not None or each.run.run.entrant.manual_since is None]
    return [_entry(entrant, window_start(window, now), hour, window, board) for entrant in listed]


def make_board(
    single: Sequence[LeaderboardEntry],
    window: RunWindow,
    sort_by: SortKey,
    now: datetime,
    contenders: int,
    rules: BoardRules = NO_SEASON,
    *,
    is_merged: bool = True,
) -> list[LeaderboardEntry]:
    """Return the entries best first: highest pnl, smallest drawdown; those without a rank after those with one.

    `contenders` is the number of entrants of all boards, which are corrected together.

    A hundred models take about 30 ms; the function may run in a thread.
    """
    start = window_start(window, hour := floor_time(now, _HOUR))
    groups = grouped(single, lambda each: contender(each.model.id, each.record))
    entries = [_merged(group) for group in groups.values()] if is_merged else single
    statements = state_returns(
        (each.series and each.series.within(start, hour), each.trades_stated) for each in entries
    )
    entries = [
        msgspec.structs.replace(entry, evidence=statement) for entry, statement in zip(entries, statements, strict=True)
    ]
    entries.sort(key=lambda entry: (not entry.is_ranked, *_sort_key(entry, sort_by)))
    figures = [None, *(_sort_key(entry, sort_by)[0] for entry in entries), None]
    marked = [
        msgspec.structs.replace(
            entry,
            rank=place if entry.is_ranked else None,
            tie=figures[place] in {figures[place - 1], figures[place + 1]},
        )
        for place, entry in enumerate(entries, start=1)
    ]
    if sort_by == "maxDrawdown" or "bestOther" not in rules.compared:
        return marked
    return _with_verdicts(marked, max(contenders, len(marked)), rules)


def _entry(
    entrant: RankedEntrant, since: datetime, hour: datetime, window: RunWindow, rules: BoardRules
) -> LeaderboardEntry:
    model, run, equity, off_board, cost_usd, known = entrant
    since = max(since, run.entrant_since)
    start = run.start_value(since) if known is None else known.value
    return LeaderboardEntry(
        model=model,
        record=run.run.entrant,
        pnl_percent=statistics.return_percent(float(start), float(equity)),
        pnl_absolute=equity - start,
        max_drawdown=run.window_drawdown(since, start, equity),
        start_value=start,
        end_value=equity,
        closed=run.closed_after(since),
        within_minute=run.brief_after(since),
        cost_usd=cost_usd,
        trades_stated=run.trades_after(max(window_start(window, hour), since)),
        since=since,
        series=run.periods[-1].returns(hour, rules) if run.periods else None,
        trades=run.trades_after(run.entrant_since),
        attempt=run.run.number,
        off_board=off_board,
    )


# Replicates


def _merged(group: list[LeaderboardEntry]) -> LeaderboardEntry:
    if len(group) == 1:
        return group[0]
    series = {entry.model.id: entry.series for entry in group if entry.series is not None}
    noise = split_variance(series) if len(series) == len(group) else None
    joint = mean_series(list(series.values()))
    closed = [trade for entry in group for trade in entry.closed]
    returns = [entry.pnl_percent for entry in group if entry.pnl_percent is not None]
    costs = [entry.cost_usd for entry in group if entry.cost_usd is not None]
    cost_usd = sum(costs, ZERO) if len(costs) == len(group) else None
    return LeaderboardEntry(
        model=group[0].model,
        record=joint_record([entry.record for entry in group]),
        pnl_percent=fmean(returns) if len(returns) == len(group) else None,
        pnl_absolute=_mean(group, lambda entry: entry.pnl_absolute),
        max_drawdown=fmean(entry.max_drawdown for entry in group),
        start_value=_mean(group, lambda entry: entry.start_value),
        end_value=_mean(group, lambda entry: entry.end_value),
        closed=closed,
        within_minute=sum(entry.within_minute for entry in group),
        cost_usd=None if cost_usd is None else divide(cost_usd, Decimal(len(group))),
        trades_stated=len(closed) // len(group),
        since=min(entry.since for entry in group),
        series=joint,
        trades=sum(entry.trades for entry in group) // len(group),
        attempt=max(entry.attempt for entry in group),
        replicates=ReplicatesEntry(
            [entry.model for entry in group], min(returns, default=None), max(returns, default=None), noise, cost_usd
        ),
        off_board=next((f"{entry.model.id}: {entry.off_board}" for entry in group if entry.off_board), None),
    )


def _mean(group: Sequence[LeaderboardEntry], value: Callable[[LeaderboardEntry], Decimal]) -> Decimal:
    return divide(sum(map(value, group), ZERO), Decimal(len(group)))


# Order and adjacent entries


def _sort_key(entry: LeaderboardEntry, sort_by: SortKey) -> tuple[float | Decimal, Decimal, str]:
    """Return the key that sorts best first; ties by pnl, then by id, for a stable order."""
    if sort_by == "maxDrawdown":
        first: float | Decimal = entry.max_drawdown
    elif sort_by == "pnlAbsolute":
        first = -entry.pnl_absolute
    else:
        first = float("inf") if entry.pnl_percent is None else -entry.pnl_percent
    return first, -entry.pnl_absolute, entry.model.id


def _with_verdicts(entries: Sequence[LeaderboardEntry], contenders: int, rules: BoardRules) -> list[LeaderboardEntry]:
    """Return the ordered entries with a verdict on each adjacent pair."""
    missing: Mapping[str, str | None] = {entry.model.id: missing_trades(entry.trades) for entry in entries}
    compared = compare_all(
        Pair(
            first.series,
            other.series,
            (missing[first.model.id], missing[other.model.id]),
            first.attempt + other.attempt - 1,
        )
        for first, other in pairwise(entries)
    )
    upper = rules.judge(compared, contenders)
    ranked = list(entries)
    for place, verdict in enumerate(upper):
        first, other = ranked[place], ranked[place + 1]
        ranked[place] = msgspec.structs.replace(first, below=NeighbourVerdict(other, verdict))
        ranked[place + 1] = msgspec.structs.replace(other, above=NeighbourVerdict(first, verdict.reversed()))
    return ranked
