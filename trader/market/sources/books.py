"""Quotes and order books derived from mark prices, for sources that have no books.

A derived mark lies on a half tick, so that it is the exact mid of a bid and an ask on ticks: on a whole tick the spread
is an even number of ticks, between two ticks an odd number.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trader.market.domain.markets import Book, Calm, EvenQuote, Level, Market, Quote
from trader.market.sources.files import FileRow, Minutes

NEARER_S: Final = 20
FURTHER_S: Final = 40
CLOSE_S: Final = 59
"""The seconds at which a candle's path touches its nearer extreme, its farther extreme, and its close."""

HalfTickCandle = tuple[int, int, int, int]
"""Low, high, open and close in half ticks."""


class Grid:
    """The price grid of one market: prices as whole numbers of half ticks (`halves`)."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self._half = market.tick / 2
        self.halves_per_unit = float(1 / self._half)

    def nearest(self, price: float) -> int:
        """Return the half tick nearest to a price."""
        return round(price * self.halves_per_unit)

    def corners(self, row: FileRow) -> HalfTickCandle:
        """Return low, high, open and close of a candle, each rounded to the nearest half tick.

        Rounded inward instead, an open at an extreme would tell where the minute goes. Rounding keeps the order of
        prices, so the corners reach every half tick that the candle reaches.
        """
        return self.nearest(row.low), self.nearest(row.high), self.nearest(row.open), self.nearest(row.close)

    def all_corners(self, minutes: Minutes) -> NDArray[np.int64]:
        """Return what `corners` does of each candle: a row for each."""
        prices = np.array([minutes.low, minutes.high, minutes.open, minutes.close]).T
        return np.rint(prices * self.halves_per_unit).astype(np.int64)

    def price(self, halves: int) -> Decimal:
        return halves * self._half

    def number(self, halves: int) -> float:
        return halves / self.halves_per_unit

    def quote(
        self, at: datetime, mark: int, spread_ticks: int, make_book: Callable[[datetime, int, int], Book]
    ) -> Quote:
        """Return the quote around `mark` halves: `spread_ticks` (1 or more) wide, or one tick wider to center the mid.

        `make_book` is called with the moment and the best bid and ask in ticks when the book is first read; both of its
        sides have the same quantities.
        """
        spread_ticks += (mark - spread_ticks) & 1
        bid, ask = (mark - spread_ticks) >> 1, (mark + spread_ticks) >> 1
        market = self.market
        return EvenQuote(
            market.symbol,
            at,
            bid * market.tick,
            ask * market.tick,
            mark * self._half,
            lambda: make_book(at, bid, ask),
        )


def levels(market: Market, best_ticks: int, steps_ticks: Iterable[int], sizes: Iterable[float]) -> tuple[Level, ...]:
    """Return one side of a book: starting at the best price, each level one step further (negative for bids).

    `sizes` are in base units and rounded down to lots, but never below one lot. Levels without a positive price are
    left out.
    """
    tick, lot, side = market.tick, market.lot, []
    lots_per_unit = float(1 / lot)
    ticks = best_ticks
    for step, size in zip(steps_ticks, sizes, strict=True):
        if ticks <= 0:
            break
        side.append(Level(ticks * tick, max(1, int(size * lots_per_unit)) * lot))
        ticks += step
    return tuple(side)


_DEPTH_WITHIN_BP: Final = 2.0
_OFFSETS_BP: Final = (0.0, 0.25, 0.5, 0.8, 1.2, 1.8, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Distances of the levels from the best price in a calm book. They grow with the square root of the stress."""
_DEPTH_POWER: Final = 1.2
"""The depth within a distance of the best price grows with this power of the distance."""
_CALM_MOVE: Final = 0.86
_CALM_BUSYNESS: Final = 0.85
"""Medians of the move and of the busyness in the calmer half of the minutes of January 2025."""
_STRESS_POWER: Final = 1.3
_STRESS_MIN: Final = 0.5
_STRESS_MAX: Final = 100.0
_RUN_S: Final = 5
_RUN_BP: Final = 100
"""After a price moves this far in this many seconds, its book is at its thinnest."""

DAY_MINUTES: Final = 1440


def stress(last_15: int, last_60: int, mark: int, usual_range: float) -> float:
    """Return how much wider and thinner a book is than in a usual minute.

    The ranges of the last 15 and 60 seconds and the mark are in half ticks; a minute's usual range is relative to the
    price, and 0 if unknown.
    """
    if not usual_range:
        return 1.0
    move = max(last_60, 2 * last_15) / mark / usual_range / _CALM_MOVE
    return min(max(_STRESS_MIN, float(move**_STRESS_POWER)), _STRESS_MAX)


def stress_after(marks: Sequence[int], usual_range: float) -> float:
    """Return the stress after the marks of the last 61 seconds at most, one per second with the current one last."""
    latest, present, past = marks[-16:], marks[-1], marks[-1 - _RUN_S :][0]
    if abs(present - past) * 10_000 >= _RUN_BP * past:
        return _STRESS_MAX
    return stress(max(latest) - min(latest), max(marks) - min(marks), present, usual_range)


class BookModel:
    """The quotes and books of one market as deterministic functions of its past prices and volumes.

    The spread grows with stress, and depth with its inverse. Above-usual volume deepens the book by at most half, and
    below-usual volume thins it by at most half; where nothing traded, the book is at its thinnest. No side is empty.
    """

    def __init__(self, grid: Grid, calm: Calm) -> None:
        self._grid = grid
        self._calm = calm
        # Among the levels within 2 basis points of the mid, the last counts partially, so depth is right on average.
        self._reach_bp = _DEPTH_WITHIN_BP - self._calm.half_spread_bp

    @property
    def symbol(self) -> str:
        return self._grid.market.symbol

    def quote(self, at: datetime, mark: int, stress: float, busyness: float) -> Quote:
        """Return the quote around `mark` half ticks. `busyness`: root of the last minute's volume over the usual."""
        if not busyness:
            stress = _STRESS_MAX
        half_spread_bp = self._calm.half_spread_bp * stress + self._calm.surcharge_bp
        spread_ticks = max(1, round(half_spread_bp * mark / 10_000))
        make_book = partial(self._book, stress, min(max(busyness, 0.5), 1.5))
        return self._grid.quote(at, mark, spread_ticks, make_book)

    def _book(self, stress: float, busyness: float, at: datetime, bid: int, ask: int) -> Book:
        market, tick = self._grid.market, float(self._grid.market.tick)
        bp_ticks = (bid + ask) / 20_000
        scale = self._calm.depth * busyness / _CALM_BUSYNESS / stress / ((bid + ask) / 2 * tick)
        offsets_bp = [offset * max(1.0, sqrt(stress)) for offset in _OFFSETS_BP]
        middles = [(nearer + further) / 2 for nearer, further in pairwise(offsets_bp)]
        within = [scale * (distance / self._reach_bp) ** _DEPTH_POWER for distance in (*middles, offsets_bp[-1])]
        sizes = [further - nearer for nearer, further in pairwise((0.0, *within))]
        places = [round(offset * bp_ticks) for offset in offsets_bp]
        steps = [max(1, further - nearer) for nearer, further in pairwise(places)] + [1]
        bids = levels(market, bid, [-step for step in steps], sizes)
        return Book(market.symbol, at, bids, levels(market, ask, steps, sizes))


class TrailingDay:
    """Usual range and volume of a market at each recorded minute, from the preceding 24 hours."""

    def __init__(self, tick: float, minutes: Minutes) -> None:
        prices = zip(minutes.high, minutes.low, minutes.close, strict=True)
        moves = (log(max(high - low, tick) / close) for high, low, close in prices)
        self._moves = array("d", accumulate(moves, initial=0.0))
        self._roots = array("d", accumulate(map(sqrt, minutes.volume), initial=0.0))
        self._minutes = minutes

    def usual_range(self, place: int) -> float:
        """Return the geometric mean of the ranges relative to the price; 0 if there is no earlier minute."""
        begin = max(0, place - DAY_MINUTES)
        return exp((self._moves[place] - self._moves[begin]) / (place - begin)) if place else 0.0

    def busyness(self, place: int) -> float:
        """Return the square root of the previous minute's volume, relative to its mean over the day.

        It is 0 in a minute without trades and in the first one after a pause, and 1 in the first of all.
        """
        minute, volume = self._minutes.minute, self._minutes.volume
        if not volume[place] or (place and minute[place - 1] != minute[place] - 1):
            return 0.0
        if not place:
            return 1.0
        begin = max(0, place - DAY_MINUTES)
        usual = (self._roots[place] - self._roots[begin]) / (place - begin)
        return (self._roots[place] - self._roots[place - 1]) / usual if usual else 0.0


class CandlePath:
    """A minute as sixty quotes around its marks in half ticks. `before` holds the previous minute's marks, if any."""

    def __init__(
        self, model: BookModel, marks: Sequence[int], *, before: Sequence[int], usual_range: float, busyness: float
    ) -> None:
        self.symbol = model.symbol
        self._model = model
        self._marks = [*before, *marks]
        self._begin = len(before)
        self._usual_range = usual_range
        self._busyness = busyness

    def quote(self, second: int, at: datetime) -> Quote:
        now = self._begin + second
        marks = self._marks[max(0, now - 60) : now + 1]
        return self._model.quote(at, marks[-1], stress_after(marks, self._usual_range), self._busyness)


def marks_of_candle(grid: Grid, row: FileRow) -> list[int]:
    """Return the sixty marks of a candle in half ticks, within its low and high and touching both.

    The extreme nearer to the open comes first; if both are equally near, the one away from the close.
    """
    low, high, opened, close = grid.corners(row)
    is_low_first = opened - low < high - opened or (opened - low == high - opened and close >= opened)
    nearer, further = (low, high) if is_low_first else (high, low)
    corners = ((0, opened), (NEARER_S, nearer), (FURTHER_S, further), (CLOSE_S, close))
    marks = [opened]
    for (begin, start), (end, goal) in pairwise(corners):
        length = end - begin
        marks += [start + round((goal - start) * step / length) for step in range(1, length + 1)]
    return marks
