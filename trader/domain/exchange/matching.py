"""Matching against one book snapshot, less the depth that the account has taken from it already."""

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from trader.domain.exchange.account import Taken
from trader.domain.exchange.orders import OrderSide
from trader.domain.market.markets import Book
from trader.domain.money import ZERO


class Execution(NamedTuple):
    """A quantity executed at one price. `fee_rate` is what a venue charged; None: the rules' rate applies."""

    price: Decimal
    quantity: Decimal
    fee_rate: Decimal | None = None


def taken_of(book: Book, before: Taken | None) -> Taken:
    """Return the depth taken of this snapshot: nothing yet when `before` is of an earlier one."""
    return before if before is not None and before.book_at == book.at else Taken(book.at, {}, {})


def walk(
    book: Book, side: OrderSide, quantity: Decimal, taken: Taken, limit: Decimal | None = None
) -> tuple[list[Execution], Taken]:
    """Take up to `quantity` from the opposite side of the book, best price first, never worse than `limit`.

    Return the executions, at most one per level, and the depth taken after them.
    """
    buys = side is OrderSide.BUY
    levels, gone = (book.asks, taken.asks) if buys else (book.bids, taken.bids)
    now_gone = dict(gone)
    executions = []
    for price, shown in levels:
        if quantity <= 0 or (limit is not None and (price > limit if buys else price < limit)):
            break
        before = gone.get(price, ZERO)
        amount = min(quantity, shown - before)
        if amount > 0:
            executions.append(Execution(price, amount))
            now_gone[price] = before + amount
            quantity -= amount
    if not executions:
        return executions, taken
    return executions, Taken(book.at, taken.bids, now_gone) if buys else Taken(book.at, now_gone, taken.asks)


def totals(executions: Sequence[Execution]) -> tuple[Decimal, Decimal]:
    """Return the total quantity and notional."""
    quantity = notional = ZERO
    for price, amount, _ in executions:
        quantity += amount
        notional += price * amount
    return quantity, notional


def rate_of(execution: Execution, rate: Decimal) -> Decimal:
    """Return the fee rate that a venue charged, else this one."""
    return rate if execution.fee_rate is None else execution.fee_rate


def fees_of(executions: Sequence[Execution], rate: Decimal) -> Decimal:
    """Return the fees of executions, each at the rate that a venue charged, else at this one."""
    return sum((e.price * e.quantity * rate_of(e, rate) for e in executions), ZERO)


def split(executions: Sequence[Execution], quantity: Decimal) -> tuple[list[Execution], list[Execution]]:
    """Return the executions up to `quantity` and those beyond it; the one across the border is cut."""
    first: list[Execution] = []
    second: list[Execution] = []
    for execution in executions:
        inside = min(execution.quantity, quantity)
        quantity -= inside
        if inside:
            first.append(execution._replace(quantity=inside))
        if inside < execution.quantity:
            second.append(execution._replace(quantity=execution.quantity - inside))
    return first, second
