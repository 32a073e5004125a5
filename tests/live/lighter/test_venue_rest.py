"""The venue's REST interface: candles, history as their paths, funding, and invalid answers."""

import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web
from support.fake_venue import FakeVenue, fake_venue

from trader.composition.external import make_source
from trader.core.clock import SystemClock
from trader.core.errors import MarketDataError, MarketUnavailable
from trader.live.lighter.api import LighterApi
from trader.live.source import VenueSource
from trader.market.domain.markets import PLAIN_FUNDING_RATE, Candle
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

D = Decimal
START = datetime(2026, 3, 4, 5, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
BTC, ETH = 1, 0


def row(at: datetime, *prices: float, volume: float = 2.5) -> dict[str, Any]:
    """A candle in the venue's format, which omits zeros."""
    opened, high, low, close = prices
    whole = {"t": int(at.timestamp() * 1000), "o": opened, "h": high, "l": low, "c": close, "v": volume, "i": 9}
    return {name: value for name, value in whole.items() if value}


def rows(count: int, start: datetime = START) -> list[dict[str, Any]]:
    return [row(start + n * MINUTE, 94000.0 + n, 94003.0 + n, 93998.0 + n, 94001.0 + n) for n in range(count)]


@pytest.fixture
async def venue() -> AsyncIterator[FakeVenue]:
    async with fake_venue() as venue:
        yield venue


@pytest.fixture
async def source(venue: FakeVenue) -> AsyncIterator[VenueSource]:
    source = VenueSource(LighterApi(venue.url, pause_s=0.01), ("BTC", "ETH"))
    await source.open()
    yield source
    await source.close()


def test_the_venue_is_the_default_source() -> None:
    settings = Settings.load({"OPENAI_BASE_URL": "http://127.0.0.1:1"}, None, demo=False)
    source = make_source(settings)
    assert isinstance(source, VenueSource)
    assert (source.name, source.identity, source.ends_at) == ("venue", "venue:lighter", None)
    assert list(source.markets) == ["BTC", "ETH", "SOL"]
    assert isinstance(source.clock(None), SystemClock)


# Candles


async def test_closed_candles_are_fetched_page_by_page(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = rows(1200)
    end = START + 1100 * MINUTE + 30 * SECOND
    candles = await source.candles("BTC", "1m", START + 10 * SECOND, end)
    assert candles[0] == Candle(START + MINUTE, 94001.0, 94004.0, 93999.0, 94002.0, 2.5)
    assert [candle.open_time for candle in candles] == [START + n * MINUTE for n in range(1, 1100)]
    assert [query["count_back"] for path, query in venue.asked if path == "/api/v1/candles"] == ["500"] * 3


async def test_empty_and_impossible_candles_are_skipped(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = [
        row(START, 5, 6, 4, 5),
        row(START + MINUTE, 0, 0, 0, 0, volume=0),
        row(START + 2 * MINUTE, 5, 4, 6, 5),  # high below low
        row(START + 3 * MINUTE, 5, 6, 4, 7),  # close above high
        row(START + 4 * MINUTE, -5, 6, -6, 5),
        row(START + 5 * MINUTE, 5, 6, 4, 5, volume=-1),
        row(START + 6 * MINUTE, 5, 6, 4, 5, volume=0),
        {"t": 10**30, "o": 5.0, "h": 6.0, "l": 4.0, "c": 5.0},
    ]
    candles = await source.candles("BTC", "1m", START, START + 10 * MINUTE)
    assert [candle.open_time for candle in candles] == [START, START + 6 * MINUTE]
    assert await source.candles("ETH", "4h", START, START + timedelta(days=2)) == []


async def test_candles_of_an_unknown_market_are_refused(source: VenueSource) -> None:
    with pytest.raises(MarketUnavailable, match="DOGE is not traded here"):
        await source.candles("DOGE", "1m", START, START + MINUTE)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (web.Response(status=502, text="<html>Bad Gateway</html>"), "status 502: <html>Bad Gateway"),
        (web.Response(text="<html>"), "cannot be decoded"),
        (web.Response(text='{"code":200,"c":[{"t":"now"}]}'), "cannot be decoded"),
        (web.Response(text='{"code":20001,"message":"invalid param"}'), "code 20001.*invalid param"),
        (web.Response(text='{"code":20001,"c":7}'), "code 20001"),
        (web.Response(text='{"code":null}'), "cannot be decoded"),
        (web.Response(status=302, headers={"Location": "http://elsewhere.invalid/"}), "status 302"),
    ],
)
async def test_an_invalid_answer_is_an_error_with_its_reason(
    venue: FakeVenue, source: VenueSource, answer: web.Response, told: str
) -> None:
    venue.answers.append(answer)
    with pytest.raises(MarketDataError, match=told):
        await source.candles("BTC", "1m", START, START + MINUTE)
    assert await source.candles("BTC", "1m", START, START + MINUTE) == []


async def test_a_rate_limited_request_is_repeated_a_few_times(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = rows(1)
    venue.answers += [web.Response(status=429), web.Response(status=429, headers={"Retry-After": "0"})]
    assert len(await source.candles("BTC", "1m", START, START + MINUTE)) == 1
    venue.answers += [web.Response(status=429) for _ in range(5)]
    with pytest.raises(MarketDataError, match="status 429"):
        await source.candles("BTC", "1m", START, START + MINUTE)
    assert len(venue.answers) == 1


async def test_a_silent_venue_is_reported_as_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.live.http.ANSWER_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = LighterApi(f"http://127.0.0.1:{silent.getsockname()[1]}", pause_s=0.01)
        with pytest.raises(MarketDataError, match=r"cannot be reached: TimeoutError$"):
            await api.listings()
        await api.close()


async def test_a_venue_that_is_down_is_named_in_the_error(venue: FakeVenue, source: VenueSource) -> None:
    await venue.stop()
    market = MarketFeed(source, SystemClock())
    with pytest.raises(MarketUnavailable, match=r"No candles of BTC: .*cannot be reached"):
        await market.candles("BTC", "15m", 100)


# History


async def test_history_is_the_path_of_the_candles(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = rows(3)
    venue.candle_rows[ETH] = [row(START + MINUTE, 3300.0, 3310.0, 3299.0, 3305.0)]
    ticks = [tick async for tick in source.history(START - SECOND, START + 3 * MINUTE)]
    assert [tick.at for tick in ticks] == [
        START + n * MINUTE + second * SECOND for n in range(3) for second in (0, 20, 21, 40, 41, 59)
    ]
    # Open, the nearer extreme, the further one, close.
    assert [ticks[place].quotes["BTC"].mark for place in (0, 1, 3, 5)] == [94000, 93998, 94003, 94001]
    assert [ticks[6 + place].quotes["ETH"].mark for place in (0, 1, 3, 5)] == [3300, 3299, 3310, 3305]
    assert 3299 < ticks[8].quotes["ETH"].mark < 3300, "a second after the low"
    assert [set(tick.quotes) for tick in ticks[::6]] == [{"BTC"}, {"BTC", "ETH"}, {"BTC"}]
    quote = ticks[7].quotes["BTC"]
    assert quote.bid < quote.mark < quote.ask
    assert quote.book.bids[0].quantity > 0


async def test_history_omits_a_market_of_unknown_depth(venue: FakeVenue) -> None:
    venue.markets["ETH"].symbol = "PEPE"
    venue.candle_rows = {BTC: rows(3), ETH: rows(3)}
    source = VenueSource(LighterApi(venue.url, pause_s=0.01), ("BTC", "PEPE"))
    await source.open()
    assert list(source.markets) == ["BTC", "PEPE"]
    ticks = [tick async for tick in source.history(START - SECOND, START + 3 * MINUTE)]
    assert [set(tick.quotes) for tick in ticks] == [{"BTC"}] * 18
    await source.close()


async def test_history_begins_with_a_close_and_ends_with_the_forming_candle(
    venue: FakeVenue, source: VenueSource
) -> None:
    venue.candle_rows[BTC] = rows(3)
    ticks = [tick async for tick in source.history(START + 30 * SECOND, START + 2 * MINUTE + 30 * SECOND)]
    assert [tick.at - START for tick in ticks] == [
        timedelta(seconds=seconds) for seconds in (59, 60, 80, 81, 100, 101, 119, 120, 130, 130.5, 140, 140.5, 149.5)
    ]
    assert [ticks[place].quotes["BTC"].mark for place in (7, 8, 10, 12)] == [94002, 94000, 94005, 94003]


async def test_history_within_one_minute_is_empty_and_makes_no_request(venue: FakeVenue, source: VenueSource) -> None:
    venue.asked.clear()
    assert [tick async for tick in source.history(START + SECOND, START + MINUTE)] == []
    assert venue.asked == []


async def test_history_loads_the_funding_rates_of_its_hours(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = rows(180)
    venue.funding_rows[BTC] = [
        {"timestamp": int(START.timestamp()) + 3600 * n, "value": "1.2", "rate": rate, "direction": side}
        for n, (rate, side) in enumerate((("0.0012", "long"), ("0.0002", "short"), ("0.5000", "long")))
    ]
    assert source.funding_rate("BTC", START) == PLAIN_FUNDING_RATE
    async for _ in source.history(START - MINUTE, START + timedelta(hours=1)):
        pass
    assert source.funding_rate("BTC", START) == D("0.000012")
    assert source.funding_rate("BTC", START + timedelta(hours=1)) == D("-0.000002")
    assert source.funding_rate("BTC", START + timedelta(hours=2)) == PLAIN_FUNDING_RATE
    assert source.funding_rate("ETH", START) == PLAIN_FUNDING_RATE


async def test_funding_without_a_direction_is_an_error(venue: FakeVenue, source: VenueSource) -> None:
    venue.funding_rows[BTC] = [{"timestamp": int(START.timestamp()), "value": "1", "rate": "0.1", "direction": ""}]
    market = MarketFeed(source, SystemClock())
    with pytest.raises(MarketUnavailable, match=r"venue has no history now: /api/v1/fundings: cannot be decoded"):
        async for _ in market.history(START - MINUTE, START + MINUTE):
            pass


async def test_many_days_are_fetched_page_by_page(venue: FakeVenue, source: VenueSource) -> None:
    venue.candle_rows[BTC] = rows(1500)
    venue.asked.clear()
    told = source.history(START - MINUTE, START + 1500 * MINUTE)
    assert (await anext(aiter(told))).at == START
    assert sum(path == "/api/v1/candles" for path, _ in venue.asked) == 2
    assert sum([1 async for _ in told]) == 1500 * 6 - 1
