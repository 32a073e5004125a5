"""Market of a backtest: marks, quotes and price ranges of a past market at any second, computed on demand.

The figures equal those of a service on the same source. A recorded minute's candle gives the mark at its first second
and its range; only the other seconds need the minute's path.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache, partial
from itertools import islice, product
from operator import attrgetter
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np

from trader.agents.domain.observation import known_funding, opened_a_day_ago
from trader.agents.domain.view import HISTORY_CANDLES, SERIES_SHOWN, Column, ObservedMarket, RecordedCandles, Shown
from trader.agents.observer import SESSION_INTERVAL
from trader.backtest.values import MarkColumn
from trader.core.clock import EPOCH, epoch_second, floor_time, moment_of
from trader.exchange.domain.account import Marks, Trade
from trader.exchange.domain.orders import Side
from trader.exchange.domain.tick_rules import Moment, PriceRanges
from trader.market.domain.indicators import Indicators, indicators, indicators_of_windows
from trader.market.domain.markets import INTERVALS, STALE_AFTER, Candle, Interval, Market, PriceRange, Quote
from trader.market.domain.session_vwap import SessionVwap, vwap_fields, vwaps_of_windows
from trader.market.sources.book_recording import RecordedSeconds
from trader.market.sources.books import CLOSE_S
from trader.market.sources.own_data import OwnData
from trader.market.sources.recorded_minutes import RecordedMinutes
from trader.market.sources.synthetic import MarketMaker
from trader.portfolio.domain.behaviour import PriceExcursion

_PRIMED_WITH_S: Final = 1
"""Seconds before the start whose prices a service would load."""

_MOMENTS_KEPT: Final = 16
_CANDLES_PREPARED: Final = 3_000_000
"""How many candles the prepared views of an agent show at most, at 48 bytes each."""

_WINDOWS_MIN: Final = 24
"""A series with fewer windows is computed window by window, as it is read: arrays take as long for one as for 24."""

K = TypeVar("K")
V = TypeVar("V")


PricedMinutes = RecordedMinutes | MarketMaker
"""The past prices of one market as candles with a path. Prices are in half ticks."""


class PastSource(Protocol):
    """A market source with a known past: a recording, or the synthetic market. `span` has its seconds since 1970."""

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def recordings(self) -> Mapping[str, PricedMinutes | RecordedSeconds]: ...

    @property
    def span(self) -> range: ...

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal: ...

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None: ...

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]: ...

    async def prepare_paths(self, at: datetime) -> None:
        """Prepare the paths that the first price at this time would otherwise wait for."""
        ...


class _CandlePrices:
    """The past prices of one market with candles, by second since 1970, as `RecordedSeconds` has those with books.

    A minute with a candle has a tick in each second. Columns hold its prices in half ticks; within a gap, every column
    has the last close before it. Prices exist from the first tick on.
    """

    def __init__(self, prices: PricedMinutes, span: range) -> None:
        self._prices = prices
        self._stop = span.stop
        self._first = (span.start - _PRIMED_WITH_S) // 60
        minutes = range(self._first, span.stop // 60 + 2)
        low, high, opened, close = prices.corners(minutes).T
        ticked = np.maximum.accumulate(np.where(close < 0, -1, np.array(minutes)))
        before = np.where(ticked < 0, 0, close[np.maximum(ticked - self._first, 0)])
        self._open, self._low, self._high = (
            array("q", np.where(close < 0, before, each).tobytes()) for each in (opened, low, high)
        )
        self._ticked = array("q", ticked.tobytes())
        """For each minute, the last recorded one up to it; -1 if there is none."""

        self._begins = next((minute for minute in self._ticked if minute >= 0), 0) * 60

    def last_tick(self, second: int) -> int:
        second = min(second, self._stop - 1)
        minute = self._ticked[second // 60 - self._first]
        return second if minute == second // 60 else minute * 60 + CLOSE_S

    def next_tick(self, second: int) -> int | None:
        if second // 60 > self._ticked[-1]:
            return None  # the market has ended
        second = max(second, self._begins)
        while second < self._stop:
            minute = second // 60
            if self._ticked[minute - self._first] == minute:
                return second
            second = (minute + 1) * 60
        return None

    def mark(self, second: int) -> Decimal:
        if second % 60 == 0 and second < self._stop:  # within a gap the last close, as at every second of it
            return self._prices.grid.price(self._open[second // 60 - self._first])
        minute, second_of_minute = divmod(self.last_tick(second), 60)
        if second_of_minute:
            return self._prices.grid.price(self._prices.marks(minute)[second_of_minute])
        return self._prices.grid.price(self._open[minute - self._first])

    def marks_of(self, seconds: Sequence[int]) -> MarkColumn:
        if seconds[0] % 60 or seconds[-1] >= self._stop:
            return MarkColumn(Decimal, list(map(self.mark, seconds)))
        begin = seconds[0] // 60 - self._first
        return MarkColumn(self._prices.grid.price, self._open[begin : begin + len(seconds)])

    def quote(self, second: int) -> Quote:
        second = self.last_tick(second)
        return self._prices.quote(second, self._open[second // 60 - self._first])

    def extremes(self, first: int, last: int) -> PriceRange:
        """Bids and asks lie on either side of their mark, so the extremes of the marks bound both."""
        begin, stop = first // 60 - self._first, last // 60 - self._first + 1
        if first % 60 == 0 and last % 60 == CLOSE_S:
            low, high = min(self._low[begin:stop]), max(self._high[begin:stop])
        elif last % 60 == 0 or self._ticked[begin] != last // 60:
            low = high = self._open[begin]
        else:
            marks = self._prices.marks(last // 60)[first % 60 : last % 60 + 1]
            low, high = min(marks), max(marks)
        lowest, highest = self._prices.grid.price(low), self._prices.grid.price(high)
        return PriceRange(lowest, highest, lowest, highest)


class _Lazy(Mapping[K, V]):
    """Lazy mapping from each key to what `make` returns for it when it is first read."""

    __slots__ = ("_keys", "_known", "_make")

    def __init__(self, keys: Collection[K], make: Callable[[K], V]) -> None:
        self._keys = keys
        self._make = make
        self._known: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        value = self._known.get(key)
        if value is None:
            if key not in self._keys:
                raise KeyError(key)
            value = self._known[key] = self._make(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return repr(dict(self))


class _Series:
    """All candles of one market and interval, with the indicators that a service would compute at each candle."""

    def __init__(self, candles: Sequence[Candle], span: timedelta) -> None:
        self._candles = candles
        self._span = span
        self._opened = [candle.open_time for candle in candles]
        kept = (HISTORY_CANDLES - 1) * span
        self._first = [bisect_left(self._opened, opened - kept) for opened in self._opened]
        self._of_short_windows: dict[int, Indicators] = {}
        self._shown: dict[tuple[int, int], tuple[tuple[int, int], RecordedCandles]] = {}

    @cached_property
    def _columns(self) -> Column:
        """The figures of the candles, one row for each."""
        return np.array([candle[1:] for candle in self._candles], np.float64).reshape(-1, 5).T.copy()

    @cached_property
    def _of_whole_windows(self) -> Sequence[Indicators]:
        return indicators_of_windows(self._candles, HISTORY_CANDLES)

    def indicators(self, place: int) -> Indicators:
        """Return the indicators at a candle, without a VWAP."""
        first = self._first[place]
        if place - first == HISTORY_CANDLES - 1 and len(self._candles) - HISTORY_CANDLES >= _WINDOWS_MIN:
            return self._of_whole_windows[first]
        if place not in self._of_short_windows:
            self._of_short_windows[place] = indicators(self._candles[first : place + 1], [])
        return self._of_short_windows[place]

    @cached_property
    def vwaps(self) -> Sequence[SessionVwap | None]:
        """The session VWAP at each candle."""
        return vwaps_of_windows(self._candles, self._first)

    def last(self, now: datetime) -> int | None:
        """Return the index of the last closed candle; None if there is none."""
        end = floor_time(now, self._span)
        place = bisect_left(self._opened, end) - 1
        return place if place >= 0 and self._opened[place] >= end - HISTORY_CANDLES * self._span else None

    def is_current(self, place: int, now: datetime) -> bool:
        """Whether this candle is the last one before now, without a gap in between."""
        return self._opened[place] + self._span == floor_time(now, self._span)

    def closed(self, now: datetime) -> Sequence[Candle]:
        """Return the closed candles that are used for indicators, ascending."""
        first, stop = self._places(now, HISTORY_CANDLES)
        return self._candles[first:stop]

    def shown(self, now: datetime, count: int, series: int) -> RecordedCandles:
        """Return the last `count` closed candles with their columns, made once until one closes.

        A short gap does not leave fewer: up to `HISTORY_CANDLES`, they are chosen from all intervals that a service
        reads for the indicators at the last `series` candles; beyond, from the `count` intervals up to the last candle.
        """
        last, stop = self.last(now), self.count(now)
        first = stop
        if last is not None:
            spans = count if count > HISTORY_CANDLES else HISTORY_CANDLES + series - 1
            since = _earlier(self._opened[last] + self._span, spans, self._span)
            first = bisect_left(self._opened, since, max(0, stop - count))
        places, key = (first, stop), (count, series)
        known = self._shown.get(key)
        if known is None or known[0] != places:
            candles = RecordedCandles(self._candles[first:stop])
            candles.columns = self._columns[:, first:stop].copy()  # a slice would lead to what follows
            candles.columns.flags.writeable = False
            known = self._shown[key] = places, candles
        return known[1]

    def count(self, now: datetime) -> int:
        """Return the number of candles that have closed by now."""
        return bisect_left(self._opened, floor_time(now, self._span))

    def _places(self, now: datetime, count: int) -> tuple[int, int]:
        end = floor_time(now, self._span)
        return bisect_left(self._opened, _earlier(end, count, self._span)), self.count(now)


def _earlier(at: datetime, count: int, span: timedelta) -> datetime:
    """Return the time `count` spans earlier, or the earliest one that no candle precedes."""
    return at - min(count, (at - EPOCH) // span) * span


def _gap_before(at: datetime, candles: Sequence[Candle], span: timedelta) -> timedelta:
    """Return how long no candle had closed at a time when one would; zero if none of them had closed at all."""
    end = floor_time(at, span)
    closed = bisect_left(candles, end, key=attrgetter("open_time"))
    return end - candles[closed - 1].open_time - span if closed else timedelta(0)


class BacktestMarket:
    """The markets of a source with a known past. Seconds count from 1970 and lie within `span`."""

    def __init__(self, source: PastSource, candles: Mapping[tuple[str, Interval], Sequence[Candle]]) -> None:
        self.span = source.span
        self.markets: Mapping[str, Market] = source.markets
        self.funding_rate = source.funding_rate
        self._known_rate = source.known_funding_rate
        self._prices = {
            symbol: each if isinstance(each, RecordedSeconds) else _CandlePrices(each, self.span)
            for symbol, each in source.recordings.items()
        }
        self._series = {key: _Series(series, INTERVALS[key[1]]) for key, series in candles.items()}
        since = self.span.start - _PRIMED_WITH_S
        self.seen_since = {
            symbol: self.span.stop if (first := self._prices[symbol].next_tick(since)) is None else first
            for symbol in self.markets
        }
        """The second of each market's first tick."""

        self._all_seen_since = max(self.seen_since.values())

        self.own_data = OwnData()
        """The own columns that agents see beside the markets."""

        self.moment = lru_cache(maxsize=_MOMENTS_KEPT)(self._find_moment)
        """Returns the markets as of a second's tick."""

        self._observed = lru_cache(maxsize=_MOMENTS_KEPT)(self._find_observed)
        self._history = lru_cache(maxsize=64)(self._find_history)
        self._opened_a_day_ago = lru_cache(maxsize=64)(self._find_opened_a_day_ago)
        self._with_vwap = lru_cache(maxsize=1024)(self._find_with_vwap)
        self._funding = lru_cache(maxsize=64)(self._find_funding)
        self._compute_at = lru_cache(maxsize=1024)(self._compute)

    @classmethod
    async def open(
        cls, source: PastSource, intervals: Collection[Interval], history: int = HISTORY_CANDLES
    ) -> "BacktestMarket":
        """Build the market of an open source, with candles of these intervals, and prepare its price paths.

        `history` is the most candles that an agent sees at once. Without intervals there are no candles.
        """
        start, end = moment_of(source.span.start), moment_of(source.span.stop) + STALE_AFTER  # as long as agents decide
        await source.prepare_paths(start)
        candles = {}
        longest = max((INTERVALS[interval] for interval in intervals), default=timedelta(0))
        for interval in {*intervals, SESSION_INTERVAL} if intervals else ():
            # Indicators at earlier candles are computed from still earlier ones, and their VWAPs from the session's.
            since = _earlier(start, max(history, HISTORY_CANDLES) + SERIES_SHOWN, INTERVALS[interval])
            if interval == SESSION_INTERVAL:
                since = _earlier(since, SERIES_SHOWN, longest)
            for symbol in source.markets:
                read = await source.candles(symbol, interval, since, end)
                if gap := _gap_before(start, read, INTERVALS[interval]):
                    read = await source.candles(symbol, interval, since - gap, end)
                candles[symbol, interval] = read
        return cls(source, candles)

    def prepare_indicators(self) -> None:
        """Compute the indicators that are computed for all candles at once, instead of when they are first read."""
        for symbol, interval in self._series:
            self.indicators(symbol, interval, moment_of(self.span.stop))

    def prepare_views(self, shown: Shown, seconds: Iterable[int]) -> None:
        """Compute what an agent that decides at these seconds sees of the markets, for several runs on this market."""
        count = _CANDLES_PREPARED // max(1, shown.candles * len(shown.intervals))
        self._observed = lru_cache(maxsize=count + _MOMENTS_KEPT)(self._find_observed)
        for second, symbol in islice(product(seconds, self.markets), count):
            if (market := self.observe(symbol, shown, second, moment_of(second))) is not None:
                for each in (market.candles, market.indicators):
                    list(each.values())

    # --- ticks --------------------------------------------------------------------------------------------------------

    def ticking(self, second: int) -> frozenset[str]:
        """Return the markets that have a tick at this second; none beyond the end."""
        return frozenset(symbol for symbol, prices in self._prices.items() if prices.next_tick(second) == second)

    def next_tick(self, second: int) -> int | None:
        """Return the first second with a tick, from this one on; None if there is none."""
        ticks = (prices.next_tick(second) for prices in self._prices.values())
        return min((tick for tick in ticks if tick is not None), default=None)

    def last_tick(self, second: int) -> int | None:
        """Return the last second with a tick, up to this one; None if there was none."""
        return max((self._prices[symbol].last_tick(second) for symbol in self.seen(second)), default=None)

    def _find_moment(self, second: int) -> Moment:
        at, updated = moment_of(second), self.ticking(second)
        quotes = _Lazy(self.seen(second), partial(self.quote, second=second))
        return Moment(at, quotes, self.marks(second), updated, self.marks(second - 1))

    def marks(self, second: int) -> Marks:
        return _Lazy(self.seen(second), partial(self.mark, second=second))

    def seen(self, second: int) -> Collection[str]:
        """Return the markets with a tick up to this second."""
        if second >= self._all_seen_since:
            return self.markets.keys()
        return [symbol for symbol, since in self.seen_since.items() if since <= second]

    def quoted_at(self, second: int) -> dict[str, datetime]:
        """Return the time of each market's latest quote at this second."""
        return {symbol: moment_of(self._prices[symbol].last_tick(second)) for symbol in self.seen(second)}

    def mark(self, symbol: str, second: int) -> Decimal:
        """Return the mark at this second; between ticks and after the end, the mark of the last one."""
        return self._prices[symbol].mark(second)

    def marks_of(self, symbol: str, seconds: Sequence[int]) -> MarkColumn:
        """Return the marks at these seconds, which from the second one on are successive full minutes."""
        prices = self._prices[symbol]
        if isinstance(prices, RecordedSeconds):
            return MarkColumn(Decimal, list(map(prices.mark, seconds)))
        return prices.marks_of(seconds)

    def quote(self, symbol: str, second: int) -> Quote:
        """Return the latest quote at this second."""
        return self._prices[symbol].quote(second)

    def ranges(self, symbols: Collection[str], first: int, last: int) -> PriceRanges:
        """Return the price ranges over whole minutes, which candles alone give, or over seconds of one minute."""
        ranges = {symbol: self._prices[symbol].extremes(first, last) for symbol in symbols}
        return PriceRanges(moment_of(last), ranges)

    def excursion(self, trade: Trade) -> tuple[float, float]:
        """Return how far the mark went against a trade (0 or below) and in its favor, in percent of the entry.

        As in `trading.getTrade`, from the minutes entirely within it and from its own prices.
        """
        entry, prices = float(trade.entry_price), [float(trade.exit_price)]
        first, stop = math.ceil(trade.opened_at.timestamp() / 60) * 60, epoch_second(trade.closed_at) // 60 * 60
        if first < stop:
            seen = self._prices[trade.symbol].extremes(first, stop - 1)
            prices += float(seen.lowest_mark), float(seen.highest_mark)
        moves = PriceExcursion.of(entry, prices, is_long=trade.side is Side.LONG)
        return 100 * moves.adverse / entry, 100 * moves.favourable / entry

    # --- views of agents ----------------------------------------------------------------------------------------------

    def observe(self, symbol: str, shown: Shown, second: int, now: datetime) -> ObservedMarket | None:
        """Return a market as an agent sees it; None before its first tick and after its end."""
        if self.seen_since[symbol] > second or not self.markets[symbol].is_listed(now):
            return None
        return self._observed(symbol, shown, second, now)

    def _find_observed(self, symbol: str, shown: Shown, second: int, now: datetime) -> ObservedMarket:
        hour, quote = now.replace(minute=0, second=0, microsecond=0), self.moment(second).quotes[symbol]
        computed = _Lazy(shown.intervals, lambda each: self.indicator_history(symbol, each, now, shown.series))
        funding_rate, funding_history = self._funding(symbol, hour)
        return ObservedMarket.of(
            self.markets[symbol],
            quote,
            now,
            opened_a_day_ago=self._opened_a_day_ago(symbol, hour),
            opened_at_look=None,
            book_imbalance=quote.imbalance if shown.series > 1 else None,
            funding_rate=funding_rate,
            funding_history=funding_history,
            open_interest=None,
            candles=_Lazy(
                shown.intervals, lambda each: self._series[symbol, each].shown(now, shown.candles, shown.series)
            ),
            indicators=_Lazy(shown.intervals, lambda each: computed[each][-1]),
            indicator_history=computed,
            supplementary=None,
        )

    def closed_candles(self, symbol: str, interval: Interval, now: datetime) -> Sequence[Candle]:
        """Return the closed candles that are used for indicators."""
        return self._series[symbol, interval].closed(now)

    def count_closed(self, symbol: str, interval: Interval, now: datetime) -> int:
        """Return the number of all candles that have closed by now."""
        return self._series[symbol, interval].count(now)

    def _find_funding(self, symbol: str, hour: datetime) -> tuple[Decimal, tuple[Decimal, ...]]:
        """Return the hourly funding rate that an agent sees in an hour, and those of the last hours."""
        known = self._known_rate(symbol, hour)
        rate = self.funding_rate(symbol, hour) if known is None else known
        return rate, known_funding(partial(self._known_rate, symbol), hour)

    def _find_opened_a_day_ago(self, symbol: str, hour: datetime) -> float | None:
        return opened_a_day_ago(self.closed_candles(symbol, SESSION_INTERVAL, hour), hour)

    def indicators(self, symbol: str, interval: Interval, now: datetime) -> Indicators:
        """Return the indicators at the last closed candle; empty before the first."""
        return self.indicator_history(symbol, interval, now, 1)[-1]

    def indicator_history(
        self, symbol: str, interval: Interval, now: datetime, count: int = SERIES_SHOWN
    ) -> tuple[Indicators, ...]:
        """Return the indicators at the ends of the last `count` intervals, ascending."""
        step = min(INTERVALS[interval], INTERVALS[SESSION_INTERVAL])  # nothing closes within it
        return self._history(symbol, interval, floor_time(now, step), count)

    def _find_history(self, symbol: str, interval: Interval, now: datetime, count: int) -> tuple[Indicators, ...]:
        latest = self._compute(symbol, interval, now, is_latest=True)
        closed = self.closed_candles(symbol, interval, now)
        if not closed:
            return (latest,) * count
        ends = [closed[-1].open_time - n * INTERVALS[interval] for n in range(count - 1)]
        return (*(self._compute_at(symbol, interval, end) for end in reversed(ends)), latest)

    def _compute(self, symbol: str, interval: Interval, now: datetime, *, is_latest: bool = False) -> Indicators:
        """Return the indicators at a time; `is_latest`: at the last candles before it, also within a gap."""
        series, session = self._series[symbol, interval], self._series[symbol, SESSION_INTERVAL]
        last, day = series.last(now), session.last(now)
        if last is None:
            return Indicators()
        if is_latest or (series.is_current(last, now) and day is not None and session.is_current(day, now)):
            return self._with_vwap(symbol, interval, last, day)
        # Within a gap, the kept candles begin later.
        return indicators(series.closed(now), session.closed(now))

    def _find_with_vwap(self, symbol: str, interval: Interval, place: int, day: int | None) -> Indicators:
        """Return the indicators at a candle, with the VWAP at a candle of the session."""
        vwap = None if day is None else self._series[symbol, SESSION_INTERVAL].vwaps[day]
        return msgspec.structs.replace(self._series[symbol, interval].indicators(place), **vwap_fields(vwap))
