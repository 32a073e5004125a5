"""The venue's books by request, SIM_REFRESH_INTERVAL_MS apart, while its WebSocket cannot be opened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from aiohttp import web
from support.fake_venue import FakeVenue, fake_venue
from support.manual_clock import ManualClock
from support.waiting import until

from trader.composition.external import make_source
from trader.live.source import VenueSource
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

START = datetime(2026, 3, 4, 5, 59, 55, tzinfo=UTC)
INTERVAL = timedelta(seconds=7)
BOOKS = "/api/v1/orderBookOrders"


class Polled:
    """A feed that follows the venue of the settings, in the test's time."""

    def __init__(self, venue: FakeVenue, **environ: str) -> None:
        texts = {"VENUE_URL": venue.url, "MARKETS": "BTC", "SIM_REFRESH_INTERVAL_MS": "7000", **environ}
        source = make_source(Settings.load({"OPENAI_API_KEY": "sk-test", **texts}, None, demo=False))
        assert isinstance(source, VenueSource)
        self.venue, self.source, self.clock = venue, source, ManualClock(START)
        self.feed = MarketFeed(source, self.clock)
        self.ticks: list[Tick] = []
        self._task = asyncio.create_task(self.feed.run(self._note, START))

    async def _note(self, tick: Tick) -> None:
        self.ticks.append(tick)

    def times(self) -> list[datetime]:
        return [tick.at for tick in self.ticks]

    def books_read(self) -> int:
        return sum(path == BOOKS for path, _ in self.venue.asked)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.source.close()


@pytest.fixture
async def venue() -> AsyncIterator[FakeVenue]:
    async with fake_venue() as venue:
        venue.refuses_streams = True
        yield venue


@pytest.fixture
async def polled(venue: FakeVenue) -> AsyncIterator[Polled]:
    polled = Polled(venue)
    try:
        await until(lambda: polled.ticks)
        yield polled
    finally:
        await polled.close()


async def test_the_next_book_is_read_when_the_interval_has_passed(venue: FakeVenue, polled: Polled) -> None:
    first = polled.ticks[0].at
    quote = polled.ticks[0].quotes["BTC"]
    assert (quote.bid, quote.ask, quote.mark) == (Decimal("93999.9"), Decimal("94000.1"), Decimal(94000))
    assert [(level.price, level.quantity) for level in quote.book.bids[:2]] == [
        (Decimal("93999.9"), Decimal("0.1")),
        (Decimal("93999.8"), Decimal("0.2")),
    ], "the orders of a level are one level"
    assert polled.source.refresh_every == INTERVAL
    venue.markets["BTC"].place(Decimal(94010))
    await polled.clock.advance(INTERVAL - timedelta(milliseconds=1))
    assert (polled.books_read(), len(polled.ticks)) == (1, 1)
    await polled.clock.advance(timedelta(milliseconds=1))
    await until(lambda: len(polled.ticks) == 2)
    assert polled.times() == [first, first + INTERVAL]
    assert (polled.books_read(), polled.ticks[1].quotes["BTC"].mark) == (2, Decimal(94010))


async def test_an_order_waits_for_the_next_book(polled: Polled) -> None:
    waiting = asyncio.create_task(polled.feed.quote_after("BTC", START + timedelta(milliseconds=200)))
    await polled.clock.advance(INTERVAL)
    async with asyncio.timeout(10):
        assert (await waiting).at == polled.ticks[0].at + INTERVAL


async def test_the_stream_takes_over_as_soon_as_it_opens(venue: FakeVenue, polled: Polled) -> None:
    venue.refuses_streams = False
    await polled.clock.advance(INTERVAL)
    await until(lambda: venue.subscriptions and len(polled.ticks) == 2)
    assert polled.books_read() == 1
    assert polled.source.refresh_every == timedelta(0)
    await venue.move("BTC", "94020.0")
    await polled.clock.advance(timedelta(milliseconds=1))
    await until(lambda: polled.ticks[-1].quotes["BTC"].bid == Decimal("94019.9"))


async def test_due_funding_is_read_with_the_book(venue: FakeVenue, polled: Polled) -> None:
    hour = START + timedelta(seconds=5)
    venue.funding_rows[1] = [{"timestamp": int(hour.timestamp()), "rate": "0.0020", "direction": "short"}]
    await polled.clock.advance(INTERVAL)
    await until(lambda: len(polled.ticks) == 2)
    assert polled.source.funding_rate("BTC", hour) == Decimal("-0.00002")


async def test_requests_that_fail_take_the_source_down_and_up_again(venue: FakeVenue, polled: Polled) -> None:
    venue.answers = [web.Response(status=502, text="bad gateway")]
    await polled.clock.advance(INTERVAL)
    await until(lambda: polled.feed.last_error)
    assert f"{BOOKS}: the venue answered with status 502: bad gateway" in (polled.feed.troubles() or "")
    await polled.clock.advance(timedelta(seconds=1))
    await until(lambda: len(polled.ticks) == 2)
    assert polled.feed.troubles() is None


async def test_live_trading_reads_no_books_by_request(venue: FakeVenue) -> None:
    keys = {
        "VENUE_API_KEY": "11" * 40,
        "VENUE_ACCOUNT_INDEX": "7",
        "LIVE_CONFIRM": "7",
        "API_TOKEN": "open-sesame-0123456789",
    }
    polled = Polled(venue, TRADING_MODE="live", **keys)
    try:
        await until(lambda: polled.feed.last_error)
        assert (polled.books_read(), polled.ticks) == (0, [])
    finally:
        await polled.close()
