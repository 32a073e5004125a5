"""Equity: snapshots of accounts, and the windows, buckets, resolutions and hourly averages of their histories."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from trader.core.clock import ceil_time, floor_time
from trader.core.money import ZERO, divide
from trader.core.statistics import EquityPoint, grouped
from trader.exchange.domain.account import Account, Position

Window = Literal["24h", "7d", "30d"]
WINDOWS: Final[Mapping[Window, timedelta]] = {
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}

RunWindow = Literal[Window, "run"]
"""A window, or the whole of the current runs."""


Resolution = Literal["1m", "5m", "15m", "1h", "4h", "1d"]
RESOLUTIONS: Final[Mapping[Resolution, timedelta]] = {
    "1m": timedelta(minutes=1),
    "5m": timedelta(minutes=5),
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "4h": timedelta(hours=4),
    "1d": timedelta(days=1),
}
_SUITED_SPANS: Final[Mapping[Resolution, timedelta]] = {
    "1m": timedelta(days=1),
    "5m": timedelta(days=3),
    "15m": timedelta(days=7),
    "1h": timedelta(days=30),
    "4h": timedelta(days=90),
    "1d": timedelta.max,
}
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)


class Point(NamedTuple):
    """One hour of a history and its average value."""

    hour: datetime
    value: Decimal


def window_start(window: RunWindow, now: datetime) -> datetime:
    """Return the start of a window that ends now; `run` starts before every run."""
    return datetime.min.replace(tzinfo=UTC) if window == "run" else now - WINDOWS[window]


def minute_end(moment: datetime) -> datetime:
    """Return the next full minute, or the moment itself if it is one.

    Windows end there and move once a minute, like snapshots: in between a history stays the same, and its values are
    never older than its window.
    """
    return ceil_time(moment, _MINUTE)


def average_by_hour(histories: Iterable[Sequence[Point]]) -> list[Point]:
    """Return, for each hour, the plain average of the histories with a value, rounded to 8 decimals, ascending."""
    by_hour = grouped(chain.from_iterable(histories), lambda point: point.hour)
    return [
        Point(hour, round(divide(sum((point.value for point in points), ZERO), Decimal(len(points))), 8))
        for hour, points in sorted(by_hour.items())
    ]


def choose_resolution(start: datetime, end: datetime, points_max: int, raw_since: datetime) -> Resolution:
    """Return the finest resolution that suits the range, stays within `points_max`, and has rows."""
    for resolution, bucket in RESOLUTIONS.items():
        points = (floor_time(end, bucket) - floor_time(start, bucket)) // bucket + 1
        available = bucket >= _HOUR or start >= raw_since
        if end - start <= _SUITED_SPANS[resolution] and points <= points_max and available:
            return resolution
    return "1d"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The value of an account at one moment. `net_portfolio = cash + unrealized_pnl`.

    `leverage` is the notional of its positions at the marks over its value; None: unknown. `sequence` is the account's:
    that of the last row of its ledger that the value includes.
    """

    account_id: str
    run_id: UUID
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: datetime
    leverage: float | None = None
    sequence: int = 0


class HourlyValue(msgspec.Struct, frozen=True, gc=False):
    """The last netPortfolio of an account in one hour, its time and ledger, and the hour's largest leverage."""

    account_id: str
    hour: datetime
    last: Decimal
    last_at: datetime
    leverage: float | None = None
    sequence: int = 0


def hourly_points(hours: Iterable[HourlyValue]) -> list[EquityPoint]:
    """Return hourly values as points of an equity series."""
    return [EquityPoint(value.hour, float(value.last), value.leverage) for value in hours]


class AccountValue(NamedTuple):
    """The unrealized profit, the value and the leverage of an account at one time."""

    gain: Decimal
    worth: Decimal
    leverage: float

    @classmethod
    def of(cls, positions: Collection[Position], cash: Decimal, marks: Iterable[Decimal]) -> "AccountValue":
        """Return the value of positions at these marks, one for each, and of cash. Of nothing, leverage is infinite."""
        notional = gain = ZERO
        for position, mark in zip(positions, marks, strict=True):
            notional += position.notional(mark)
            gain += position.unrealized(mark)
        worth = cash + gain
        return cls(gain, worth, (float(notional / worth) if worth > 0 else math.inf) if notional else 0.0)

    def snapshot(self, account: Account, at: datetime) -> Snapshot:
        return Snapshot(
            account_id=account.id,
            run_id=account.run.id,
            net_portfolio=self.worth,
            cash=account.cash,
            unrealized_pnl=self.gain,
            created_at=at,
            leverage=self.leverage,
            sequence=account.sequence,
        )


def value_account(account: Account, marks: Mapping[str, Decimal], at: datetime) -> Snapshot | None:
    """Return the account's value at the marks; None if one of its markets has no price yet."""
    if any(symbol not in marks for symbol in account.positions):
        return None
    value = AccountValue.of(account.positions.values(), account.cash, [marks[symbol] for symbol in account.positions])
    return value.snapshot(account, at)
