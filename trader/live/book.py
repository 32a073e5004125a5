"""Order book of one market from a venue's stream: snapshots, or changes that each have the nonce they follow.

A change whose `begin_nonce` is beyond the book's nonce shows that an earlier change was lost. A book patched past a
loss stays wrong undetected, so it is emptied until the next snapshot. Sizes are absolute: applying a change twice is
harmless.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Final

import msgspec

from trader.core.errors import MarketDataError
from trader.market.domain.markets import Book, Level, Quote

LEVELS_SHOWN_MAX: Final = 500


class LevelChange(msgspec.Struct):
    """The new size of one price level; zero removes it."""

    price: Decimal
    size: Decimal


class BookChange(msgspec.Struct):
    """The venue's message body: the whole book, or the levels that changed."""

    nonce: int
    begin_nonce: int = 0
    asks: list[LevelChange] | None = None
    bids: list[LevelChange] | None = None


class StreamedBook:
    """The levels of one market by price. `is_whole` is False while a snapshot or a change is missing."""

    def __init__(self) -> None:
        self.is_whole = False
        self._nonce = 0
        self._bids: dict[Decimal, Decimal] = {}
        self._asks: dict[Decimal, Decimal] = {}

    def clear(self) -> None:
        """Empty the book until the next snapshot."""
        self.is_whole = False
        self._bids.clear()
        self._asks.clear()

    def replace(self, snapshot: BookChange) -> None:
        """Replace the book. Raise `MarketDataError` for an impossible snapshot."""
        self.clear()
        self._apply(snapshot)
        self.is_whole = True

    def change(self, change: BookChange) -> None:
        """Apply a change; do nothing before the first snapshot, or when the snapshot already includes it.

        Raise `MarketDataError` for an impossible change, or when an earlier one was lost.
        """
        if not self.is_whole or change.nonce <= self._nonce:
            return
        if change.begin_nonce > self._nonce:
            lost = f"changes from nonce {self._nonce} to {change.begin_nonce} were lost"
            self.clear()
            raise MarketDataError(lost)
        self._apply(change)

    def _apply(self, change: BookChange) -> None:
        for side, levels in ((self._bids, change.bids), (self._asks, change.asks)):
            for level in levels or ():
                if not (level.price.is_finite() and level.price > 0 and level.size.is_finite() and level.size >= 0):
                    self.clear()
                    raise MarketDataError(f"the level {level.price} × {level.size} is impossible")
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
        """The best bid and ask; None while a side is empty or a message is missing."""
        if not (self.is_whole and self._bids and self._asks):
            return None
        return max(self._bids), min(self._asks)

    def quote(self, symbol: str, at: datetime, best: tuple[Decimal, Decimal], mark: Decimal) -> Quote:
        """Return the current quote; later messages do not change its book."""
        make_book: Callable[[], Book] = partial(_book, symbol, at, dict(self._bids), dict(self._asks))
        return Quote(symbol, at, best[0], best[1], mark, make_book)


def _book(symbol: str, at: datetime, bids: Mapping[Decimal, Decimal], asks: Mapping[Decimal, Decimal]) -> Book:
    return Book(
        symbol,
        at,
        tuple(Level(price, bids[price]) for price in sorted(bids, reverse=True)[:LEVELS_SHOWN_MAX]),
        tuple(Level(price, asks[price]) for price in sorted(asks)[:LEVELS_SHOWN_MAX]),
    )
