"""Candles that several callers request at once."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from support.feed import START, ScriptedSource
from support.manual_clock import ManualClock
from support.waiting import turns

from trader.core.errors import MarketUnavailable
from trader.market.feed import MarketFeed


async def test_candles_requested_concurrently_are_fetched_once() -> None:
    clock = ManualClock(START)
    source = ScriptedSource()
    market = MarketFeed(source, clock)
    answers = await asyncio.gather(*(market.candles("BTC", "15m", 20) for _ in range(8)))
    end = datetime(2026, 3, 4, 5, 0, tzinfo=UTC)
    assert source.asked_candles == [("BTC", "15m", end - timedelta(hours=5), end)]
    assert all(answer == answers[0] for answer in answers)
    assert [candle.open_time for candle in answers[0]] == [end - timedelta(minutes=15 * n) for n in range(20, 0, -1)]
    assert await market.candles("BTC", "15m", 5) == answers[0][-5:]
    assert len(source.asked_candles) == 1


async def test_candles_are_fetched_again_when_one_has_closed() -> None:
    clock = ManualClock(START)
    source = ScriptedSource()
    market = MarketFeed(source, clock)
    await market.candles("BTC", "1m", 10)
    await clock.advance(timedelta(seconds=52))
    assert await market.candles("BTC", "1m", 10)
    assert len(source.asked_candles) == 1
    await clock.advance(timedelta(seconds=1))
    candles = await market.candles("BTC", "1m", 10)
    minute = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
    assert source.asked_candles[1:] == [("BTC", "1m", minute, minute + timedelta(minutes=1))]
    assert [candle.open_time for candle in candles] == [minute - timedelta(minutes=n) for n in range(9, -1, -1)]
    await clock.advance(timedelta(days=1))
    assert len(await market.candles("BTC", "1m", 10)) == 10
    assert len(source.asked_candles) == 3


async def test_a_longer_request_fetches_and_keeps_all_candles() -> None:
    clock = ManualClock(START)
    source = ScriptedSource()
    market = MarketFeed(source, clock)
    assert [len(await market.candles("BTC", "5m", count)) for count in (3, 30, 3)] == [3, 30, 3]
    await clock.advance(timedelta(minutes=5))
    assert [len(await market.candles("BTC", "5m", count)) for count in (3, 30)] == [3, 30]
    spans = [(end - start) // timedelta(minutes=5) for _, _, start, end in source.asked_candles]
    assert spans == [3, 30, 1]
    assert len(await market.candles("BTC", "5m", 5000)) == 1000


async def test_a_candle_that_a_venue_publishes_late_is_not_missed() -> None:
    clock = ManualClock(START)
    source = ScriptedSource()
    source.late = timedelta(seconds=1)
    market = MarketFeed(source, clock)
    assert len(await market.candles("BTC", "1m", 10)) == 9
    source.late = timedelta(0)
    candles = await market.candles("BTC", "1m", 10)
    assert len(candles) == 10
    assert len({candle.open_time for candle in candles}) == 10


async def test_unobtainable_candles_are_unavailable_and_requested_again() -> None:
    source = ScriptedSource()
    market = MarketFeed(source, ManualClock(START))
    source.candle_error = OSError("no route")
    with pytest.raises(MarketUnavailable, match="No candles of BTC: no route"):
        await market.candles("BTC", "1h", 10)
    source.candle_error = None
    assert len(await market.candles("BTC", "1h", 10)) == 10
    with pytest.raises(MarketUnavailable, match="DOGE"):
        await market.candles("DOGE", "1h", 10)


async def test_an_abandoned_request_does_not_spoil_the_candles_of_others() -> None:
    source = ScriptedSource()
    market = MarketFeed(source, ManualClock(START))
    first = asyncio.create_task(market.candles("BTC", "1h", 10))
    second = asyncio.create_task(market.candles("BTC", "1h", 10))
    await turns(1)
    first.cancel()
    assert len(await second) == 10
    assert first.cancelled()
