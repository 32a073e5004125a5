"""One order book of Lighter's stream: a snapshot, then changes that each say which nonce they follow.

A change whose `begin_nonce` is beyond the nonce of the book means that one was lost. A book patched past a loss is
wrong in a way that nothing later shows, so it is emptied until the next snapshot. Sizes are absolute: to hear one again
is harmless.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Final

import msgspec

from trader.domain.market.markets import Book, Level, Quote
from trader.errors import MarketDataError

LEVELS_SHOWN_MAX: Final = 500


class LevelChange(msgspec.Struct):
    """The new size of one price level; zero removes it."""

    price: Decimal
    size: Decimal


class BookChange(msgspec.Struct):
    """The venue's message body: the whole book, or what has changed of it."""

    nonce: int
    begin_nonce: int = 0
    asks: list[LevelChange] | None = None
    bids: list[LevelChange] | None = None


class StreamedBook:
    """The levels of one market by price. `is_whole` says whether nothing is missing."""

    def __init__(self) -> None:
        self.is_whole = False
        self._nonce = 0
        self._bids: dict[Decimal, Decimal] = {}
        self._asks: dict[Decimal, Decimal] = {}

    def clear(self) -> None:
        """Forget everything until the next snapshot."""
        self.is_whole = False
        self._bids.clear()
        self._asks.clear()

    def replace(self, snapshot: BookChange) -> None:
        """Begin anew. Raises `MarketDataError` for a snapshot that cannot be."""
        self.clear()
        self._take(snapshot)
        self.is_whole = True

    def change(self, change: BookChange) -> None:
        """Apply a change; without effect before the first snapshot, or when it is in the snapshot already.

        Raises `MarketDataError` when one before it was lost, or it cannot be.
        """
        if not self.is_whole or change.nonce <= self._nonce:
            return
        if change.begin_nonce > self._nonce:
            lost = f"changes from nonce {self._nonce} to {change.begin_nonce} were lost"
            self.clear()
            raise MarketDataError(lost)
        self._take(change)

    def _take(self, change: BookChange) -> None:
        for side, levels in ((self._bids, change.bids), (self._asks, change.asks)):
            for level in levels or ():
                if not (level.price.is_finite() and level.price > 0 and level.size.is_finite() and level.size >= 0):
                    self.clear()
                    raise MarketDataError(f"the level {level.price} × {level.size} cannot be")
                if level.size:
                    side[level.price] = level.size
                else:
                    side.pop(level.price, None)
        self._nonce = change.nonce
        if self._bids and self._asks and max(self._bids) >= min(self._asks):
            self.clear()
            raise MarketDataError("its best bid is not below its best ask")

    @property
    def best(self) -> tuple[Decimal, Decimal] | None:
        """The best bid and ask; None while a side is empty or something is missing."""
        if not (self.is_whole and self._bids and self._asks):
            return None
        return max(self._bids), min(self._asks)

    def quote(self, symbol: str, at: datetime, best: tuple[Decimal, Decimal], mark: Decimal) -> Quote:
        """The quote of this moment, with the book of this moment however it changes later."""
        make_book: Callable[[], Book] = partial(_book, symbol, at, dict(self._bids), dict(self._asks))
        return Quote(symbol, at, best[0], best[1], mark, make_book)


def _book(symbol: str, at: datetime, bids: Mapping[Decimal, Decimal], asks: Mapping[Decimal, Decimal]) -> Book:
    return Book(
        symbol,
        at,
        tuple(Level(price, bids[price]) for price in sorted(bids, reverse=True)[:LEVELS_SHOWN_MAX]),
        tuple(Level(price, asks[price]) for price in sorted(asks)[:LEVELS_SHOWN_MAX]),
    )
