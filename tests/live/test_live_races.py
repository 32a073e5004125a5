"""Races in live trading: between callers, synchronization, and actions of the venue in the meantime."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Literal

import pytest
from support.fake_exchange import AT_ONCE
from support.fake_venue import IDS
from support.live import Bench
from support.waiting import until

from trader.core.errors import OrderUndecided, Unavailable
from trader.core.events import VenueDiffers
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.orders import ExitPlan, OrderStatus, OrderType
from trader.live.account import LiveAccount
from trader.live.domain.reconciliation import VenueReport
from trader.live.lighter.records import LighterRecords
from trader.operations.operator_commands import OperatorCommands

D = Decimal


class CountingLock(asyncio.Lock):
    """A lock that counts its waiters."""

    waiting = 0

    async def acquire(self) -> Literal[True]:
        self.waiting += 1
        try:
            return await super().acquire()
        finally:
            self.waiting -= 1


@asynccontextmanager
async def holding(account: LiveAccount) -> AsyncIterator[CountingLock]:
    """Hold the lock of an account, so that all its operations wait."""
    lock = CountingLock()
    async with account.lock, lock:
        account.lock = lock
        yield lock


async def test_an_order_resolved_while_it_is_repeated_is_not_sent_twice(bench: Bench) -> None:
    bench.venue.send_faults = ["lose_after"]
    bench.venue.read_faults = ["ok", *["500"] * 5000]
    with pytest.raises(OrderUndecided):
        await bench.buy("0.1", leverage=D(5), client_order_id="once")
    account = bench.exchange.live_account("apex")
    async with holding(account) as lock:
        bench.venue.read_faults.clear()
        account.wake()
        await until(lambda: lock.waiting == 1)
        asking = asyncio.create_task(bench.buy("0.1", leverage=D(5), client_order_id="once"))
        await until(lambda: lock.waiting == 2)
    assert (await asking).status is OrderStatus.FILLED
    assert bench.venue.positions() == {IDS["BTC"]: D("0.1")}
    await bench.agree()


async def test_an_order_with_a_canceled_caller_is_not_sent_twice(bench: Bench) -> None:
    async with holding(bench.exchange.live_account("apex")) as lock:
        gone = asyncio.create_task(bench.buy("0.1", leverage=D(5), client_order_id="once"))
        await until(lambda: lock.waiting == 1)
        gone.cancel()
        asking = asyncio.create_task(bench.buy("0.1", leverage=D(5), client_order_id="once"))
        await until(lambda: lock.waiting == 2)
    assert (await asking).status is OrderStatus.FILLED
    assert bench.venue.positions() == {IDS["BTC"]: D("0.1")}
    await bench.agree()


@pytest.mark.parametrize("is_dropped", [True, False])
async def test_a_closing_order_opens_nothing_if_the_stop_was_faster(bench: Bench, is_dropped: bool) -> None:
    bench.venue.drops_reduce_only = is_dropped
    await bench.buy("0.1", leverage=D(5), exit_plan=ExitPlan(stop=D(93500)))
    await bench.halts.halt(None, HaltCause.OPERATOR, "strange prices", "somebody")
    bench.venue.reach("BTC", "93400.0")  # the stop is filled at the venue, but the service does not know it yet
    answer = await bench.sell("0.1")
    assert answer.status is OrderStatus.REJECTED
    assert ("canceled-reduce-only" in (answer.reason or "")) is not is_dropped
    assert bench.venue.positions() == {}
    await bench.reconcile()


async def test_a_suspended_account_sends_nothing(bench: Bench) -> None:
    resting = await bench.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(90000))
    account = bench.exchange.live_account("apex")
    sent = list(bench.venue.sent)
    bench.exchange.suspend()  # as when the leader's lock is lost; the accounts exist until the schedules end
    with pytest.raises(Unavailable):
        await account.cancel(str(resting.id))
    with pytest.raises(Unavailable):
        await account.synchronize()
    assert bench.venue.sent == sent
    assert [order.status for order in bench.venue.orders.values()] == ["open"]


async def test_an_order_whose_trades_appear_late_stays_undecided_when_another_is_decided(bench: Bench) -> None:
    bench.venue.event_lag_s = AT_ONCE  # the test itself chooses what is shown
    for limit in (93900, 93800):
        await bench.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(limit))
    bench.venue.reach("BTC", "93700.0")
    late = next(iter(bench.venue.orders.values()))
    bench.venue.hides_trades_of.add(late.index)
    account = bench.exchange.live_account("apex")
    await account.synchronize()
    assert bench.account().positions["BTC"].quantity == D("0.1")
    assert bench.exchange.undecided("apex") == {"BTC"}
    bench.venue.hides_trades_of.clear()
    await bench.reconcile()


async def test_a_fill_just_before_a_comparison_with_the_venue_is_not_a_difference(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.venue.event_lag_s = AT_ONCE  # filled and shown between two reads
    await bench.buy("0.1", leverage=D(10))
    await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.fill_share = D("0.25")
    report = LighterRecords.report

    async def filled_first(records: LighterRecords) -> VenueReport:
        if bench.venue.markets["BTC"].mid != 93000:
            bench.venue.reach("BTC", "93000.0")
        return await report(records)

    monkeypatch.setattr(LighterRecords, "report", filled_first)
    await bench.synchronize()
    assert bench.account().positions["BTC"].quantity == D("0.2")
    assert [event.text for event in bench.events if isinstance(event, VenueDiffers)] == []
    await bench.agree()


async def test_flattening_closes_the_fills_of_an_undecided_order(bench: Bench) -> None:
    async with flattening_an_order_on_its_way(bench) as operations:
        while not await commands(bench, "progress LIKE '%closed%' OR finished_at IS NOT NULL"):
            await operations.poll()
        bench.venue.read_faults.clear()
        await bench.synchronize()
        while not await commands(bench, "finished_at IS NOT NULL"):
            await operations.poll()
    assert bench.venue.positions() == {}
    assert await commands(bench, "outcome->'closed'->0->>'quantity' IS NOT NULL AND outcome->'left' = '[]'")
    await bench.reconcile()


async def test_flattening_reports_an_order_that_stays_undecided(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.operations.operator_commands.FLATTEN_S", 0.1)
    monkeypatch.setattr("trader.operations.operator_commands.RETRY_S", 0.01)
    async with flattening_an_order_on_its_way(bench) as operations:
        while not await commands(bench, "finished_at IS NOT NULL"):
            await operations.poll()
    assert await commands(bench, "outcome->'left'->0->>'what' = 'an order of BTC'")


@asynccontextmanager
async def flattening_an_order_on_its_way(bench: Bench) -> AsyncIterator[OperatorCommands]:
    """A command to flatten everything while an order is undecided, with half a minute for its execution."""
    bench.venue.send_faults = ["lose_after"]
    bench.venue.read_faults = ["ok", *["500"] * 50_000]
    with pytest.raises(OrderUndecided):
        await bench.buy("0.1", leverage=D(5))
    async with asyncio.timeout(30), bench.flattening() as operations:
        yield operations


async def commands(bench: Bench, condition: str) -> int:
    """Return how many commands meet the condition."""
    async with bench.database.connection() as conn:
        return int(await conn.fetchval(f"SELECT count(*) FROM commands WHERE {condition}"))
