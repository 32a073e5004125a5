"""Matching against one book snapshot: pure walks over levels that know what an account has taken already."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

from trader.domain.account import Taken
from trader.domain.market import Book, Level
from trader.domain.money import ZERO
from trader.domain.orders import OrderSide


class Execution(NamedTuple):
    """A quantity that changes hands at one price."""

    price: Decimal
    quantity: Decimal


def taken_of(book: Book, before: Taken | None) -> Taken:
    """What was taken of this snapshot: nothing yet when the note is of an earlier one."""
    return before if before is not None and before.book_at == book.at else Taken(book.at, {}, {})


def walk(
    book: Book, side: OrderSide, quantity: Decimal, taken: Taken, limit: Decimal | None = None
) -> tuple[list[Execution], Taken]:
    """Take up to `quantity` from the opposite side of the book, best price first, never worse than `limit`.

    Gives the executions, at most one per level, and the new note of what was taken.
    """
    levels, gone = _opposite(book, side, taken)
    now_gone = dict(gone)
    executions = []
    for level in levels:
        if quantity <= 0 or (limit is not None and is_worse(side, level.price, limit)):
            break
        amount = min(quantity, level.quantity - gone.get(level.price, ZERO))
        if amount > 0:
            executions.append(Execution(level.price, amount))
            now_gone[level.price] = gone.get(level.price, ZERO) + amount
            quantity -= amount
    if not executions:
        return executions, taken
    return executions, Taken(book.at, taken.bids, now_gone) if side is OrderSide.BUY else Taken(
        book.at, now_gone, taken.asks
    )


def is_worse(side: OrderSide, price: Decimal, limit: Decimal) -> bool:
    """Whether the price is beyond the limit for an order of this side."""
    return price > limit if side is OrderSide.BUY else price < limit


def _opposite(book: Book, side: OrderSide, taken: Taken) -> tuple[Sequence[Level], Mapping[Decimal, Decimal]]:
    return (book.asks, taken.asks) if side is OrderSide.BUY else (book.bids, taken.bids)
