"""Hyperliquid's public data: rules, books and marks by stream or polled, candles, funding."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from support.fake_hyperliquid import FakeHyperliquid

from trader.core.clock import SystemClock
from trader.core.errors import MarketDataError
from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.hyperliquid.stream import BookRow, book_of
from trader.live.source import VenueSource
from trader.market.domain.markets import Tick

D = Decimal
START = datetime(2026, 3, 4, 5, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
FOLDER = Path(__file__).parents[4] / "shared" / "data" / "venues" / "hyperliquid"


@pytest.fixture
async def venue() -> AsyncIterator[FakeHyperliquid]:
    venue = FakeHyperliquid()
    venue.is_limited = False
    await venue.start()
    yield venue
    await venue.stop()


@pytest.fixture
async def source(venue: FakeHyperliquid) -> AsyncIterator[VenueSource]:
    source = VenueSource(HyperliquidApi(venue.url, pause_s=0.01), ("BTC", "ETH"), pulse_s=0.01, poll_every=MINUTE)
    await source.open()
    yield source
    await source.close()


async def next_tick(ticks: AsyncIterator[Tick], symbol: str, bid: Decimal) -> Tick:
    async for tick in ticks:
        if symbol in tick.quotes and tick.quotes[symbol].bid == bid:
            return tick
    raise AssertionError("no such tick")


async def test_rules_have_figures_decimals_and_tiers(source: VenueSource) -> None:
    market = source.markets["BTC"]
    assert (market.tick, market.lot, market.figures, market.min_notional) == (D("0.01"), D("0.0001"), 5, D(10))
    assert (market.leverage_max, market.maintenance_rate) == (40, D("0.0125"))
    assert market.tiers == ((D(150_000_000), D("0.025"), 20),)
    assert [market.tick_at(D(price)) for price in ("94000.5", "940.55", "1.2")] == [1, D("0.01"), D("0.01")]


@pytest.mark.parametrize("streams", [True, False])
async def test_books_and_marks_come_by_stream_or_are_polled(
    venue: FakeHyperliquid, source: VenueSource, streams: bool
) -> None:
    venue.refuses_streams = not streams
    market = venue.markets["BTC"]
    market.place(D(94000))
    market.mark, market.index = D("94010"), D("94020")
    ticks = source.ticks(SystemClock(), START)
    tick = await next_tick(ticks, "BTC", D("93999.99"))
    if streams:
        await venue.move("BTC", "94100")
        tick = await next_tick(ticks, "BTC", D("94099.99"))
        assert tick.quotes["BTC"].mark == 94010
        assert source.funding_rate("BTC", START) == D("0.000012")
        assert source.open_interest("BTC") == D("27353.17") * 94010
    assert len(tick.quotes["BTC"].book.bids) == 5
    await ticks.aclose()  # type: ignore[attr-defined]


async def test_candles_and_funding_are_read_in_parts(venue: FakeHyperliquid, source: VenueSource) -> None:
    start_ms = int(START.timestamp()) * 1000
    rows = [
        {"t": start_ms + 60_000 * n, "o": 100 + n, "h": 102 + n, "l": 99 + n, "c": 101 + n, "v": 5} for n in range(700)
    ]
    venue.candle_rows[1] = [*rows, {**rows[0], "t": start_ms + 60_000 * 700, "h": 1}]
    candles = await source.candles("BTC", "1m", START, START + 701 * MINUTE)
    assert [candle.open_time for candle in candles] == [START + n * MINUTE for n in range(700)]
    assert candles[3][1:] == (103.0, 105.0, 102.0, 104.0, 5.0)
    venue.funding_rows[1] = [{"timestamp": int(START.timestamp()) + 3600 * n, "rate": "0.00125"} for n in range(5)]
    api = HyperliquidApi(venue.url)
    await api.listings()
    hour = timedelta(hours=1)
    assert source.identity == "venue:hyperliquid"
    assert await api.fundings(1, START + hour, START + 3 * hour) == {
        START + n * hour: D("0.0000125") for n in (1, 2, 3)
    }
    await api.close()


async def test_the_rates_that_were_due_are_read_with_the_rules(venue: FakeHyperliquid) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    venue.funding_rows[1] = [{"timestamp": int(hour.timestamp()), "rate": "0.00125"}]
    api = HyperliquidApi(venue.url, pause_s=0.01)
    source = VenueSource(api, ("BTC",), pulse_s=0.01, rules_every=timedelta(milliseconds=20))
    await source.open()
    ticks = source.ticks(SystemClock(), START)
    while source.known_funding_rate("BTC", hour) is None:
        await venue.move("BTC", "94000")
        await anext(ticks)
    assert source.known_funding_rate("BTC", hour) == D("0.0000125")
    await ticks.aclose()  # type: ignore[attr-defined]
    await source.close()


async def test_a_market_without_cross_margin_or_delisted_is_not_traded(venue: FakeHyperliquid) -> None:
    venue.markets["SOL"].status = "inactive"
    api = HyperliquidApi(venue.url, pause_s=0.01)
    assert {symbol: listing.is_active for symbol, listing in (await api.listings()).items()} == {
        "ETH": True, "BTC": True, "SOL": False,
    }  # fmt: skip
    venue.read_faults = ["nonsense"]
    with pytest.raises(MarketDataError, match="cannot be decoded"):
        await api.listings()
    await api.close()


@pytest.mark.skipif(not FOLDER.exists(), reason="the recorded payloads are not on this machine")
def test_recorded_books_are_understood() -> None:
    for name in ("ws_book_data", "http_l2_book_btc"):
        body = (FOLDER / f"{name}.json").read_bytes()
        book = book_of(msgspec.json.decode(body, type=BookRow))
        prices = [D(level["px"]) for level in json.loads(body)["levels"][1]]
        assert [level.price for level in book.asks or ()] == prices
