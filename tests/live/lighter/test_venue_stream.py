"""The venue's stream: books and marks from a server on loopback, and how its faults are handled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime, timedelta
from decimal import Decimal
from typing import cast

import orjson
import pytest
from aiohttp import web
from support.books import DEFAULT_MARKETS
from support.fake_venue import FakeVenue, fake_venue
from support.feed import START
from support.manual_clock import ManualClock
from support.settable_clock import SettableClock
from support.waiting import until

from trader.core.errors import MarketDataError
from trader.live.lighter.api import LighterApi
from trader.live.market import Listing, VenueMarket
from trader.live.socket import MarketStream, Socket
from trader.live.source import VenueSource
from trader.market.domain.markets import MARKETS, Quote, Tick

D = Decimal
SYMBOLS = ("BTC", "ETH")


class Follower:
    """Follows a source, and records its ticks and its end."""

    def __init__(self, source: VenueSource) -> None:
        self.source = source
        self.clock = SettableClock()
        self.ticks: list[Tick] = []
        self.quotes: dict[str, Quote] = {}
        self.error: MarketDataError | None = None

    async def follow(self) -> None:
        try:
            async for tick in self.source.ticks(self.clock, self.clock.now()):
                self.ticks.append(tick)
                self.quotes.update(tick.quotes)
        except MarketDataError as error:
            self.error = error

    async def sees(self, mid: int | str) -> None:
        await until(lambda: self.mid() == D(mid))

    def mid(self, symbol: str = "BTC") -> Decimal | None:
        quote = self.quotes.get(symbol)
        return None if quote is None else (quote.bid + quote.ask) / 2


@asynccontextmanager
async def following(
    venue: FakeVenue, *symbols: str, rules_every: timedelta = timedelta(hours=1)
) -> AsyncIterator[Follower]:
    api = LighterApi(venue.url, pause_s=0.01)
    source = VenueSource(api, symbols or SYMBOLS, pulse_s=0.01, rules_every=rules_every)
    follower = Follower(source)
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await source.close()


@pytest.fixture
async def venue() -> AsyncIterator[FakeVenue]:
    async with fake_venue() as venue:
        yield venue


@pytest.fixture
async def follower(venue: FakeVenue) -> AsyncIterator[Follower]:
    async with following(venue) as follower:
        await until(lambda: len(follower.quotes) == 2)
        await until(lambda: follower.source.funding_rate("BTC", follower.clock.now()) == D("0.000012"))
        yield follower


# Data


async def test_books_and_marks_equal_the_venues(venue: FakeVenue, follower: Follower) -> None:
    venue.markets["BTC"].mark = D("94003.7")
    await venue.summarize("BTC")
    await until(lambda: follower.quotes["BTC"].mark == D("94003.7"))
    quote = follower.quotes["BTC"]
    assert (quote.bid, quote.ask) == (D("93999.9"), D("94000.1"))
    assert [(level.price, level.quantity) for level in quote.book.bids[:2]] == [
        (D("93999.9"), D("0.1")),
        (D("93999.8"), D("0.2")),
    ]
    assert (len(quote.book.bids), len(quote.book.asks)) == (5, 5)
    assert quote.book.at == quote.at
    assert (follower.quotes["ETH"].bid, follower.quotes["ETH"].mark) == (D("3299.99"), D("3300.00"))


async def test_the_book_follows_every_change_and_a_quote_keeps_the_book_of_its_moment(
    venue: FakeVenue, follower: Follower
) -> None:
    early = follower.quotes["BTC"]
    for step in range(1, 40):
        await venue.move("BTC", f"{94000 + step * D('0.3')}")
    await until(lambda: follower.mid() == D("94011.7"))
    market = venue.markets["BTC"]
    book = follower.quotes["BTC"].book
    assert {level.price: level.quantity for level in book.bids} == {D(p): D(s) for p, s in market.bids.items()}
    assert {level.price: level.quantity for level in book.asks} == {D(p): D(s) for p, s in market.asks.items()}
    assert early.book.bids[0].price == D("93999.9")
    times = [tick.at for tick in follower.ticks]
    assert times == sorted(set(times))


async def test_an_unchanged_price_is_published_once_a_second(venue: FakeVenue, follower: Follower) -> None:
    await until(lambda: "BTC" in follower.ticks[-1].quotes or len(follower.ticks) > 5)
    count = len(follower.ticks)
    follower.clock.shift += timedelta(seconds=1)
    await until(lambda: len(follower.ticks) > count)
    assert set(follower.ticks[count].quotes) == {"BTC", "ETH"}
    assert follower.source.trouble("BTC") is None


async def test_only_the_markets_asked_for_are_followed_without_credentials(
    venue: FakeVenue, follower: Follower
) -> None:
    assert {asked["channel"] for asked in venue.heard if asked["type"] == "subscribe"} == {
        f"{kind}/{market_id}" for kind in ("order_book", "market_stats") for market_id in (0, 1)
    }


async def test_pings_are_answered_and_unknown_messages_are_ignored(venue: FakeVenue, follower: Follower) -> None:
    await venue.say('{"type":"ping"}')
    await venue.say('{"type":"update/height","channel":"height","height":123}')
    await venue.say('{"type":"update/trade","channel":"trade:1","trades":[]}')
    await venue.say('{"type":"error","channel":"order_book:9","code":30012,"message":"failed to subscribe"}')
    await venue.move("BTC", "94001.0")
    await until(lambda: follower.mid() == 94001 and {"type": "pong"} in venue.heard)
    assert follower.error is None


async def test_the_stream_is_kept_alive_by_pings(venue: FakeVenue, follower: Follower) -> None:
    for step in range(1, 9):
        assert {"type": "ping"} not in venue.heard
        follower.clock.shift += timedelta(seconds=4)
        venue.lag_ms -= 4000
        for symbol, mid in (("ETH", 3300 + step), ("BTC", 94000 + step)):
            await venue.move(symbol, f"{mid}.0")
        await follower.sees(mid)
    await until(lambda: {"type": "ping"} in venue.heard)  # after half a minute, with the next pulse
    assert follower.error is None


# Rules


async def test_the_venues_rules_replace_the_built_in_ones(venue: FakeVenue) -> None:
    source = VenueSource(LighterApi(venue.url), ("BTC", "ETH", "SOL"))
    markets = source.markets
    assert markets == DEFAULT_MARKETS
    await source.open()
    btc = markets["BTC"]
    assert (btc.tick, btc.lot, btc.leverage_max, btc.maintenance_rate) == (D("0.1"), D("0.0001"), 50, D("0.012"))
    assert btc.min_notional == D("470.00000")  # 0.005 at 94000 is more than 10
    assert markets["SOL"].min_notional == 10
    await source.close()


async def test_rules_are_reloaded_and_applied(venue: FakeVenue) -> None:
    async with following(venue, rules_every=timedelta(milliseconds=50)) as follower:
        await until(lambda: follower.quotes)
        assert follower.source.markets["BTC"].leverage_max == 50
        venue.markets["BTC"].changes = {"min_initial_margin_fraction": 250}
        venue.answers.append(web.Response(status=500))
        await until(lambda: follower.source.markets["BTC"].leverage_max == 40)
        assert not venue.answers
        assert follower.error is None


async def test_a_bug_while_reading_rules_is_logged_and_the_read_repeated(
    venue: FakeVenue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: LighterApi) -> dict[str, Listing]:
        raise KeyError("no such thing")

    async with following(venue, rules_every=timedelta(milliseconds=50)) as follower:
        await until(lambda: follower.quotes)
        with monkeypatch.context() as patch:
            patch.setattr(LighterApi, "listings", broken)
            await until(lambda: "in broken" in caplog.text)
        venue.markets["BTC"].changes = {"min_initial_margin_fraction": 250}
        await until(lambda: follower.source.markets["BTC"].leverage_max == 40)
        assert follower.error is None


async def test_impossible_rules_and_unknown_markets_keep_the_current_rules(venue: FakeVenue) -> None:
    venue.markets["ETH"].changes = {"maintenance_margin_fraction": 0}
    async with following(venue, "BTC", "ETH", "PEPE") as follower:
        await until(lambda: follower.quotes)
        assert set(follower.quotes) == {"BTC"}
        assert follower.source.markets["ETH"] == MARKETS["ETH"]
        assert "PEPE" not in follower.source.markets


async def test_a_market_that_the_venue_has_halted_is_not_priced(venue: FakeVenue) -> None:
    venue.markets["ETH"].status = "inactive"
    async with following(venue) as follower:
        await until(lambda: follower.quotes)
        assert set(follower.quotes) == {"BTC"}
    venue.markets["BTC"].status = "inactive"
    async with following(venue) as follower:
        await until(lambda: follower.error)
        assert "trades none of BTC, ETH" in str(follower.error)


# Faults of the connection


async def test_a_venue_that_is_down_does_not_stop_the_start(venue: FakeVenue) -> None:
    await venue.stop()
    source = VenueSource(LighterApi(venue.url), SYMBOLS, pulse_s=0.01)
    await source.open()
    assert source.markets["BTC"] == MARKETS["BTC"]
    clock = SettableClock()
    with pytest.raises(MarketDataError, match="cannot be reached"):
        await anext(aiter(source.ticks(clock, clock.now())))
    await venue.start()
    async with aclosing(source.ticks(clock, clock.now())) as ticks:  # type: ignore[type-var]
        assert (await anext(ticks)).quotes
    assert source.markets["BTC"].leverage_max == 50
    await source.close()


async def test_a_cut_connection_is_an_error_and_the_next_begins_with_a_snapshot(
    venue: FakeVenue, follower: Follower
) -> None:
    await venue.cut()
    await until(lambda: follower.error)
    assert "ended the stream" in str(follower.error)
    await venue.move("BTC", "94100.0")
    again = Follower(follower.source)
    task = asyncio.create_task(again.follow())
    await until(lambda: again.mid() == 94100)
    task.cancel()


class Subscriptions(MarketStream):
    """A stream that says nothing; `made` are its subscriptions: of a market, and whether to its book."""

    def __init__(self, market: VenueMarket, clock: ManualClock) -> None:
        super().__init__(cast("Socket", None), [market], clock)
        self.made: list[tuple[int, bool]] = []

    async def subscribe(self, market_id: int, *, to_book: bool, again: bool = False) -> None:
        self.made.append((market_id, to_book))

    async def receive(self, seconds: float) -> bool:
        return False


async def test_each_stream_subscribes_to_its_books_at_once() -> None:
    market, clock = VenueMarket("BTC", 1), ManualClock(START)
    for _ in range(2):
        async with Subscriptions(market, clock).opened() as stream:
            for _look in range(2):
                await stream.receive_for(0.0)
            assert stream.made == [(1, False), (1, True)]


async def test_a_silent_stream_is_ended(venue: FakeVenue, follower: Follower) -> None:
    venue.is_mute = True
    follower.clock.shift += timedelta(seconds=21)
    await until(lambda: follower.error)
    assert "silent for 20 s" in str(follower.error)


async def test_an_invalid_message_ends_the_connection(venue: FakeVenue, follower: Follower) -> None:
    await venue.say("<html>502 Bad Gateway</html>")
    await until(lambda: follower.error)
    assert "cannot be decoded" in str(follower.error)


# Faults of one market


async def test_a_lost_change_is_detected_and_the_book_requested_again(venue: FakeVenue, follower: Follower) -> None:
    await venue.move("BTC", "94100.0", is_lost=True)
    await venue.move("BTC", "94101.0")
    await until(lambda: follower.mid() == 94101)
    asked = [
        (request["type"], request["channel"]) for request in venue.heard if request.get("channel") == "order_book/1"
    ]
    assert asked == [("subscribe", "order_book/1"), ("unsubscribe", "order_book/1"), ("subscribe", "order_book/1")]
    market = venue.markets["BTC"]
    await venue.move("BTC", "94102.0")
    await until(lambda: follower.mid() == 94102)
    assert [level.price for level in follower.quotes["BTC"].book.bids] == [D(price) for price in market.bids]
    assert follower.error is None


async def test_a_repeated_change_has_no_effect(venue: FakeVenue, follower: Follower) -> None:
    market = venue.markets["BTC"]
    late = {"begin_nonce": market.nonce - 17, "nonce": market.nonce, "bids": [{"price": "93999.9", "size": "0"}]}
    await venue.tell_book("update", market, late)
    await venue.move("BTC", "94000.0")
    await venue.move("ETH", "3301.00")
    await until(lambda: follower.mid("ETH") == 3301)
    assert follower.mid() == 94000
    assert follower.source.trouble("BTC") is None


@pytest.mark.parametrize(
    "levels",
    [
        {"bids": [{"price": "-1", "size": "1"}]},
        {"bids": [{"price": "NaN", "size": "1"}]},
        {"bids": [{"price": "94000.0", "size": "Infinity"}]},
        {"asks": [{"price": "94000.3", "size": "-0.1"}]},
        {"asks": [{"price": "93000.0", "size": "0.1"}]},
        {"asks": [{"price": "ninety", "size": "0.1"}]},
        {"asks": [["94000.3", "0.1"]]},
        {"nonce": "many"},
    ],
)
async def test_an_impossible_book_is_requested_again_and_never_published(
    venue: FakeVenue, follower: Follower, levels: dict[str, object]
) -> None:
    market = venue.markets["BTC"]
    before = market.nonce
    market.nonce += 3
    await venue.tell_book("update", market, {"begin_nonce": before, **levels})
    await until(lambda: sum(request.get("channel") == "order_book/1" for request in venue.heard) >= 3)
    await venue.move("BTC", "94001.0")
    await until(lambda: follower.mid() == 94001)
    mids = {(quote.bid + quote.ask) / 2 for tick in follower.ticks if (quote := tick.quotes.get("BTC")) is not None}
    assert mids == {D(94000), D(94001)}
    assert follower.error is None


async def test_a_broken_book_is_requested_at_most_once_a_second(venue: FakeVenue, follower: Follower) -> None:
    for _ in range(20):
        await venue.move("BTC", "94100.0", is_lost=True)
        await venue.move("BTC", "94101.0")
        await asyncio.sleep(0.01)  # so that each comes in a separate turn
    assert sum(request == {"type": "subscribe", "channel": "order_book/1"} for request in venue.heard) <= 3


async def test_a_book_with_an_empty_side_has_no_price(venue: FakeVenue, follower: Follower) -> None:
    market = venue.markets["BTC"]
    gone = [{"price": price, "size": "0"} for price in market.asks]
    before = market.nonce
    market.nonce += 5
    await venue.tell_book("update", market, {"begin_nonce": before, "asks": gone})
    await until(lambda: follower.source.trouble("BTC") == "a side of its order book is empty")
    market.asks.clear()
    await venue.move("BTC", "94001.0")
    await until(lambda: follower.mid() == 94001 and follower.source.trouble("BTC") is None)


async def test_a_book_silent_for_ten_seconds_is_withheld_and_requested(venue: FakeVenue, follower: Follower) -> None:
    venue.is_mute = True
    venue.lag_ms = -11_000
    follower.clock.shift += timedelta(seconds=11)
    await until(lambda: follower.source.trouble("BTC"))
    assert follower.source.trouble("BTC") == "its order book was silent for 10 s"
    await until(lambda: venue.heard.count({"type": "subscribe", "channel": "order_book/1"}) == 2)  # which gets lost
    await venue.say('{"type":"pong"}')  # the answer to an older question changes nothing
    await venue.say('{"type":"ping"}')
    await until(lambda: {"type": "pong"} in venue.heard)
    assert follower.source.trouble("BTC") is not None
    venue.is_mute = False
    follower.clock.shift += timedelta(seconds=10)
    await until(lambda: follower.source.trouble("BTC") is None)
    assert follower.error is None


async def test_late_prices_are_stale(venue: FakeVenue, follower: Follower) -> None:
    venue.lag_ms = 31_000
    await venue.move("BTC", "94100.0")
    await until(lambda: follower.source.trouble("BTC"))
    assert "its prices are 31 s old when they arrive" in str(follower.source.trouble("BTC"))
    assert follower.mid() == 94000
    venue.lag_ms = 0
    await venue.move("BTC", "94101.0")
    await until(lambda: follower.mid() == 94101)


async def test_after_a_clock_was_set_back_everything_is_requested_again(venue: FakeVenue, follower: Follower) -> None:
    await follower.sees(94000)
    follower.clock.shift = -timedelta(hours=1)
    await until(lambda: follower.error is not None)
    assert "was set back" in str(follower.error)


# Outliers


async def test_an_outlier_is_reported_and_not_published(venue: FakeVenue, follower: Follower) -> None:
    market = venue.markets["BTC"]
    market.index = market.mark = D(94000)
    await venue.summarize("BTC")
    await venue.move("BTC", "98800.0")  # 5.1 % up
    await until(lambda: follower.source.trouble("BTC"))
    assert follower.source.trouble("BTC") == (
        "its price 98800.0 is an outlier: 5.1% from the last and 5.1% from the index"
    )
    assert follower.mid() == 94000
    market.index = market.mark = D(98700)  # the index agrees: the market has moved
    await venue.summarize("BTC")
    await until(lambda: follower.mid() == 98800)
    assert follower.source.trouble("BTC") is None


async def test_a_price_near_the_last_one_or_the_index_is_not_an_outlier(venue: FakeVenue, follower: Follower) -> None:
    market = venue.markets["BTC"]
    market.index = market.mark = D(94000)
    await venue.summarize("BTC")
    for mid in ("98000.0", "102000.0", "106000.0"):  # 13 % from the index in the end, each near the last
        await venue.move("BTC", mid)
        await follower.sees(mid)
    await venue.move("BTC", "94500.0")  # 11 % from the last, near the index
    await until(lambda: follower.mid() == D(94500))


async def test_an_outlying_mark_withholds_the_price_too(venue: FakeVenue, follower: Follower) -> None:
    market = venue.markets["BTC"]
    market.index, market.mark = D(94000), D(88000)
    await venue.summarize("BTC")
    await until(lambda: follower.source.trouble("BTC"))
    assert "its mark 88000 is an outlier: 6.4% from the last and 6.4% from the index" in str(
        follower.source.trouble("BTC")
    )
    await venue.move("BTC", "94010.0")
    await venue.move("ETH", "3301.00")
    await until(lambda: follower.mid("ETH") == 3301)
    assert {quote.mark for tick in follower.ticks for quote in tick.quotes.values() if quote.symbol == "BTC"} == {
        D("94000.0")
    }


async def test_an_impossible_summary_keeps_the_last_one(venue: FakeVenue, follower: Follower) -> None:
    for stats in ({"mark_price": "", "index_price": "1"}, {"mark_price": "0", "index_price": "1"}, {}, [1], "x"):
        body = {"type": "update/market_stats", "channel": "market_stats:1", "market_stats": stats}
        await venue.say(orjson.dumps(body).decode())
    await venue.move("BTC", "94001.0")
    await until(lambda: follower.mid() == 94001)
    assert follower.quotes["BTC"].mark == D("94000.0")
    assert follower.error is None


# Funding


async def test_funding_is_the_settled_rate_or_else_the_next_one(venue: FakeVenue, follower: Follower) -> None:
    settled_at = datetime.fromisoformat("2026-06-04T04:00:00+00:00")
    assert follower.source.funding_rate("BTC", settled_at) == D("-0.000005")
    assert follower.source.funding_rate("BTC", settled_at + timedelta(hours=1)) == D("0.000012")
    assert follower.source.funding_rate("DOGE", settled_at) == D("0.0000125")
