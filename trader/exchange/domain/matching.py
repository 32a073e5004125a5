"""Matching against a book, minus the depth that was taken from earlier books and has not yet recovered."""

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple

from trader.core.money import QUANTUM, ZERO, halve, round_to
from trader.exchange.domain.account import Take, Taken
from trader.exchange.domain.orders import OrderSide
from trader.market.domain.markets import Book, Level, Quote

INFINITY: Final = Decimal("Infinity")
_NO_TIME: Final = timedelta(0)
_INSTANT: Final = timedelta(microseconds=1)

_FLOAT_ERROR: Final = 1e-12
"""More than the relative error of a power, a product and a quotient of floats."""

_RECOVERED_AFTER: Final = 20
"""Half-lives until a book has recovered: a millionth of the taken quantity counts as nothing."""


class Execution(NamedTuple):
    """A quantity executed at one price. `fee_rate` is what a venue charged; None applies the rules' rate."""

    price: Decimal
    quantity: Decimal
    fee_rate: Decimal | None = None


def missing(takes: Iterable[Take], at: datetime, half_life: timedelta) -> Decimal:
    """Return how much of the taken quantities is still missing at `at`: half after one half-life, none after 20."""
    return sum(
        (
            halve(take.quantity, Decimal(age // _INSTANT) / Decimal(half_life // _INSTANT))
            for take, age in _unrecovered(takes, at, half_life)
        ),
        ZERO,
    )


def _unrecovered(takes: Iterable[Take], at: datetime, half_life: timedelta) -> Iterator[tuple[Take, timedelta]]:
    """Yield the takes that are still missing at `at` in part, with their ages."""
    recovered = _RECOVERED_AFTER * half_life
    for take in takes:
        age = at - take.at
        if _NO_TIME <= age < recovered:
            yield take, age


def gone_from(taken: Taken, side: OrderSide, at: datetime, half_life: timedelta, lot: Decimal) -> Decimal:
    """Return the whole lots that an order of this side does not find in the book at `at`.

    Powers of decimals are slow, and a fast trader has hundreds of takes. They are computed only if the sum of floats
    is so close to half a lot that its error might round it the other way.
    """
    takes = taken.of(side)
    parts = [float(take.quantity) * 2 ** -(age / half_life) for take, age in _unrecovered(takes, at, half_life)]
    lots = math.fsum(parts) / float(lot)
    error = _FLOAT_ERROR * lots + len(parts) * float(QUANTUM) / float(lot)
    if abs(lots % 1 - 0.5) > error:
        return round(lots) * lot or ZERO
    return round_to(missing(takes, at, half_life), lot) or ZERO


def remaining(book: Book, taken: Taken, at: datetime, half_life: timedelta, lot: Decimal) -> Book:
    """Return the book as an order meets it at `at`: without the lots that are gone from its best levels."""
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

    `gone` is missing, starting at the best level. Return the executions, at most one per level.
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


def ahead_at(quote: Quote, side: OrderSide, limit: Decimal) -> Decimal:
    """Return the book's quantity at the limit, ahead of an order of this side that rests there."""
    levels = quote.book.bids if side is OrderSide.BUY else quote.book.asks
    return sum((level.quantity for level in levels if level.price == limit), ZERO)


def totals(executions: Sequence[Execution]) -> tuple[Decimal, Decimal]:
    """Return the total quantity and notional."""
    quantity = notional = ZERO
    for price, amount, _ in executions:
        quantity += amount
        notional += price * amount
    return quantity, notional


def rate_of(execution: Execution, rate: Decimal) -> Decimal:
    """Return the fee rate that the venue charged, or else `rate`."""
    return rate if execution.fee_rate is None else execution.fee_rate


def fees_of(executions: Sequence[Execution], rate: Decimal) -> Decimal:
    """Return the fees of executions, each at the rate that the venue charged, or else at `rate`."""
    return sum((e.price * e.quantity * rate_of(e, rate) for e in executions), ZERO)


def split(executions: Sequence[Execution], quantity: Decimal) -> tuple[list[Execution], list[Execution]]:
    """Return the executions up to `quantity` and those beyond it; an execution across the border is split."""
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
