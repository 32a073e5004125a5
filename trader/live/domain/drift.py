"""Drift between paper and venue: simulates each venue fill on the book at which its order was sent. Pure.

The error is in basis points of the paper price, positive where the venue was worse: bought higher or sold lower.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple

import msgspec

from trader.core.money import ZERO, divide
from trader.exchange.domain.matching import totals, walk
from trader.exchange.domain.orders import Fill, OrderSide
from trader.market.domain.markets import Book, Quote

SIZES: Final = ("< 1k", "1k to 10k", "10k to 100k", "≥ 100k")
LATENCIES: Final = ("< 0.3 s", "0.3 to 1 s", "1 to 3 s", "≥ 3 s")


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One fill and its paper price: a row of `fill_drift`. The price is None where the book was too thin to fill."""

    account_id: str
    sequence: int
    symbol: str
    side: OrderSide
    quantity: Decimal
    maker: bool
    venue_price: Decimal
    paper_price: Decimal | None
    drift_bps: Decimal | None
    quoted_at: datetime | None
    filled_at: datetime


class ShadowDrift(NamedTuple):
    """An order that was signed and not sent: a row of `shadow_drift`.

    `drift_bps` and `later_bps` compare the book 300 ms and a second later with paper; None where one did not fill it.
    """

    account_id: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    paper_price: Decimal | None
    drift_bps: Decimal | None
    later_bps: Decimal | None
    signed: str
    sent_at: datetime


def simulate(
    account_id: str,
    fills: Sequence[Fill],
    quote: Quote | None,
    *,
    filled_before: Decimal = ZERO,
    limit: Decimal | None = None,
) -> list[Drift]:
    """Return the drift of one order's fills, each simulated on the book that remains after the previous ones.

    `quote` is the quote when the order was sent, `filled_before` the quantity that it had filled before these fills. On
    paper, too, a maker's fill is at its `limit`.
    """
    gone = filled_before
    drifts = []
    for fill in fills:
        paper: Decimal | None = limit if fill.maker else None
        if not fill.maker and quote is not None:
            paper = book_price(quote.book, fill.side, fill.quantity, gone, limit)
            gone += fill.quantity
        drifts.append(
            Drift(
                account_id=account_id,
                sequence=fill.sequence,
                symbol=fill.symbol,
                side=fill.side,
                quantity=fill.quantity,
                maker=fill.maker,
                venue_price=fill.price,
                paper_price=paper,
                drift_bps=None if paper is None else error_bps(fill.side, fill.price, paper),
                quoted_at=None if quote is None else quote.book.at,
                filled_at=fill.at,
            )
        )
    return drifts


def book_price(
    book: Book, side: OrderSide, quantity: Decimal, gone: Decimal = ZERO, limit: Decimal | None = None
) -> Decimal | None:
    """Return the price of a whole quantity on a book; None if it does not fill it. The parameters are `walk`'s."""
    filled, notional = totals(walk(book, side, quantity, gone, limit))
    return divide(notional, filled) if filled == quantity else None


def error_bps(side: OrderSide, venue: Decimal, paper: Decimal) -> Decimal:
    """Return how much worse the venue's price was, in basis points of the paper price, to four decimals."""
    return round(divide(side.direction * (venue - paper) * 10_000, paper), 4)
