"""Gaps of the market feed: missed ticks are applied as soon as the source has their history."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal

import pytest
from msgspec.structs import replace
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_tick
from support.venue import Venue, agree_with_rows, running

from trader.core.errors import InvalidInput, MarketDataError
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderType
from trader.exchange.tick_processor import missed_moments
from trader.market.domain.markets import MARKETS, Tick
from trader.market.feed import MarketFeed

MINUTE = timedelta(minutes=1)
STOP = ExitPlan(stop=Decimal(93000))


class SecretiveSource(ScriptedSource):
    """Reveals its history only while it is available: `missed` holds unseen ticks."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: list[Tick] = []
        self.is_down = False
        self.asked: list[tuple[datetime, datetime]] = []

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        self.asked.append((after, until))
        if self.is_down:
            raise MarketDataError("the venue answers 502")
        for tick in self.missed:
            if after < tick.at <= until:
                yield tick

    def miss(self, at: datetime, mids: Mapping[str, str]) -> None:
        self.missed.append(make_tick(at, mids))


async def stopped_at(venue: Venue) -> list[tuple[str, datetime, Decimal]]:
    async with venue.database.connection() as conn:
        rows = await conn.fetch("SELECT cause, created_at, price FROM fills WHERE cause = 'stop'")
    return [tuple(row) for row in rows]


@asynccontextmanager
async def holding(database: Database, source: SecretiveSource) -> AsyncIterator[tuple[Venue, ManualClock]]:
    clock = ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see({"BTC": "94000"})
        await venue.buy("0.1", leverage=Decimal(5), exit_plan=STOP)
        yield venue, clock


@pytest.mark.parametrize("count", [1, 59, 60, 61, 120, 121])
async def test_no_missed_tick_is_left_out_whatever_their_number(count: int) -> None:
    source = SecretiveSource()
    for second in range(1, count + 1):
        source.miss(START + timedelta(seconds=second), {"BTC": str(94000 + second)})
    market = MarketFeed(source, ManualClock(START))
    missed = [each async for some in missed_moments(market, START, START + 3 * MINUTE, {}) for each in some]
    assert [(each.at, each.marks) for each in missed] == [
        (tick.at, {"BTC": tick.quotes["BTC"].mark}) for tick in source.missed
    ]


async def test_a_stop_within_a_gap_of_the_feed_fires_at_the_time_it_was_reached(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        dip = clock.now() + 4 * MINUTE
        source.miss(dip, {"BTC": "92500"})
        await venue.see({"BTC": "95000"}, after_s=600)
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_the_update_that_ends_a_gap_uses_its_own_marks(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        source.miss(clock.now() + 4 * MINUTE, {"BTC": "93500"})
        await venue.see({"BTC": "92500"}, after_s=600)
        assert await stopped_at(venue) == [("stop", clock.now(), Decimal("92499.9"))]
        assert venue.exchange.marks()["BTC"] == 92500
        await agree_with_rows(venue)


async def test_a_market_without_history_in_a_gap_keeps_its_earlier_mark(database: Database) -> None:
    source, clock = SecretiveSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see({"BTC": "94000", "ETH": "3300"}, size="50")
        await venue.buy("0.4", leverage=Decimal(10))
        await venue.buy("5", symbol="ETH", leverage=Decimal(10))
        dip = clock.now() + 4 * MINUTE
        source.miss(dip, {"BTC": "68000"})
        await venue.see({"BTC": "94000", "ETH": "6000"}, after_s=600)
        assert await liquidated_at(venue) == {dip}
        await agree_with_rows(venue)


async def liquidated_at(venue: Venue) -> set[datetime]:
    async with venue.database.connection() as conn:
        rows = await conn.fetch("SELECT created_at FROM fills WHERE cause = 'liquidation'")
    return {row["created_at"] for row in rows}


async def test_seconds_without_a_price_are_not_a_gap(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, _):
        source.asked.clear()
        await venue.see({"BTC": "94100"}, after_s=30)
        assert source.asked == []
        await venue.see({"BTC": "94100"}, after_s=30.001)
        assert len(source.asked) == 1


async def test_a_source_that_is_down_at_the_start_is_caught_up_on_later(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (_, clock):
        pass
    source.is_down = True
    dip = clock.now() + 4 * MINUTE
    source.miss(dip, {"BTC": "92500"})
    await clock.advance(10 * MINUTE)
    async with running(database, source, clock) as venue:
        assert venue.exchange.term is not None
        await venue.see({"BTC": "95000"})
        assert await stopped_at(venue) == []
        source.is_down, source.asked = False, []
        await venue.see({"BTC": "95000"}, after_s=5)
        assert source.asked == []  # not yet: a failed source is not asked at every tick
        await venue.see({"BTC": "95000"}, after_s=5)
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_without_an_answer_the_accounts_continue_after_two_minutes(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, _):
        source.is_down = True
        await venue.see({"BTC": "92000"}, after_s=600)
        for _ in range(11):
            await venue.see({"BTC": "92000"}, after_s=10)
        assert await stopped_at(venue) == []
        await venue.see({"BTC": "92000"}, after_s=10)
        assert [(reason, price) for reason, _, price in await stopped_at(venue)] == [("stop", Decimal("91999.9"))]
        await agree_with_rows(venue)


async def test_requests_without_a_price_do_not_hide_the_markets_moves(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        resting = await venue.buy("0.01", type=OrderType.LIMIT, limit_price=Decimal(90000))
        dip = clock.now() + 4 * MINUTE
        source.miss(dip, {"BTC": "92500"})
        await clock.advance(9 * MINUTE)
        assert "too old to trade on" in str((await venue.sell("0.1", reduce_only=True)).reason)
        assert "too old" in str(venue.exchange.refusal_of_price("BTC", clock.now()))
        assert (await venue.exchange.cancel_order("a", str(resting.id))).status == "cancelled"
        await venue.see({"BTC": "95000"}, after_s=60)
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_requests_without_a_price_do_not_hide_the_markets_moves_from_the_next_process(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        dip = clock.now() + 4 * MINUTE
        source.miss(dip, {"BTC": "92500"})
        await clock.advance(9 * MINUTE)
        await venue.sell("0.1", reduce_only=True)
    await clock.advance(MINUTE)
    async with running(database, source, clock) as venue:
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_nothing_is_traded_between_a_gap_and_its_history(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        source.is_down = True
        dip = clock.now() + 4 * MINUTE
        source.miss(dip, {"BTC": "92500"})
        await venue.see({"BTC": "95000"}, after_s=600)
        answer = await venue.buy("0.1", leverage=Decimal(5))
        assert answer.status == "rejected"
        assert "are not known yet" in str(answer.reason)
        assert "are not known yet" in str(await venue.exchange.set_exit_plan("a", "BTC", ExitPlan()))
        source.is_down = False
        await venue.see({"BTC": "95000"}, after_s=10)
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        assert (await venue.buy("0.1", leverage=Decimal(5))).status == "filled"
        await agree_with_rows(venue)


class HaltingSource(SecretiveSource):
    """Runs the test's hook before it reveals the last moment, and may fail at it."""

    def __init__(self, before_last: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._before_last = before_last

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        async for tick in super().history(after, until):
            if tick is self.missed[-1]:
                await self._before_last()
            yield tick

    def miss_until_a_dip(self, end: datetime) -> datetime:
        """Be silent for a quiet minute up to 25 s before the end, and for a dip 10 s before it."""
        for second in range(85, 25, -1):
            self.miss(end - timedelta(seconds=second), {"BTC": "94000"})
        self.miss(end - timedelta(seconds=10), {"BTC": "92500"})
        return self.missed[-1].at


async def test_nothing_is_traded_before_the_end_of_a_gap_is_known(database: Database) -> None:
    """A source may take a while to reveal the last seconds; requests in the meantime must not hide them."""
    answers: list[str | None] = []

    async def ask() -> None:
        answers.append((await venue.buy("0.1", leverage=Decimal(5))).reason)
        answers.append(await venue.exchange.set_exit_plan("a", "BTC", ExitPlan()))
        await venue.exchange.cancel_order("a", str(resting.id))

    source = HaltingSource(ask)
    async with holding(database, source) as (venue, clock):
        resting = await venue.buy("0.01", type=OrderType.LIMIT, limit_price=Decimal(90000))
        dip = source.miss_until_a_dip(clock.now() + 10 * MINUTE)
        await venue.see({"BTC": "95000"}, after_s=600)
        assert ["are not known yet" in str(answer) for answer in answers] == [True, True]
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_a_source_that_fails_at_the_end_of_a_gap_is_asked_again(database: Database) -> None:
    async def fail_once() -> None:
        if failures:
            raise failures.pop()

    failures = [MarketDataError("the venue answers 502")]

    source = HaltingSource(fail_once)
    async with holding(database, source) as (venue, clock):
        dip = source.miss_until_a_dip(clock.now() + 10 * MINUTE)
        await venue.see({"BTC": "95000"}, after_s=600)
        await venue.see({"BTC": "95000"})
        assert await stopped_at(venue) == []
        await venue.see({"BTC": "95000"}, after_s=9)
        assert await stopped_at(venue) == [("stop", dip, Decimal("92499.9"))]
        await agree_with_rows(venue)


async def test_a_clock_set_back_within_a_gap_does_not_delay_the_accounts(database: Database) -> None:
    source = SecretiveSource()
    async with holding(database, source) as (venue, clock):
        source.is_down = True
        await venue.see({"BTC": "95000"}, after_s=600)
        source.is_down = False
        clock.set_by(-timedelta(hours=1))
        await venue.see({"BTC": "92500"})
        assert [(reason, price) for reason, _, price in await stopped_at(venue)] == [("stop", Decimal("92499.9"))]
        assert (await venue.buy("0.1", leverage=Decimal(5))).status == "filled"


async def test_a_market_in_trouble_is_not_traded_on_even_with_a_fresh_price(database: Database) -> None:
    source, clock = SecretiveSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see({"BTC": "94000", "ETH": "3300"})
        source.troubles["BTC"] = "its price 99000 is an outlier: 5.3% from the last"
        answer = await venue.buy("0.1")
        assert (answer.status, answer.reason) == (
            "rejected",
            "BTC cannot be traded now: its price 99000 is an outlier: 5.3% from the last",
        )
        assert (await venue.buy("0.1", symbol="ETH")).status == "filled"
        assert venue.market.troubles() == "BTC: its price 99000 is an outlier: 5.3% from the last"
        source.troubles.clear()
        assert (await venue.buy("0.1")).status == "filled"
        assert venue.market.troubles() is None


async def test_an_order_with_latency_learns_why_its_price_did_not_arrive(database: Database) -> None:
    source, clock = SecretiveSource(), ManualClock(START)
    async with running(database, source, clock, SIM_LATENCY_MS="200") as venue:
        await venue.see({"BTC": "94000"})
        source.troubles["BTC"] = "a side of its order book is empty"
        waiting = asyncio.create_task(venue.buy("0.1"))
        while not waiting.done():
            await asyncio.sleep(0.01)  # a hundred ticks a second, each a second of the clock
            await venue.see({"ETH": "3300"})
        assert (await waiting).reason == "No price of BTC came in time: a side of its order book is empty"


async def test_rules_changed_by_a_venue_apply_from_its_next_update(database: Database) -> None:
    source, clock = SecretiveSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see({"BTC": "94000"})
        assert (await venue.buy("0.1", leverage=Decimal(40))).status == "filled"
        source.markets = venue.market.markets = {**MARKETS, "BTC": replace(MARKETS["BTC"], leverage_max=20)}
        await venue.see({"BTC": "94000"})
        with pytest.raises(InvalidInput, match="not within 1 to 20"):
            await venue.buy("0.1", leverage=Decimal(40))
