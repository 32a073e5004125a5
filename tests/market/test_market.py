"""The feed loop, and waiting for a book."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
from support.feed import SECOND, START, ScriptedSource, after, tick
from support.manual_clock import ManualClock
from support.settable_clock import SettableClock
from support.waiting import turns

from trader.core.clock import Clock, ScaledClock
from trader.core.errors import DatabaseUnavailable, MarketDataError, MarketUnavailable, Unavailable
from trader.market.domain.markets import PLAIN_FUNDING_RATE, STALE_AFTER, Tick
from trader.market.feed import MarketFeed, OnTick
from trader.market.sources.synthetic import SyntheticSource


class Feed:
    """A `MarketFeed` whose loop runs on a scripted source."""

    def __init__(self, source: ScriptedSource, clock: Clock, patience: timedelta = 5 * SECOND) -> None:
        self.source = source
        self.market = MarketFeed(source, clock, patience=patience)
        self.seen: list[Tick] = []

    async def on_tick(self, given: Tick) -> None:
        self.seen.append(given)

    async def give(self, *items: Tick | Exception | None) -> None:
        """Put items into the queue, and let the loop process them."""
        for item in items:
            self.source.queue.put_nowait(item)
        await turns()


@asynccontextmanager
async def feeding(
    clock: Clock,
    *,
    on_tick: OnTick | None = None,
    ends_at: datetime | None = None,
    patience: timedelta = 5 * SECOND,
) -> AsyncIterator[Feed]:
    feed = Feed(ScriptedSource(ends_at), clock, patience)
    running = asyncio.create_task(feed.market.run(on_tick or feed.on_tick, START))
    await turns()
    try:
        yield feed
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_the_latest_quote_of_every_market_is_kept() -> None:
    clock = ManualClock(START)
    async with feeding(clock) as feed:
        market = feed.market
        assert (market.quote("BTC"), market.last_update_at, market.is_stale()) == (None, None, True)
        await feed.give(tick(1), tick(2, "BTC"))
        assert {symbol: quote.at for symbol, quote in market.quotes().items()} == {"BTC": after(2), "ETH": after(1)}
        assert market.quote("BTC") is market.quotes()["BTC"]
        assert market.last_update_at == after(2)
        assert [given.at for given in feed.seen] == [after(1), after(2)]
        assert not market.is_stale()
        await clock.advance(STALE_AFTER)
        assert not market.is_stale()
        await clock.advance(timedelta(milliseconds=1))
        assert market.is_stale()
        assert market.quote("BTC") is not None


async def test_a_current_quote_is_returned_at_once() -> None:
    async with feeding(ManualClock(START)) as feed:
        await feed.give(tick(1))
        assert (await feed.market.quote_after("BTC", after(1))).at == after(1)
        assert (await feed.market.quote_after("BTC", after(0.2))).at == after(1)


async def test_an_order_gets_the_first_quote_at_or_after_its_time() -> None:
    async with feeding(ManualClock(START)) as feed:
        await feed.give(tick(1))
        waiting = asyncio.create_task(feed.market.quote_after("BTC", after(2)))
        await feed.give(tick(1.5))
        assert not waiting.done()
        await feed.give(tick(2, "ETH"))
        assert not waiting.done()
        await feed.give(tick(2), tick(3))
        assert (await waiting).at == after(2)


async def test_waiting_orders_are_answered_after_the_tick_is_applied_in_order_of_arrival() -> None:
    events: list[str] = []
    proceed = asyncio.Event()

    async def on_tick(given: Tick) -> None:
        events.append("tick")
        await proceed.wait()
        events.append("done")

    async with feeding(ManualClock(START), on_tick=on_tick) as feed:

        async def order(name: str) -> None:
            await feed.market.quote_after("BTC", after(0.2))
            events.append(name)

        orders = [asyncio.create_task(order(name)) for name in "abcde"]
        await turns()
        await feed.give(tick(1))
        assert events == ["tick"]
        proceed.set()
        await turns()
        assert events == ["tick", "done", "a", "b", "c", "d", "e"]
        await asyncio.gather(*orders)


@pytest.mark.parametrize("error", [MarketDataError("no JSON"), OSError("no route"), TimeoutError("no answer"), None])
async def test_a_failed_source_is_retried_after_1_to_8_seconds(error: Exception | None) -> None:
    clock = ManualClock(START)
    async with feeding(clock) as feed:
        await feed.give(tick(1))
        waiting = asyncio.create_task(feed.market.quote_after("BTC", after(2)))
        await turns()
        await feed.give(error)
        with pytest.raises(MarketUnavailable, match="is down"):
            await waiting
        assert feed.market.last_error == (str(error) if error else "the feed ended")
        with pytest.raises(MarketUnavailable, match="is down"):
            await feed.market.quote_after("BTC", after(2))

        pauses = []
        for _ in range(8):
            asked, begin = len(feed.source.asked_after), clock.now()
            while len(feed.source.asked_after) == asked:
                await clock.advance(SECOND)
                await turns()
            pauses.append(int((clock.now() - begin) / SECOND))
            await feed.give(error)
        assert pauses == [1, 2, 4, 8, 8, 8, 8, 8]
        assert set(feed.source.asked_after[1:]) == {after(1)}

        await clock.advance(60 * SECOND)
        await turns()
        await feed.give(tick(500))
        assert feed.market.last_error is None
        assert (await feed.market.quote_after("BTC", after(500))).at == after(500)
        await feed.give(error)
        asked = len(feed.source.asked_after)
        await clock.advance(SECOND)
        await turns()
        assert len(feed.source.asked_after) == asked + 1, "a source that had recovered is soon asked again"


async def test_nobody_waits_for_a_stale_market() -> None:
    clock = ManualClock(START)
    async with feeding(clock) as feed:
        await feed.give(tick(1))
        await clock.advance(STALE_AFTER + 2 * SECOND)
        with pytest.raises(MarketUnavailable, match=r"2026-03-04T05:06:08\.000Z, too old"):
            await feed.market.quote_after("BTC", clock.now())


async def test_after_the_clock_is_set_back_the_old_price_is_not_traded_on_and_the_feed_follows() -> None:
    clock = SettableClock()
    market = MarketFeed(SyntheticSource(7, ("BTC",)), clock)
    ticks: asyncio.Queue[Tick] = asyncio.Queue()
    feed = asyncio.create_task(market.run(ticks.put, clock.now()))
    try:
        before = await asyncio.wait_for(ticks.get(), 5)
        clock.shift = -timedelta(hours=1)
        assert market.is_stale()
        with pytest.raises(MarketUnavailable, match="in the future, since the clock was set back"):
            await market.quote_after("BTC", clock.now())
        while (tick := await asyncio.wait_for(ticks.get(), 5)).at >= before.at:
            pass
        assert not market.is_stale()
        assert (await market.quote_after("BTC", clock.now())).at < before.at
        assert [seen.at for seen in market.recent()] == sorted(seen.at for seen in market.recent())
        assert tick in market.recent()
    finally:
        feed.cancel()
        await asyncio.wait([feed])


async def test_a_feed_that_starts_after_the_clock_was_set_back_starts_now() -> None:
    clock, source = SettableClock(), ScriptedSource()
    market = MarketFeed(source, clock)

    async def on_tick(tick: Tick) -> None: ...

    feed = asyncio.create_task(market.run(on_tick, clock.now() + timedelta(hours=1)))
    try:
        await turns()
        assert [asked <= clock.now() for asked in source.asked_after] == [True]
    finally:
        feed.cancel()
        await asyncio.wait([feed])


async def test_an_order_waits_no_longer_for_its_book_once_the_clock_is_set_back() -> None:
    clock = ManualClock(START)
    async with feeding(clock) as feed:
        await feed.give(tick(12))
        waiting = asyncio.create_task(feed.market.quote_after("BTC", after(13)))
        clock.set_by(-10 * SECOND)
        await feed.give(tick(3), tick(4))
        assert waiting.done()
        assert (await waiting).at == after(4)


async def test_a_book_that_arrives_too_late_is_not_traded_on() -> None:
    async with feeding(ManualClock(START)) as feed:
        await feed.give(tick(1))
        late = asyncio.create_task(feed.market.quote_after("BTC", after(2)))
        in_time = asyncio.create_task(feed.market.quote_after("BTC", after(4)))
        await feed.give(tick(8))
        with pytest.raises(MarketUnavailable, match="No price of BTC came in time"):
            await late
        assert (await in_time).at == after(8)


async def test_waiting_for_a_market_without_quotes_is_refused() -> None:
    async with feeding(ManualClock(START)) as feed:
        await feed.give(tick(1))
        waiting = asyncio.create_task(feed.market.quote_after("ETH", after(2)))
        await feed.give(*(tick(seconds, "BTC") for seconds in range(2, 8)))
        assert not waiting.done()
        await feed.give(tick(8, "BTC"))
        with pytest.raises(MarketUnavailable, match="No price of ETH"):
            await waiting


async def test_the_wait_is_limited_in_real_time() -> None:
    clock = ScaledClock(START, 1000)
    async with feeding(clock, patience=timedelta(milliseconds=30)) as feed:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(MarketUnavailable, match="No price of BTC came in time"):
            await feed.market.quote_after("BTC", clock.now() + 20 * SECOND)
        assert 0.04 <= loop.time() - begin < 2


async def test_an_order_behind_prices_that_the_accounts_cannot_process_gets_no_final_answer() -> None:
    processing, clock = asyncio.Event(), ScaledClock(START, 1000)

    async def on_tick(_: Tick) -> None:
        await processing.wait()
        raise DatabaseUnavailable("locked")

    async with feeding(clock, on_tick=on_tick, patience=timedelta(milliseconds=30)) as feed:
        await feed.give(tick(1))
        with pytest.raises(Unavailable, match="The accounts have not processed the latest prices yet"):
            await feed.market.quote_after("BTC", after(1))
    manual = ManualClock(START)
    async with feeding(manual, on_tick=on_tick) as feed:
        late = asyncio.create_task(feed.market.quote_after("BTC", START))
        await feed.give(tick(20, "ETH"))
        processing.set()
        with pytest.raises(DatabaseUnavailable, match="locked"):
            await late


async def test_a_market_without_rules_is_refused() -> None:
    async with feeding(ManualClock(START)) as feed:
        with pytest.raises(MarketUnavailable, match="DOGE is not traded here"):
            await feed.market.quote_after("DOGE", START)


async def test_nothing_waits_after_the_end() -> None:
    async with feeding(ManualClock(START), ends_at=after(2)) as feed:
        with pytest.raises(MarketUnavailable, match=r"ended at 2026-03-04T05:06:09\.000Z"):
            await feed.market.quote_after("BTC", after(2.2))
        within = asyncio.create_task(feed.market.quote_after("BTC", after(1.5)))
        other = asyncio.create_task(feed.market.quote_after("SOL", after(1.5)))
        await feed.give(tick(1))
        assert not within.done()
        await feed.give(tick(2))
        assert (await within).at == after(2)
        with pytest.raises(MarketUnavailable, match="there are no more prices"):
            await other
        assert feed.market.last_error == "the scripted ended at 2026-03-04T05:06:09.000Z"
        with pytest.raises(MarketUnavailable, match="there are no more prices"):
            await feed.market.quote_after("SOL", after(1.5))
        assert (await feed.market.quote_after("BTC", after(2))).at == after(2)


async def test_an_abandoned_wait_is_forgotten() -> None:
    async with feeding(ManualClock(START)) as feed:
        gone = asyncio.create_task(feed.market.quote_after("BTC", after(1)))
        stays = asyncio.create_task(feed.market.quote_after("BTC", after(1)))
        await turns()
        gone.cancel()
        await feed.give(tick(1))
        assert gone.cancelled()
        assert (await stays).at == after(1)


async def test_too_many_waiting_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.market.feed.WAITERS_MAX", 3)
    async with feeding(ManualClock(START)) as feed:
        waiting = [asyncio.create_task(feed.market.quote_after("BTC", after(1))) for _ in range(3)]
        await turns()
        with pytest.raises(MarketUnavailable, match="3 orders wait"):
            await feed.market.quote_after("BTC", after(1))
        await feed.give(tick(1))
        assert len(await asyncio.gather(*waiting)) == 3


async def test_an_unavailable_database_does_not_stop_the_feed() -> None:
    failures = [Unavailable("the database is away")]

    async def on_tick(given: Tick) -> None:
        if failures:
            raise failures.pop()

    async with feeding(ManualClock(START), on_tick=on_tick) as feed:
        waiting = asyncio.create_task(feed.market.quote_after("BTC", after(1)))
        await feed.give(tick(1), tick(2))
        assert (await waiting).at == after(1)
        assert feed.market.last_update_at == after(2)


async def test_a_stopped_feed_refuses_waiting_orders() -> None:
    feed = Feed(ScriptedSource(), ManualClock(START))

    async def on_tick(given: Tick) -> None:
        raise KeyError("a bug")

    running = asyncio.create_task(feed.market.run(on_tick, START))
    waiting = asyncio.create_task(feed.market.quote_after("BTC", after(5)))
    await turns()
    await feed.give(tick(1))
    with pytest.raises(KeyError):
        await running
    with pytest.raises(MarketUnavailable, match="feed was stopped"):
        await waiting
    with pytest.raises(MarketUnavailable, match="down: the feed was stopped"):
        await feed.market.quote_after("BTC", after(5))


async def test_history_and_funding_come_from_the_source() -> None:
    market = MarketFeed(ScriptedSource(), ManualClock(START))
    assert [ticks.at async for ticks in market.history(after(1), after(3))] == [after(2), after(3)]
    assert market.funding_rate("BTC", START) == PLAIN_FUNDING_RATE
    assert (market.source_name, set(market.markets)) == ("scripted", {"BTC", "ETH", "SOL"})


# With real sources


async def test_a_primed_market_has_current_prices() -> None:
    source = SyntheticSource(0, ("BTC", "ETH"))
    market = MarketFeed(source, ManualClock(START))
    await market.prime()
    assert {symbol: quote.at for symbol, quote in market.quotes().items()} == {"BTC": START, "ETH": START}
    assert not market.is_stale()


async def test_the_prices_of_a_paced_replay_never_go_back() -> None:
    """A standby that takes over has the prices of the leader's time before its own feed arrives."""
    taken: list[Tick] = []

    async def on_tick(tick: Tick) -> None:
        taken.append(tick)

    ticks = [tick(second) for second in (1, 9, 5, 8, 9, 10)]
    market = MarketFeed(ScriptedSource(), ScaledClock(START, 200))
    for update in ticks:
        await market.take(update, on_tick)
        assert market.last_update_at == max(each.at for each in ticks[: ticks.index(update) + 1])
        assert market.marks["BTC"] == taken[-1].quotes["BTC"].mark
    assert [(update.at - START) // SECOND for update in taken] == [1, 9, 9, 10]
