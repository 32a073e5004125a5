"""The life of a live order, with another actor in every gap: books and venue agree, and no order is sent twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from random import Random
from typing import Final

import pytest
from support.fake_exchange import CREATE
from support.gaps import GapDatabase, Gaps, asked_for, gaps_for, run_as
from support.live import Bench, add_model, prepared
from support.run_profile import runs_all

from trader.core.errors import TraderError
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderType
from trader.live.lighter.account import LighterAccounts

D = Decimal
PLAN: Final = ExitPlan(stop=D(93000))
LOOKS_MAX: Final = 8
USUAL_GAPS: Final = 60
AFTER_ITS_END: Final = 9999
END_S: Final = 60.0


class LiveSchedule:
    """One life of an order, with an actor in one of its gaps."""

    def __init__(self, bench: Bench, gaps: Gaps) -> None:
        self.bench, self.gaps = bench, gaps
        self.task: asyncio.Task[object]
        self.resting: OrderAnswer
        self.killed: list[LighterAccounts] = []

    async def place(self) -> None:
        await self.bench.buy("0.1", leverage=D(5), exit_plan=PLAN, client_order_id="op")

    async def cancel(self) -> None:
        await self.bench.exchange.cancel_order("apex", str(self.resting.id))

    async def book_stop(self) -> None:
        """Discover that the venue has executed a stop."""
        self.bench.venue.reach("BTC", "92900.0")
        await self.bench.synchronize()

    # --- actors

    async def retry(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.place()

    async def synchronize(self) -> None:
        await self.bench.synchronize()

    async def reach_stop(self) -> None:
        self.bench.venue.reach("BTC", "92900.0")

    async def lose_statement(self) -> None:
        self.gaps.fault = "lost statement"

    async def lose_acknowledgement(self) -> None:
        self.gaps.fault = "lost acknowledgement"

    async def lose_answer(self) -> None:
        self.bench.venue.send_faults = ["lose_after"]

    async def restart(self) -> None:
        self.killed.append(self.bench.venue_accounts)
        await self.bench.kill()
        await self.bench.start()
        await self.bench.tell()

    # --- the end

    async def settle(self) -> None:
        for _ in range(LOOKS_MAX):
            with suppress(TraderError):
                await self.bench.synchronize()
                return
        raise AssertionError("the account cannot be synchronized")


Step = Callable[[LiveSchedule], Awaitable[object]]
OPERATIONS: Final[dict[str, Step]] = {
    "live order": LiveSchedule.place,
    "live cancel": LiveSchedule.cancel,
    "live stop": LiveSchedule.book_stop,
}
ACTORS: Final[dict[str, Step]] = {
    "place": LiveSchedule.place,
    "retry": LiveSchedule.retry,
    "synchronization": LiveSchedule.synchronize,
    "stop at the venue": LiveSchedule.reach_stop,
    "lost statement": LiveSchedule.lose_statement,
    "lost acknowledgement": LiveSchedule.lose_acknowledgement,
    "lost answer": LiveSchedule.lose_answer,
    "restart": LiveSchedule.restart,
}


async def run(database: GapDatabase, operation: str, actor: str, at: int) -> list[str]:
    """Run one schedule from an empty database and check its outcome. Return the gaps of the operation."""
    gaps = database.gaps = Gaps()
    await database.empty()
    async with prepared(database) as bench, asyncio.timeout(END_S):
        await add_model(database, "apex")
        await bench.start()
        await bench.tell()
        schedule = LiveSchedule(bench, gaps)
        limit = {"type": OrderType.LIMIT, "limit_price": D(90000)}
        schedule.resting = await bench.buy("0.1", leverage=D(5), client_order_id="rests", **limit)
        await bench.buy("0.05", leverage=D(5), exit_plan=PLAN, client_order_id="held")
        with gaps.watching("live", at, lambda: _step(ACTORS[actor], schedule)):
            schedule.task = asyncio.ensure_future(run_as("live", _step(OPERATIONS[operation], schedule)))
            ended = (await asyncio.gather(schedule.task, return_exceptions=True))[0]
            await gaps.act()
            assert gaps.acted is not None
            acted = (await asyncio.gather(gaps.acted, return_exceptions=True))[0]
        gaps.fault, bench.venue.send_faults = None, []
        for clients in schedule.killed:  # a task that a kill would have ended may have reconnected
            await clients.close()
        for error in (ended, acted):
            if isinstance(error, Exception) and not isinstance(error, TraderError):
                raise error
        await schedule.settle()
        await bench.agree()
        # Every order was sent once, no matter how often it was requested.
        quantities = [
            order.quantity for order in bench.venue.orders.values() if order.type == "limit" and not order.reduce_only
        ]
        assert quantities.count(D("0.1")) <= 2, "the resting one, and the one that was placed"
        assert any(kind == CREATE for kind, _ in bench.venue.sent)
        await bench.stop()
    return gaps.passed


async def _step(step: Step, schedule: LiveSchedule) -> object:
    return await step(schedule)


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_actor_in_a_gap_of_a_live_order(
    database: GapDatabase, operation: str, actor: str, record_property: Callable[[str, object], None]
) -> None:
    tried = [Random(f"{operation} / {actor}").randrange(USUAL_GAPS)]
    if runs_all():
        tried = gaps_for(actor, await run(database, operation, actor, AFTER_ITS_END))
    for at in tried:
        try:
            await run(database, operation, actor, at)
        except BaseException as error:
            error.add_note(f'SCHEDULE="{operation} / {actor} / {at}"')
            raise
    record_property("schedules", len(tried))


@pytest.mark.skipif(asked_for()[0] not in OPERATIONS, reason="SCHEDULE names none of these")
async def test_again(database: GapDatabase) -> None:
    operation, actor, at = asked_for()
    await run(database, operation, actor, int(at))
