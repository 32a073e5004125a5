"""Behavior: how an account traded, regardless of the result, as pure functions of its positions, hours and plans.

All figures are floats, for display. A figure without a value is None. An open position counts as held until the end of
the period; positions opened before the period belong to an earlier entrant and are excluded.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import combinations, groupby, pairwise
from operator import itemgetter
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from trader.core.statistics import EquityPoint, minutes, percent

SEXTILES: Final = 6
SEXTILE_HOURS_MIN: Final = 60
"""Minimum hours with a known leverage and volatility for sextiles: ten in each."""

VOLATILITY_HOURS: Final = 24
"""The number of preceding hours that determine an hour's volatility."""

FLIP_WITHIN: Final = timedelta(hours=1)
"""An entry on the opposite side of the same market within this time after a close is a flip."""

_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)
_NO_TIME: Final = timedelta(0)


class PriceExcursion(NamedTuple):
    """How far a price went against a position (0 or below) and in its favor (0 or above), in the quote currency."""

    adverse: float
    favourable: float

    @classmethod
    def of(cls, entry: float, prices: Iterable[float], *, is_long: bool) -> "PriceExcursion":
        """Return the excursions of the given prices from the entry price."""
        moves = [0.0, *(price - entry if is_long else entry - price for price in prices)]
        return cls(min(moves), max(moves))


class PositionPart(msgspec.Struct, frozen=True, gc=False):
    """A position, or a part of it that was closed separately; all parts have its market, side and opening time.

    Fields of the close are None while it is open. `stop` and `target` are the last planned prices. `lowest` and
    `highest` are the extremes of the candles entirely within it, None without any.
    """

    symbol: str
    is_long: bool
    quantity: float
    entry_notional: float
    exit_notional: float | None
    gross: float | None
    fees: float
    net: float | None
    reason: str | None
    stop: float | None
    target: float | None
    opened_at: datetime
    closed_at: datetime | None
    lowest: float | None
    highest: float | None

    @property
    def favourable(self) -> float:
        """Its largest unrealized gain, before costs, in the quote currency; 0 if there was none."""
        own = None if self.exit_notional is None else self.exit_notional / self.quantity
        prices = [price for price in (own, self.lowest, self.highest) if price is not None]
        return (
            self.quantity
            * PriceExcursion.of(self.entry_notional / self.quantity, prices, is_long=self.is_long).favourable
        )


class PlanChange(msgspec.Struct, frozen=True, gc=False):
    """An accepted change of the exit plan of a market's position."""

    symbol: str
    at: datetime


class Conduct(NamedTuple):
    """An account's trading within [start, end), with its equity at the start and its hours."""

    start: datetime
    end: datetime
    start_equity: float
    parts: Sequence[PositionPart]
    plan_changes: Sequence[PlanChange]
    hours: Sequence[EquityPoint]

    @property
    def own_parts(self) -> list[PositionPart]:
        """The parts of the positions opened in the period; parts closed after it count as open."""
        return [
            part
            if part.closed_at is None or part.closed_at <= self.end
            else msgspec.structs.replace(part, closed_at=None, exit_notional=None, gross=None, net=None, reason=None)
            for part in self.parts
            if self.start <= part.opened_at < self.end
        ]


def is_within_minute(opened_at: datetime, closed_at: datetime) -> bool:
    """Return whether a position was held for less than a minute: in a replay of candles, on drawn prices alone."""
    return closed_at - opened_at < _MINUTE


class HoldingTimes(msgspec.Struct, frozen=True):
    """Quantiles of the holding times of completed positions, in minutes: 10, 50 and 90 %."""

    low: float
    median: float
    high: float


class PlanOutcome(msgspec.Struct, frozen=True, rename="camel"):
    """Close reasons of the completed positions that had a stop (or a target) at the end."""

    planned: int
    by_stop: int
    by_target: int
    by_decision: int
    otherwise: int


class Behaviour(NamedTuple):
    """How an account traded.

    `within_minute` counts the completed positions that were held for less than a minute. `leverage_by_volatility` is
    its mean leverage in six equal groups of hours, the calmest first. `turnover` is the traded notional divided by the
    equity at the start. `fees_percent` is the fees in percent of the gross gains, `captured_percent` the gross profit
    in percent of the positions' largest unrealized gains, and `alike_percent` the share of the time in which either of
    two replicates held a market that both held the same side of it.
    """

    positions: int
    time_in_market_percent: float | None
    holding_times: HoldingTimes | None
    within_minute: int
    leverage_by_volatility: Sequence[float] | None
    turnover: float | None
    fees_percent: float | None
    flips: int
    stops: PlanOutcome
    targets: PlanOutcome
    plans_changed: int
    captured_percent: float | None
    alike_percent: float | None


def describe(
    conduct: Conduct, closes: Mapping[str, Mapping[datetime, float]], replicates: Sequence[Conduct] = ()
) -> Behaviour:
    """Return how an account traded. `closes` are hourly closes by market; `replicates` include the account itself."""
    parts = conduct.own_parts
    positions = [_whole(list(group)) for _, group in groupby(sorted(parts, key=_position), key=_position)]
    completed = [position for position in positions if position.closed_at is not None]
    closed = [part for part in parts if part.gross is not None]
    held = [minutes(position.opened_at, position.closed_at) for position in completed if position.closed_at]
    traded = sum(part.entry_notional + (part.exit_notional or 0.0) for part in parts)
    ahead = sum(part.favourable for part in closed)
    time_held = covered(intervals(parts, conduct.start, conduct.end))
    return Behaviour(
        positions=len(positions),
        time_in_market_percent=percent(time_held / _HOUR, (conduct.end - conduct.start) / _HOUR),
        holding_times=HoldingTimes(*(float(each) for each in np.quantile(held, [0.1, 0.5, 0.9]))) if held else None,
        within_minute=sum(is_within_minute(each.opened_at, each.closed_at) for each in completed if each.closed_at),
        leverage_by_volatility=leverage_by_volatility(
            conduct.hours, volatilities(closes, [p.hour for p in conduct.hours])
        ),
        turnover=traded / conduct.start_equity if conduct.start_equity > 0 else None,
        fees_percent=percent(sum(part.fees for part in closed), sum(max(part.gross or 0.0, 0.0) for part in closed)),
        flips=count_flips(positions),
        stops=_outcome([position for position in completed if position.stop is not None]),
        targets=_outcome([each for each in completed if each.target is not None or each.reason == "target"]),
        plans_changed=sum(
            any(
                change.symbol == position.symbol
                and position.opened_at < change.at <= (position.closed_at or conduct.end)
                for change in conduct.plan_changes
            )
            for position in positions
        ),
        captured_percent=percent(sum(part.gross or 0.0 for part in closed), ahead),
        alike_percent=alike_percent(replicates),
    )


def _position(part: PositionPart) -> tuple[str, datetime, bool]:
    return part.symbol, part.opened_at, part.is_long


def _whole(parts: Sequence[PositionPart]) -> PositionPart:
    """Return the part of a position that was closed last or is still open."""
    return max(parts, key=lambda part: (part.closed_at is None, part.closed_at or part.opened_at))


def _outcome(positions: Sequence[PositionPart]) -> PlanOutcome:
    reasons = [position.reason for position in positions]
    by_stop, by_target = reasons.count("stop"), reasons.count("target")
    by_decision = reasons.count("order") + reasons.count("limit")
    return PlanOutcome(len(reasons), by_stop, by_target, by_decision, len(reasons) - by_stop - by_target - by_decision)


def count_flips(positions: Iterable[PositionPart]) -> int:
    """Return how many times a market was entered on the opposite side within an hour of its last close."""
    ordered = sorted(positions, key=_position)
    return sum(
        before.symbol == after.symbol
        and before.is_long != after.is_long
        and before.closed_at is not None
        and _NO_TIME <= after.opened_at - before.closed_at <= FLIP_WITHIN
        for before, after in pairwise(ordered)
    )


TimeSpan = tuple[datetime, datetime]


def intervals(parts: Iterable[PositionPart], start: datetime, end: datetime) -> list[TimeSpan]:
    """Return the time spans in which parts were held, within a period."""
    return [(max(part.opened_at, start), min(part.closed_at or end, end)) for part in parts]


def covered(spans: Iterable[TimeSpan]) -> timedelta:
    """Return the total time that the spans cover."""
    total, reached = _NO_TIME, None
    for start, end in sorted(spans):
        first = start if reached is None else max(start, reached)
        if end > first:
            total, reached = total + (end - first), end
    return total


def alike_percent(accounts: Sequence[Conduct]) -> float | None:
    """Return the share of the time in which either of two accounts held a market that both held one side, in percent.

    Covers all pairs, in their common time. None for fewer than two accounts, or if none held a position.
    """
    both = either = _NO_TIME
    for first, other in combinations(accounts, 2):
        start, end = max(first.start, other.start), min(first.end, other.end)
        sides = [_sides(each, start, end) for each in (first, other)]
        for symbol in {symbol for each in sides for symbol, _ in each}:
            for is_long in (True, False):
                own, others = (each.get((symbol, is_long), []) for each in sides)
                both += covered(own) + covered(others) - covered([*own, *others])
            either += covered(
                span for each in sides for is_long in (True, False) for span in each.get((symbol, is_long), ())
            )
    return percent(both / _HOUR, either / _HOUR)


HeldSide = Literal["LONG", "SHORT"]


class Stance(NamedTuple):
    """A time in which the sides of two accounts in a market did not change, and one of them at least held it."""

    symbol: str
    start: datetime
    end: datetime
    first: HeldSide | None
    other: HeldSide | None

    @property
    def is_disagreement(self) -> bool:
        """Whether one was on a side of the market on which the other was not."""
        return self.first != self.other


def stances(first: Conduct, other: Conduct, since: datetime | None = None) -> list[Stance]:
    """Return the sides of two accounts in every market that they held, in their common time since a moment."""
    start, end = max(first.start, other.start, since or first.start), min(first.end, other.end)
    changes: dict[str, list[tuple[datetime, int, bool, int]]] = {}
    for who, account in enumerate((first, other)):
        for (symbol, is_long), spans in _sides(account, start, end).items():
            for begun_at, ended_at in spans:
                changes.setdefault(symbol, []).extend(
                    [(begun_at, who, is_long, 1), (ended_at, who, is_long, -1)]
                )  # parts of a position overlap
    found: list[Stance] = []
    for symbol, of_market in changes.items():
        held = Counter[tuple[int, bool]]()
        sides: tuple[HeldSide | None, HeldSide | None] = None, None
        begun_at = start
        for at, group in groupby(sorted(of_market), key=itemgetter(0)):
            for _, who, is_long, step in group:
                held[who, is_long] += step
            now = _side_of(held, 0), _side_of(held, 1)
            if now != sides:
                if sides != (None, None):
                    found.append(Stance(symbol, begun_at, at, *sides))
                sides, begun_at = now, at
    return sorted(found, key=lambda stance: (stance.start, stance.symbol))


def _side_of(held: Mapping[tuple[int, bool], int], who: int) -> HeldSide | None:
    return "LONG" if held[who, True] else "SHORT" if held[who, False] else None


def _sides(account: Conduct, start: datetime, end: datetime) -> dict[tuple[str, bool], list[TimeSpan]]:
    sides: dict[tuple[str, bool], list[TimeSpan]] = {}
    parts = account.own_parts
    for part, span in zip(parts, intervals(parts, start, end), strict=True):
        if span[1] > span[0]:
            sides.setdefault((part.symbol, part.is_long), []).append(span)
    return sides


def volatilities(closes: Mapping[str, Mapping[datetime, float]], hours: Iterable[datetime]) -> dict[datetime, float]:
    """Return the volatility before each hour: the root mean square of the markets' log moves in the preceding 24 hours.

    Hours before which no market has 24 moves are omitted.
    """
    squares = {
        symbol: {
            hour: math.log(close / by_hour[hour - _HOUR]) ** 2
            for hour, close in by_hour.items()
            if hour - _HOUR in by_hour
        }
        for symbol, by_hour in closes.items()
    }
    known: dict[datetime, float] = {}
    for hour in hours:
        day = [hour - number * _HOUR for number in range(1, VOLATILITY_HOURS + 1)]
        before = [by_hour[each] for by_hour in squares.values() for each in day if each in by_hour]
        if len(before) >= VOLATILITY_HOURS:
            known[hour] = math.sqrt(math.fsum(before) / len(before))
    return known


def leverage_by_volatility(points: Iterable[EquityPoint], known: Mapping[datetime, float]) -> list[float] | None:
    """Return the mean leverage in six equal groups of hours by volatility, calmest first; None for under 60 hours."""
    pairs = sorted(
        (known[point.hour], point.hour, point.leverage)
        for point in points
        if point.leverage is not None and point.hour in known
    )
    if len(pairs) < SEXTILE_HOURS_MIN:
        return None
    return [float(group.mean()) for group in np.array_split(np.array([leverage for *_, leverage in pairs]), SEXTILES)]
