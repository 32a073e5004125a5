"""The rules of the paper exchange: what becomes of an order, and what an update of the markets does to an account.

Each function takes an account and a moment and gives a `Posting`, or the reason why there is none. Amounts are in the
quote currency. An update is applied in this order: funding, resting orders that it trades through, liquidation, exit
plans. Liquidation comes before the exit plans since the margin engine takes an account over the moment its equity is
gone; resting orders come before both since the price passed them on its way.
"""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from trader.domain.exchange.account import (
    Account,
    RestingOrder,
    Run,
    free_margin,
    opposing,
    reserved,
)
from trader.domain.exchange.account_update import AccountUpdate
from trader.domain.exchange.ledger import Posting, RateOfHour, Rules, Terms, row_id
from trader.domain.exchange.matching import Execution, totals
from trader.domain.exchange.order_validation import (
    entry_mark,
    passive_limit,
    quantity_of,
    refusal_of_plan,
    refusal_of_size,
)
from trader.domain.exchange.orders import (
    CLOSING_SIDE,
    AnswerFill,
    Cause,
    ExitPlan,
    Order,
    OrderAnswer,
    OrderStatus,
    OrderType,
)
from trader.domain.exchange.tick_rules import Moment, liquidate
from trader.domain.money import ZERO, divide, format_decimal

# --- orders -----------------------------------------------------------------------------------------------------------


def place(account: Account, order: Order, moment: Moment, rules: Rules, rate_of_hour: RateOfHour) -> Posting:
    """Meet an order with the book of the moment. The booking always holds the answer, a refusal included."""
    draft = AccountUpdate(account, rules, moment.marks, moment.at)
    draft.fund_held(rate_of_hour)  # it is due on what was held, not on what this order makes of it
    draft.last_order_at = draft.at
    request_id = draft.next_id()
    market = rules.markets[order.symbol]
    quantity = quantity_of(account, order, market)
    quote = moment.quotes[order.symbol]
    limit = passive_limit(order, market)
    refusal = refusal_of_size(account, order, quantity, quote.mark if limit is None else limit, market) or (
        refusal_of_plan(order.exit_plan, order.side.opens, entry_mark(order.side, quote.mark, limit), draft.at)
    )
    if refusal is not None:
        return refuse(account, order, refusal, moment.at)
    executions = draft.take(quote, order.side, quantity, limit)
    if executions:
        draft.execute(order.symbol, order.side, executions, order.cause, _terms(order, request_id))
    filled, notional = totals(executions)
    unfilled = quantity - filled
    if unfilled and order.type is OrderType.LIMIT:
        rest = _resting(order, request_id, quantity, unfilled, limit or ZERO, draft.at)
        if not order.reduce_only or opposing(draft.account(), order.symbol, order.side):
            draft.rest(rest)
    elif not executions:
        return refuse(account, order, f"the {order.symbol} book shows nothing to {order.side}", moment.at)
    refusal = _refusal_of_margin(account, draft, order, quantity, request_id)
    if refusal is not None:
        return refuse(account, order, refusal, moment.at)
    average = divide(notional, filled) if filled else None
    answer = _answer(order, request_id, draft, filled, average, unfilled=unfilled)
    liquidate(draft, moment, rate_of_hour)
    draft.write_off_when_flat()
    return draft.posting(answer)


def refuse(account: Account, order: Order, reason: str, at: datetime) -> Posting:
    """The booking of a refusal: nothing but its answer.

    It does not date the account: that would hide from it what the market did while it was refused for want of a price.
    """
    at = max(at, account.changed_at)
    sequence = account.sequence + 1
    answer = OrderAnswer(
        id=row_id(account.id, sequence),
        client_order_id=order.client_order_id,
        account_id=account.id,
        symbol=order.symbol,
        side=order.side,
        type=order.type,
        status=OrderStatus.REJECTED,
        reason=reason,
        requested_quantity=order.quantity,
        at=at,
    )
    after = msgspec.structs.replace(account, sequence=sequence, last_order_at=at)
    return Posting(account=after, sequence_before=account.sequence, run=account.run, answer=answer)


def cancel(account: Account, order_id: UUID, at: datetime) -> Posting | None:
    """Take a resting order out of the book; None when it does not rest."""
    order = next((order for order in account.resting if order.id == order_id), None)
    if order is None:
        return None
    draft = AccountUpdate(account, Rules({}, ZERO, ZERO), {}, at)
    draft.cancel(order, "cancelled by the caller")
    return draft.posting()


def _refusal_of_margin(
    account: Account, draft: AccountUpdate, order: Order, quantity: Decimal, request_id: UUID
) -> str | None:
    if _only_reduces(account, draft, order, quantity, request_id):
        return None
    missing = -free_margin(draft.account(), draft.marks)
    if missing <= 0:
        return None
    available = max(ZERO, free_margin(account, draft.marks))
    return (
        f"insufficient margin: with its fees the order needs {format_decimal(round(available + missing, 8))}, "
        f"available is {format_decimal(round(available, 8))}"
    )


def _only_reduces(account: Account, draft: AccountUpdate, order: Order, quantity: Decimal, request_id: UUID) -> bool:
    """Whether nothing of an order opens, what rests of it included: what it would reduce may be promised to others."""
    if order.reduce_only:
        return True
    if quantity > opposing(account, order.symbol, order.side):
        return False
    if request_id not in draft.resting:
        return True
    after = draft.account()
    others = tuple(one for one in after.resting if one.id != request_id)
    return reserved(after) == reserved(msgspec.structs.replace(after, resting=others))


def _terms(order: Order, request_id: UUID) -> Terms:
    return Terms(
        request_id=request_id,
        leverage=order.leverage,
        exit_plan=order.exit_plan,
        confidence=order.confidence,
        invocation_id=order.invocation_id,
    )


def _resting(
    order: Order, request_id: UUID, quantity: Decimal, remaining: Decimal, limit: Decimal, at: datetime
) -> RestingOrder:
    return RestingOrder(
        id=request_id,
        symbol=order.symbol,
        side=order.side,
        quantity=quantity,
        remaining=remaining,
        limit_price=limit,
        created_at=at,
        leverage=order.leverage,
        reduce_only=order.reduce_only,
        exit_plan=order.exit_plan,
        confidence=order.confidence,
        client_order_id=order.client_order_id,
        invocation_id=order.invocation_id,
    )


def _answer(
    order: Order, request_id: UUID, draft: AccountUpdate, filled: Decimal, average: Decimal | None, *, unfilled: Decimal
) -> OrderAnswer:
    status = OrderStatus.FILLED
    if request_id in draft.resting:
        status = OrderStatus.RESTING
    elif unfilled:
        status = OrderStatus.PARTIAL
    return OrderAnswer(
        id=request_id,
        client_order_id=order.client_order_id,
        account_id=draft.before.id,
        symbol=order.symbol,
        side=order.side,
        type=order.type,
        status=status,
        reason="the book could not fill the rest" if status is OrderStatus.PARTIAL else None,
        requested_quantity=order.quantity,
        total_quantity=filled,
        average_price=average,
        total_fees=draft.fees - draft.before.fees,
        realized_pnl=draft.realized - draft.before.realized,
        fills=tuple([AnswerFill(f.quantity, f.price, f.fee, f.maker, f.at) for f in draft.fills]),
        at=draft.at,
    )


# --- exit plans and runs ----------------------------------------------------------------------------------------------


def set_exit_plan(account: Account, symbol: str, plan: ExitPlan, moment: Moment, rules: Rules) -> Posting | str:
    """Replace the exit plan of a position. A string says why it is refused."""
    position = account.positions.get(symbol)
    if position is None:
        return f"there is no {symbol} position"
    draft = AccountUpdate(account, rules, moment.marks, moment.at)
    refusal = refusal_of_plan(plan, position.side, moment.marks[symbol], draft.at)
    if refusal is not None:
        return refusal
    draft.positions[symbol] = msgspec.structs.replace(position, exit_plan=plan)
    draft.next_sequence()
    return draft.posting()


def reset(
    account: Account, initial_capital: Decimal, quote_currency: str, moment: Moment, rules: Rules,
    rate_of_hour: RateOfHour,
) -> Posting:  # fmt: skip
    """End the run: cancel resting orders, close positions at the mark without fees, start the next with new capital."""
    draft = AccountUpdate(account, rules, moment.marks, moment.at)
    draft.fund_held(rate_of_hour)
    for order in account.resting:
        draft.cancel(order, "the account was reset")
    for symbol, position in sorted(draft.positions.items()):
        executions = [Execution(moment.marks[symbol], position.quantity)]
        draft.execute(symbol, CLOSING_SIDE[position.side], executions, Cause.RESET)
    draft.write_off()
    run = Run(
        id=draft.next_id(),
        number=account.run.number + 1,
        initial_capital=initial_capital,
        quote_currency=quote_currency,
        started_at=draft.at,
    )
    return draft.posting(next_run=run)
