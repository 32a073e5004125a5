"""Market source of Lighter's public data: books and marks from its stream; rules, candles and funding on request.

No credentials are needed. While the venue is silent there are no prices: nothing is made up.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Final

from trader.clock import (
    SET_BACK_LEAST,
    Clock,
    SystemClock,
    ceil_time,
    epoch_second,
    floor_time,
    interval_elapsed,
    moment_of,
)
from trader.domain.market.markets import (
    INTERVALS,
    PLAIN_FUNDING_RATE,
    SIMULATED_MARKETS,
    Candle,
    Interval,
    Market,
    SimulatedMarket,
    Tick,
)
from trader.errors import MarketDataError, MarketUnavailable
from trader.gateways.lighter.api import CANDLES_PER_CALL, LighterApi, Listing
from trader.gateways.lighter.market import LighterMarket
from trader.gateways.lighter.stream import open_stream
from trader.gateways.market.books import (
    CLOSE_S,
    FURTHER_S,
    NEARER_S,
    BookModel,
    CandlePath,
    Grid,
    TrailingDay,
    marks_of_candle,
)
from trader.gateways.market.files import Minutes, Row

logger = logging.getLogger(__name__)

_PULSE_S: Final = 0.25
_RULES_EVERY: Final = timedelta(hours=1)
_INSTANT: Final = timedelta(milliseconds=1)
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_CORNERS_S: Final = (0, NEARER_S, NEARER_S + 1, FURTHER_S, FURTHER_S + 1, CLOSE_S)
"""The seconds of a missed minute that have a tick. What an extreme triggers meets a book a second after it."""


class VenueSource:
    """The venue's markets. Changes are published every `pulse_s` seconds; rules are read again every `rules_every`."""

    name = "venue"
    identity = "venue:lighter"
    ends_at: datetime | None = None

    def __init__(
        self,
        api: LighterApi,
        symbols: Sequence[str],
        rows: Mapping[str, SimulatedMarket] = SIMULATED_MARKETS,
        *,
        pulse_s: float = _PULSE_S,
        rules_every: timedelta = _RULES_EVERY,
    ) -> None:
        self._api = api
        self._symbols = tuple(symbols)
        self._pulse_s = pulse_s
        self._rules_every = rules_every
        self._rows = {**SIMULATED_MARKETS, **rows}
        self._rules = {symbol: self._rows[symbol].rules for symbol in symbols if symbol in self._rows}
        self._listings: Mapping[str, Listing] | None = None
        self._followed: dict[str, LighterMarket] = {}
        self._refreshing: asyncio.Task[Mapping[str, Listing]] | None = None
        self._refresh_at: datetime | None = None
        self.markets: Mapping[str, Market] = MappingProxyType(self._rules)
        """A live view: the built-in rules until the venue has answered, then the venue's present ones."""

    async def open(self) -> None:
        """Load the rules if the venue answers; if not, they are loaded when it does."""
        try:
            await self._load_listings()
        except MarketDataError as error:
            logger.warning("the venue does not answer; the service goes on without prices: %s", error)

    async def close(self) -> None:
        """Close the connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await self._api.close()

    def clock(self, resume_at: datetime | None) -> Clock:
        return SystemClock()

    def trouble(self, symbol: str) -> str | None:
        """Return why a market has no price to trade on now; None when it has, or is not followed."""
        market = self._followed.get(symbol)
        return None if market is None else market.trouble

    # The stream

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        listings = await self._load_listings()
        followed = [self._followed[symbol] for symbol in self._symbols if _is_followed(listings.get(symbol))]
        if not followed:
            raise MarketDataError(f"the venue trades none of {', '.join(self._symbols)}")
        async with open_stream(self._api.session(), self._api.base_url, followed, clock) as stream:
            while True:
                await stream.receive_for(self._pulse_s)
                if after - clock.now() > SET_BACK_LEAST:  # the times of earlier messages are in the future now
                    raise MarketDataError("the clock of this machine was set back; everything is requested again")
                now = max(clock.now(), after + _INSTANT)
                quotes = {market.symbol: quote for market in followed if (quote := market.quote(now)) is not None}
                if quotes:
                    after = now
                    await clock.advance_to(now)
                    yield Tick(now, quotes)
                self._refresh_rules_when_due(now)

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
                self._followed[symbol] = LighterMarket(symbol, listing.market_id)

    def _refresh_rules_when_due(self, now: datetime) -> None:
        """Reload the market rules in the background when they are due, and apply them once loaded."""
        if self._refreshing is not None and self._refreshing.done():
            refreshed, self._refreshing = self._refreshing, None
            error = refreshed.exception()
            if error is None:
                self._apply_rules(refreshed.result())
            else:
                bug = None if isinstance(error, MarketDataError) else error
                logger.warning("the venue's rules could not be read again: %s", error, exc_info=bug)
        if self._refresh_at is None:
            self._refresh_at = now + self._rules_every
        elif interval_elapsed(self._refresh_at, self._rules_every, now) and self._refreshing is None:
            self._refresh_at = now + self._rules_every
            self._refreshing = asyncio.create_task(self._api.listings(), name="venue rules")

    # History

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        """Yield the paths of the 1-minute candles in (after, until], of the markets whose depth is known.

        A market whose depth is not known has no ticks: what its book could have filled is not guessed, and its stops
        and resting orders meet the first book after the gap.
        Of a minute that began before `after` only the close is used: what came before `after` within it is not known.
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
            stop = min(until, start + CANDLES_PER_CALL * _MINUTE)
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
            for candle in await self._api.candles(listing.market_id, "1m", start, stop):
                rows.append(Row(epoch_second(candle.open_time) // 60, *candle[1:]))
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

    def open_interest(self, symbol: str) -> Decimal | None:
        market = self._followed.get(symbol)
        return None if market is None else market.open_interest


def _is_followed(listing: Listing | None) -> bool:
    return listing is not None and listing.is_active


def _corners(minute: datetime, after: datetime, until: datetime) -> list[tuple[datetime, int]]:
    """Return the moments at which a minute's path turns, with their places on the path in seconds."""
    span = min(_MINUTE, until - minute)
    corners = [(minute + span * second / 60, second) for second in _CORNERS_S]
    if minute < after:
        corners = corners[-1:] if span == _MINUTE else []
    return [(at, second) for at, second in corners if after < at <= until]
