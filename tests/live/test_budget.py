"""The budget of requests: what the venue allows is never exceeded, and closing comes first."""

import asyncio

import pytest

from trader.core.errors import MarketDataError
from trader.live.budget import Priority, RequestBudget, spending_as

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
