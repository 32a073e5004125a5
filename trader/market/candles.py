"""Candles for charts: closed minutes from the market source, recorded in the database and read back at any length."""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from trader.core.clock import EPOCH, ceil_time, floor_time, interval_elapsed
from trader.core.errors import MarketUnavailable
from trader.database.pool import Database
from trader.market.domain.markets import Candle
from trader.market.feed import MarketFeed
from trader.market.sql import candles as store
from trader.settings.settings import Settings

log = logging.getLogger("trader.market")

CANDLES_MAX: Final = 1000
"""The most candles that one read returns."""

SPAN_MAX: Final = 2 * CANDLES_MAX
"""How far a read reaches back at most, in candles, so that it does not skip gaps of the source forever."""

LEAD_IN: Final = timedelta(days=1)
"""How much of the market before the first trade a chart can show."""

CHUNK: Final = timedelta(days=1)
CHUNKS_MAX: Final = 4
"""How many spans of each market one call of `record` reads at most: a long gap is filled over several calls."""

_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


class Extremes(NamedTuple):
    """The lowest and highest price between two moments, and the length of the candles that were read."""

    low: float
    high: float
    span: timedelta


class Candles:
    """Records the minutes that a market source has closed, and reads candles."""

    def __init__(self, database: Database, market: MarketFeed, settings: Settings) -> None:
        self._database = database
        self._market = market
        self._retention = timedelta(days=settings.candle_retention_days)
        self._recorded_until: dict[str, datetime] = {}
        self._retired_at: datetime | None = None

    async def record(self, now: datetime, since: datetime) -> None:
        """Record the minutes closed since the last call; the first call starts `LEAD_IN` before `since` or at a gap.

        Candles that the source does not have yet are recorded later. Minutes past the retention are deleted once a day,
        a week at most: the clock may be ahead.
        """
        end = floor_time(now, _MINUTE)
        oldest = ceil_time(max(now - self._retention, since - LEAD_IN), _MINUTE)
        known = {symbol: until for symbol, until in self._recorded_until.items() if until <= end}  # others: clock ahead
        symbols, self._recorded_until = [symbol for symbol in self._market.markets if symbol not in known], known
        if symbols:
            async with self._database.connection() as conn:
                last = await store.select_last_minutes(conn, symbols)
            self._recorded_until.update({symbol: at + _MINUTE for symbol, at in last.items()})
        newest = max(self._recorded_until.values(), default=now)
        for _ in range(CHUNKS_MAX):
            if not await self._record_chunk(oldest, end):
                break
        if self._retired_at is None or interval_elapsed(self._retired_at + _DAY, _DAY, now):
            async with self._database.writing() as conn:
                await store.delete_minutes(conn, min(now, newest + _DAY) - self._retention)
            self._retired_at = now

    async def _record_chunk(self, oldest: datetime, end: datetime) -> bool:
        """Record the next span of every market. Return whether more remains before `end`."""
        rows: list[tuple[str, Candle]] = []
        until: dict[str, datetime] = {}
        for symbol in self._market.markets:
            start = max(oldest, self._recorded_until.get(symbol, oldest))
            stop = min(end, start + CHUNK)
            if start >= stop:
                continue
            try:
                candles = await self._market.past_candles(symbol, "1m", start, stop)
            except MarketUnavailable as error:
                log.warning("candles will be recorded later: %s", error)
                continue
            rows += ((symbol, candle) for candle in candles)
            # A venue may publish its latest minute a little late, so the next call requests it again.
            is_latest = stop == end
            until[symbol] = stop if not is_latest else candles[-1].open_time + _MINUTE if candles else start
        if rows:
            async with self._database.writing() as conn:
                await store.insert_minutes(conn, rows)
        self._recorded_until.update(until)
        return any(reached < end for symbol, reached in until.items()) and bool(rows)

    async def read(self, symbol: str, span: timedelta, start: datetime | None, end: datetime) -> Sequence[Candle]:
        """Return the candles of one length that open within [start, end), ascending: the latest `CANDLES_MAX` + 1.

        The latest one may still be running. Candles shorter than an hour reach back as far as the retention.
        """
        earliest = EPOCH if end - EPOCH < SPAN_MAX * span else end - SPAN_MAX * span
        start = ceil_time(earliest if start is None else max(start, earliest), span)
        async with self._database.connection() as conn:
            return await store.select_candles(conn, symbol, span, start, end, CANDLES_MAX + 1)

    async def extremes(self, symbol: str, start: datetime, end: datetime) -> Extremes | None:
        """Return the extremes of the candles that lie entirely between two moments; None if there are none.

        It uses minutes as long as they are kept, then hours.
        """
        async with self._database.reading() as conn:
            for span in (_MINUTE, _HOUR):
                first, last = ceil_time(start, span), floor_time(end, span)
                prices = await store.select_extremes(conn, symbol, span // _MINUTE, first, last)
                if prices is not None:
                    return Extremes(*prices, span)
        return None
