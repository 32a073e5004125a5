"""The life of a live order, with another actor in every gap: books and venue agree, and no order is sent twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from random import Random
from typing import Final

import pytest
from interleavings.gaps import GapDatabase, Gaps, asked_for, gaps_for, run_as
from support.fake_exchange import CREATE
from support.live import Bench, add_model, live_settings, prepared
from support.run_profile import is_nightly
from support.tasks import ended

from trader.core.errors import TraderError
from trader.exchange.domain.halts import HaltCause, Verb
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderType
from trader.live.exchange import LiveExchange
from trader.live.venue import VenueAccounts
from trader.operations import operator_commands
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands

D = Decimal
PLAN: Final = ExitPlan(stop=D(93000))
LOOKS_MAX: Final = 8
USUAL_GAPS: Final = 60
AFTER_ITS_END: Final = 9999
GAPS: Final[dict[str, list[str]]] = {}
"""The gaps of the operations that this worker has run."""

OTHER_ACCOUNT: Final = 9
END_S: Final = 60.0


class LiveSchedule:
    """One life of an order, with an actor in one of its gaps."""

    def __init__(self, bench: Bench, gaps: Gaps) -> None:
        self.bench, self.gaps = bench, gaps
        self.operations: OperatorCommands | None = None
        self.task: asyncio.Task[object]
        self.resting: OrderAnswer
        self.killed: list[VenueAccounts] = []
        self.replaced: list[LiveExchange] = []

    async def place(self) -> None:
        await self.bench.buy("0.1", leverage=D(5), exit_plan=PLAN, client_order_id="op")

    async def cancel(self) -> None:
        await self.bench.exchange.cancel_order("apex", str(self.resting.id))

    async def book_stop(self) -> None:
        """Discover that the venue has executed a stop."""
        self.bench.venue.reach("BTC", "92900.0")
        await self.bench.synchronize()

    async def book_parts(self) -> None:
        """Discover that the venue has filled a part of the resting order, and then more of it."""
        await self.fill_parts()
        for mid in ("90000.0", "89990.0"):
            self.bench.venue.reach("BTC", mid)
            await self.bench.synchronize()

    async def exit(self) -> None:
        """Close a position whose time is over."""
        plan = ExitPlan(stop=PLAN.stop, time_exit=self.bench.clock.now() + timedelta(seconds=30))
        await self.bench.exchange.set_exit_plan("apex", "BTC", plan)
        await self.bench.clock.advance(timedelta(seconds=31))
        await self.bench.tell()
        await self.bench.synchronize()

    async def flatten(self) -> None:
        """Halt the account and close its positions, as an operator does: one attempt, and the rest is reported."""
        bench = self.bench
        limits = LossLimits(bench.database, bench.exchange, bench.halts, live_settings(bench.venue.url))
        self.operations = OperatorCommands(bench.database, bench.exchange, bench.halts, limits)
        self.operations.start()
        await bench.halts.halt("apex", HaltCause.OPERATOR, "odd", "someone", Verb.FLATTEN)
        await self.operations.poll()
        await ended(f"{Verb.FLATTEN} ")

    # --- actors

    async def trade_elsewhere(self) -> None:
        """Trade another account at the venue; a part of the order is filled."""
        await self.fill_parts()
        await self.bench.buy("0.3", leverage=D(5), account_id="zen", client_order_id="elsewhere")

    async def fill_parts(self) -> None:
        self.bench.venue.fill_share = D("0.4")

    async def halt(self) -> None:
        await self.bench.halts.halt(None, HaltCause.OPERATOR, "odd", "someone")

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
        if self.operations is not None:
            await self.operations.close()
        self.killed.append(self.bench.venue_accounts)
        await self.bench.kill()
        await self.bench.start()
        await self.bench.tell()

    async def succeed(self) -> None:
        """Let another process lead, which this one does not notice, as if it had been frozen meanwhile."""
        self.killed.append(self.bench.venue_accounts)
        self.replaced.append(self.bench.exchange)
        await self.bench.start()
        await self.bench.tell()
        with suppress(TraderError):
            await self.bench.synchronize()

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
    "live parts": LiveSchedule.book_parts,
    "live exit": LiveSchedule.exit,
    "live flatten": LiveSchedule.flatten,
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
    "successor": LiveSchedule.succeed,
    "another account": LiveSchedule.trade_elsewhere,
    "parts": LiveSchedule.fill_parts,
    "halt": LiveSchedule.halt,
}
ONLY_FOR: Final = {"retry": {"live order"}}
"""Actors that mean something for these operations only."""

PAIRS: Final = [
    (operation, actor) for operation in OPERATIONS for actor in ACTORS if operation in ONLY_FOR.get(actor, OPERATIONS)
]


async def run(database: GapDatabase, operation: str, actor: str, at: int) -> list[str]:
    """Run one schedule from an empty database and check its outcome. Return the gaps of the operation."""
    gaps = database.begin()
    async with prepared(database) as bench, asyncio.timeout(END_S):
        await add_model(database, "apex")
        await add_model(database, "zen", OTHER_ACCOUNT)
        bench.venue.open(OTHER_ACCOUNT)
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
        gaps.fault, bench.venue.send_faults, bench.venue.fill_share = None, [], D(1)
        if schedule.operations is not None:
            await schedule.operations.close()
        for exchange in schedule.replaced:
            exchange.suspend()
            await exchange.resign()
        for clients in schedule.killed:  # a task that a kill would have ended may have reconnected
            await clients.close()
        for error in (ended, acted):
            if isinstance(error, Exception) and not isinstance(error, TraderError):
                raise error
        await schedule.settle()
        await bench.agree()
        await bench.agree("zen", OTHER_ACCOUNT)
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


@pytest.fixture(autouse=True)
def _flatten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_commands, "FLATTEN_S", 0.0)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("pair", [" / ".join(pair) for pair in PAIRS])
async def test_an_actor_in_a_gap_of_a_live_order(
    database: GapDatabase, pair: str, record_property: Callable[[str, object], None]
) -> None:
    operation, actor = pair.split(" / ")
    tried = [Random(pair).randrange(USUAL_GAPS)]
    if is_nightly():
        if operation not in GAPS:
            GAPS[operation] = await run(database, operation, actor, AFTER_ITS_END)
        tried = gaps_for(actor, GAPS[operation])
    for at in tried:
        try:
            await run(database, operation, actor, at)
        except BaseException as error:
            error.add_note(f'SCHEDULE="{operation} / {actor} / {at}"')
            raise
    record_property("schedules", len(tried))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.skipif(asked_for()[0] not in OPERATIONS, reason="SCHEDULE names none of these")
async def test_again(database: GapDatabase) -> None:
    operation, actor, at = asked_for()
    await run(database, operation, actor, int(at))
