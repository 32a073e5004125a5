"""Replay source: plays recorded 1-minute candles second by second.

Within its minute the price takes a randomly drawn path that touches open, high, low and close, so that resting orders,
triggers and liquidation see what the market saw, although its true path is unknown. Books are derived from the path.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from trader.core.clock import Clock, LockstepClock, ScaledClock, ceil_time, epoch_second, floor_time, iso, moment_of
from trader.core.errors import MarketDataError, MarketUnavailable, StartError
from trader.core.money import ZERO, divide
from trader.market.domain.markets import (
    INTERVALS,
    SIMULATED_MARKETS,
    STALE_AFTER,
    Candle,
    Interval,
    Market,
    SimulatedMarket,
    Tick,
)
from trader.market.sources.books import CLOSE_S
from trader.market.sources.files import (
    Minutes,
    PublishedRate,
    find_files,
    find_funding_files,
    read_funding,
    read_market,
)
from trader.market.sources.minute_paths import LEADERS_MAX, MinutePaths
from trader.market.sources.recorded_minutes import RecordedMinutes
from trader.market.sources.rows import chosen_rows, surcharged
from trader.market.sources.source import QuietSource, Seed

log = logging.getLogger("trader.market")

_WARM_UP: Final = timedelta(hours=24)
_WARM_UP_FROM: Final = timedelta(days=2)
"""A recording this long is traded only after a warm-up, so that indicators have their history from the start."""

_TICKS_MIN: Final = 100
_TICKS_MAX: Final = 10**15
"""A price of fewer ticks would move in steps of more than one percent; of more ticks, floats cannot count them."""


class ReplaySource(QuietSource):
    """Replays the candles of a folder or file at `speed` times real time; 0 is as fast as the service processes them.

    Funding files are read from `funding_place`, or from the folder of the candles. A market with a file pays each
    published rate once, at the hour of its publication, and nothing else; the others pay `plain_rate` or their row's.

    Where anyone can trade at any second, `surcharge_below_bps` is the taker fee in basis points: spreads make up for
    what drawn paths give away beyond it. None: everybody decides by the minute or slower, and never sees a path.
    """

    name = "replay"

    def __init__(
        self,
        place: Path,
        symbols: Sequence[str],
        *,
        rows: Mapping[str, SimulatedMarket] = SIMULATED_MARKETS,
        seed: int | None = 0,
        speed: float = 1.0,
        start: datetime | None = None,
        end: datetime | None = None,
        funding_place: Path | None = None,
        plain_rate: Decimal | None = None,
        surcharge_below_bps: Decimal | None = None,
    ) -> None:
        self._place = place
        self._funding_place = funding_place or place
        self._plain_rate = plain_rate
        self._surcharge_below_bps = surcharge_below_bps
        self.seed = None if seed is None else Seed(seed)
        self._speed = speed
        self._wanted_start = start
        self._wanted_end = end
        self.rows = dict(chosen_rows(symbols, rows))
        self._leading = [symbol for symbol in rows if symbol in symbols]
        """The markets in row order; the first ones lead the paths of the others."""
        self.markets: Mapping[str, Market] = {symbol: row.rules for symbol, row in self.rows.items()}
        self._place_in_time = self.name
        self.ends_at: datetime | None = None
        self.recordings: dict[str, Recording] = {}
        """The recorded candles of each market."""

        self._funding: dict[str, Mapping[int, PublishedRate]] = {}
        self._first_minute = 0
        self._last_second = 0
        self._begin = 0

    async def open(self) -> None:
        """Read the files. Raise `MarketDataError` or `StartError`."""
        files = find_files(self._place)
        if missing := [symbol for symbol in self.markets if symbol not in files]:
            raise StartError(
                f"{self._place} has candles of {', '.join(files)} but not of {', '.join(missing)}; "
                "set MARKETS to the markets to trade"
            )
        for symbol, paths in find_funding_files(self._funding_place).items():
            if symbol in self.markets:
                self._funding[symbol] = await asyncio.to_thread(read_funding, paths)
        for symbol in self._funding:  # it is due at whatever hours have a rate
            rules = msgspec.structs.replace(self.rows[symbol].rules, funding_interval_h=1)
            self.rows[symbol] = self.rows[symbol]._replace(rules=rules)
        recordings: dict[str, Recording] = {}
        for symbol in self._leading:
            row = self.rows[symbol]
            minutes = await asyncio.to_thread(read_market, files[symbol])
            lowest, highest, tick = min(minutes.low), max(minutes.high), row.rules.tick
            if lowest < _TICKS_MIN * tick or highest > _TICKS_MAX * tick:
                wrong = f"{lowest} is too low" if lowest < _TICKS_MIN * tick else f"{highest} is too high"
                raise MarketDataError(f"{files[symbol][0]}: a price of {wrong} for the tick {tick} of {symbol}")
            if self._surcharge_below_bps is not None:
                row = self.rows[symbol] = surcharged(row, minutes.range_bp, self._surcharge_below_bps)
            recordings[symbol] = Recording(row, minutes, list(recordings.values())[:LEADERS_MAX])
        self.recordings = {symbol: recordings[symbol] for symbol in self.markets}
        self._set_range()
        self._note_listings()
        if self.seed is not None:
            self.use_seed(self.seed)

    def use_seed(self, seed: Seed) -> None:
        self.seed = seed
        for recording in self.recordings.values():
            recording.seed = seed.value

    @property
    def identity(self) -> str:
        """The first minute and the seed: another seed draws other paths."""
        return self._place_in_time if self.seed is None else f"{self._place_in_time}:{self.seed.name}"

    def _set_range(self) -> None:
        recordings = self.recordings.values()
        self._first_minute = min(recording.minutes.minute[0] for recording in recordings)
        last_minute = max(recording.minutes.minute[-1] for recording in recordings)
        first, last = moment_of(self._first_minute * 60), moment_of(last_minute * 60 + CLOSE_S)
        warm_up = _WARM_UP if last - first >= _WARM_UP_FROM else timedelta(0)
        begin = self._wanted_start or first + warm_up
        end = min(last, self._wanted_end or last)
        covered = f"{self._place} covers {iso(first)} to {iso(last)}"
        if begin < first:
            raise StartError(f"{covered}; REPLAY_START is {iso(begin)}, which is before that")
        if begin >= end:
            raise StartError(
                f"{covered}; REPLAY_START and REPLAY_END leave nothing to play: they are {iso(begin)} and "
                f"{iso(self._wanted_end or last)}"
            )
        if self._wanted_end is not None and self._wanted_end > last + INTERVALS["1m"]:
            raise StartError(f"{covered}; REPLAY_END is {iso(self._wanted_end)}, which is beyond that")
        self._place_in_time = f"{self.name}:{iso(first)}"
        self._begin = epoch_second(begin)
        self._last_second = self._last_pushed(epoch_second(end))
        self.ends_at = moment_of(self._last_second)

    def _note_listings(self) -> None:
        """Give the markets that begin or end within the span their times. Raise `StartError` for one without prices."""
        for symbol, recording in self.recordings.items():
            first, last = recording.minutes.minute[0] * 60, recording.minutes.minute[-1] * 60 + CLOSE_S
            begins_at = moment_of(first) if first > self._begin else None
            ends_at = moment_of(last) if last < self._last_second else None
            if first > self._last_second or last < self._begin:
                raise StartError(
                    f"{self._place}: {symbol} has candles from {iso(moment_of(first))} to {iso(moment_of(last))}, and "
                    f"none from {iso(moment_of(self._begin))} to {iso(moment_of(self._last_second))}"
                )
            rules = msgspec.structs.replace(self.rows[symbol].rules, begins_at=begins_at, ends_at=ends_at)
            self.rows[symbol] = self.rows[symbol]._replace(rules=rules)
            if begins_at is not None:
                log.warning("%s begins within the replay, at %s", symbol, iso(begins_at))
            if ends_at is not None:
                log.warning("%s ends within the replay, at %s: its positions are then closed", symbol, iso(ends_at))
        self.markets = {symbol: row.rules for symbol, row in self.rows.items()}

    def _last_pushed(self, second: int) -> int:
        """Return the last second up to `second` that has a tick: REPLAY_END may lie within a gap."""
        ends = (recording.last_second(second) for recording in self.recordings.values())
        return max(end for end in ends if end is not None)

    @property
    def funded_by_files(self) -> Collection[str]:
        """The markets whose funding rates come from files; all others use `plain_rate`."""
        return self._funding.keys()

    @property
    def span(self) -> range:
        """The seconds since 1970 that are played; the range may contain gaps."""
        return range(self._begin, self._last_second + 1)

    async def close(self) -> None:
        """Release the candles."""
        self.recordings.clear()

    def clock(self, resume_at: datetime | None) -> Clock:
        return make_clock(resume_at or moment_of(self._begin), self._speed)

    def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        last = moment_of(self._last_second)
        return play(clock, self.history(after, last), last)

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        await self.prepare_paths(after)
        for tick in self._walk(epoch_second(after), min(epoch_second(until), self._last_second)):
            yield tick

    async def prepare_paths(self, at: datetime) -> None:
        """Draw the week's paths up to this time in a thread, since that takes seconds."""
        for symbol in self._leading:
            await asyncio.to_thread(self.recordings[symbol].prepare_paths, epoch_second(at) // 60)

    def _walk(self, after: int, until: int) -> Iterator[Tick]:
        """Yield the ticks of the seconds in (after, until]. A second in which no market has a candle has none."""
        second = max(after + 1, self._first_minute * 60)
        while second <= until:
            minute = second // 60
            playing = [recording.minute(minute) for recording in self.recordings.values()]
            present = [played for played in playing if played is not None]
            next_minute = minute + 1 if present else self._next_minute(minute)
            for moment in range(second, min(until, minute * 60 + CLOSE_S) + 1) if present else ():
                at = moment_of(moment)
                yield Tick(at, {played.symbol: played.quote(moment % 60, at) for played in present})
            second = next_minute * 60

    def _next_minute(self, minute: int) -> int:
        """Return the first minute after a gap."""
        return min(
            (start for recording in self.recordings.values() if (start := recording.next_minute(minute)) is not None),
            default=self._last_second // 60 + 1,
        )

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        recording = self.recordings.get(symbol)
        if recording is None:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span, minutes = INTERVALS[interval], recording.minutes
        # Leave out candles whose start or end was not recorded.
        first = ceil_time(max(start, moment_of(minutes.minute[0] * 60)), span)
        last = floor_time(min(end, moment_of(minutes.minute[-1] * 60 + 60)), span)
        return list(minutes.joined(span, first, last))

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        if symbol not in self._funding:
            return self.plain_rate(symbol)
        published = self._funding[symbol].get(epoch_second(boundary) // 3600)
        return ZERO if published is None else published.rate

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        rates, hour = self._funding.get(symbol, {}), epoch_second(boundary) // 3600
        for since, published in ((back, rates.get(hour - back)) for back in range(24)):
            if published is not None:
                return divide(published.rate, Decimal(published.interval)) if since < published.interval else None
        return None

    def plain_rate(self, symbol: str) -> Decimal:
        """Return the hourly funding rate of a market without a funding file."""
        return self.markets[symbol].funding_rate if self._plain_rate is None else self._plain_rate


def make_clock(start: datetime, speed: float) -> Clock:
    """Return the clock of a replay at `speed` times real time; 0 means lockstep."""
    return ScaledClock(start, speed) if speed else LockstepClock(start)


async def play(clock: Clock, ticks: AsyncIterator[Tick], ends_at: datetime) -> AsyncIterator[Tick]:
    """Yield past ticks, each at its time on the replay's clock; then wait forever."""
    async for tick in ticks:
        await clock.advance_to(tick.at)
        await asyncio.sleep(0)  # a feed that is behind its clock must not starve other tasks
        yield tick
    # Time continues until the last prices are stale for every reader; then there is nothing left to wait for.
    await clock.advance_to(ends_at + STALE_AFTER + timedelta(seconds=1))
    if isinstance(clock, ScaledClock):
        clock.release()
    await asyncio.Event().wait()


class Recording(RecordedMinutes):
    """The candles of one market, indexed by minute. Its paths are drawn from `seed`, along with those of its leaders.

    Set the seed before the first path is drawn.
    """

    seed: int

    def __init__(self, row: SimulatedMarket, minutes: Minutes, leaders: Sequence["Recording"]) -> None:
        super().__init__(row, minutes)
        self._leaders = leaders

    @cached_property
    def paths(self) -> MinutePaths:
        """The paths within the minutes. The first market to need them builds the pool of walks: most of a second."""
        leaders = [leader.paths for leader in self._leaders]
        return MinutePaths(f"{self.seed}:{self.grid.market.symbol}", self.grid, self.minutes, leaders)

    def prepare_paths(self, minute: int) -> None:
        """Draw the paths on which this minute's path depends."""
        self.paths.draw(min(bisect_left(self.minutes.minute, minute), len(self.minutes) - 1))

    def marks_at(self, place: int) -> Sequence[int]:
        return self.paths.draw(place)

    def next_minute(self, minute: int) -> int | None:
        place = bisect_left(self.minutes.minute, minute)
        return self.minutes.minute[place] if place < len(self.minutes) else None

    def last_second(self, second: int) -> int | None:
        place = bisect_left(self.minutes.minute, second // 60 + 1) - 1
        return min(second, self.minutes.minute[place] * 60 + CLOSE_S) if place >= 0 else None
