"""How far paper is from the venue: each fill of the venue simulated on the book of the moment its order was sent. Pure.

The error is in basis points of the paper price, positive where the venue was dearer: bought higher or sold lower.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from math import ceil
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec

from trader.domain.exchange.account import Taken
from trader.domain.exchange.matching import taken_of, totals, walk
from trader.domain.exchange.orders import Fill, OrderSide
from trader.domain.market.markets import Quote
from trader.domain.money import ZERO, divide

SIZES: Final = ((Decimal(1_000), "< 1k"), (Decimal(10_000), "1k to 10k"), (Decimal(100_000), "10k to 100k"))
"""The upper bounds of the notional of each size, in quote currency; what is above them all is the largest."""

LARGEST: Final = "≥ 100k"


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One fill, and what paper would have made of it; None where its book showed less than was filled."""

    sequence: int
    symbol: str
    side: OrderSide
    quantity: Decimal
    maker: bool
    venue_price: Decimal
    paper_price: Decimal | None
    bps: Decimal | None
    quoted_at: datetime | None
    at: datetime


class Figures(NamedTuple):
    """Errors in basis points. `p95` is of their sizes without sign, `worst` the one of the largest size."""

    fills: int
    mean: float
    median: float
    p95: float
    worst: float


def simulate(
    fills: Sequence[Fill], quote: Quote | None, *, filled_before: Decimal = ZERO, limit: Decimal | None = None
) -> list[Drift]:
    """The fills of one order of one market on paper, in their order, each on what the ones before have left.

    `quote` is that of the moment the order was sent, `filled_before` what it had been filled of before these. A maker's
    fill would have been at its `limit` on paper too.
    """
    taken = None if quote is None else taken_of(quote.book, None)
    if quote is not None and taken is not None and filled_before and fills:
        _, taken = walk(quote.book, fills[0].side, filled_before, taken, limit)
    found = []
    for fill in fills:
        paper: Decimal | None = limit if fill.maker else None
        if not fill.maker and quote is not None and taken is not None:
            paper, taken = _price(quote, fill, taken, limit)
        found.append(
            Drift(
                sequence=fill.sequence,
                symbol=fill.symbol,
                side=fill.side,
                quantity=fill.quantity,
                maker=fill.maker,
                venue_price=fill.price,
                paper_price=paper,
                bps=None if paper is None else error_bps(fill.side, fill.price, paper),
                quoted_at=None if quote is None else quote.book.at,
                at=fill.at,
            )
        )
    return found


def _price(quote: Quote, fill: Fill, taken: Taken, limit: Decimal | None) -> tuple[Decimal | None, Taken]:
    executions, taken = walk(quote.book, fill.side, fill.quantity, taken, limit)
    quantity, notional = totals(executions)
    return (divide(notional, quantity) if quantity == fill.quantity else None), taken


def error_bps(side: OrderSide, venue: Decimal, paper: Decimal) -> Decimal:
    """How much dearer the venue was, in basis points of the paper price, to four decimals."""
    return round(divide(side.direction * (venue - paper) * 10_000, paper), 4)


def size_of(notional: Decimal) -> str:
    """The name of the size that a fill of this notional has."""
    return next((name for bound, name in SIZES if notional < bound), LARGEST)


def figures(errors: Sequence[float]) -> Figures:
    """The figures of at least one error; p95 by the nearest rank."""
    sizes = sorted(abs(error) for error in errors)
    return Figures(
        fills=len(errors),
        mean=fmean(errors),
        median=median(errors),
        p95=sizes[ceil(0.95 * len(sizes)) - 1],
        worst=max(errors, key=abs),
    )
