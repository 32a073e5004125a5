"""Book recording: a recording of books whose past is known, for backtests, at whole seconds.

At each second the market is as the last update up to it left it. A recording with one update a second is exact; of
several updates within a second, a backtest knows the last.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from typing import Final

from trader.core.clock import ceil_second, floor_time, iso, moment_of
from trader.core.errors import StartError
from trader.market.domain.markets import PLAIN_FUNDING_RATE, PriceRange, Quote, SimulatedMarket
from trader.market.sources.files import Minutes
from trader.market.sources.recorded import RecordedSource

_HOUR: Final = timedelta(hours=1)


class RecordedSeconds:
    """The past prices of one market of a recording. `quote_at` finds the quote of the last update in a second."""

    def __init__(self, minutes: Minutes, quote_at: Callable[[int], Quote]) -> None:
        self.minutes = minutes
        self._quote_at = quote_at
        self._at: list[int] = []
        self._marks: list[Decimal] = []
        self._bids: list[Decimal] = []
        self._asks: list[Decimal] = []
        self._known: dict[str, Decimal] = {}
        """Every price by its digits: prices recur, and one object takes the space of 13 references."""

    def add(self, second: int, quote: Quote) -> None:
        """Add an update, in order of time. It replaces an earlier one of the same second."""
        if self._at and self._at[-1] == second:
            for column in (self._at, self._marks, self._bids, self._asks):
                column.pop()
        self._at.append(second)
        for column, price in ((self._marks, quote.mark), (self._bids, quote.bid), (self._asks, quote.ask)):
            column.append(self._known.setdefault(str(price), price))

    def last_tick(self, second: int) -> int:
        """Return the last second with an update, up to this one."""
        return self._at[self._place(second)]

    def next_tick(self, second: int) -> int | None:
        """Return the first second with an update, from this one on; None if there is none."""
        place = bisect_left(self._at, second)
        return self._at[place] if place < len(self._at) else None

    def mark(self, second: int) -> Decimal:
        return self._marks[self._place(second)]

    def quote(self, second: int) -> Quote:
        return self._quote_at(self.last_tick(second))

    def extremes(self, first: int, last: int) -> PriceRange:
        """Return the extremes over these seconds."""
        begin, stop = max(0, self._place(first)), self._place(last) + 1
        marks = self._marks[begin:stop]
        return PriceRange(min(marks), max(marks), min(self._asks[begin:stop]), max(self._bids[begin:stop]))

    def _place(self, second: int) -> int:
        """Return the index of the last update up to a second; -1 before the first."""
        return bisect_right(self._at, second) - 1


class BookRecording(RecordedSource):
    """A recording as a market whose past is known. The market rules in force at the start apply throughout.

    `span` has the seconds since 1970 from the first one at which every market has a price, and `recordings` the prices
    of each market.
    """

    span: range
    recordings: Mapping[str, RecordedSeconds]
    rows: Mapping[str, SimulatedMarket] = {}
    """No market is simulated."""

    async def open(self) -> None:
        """Scan the recording. Raise `MarketDataError` or `StartError`."""
        await super().open()
        await asyncio.to_thread(self._read_seconds)

    def _read_seconds(self) -> None:
        assert self.ends_at is not None, "the source is open"
        begin, stop = ceil_second(self._begin), ceil_second(self.ends_at) + 1
        quotes_of = lru_cache(maxsize=2)(self._quotes_of)
        self.recordings = {
            symbol: RecordedSeconds(minutes, partial(_quote_at, quotes_of, symbol))
            for symbol, minutes in self._minutes.items()
        }
        for hour, _ in self._hours:
            if hour + _HOUR < moment_of(begin - 1) or hour > moment_of(stop):
                continue
            for (symbol, second), quote in self._quotes_of(hour).items():
                if begin - 1 <= second < stop:  # a service loads the prices of the second before the start
                    self.recordings[symbol].add(second, quote)
        firsts = {symbol: prices.next_tick(begin - 1) for symbol, prices in self.recordings.items()}
        if missing := [symbol for symbol, first in firsts.items() if first is None]:
            raise StartError(
                f"{self._place} has no prices of {', '.join(missing)} from {iso(self._begin)} to {iso(self.ends_at)}; "
                "REPLAY_START, REPLAY_END and MARKETS choose others"
            )
        self.span = range(max(begin, *(first for first in firsts.values() if first is not None)), stop)

    def _quotes_of(self, hour: datetime) -> dict[tuple[str, int], Quote]:
        """Return the last quote of each market in each second of an hour's file, in order of time."""
        return {
            (symbol, ceil_second(tick.at)): quote
            for tick in self._ticks(self._read_hour(hour))
            for symbol, quote in tick.quotes.items()
        }

    @property
    def funded_by_files(self) -> Collection[str]:
        """The markets whose funding rates were recorded; hours without one have the `plain_rate`."""
        return {symbol for symbol, _ in self._rates}

    def plain_rate(self, symbol: str) -> Decimal:
        """Return the hourly funding rate of a market for hours that were not recorded."""
        return PLAIN_FUNDING_RATE

    async def prepare_paths(self, at: datetime) -> None:
        """Do nothing: no path is drawn."""


def _quote_at(quotes_of: Callable[[datetime], Mapping[tuple[str, int], Quote]], symbol: str, second: int) -> Quote:
    """Return the quote of a market's last update in a second, which the file of the hour before may have."""
    hour = floor_time(moment_of(second), _HOUR)
    return quotes_of(hour).get((symbol, second)) or quotes_of(hour - _HOUR)[symbol, second]
