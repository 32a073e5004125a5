"""Market of a backtest: marks, quotes and price ranges of a recording at any second, drawn where they are asked for.

The figures are those that a replay of the same recording pushes: the mark at the first second of a minute and the
range of a minute are known from its candle; only the other seconds need the minute's path.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property, partial
from typing import Final, TypeVar

import msgspec

from trader.clock import epoch_second, floor_time, moment_of
from trader.domain.agents.view import SERIES_SHOWN, LastAction, ObservedMarket
from trader.domain.exchange.account import Marks
from trader.domain.exchange.tick_rules import Moment, PriceRange, PriceRanges
from trader.domain.market.indicators import Indicators, indicators, indicators_of_windows
from trader.domain.market.markets import INTERVALS, Candle, Interval, Market, Quote
from trader.domain.market.session_vwap import SessionVwap, vwap_fields, vwaps_of_windows
from trader.gateways.market.books import CLOSE_S
from trader.gateways.market.files import Minutes
from trader.gateways.market.minute_paths import corners
from trader.gateways.market.replay import Recording, ReplaySource
from trader.services.agents.observer import HISTORY_CANDLES, SESSION_INTERVAL

_PRIMED_WITH_S: Final = 1
"""Seconds before the beginning whose prices a service would load when it starts."""

_MOMENTS_KEPT: Final = 16
_SLOT_S: Final = int(INTERVALS[SESSION_INTERVAL].total_seconds())
"""Within so many seconds no candle closes that an agent is shown."""

V = TypeVar("V")


class _Columns:
    """A market's minutes without gaps, in half ticks: within a gap every column holds the last close before it."""

    def __init__(self, recording: Recording, first: int, last: int) -> None:
        self.open = array("q")
        self.low = array("q")
        self.high = array("q")
        self.ticked = array("q")
        """The last minute up to each one that is recorded, -1 where there is none."""

        close, ticked = 0, -1
        for minute in range(first, last + 1):
            place = recording.place(minute)
            if place is None:
                opened = low = high = close
            else:
                low, high, opened, close = corners(recording.grid, recording.minutes[place])
                ticked = minute
            self.open.append(opened)
            self.low.append(low)
            self.high.append(high)
            self.ticked.append(ticked)


class _AtSecond(Mapping[str, V]):
    """Lazy mapping from each market seen so far to the value that `make` returns for it at one second."""

    __slots__ = ("_known", "_make", "_market", "_second")

    def __init__(self, market: "BacktestMarket", make: Callable[[str, int], V], second: int) -> None:
        self._market = market
        self._make = make
        self._second = second
        self._known: dict[str, V] = {}

    def __getitem__(self, symbol: str) -> V:
        value = self._known.get(symbol)
        if value is None:
            if symbol not in self:
                raise KeyError(symbol)
            value = self._known[symbol] = self._make(symbol, self._second)
        return value

    def __contains__(self, symbol: object) -> bool:
        return self._market.seen_since.get(str(symbol), self._second + 1) <= self._second

    def __iter__(self) -> Iterator[str]:
        return (symbol for symbol in self._market.markets if symbol in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _OfIntervals(Mapping[Interval, V]):
    """Lazy mapping from each interval to the value that `make` returns for one market at one moment."""

    __slots__ = ("_at", "_intervals", "_known", "_make", "_symbol")

    def __init__(
        self, make: Callable[[str, Interval, datetime], V], symbol: str, intervals: Sequence[Interval], at: datetime
    ) -> None:
        self._make = make
        self._symbol = symbol
        self._intervals = intervals
        self._at = at
        self._known: dict[Interval, V] = {}

    def __getitem__(self, interval: Interval) -> V:
        made = self._known.get(interval)
        if made is None:
            if interval not in self._intervals:
                raise KeyError(interval)
            made = self._known[interval] = self._make(self._symbol, interval, self._at)
        return made

    def __iter__(self) -> Iterator[Interval]:
        return iter(self._intervals)

    def __len__(self) -> int:
        return len(self._intervals)


class _Series:
    """All candles of one market and interval, with the indicators that a service would compute at each of them."""

    def __init__(self, candles: Sequence[Candle], span: timedelta) -> None:
        self._candles = candles
        self._span = span
        self._opened = [candle.open_time for candle in candles]
        kept = (HISTORY_CANDLES - 1) * span
        self._first = [bisect_left(self._opened, opened - kept) for opened in self._opened]
        self._of_short_windows: dict[int, Indicators] = {}

    @cached_property
    def _of_whole_windows(self) -> Sequence[Indicators]:
        return indicators_of_windows(self._candles, HISTORY_CANDLES)

    def indicators(self, place: int) -> Indicators:
        """Return the indicators at a candle, without a VWAP."""
        first = self._first[place]
        if place - first == HISTORY_CANDLES - 1:
            return self._of_whole_windows[first]
        if place not in self._of_short_windows:
            self._of_short_windows[place] = indicators(self._candles[first : place + 1], [])
        return self._of_short_windows[place]

    @cached_property
    def vwaps(self) -> Sequence[SessionVwap | None]:
        """The session's VWAP at each candle."""
        return vwaps_of_windows(self._candles, self._first)

    def last(self, now: datetime) -> int | None:
        """Return the place of the last closed candle; None when none is kept."""
        end = floor_time(now, self._span)
        place = bisect_left(self._opened, end) - 1
        return place if place >= 0 and self._opened[place] >= end - HISTORY_CANDLES * self._span else None

    def is_current(self, place: int, now: datetime) -> bool:
        """Whether this candle is the last one before now, without a gap between."""
        return self._opened[place] + self._span == floor_time(now, self._span)

    def closed(self, now: datetime) -> Sequence[Candle]:
        """Return the last closed candles, ascending."""
        end = floor_time(now, self._span)
        first = bisect_left(self._opened, end - HISTORY_CANDLES * self._span)
        return self._candles[first : bisect_left(self._opened, end)]


class BacktestMarket:
    """The markets of an open replay source. Seconds are those since 1970, within `span`."""

    def __init__(self, source: ReplaySource, candles: Mapping[tuple[str, Interval], Sequence[Candle]]) -> None:
        self.span = source.span
        self.markets: Mapping[str, Market] = source.markets
        self.funding_rate = source.funding_rate
        self._recordings = source.recordings
        self._series = {key: _Series(series, INTERVALS[key[1]]) for key, series in candles.items()}
        self._first = (self.span.start - _PRIMED_WITH_S) // 60
        last = self.span.stop // 60 + 1
        self._columns = {
            symbol: _Columns(recording, self._first, last) for symbol, recording in self._recordings.items()
        }
        self._ticking: tuple[int, frozenset[str]] = (-1, frozenset())
        self.seen_since = {symbol: self._first_tick(symbol) for symbol in self.markets}
        """The second of each market's first tick."""

        self._all_seen_since = max(self.seen_since.values())

        self._moments: dict[int, Moment] = {}
        self._observed: dict[tuple[str, Sequence[Interval], int], ObservedMarket] = {}
        self._observed_at: datetime | None = None
        self._slot = -1
        self._indicators: dict[tuple[str, Interval], Indicators] = {}

    @classmethod
    async def open(cls, source: ReplaySource, intervals: Collection[Interval]) -> "BacktestMarket":
        """Build the market of an open source, with candles of these intervals, and prepare its price paths."""
        await source.prepare_paths(moment_of(source.span.start))
        candles = {}
        for symbol, recording in source.recordings.items():
            minutes = recording.minutes.minute
            start, end = moment_of(minutes[0] * 60), moment_of(minutes[-1] * 60 + 60)
            for interval in {*intervals, SESSION_INTERVAL}:
                candles[symbol, interval] = await source.candles(symbol, interval, start, end)
        return cls(source, candles)

    def _first_tick(self, symbol: str) -> int:
        second = self.span.start - _PRIMED_WITH_S
        while second < self.span.stop:
            if symbol in self.ticking(second):
                return second
            second = (second // 60 + 1) * 60
        return self.span.stop

    def minutes(self, symbol: str) -> Minutes:
        """Return the recorded minutes of a market."""
        return self._recordings[symbol].minutes

    # --- ticks --------------------------------------------------------------------------------------------------------

    def ticking(self, second: int) -> frozenset[str]:
        """Return the markets that have a tick at this second; none beyond the end."""
        minute = second // 60
        if second >= self.span.stop:
            return frozenset()
        if self._ticking[0] != minute:
            present = (symbol for symbol, each in self._columns.items() if each.ticked[minute - self._first] == minute)
            self._ticking = minute, frozenset(present)
        return self._ticking[1]

    def next_tick(self, second: int) -> int | None:
        """Return the first second from this one on that has a tick; None when there is no more."""
        while second < self.span.stop:
            if self.ticking(second):
                return second
            second = (second // 60 + 1) * 60
        return None

    def last_tick(self, second: int) -> int | None:
        """Return the last second up to this one that has a tick; None when there was none."""
        seconds = [self._last_tick(symbol, second) for symbol, since in self.seen_since.items() if since <= second]
        return max(seconds, default=None)

    def moment(self, second: int) -> Moment:
        """Return the markets as of this second's tick."""
        known = self._moments.get(second)
        if known is None:
            if len(self._moments) == _MOMENTS_KEPT:
                del self._moments[next(iter(self._moments))]
            at, updated = moment_of(second), self.ticking(second)
            quotes = _AtSecond(self, self.quote, second)
            marks, before = (_AtSecond(self, self.mark, each) for each in (second, second - 1))
            known = self._moments[second] = Moment(at, quotes, marks, updated, before)
        return known

    def marks(self, second: int) -> Marks:
        known = self._moments.get(second)
        return _AtSecond(self, self.mark, second) if known is None else known.marks

    def seen(self, second: int) -> Collection[str]:
        """Return the markets that have had a tick until this second."""
        if second >= self._all_seen_since:
            return self.markets.keys()
        return [symbol for symbol, since in self.seen_since.items() if since <= second]

    def quoted_at(self, second: int) -> dict[str, datetime]:
        """Return the time of each market's latest quote at this second."""
        return {
            symbol: moment_of(self._last_tick(symbol, second))
            for symbol, since in self.seen_since.items()
            if since <= second
        }

    def mark(self, symbol: str, second: int) -> Decimal:
        """Return the mark at this second, that of the last tick before it within a gap."""
        second = self._last_tick(symbol, second)
        minute, recording = second // 60, self._recordings[symbol]
        if second % 60:
            return recording.grid.price(recording.marks(minute)[second % 60])
        return recording.grid.price(self._columns[symbol].open[minute - self._first])

    def quote(self, symbol: str, second: int) -> Quote:
        """Return the latest quote at this second."""
        second = self._last_tick(symbol, second)
        recording = self._recordings[symbol]
        minute = second // 60
        if second % 60:
            path = recording.minute(minute)
        else:
            path = recording.opening(minute, self._columns[symbol].open[minute - self._first])
        assert path is not None, "there is a tick at this second"
        return path.quote(second % 60, moment_of(second))

    def _last_tick(self, symbol: str, second: int) -> int:
        second = min(second, self.span.stop - 1)
        minute = self._columns[symbol].ticked[second // 60 - self._first]
        return second if minute == second // 60 else minute * 60 + CLOSE_S

    # --- price ranges -------------------------------------------------------------------------------------------------

    def ranges_of_minutes(self, symbols: Collection[str], first: int, last: int) -> PriceRanges:
        """Return the price ranges over the minutes `first` to `last`, from their candles alone."""
        begin, stop = first - self._first, last - self._first + 1
        ranges = {}
        for symbol in symbols:
            columns, grid = self._columns[symbol], self._recordings[symbol].grid
            ranges[symbol] = _range(grid.price(min(columns.low[begin:stop])), grid.price(max(columns.high[begin:stop])))
        return PriceRanges(moment_of(last * 60 + CLOSE_S), ranges)

    def ranges_of_seconds(self, symbols: Collection[str], first: int, last: int) -> PriceRanges:
        """Return the price ranges over the seconds `first` to `last` of one minute."""
        minute = first // 60
        ranges = {}
        for symbol in symbols:
            grid, columns = self._recordings[symbol].grid, self._columns[symbol]
            place = minute - self._first
            if last % 60 == 0 or columns.ticked[place] != minute:
                lowest = highest = columns.open[place]
            else:
                marks = self._recordings[symbol].marks(minute)[first % 60 : last % 60 + 1]
                lowest, highest = min(marks), max(marks)
            ranges[symbol] = _range(grid.price(lowest), grid.price(highest))
        return PriceRanges(moment_of(last), ranges)

    # --- what agents see ----------------------------------------------------------------------------------------------

    def observe(
        self,
        symbol: str,
        intervals: Sequence[Interval],
        shown: int,
        second: int,
        now: datetime,
        last_action: LastAction | None,
    ) -> ObservedMarket | None:
        """Return a market as an agent sees it, with the last `shown` candles; None before its first tick."""
        if self.seen_since[symbol] > second:
            return None
        if self._observed_at != now:
            self._observed_at = now
            self._observed.clear()
        observed = self._observed.get((symbol, intervals, shown))
        if observed is None:
            candles = partial(self._shown_candles, shown)
            observed = self._observed[symbol, intervals, shown] = msgspec.structs.replace(
                self._observe(symbol, second, now),
                candles=_OfIntervals(candles, symbol, intervals, now),
                indicators=_OfIntervals(self.indicators, symbol, intervals, now),
            )
        return observed if last_action is None else msgspec.structs.replace(observed, last_action=last_action)

    def _observe(self, symbol: str, second: int, now: datetime) -> ObservedMarket:
        """Return a market without its candles and indicators."""
        observed = self._observed.get((symbol, (), 0))
        if observed is None:
            funding_rate = self.funding_rate(symbol, now.replace(minute=0, second=0, microsecond=0))
            observed = self._observed[symbol, (), 0] = ObservedMarket.of(
                self.markets[symbol], self.moment(second).quotes[symbol], now, funding_rate
            )
        return observed

    def _shown_candles(self, shown: int, symbol: str, interval: Interval, now: datetime) -> tuple[Candle, ...]:
        return tuple(self.closed_candles(symbol, interval, now)[-shown:])

    def closed_candles(self, symbol: str, interval: Interval, now: datetime) -> Sequence[Candle]:
        """Return the last closed candles, as many as a service keeps for indicators."""
        return self._series[symbol, interval].closed(now)

    def indicators(self, symbol: str, interval: Interval, now: datetime) -> Indicators:
        """Return the indicators at the last closed candle; none before the first."""
        slot = epoch_second(now) // _SLOT_S
        if slot != self._slot:
            self._slot = slot
            self._indicators.clear()
        known = self._indicators.get((symbol, interval))
        if known is None:
            known = self._indicators[symbol, interval] = self._compute(symbol, interval, now)
        return known

    def indicator_history(self, symbol: str, interval: Interval, now: datetime) -> tuple[Indicators, ...]:
        """Return the indicators at the ends of the last intervals, ascending."""
        latest, closed = self.indicators(symbol, interval, now), self.closed_candles(symbol, interval, now)
        if not closed:
            return (latest,) * SERIES_SHOWN
        ends = [closed[-1].open_time - n * INTERVALS[interval] for n in range(SERIES_SHOWN - 1)]
        return (*(self._compute(symbol, interval, end) for end in reversed(ends)), latest)

    def _compute(self, symbol: str, interval: Interval, now: datetime) -> Indicators:
        series, session = self._series[symbol, interval], self._series[symbol, SESSION_INTERVAL]
        last, day = series.last(now), session.last(now)
        if last is None:
            return Indicators()
        if series.is_current(last, now) and day is not None and session.is_current(day, now):
            return msgspec.structs.replace(series.indicators(last), **vwap_fields(session.vwaps[day]))
        # Within a gap the candles that are kept begin later.
        return indicators(series.closed(now), session.closed(now))


def _range(lowest: Decimal, highest: Decimal) -> PriceRange:
    """Return a range of marks as a price range. Bids and asks lie on either side of their mark, so it bounds both."""
    return PriceRange(lowest_mark=lowest, highest_mark=highest, lowest_ask=lowest, highest_bid=highest)
