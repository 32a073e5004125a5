"""Random fault schedules: after any faults of venue, network, people and power, the books equal the venue's.

HYPOTHESIS_PROFILE=nightly runs 500 schedules per venue; FAULT_SCHEDULES sets the number for both. To repeat a failed
schedule, run its block.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from support.fake_exchange import FakeExchange
from support.fake_hyperliquid import FakeHyperliquid
from support.fake_ledger import ACCOUNT
from support.fake_venue import IDS
from support.live import SYMBOLS, Bench, add_model, prepared
from support.run_profile import is_nightly

from trader.core.errors import TraderError, Unavailable
from trader.database.pool import Database
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderSide, OrderStatus, OrderType, PlanTarget
from trader.market.domain.markets import PLAIN_FUNDING_RATE

D = Decimal
BLOCKS = 5
SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "1000" if is_nightly() else "30"))
VENUES = [
    (kind, place + 2 * block) for place, kind in enumerate((FakeExchange, FakeHyperliquid)) for block in range(BLOCKS)
]
"""The blocks of seeds: the even ones for one venue, the odd ones for the other."""

STEPS_MAX = 10
LOOKS_MAX = 12
WITHIN = {"stop": timedelta(seconds=15), "books": timedelta(seconds=60)}
"""How long a position may be without the stop of its plan, and the books unlike the venue without an alarm."""

REFUSED_WITHIN = timedelta(seconds=60)
"""The former, while the venue loses or refuses the attempts to place it."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block"), VENUES)
async def test_the_books_equal_the_venues_after_every_fault_schedule(
    database: Database, kind: type[FakeExchange], block: int
) -> None:
    async with prepared(database, kind) as bench:
        await add_model(database, "apex")
        bench.venue.ledger.deposit = D(100_000)
        bench.funding_rate = str(PLAIN_FUNDING_RATE)
        await bench.start()
        await bench.tell()
        try:
            for seed in range(block, SCHEDULES, len(VENUES)):
                await one_schedule(bench, seed)
        finally:
            await bench.stop()


async def one_schedule(bench: Bench, seed: int) -> None:
    schedule = Schedule(bench, seed)
    await schedule.run()
    await schedule.settle()
    try:
        await bench.agree()
        await schedule.answers_are_true()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {schedule.told}") from error


class Schedule:
    """Random actions of the service, the venue and a manual trader, and power cuts, under random faults."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.venue = bench.venue
        self.seed = seed
        self.random = Random(seed)
        bench.venue.random = Random(seed)
        bench.venue.refuses_streams = seed % 3 == 0
        self.answers: list[OrderAnswer] = []
        self.told: list[str] = []

    @property
    def doings(self) -> Sequence[tuple[Callable[[], Awaitable[None]], int]]:
        """What may happen, with its weight."""
        return (
            (self.order, 8), (self.limit, 3), (self.cancel, 2), (self.plan, 4), (self.move, 5), (self.look, 4),
            (self.hour, 1), (self.hand, 1), (self.liquidation, 1), (self.outage, 1), (self.nonce, 1),
            (self.database, 2), (self.power_cut, 2), (self.power_cut_within, 2), (self.lose, 1), (self.streams, 4),
        )  # fmt: skip

    async def run(self) -> None:
        kinds, weights = zip(*self.doings, strict=True)
        for _ in range(self.random.randint(3, STEPS_MAX)):
            self.break_things()
            doing = self.random.choices(kinds, weights)[0]
            self.told.append(doing.__name__)
            with suppress(TraderError):  # an unknown answer, or an unreachable venue, which later actions must handle
                await doing()
            await self.pass_after()
            if self.random.random() < 0.5:
                self.venue.deliver()

    async def pass_after(self) -> None:
        """Let no time pass after an action."""

    def break_things(self) -> None:
        random, venue = self.random, self.venue
        venue.fault_at_random(random, share=random.choice((0.0, 0.1, 0.4, 0.8)))
        venue.fill_share = random.choice((D(1), D(1), D("0.3"), D(0)))
        venue.hides_trades = random.choice((0, 0, 0, 2, 15))
        venue.doubles_trades = random.random() < 0.3
        venue.refused_types = random.choice((set(), set(), set(), {2}, {4}, {2, 4}))
        venue.stale_nonces = random.choice((0, 0, 0, 1, 5))
        venue.refusal = (21739, "not enough margin") if random.random() < 0.05 else None
        venue.sequencer_refusals = random.choice((0, 0, 0, 1))
        venue.request_s = random.choice((0.08, 1.0))
        venue.reuses_ids, venue.drops_reduce_only = random.random() < 0.5, random.random() < 0.5

    # Requests to the service

    async def order(self, **more: Any) -> None:
        random = self.random
        symbol = random.choice(SYMBOLS)
        size = D(random.randint(10, 500)).scaleb(-3) * (1 if symbol == "BTC" else 20)
        plan = self.some_plan(symbol) if random.random() < 0.6 else None
        side = OrderSide.BUY if plan is not None or random.random() < 0.4 else OrderSide.SELL
        fields = {
            "symbol": symbol, "leverage": D(10), "exit_plan": plan,
            "reduce_only": plan is None and random.random() < 0.4,
            "client_order_id": f"{self.seed}:{len(self.told)}", **more,
        }  # fmt: skip
        self.answers.append(await self.bench.place(side, str(size), **fields))

    async def limit(self) -> None:
        away = 1 - D(self.random.randint(-5, 30)) / 1000
        symbol = self.random.choice(SYMBOLS)
        price = self.venue.markets[symbol].mid * away
        post_only = self.random.random() < 0.3
        await self.order(symbol=symbol, type=OrderType.LIMIT, limit_price=price, exit_plan=None, post_only=post_only)

    async def cancel(self) -> None:
        if resting := self.bench.account().resting:
            await self.bench.exchange.cancel_order("apex", str(self.random.choice(resting).id))

    async def plan(self) -> None:
        if held := list(self.bench.account().positions):
            symbol = self.random.choice(held)
            await self.bench.exchange.set_exit_plan("apex", symbol, self.some_plan(symbol))

    def some_plan(self, symbol: str) -> ExitPlan:
        mid, random = self.venue.markets[symbol].mid, self.random
        return ExitPlan(
            stop=mid * (1 - D(random.randint(5, 40)) / 1000) if random.random() < 0.8 else None,
            target=mid * (1 + D(random.randint(5, 40)) / 1000) if random.random() < 0.6 else None,
            invalidation_price=mid * (1 - D(random.randint(4, 30)) / 1000) if random.random() < 0.2 else None,
            time_exit=self.bench.clock.now() + timedelta(seconds=random.randint(1, 900))
            if random.random() < 0.2
            else None,
            trailing_distance=mid * D(random.randint(2, 30)) / 1000 if random.random() < 0.3 else None,
            targets=tuple(
                PlanTarget(
                    price=mid * (1 + D(random.randint(2, 30)) / 1000), fraction=D(random.choice(("0.2", "0.33")))
                )
                for _ in range(random.choice((0, 0, 1, 3)))
            ),
        )

    async def look(self) -> None:
        await self.bench.synchronize()

    # Spontaneous events

    async def move(self) -> None:
        moved = {
            symbol: str(
                (self.venue.markets[symbol].mid * (1 + D(self.random.randint(-25, 25)) / 1000)).quantize(D("0.1"))
            )
            for symbol in SYMBOLS
        }
        await self.bench.see(moved, after_s=self.random.choice((1, 10, 70)))

    async def hour(self) -> None:
        """The venue pays funding, and may report it only after a synchronization."""
        await self.bench.see({}, after_s=3600)
        self.venue.hides_fundings = self.random.random() < 0.3 and self.bench.clock.now().minute < 10
        try:
            if self.random.random() < 0.5:
                await self.bench.synchronize()
        finally:
            self.venue.hides_fundings = False

    async def nonce(self) -> None:
        """Another sender uses the key."""
        for _ in range(self.random.randint(1, 3)):
            self.venue.use_nonce()

    async def lose(self) -> None:
        """From now on, the venue does not report one of its orders that it has shown once."""
        shown = {sent.client_index for sent in self.bench.exchange.live_account("apex").sent if sent.venue_index}
        standing = [index for index in shown if self.venue.orders[index].status in ("open", "pending")]
        if standing:
            self.venue.hidden.add(self.random.choice(standing))

    async def streams(self) -> None:
        """The account is followed for some cycles, or the stream is cut."""
        if self.random.random() < 0.3:
            await self.venue.cut()
            return
        if not self.venue.refuses_streams:
            await self.bench.follow()
        for _ in range(self.random.randint(1, 3)):
            await self.bench.cycle(10)

    async def hand(self) -> None:
        self.venue.trade_by_hand(self.random.choice(SYMBOLS), str(D(self.random.randint(-300, 300) or 7).scaleb(-3)))

    async def liquidation(self) -> None:
        for symbol, market_id in IDS.items():
            held = self.venue.positions().get(market_id, D(0))
            if held and self.random.random() < 0.6:
                part = (held * self.random.choice((D("0.5"), D(1)))).quantize(D("0.0001"))
                self.venue.liquidate(symbol, str(-part))

    async def outage(self) -> None:
        self.venue.is_down = True
        try:
            with suppress(TraderError):
                await self.order()
            await self.bench.synchronize()
        finally:
            self.venue.is_down = False

    async def database(self) -> None:
        """The database does not confirm some bookings, whether it made them or not."""
        writer, random = self.bench.writer, self.random
        honest = writer.write

        async def write(posting: Posting) -> None:
            fate = random.choice(("confirmed", "made", "lost"))
            if fate != "lost":
                await honest(posting)
            if fate != "confirmed":
                raise Unavailable("The database did not confirm it.")

        writer.write = write  # type: ignore[method-assign]
        try:
            with suppress(TraderError):
                await self.order()
            with suppress(TraderError):
                await self.plan()
            await self.bench.synchronize()
        finally:
            writer.write = honest  # type: ignore[method-assign]

    async def power_cut(self) -> None:
        """The supervisor starts the service again until it leads: the venue may not answer at a start."""
        while True:
            await self.bench.kill()
            with suppress(TraderError):
                await self.bench.start()
                break
        await self.bench.tell()

    async def power_cut_within(self) -> None:
        """The power fails while an order is being sent."""
        placing = asyncio.create_task(self.order())
        for _ in range(self.random.randint(1, 60)):
            await asyncio.sleep(self.random.choice((0, 0, 0.001)))  # the moment is random
        await self.power_cut()
        placing.cancel()
        with suppress(TraderError, asyncio.CancelledError):
            await placing

    # The end

    async def settle(self) -> None:
        """The faults end, a person closes foreign positions, and the service synchronizes a few times."""
        venue, bench = self.venue, self.bench
        self.mend()
        venue.refuses_streams = True
        await venue.cut()  # five real minutes would have everything requested, too
        for _ in range(LOOKS_MAX):
            await bench.see({}, after_s=61)
            await bench.synchronize()
            for symbol in SYMBOLS:
                position = bench.account().positions.get(symbol)
                ours = position.side.direction * position.quantity if position is not None else D(0)
                theirs = venue.positions().get(IDS[symbol], D(0))
                if ours != theirs:
                    self.told.append(f"a person trades {ours - theirs} {symbol}")
                    venue.trade_by_hand(symbol, str(ours - theirs))
        await bench.synchronize()

    def mend(self) -> None:
        venue = self.venue
        venue.send_faults.clear()
        venue.read_faults.clear()
        venue.deliver()
        venue.refusal, venue.refused_types, venue.hides_trades, venue.doubles_trades = None, set(), 0, False
        venue.fill_share, venue.stale_nonces, venue.sequencer_refusals, venue.request_s = D(1), 0, 0, 1.0

    async def answers_are_true(self) -> None:
        """Check that every answer matches the venue's actions."""
        async with self.bench.database.connection() as conn:
            rows = {
                row["request_id"]: row["client_index"]
                for row in await conn.fetch("SELECT request_id, client_index FROM venue_orders WHERE cause = 'order'")
            }
        for answer in self.answers:
            order = self.venue.ledgers[ACCOUNT].orders.get(rows.get(answer.id, 0))
            filled = D(0) if order is None else order.filled
            if answer.status in (OrderStatus.FILLED, OrderStatus.PARTIAL):
                assert filled == answer.total_quantity
            elif answer.status is OrderStatus.REJECTED:
                assert filled == 0
            else:
                assert filled >= answer.total_quantity


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block"), VENUES)
async def test_no_schedule_leaves_a_position_without_its_stop_or_the_books_wrong_unnoticed(
    database: Database, kind: type[FakeExchange], block: int
) -> None:
    async with prepared(database, kind) as bench:
        await add_model(database, "apex")
        bench.venue.ledger.deposit = D(100_000)
        await bench.start()
        await bench.tell()
        try:
            for seed in range(block, SCHEDULES, len(VENUES)):
                schedule = Watched(bench, seed)
                try:
                    await schedule.run()
                    await schedule.settle()
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {schedule.told}") from error
        finally:
            await bench.stop()


class Watched(Schedule):
    """A schedule in whose time the service runs: after each cycle of five seconds, venue and books are compared."""

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench, seed)
        self.since: dict[tuple[str, str], datetime] = {}
        self.is_faulty = True

    @property
    def doings(self) -> Sequence[tuple[Callable[[], Awaitable[None]], int]]:
        return (
            (self.order, 8), (self.limit, 2), (self.plan, 4), (self.move, 4), (self.hand, 1), (self.liquidation, 2),
            (self.outage, 1), (self.nonce, 1), (self.power_cut, 2), (self.power_cut_within, 2), (self.streams, 2),
        )  # fmt: skip

    async def pass_after(self) -> None:
        await self.pass_time(self.random.choice((5, 15, 40)))

    async def settle(self) -> None:
        """The faults end: what is wrong now is noticed or mended in time."""
        self.mend()
        self.is_faulty, self.since = False, {}
        await self.pass_time(100)

    async def move(self) -> None:
        for symbol in SYMBOLS:
            mid = self.venue.markets[symbol].mid * (1 + D(self.random.randint(-15, 15)) / 1000)
            self.venue.reach(symbol, str(mid.quantize(D("0.1"))))
        await self.bench.tell()

    async def outage(self) -> None:
        self.venue.is_down = True
        await self.pass_time(30)
        self.venue.is_down = False

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            await self.bench.cycle(5)
            self.compare()

    def compare(self) -> None:
        account, now, found = self.bench.account(), self.bench.clock.now(), set()
        for symbol, market_id in IDS.items():
            position, theirs = account.positions.get(symbol), self.venue.positions().get(market_id, D(0))
            ours = D(0) if position is None else position.side.direction * position.quantity
            if ours != theirs and not self.bench.exchange.troubles:
                found.add((symbol, "books"))
            stops = [
                order.quantity
                for order in self.venue.ledger.standing(market_id)
                if order.type == "stop-loss" and order.sign * theirs < 0
            ]
            wants = position is not None and position.exit_plan.stop is not None and position.closing is None
            if (
                ours == theirs != 0
                and wants
                and not self.venue.refused_types
                and max(stops, default=D(0)) < abs(theirs)
            ):
                found.add((symbol, "stop"))
        self.since = {each: self.since.get(each, now) for each in found}
        for (symbol, what), since in self.since.items():
            within = REFUSED_WITHIN if what == "stop" and self.is_faulty else WITHIN[what]
            assert now - since <= within, f"{symbol}: its {what} has been wrong since {since}"
