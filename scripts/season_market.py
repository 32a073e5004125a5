"""The synthetic market at every full minute of a past, all at once: what a season in bulk is traded on."""

from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from math import exp

from trader.domain.exchange.rules import Moment
from trader.domain.market.markets import MARKETS, Book, Market, Quote
from trader.gateways.market.books import Grid, levels
from trader.gateways.market.path import CHARACTERS, HOUR_S, KNOT_S, Paths

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
_MINUTE_KNOTS = 60 // KNOT_S
_DEPTH = ((1, 0.15), (2, 0.25), (4, 0.6))
"""A side of a book: steps in ticks, and the part of the usual depth that each level shows."""


class SeasonMarket:
    """Marks of every full minute in [start, end]: the very marks that the synthetic source shows then.

    Minutes are counted from `start`. Books are plainer than the source's: three levels, without chance.
    """

    def __init__(self, seed: int, symbols: Sequence[str], start: datetime, end: datetime) -> None:
        self.first = (start - EPOCH) // MINUTE
        self.minutes = (end - start) // MINUTE + 1
        self.markets: Mapping[str, Market] = {symbol: MARKETS[symbol] for symbol in symbols}
        self._grids = {symbol: Grid(market) for symbol, market in self.markets.items()}
        self._stressed: dict[int, bool] = {}
        paths = Paths(seed)
        hours = range(self.first // 60, (self.first + self.minutes - 1) // 60 + 1)
        self.halves = {symbol: self._halves(paths, symbol, hours) for symbol in symbols}
        self.marks: dict[str, list[Decimal]] = {
            symbol: [self._grids[symbol].price(mark) for mark in halves] for symbol, halves in self.halves.items()
        }
        self._stressed = {hour: paths.is_stressed(hour) for hour in hours}
        self.times = [(EPOCH + (self.first + number) * MINUTE) for number in range(self.minutes)]
        self.written_times = [moment.isoformat() for moment in self.times]

    def _halves(self, paths: Paths, symbol: str, hours: range) -> "array[int]":
        grid, skipped = self._grids[symbol], self.first - hours[0] * 60
        marks = array("q")
        for hour in hours:
            marks.extend(grid.nearest(exp(value)) for value in paths.hour(symbol, hour)[:-1:_MINUTE_KNOTS])
        return marks[skipped : skipped + self.minutes]

    def half_ticks(self, symbol: str, price: Decimal) -> float:
        """A price as a number of half ticks."""
        return float(price) * self._grids[symbol].halves_per_unit

    def move(self, symbol: str, since: int, minute: int) -> float:
        """The relative change of the mark between two minutes; beyond the ends of the past it stands still."""
        halves = self.halves[symbol]
        return halves[min(minute, self.minutes - 1)] / halves[max(since, 0)] - 1

    def moment(self, minute: int) -> Moment:
        """The markets at a minute, with all quotes new."""
        at = self.times[minute]
        quotes = {symbol: self._quote(symbol, minute, at) for symbol in self.markets}
        return Moment(at, quotes, {symbol: quote.mark for symbol, quote in quotes.items()}, frozenset(quotes))

    def _quote(self, symbol: str, minute: int, at: datetime) -> Quote:
        mark = self.halves[symbol][minute]
        stressed = self._stressed[(self.first + minute) * 60 // HOUR_S]
        spread = 8 if stressed else 1 + 2 * (mark % 7 == 0)
        return self._grids[symbol].quote(at, mark, spread, partial(self._book, symbol, 0.3 if stressed else 1.0))

    def _book(self, symbol: str, thinness: float, at: datetime, bid: int, ask: int) -> Book:
        market = self.markets[symbol]
        total = CHARACTERS[symbol].side_depth / (bid * float(market.tick)) * thinness * (0.7 + bid % 13 / 20)
        sizes = [total * part for _, part in _DEPTH]
        sides = [
            levels(market, best, [direction * step for step, _ in _DEPTH], sizes)
            for best, direction in ((bid, -1), (ask, 1))
        ]
        return Book(symbol, at, sides[0], sides[1])
