"""Market source of a venue's public data: books and marks from its stream; rules, candles and funding on request.

A simulator that cannot open the stream, for example behind a proxy without WebSocket support, also polls the books.

No credentials are needed. While the venue is silent there are no prices: none are invented.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Final, Protocol

from trader.core.clock import (
    SET_BACK_LEAST,
    Clock,
    SystemClock,
    ceil_time,
    epoch_second,
    floor_time,
    interval_elapsed,
    moment_of,
)
from trader.core.errors import MarketDataError, MarketUnavailable
from trader.live.book import BookChange
from trader.live.budget import Priority, spending_as
from trader.live.market import Listing, VenueMarket
from trader.live.socket import MarketStream, StreamUnreachable
from trader.market.domain.markets import (
    INTERVALS,
    PLAIN_FUNDING_RATE,
    SIMULATED_MARKETS,
    Candle,
    Interval,
    Market,
    SimulatedMarket,
    Tick,
)
from trader.market.sources.books import (
    CLOSE_S,
    FURTHER_S,
    NEARER_S,
    BookModel,
    CandlePath,
    Grid,
    TrailingDay,
    marks_of_candle,
)
from trader.market.sources.files import FileRow, Minutes
from trader.settings.settings import Settings

logger = logging.getLogger(__name__)

_PULSE_S: Final = 0.25
_CANDLES_PER_STEP: Final = 500
_HISTORY_PATIENCE_S: Final = 90.0
_RULES_EVERY: Final = timedelta(hours=1)
_INSTANT: Final = timedelta(milliseconds=1)
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_CORNERS_S: Final = (0, NEARER_S, NEARER_S + 1, FURTHER_S, FURTHER_S + 1, CLOSE_S)
"""The seconds of a missed minute with a tick. An order triggered by an extreme meets a book one second later."""


class MarketApi(Protocol):
    """The public data of a venue, on request and by its stream. Every call raises `MarketDataError`."""

    venue: str
    streams_rates: bool
    """Whether the stream tells the funding rates that were due."""

    known: dict[str, Listing]

    async def listings(self) -> Mapping[str, Listing]: ...

    async def book(self, market_id: int) -> BookChange: ...

    async def candles(self, market_id: int, interval: Interval, start: datetime, end: datetime) -> list[Candle]: ...

    async def fundings(self, market_id: int, start: datetime, end: datetime) -> dict[datetime, Decimal]:
        """Return the hourly rates due at the whole hours in [start, end]; longs pay a positive one."""
        ...

    def stream(self, markets: Sequence[VenueMarket], clock: Clock) -> AbstractAsyncContextManager[MarketStream]:
        """Open a stream of the markets. Raise `StreamUnreachable` if it cannot be opened."""
        ...

    async def close(self) -> None: ...


def make_venue_source(api: MarketApi, settings: Settings, rows: Mapping[str, SimulatedMarket]) -> "VenueSource":
    """Return the source of a venue's prices. Only the simulator trades on polled books."""
    poll_every = timedelta(milliseconds=settings.refresh_interval_ms) if settings.trading_mode == "simulated" else None
    return VenueSource(api, settings.markets, rows, poll_every=poll_every)


class VenueSource:
    """The venue's markets. Publishes changes every `pulse_s` seconds and rereads the rules every `rules_every`.

    While the WebSocket cannot be opened, polls the books every `poll_every`; if None, there are no books then.
    """

    name = "venue"
    ends_at: datetime | None = None

    def __init__(
        self,
        api: MarketApi,
        symbols: Sequence[str],
        rows: Mapping[str, SimulatedMarket] = SIMULATED_MARKETS,
        *,
        pulse_s: float = _PULSE_S,
        rules_every: timedelta = _RULES_EVERY,
        poll_every: timedelta | None = None,
    ) -> None:
        self.identity = f"venue:{api.venue}"
        self._api = api
        self._symbols = tuple(symbols)
        self._pulse_s = pulse_s
        self._rules_every = rules_every
        self._poll_every = poll_every
        self._is_polled = False
        self._rows = {**SIMULATED_MARKETS, **rows}
        self._rules = {symbol: self._rows[symbol].rules for symbol in symbols if symbol in self._rows}
        self._listings: Mapping[str, Listing] | None = None
        self._followed: dict[str, VenueMarket] = {}
        self._refreshing: asyncio.Task[Mapping[str, Listing]] | None = None
        self._refresh_at: datetime | None = None
        self.markets: Mapping[str, Market] = MappingProxyType(self._rules)
        """A live view: the built-in rules until the venue answers, then the venue's present rules."""

    async def open(self) -> None:
        """Load the rules if the venue answers; otherwise load them once it does."""
        try:
            await self._load_listings()
        except MarketDataError as error:
            logger.warning("the venue does not answer; the service continues without prices: %s", error)

    async def close(self) -> None:
        """Close the connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await self._api.close()

    def clock(self, resume_at: datetime | None) -> Clock:
        return SystemClock()

    def trouble(self, symbol: str) -> str | None:
        """Return why a market has no tradable price now; None when it has one or is not followed."""
        market = self._followed.get(symbol)
        return None if market is None else market.trouble

    def listing(self, symbol: str) -> Listing | None:
        """Return a market as the venue lists it; None if it does not, and before it answers."""
        return (self._listings or {}).get(symbol)

    @property
    def refresh_every(self) -> timedelta:
        """The present interval between books; zero while the venue pushes them."""
        return self._poll_every if self._is_polled and self._poll_every is not None else timedelta(0)

    # The stream

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        listings = await self._load_listings()
        active = {symbol for symbol, listing in listings.items() if listing.is_active}
        followed = [self._followed[symbol] for symbol in self._symbols if symbol in active]
        if not followed:
            raise MarketDataError(f"the venue trades none of {', '.join(self._symbols)}")
        async with AsyncExitStack() as stack:
            stream = await self._open_stream(stack, followed, clock)
            while True:
                if stream is None:
                    await self._poll(followed, listings, clock, after)
                else:
                    await stream.receive_for(self._pulse_s)
                if after - clock.now() > SET_BACK_LEAST:  # earlier messages now have times in the future
                    raise MarketDataError("the clock of this machine was set back; everything is requested again")
                now = max(clock.now(), after + _INSTANT)
                quotes = {market.symbol: quote for market in followed if (quote := market.quote(now)) is not None}
                if quotes:
                    after = now
                    await clock.advance_to(now)
                    yield Tick(now, quotes)
                self._refresh_rules_when_due(now)
                if stream is None:
                    await clock.sleep_until(now + self.refresh_every)
                    stream = await self._open_stream(stack, followed, clock)

    async def _open_stream(
        self, stack: AsyncExitStack, followed: Sequence[VenueMarket], clock: Clock
    ) -> MarketStream | None:
        """Return an open stream, which the stack closes; None while the books must be polled instead."""
        for market in followed:
            market.disconnect()  # a stream starts with its own snapshots
        try:
            stream = await stack.enter_async_context(self._api.stream(followed, clock))
        except StreamUnreachable as error:
            if self._poll_every is None:
                raise
            if not self._is_polled:
                seconds = self._poll_every.total_seconds()
                logger.warning("the venue's stream cannot be opened; books are read every %g s: %s", seconds, error)
            self._is_polled = True
            return None
        self._is_polled = False
        return stream

    async def _poll(
        self, followed: Sequence[VenueMarket], listings: Mapping[str, Listing], clock: Clock, after: datetime
    ) -> None:
        """Poll the books, and the funding rates that became due since `after`."""
        books = await asyncio.gather(*(self._api.book(market.market_id) for market in followed))
        now = clock.now()
        for market, book in zip(followed, books, strict=True):
            try:
                market.on_whole_book(book, now)
            except MarketDataError as error:
                logger.warning("%s: %s", market.symbol, error)
            await self._load_rates(market.symbol, listings[market.symbol], after, now)

    # The rules

    async def _load_listings(self) -> Mapping[str, Listing]:
        """Return the venue's markets, loaded on the first call that succeeds."""
        if self._listings is None:
            self._apply_rules(await self._api.listings())
        assert self._listings is not None
        return self._listings

    def _apply_rules(self, listings: Mapping[str, Listing]) -> None:
        self._listings = listings
        for symbol in self._symbols:
            listing = listings.get(symbol)
            if listing is None:
                logger.warning("MARKETS names %s, which the venue does not list", symbol)
                continue
            if not listing.is_active:
                logger.warning("the venue does not trade %s now", symbol)
            if self._rules.get(symbol) != listing.market:
                logger.info("the venue's rules of %s: %s", symbol, listing.market)
                self._rules[symbol] = listing.market
            known = self._followed.get(symbol)
            if known is None or known.market_id != listing.market_id:
                self._followed[symbol] = VenueMarket(symbol, listing.market_id)

    def _refresh_rules_when_due(self, now: datetime) -> None:
        """Reload the market rules in the background when due, and apply them once loaded."""
        if self._refreshing is not None and self._refreshing.done():
            refreshed, self._refreshing = self._refreshing, None
            error = refreshed.exception()
            if error is None:
                self._apply_rules(refreshed.result())
            else:
                bug = None if isinstance(error, MarketDataError) else error
                logger.warning("the venue's rules could not be reloaded: %s", error, exc_info=bug)
        if self._refresh_at is None:
            self._refresh_at = now + self._rules_every
        elif interval_elapsed(self._refresh_at, self._rules_every, now) and self._refreshing is None:
            self._refresh_at = now + self._rules_every
            self._refreshing = asyncio.create_task(self._reload(now), name="venue rules")

    async def _reload(self, now: datetime) -> Mapping[str, Listing]:
        """Return the venue's markets, and load the funding rates that its stream does not tell."""
        listings = await self._api.listings()
        for symbol in () if self._api.streams_rates else self._followed.keys() & listings.keys():
            await self._load_rates(symbol, listings[symbol], now - 2 * _HOUR, now)
        return listings

    # History

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        """Yield the paths of the 1-minute candles in (after, until] of the markets with known depth.

        A market without known depth has no ticks: its fills are not guessed, and its stops and resting orders meet the
        first book after the gap.
        Only the close of a minute that began before `after` is used: how it moved before `after` is unknown.
        The candle of `until` is still forming; its path is compressed to end there.
        """
        start = floor_time(after, _MINUTE)
        if until <= start + _MINUTE:
            return
        listings = await self._load_listings()
        for symbol in self._symbols:
            if (listing := listings.get(symbol)) is not None:
                await self._load_rates(symbol, listing, after, until)
        while start < until:
            stop = min(until, start + _CANDLES_PER_STEP * _MINUTE)
            minutes = await self._minutes(listings, start, stop)
            for minute in sorted(minutes):
                for at, second in _corners(minute, after, until):
                    yield Tick(at, {played.symbol: played.quote(second, at) for played in minutes[minute]})
            start = stop

    async def _minutes(
        self, listings: Mapping[str, Listing], start: datetime, stop: datetime
    ) -> dict[datetime, list[CandlePath]]:
        minutes: dict[datetime, list[CandlePath]] = {}
        for symbol in self._symbols:
            listing, row = listings.get(symbol), self._rows.get(symbol)
            if listing is None or row is None:
                continue
            grid = Grid(self._rules[symbol])
            model = BookModel(grid, row.calm)
            rows = Minutes()
            with spending_as(Priority.READ, _HISTORY_PATIENCE_S):
                candles = await self._api.candles(listing.market_id, "1m", start, stop)
            for candle in candles:
                rows.append(FileRow(epoch_second(candle.open_time) // 60, *candle[1:]))
            day = TrailingDay(float(grid.market.tick), rows)
            before: list[int] = []
            for place in range(len(rows)):
                marks = marks_of_candle(grid, rows[place])
                path = CandlePath(
                    model, marks, before=before, usual_range=day.usual_range(place), busyness=day.busyness(place)
                )
                minutes.setdefault(moment_of(rows.minute[place] * 60), []).append(path)
                before = marks
        return minutes

    async def _load_rates(self, symbol: str, listing: Listing, after: datetime, until: datetime) -> None:
        """Load the funding rates of the hours in (after, until]."""
        first, last = ceil_time(after, _HOUR), floor_time(until, _HOUR)
        if first <= last:
            for at, rate in (await self._api.fundings(listing.market_id, first, last)).items():
                self._followed[symbol].record_rate(at, rate)

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        listing = (await self._load_listings()).get(symbol)
        if listing is None or symbol not in self._symbols:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span = INTERVALS[interval]
        candles = await self._api.candles(listing.market_id, interval, ceil_time(start, span), end)
        return [candle for candle in candles if candle.open_time + span <= end]

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        """Return the rate settled at the hour if it is known, else the venue's estimate of the next one."""
        market = self._followed.get(symbol)
        if market is None:
            return PLAIN_FUNDING_RATE
        settled = market.rates.get(boundary, market.next_rate)
        return PLAIN_FUNDING_RATE if settled is None else settled

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        market = self._followed.get(symbol)
        return None if market is None else market.rates.get(boundary)

    def open_interest(self, symbol: str) -> Decimal | None:
        market = self._followed.get(symbol)
        return None if market is None else market.open_interest


def _corners(minute: datetime, after: datetime, until: datetime) -> list[tuple[datetime, int]]:
    """Return the times at which a minute's path turns, with their offsets on the path in seconds."""
    span = min(_MINUTE, until - minute)
    corners = [(minute + span * second / 60, second) for second in _CORNERS_S]
    if minute < after:
        corners = corners[-1:] if span == _MINUTE else []
    return [(at, second) for at, second in corners if after < at <= until]
