"""Comparison of the market model with recorded books: what an order costs in each, at the same moments.

The model receives the mid of the recorded book and the history of the mid, as in a replay; volume is assumed normal.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

from trader.core.clock import epoch_second, floor_time
from trader.core.money import divide, floor_to
from trader.exchange.domain.matching import totals, walk
from trader.exchange.domain.orders import OrderSide
from trader.live.domain.drift import error_bps
from trader.live.sql.drift import DriftFigures
from trader.market.domain.markets import SIMULATED_MARKETS, Book, Candle, Market, Quote
from trader.market.sources.books import BookModel, Grid, TrailingDay, stress
from trader.market.sources.files import FileRow, Minutes
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import recorded_symbols

NOTIONALS: Final = (500, 5_000, 50_000, 500_000)
"""Notionals of the simulated orders: one per size class of the table."""

EVERY: Final = timedelta(seconds=10)
_SHORT: Final = timedelta(seconds=15)
_LONG: Final = timedelta(seconds=60)


class BookComparison(NamedTuple):
    """Error statistics, as for fills. `too_large` counts the orders that one of the books could not fill.

    This build does not simulate the markets in `without_model`, so they have no books to compare with.
    """

    figures: list[DriftFigures]
    too_large: int
    without_model: Sequence[str]


async def compare(place: Path, since: datetime) -> BookComparison:
    """Compare a recording's books since `since`, every 10 seconds. Raise `MarketDataError` and `StartError`."""
    source = RecordedSource(place, recorded_symbols(place))
    await source.open()
    assert source.ends_at is not None
    twins = {
        symbol: _Twin(await source.candles(symbol, "1m", since, source.ends_at))
        for symbol in source.markets
        if symbol in SIMULATED_MARKETS
    }
    errors: dict[tuple[str, str, int], list[float]] = {}
    too_large = 0
    async for tick in source.history(since, source.ends_at):
        for symbol in tick.quotes.keys() & twins.keys():
            for side, size, error in twins[symbol].follow(tick.quotes[symbol], source.markets[symbol]):
                if error is None:
                    too_large += 1
                else:
                    errors.setdefault((symbol, side.value, size), []).append(error)
    figures = [_figures(*key, errors[key]) for key in sorted(errors)]
    every = [error for each in errors.values() for error in each]
    without_model = sorted(source.markets.keys() - twins.keys())
    return BookComparison([*figures, _figures(None, None, None, every)] if every else [], too_large, without_model)


class _Twin:
    """Market model of one market, driven by its recorded mid prices."""

    def __init__(self, candles: Sequence[Candle]) -> None:
        self._minutes = Minutes()
        for candle in candles:
            self._minutes.append(FileRow(epoch_second(candle.open_time) // 60, *candle[1:5], 0.0))
        self._mids: deque[tuple[datetime, int]] = deque()
        self._due: datetime | None = None
        self._market: Market | None = None

    def follow(self, quote: Quote, market: Market) -> Iterator[tuple[OrderSide, int, float | None]]:
        """Feed a recorded quote. Every 10 seconds, yield side, size and error in basis points per simulated order."""
        if market != self._market:
            self._market, self._grid = market, Grid(market)
            self._day = TrailingDay(float(market.tick), self._minutes)
            self._model = BookModel(self._grid, SIMULATED_MARKETS[market.symbol].calm)
            self._mids.clear()
        mid = self._grid.nearest(float(quote.bid + quote.ask) / 2)
        self._mids.append((quote.at, mid))
        while quote.at - self._mids[0][0] > _LONG:
            self._mids.popleft()
        if self._due is not None and quote.at < self._due:
            return
        self._due = floor_time(quote.at, EVERY) + EVERY
        long = [value for _, value in self._mids]
        short = [value for at, value in self._mids if quote.at - at <= _SHORT]
        usual = self._day.usual_range(bisect_left(self._minutes.minute, epoch_second(quote.at) // 60))
        tension = stress(max(short) - min(short), max(long) - min(long), mid, usual)
        drawn = self._model.quote(quote.at, mid, tension, 1.0).book
        for size, notional in enumerate(NOTIONALS):
            quantity = floor_to(divide(Decimal(notional), self._grid.price(mid)), market.lot)
            for side in OrderSide:
                yield side, size, _error(side, quote.book, drawn, quantity)


def _error(side: OrderSide, recorded: Book, drawn: Book, quantity: Decimal) -> float | None:
    prices = []
    for book in (recorded, drawn):
        filled, notional = totals(walk(book, side, quantity))
        if not quantity or filled < quantity:
            return None
        prices.append(divide(notional, filled))
    return float(error_bps(side, *prices))


def _figures(symbol: str | None, side: str | None, size: int | None, errors: Sequence[float]) -> DriftFigures:
    ascending, sizes = sorted(errors), sorted(map(abs, errors))
    rank = {share: ceil(share * len(errors)) - 1 for share in (0.05, 0.95)}
    return DriftFigures(
        symbol,
        side,
        size,
        fills=len(errors),
        mean=fmean(errors),
        median=median(errors),
        p95=sizes[rank[0.95]],
        worst=min(ascending, key=lambda error: (-abs(error), error)),
        low=ascending[rank[0.05]],
        high=ascending[rank[0.95]],
    )


def notes_of(comparison: BookComparison) -> list[str]:
    """Return notes on what the table omits."""
    notes = []
    if comparison.too_large:
        notes.append(f"{comparison.too_large} orders were larger than one of the books: no price to compare")
    if comparison.without_model:
        notes.append(f"this build has no market model of {', '.join(comparison.without_model)}: not compared")
    return notes
