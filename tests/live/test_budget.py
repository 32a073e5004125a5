"""The budget of requests: what the venue allows is never exceeded, and closing comes first."""

import asyncio
from contextlib import suppress
from decimal import Decimal

import pytest
from support.fake_venue import IDS
from support.live import add_model, prepared, trading

from trader.core.errors import MarketDataError, OrderUndecided
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus, OrderType
from trader.live.budget import Priority, RequestBudget, spending_as

D = Decimal
PATIENT_S = 30.0


class Time:
    """A clock in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def spend(budget: RequestBudget, priority: Priority, times: int = 1000, *, kind: int | None = None) -> int:
    """Spend without waiting, and return how often that went."""
    with spending_as(priority, 0):
        for number in range(times):
            try:
                await budget.take(100, kind=kind)
            except MarketDataError:
                return number
    return times


@pytest.mark.parametrize(
    ("is_weighted", "per_minute", "shares"), [(False, 60, (36, 6, 6, 0, 12)), (True, 24_000, (144, 24, 24, 0, 48))]
)
async def test_each_priority_leaves_a_reserve_for_more_urgent_ones(
    is_weighted: bool, per_minute: int, shares: tuple[int, ...]
) -> None:
    time = Time()
    budget = RequestBudget(per_minute, per_kind=1000, now_s=time)
    budget.is_weighted = is_weighted
    order = (Priority.READ, Priority.OPEN, Priority.PROTECT, Priority.CANCEL, Priority.CLOSE)
    assert tuple([await spend(budget, priority) for priority in order]) == shares
    time.now_s = 61.0  # the venue's minute is over, but requests may have arrived there closer together
    assert await spend(budget, Priority.CLOSE) == 0
    time.now_s = 63.0
    assert await spend(budget, Priority.CLOSE) == per_minute / (100 if is_weighted else 1)


async def test_the_transactions_of_a_kind_have_a_limit_of_their_own() -> None:
    budget = RequestBudget(1000, per_kind=40)
    assert await spend(budget, Priority.OPEN, kind=14) == 28
    assert await spend(budget, Priority.CLOSE, kind=14) == 12
    assert await spend(budget, Priority.CLOSE, kind=15) == 40


async def test_the_more_urgent_of_those_who_wait_goes_first() -> None:
    time, gone = Time(), list[Priority]()
    budget = RequestBudget(10, per_kind=10, now_s=time)
    await spend(budget, Priority.CLOSE)

    async def ask(priority: Priority) -> None:
        with spending_as(priority, PATIENT_S):
            await budget.take(1)
        gone.append(priority)

    order = (Priority.READ, Priority.CLOSE, Priority.OPEN, Priority.CANCEL)
    async with asyncio.TaskGroup() as group:
        for priority in order:
            group.create_task(ask(priority))
        await asyncio.sleep(0)
        time.now_s = 100.0
    assert gone == sorted(order)


async def test_closing_goes_on_when_the_budget_or_the_quota_of_transactions_leaves_nothing_else(
    database: Database,
) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        bench.budget = RequestBudget(60, per_kind=40, now_s=Time())
        bench.venue.excuse("lag_s", "event_lag_s")
        await bench.start()
        await bench.tell()
        try:
            assert (await bench.buy("0.05")).status is OrderStatus.FILLED
            bench.venue.ledger.quota, bench.venue.fill_share = 16, D(0)
            await bench.buy("0.05")  # it is not filled, and its answer tells the quota
            bench.venue.fill_share = D(1)
            answer = await bench.buy("0.03")
            assert answer.status is OrderStatus.REJECTED
            assert "are kept for closing" in str(answer.reason)
            assert (await bench.sell("0.02", reduce_only=True)).status is OrderStatus.FILLED
            await spend(bench.budget, Priority.CANCEL)
            answer = await bench.buy("0.03")
            assert answer.status is OrderStatus.REJECTED
            assert "leaves nothing for this now" in str(answer.reason)
            with suppress(OrderUndecided):  # the venue's trades may be read later
                await bench.sell("0.01", reduce_only=True)
            assert bench.venue.positions() == {IDS["BTC"]: D("0.02")}
        finally:
            await bench.stop()


async def test_an_order_that_opens_leaves_room_for_stops_among_the_orders_that_the_venue_allows(
    database: Database,
) -> None:
    async with trading(database) as bench:
        bench.venue.excuse("lag_s", "event_lag_s", "is_limited")
        budget = bench.venue_accounts.budget
        assert budget.orders == (1500, 1000, 500, 16)  # of the account's tier
        budget.orders = budget.orders._replace(waiting_per_market=10)
        plan, answers = ExitPlan(stop=D(80000), target=D(99000)), []
        for number in range(4):
            limit = {"type": OrderType.LIMIT, "limit_price": D(90000 - 10 * number), "exit_plan": plan}
            answers.append(await bench.buy("0.01", **limit))
        assert [answer.status for answer in answers] == [OrderStatus.RESTING] * 3 + [OrderStatus.REJECTED]
        assert "might not get its stop" in str(answers[-1].reason)
        assert (await bench.buy("0.3", symbol="ETH")).status is OrderStatus.FILLED
