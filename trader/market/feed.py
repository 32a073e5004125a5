"""Market feed: the loop over a source's ticks, the latest quotes and marks, and candles.

Orders wait here for the book that will fill them.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from trader.core.clock import SET_BACK_LEAST, Clock, ClockFuture, ScaledClock, SystemClock, floor_time, iso
from trader.core.errors import MarketDataError, MarketUnavailable, Unavailable
from trader.market.domain.markets import (
    INTERVALS,
    STALE_AFTER,
    Candle,
    Interval,
    Market,
    Quote,
    Tick,
    extend_candle,
    untimely,
)
from trader.market.sources.recorder import Recorder
from trader.market.sources.source import MarketSource, PolledSource

logger = logging.getLogger(__name__)

_FEED_ERRORS: Final = (MarketDataError, MarketUnavailable, OSError, EOFError)
_BACKOFF_FIRST: Final = timedelta(seconds=1)
_BACKOFF_MAX: Final = timedelta(seconds=8)  # so that the service is healthy within ten seconds of its source
_PATIENCE: Final = timedelta(seconds=5)
_PRIMED_WITH: Final = timedelta(seconds=2)
WAITERS_MAX: Final = 10_000
_CANDLES_MAX: Final = 1000
_RECENT_MAX: Final = 64
_BEHIND: Final = "The accounts have not processed the latest prices yet: the database does not confirm their tick."

OnTick = Callable[[Tick], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Waiter:
    """An order that is waiting for a market's first quote at or after a time."""

    symbol: str
    moment: datetime
    future: ClockFuture[Quote | MarketUnavailable | Unavailable]


@dataclass(slots=True, eq=False)
class _Series:
    """The cached candles of one market and interval."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    count: int = 0
    start: datetime | None = None
    end: datetime | None = None
    candles: list[Candle] = field(default_factory=list)


class MarketFeed:
    """Follows a market source. An order may wait for a book for its latency plus `patience` plus, if the source does
    not push, the time until the next poll, up to the age of a stale price. `recorder` records the market between
    `begin_recording` and `end_recording`.
    """

    def __init__(
        self,
        source: MarketSource,
        clock: Clock,
        *,
        patience: timedelta = _PATIENCE,
        recorder: Recorder | None = None,
    ) -> None:
        self._source = source
        self._polled = source if isinstance(source, PolledSource) else None
        self._recorder = recorder
        self._is_recording = False
        self._clock = clock
        self._patience = patience
        self.markets: Mapping[str, Market] = source.markets
        self.trouble, self.open_interest = source.trouble, source.open_interest
        self.funding_rate, self.known_funding_rate = source.funding_rate, source.known_funding_rate
        self.source_name = source.name
        self.identity = source.identity
        self.last_update_at: datetime | None = None
        self.last_error: str | None = None
        self._is_down = False
        self._is_taking = False
        self._quotes: dict[str, Quote] = {}
        self._marks: dict[str, Decimal] = {}
        self.marks: Mapping[str, Decimal] = MappingProxyType(self._marks)
        """The latest mark of each market; before its first quote, the last recorded mark."""

        self.running: dict[str, Candle] = {}
        """Each market's running one-minute candle of the marks seen so far."""

        self._recent: deque[Tick] = deque(maxlen=_RECENT_MAX)
        self._waiters: list[_Waiter] = []
        self._series: dict[tuple[str, Interval], _Series] = {}

    @property
    def ends_at(self) -> datetime | None:
        """The time of the last tick; None if the source never ends."""
        return self._source.ends_at

    # The current state

    def quote(self, symbol: str) -> Quote | None:
        """Return the latest quote, regardless of its age; None before the first."""
        return self._quotes.get(symbol)

    def quotes(self) -> Mapping[str, Quote]:
        """Return the latest quote of every market that has had one."""
        return MappingProxyType(self._quotes)

    def restore_marks(self, marks: Mapping[str, Decimal]) -> None:
        """Use recorded marks for markets that have no quote yet."""
        self._marks.update({symbol: mark for symbol, mark in marks.items() if symbol not in self._quotes})

    def recent(self) -> tuple[Tick, ...]:
        """Return the latest ticks, ascending; they reach back further than an order waits for its answer."""
        return tuple(self._recent)

    def is_stale(self) -> bool:
        """Return whether there is no current tick to trade on."""
        return self.last_update_at is None or untimely(self.last_update_at, self._clock.now()) is not None

    @property
    def has_ended(self) -> bool:
        """Whether a recording has played to its end, so that no price is missing but no more will come."""
        return self.last_update_at is not None and self.last_update_at == self._source.ends_at

    def troubles(self) -> str | None:
        """Return every reason for missing prices, or None."""
        if self._is_down:
            return self.last_error
        troubles = ((symbol, self.trouble(symbol)) for symbol in self.markets)
        return "; ".join(f"{symbol}: {trouble}" for symbol, trouble in troubles if trouble is not None) or None

    def begin_recording(self) -> None:
        """Start recording applied ticks, if there is a recorder. Call it when this process leads."""
        self._is_recording = self._recorder is not None
        if self._recorder is not None:
            self._recorder.begin(self._clock.now())

    def end_recording(self) -> None:
        """Stop recording and complete the current file."""
        self._is_recording = False
        if self._recorder is not None:
            self._recorder.close()

    def _recorded(self, tick: Tick) -> Tick:
        return self._recorder.record(tick) if self._recorder is not None and self._is_recording else tick

    async def history(self, after: datetime, until: datetime, *, applied: bool = False) -> AsyncIterator[Tick]:
        """Yield the ticks of (after, until] again. Raise `MarketUnavailable` if the source fails.

        Ticks that are `applied` to the accounts become part of a recording.
        """
        try:
            async for tick in self._source.history(after, until):
                yield self._recorded(tick) if applied else tick
        except _FEED_ERRORS as error:
            raise MarketUnavailable(f"{self.source_name} has no history now: {_describe(error)}") from error

    async def prime(self) -> None:
        """Load the latest prices from the source's history, so that prices exist before the first tick."""
        now = self._clock.now()
        try:
            async for tick in self.history(now - _PRIMED_WITH, now, applied=True):
                self._note(tick)
        except MarketUnavailable as error:
            logger.warning("No prices yet: %s", error)

    def _note(self, tick: Tick) -> None:
        self._quotes.update(tick.quotes)
        self._marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
        for symbol, quote in tick.quotes.items():
            self.running[symbol] = extend_candle(self.running.get(symbol), tick.at, float(quote.mark))
        self.last_update_at = tick.at

    # Waiting for a book

    @property
    def orders_waiting(self) -> int:
        """The number of orders waiting for a price."""
        return len(self._waiters)

    async def quote_after(self, symbol: str, moment: datetime) -> Quote:
        """Return the first quote at or after `moment`, once its tick has been applied.

        :raises MarketUnavailable: no quote arrives within the patience, or none can arrive
        :raises Unavailable: it arrived, but the accounts cannot process its tick, so this is no final answer
        """
        quote = self._quotes.get(symbol)
        if not self._is_taking and quote is not None and quote.at >= moment and not quote.is_stale(self._clock.now()):
            return quote
        self._refuse_hopeless(symbol, moment)
        waiter = _Waiter(symbol, moment, self._clock.future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._real_bound_s(moment)):
                answer = await waiter.future.wait()
        except TimeoutError:
            answer = Unavailable(_BEHIND) if self._is_taking else self._too_late(symbol)
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def books_after(self, moment: datetime, latency_ms: int, symbols: Sequence[str]) -> str | None:
        """Wait until each market has a book at or after `moment` + latency. Return why one has none, or None.

        Without latency, an order meets the current book.
        """
        try:
            for symbol in symbols if latency_ms else ():
                await self.quote_after(symbol, moment + timedelta(milliseconds=latency_ms))
        except MarketUnavailable as error:
            return str(error)
        return None

    def _too_late(self, symbol: str) -> MarketUnavailable:
        trouble = self.trouble(symbol)
        return MarketUnavailable(f"No price of {symbol} came in time{'' if trouble is None else f': {trouble}'}")

    def _refuse_hopeless(self, symbol: str, moment: datetime) -> None:
        ends_at = self._source.ends_at
        if symbol not in self.markets:
            raise MarketUnavailable(f"{symbol} is not traded here")
        if ends_at is not None and (moment > ends_at or self.last_update_at == ends_at):
            raise MarketUnavailable(f"The {self.source_name} ended at {iso(ends_at)}; there are no more prices")
        if self._is_down:
            raise MarketUnavailable(f"The market source is down: {self.last_error}")
        if self.last_update_at is not None and (why := untimely(self.last_update_at, self._clock.now())) is not None:
            raise MarketUnavailable(f"The last price is of {iso(self.last_update_at)}, {why}")
        if self.orders_waiting >= WAITERS_MAX:
            raise MarketUnavailable(f"{WAITERS_MAX} orders wait for a price already")

    def _real_bound_s(self, moment: datetime) -> float | None:
        """Return how many real seconds to wait at most; None if only the market advances the clock."""
        if not isinstance(self._clock, SystemClock | ScaledClock):
            return None
        ahead = max(timedelta(0), moment - self._clock.now())
        return self._clock.real_seconds(ahead) + self._patience_now().total_seconds()

    def _patience_now(self) -> timedelta:
        refresh_every = timedelta(0) if self._polled is None else self._polled.refresh_every
        return self._patience + min(refresh_every, STALE_AFTER)

    def _release(self, tick: Tick, delay: Unavailable | None) -> None:
        """Release, in order of arrival, the orders that this tick serves or that waited too long in market time.

        `delay` is why the accounts did not process the tick; then it is not the market that is late.
        """
        waiting: list[_Waiter] = []
        for waiter in self._waiters:
            quote = tick.quotes.get(waiter.symbol)
            if tick.at - waiter.moment > self._patience_now():
                waiter.future.set(delay or self._too_late(waiter.symbol))
            elif quote is not None and quote.at >= waiter.moment:
                waiter.future.set(quote)
            else:
                waiting.append(waiter)
        self._waiters = waiting

    def _refuse_all(self, reason: str) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.future.set(MarketUnavailable(reason))

    # The feed

    async def run(self, on_tick: OnTick, after: datetime) -> None:
        """Follow the source from `after` forever: `on_tick` finishes before any order meets the tick's book.

        A failed source is retried, at first after 1 s and at most after 8 s.
        """
        backoff = _BACKOFF_FIRST
        try:
            while True:
                if after - (now := self._clock.now()) > SET_BACK_LEAST:
                    after = now
                ticks = self._source.ticks(self._clock, after)
                try:
                    while (tick := await self._next(ticks)) is not None:
                        after, backoff = tick.at, _BACKOFF_FIRST
                        await self.take(tick, on_tick)
                finally:
                    if isinstance(ticks, AsyncGenerator):
                        await ticks.aclose()
                await self._clock.sleep_until(self._clock.now() + backoff)
                backoff = min(2 * backoff, _BACKOFF_MAX)
        finally:
            self._is_down, self.last_error = True, "the feed was stopped"
            self._refuse_all("The market feed was stopped")

    async def _next(self, ticks: AsyncIterator[Tick]) -> Tick | None:
        """Return the next tick, or None if the source failed, in which case waiting orders are refused."""
        try:
            return await anext(ticks)
        except StopAsyncIteration:
            self.last_error = "the feed ended"
        except _FEED_ERRORS as error:
            self.last_error = _describe(error)
        self._is_down = True
        logger.warning("The market source %s failed: %s", self.source_name, self.last_error)
        self._refuse_all(f"The market source is down: {self.last_error}")
        return None

    async def take(self, tick: Tick, on_tick: OnTick) -> None:
        """Apply one tick: note its quotes, run `on_tick`, then release the orders that are waiting for it."""
        last = self.last_update_at
        if isinstance(self._clock, ScaledClock) and last is not None and tick.at < last:
            return  # a standby's feed lags behind the time at which it took over, and prices never go back
        if self._is_down:
            logger.info("The market source %s is back", self.source_name)
        self._is_down, self.last_error = False, None
        if last is not None and last - tick.at > SET_BACK_LEAST:
            self._follow_back(last - tick.at)
        tick = self._recorded(tick)  # before anything acts on it
        self._note(tick)
        self._recent.append(tick)
        self._is_taking, delay = True, None
        try:
            await on_tick(tick)
        except Unavailable as error:
            delay = error
            logger.warning("The tick of %s was not fully applied: %s", iso(tick.at), error)
        finally:
            self._is_taking = False
        self._release(tick, delay)
        if self.has_ended:
            self.last_error = f"the {self.source_name} ended at {iso(tick.at)}"
            logger.info("The %s ended at %s; there are no more prices", self.source_name, iso(tick.at))
            self._refuse_all(f"The {self.source_name} ended at {iso(tick.at)}; there are no more prices")

    def _follow_back(self, span: timedelta) -> None:
        """Drop cached ticks that lie in the future after the clock was set back; no wait becomes longer.

        Candles are read again anyway.
        """
        logger.warning("The clock was set back: the market's time is %s behind its last update", span)
        self._recent.clear()
        for waiter in self._waiters:
            waiter.moment -= span

    # Candles

    async def candles(self, symbol: str, interval: Interval, count: int) -> list[Candle]:
        """Return the last `count` (at most 1000) closed candles, ascending; fewer if the source has fewer.

        Concurrent calls fetch them once. Raise `MarketUnavailable` if the source fails.
        """
        if symbol not in self.markets:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span = INTERVALS[interval]
        series = self._series.setdefault((symbol, interval), _Series())
        async with series.lock:
            series.count = max(series.count, min(count, _CANDLES_MAX))
            end = floor_time(self._clock.now(), span)
            try:
                await self._refresh(series, symbol, interval, end)
            except _FEED_ERRORS as error:
                raise MarketUnavailable(f"No candles of {symbol}: {error}") from error
            first = bisect_left(series.candles, end - count * span, key=attrgetter("open_time"))
            return series.candles[first:]

    async def past_candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """Return the closed candles within [start, end], ascending. Raise `MarketUnavailable` if the source fails."""
        try:
            return await self._source.candles(symbol, interval, start, end)
        except _FEED_ERRORS as error:
            raise MarketUnavailable(f"No candles of {symbol}: {error}") from error

    async def _refresh(self, series: _Series, symbol: str, interval: Interval, end: datetime) -> None:
        """Extend a series up to `end` with the candles closed since, or load all of it."""
        span = INTERVALS[interval]
        start = end - series.count * span
        if series.start is None or series.end is None or start < series.start or start > series.end:
            candles = await self._fetch(symbol, interval, start, end)
        elif series.end < end:
            kept = [candle for candle in series.candles if candle.open_time >= start]
            candles = kept + await self._fetch(symbol, interval, series.end, end)
        else:
            return
        series.start, series.candles = start, candles
        # A venue may publish its latest candle a little late: continue from the first missing candle.
        series.end = candles[-1].open_time + span if candles else start

    async def _fetch(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        candles = await self._source.candles(symbol, interval, start, end)
        if self._recorder is not None and self._is_recording:
            self._recorder.record_candles(symbol, interval, candles, self._clock.now())
        return candles


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
