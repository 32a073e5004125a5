"""The exchange rules against the reference account, on random orders over random books and over real candles."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace
from support.books import START, make_quote, moment_of, seconds
from support.side_by_side import SideBySide

from trader.core.money import floor_to, round_to
from trader.exchange.domain.ledger import LimitFills, Liquidation
from trader.exchange.domain.orders import Cause, ExitPlan, Order, OrderSide, OrderType, PlanTarget
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.protocol import LIQUIDATIONS
from trader.market.domain.markets import MARKETS, MarginTier, Quote

SYMBOLS = ("BTC", "ETH", "SOL")
PRICES = {"BTC": Decimal(98_000), "ETH": Decimal(2_800), "SOL": Decimal(200)}
MOVES = (0, 0, 1, -1, 5, -5, 20, -20, 80, -80, 300, -300, 1_000, -1_500, 3_000)
"""Moves of the mid from one book to the next, in basis points."""

DEPTHS = (1, 30, 500, 500, 5_000, 100_000)
"""Quantities of a level in quote currency; the first is thinner than any order."""

STEPS = (1, 1, 1, 7, 29, 31, 1_200, 3_600, 9_000, "hour", "hour", "before", -40, -4_000)
"""The seconds to the next update, or its position: on the next whole hour, or a millisecond before it.

Where it goes back the clock was set back.
"""

RATES = (Decimal("0.0000125"), Decimal("-0.00003"), Decimal("0.0004"))


def rate_of_hour(symbol: str, boundary: datetime) -> Decimal:
    return RATES[(boundary.hour + len(symbol) + ord(symbol[0])) % len(RATES)]


levels_drawn = st.lists(st.tuples(st.sampled_from(DEPTHS), st.integers(1, 40)), min_size=1, max_size=4)
"""For each level, its depth and how many ticks it is behind the previous one."""

books_drawn = st.tuples(st.sampled_from(MOVES), levels_drawn, levels_drawn, st.integers(-1, 5))

offsets = st.sampled_from((None, None, None, 1, 10, 50, 200, 400, 1_000, 0, -30))
"""Basis points from the mark, on the side where the price belongs."""

plans_drawn = st.none() | st.tuples(
    offsets,
    offsets,
    offsets,
    st.sampled_from((None, None, None, 1, 600, 4_000, 20_000, -1)),
    st.sampled_from((None, None, 3, 50, 400, 10_000)),
    st.sampled_from((
        (), (), ((20, "0.5"),), ((90, "1"),), ((3, "0.3"), (400, "0.3"), (60, "0.4")), ((60, "0.333"), (5, "0.6667")),
        ((10, "0.01"), (30, "0.5")), ((40, "0.3"), (40, "0.5")), ((-3, "0.5"),),
    )),
)  # fmt: skip


orders_drawn = st.tuples(
    st.sampled_from(SYMBOLS), st.sampled_from(OrderSide), st.sampled_from((1, 3, 1, 10, 60)),
    st.sampled_from((20, 3, None)), st.sampled_from((False, False, False, True)), st.none() | plans_drawn,
)  # fmt: skip
"""Market orders of pairs: market, side, margin, leverage, whether it only reduces, and the exit plan."""


def moment_after(at: datetime, step: float | str) -> datetime:
    if not isinstance(step, str):
        return at + seconds(step)
    hour = at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    return hour if step == "hour" else hour - timedelta(milliseconds=1)


def drawn_quote(symbol: str, price: Decimal, drawn: Any, at: datetime) -> Quote:
    _, bids, asks, mark_offset = drawn
    market = MARKETS[symbol]
    sides = []
    for direction, levels in ((-1, bids), (1, asks)):
        at_price, side = price, []
        for depth, gap in levels:
            at_price += direction * gap * market.tick * (1 if symbol != "BTC" else 20)
            side.append((at_price, max(market.lot, floor_to(depth / price, market.lot))))
        sides.append(side)
    mark = None if mark_offset < 0 else price + mark_offset * market.tick
    return make_quote(symbol, *sides, at=at, mark=mark)


def drawn_plan(drawn: Any, side: OrderSide, mark: Decimal, at: datetime) -> ExitPlan | None:
    if drawn is None:
        return None
    stop, target, invalidation, after, trail, targets = drawn

    def price(offset: int | None, sign: int) -> Decimal | None:
        return None if offset is None else mark * (1 + sign * side.direction * Decimal(offset) / 10_000)

    return ExitPlan(
        stop=price(stop, -1),
        target=price(target, 1),
        invalidation_price=price(invalidation, -1),
        time_exit=None if after is None else at + timedelta(seconds=after),
        trailing_distance=None if trail is None else mark * trail / 10_000,
        targets=tuple(
            PlanTarget(price=mark * (1 + side.direction * Decimal(offset) / 10_000), fraction=Decimal(fraction))
            for offset, fraction in targets
        ),
    )


class Exchange(RuleBasedStateMachine):
    """One account under random orders and markets."""

    both: SideBySide
    moment: Moment

    @initialize(
        capital=st.sampled_from((1_000, 25_000, 60)),
        books=st.tuples(books_drawn, books_drawn, books_drawn),
        every=st.sampled_from((1, 1, 8)),
        fills=st.sampled_from(get_args(LimitFills)),
        latency=st.sampled_from((0, 0, 200, 8_000)),
        rule=st.sampled_from((Liquidation(), replace(LIQUIDATIONS["hyperliquid"], whole_up_to=Decimal(2_000)))),
    )
    def open(self, capital: int, books: Any, every: int, fills: LimitFills, latency: int, rule: Liquidation) -> None:
        self.prices = dict(PRICES)
        waits = timedelta(milliseconds=latency)
        self.both = SideBySide(
            Decimal(capital), rate_of_hour, START, every=every, fills=fills, latency=waits, rule=rule
        )
        self.both.change_rules(replace(MARKETS["SOL"], funding_interval_h=4))
        self.moment = moment_of(
            *(drawn_quote(s, PRICES[s], drawn, START) for s, drawn in zip(SYMBOLS, books, strict=True))
        )

    def size(self, symbol: str, margin: int, leverage: int | Decimal) -> Decimal:
        """A quantity whose margin is worth this many percent of the capital, rarely a multiple of the lot."""
        notional = self.both.account.run.initial_capital * leverage * margin / 100
        return max(MARKETS[symbol].lot / 2, round_to(notional / self.prices[symbol], Decimal("1e-7")))

    @rule(
        books=st.dictionaries(st.sampled_from(SYMBOLS), books_drawn, min_size=1, max_size=3),
        after=st.sampled_from(STEPS),
        missed=st.sampled_from((False, False, True)),
    )
    def update(self, books: dict[str, Any], after: float | str, *, missed: bool = False) -> None:
        """An update of some markets; of a missed update, only the quotes are known afterward."""
        at = moment_after(self.moment.at, after)
        quotes = []
        for symbol, drawn in books.items():
            moved = self.prices[symbol] * (1 + Decimal(drawn[0]) / 10_000)
            self.prices[symbol] = max(round_to(moved, MARKETS[symbol].tick), PRICES[symbol] / 10)
            quotes.append(drawn_quote(symbol, self.prices[symbol], drawn, at))
        self.moment = moment_of(*quotes, before=self.moment, at=at)
        known = {quote.symbol: quote for quote in quotes} if missed else self.moment.quotes
        self.both.update(replace(self.moment, quotes=known))

    @rule(move=st.sampled_from(MOVES), depth=st.sampled_from(DEPTHS))
    def move_all(self, move: int, depth: int) -> None:
        """Move all markets the same way within one second, which causes liquidations."""
        levels = [(depth, 1), (depth, 10)]
        self.update(dict.fromkeys(SYMBOLS, (move, levels, levels, -1)), 1)

    @rule(
        symbol=st.sampled_from(SYMBOLS),
        side=st.sampled_from(OrderSide),
        margin=st.sampled_from((10, 30, 1, 30, 60, 95, 0, 200)),
        limit=st.none() | st.sampled_from((-10_000, -300, -30, -3, 0, 3, 30)),
        leverage=st.sampled_from((None, 20, 1, Decimal("2.5"), 3, 7, 20)),
        reduce_only=st.sampled_from((False, False, False, True)),
        plan=plans_drawn,
        confidence=st.sampled_from((None, None, Decimal("62.5"), Decimal(90))),
        cause=st.sampled_from((Cause.ORDER, Cause.ORDER, Cause.OPERATOR)),
        post_only=st.sampled_from((False, False, True)),
        admitted=st.sampled_from((True, True, True, True, True, False)),
    )
    def place(
        self,
        symbol: str,
        side: OrderSide,
        margin: int,
        limit: int | None,
        leverage: Any,
        *,
        reduce_only: bool,
        plan: Any,
        confidence: Decimal | None = None,
        cause: Cause = Cause.ORDER,
        post_only: bool = False,
        admitted: bool = True,
    ) -> None:
        order = self.order(
            symbol,
            side,
            margin,
            limit,
            leverage,
            reduce_only=reduce_only,
            plan=plan,
            confidence=confidence,
            cause=cause,
        )
        order = replace(order, post_only=post_only and limit is not None)
        if admitted:
            self.both.place(order, self.moment)
        else:
            self.both.refuse(order, self.moment.at)

    def order(
        self,
        symbol: str,
        side: OrderSide,
        margin: int,
        limit: int | None,
        leverage: Any,
        *,
        reduce_only: bool,
        plan: Any,
        confidence: Decimal | None = None,
        cause: Cause = Cause.ORDER,
    ) -> Order:
        mark = self.moment.marks[symbol]
        return Order(
            account_id="default",
            symbol=symbol,
            side=side,
            quantity=self.size(symbol, margin, leverage or 1),
            type=OrderType.MARKET if limit is None else OrderType.LIMIT,
            limit_price=None
            if limit is None
            else mark * (1 + side.direction * Decimal(limit) / 10_000) + Decimal("0.0004"),
            leverage=None if leverage is None else Decimal(leverage),
            reduce_only=reduce_only,
            exit_plan=drawn_plan(plan, side, mark, self.moment.at),
            confidence=confidence,
            cause=cause,
        )

    @rule(orders=st.tuples(orders_drawn, orders_drawn))
    def place_pair(self, orders: Any) -> None:
        first, second = (
            self.order(symbol, side, margin, None, leverage, reduce_only=reduce_only, plan=plan)
            for symbol, side, margin, leverage, reduce_only, plan in orders
        )
        self.both.place_pair(first, second, self.moment)

    @rule(side=st.sampled_from(OrderSide), margin=st.sampled_from((20, 30)))
    def fill_up(self, side: OrderSide, margin: int) -> None:
        """Take all available leverage in every market."""
        for symbol in SYMBOLS:
            self.place(symbol, side, margin, None, 20, reduce_only=False, plan=None)

    @rule(
        symbol=st.sampled_from(SYMBOLS),
        coarser=st.sampled_from((1, 10, Decimal("0.1"))),
        stricter=st.sampled_from((1, 2, Decimal("0.5"))),
        tiers=st.sampled_from(((), (5_000,), (20_000, 100_000))),
        own=st.sampled_from(((None, None), (Decimal("0.001"), Decimal(0)))),
    )
    def change_rules(
        self,
        symbol: str,
        coarser: Decimal,
        stricter: Decimal,
        tiers: tuple[int, ...],
        own: tuple[Decimal | None, Decimal | None],
    ) -> None:
        """The venue changes a market's steps, minimum, margin and fees."""
        usual = MARKETS[symbol]
        rate = usual.maintenance_rate * stricter
        self.both.change_rules(
            replace(
                usual,
                lot=usual.lot * coarser,
                tick=usual.tick * coarser,
                min_notional=usual.min_notional * stricter,
                maintenance_rate=rate,
                tiers=tuple(MarginTier(Decimal(above), rate * (2 + n), (10, 3)[n]) for n, above in enumerate(tiers)),
                taker_rate=own[0],
                maker_rate=own[1],
                funding_interval_h=self.both.rules.markets[symbol].funding_interval_h,
            )
        )

    @precondition(lambda self: self.both.account.resting)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.both.cancel(which % len(self.both.account.resting), self.moment)

    @precondition(lambda self: self.both.account.positions)
    @rule(which=st.integers(0, 2), plan=plans_drawn)
    def change_plan(self, which: int, plan: Any) -> None:
        positions = list(self.both.account.positions.values())
        position = positions[which % len(positions)]
        opening = OrderSide.BUY if position.side.direction > 0 else OrderSide.SELL
        drawn = drawn_plan(plan, opening, self.moment.marks[position.symbol], self.moment.at)
        self.both.set_exit_plan(position.symbol, drawn or ExitPlan(), self.moment)

    @precondition(lambda self: self.both.account.sequence > 10)
    @rule(capital=st.sampled_from((1_000, 25_000, 60)))
    def reset(self, capital: int) -> None:
        self.both.reset(Decimal(capital), self.moment)


Exchange.TestCase.settings = settings(stateful_step_count=40)
test_engine_agrees_with_the_reference = Exchange.TestCase
