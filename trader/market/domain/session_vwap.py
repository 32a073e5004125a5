"""Session VWAP: the volume-weighted mean of the typical price since 00:00 UTC, and the deviation around it."""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timedelta
from math import sqrt
from operator import attrgetter
from typing import Final

import msgspec

from trader.market.domain.markets import Candle

VWAP_DEVIATIONS: Final = 2.0
SESSION_CANDLES_MIN: Final = 30
"""Candles that must close in a session before it has a VWAP: with fewer, the deviation means little."""


class SessionVwap(msgspec.Struct, frozen=True, gc=False):
    """Volume-weighted mean of the typical price since 00:00 UTC, and the deviation around it."""

    vwap: float
    deviation: float


def session_vwap(candles: Sequence[Candle]) -> SessionVwap | None:
    """Return the VWAP of the UTC day in which the last candle opened.

    None if the candles do not reach back to 00:00 of that day, fewer than 30 have closed since, or nothing was traded.
    """
    if not candles:
        return None
    midnight = midnight_of(candles[-1].open_time)
    first = bisect_left(candles, midnight, key=attrgetter("open_time"))
    if candles[0].open_time > midnight:
        return None
    session = SessionSums()
    for candle in candles[first:]:
        session.add(candle)
    return session.vwap()


class SessionSums:
    """Running sums of a session's candles, from which the VWAP follows. Prices are relative to the first one."""

    def __init__(self) -> None:
        self._base = 0.0
        self._count = 0
        self._volume = self._traded = self._squares = 0.0

    def add(self, candle: Candle) -> None:
        """Add the next candle."""
        price = (candle.high + candle.low + candle.close) / 3
        if not self._count:
            self._base = price
        above = price - self._base
        self._count += 1
        self._volume += candle.volume
        self._traded += above * candle.volume
        self._squares += above * above * candle.volume

    def vwap(self) -> SessionVwap | None:
        """Return the VWAP; None if fewer than 30 candles have closed or nothing was traded."""
        if self._count < SESSION_CANDLES_MIN or self._volume <= 0:
            return None
        mean = self._traded / self._volume
        return SessionVwap(self._base + mean, sqrt(max(0.0, self._squares / self._volume - mean * mean)))


def midnight_of(moment: datetime) -> datetime:
    """Return the start of the UTC day."""
    return moment - timedelta(
        hours=moment.hour, minutes=moment.minute, seconds=moment.second, microseconds=moment.microsecond
    )


def vwaps_of_windows(candles: Sequence[Candle], first: Sequence[int]) -> list[SessionVwap | None]:
    """Return the session's VWAP at each candle, where its window starts at candle `first` of the same index."""
    vwaps: list[SessionVwap | None] = []
    midnight: datetime | None = None
    sums, begin = SessionSums(), 0
    for place, candle in enumerate(candles):
        if midnight is None or midnight_of(candle.open_time) != midnight:
            midnight, sums, begin = midnight_of(candle.open_time), SessionSums(), place
        sums.add(candle)
        reaches_back = candles[first[place]].open_time <= midnight and first[place] <= begin
        vwaps.append(sums.vwap() if reaches_back else None)
    return vwaps


def vwap_fields(day: SessionVwap | None) -> dict[str, float]:
    """Return the fields of `Indicators` that derive from a session's VWAP."""
    if day is None:
        return {}
    return {
        "vwap": day.vwap,
        "vwap_deviation": day.deviation,
        "vwap_upper": day.vwap + VWAP_DEVIATIONS * day.deviation,
        "vwap_lower": day.vwap - VWAP_DEVIATIONS * day.deviation,
    }
