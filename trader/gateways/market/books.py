"""Quotes and order books derived from a mark price or a candle, for sources that have no books of their own.

A derived mark lies on half ticks, so that it is the exact mid of a bid and an ask on ticks: on a whole tick the spread
is an even number of ticks, between two ticks an odd one.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from math import ceil, floor, sqrt
from typing import Final

from trader.domain.market.markets import Book, Level, Market, Quote
from trader.gateways.market.files import Row

NEARER_S: Final = 20
FURTHER_S: Final = 40
CLOSE_S: Final = 59
"""The seconds of the minute at which a candle's path touches its nearer extreme, its further one, and its close."""

_LEVELS: Final = 10


class Grid:
    """The price grid of one market: prices as whole numbers of half ticks (`halves`)."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self._half = market.tick / 2
        self.halves_per_unit = float(1 / self._half)

    def nearest(self, price: float) -> int:
        """Return the half tick nearest to a price."""
        return round(price * self.halves_per_unit)

    def within(self, low: float, high: float) -> tuple[int, int]:
        """Return the lowest and highest half tick inside [low, high]; when none lies inside, the nearest one twice."""
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
        """Return the quote around `mark` halves, `spread_ticks` (1 or more) wide, or one more where the mid needs it.

        `make_book` is called with the moment and the best bid and ask in ticks when the book is first read.
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
    """Return one side of a book: from the best price on, each level a step further (negative for bids).

    `sizes` are in base units and rounded down to the lot, but to one lot at least. Levels without a positive price are
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


class CandlePath:
    """A 1-minute candle as sixty quotes around its marks in half ticks.

    Spread and depth are fixed functions of its price and its volume: the spread is 0.2 basis points of the price, up to
    2 more the less is traded; a side of the book shows, over ten levels, as much as the geometric mean of 160,000 in
    quote currency and what the minute traded, and at least 10,000.
    """

    def __init__(self, grid: Grid, row: Row, marks: Sequence[int]) -> None:
        self.symbol = grid.market.symbol
        self._grid = grid
        self.marks = marks
        tick = float(grid.market.tick)
        traded = row.volume * row.close
        self._spread = max(1, round(row.close * (0.00002 + 0.0002 / (1 + traded / 20_000)) / tick))
        self._step = max(1, round(row.close * 0.00002 / tick))
        self._side = max(10_000.0, sqrt(160_000 * traded)) / row.close

    def quote(self, second: int, at: datetime) -> Quote:
        return self._grid.quote(at, self.marks[second], self._spread, self._book)

    def _book(self, at: datetime, bid: int, ask: int) -> Book:
        market = self._grid.market
        sizes = [self._side * (place + 1) / 55 for place in range(_LEVELS)]
        bids = levels(market, bid, [-self._step] * _LEVELS, sizes)
        asks = levels(market, ask, [self._step] * _LEVELS, sizes)
        return Book(market.symbol, at, bids, asks)


def marks_of_candle(grid: Grid, row: Row) -> list[int]:
    """Return the sixty marks of a candle in half ticks: within its low and high, and touching both.

    The extreme nearer to the open comes first; when both are as near, the one away from the close.
    """
    low, high = grid.within(row.low, row.high)
    opened = min(max(grid.nearest(row.open), low), high)
    close = min(max(grid.nearest(row.close), low), high)
    is_low_first = opened - low < high - opened or (opened - low == high - opened and close >= opened)
    nearer, further = (low, high) if is_low_first else (high, low)
    corners = ((0, opened), (NEARER_S, nearer), (FURTHER_S, further), (CLOSE_S, close))
    marks = [opened]
    for (begin, start), (end, goal) in pairwise(corners):
        length = end - begin
        marks += [start + round((goal - start) * step / length) for step in range(1, length + 1)]
    return marks
