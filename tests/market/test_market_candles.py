"""Candles that several callers request at once."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feed import START, ScriptedSource
from support.manual_clock import ManualClock
from support.run_profile import is_nightly
from support.waiting import turns

from trader.core.errors import MarketUnavailable
from trader.market.domain.markets import Candle, Interval, Tick
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


class LateSource(ScriptedSource):
    """A source that derives candles from their times; those of the last minutes arrive late."""

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        candles = await super().candles(symbol, interval, start, end)
        return [each._replace(volume=each.open_time.timestamp()) for each in candles]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 20, 61, 300, 7200, -90, -310, -4000]),  # how far the clock goes, in seconds
            st.sampled_from([0, 0, 0, 1, 3]),  # how many minutes the source is late
            st.sampled_from([1, 2, 7, 30]),
        ),
        min_size=4,
        max_size=12,
    )
)
@settings(max_examples=200 if is_nightly() else 40)
def test_kept_candles_equal_those_of_a_fresh_feed(steps: list[tuple[int, int, int]]) -> None:
    async def check() -> None:
        clock, source = ManualClock(START), LateSource()
        kept = MarketFeed(source, clock)
        for passed, late, count in steps:
            clock.set_by(timedelta(seconds=passed))
            source.late = timedelta(minutes=late)
            await kept.take(Tick(clock.now(), {}), no_one)  # by which the feed learns that the clock was set back
            read = await kept.candles("BTC", "1m", count)
            fresh = await MarketFeed(source, clock).candles("BTC", "1m", count)
            known = [each for each in read if each.open_time <= max([one.open_time for one in fresh], default=START)]
            assert known[-len(fresh) :] == fresh if fresh else True
            assert [each.open_time for each in read] == sorted({each.open_time for each in read})
            assert all(clock.now() - each.open_time >= timedelta(minutes=1) for each in read)
            assert len(read) <= count

    asyncio.run(check())


async def no_one(_: Tick) -> None: ...


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
