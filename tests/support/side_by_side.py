"""The exchange's rules and the reference account side by side: the same calls, compared exactly after each."""

from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

from msgspec.structs import replace
from support.books import RULES, open_account
from support.reference_account import BY_QUARTERS, ReferenceAccount
from support.reference_ledger import Books
from support.reference_orders import Answer

from trader.exchange.domain import account as figures
from trader.exchange.domain import rules as exchange
from trader.exchange.domain.ledger import LimitFills, Liquidation, Posting
from trader.exchange.domain.orders import Cause, ExitPlan, Fill, Order, OrderAnswer, OrderStatus, OrderType, Side
from trader.exchange.domain.tick_rules import Moment, apply_tick
from trader.market.domain.markets import Market

Rate = Callable[[str, datetime], Decimal]


class SideBySide:
    """One account, kept twice. Each call raises `AssertionError` if the two, or the account's own rows, disagree."""

    def __init__(
        self,
        capital: Decimal,
        rate: Rate,
        at: datetime,
        *,
        every: int = 1,
        fills: LimitFills = "through",
        latency: timedelta = timedelta(0),
        rule: Liquidation = BY_QUARTERS,
    ) -> None:
        self.account = open_account(str(capital), at=at)
        self.rules = replace(
            RULES,
            markets=dict(RULES.markets),
            funding_interval_h=every,
            limit_fills=fills,
            latency=latency,
            liquidation=rule,
        )
        self.model = ReferenceAccount(
            capital,
            self.rules.markets,
            at,
            taker=RULES.taker_rate,
            maker=RULES.maker_rate,
            liquidation=RULES.liquidation_rate,
            recovery=RULES.book_recovery,
            every=self.rules.funding_interval_h,
            fills=fills,
            latency=latency,
            rule=rule,
        )
        self.rate = rate
        self.numbers: dict[UUID, int] = {}
        self.ids: set[UUID] = set()
        self.rows: list[Posting] = []
        self.seen: dict[str, int] = defaultdict(int)
        self.quiet = 0
        self.checked = 0
        self.lines = 0

    def place(self, order: Order, moment: Moment) -> OrderAnswer:
        posting = exchange.place(self.account, order, moment, self.rules, self.rate)
        expected = self.model.place(order, moment, self.rate)
        (answer,) = posting.answers
        assert answer.id not in self.ids
        self.ids.add(answer.id)
        if answer.status is OrderStatus.RESTING:
            self.numbers[answer.id] = self.model.resting[-1].number if self.model.resting else -1
        self._check_answer(order, answer, expected)
        self._apply(posting, moment)
        self._check_fills(order, moment, [fill for fill in posting.fills if fill.request_id == answer.id])
        self.seen[answer.status] += 1
        return answer

    def place_pair(self, first: Order, second: Order, moment: Moment) -> None:
        """Place a pair: it equals two orders in sequence if both fill, and else it has no effect but its answers."""
        pair = exchange.place_together(self.account, [first, second], moment, self.rules, self.rate)
        one = exchange.place(self.account, first, moment, self.rules, self.rate)
        two = exchange.place(one.account, second, moment, self.rules, self.rate)
        if {answer.status for answer in (*one.answers, *two.answers)} != {OrderStatus.FILLED}:
            self.seen["refused pair"] += 1
            self._note_refusal(pair)
            return
        assert (pair.account, pair.answers) == (two.account, [*one.answers, *two.answers])
        assert pair.fills == [*one.fills, *two.fills]
        for order, answer in zip((first, second), pair.answers, strict=True):
            self._check_answer(order, answer, self.model.place(order, moment, self.rate))
            self.ids.add(answer.id)
        self.seen["pair"] += 1
        self._apply(pair, moment)

    def refuse(self, order: Order, at: datetime) -> None:
        """Reject an order as the service does, with an answer and no other effect."""
        self._note_refusal(exchange.refuse(self.account, order, "halted", at))

    def _note_refusal(self, posting: Posting) -> None:
        assert {answer.status for answer in posting.answers} == {OrderStatus.REJECTED}
        assert posting.account.sequence == self.account.sequence + len(posting.answers)
        assert replace(posting.account, sequence=0, last_order_at=None) == replace(
            self.account, sequence=0, last_order_at=None
        )
        self.ids |= {answer.id for answer in posting.answers}
        self.rows.append(posting)
        self.account = posting.account

    def change_rules(self, market: Market) -> None:
        """Change the rules of a market at the venue."""
        self.rules.markets[market.symbol] = market

    def cancel(self, index: int, moment: Moment) -> None:
        order = self.account.resting[index]
        posting = exchange.cancel(self.account, order.id, moment.at)
        assert posting is not None
        self.model.cancel(self.numbers[order.id], moment.at)
        self._apply(posting, moment)
        self.seen["cancelled"] += 1

    def set_exit_plan(self, symbol: str, plan: ExitPlan, moment: Moment) -> None:
        posting = exchange.set_exit_plan(self.account, symbol, plan, moment, self.rules)
        assert self.model.set_exit_plan(symbol, plan, moment) is not isinstance(posting, str), posting
        if not isinstance(posting, str):
            self._apply(posting, moment)

    def update(self, moment: Moment) -> None:
        resting = {order.id: order for order in self.account.resting}
        held = self.account.positions
        posting = apply_tick(self.account, moment, self.rules, self.rate)
        self.model.update(moment, self.rate)
        if posting is None:
            self.quiet += 1
            assert self.account.changed_at == self.model.changed_at
            assert len(self.model.ledger) == self.lines
            if self.quiet % 25 == 1:
                self._compare(moment)
            return
        for fill in posting.fills:
            if fill.cause is Cause.LIMIT:
                assert fill.request_id is not None
                assert fill.maker
                assert fill.price == resting[fill.request_id].limit_price
            elif fill.cause is Cause.TARGET and fill.maker:
                assert fill.price in {target.price for target in held[fill.symbol].exit_plan.targets}
                self.seen["target at its limit"] += 1
            else:
                self._check_in_book(fill, moment)
            self.seen[fill.cause] += 1
        for symbol, position in posting.account.positions.items():
            if symbol in held and held[symbol].id == position.id and held[symbol].exit_plan != position.exit_plan:
                self.seen["plan moved by a tick"] += 1
        self._apply(posting, moment)
        if posting.trades and not self.account.positions:
            assert self.account.cash >= 0
        self.seen["funding"] += len(posting.funding)
        self.seen["insurance"] += len(posting.insurance)

    def reset(self, capital: Decimal, moment: Moment) -> None:
        posting = exchange.reset(self.account, capital, "USDT", moment, self.rules, self.rate)
        ended = self.model.reset(capital, moment, self.rate)
        self._note_ids(posting)
        self.rows.append(posting)
        self._check_trades(ended)
        assert posting.starts_run
        assert not posting.account.positions
        self.account, self.rows, self.checked = posting.account, [], 0
        self._compare(moment)

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _apply(self, posting: Posting, moment: Moment) -> None:
        assert posting.sequence_before == self.account.sequence
        assert posting.account.sequence > self.account.sequence
        self._note_ids(posting)
        self.rows.append(posting)
        self.account = posting.account
        self._compare(moment)

    def _note_ids(self, posting: Posting) -> None:
        sequences = [
            *(fill.sequence for fill in posting.fills),
            *(payment.sequence for payment in posting.funding),
            *(payment.sequence for payment in posting.insurance),
        ]
        assert len(set(sequences)) == len(sequences)
        assert all(posting.sequence_before < s <= posting.account.sequence for s in sequences)
        written = [row.id for row in (*posting.positions, *posting.trades)]
        assert len(set(written)) == len(written), "no row of orders is written twice in one statement"
        for trade in posting.trades:
            if trade.parent_id is not None:
                assert trade.id not in self.ids
                self.ids.add(trade.id)

    def _check_answer(self, order: Order, answer: OrderAnswer, expected: Answer) -> None:
        assert answer.status == expected.status, (answer, expected)
        assert answer.requested_quantity == order.quantity
        assert answer.total_quantity == expected.quantity == sum(fill.quantity for fill in answer.fills)
        assert answer.total_fees == expected.fees
        assert answer.realized_pnl == expected.realized
        average = None if answer.average_price is None else Fraction(answer.average_price)
        assert average == expected.average
        assert (answer.reason is not None) == (answer.status in {OrderStatus.REJECTED, OrderStatus.PARTIAL})

    def _check_fills(self, order: Order, moment: Moment, fills: list[Fill]) -> None:
        for fill in fills:
            self._check_in_book(fill, moment)
            assert not fill.maker
            assert fill.side is order.side
            if order.type is OrderType.LIMIT:
                assert order.limit_price is not None
                assert (order.limit_price - fill.price) * order.side.direction >= 0

    def _check_in_book(self, fill: Fill, moment: Moment) -> None:
        if fill.cause is Cause.LIQUIDATION and not fill.fee:
            assert fill.price == moment.marks[fill.symbol], "the liquidator took it over"
            return
        book = moment.quotes[fill.symbol].book
        shown = {level.price: level.quantity for level in (book.asks if fill.side == "buy" else book.bids)}
        if fill.cause in {Cause.STOP, Cause.INVALIDATION} and fill.price not in shown:
            assert all((fill.price - price) * fill.side.opens.direction > 0 for price in shown), "better than the stop"
            return
        assert fill.quantity <= shown[fill.price]

    def _compare(self, moment: Moment) -> None:
        account, model, marks = self.account, self.model, moment.marks
        model.see(moment)
        books = model.books()
        assert account.cash == model.cash()
        assert account.realized == books.realized
        assert account.fees == books.fees
        assert account.funding == books.funding
        assert account.insurance == books.insurance
        assert account.changed_at == model.changed_at
        assert account.liquidating == model.liquidating
        assert account.partly_liquidated_at == model.partly_at
        assert set(account.positions) == set(books.holdings)
        for symbol, position in account.positions.items():
            held, watch = books.holdings[symbol], model.watches[symbol]
            assert position.side.direction * position.quantity == held.quantity
            assert position.entry_notional == held.cost
            assert position.margin == held.margin
            assert position.fees == held.fees
            assert position.funding == held.funding
            assert position.realized == held.realized
            assert position.opened_at == held.opened_at
            plan = position.exit_plan
            assert replace(plan, stop=watch.plan.stop, targets=watch.plan.targets) == watch.plan
            assert plan.stop == watch.stop
            goals = [(goal.price, goal.left, goal.ahead) for goal in watch.goals]
            targets = [(target.price, target.quantity, target.ahead) for target in plan.targets]
            assert [tuple(map(Fraction, target)) for target in targets] == goals
            assert sum(left for _, left, _ in goals) <= abs(held.quantity)
            assert position.closing == watch.closing
            assert (position.confidence, position.leveraged) == (watch.confidence, watch.leveraged)
            assert position.funded_until == watch.funded_until
            price = figures.liquidation_price(account, symbol, marks, self.rules.markets)
            expected = model.liquidation_price(symbol)
            assert (price is None) == (expected is None)
            assert price is None or expected is None or abs(Fraction(price) - expected) <= Fraction(1, 10**16)
        assert [(self.numbers[order.id], Fraction(order.remaining)) for order in account.resting] == [
            (rest.number, rest.remaining) for rest in model.resting
        ]
        assert figures.equity(account, marks) == model.equity() >= 0
        assert figures.maintenance(account, marks, self.rules.markets) == model.maintenance()
        assert account.margin == model.margin()
        assert figures.reserved(account) == model.reserved()
        assert figures.free_margin(account, marks) == model.free()
        assert figures.available_cash(account, marks) == max(0, model.free())
        assert account.borrowed == max(0, -model.cash())
        if self.checked != len(self.rows):
            self._check_trades(books)
            self._check_rows()
        self.checked, self.lines = len(self.rows), len(model.ledger)

    def _check_trades(self, books: Books) -> None:
        trades = [trade for posting in self.rows for trade in posting.trades]
        assert [
            (
                t.symbol,
                *map(
                    Fraction,
                    (
                        t.quantity,
                        t.entry_notional,
                        t.exit_notional,
                        t.gross_pnl,
                        t.fees,
                        t.funding,
                    ),
                ),
                str(t.close_reason),
            )
            for t in trades
        ] == [
            (t.symbol, t.quantity, t.cost, t.proceeds, t.gross, t.fees, t.funding, t.reason) for t in books.trades
        ]  # fmt: skip
        assert sum(trade.insurance for trade in trades) <= books.insurance

    def _check_rows(self) -> None:
        """Check that the account equals the sums of trades and open positions, and of fills, funding and insurance."""
        account = self.account
        fills = [fill for posting in self.rows for fill in posting.fills]
        trades = [trade for posting in self.rows for trade in posting.trades]
        received = sum(payment.amount for posting in self.rows for payment in posting.funding)
        insured = sum(payment.amount for posting in self.rows for payment in posting.insurance)
        held = account.positions.values()
        of_trades = sum(trade.gross_pnl - trade.fees + trade.funding for trade in trades)
        of_open = sum(position.funding - position.fees for position in held)
        of_fills = sum(
            -fill.side.direction * fill.quantity * fill.price - fill.fee - fill.liquidation_fee for fill in fills
        )
        of_entries = sum(position.side.direction * position.entry_notional for position in held)
        initial = account.run.initial_capital
        assert account.cash == initial + of_trades + of_open + insured
        assert account.cash == initial + of_fills + of_entries + received + insured
        quantities: dict[str, Decimal] = defaultdict(Decimal)
        of_rows: dict[UUID, Decimal] = defaultdict(Decimal)
        for fill in fills:
            quantities[fill.symbol] += fill.side.direction * fill.quantity
            of_rows[fill.order_id] += fill.side.direction * fill.quantity
        signed = {p.symbol: p.side.direction * p.quantity for p in held}
        assert {symbol: quantity for symbol, quantity in quantities.items() if quantity} == signed
        for position in held:
            opened = of_rows[position.id] * position.side.direction
            assert opened >= position.quantity
            assert position.side in Side
