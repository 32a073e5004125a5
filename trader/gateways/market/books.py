"""Quotes and books made around a mark, for sources that have only a price.

A made mark lies on half ticks, so that it is the exact mid of a bid and an ask that lie on ticks: on a whole tick the
spread is an even number of ticks, between two ticks an odd one.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from math import ceil, floor

from trader.domain.market.markets import Book, Level, Market, Quote


class Grid:
    """The half ticks of one market: prices as whole numbers, `halves`."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self._half = market.tick / 2
        self.halves_per_unit = float(1 / self._half)

    def nearest(self, price: float) -> int:
        """The half tick nearest to a price."""
        return round(price * self.halves_per_unit)

    def within(self, low: float, high: float) -> tuple[int, int]:
        """The lowest and highest half tick inside [low, high]; when none lies inside, the one nearest to it, twice."""
        # A price that is a half tick must not miss it by the rounding of the product.
        bottom = ceil(round(low * self.halves_per_unit, 6))
        top = floor(round(high * self.halves_per_unit, 6))
        if bottom > top:
            bottom = top = self.nearest((low + high) / 2)
        return bottom, top

    def price(self, halves: int) -> Decimal:
        return halves * self._half

    def number(self, halves: int) -> float:
        return halves / self.halves_per_unit

    def quote(
        self, at: datetime, mark: int, spread_ticks: int, make_book: Callable[[datetime, int, int], Book]
    ) -> Quote:
        """The quote around `mark` halves, at least `spread_ticks` (1 or more) wide: one wider if the mid asks for it.

        `make_book` is called with the moment and the best bid and ask in ticks when somebody wants the book.
        """
        spread_ticks += (mark - spread_ticks) & 1
        bid, ask = (mark - spread_ticks) >> 1, (mark + spread_ticks) >> 1
        market = self.market
        return Quote(
            market.symbol,
            at,
            bid * market.tick,
            ask * market.tick,
            mark * self._half,
            lambda: make_book(at, bid, ask),
        )


def levels(market: Market, best_ticks: int, steps_ticks: Iterable[int], sizes: Iterable[float]) -> tuple[Level, ...]:
    """One side of a book: from the best price on, each level a step further (negative for bids).

    `sizes` are in base units and rounded down to the lot, but never to nothing. Levels without a positive price are
    left out.
    """
    lots_per_unit = float(1 / market.lot)
    side = []
    ticks = best_ticks
    for step, size in zip(steps_ticks, sizes, strict=True):
        if ticks <= 0:
            break
        side.append(Level(ticks * market.tick, max(1, int(size * lots_per_unit)) * market.lot))
        ticks += step
    return tuple(side)
