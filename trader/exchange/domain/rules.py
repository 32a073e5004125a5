"""Order rules of the paper exchange: placing, refusing and canceling orders, exit plans, and account resets.

Each function takes an account and a moment and returns a `Posting`, or the reason why there is none. Amounts are in the
quote currency.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

import msgspec

from trader.core.money import ZERO, format_decimal, round_to
from trader.exchange.domain.account import (
    Account,
    RestingOrder,
    Run,
    Taken,
    free_margin,
    opposing,
    reserved,
)
from trader.exchange.domain.account_update import AccountUpdate
from trader.exchange.domain.ledger import ExchangeRules, Posting, RateOfHour, Terms, merge, row_id
from trader.exchange.domain.matching import Execution, ahead_at, remaining, totals
from trader.exchange.domain.order_validation import (
    passive_limit,
    quantity_of,
    refusal_of_leverage,
    refusal_of_plan,
    refusal_of_size,
    refusal_of_targets,
)
from trader.exchange.domain.orders import (
    CLOSING_SIDE,
    Cause,
    ExitPlan,
    Order,
    OrderAnswer,
    OrderSide,
    OrderStatus,
    OrderType,
)
from trader.exchange.domain.tick_rules import Moment, fund_held, liquidate
from trader.market.domain.markets import Book, Quote

_SHOWN: Final = Decimal("1e-8")
"""Digits of amounts in a reason."""

# --- orders -----------------------------------------------------------------------------------------------------------


def place(account: Account, order: Order, moment: Moment, rules: ExchangeRules, rate_of_hour: RateOfHour) -> Posting:
    """Match an order with the book of the moment. The posting always holds the answer, even a refusal."""
    update = AccountUpdate(account, rules, moment.marks, moment.at, moment.quotes)
    fund_held(update, rate_of_hour, moment.mark_at)  # due on the positions before this order
    update.last_order_at = update.at
    request_id = update.next_id()
    market = rules.markets[order.symbol]
    quantity = quantity_of(account, order, market)
    quote = moment.quotes[order.symbol]
    limit = passive_limit(order, market)
    refusal = (
        refusal_of_size(account, order, quantity, quote.mark if limit is None else limit, market)
        or refusal_of_plan(order.exit_plan, order.side.opens, quote.mark, update.now, limit)
        or refusal_of_targets(order.exit_plan, _built(account, order, quantity), market)
        or (_refusal_of_taking(order.side, limit, quote) if order.post_only and limit is not None else None)
    )
    if refusal is not None:
        return refuse(account, order, refusal, moment.at)
    executions = update.take(quote, order.side, quantity, limit)
    if executions:
        update.execute(order.symbol, order.side, executions, order.cause, Terms.of(order, request_id))
    unfilled = quantity - totals(executions)[0]
    status, reason = OrderStatus.FILLED, None
    if unfilled:
        status, reason = OrderStatus.PARTIAL, "the book could not fill the rest"
    if unfilled and order.type is OrderType.LIMIT:
        if not order.reduce_only or opposing(update.account(), order.symbol, order.side):
            ahead = ahead_at(quote, order.side, limit or ZERO) if rules.limit_fills == "queue" else ZERO
            update.rest(RestingOrder.of(order, request_id, quantity, unfilled, limit or ZERO, update.at, ahead))
            status, reason = OrderStatus.RESTING, None
    elif not executions:
        return refuse(account, order, f"the {order.symbol} book shows nothing to {order.side}", moment.at)
    refusal = _refusal_of_opening(account, update, order, quantity, request_id)
    if refusal is not None:
        return refuse(account, order, refusal, moment.at)
    answer = update.answer(order, request_id, executions, status, reason)
    # An order may start a liquidation; one in progress had its step with the market's update.
    liquidate(update, moment, rate_of_hour, () if account.liquidating else update.positions)
    update.write_off_when_flat()
    return update.posting([answer])


def place_together(
    account: Account, orders: Sequence[Order], moment: Moment, rules: ExchangeRules, rate_of_hour: RateOfHour
) -> Posting:
    """Place an order, or a pair: the second on the account after the first, and neither unless both fill completely."""
    if len(orders) == 1:
        return place(account, orders[0], moment, rules, rate_of_hour)
    postings: list[Posting] = []
    for which, order in zip(("first", "second"), orders, strict=True):
        postings.append(place(postings[-1].account if postings else account, order, moment, rules, rate_of_hour))
        (answer,) = postings[-1].answers
        if answer.status is not OrderStatus.FILLED:
            has = f"the book has only {format_decimal(answer.total_quantity)} {order.symbol}"
            why = answer.reason if answer.status is OrderStatus.REJECTED else has
            asked = f"{order.side} {format_decimal(order.quantity)} {order.symbol}"
            reason = f"neither order of the pair is placed; the {which} ({asked}) cannot be filled: {why}"
            return refuse_together(account, orders, reason, moment.at)
    return merge(postings)


def book_met(
    quote: Quote | None, taken: Mapping[str, Taken], symbol: str, at: datetime, rules: ExchangeRules
) -> Book | None:
    """Return the book that an order in the market would meet at `at`, without what the account has taken from it.

    None: the market has no quote.
    """
    if quote is None:
        return None
    return remaining(quote.book, taken.get(symbol, Taken()), at, rules.book_recovery, rules.markets[symbol].lot)


def _built(account: Account, order: Order, quantity: Decimal) -> Decimal:
    """Return the quantity of the position on the order's side once all of the order has filled; negative: none."""
    held = opposing(account, order.symbol, CLOSING_SIDE[order.side.opens])
    return held + quantity - opposing(account, order.symbol, order.side)


def _refusal_of_taking(side: OrderSide, limit: Decimal, quote: Quote) -> str | None:
    """Return why a post-only order is refused, or None: the book trades at its limit already."""
    best, name = (quote.ask, "ask") if side is OrderSide.BUY else (quote.bid, "bid")
    if (limit - best) * side.direction < 0:
        return None
    limit_text, best_text = format_decimal(limit), format_decimal(best)
    return f"post-only: a {side} at {limit_text} would take from the book, whose best {name} is {best_text}"


def refuse_together(account: Account, orders: Sequence[Order], reason: str, at: datetime) -> Posting:
    """Return the posting that refuses an order, or both of a pair, for one reason."""
    postings: list[Posting] = []
    for order in orders:
        postings.append(refuse(postings[-1].account if postings else account, order, reason, at))
    return merge(postings)


def refuse(account: Account, order: Order, reason: str, at: datetime) -> Posting:
    """Return the posting of a refusal, which contains only its answer.

    It leaves `changed_at` unchanged: a later time would hide ticks from the account that it has not seen.
    """
    at = max(at, account.changed_at)
    sequence = account.sequence + 1
    answer = OrderAnswer.of(order, row_id(account.id, sequence), OrderStatus.REJECTED, at, reason)
    after = msgspec.structs.replace(account, sequence=sequence, last_order_at=at)
    return Posting(account=after, sequence_before=account.sequence, run=account.run, answers=[answer])


def cancel(account: Account, order_id: UUID, at: datetime) -> Posting | None:
    """Cancel a resting order; None if it is not resting."""
    order = next((order for order in account.resting if order.id == order_id), None)
    if order is None:
        return None
    update = AccountUpdate(account, ExchangeRules({}, ZERO, ZERO), {}, at)
    update.cancel(order, "cancelled by the caller")
    return update.posting()


def _refusal_of_opening(
    account: Account, update: AccountUpdate, order: Order, quantity: Decimal, request_id: UUID
) -> str | None:
    if _only_reduces(account, update, order, quantity, request_id):
        return None
    after, symbol = update.account(), order.symbol
    refusal = refusal_of_leverage(after, order, update.marks[symbol], update.rules.markets[symbol])
    if refusal is not None:
        return refusal
    missing = -free_margin(after, update.marks)
    if missing <= 0:
        return None
    available = max(ZERO, free_margin(account, update.marks))
    return (
        f"insufficient margin: with its fees the order needs {format_decimal(round_to(available + missing, _SHOWN))}, "
        f"available is {format_decimal(round_to(available, _SHOWN))}"
    )


def _only_reduces(account: Account, update: AccountUpdate, order: Order, quantity: Decimal, request_id: UUID) -> bool:
    """Return whether no part of an order opens, not even its resting part: others may reduce the position first."""
    if order.reduce_only:
        return True
    if quantity > opposing(account, order.symbol, order.side):
        return False
    if request_id not in update.resting:
        return True
    after = update.account()
    others = tuple(resting for resting in after.resting if resting.id != request_id)
    return reserved(after) == reserved(msgspec.structs.replace(after, resting=others))


# --- exit plans and runs ----------------------------------------------------------------------------------------------


def no_position(symbol: str) -> str:
    """Return why the exit plan of a market without a position cannot be set."""
    return f"there is no {symbol} position"


def set_exit_plan(account: Account, symbol: str, plan: ExitPlan, moment: Moment, rules: ExchangeRules) -> Posting | str:
    """Replace the exit plan of a position, or return the reason for refusing it."""
    position = account.positions.get(symbol)
    if position is None:
        return no_position(symbol)
    update = AccountUpdate(account, rules, moment.marks, moment.at, moment.quotes)
    refusal = refusal_of_plan(plan, position.side, moment.marks[symbol], update.now)
    if refusal is None and plan.targets != position.exit_plan.targets:
        refusal = refusal_of_targets(plan, position.quantity, rules.markets[symbol])
    if refusal is not None:
        return refusal
    plan = update.laid(plan, symbol, position.side, position.quantity)
    update.positions[symbol] = msgspec.structs.replace(position, exit_plan=plan)
    update.next_sequence()
    return update.posting()


def reset(
    account: Account, initial_capital: Decimal, quote_currency: str, moment: Moment, rules: ExchangeRules,
    rate_of_hour: RateOfHour,
) -> Posting:  # fmt: skip
    """End the run: cancel resting orders, close positions at the mark without fees, start the next with new capital."""
    update = AccountUpdate(account, rules, moment.marks, moment.at)
    fund_held(update, rate_of_hour, moment.mark_at)
    for order in account.resting:
        update.cancel(order, "the account was reset")
    for symbol, position in sorted(update.positions.items()):
        executions = [Execution(moment.marks[symbol], position.quantity)]
        update.execute(symbol, CLOSING_SIDE[position.side], executions, Cause.RESET)
    update.write_off()
    run = Run(
        id=update.next_id(),
        number=account.run.number + 1,
        initial_capital=initial_capital,
        quote_currency=quote_currency,
        started_at=update.at,
    )
    return update.posting(next_run=run)
