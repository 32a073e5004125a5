"""Account update: a change of one account, built step by step and finished as a `Posting`.

Nothing is visible outside until then, so a discarded update never happened.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Final
from uuid import UUID

import msgspec

from trader.core.clock import SET_BACK_LEAST
from trader.core.money import ONE, ZERO, ceil_to, divide, floor_to
from trader.exchange.domain.account import (
    Account,
    Marks,
    Position,
    RestingOrder,
    Run,
    Take,
    Taken,
    Trade,
    equity,
    is_liquidable,
    maintenance,
)
from trader.exchange.domain.ledger import (
    NO_TERMS,
    ExchangeRules,
    Posting,
    RestingChange,
    Terms,
    row_id,
)
from trader.exchange.domain.matching import Execution, ahead_at, fees_of, gone_from, rate_of, split, totals, walk
from trader.exchange.domain.orders import (
    AT_MARK,
    CLOSING_SIDE,
    AnswerFill,
    Cause,
    ExitPlan,
    Fill,
    FundingPayment,
    InsurancePayment,
    Order,
    OrderAnswer,
    OrderSide,
    OrderStatus,
    PlanTarget,
    Side,
)
from trader.market.domain.markets import Quote

NO_QUOTES: Final[Mapping[str, Quote]] = MappingProxyType({})


class AccountUpdate:
    """A mutable copy of an account. Methods change it and collect the rows; `posting` finishes it.

    `now` decides what is due. `at` dates the rows: it never goes back with the clock, and decides nothing. `quotes` has
    the books in which orders rest, unless a venue has them.
    """

    def __init__(
        self,
        account: Account,
        rules: ExchangeRules,
        marks: Marks,
        at: datetime,
        quotes: Mapping[str, Quote] = NO_QUOTES,
    ) -> None:
        self.before = account
        self.rules = rules
        self.marks = marks
        self.quotes = quotes
        self.now = at
        self.at = max(at, account.changed_at)
        self._taking_at = (
            at if self.at - at > SET_BACK_LEAST else self.at
        )  # depth recovers by a clock that was set back
        self.sequence = account.sequence
        self.realized = account.realized
        self.fees = account.fees
        self.funding = account.funding
        self.insurance = account.insurance
        self.positions = dict(account.positions)
        self.resting = {order.id: order for order in account.resting}
        self.taken: dict[str, Taken] = dict(account.taken)
        self.last_order_at = account.last_order_at
        self.liquidating = account.liquidating
        self.partly_liquidated_at = account.partly_liquidated_at
        self.fills: list[Fill] = []
        self.trades: list[Trade] = []
        self.funding_payments: list[FundingPayment] = []
        self.insurance_payments: list[InsurancePayment] = []
        self.resting_changes: dict[UUID, RestingChange] = {}

    def account(self) -> Account:
        return msgspec.structs.replace(
            self.before,
            sequence=self.sequence,
            changed_at=self.at,
            realized=self.realized,
            fees=self.fees,
            funding=self.funding,
            insurance=self.insurance,
            positions=self.positions,
            resting=tuple(self.resting.values()),
            last_order_at=self.last_order_at,
            liquidating=self.liquidating and bool(self.positions),
            partly_liquidated_at=self.partly_liquidated_at,
            taken=self.taken,
        )

    def posting(self, answers: Sequence[OrderAnswer] = (), next_run: Run | None = None) -> Posting:
        """Return the finished change. Do not use the update afterward."""
        changed = [p for symbol, p in self.positions.items() if p is not self.before.positions.get(symbol)]
        account = self.account()
        if next_run is not None:
            account = Account(
                id=account.id,
                run=next_run,
                sequence=account.sequence,
                changed_at=account.changed_at,
                last_order_at=account.last_order_at,
                taken=account.taken,
                seen_tick=account.seen_tick,
                seen_until=account.seen_until,
            )
        return Posting(
            account=account,
            sequence_before=self.before.sequence,
            run=self.before.run,
            fills=self.fills,
            positions=changed,
            trades=self.trades,
            funding=self.funding_payments,
            insurance=self.insurance_payments,
            resting=list(self.resting_changes.values()),
            answers=answers,
        )

    def answer(
        self,
        order: Order,
        order_id: UUID,
        executions: Sequence[Execution],
        status: OrderStatus,
        reason: str | None = None,
    ) -> OrderAnswer:
        """Return the answer to an order with its executions, which are all fills of this update."""
        filled, notional = totals(executions)
        return msgspec.structs.replace(
            OrderAnswer.of(order, order_id, status, self.at, reason),
            total_quantity=filled,
            average_price=divide(notional, filled) if filled else None,
            # Not differences of the account's sums, whose digits beyond the last significant one depend on restarts.
            total_fees=sum((fill.fee + fill.liquidation_fee for fill in self.fills), ZERO),
            realized_pnl=sum((trade.gross_pnl for trade in self.trades), ZERO),
            fills=tuple([AnswerFill(f.quantity, f.price, f.fee, f.maker, f.at) for f in self.fills]),
        )

    @property
    def has_changes(self) -> bool:
        return self.sequence != self.before.sequence

    def equity(self) -> Decimal:
        return equity(self.account(), self.marks)

    @property
    def is_liquidable(self) -> bool:
        return is_liquidable(self.account(), self.marks, self.rules.markets, self.rules.liquidation.until)

    @property
    def is_beyond_rescue(self) -> bool:
        """Whether equity is so far below maintenance that a liquidator takes over the positions."""
        account, backstop = self.account(), self.rules.liquidation.backstop
        return equity(account, self.marks) < backstop * maintenance(account, self.marks, self.rules.markets)

    def set_liquidating(self, liquidating: bool) -> None:
        """Begin or end a liquidation, if that is a change."""
        if liquidating is not self.liquidating:
            self.liquidating = liquidating
            self.next_sequence()

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def next_id(self) -> UUID:
        """Return the ID of a new row: a function of account and sequence, so that a replay writes the same rows."""
        return row_id(self.before.id, self.next_sequence())

    def take(self, quote: Quote, side: OrderSide, quantity: Decimal, limit: Decimal | None = None) -> list[Execution]:
        """Walk the quote's book, minus what is missing from it; what is taken recovers with the half-life."""
        executions = self.find(quote, side, quantity, limit)
        if executions:
            self.note_taken(quote.symbol, side, totals(executions)[0])
        return executions

    def find(self, quote: Quote, side: OrderSide, quantity: Decimal, limit: Decimal | None = None) -> list[Execution]:
        """Return the executions that the quote's book offers, without the quantities missing from it."""
        taken, lot = self.taken.get(quote.symbol, Taken()), self.rules.markets[quote.symbol].lot
        gone = gone_from(taken, side, self._taking_at, self.rules.book_recovery, lot)
        return walk(quote.book, side, quantity, gone, limit)

    def note_taken(self, symbol: str, side: OrderSide, quantity: Decimal) -> None:
        """Record a quantity that is missing from the market's books from now on."""
        self.taken[symbol] = self.taken.get(symbol, Taken()).plus(side, Take(self._taking_at, quantity))

    def execute(
        self,
        symbol: str,
        side: OrderSide,
        executions: Sequence[Execution],
        cause: Cause,
        terms: Terms = NO_TERMS,
        *,
        maker: bool = False,
    ) -> None:
        """Post executions: first against an opposing position; the rest opens or adds. A flip does both."""
        position = self.positions.get(symbol)
        if position is None or position.side is side.opens:
            self._open(symbol, side, executions, cause, terms, maker=maker)
            return
        closing, opening = split(executions, position.quantity)
        self._close(position, side, closing, cause, terms, maker=maker)
        if opening:
            self._open(symbol, side, opening, cause, terms, maker=maker)
        self.drop_pointless(symbol)

    def take_over(self, symbol: str) -> None:
        """Close a position at its mark without a taker fee; the account's last one costs all equity that is left."""
        position = self.positions[symbol]
        side, executions = CLOSING_SIDE[position.side], [Execution(self.marks[symbol], position.quantity)]
        self.note_taken(symbol, side, position.quantity)
        self._close(position, side, executions, Cause.LIQUIDATION, NO_TERMS, maker=False, is_taken_over=True)

    def _fee_rate(self, symbol: str, cause: Cause, *, maker: bool) -> Decimal:
        return ZERO if cause in AT_MARK else self.rules.fee_rate(symbol, maker=maker)

    def _open(
        self, symbol: str, side: OrderSide, executions: Sequence[Execution], cause: Cause, terms: Terms, *, maker: bool
    ) -> None:
        rate = self._fee_rate(symbol, cause, maker=maker)
        quantity, notional = totals(executions)
        fees = fees_of(executions, rate)
        margin = divide(notional, terms.leverage or ONE)
        position = self.positions.get(symbol)
        plan = terms.exit_plan
        if plan is not None:
            held = ZERO if position is None else position.quantity
            plan = self.laid(plan, symbol, side.opens, held + quantity)
        if position is None:
            position = Position(
                id=self.next_id(),
                symbol=symbol,
                side=side.opens,
                quantity=quantity,
                entry_notional=notional,
                margin=margin,
                leveraged=terms.leverage is not None,
                fees=fees,
                exit_plan=plan or ExitPlan(),
                confidence=terms.confidence,
                invocation_id=terms.invocation_id,
                opened_at=self.at,
                funded_until=self.at,  # no hour is paid twice
            )
        else:
            position = msgspec.structs.replace(
                position,
                quantity=position.quantity + quantity,
                entry_notional=position.entry_notional + notional,
                margin=position.margin + margin,
                leveraged=position.leveraged or terms.leverage is not None,
                fees=position.fees + fees,
                exit_plan=plan or position.exit_plan,
                confidence=position.confidence if terms.confidence is None else terms.confidence,
            )
        self.positions[symbol] = position
        self.fees += fees
        for execution in executions:
            self._note_fill(position.id, symbol, side, execution, rate, ZERO, cause, terms, maker=maker)

    def _close(
        self,
        position: Position,
        side: OrderSide,
        executions: Sequence[Execution],
        cause: Cause,
        terms: Terms,
        *,
        maker: bool,
        is_taken_over: bool = False,
    ) -> None:
        rate = ZERO if is_taken_over else self._fee_rate(position.symbol, cause, maker=maker)
        quantity, notional = totals(executions)
        part, rest = position.split(quantity)
        gross = notional - part.entry_notional
        if side is OrderSide.BUY:
            gross = -gross
        exit_fees = fees_of(executions, rate)
        self.realized += gross
        self.fees += exit_fees
        if rest is None:
            del self.positions[position.symbol]
        else:
            part = msgspec.structs.replace(part, id=self.next_id())
            self.positions[position.symbol] = msgspec.structs.replace(
                rest, realized=position.realized + gross, exit_plan=rest.exit_plan.trimmed(rest.quantity)
            )
        penalties = [ZERO] * len(executions)
        if is_taken_over:
            penalties = [ZERO if self.positions else max(ZERO, self.equity())]
        elif cause is Cause.LIQUIDATION:
            penalties = self._liquidation_fees(executions)
        penalty = sum(penalties, ZERO)
        self.fees += penalty
        self.trades.append(
            Trade(
                **{name: getattr(part, name) for name in part.__struct_fields__ if name != "fees"},
                fees=part.fees + exit_fees + penalty,
                account_id=self.before.id,
                run_id=self.before.run.id,
                parent_id=None if rest is None else position.id,
                exit_notional=notional,
                gross_pnl=gross,
                liquidation_fees=penalty,
                close_reason=cause,
                closed_at=self.at,
            )
        )
        for execution, fee in zip(executions, penalties, strict=True):
            self._note_fill(part.id, part.symbol, side, execution, rate, fee, cause, terms, maker=maker)

    def _liquidation_fees(self, executions: Sequence[Execution]) -> list[Decimal]:
        """Return each fill's liquidation fee, limited by the equity left after the fills and their taker fees."""
        left = max(ZERO, self.equity())
        fees = []
        for execution in executions:
            fee = min(execution.price * execution.quantity * self.rules.liquidation_rate, left)
            left -= fee
            fees.append(fee)
        return fees

    def _note_fill(
        self,
        order_id: UUID,
        symbol: str,
        side: OrderSide,
        execution: Execution,
        rate: Decimal,
        liquidation_fee: Decimal,
        cause: Cause,
        terms: Terms,
        *,
        maker: bool,
    ) -> None:
        self.fills.append(
            Fill(
                sequence=self.next_sequence(),
                order_id=order_id,
                request_id=terms.request_id,
                symbol=symbol,
                side=side,
                quantity=execution.quantity,
                price=execution.price,
                fee=execution.price * execution.quantity * rate_of(execution, rate),
                liquidation_fee=liquidation_fee,
                maker=maker,
                cause=cause,
                at=self.at,
            )
        )

    def book_funding(
        self, position: Position, boundary: datetime, rate: Decimal, amount: Decimal, mark: Decimal
    ) -> Position:
        """Post a funding payment (negative: paid by the account) and return the position after it."""
        after = msgspec.structs.replace(position, funding=position.funding + amount, funded_until=boundary)
        self.positions[position.symbol] = after
        self.funding += amount
        self.funding_payments.append(
            FundingPayment(
                sequence=self.next_sequence(),
                order_id=position.id,
                symbol=position.symbol,
                boundary=boundary,
                quantity=position.quantity,
                mark=mark,
                rate=rate,
                amount=amount,
                at=self.at,
            )
        )
        return after

    def laid(self, plan: ExitPlan, symbol: str, side: Side, quantity: Decimal) -> ExitPlan:
        """Return a plan as a position of this quantity has it: its stop at the trailing distance, if that is tighter,
        and its targets with their quantities in whole lots, on their passive tick, nearest first."""
        plan = plan.trailed(side, self.marks[symbol])
        if all(target.quantity for target in plan.targets):
            return plan
        market, closing, quote = self.rules.markets[symbol], CLOSING_SIDE[side], self.quotes.get(symbol)
        targets: list[PlanTarget] = []
        fractions = closed = ZERO
        for target in sorted(plan.targets, key=lambda target: side.direction * target.price):
            price = (ceil_to if side is Side.LONG else floor_to)(target.price, market.tick_at(target.price))
            fractions += target.fraction
            covered = quantity if fractions == ONE else floor_to(quantity * fractions, market.lot)
            ahead = ahead_at(quote, closing, price) if quote and self.rules.limit_fills == "queue" else ZERO
            if targets and targets[-1].price == price:  # two at one price are one
                before = targets.pop()
                closed -= before.quantity
                fraction = before.fraction + target.fraction
            else:
                fraction = target.fraction
            if covered > closed:
                targets.append(PlanTarget(price=price, fraction=fraction, quantity=covered - closed, ahead=ahead))
            closed = covered
        return msgspec.structs.replace(plan, targets=tuple(targets))

    def replan(self, position: Position, plan: ExitPlan) -> Position:
        """Give a position another exit plan, if it is another, and return the position."""
        if plan == position.exit_plan:
            return position
        self.positions[position.symbol] = position = msgspec.structs.replace(position, exit_plan=plan)
        self.next_sequence()
        return position

    def reduce_target(self, symbol: str, price: Decimal, quantity: Decimal, ahead: Decimal = ZERO) -> None:
        """Take what fills at a price off the target there, if the position in the market still has it."""
        if (position := self.positions.get(symbol)) is not None:
            targets = (
                msgspec.structs.replace(each, quantity=each.quantity - quantity, ahead=ahead)
                if each.price == price
                else each
                for each in position.exit_plan.targets
            )
            left = tuple(each for each in targets if each.quantity > 0)
            self.replan(position, msgspec.structs.replace(position.exit_plan, targets=left))

    def rest(self, order: RestingOrder) -> None:
        """Rest a limit order."""
        self.resting[order.id] = order
        self._note_resting(order, "RESTING")

    def fill_resting(self, order: RestingOrder, executions: Sequence[Execution], *, maker: bool = True) -> None:
        """Post fills of a resting order."""
        remaining = order.remaining - totals(executions)[0]
        after = msgspec.structs.replace(order, remaining=remaining)
        if remaining:
            self.rest(after)
        else:
            del self.resting[order.id]
            self._note_resting(after, "FILLED")
        self.execute(order.symbol, order.side, executions, Cause.LIMIT, Terms.of(order, order.id), maker=maker)

    def cancel(self, order: RestingOrder, reason: str) -> None:
        """Cancel a resting order."""
        del self.resting[order.id]
        self._note_resting(order, "CANCELLED", reason)

    def drop_pointless(self, symbol: str) -> None:
        """Cancel the market's reduce-only orders that have no position left to reduce."""
        position = self.positions.get(symbol)
        for order in list(self.resting.values()):
            if order.symbol == symbol and order.reduce_only and (position is None or position.side is order.side.opens):
                self.cancel(order, "nothing is left to reduce")

    def _note_resting(self, order: RestingOrder, status: str, reason: str | None = None) -> None:
        self.resting_changes[order.id] = RestingChange(
            order=order,
            status=status,
            sequence=self.next_sequence(),
            cancel_reason=reason,
            closed_at=None if status == "RESTING" else self.at,
        )

    def write_off(self) -> None:
        """Post a loss beyond equity as an insurance payment on the most recently closed trade."""
        missing = -self.equity()
        if missing <= 0 or not self.trades:
            return
        last = self.trades[-1]
        self.trades[-1] = msgspec.structs.replace(last, insurance=last.insurance + missing)
        self.insurance += missing
        self.insurance_payments.append(
            InsurancePayment(sequence=self.next_sequence(), order_id=last.id, amount=missing, at=self.at)
        )

    def write_off_when_flat(self) -> None:
        """Write off the loss of an account without positions whose last close cost more than it had."""
        if not self.positions:
            self.write_off()
