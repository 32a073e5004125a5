"""Matching against a book, less the depth that was taken from the books before it and is not back yet."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple

from trader.domain.exchange.account import Take, Taken
from trader.domain.exchange.orders import OrderSide
from trader.domain.market.markets import Book, Level
from trader.domain.money import ZERO, halve, round_to

INFINITY: Final = Decimal("Infinity")
_NO_TIME: Final = timedelta(0)
_INSTANT: Final = timedelta(microseconds=1)

_RECOVERED_AFTER: Final = 20
"""Half-lives until a book has recovered: a millionth of what was taken counts as nothing."""


class Execution(NamedTuple):
    """A quantity executed at one price. `fee_rate` is what a venue charged; None: the rules' rate applies."""

    price: Decimal
    quantity: Decimal
    fee_rate: Decimal | None = None


def missing(takes: Iterable[Take], at: datetime, half_life: timedelta) -> Decimal:
    """Return how much of the quantities taken is not back at `at`: half of each after one half-life, all after 20."""
    left = ZERO
    for take in takes:
        age = at - take.at
        if _NO_TIME <= age < _RECOVERED_AFTER * half_life:
            left += halve(take.quantity, Decimal(age // _INSTANT) / Decimal(half_life // _INSTANT))
    return left


def gone_from(taken: Taken, side: OrderSide, at: datetime, half_life: timedelta, lot: Decimal) -> Decimal:
    """Return the whole lots that an order of this side does not find in the book at `at`."""
    return round_to(missing(taken.of(side), at, half_life), lot) or ZERO


def remaining(book: Book, taken: Taken, at: datetime, half_life: timedelta, lot: Decimal) -> Book:
    """Return the book as an order meets it at `at`: without what is gone from its best levels."""
    bids, asks = (
        tuple(
            Level(execution.price, execution.quantity)
            for execution in walk(book, side, INFINITY, gone_from(taken, side, at, half_life, lot))
        )
        for side in (OrderSide.SELL, OrderSide.BUY)
    )
    return Book(book.symbol, book.at, bids, asks)


def walk(
    book: Book, side: OrderSide, quantity: Decimal, gone: Decimal = ZERO, limit: Decimal | None = None
) -> list[Execution]:
    """Take up to `quantity` from the opposite side of the book, best price first, never worse than `limit`.

    `gone` is missing from the best levels on. Return the executions, at most one per level.
    """
    buys = side is OrderSide.BUY
    executions = []
    for price, shown in book.asks if buys else book.bids:
        if quantity <= 0 or (limit is not None and (price > limit if buys else price < limit)):
            break
        skipped = min(gone, shown)
        gone -= skipped
        amount = min(quantity, shown - skipped)
        if amount > 0:
            executions.append(Execution(price, amount))
            quantity -= amount
    return executions


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
