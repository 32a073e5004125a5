"""Random faults of the venue's market data: only prices of the venue are published, and its latest is recovered."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from random import Random

import pytest
from support.fake_venue import FakeMarket, FakeVenue, fake_venue
from support.run_profile import is_nightly
from support.waiting import until

from trader.core.clock import SystemClock
from trader.core.money import ZERO
from trader.live.lighter.api import LighterApi
from trader.live.source import VenueSource
from trader.market.domain.markets import Book, Tick
from trader.market.feed import MarketFeed

D = Decimal
SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "12" if is_nightly() else "6"))
STEPS = 40

Levels = frozenset[tuple[Decimal, Decimal]]
State = tuple[Levels, Levels]


class HastyClock(SystemClock):
    """Real time with short pauses between attempts to connect."""

    async def sleep_until(self, moment: datetime) -> None:
        await asyncio.sleep(0.01)


def state_of_book(book: Book) -> State:
    return frozenset((level.price, level.quantity) for level in book.bids), frozenset(
        (level.price, level.quantity) for level in book.asks
    )


def state_of(market: FakeMarket) -> State:
    return frozenset((D(price), D(size)) for price, size in market.bids.items()), frozenset(
        (D(price), D(size)) for price, size in market.asks.items()
    )


class Watcher:
    """Follows the source as the service does, and compares its published prices with the venue's."""

    def __init__(self, venue: FakeVenue) -> None:
        self.venue = venue
        self.source = VenueSource(LighterApi(venue.url, pause_s=0.001), ("BTC", "ETH"), pulse_s=0.005)
        self.clock = HastyClock()
        self.market = MarketFeed(self.source, self.clock)
        self.had: dict[str, set[State]] = {symbol: {state_of(venue.markets[symbol])} for symbol in ("BTC", "ETH")}
        self.absurd: set[State] = set()
        self.shown = 0
        self.last_at = self.clock.now()

    async def see(self, tick: Tick) -> None:
        assert tick.at > self.last_at
        self.last_at = tick.at
        for symbol, quote in tick.quotes.items():
            state = state_of_book(quote.book)
            assert state in self.had[symbol], f"{symbol} was never {quote.bid} / {quote.ask}"
            assert state not in self.absurd, f"{symbol} at {quote.bid} is an outlier"
            assert quote.bid < quote.ask
            assert quote.bid == quote.book.bids[0].price
            self.shown += 1

    async def move(self, random: Random, symbol: str, *, is_lost: bool = False, by: Decimal = ZERO) -> None:
        market = self.venue.markets[symbol]
        tick = D(1).scaleb(-market.price_decimals)
        mid = market.mid + tick * random.randint(-40, 40) + (market.mid * by).quantize(tick)
        # The venue has the state before it first sends it.
        saved = (dict(market.bids), dict(market.asks), market.mid)
        market.place(mid)
        self.had[symbol].add(state_of(market))
        if by:
            self.absurd.add(state_of(market))
        market.bids, market.asks, market.mid = saved
        await self.venue.move(symbol, f"{mid}", is_lost=is_lost)


async def one_fault(random: Random, watcher: Watcher, symbol: str) -> None:
    venue, market = watcher.venue, watcher.venue.markets[symbol]

    async def absurd() -> None:
        """A price off by a tenth, sent and then withdrawn, while the index stays."""
        market.index = market.mark = market.mid
        await venue.summarize(symbol)
        await asyncio.sleep(0.02)  # time to be heard, or not: both are cases
        mid = market.mid
        await watcher.move(random, symbol, by=D("0.1"))
        await asyncio.sleep(0.02)  # as above
        await venue.move(symbol, f"{mid}")
        market.index = market.mark = None

    async def outage() -> None:
        await venue.stop()
        await asyncio.sleep(0.03)  # some tries to connect fail
        await venue.start()

    async def lag() -> None:
        venue.lag_ms = 40_000
        await watcher.move(random, symbol)
        venue.lag_ms = 0

    before = market.nonce
    faults: list[Callable[[], Awaitable[None]]] = [
        lambda: watcher.move(random, symbol, is_lost=True),
        venue.cut,
        outage,
        absurd,
        lag,
        lambda: venue.say("<html>"),
        lambda: venue.say('{"type":"update/order_book","channel":"order_book:1","order_book":17}'),
        lambda: venue.say(
            '{"type":"update/market_stats","channel":"market_stats:0","market_stats":{"mark_price":"x"}}'
        ),
        lambda: venue.tell_book("update", market, {"begin_nonce": before - 34, "nonce": before - 17, "bids": []}),
        lambda: venue.tell_book("update", market, {"begin_nonce": before + 9, "nonce": before + 10, "asks": []}),
        lambda: venue.tell_book("update", market, {"begin_nonce": before, "asks": [{"price": "0", "size": "1"}]}),
    ]
    await random.choice(faults)()


@pytest.mark.parametrize("seed", range(SCHEDULES))
async def test_under_random_faults_only_the_venues_prices_are_published(seed: int) -> None:
    random = Random(seed)
    async with fake_venue() as venue:
        watcher = Watcher(venue)
        running = asyncio.create_task(watcher.market.run(watcher.see, watcher.clock.now()))
        try:
            for _ in range(STEPS):
                symbol = random.choice(("BTC", "ETH"))
                if random.random() < 0.25:
                    await one_fault(random, watcher, symbol)
                else:
                    await watcher.move(random, symbol)
                await asyncio.sleep(random.choice((0, 0, 0.005, 0.02)))  # the pace is random
                assert not running.done(), running.exception()
            await settled(random, watcher)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await watcher.source.close()
        assert watcher.shown >= 2


async def settled(random: Random, watcher: Watcher) -> None:
    """Without faults, the published prices soon equal the venue's current ones."""
    for symbol in ("BTC", "ETH"):
        await watcher.move(random, symbol)

    def is_found() -> bool:
        quotes = watcher.market.quotes()
        return all(
            symbol in quotes and state_of_book(quotes[symbol].book) == state_of(watcher.venue.markets[symbol])
            for symbol in ("BTC", "ETH")
        )

    await until(is_found, within_s=20)
    assert watcher.market.troubles() is None
