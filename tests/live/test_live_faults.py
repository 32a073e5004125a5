"""Random fault schedules: faults of venue, network, people and power never go unnoticed, and leave no trace.

After each cycle of five seconds, books and venue are compared. A position in the books has the stop of its plan within
15 seconds if the venue answers and accepts it, and books and orders equal the venue's within 60 seconds; otherwise an
alarm stands. What the service itself cancels or is killed in the middle of leaves no position without its stop even for
one cycle. Once the faults end, everything agrees, and no alarm is left.

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
SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "1000" if is_nightly() else "20"))
VENUES = [
    (kind, place + 2 * block) for place, kind in enumerate((FakeExchange, FakeHyperliquid)) for block in range(BLOCKS)
]
"""The blocks of seeds: the even ones for one venue, the odd ones for the other."""

TOLERANCE = D(1)
"""For funding that the venue did not show in time and that was booked by its formula."""

STEPS_MAX = 10
LOOKS_MAX = 15
CYCLE_S = 5
WITHIN = {"stop": timedelta(seconds=15), "books": timedelta(seconds=60)}
"""How long without an alarm a position may be without the stop of its plan, and books and orders unlike the venue's."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block"), VENUES)
async def test_no_schedule_leaves_a_position_without_its_stop_or_the_books_wrong_unnoticed(
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
                schedule = Schedule(bench, seed)
                try:
                    await schedule.run()
                    await schedule.settle()
                    await bench.agree(within=TOLERANCE)
                    await schedule.answers_are_true()
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {', '.join(schedule.told)}: {error}") from error
        finally:
            await bench.stop()


class Schedule:
    """Random actions of the service, the venue and a manual trader, and power cuts, under random faults."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.venue = bench.venue
        self.seed = seed
        self.random = Random(seed)
        bench.venue.random = Random(seed)
        bench.venue.refuses_streams, bench.venue.keeps_child_ids = seed % 3 == 0, seed % 4 != 0
        self.answers: list[OrderAnswer] = []
        self.told: list[str] = []
        self.since: dict[tuple[str, str], datetime] = {}
        self.equal: set[str] = set()

    @property
    def doings(self) -> Sequence[tuple[Callable[[], Awaitable[None]], int]]:
        """What may happen, with its weight."""
        return (
            (self.order, 8), (self.part, 4), (self.limit, 3), (self.cancel, 1), (self.plan, 5), (self.move, 5),
            (self.hour, 1), (self.hand, 2), (self.liquidation, 4), (self.delisting, 1), (self.outage, 1),
            (self.nonce, 1), (self.database, 2), (self.power_cut, 2), (self.power_cut_within, 3), (self.lose, 1),
            (self.streams, 3), (self.money, 1),
        )  # fmt: skip

    async def run(self) -> None:
        if self.random.random() < 0.5:
            self.empty()
        kinds, weights = zip(*self.doings, strict=True)
        for _ in range(self.random.randint(3, STEPS_MAX)):
            self.break_things()
            doing = self.random.choices(kinds, weights)[0]
            self.told.append(doing.__name__)
            with suppress(TraderError):  # an unknown answer, or an unreachable venue, which later actions must handle
                await doing()
            await self.pass_time(self.random.choice((5, 15, 40)))
            if self.random.random() < 0.5:
                self.venue.deliver()

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // CYCLE_S):
            await self.bench.cycle(CYCLE_S)
            self.compare()

    def break_things(self) -> None:
        random, venue = self.random, self.venue
        venue.fault_at_random(random, share=random.choice((0.0, 0.0, 0.1, 0.3, 0.8)))
        venue.fill_share = random.choice((D(1), D(1), D("0.3"), D(0)))
        venue.hides_trades = random.choice((0, 0, 0, 0, 2, 15))
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
        side = random.choice((OrderSide.BUY, OrderSide.BUY, OrderSide.SELL))
        plan = self.some_plan(symbol, side.direction) if random.random() < 0.7 else None
        fields = {
            "side": side, "quantity": str(size), "symbol": symbol, "leverage": D(10), "exit_plan": plan,
            "reduce_only": plan is None and random.random() < 0.4,
            "client_order_id": f"{self.seed}:{len(self.told)}", **more,
        }  # fmt: skip
        self.answers.append(await self.bench.place(fields.pop("side"), fields.pop("quantity"), **fields))

    async def part(self) -> None:
        """Reduce a position, whose stop then has another size."""
        if held := list(self.bench.account().positions.values()):
            position = self.random.choice(held)
            size = (position.quantity / self.random.choice((1, 2, 3))).quantize(D("0.0001"))
            side = OrderSide.SELL if position.is_long else OrderSide.BUY
            more = {"symbol": position.symbol, "reduce_only": True, "exit_plan": None}
            await self.order(side=side, quantity=str(size), **more)

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
            direction = self.bench.account().positions[symbol].side.direction
            await self.bench.exchange.set_exit_plan("apex", symbol, self.some_plan(symbol, direction))

    def some_plan(self, symbol: str, direction: int) -> ExitPlan:
        mid, random = self.venue.markets[symbol].mid, self.random
        return ExitPlan(
            stop=mid * (1 - direction * D(random.randint(5, 40)) / 1000) if random.random() < 0.8 else None,
            target=mid * (1 + direction * D(random.randint(5, 40)) / 1000) if random.random() < 0.6 else None,
            invalidation_price=mid * (1 - direction * D(random.randint(4, 30)) / 1000)
            if random.random() < 0.2
            else None,
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

    # Spontaneous events

    async def move(self) -> None:
        for symbol in SYMBOLS:
            mid = self.venue.markets[symbol].mid * (1 + D(self.random.randint(-25, 25)) / 1000)
            self.venue.reach(symbol, str(mid.quantize(D("0.1"))))
        await self.bench.tell()

    async def hour(self) -> None:
        """The venue pays funding, and may report it only after a synchronization."""
        await self.bench.see({}, after_s=3600)
        self.since = {}
        self.venue.hides_fundings = self.random.random() < 0.3 and self.bench.clock.now().minute < 10
        try:
            await self.pass_time(self.random.choice((0, 15)))
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
        """The account is followed, or the stream is cut."""
        if self.random.random() < 0.3:
            await self.venue.cut()
        elif not self.venue.refuses_streams:
            await self.bench.follow()

    async def hand(self) -> None:
        symbol, size = self.random.choice(SYMBOLS), D(self.random.randint(-300, 300) or 7).scaleb(-3)
        held = self.venue.positions().get(IDS[symbol], D(0))
        self.venue.trade_by_hand(symbol, str(-2 * held if held and self.random.random() < 0.4 else size))

    async def liquidation(self) -> None:
        """The venue cancels all orders and takes positions away; it may accept no stop for the rest at first."""
        if not self.venue.positions():
            await self.order(exit_plan=self.some_plan("BTC", 1), side=OrderSide.BUY, symbol="BTC", quantity="0.2")
        self.venue.refused_types = self.random.choice((set(), {2}))
        for symbol, market_id in IDS.items():
            held = self.venue.positions().get(market_id, D(0))
            if held and self.random.random() < 0.8:
                part = (held * self.random.choice((D("0.3"), D("0.5"), D(1)))).quantize(D("0.0001"))
                self.venue.liquidate(symbol, str(-part))
        await self.pass_time(self.random.choice((5, 45)))

    def empty(self) -> None:
        """A person closes all positions at the venue."""
        for symbol, market_id in IDS.items():
            if held := self.venue.positions().get(market_id):
                self.venue.trade_by_hand(symbol, str(-held))

    async def money(self) -> None:
        """A person pays in or out, which blocks openings until a new run."""
        self.venue.ledger.deposit += self.random.choice((-500, 1000))

    async def delisting(self) -> None:
        market = self.venue.markets[self.random.choice(SYMBOLS)]
        market.status = "inactive"
        await self.pass_time(15)
        market.status = "active"

    async def outage(self) -> None:
        self.venue.is_down = True
        try:
            with suppress(TraderError):
                await self.order()
            await self.pass_time(30)
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
            await self.pass_time(5)
        finally:
            writer.write = honest  # type: ignore[method-assign]

    async def power_cut(self) -> None:
        """The supervisor starts the service again until it leads: the venue may not answer at a start."""
        await self.bench.kill()
        while True:
            with suppress(TraderError):
                await self.bench.start()
                break
            await self.bench.kill()
        await self.bench.tell()

    async def power_cut_within(self) -> None:
        """The power fails while an order is being sent, which has its stop if it fills."""
        flat = [symbol for symbol in SYMBOLS if IDS[symbol] not in self.venue.positions()]
        symbol = self.random.choice(flat or SYMBOLS)
        plan = ExitPlan(stop=(self.venue.markets[symbol].mid * D("0.97")).quantize(D("0.1")))
        more = {"symbol": symbol, "exit_plan": plan, "reduce_only": False} if flat else {}
        placing = asyncio.create_task(self.order(**more))
        for _ in range(self.random.randint(1, 60)):
            await asyncio.sleep(self.random.choice((0, 0, 0.001)))  # the moment is random
        await self.bench.kill()
        placing.cancel()
        with suppress(TraderError, asyncio.CancelledError):
            await placing
        if flat and self.venue.positions().get(IDS[symbol], 0) > 0 and self.has_venues_stop(IDS[symbol]):
            assert self.venue.ledger.is_stopped(IDS[symbol]), f"{symbol}: an order filled without its stop"
        await self.power_cut()

    def has_venues_stop(self, market_id: int) -> bool:
        """Return whether the venue itself keeps the stop of what was filled last, also while the service is down."""
        opened = [each for each in self.venue.orders.values() if each.market_id == market_id and not each.reduce_only]
        entry = max(opened, key=lambda order: order.index)
        return self.venue.stops_parts or (entry.filled == entry.quantity and 2 not in self.venue.refused_types)

    # What is always true

    def compare(self) -> None:
        """Note what is wrong without an alarm, and fail when it has been for too long."""
        account, venue, now, wrong = self.bench.account(), self.venue, self.bench.clock.now(), set[tuple[str, str]]()
        lacking = {market_id for market_id, *_ in self.bench.lacks_protection()}
        for symbol, market_id in IDS.items():
            position, theirs = account.positions.get(symbol), venue.positions().get(market_id, D(0))
            ours = D(0) if position is None else position.side.direction * position.quantity
            is_closing = position is not None and position.closing is not None
            if ours != theirs or is_closing or market_id in lacking:
                wrong.add((symbol, "books"))
            stopped = position is not None and position.exit_plan.stop is not None and not is_closing
            if stopped and ours == theirs and not venue.ledger.is_stopped(market_id):
                wrong.add((symbol, "stop"))
            bared = {order.client_index for order in venue.bared if order.market_id == market_id} - venue.hidden
            is_equal, was_equal = ours == theirs, symbol in self.equal  # it knows what it cancels
            self.equal = self.equal | {symbol} if is_equal else self.equal - {symbol}
            is_bare = stopped and is_equal and was_equal and bared
            assert not is_bare, f"{symbol}: a stop was canceled before another stood"
        venue.bared.clear()
        self.since = {} if self.bench.exchange.troubles else {each: self.since.get(each, now) for each in wrong}
        for (symbol, what), since in self.since.items():
            assert now - since <= WITHIN[what], f"{symbol}: its {what} has been wrong since {since:%T}, now {now:%T}"

    # The end

    async def settle(self) -> None:
        """The faults end: what is wrong now is noticed or mended in time, and in the end nothing is wrong."""
        self.mend()
        self.since = {}
        await self.pass_time(100)
        for _ in range(LOOKS_MAX):
            await self.bench.see({}, after_s=61)
            await self.bench.cycle(CYCLE_S)
            if not self.bench.exchange.troubles:
                if self.bench.clock.now().minute > 10:  # until then, funding may be awaited
                    break
                continue
            if "is not ours" in self.bench.exchange.troubles["apex"]:  # a person cancels it, as the alarm asks
                for order in self.venue.orders.values():
                    if order.status == "pending" and order.parent is not None:
                        order.status = "canceled"
            if "balance differs" in self.bench.exchange.troubles["apex"]:
                self.empty()
                with suppress(TraderError):
                    for resting in self.bench.account().resting:
                        await self.bench.exchange.cancel_order("apex", str(resting.id))
                    await self.bench.exchange.reset_account("apex")
        self.venue.refuses_streams = True
        await self.venue.cut()  # five real minutes would have everything requested, too
        await self.bench.cycle(13)

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
