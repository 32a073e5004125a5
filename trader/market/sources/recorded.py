"""Recorded source: replays a recording made with RECORD update by update, with the recorded books."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from trader.core.clock import Clock, ceil_time, epoch_second, floor_time, iso, moment_of
from trader.core.errors import MarketUnavailable, StartError
from trader.market.domain.markets import INTERVALS, PLAIN_FUNDING_RATE, Candle, Interval, Market, Quote, Tick
from trader.market.sources.files import FileRow, Minutes
from trader.market.sources.recorder import RecordedLine, decode_book, find_recording, read_hour
from trader.market.sources.replay import make_clock, play
from trader.market.sources.source import QuietSource

_BEFORE: Final = timedelta(seconds=1)
"""A replay starts at most this long before the first update, so that the first update is one like all others."""


class RecordedSource(QuietSource):
    """Replays a recording at `speed` times real time; 0 is as fast as the service processes it."""

    name = "replay"

    def __init__(
        self,
        place: Path,
        symbols: Sequence[str],
        *,
        speed: float = 1.0,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> None:
        self._place = place
        self._symbols = tuple(symbols)
        self._speed = speed
        self._wanted_start = start
        self._wanted_end = end
        self._rules: dict[str, Market] = {}
        self.markets: Mapping[str, Market] = MappingProxyType(self._rules)
        """A live view: the rules in force at the last update played."""

        self.identity = "replay"
        self.ends_at: datetime | None = None
        self._hours: list[tuple[datetime, list[Path]]] = []
        self._begin = moment_of(0)
        self._began_at: datetime | None = None
        self._changes: list[tuple[datetime, Mapping[str, Market]]] = []
        self._rates: dict[tuple[str, datetime], Decimal] = {}
        self._candles: dict[tuple[str, Interval], dict[datetime, Candle]] = {}
        self._minutes: dict[str, Minutes] = {}
        self._hour = lru_cache(maxsize=2)(self._read_hour)

    async def open(self) -> None:
        """Scan the recording. Raise `MarketDataError` or `StartError`."""
        self._hours = list(find_recording(self._place).items())
        ends = await asyncio.to_thread(self._scan)
        if ends is None:
            raise StartError(f"{self._place}: the recording has no updates of {', '.join(self._symbols)}")
        first, last = ends
        begin = first - _BEFORE if self._began_at is None else max(self._began_at, first - _BEFORE)
        if missing := [symbol for symbol in self._symbols if symbol not in self._minutes]:
            raise StartError(
                f"{self._place} has prices of {', '.join(self._minutes)} but not of {', '.join(missing)}; "
                "set MARKETS to the markets to trade"
            )
        self._begin = self._wanted_start or begin
        wanted_end = min(last, self._wanted_end or last)
        if not first - _BEFORE <= self._begin < wanted_end:
            raise StartError(
                f"{self._place} covers {iso(first)} to {iso(last)}; REPLAY_START and REPLAY_END leave nothing to play"
            )
        self.identity = f"replay:{iso(first)}:recorded"
        self.ends_at = await asyncio.to_thread(self._last_until, wanted_end)
        self._move_to(self._begin)

    async def close(self) -> None:
        """Release the recording."""
        self._hour.cache_clear()

    def clock(self, resume_at: datetime | None) -> Clock:
        return make_clock(resume_at or self._begin, self._speed)

    def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        assert self.ends_at is not None, "the source is open"
        return play(clock, self.history(after, self.ends_at), self.ends_at)

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        for hour, _ in self._hours:
            if hour + timedelta(hours=1) <= after or hour > until:
                continue
            lines = await asyncio.to_thread(self._hour, hour)
            for tick in self._ticks(lines):
                if after < tick.at <= until and (self.ends_at is None or tick.at <= self.ends_at):
                    self._move_to(tick.at)
                    yield tick

    def _ticks(self, lines: Sequence[RecordedLine]) -> Iterator[Tick]:
        """Yield the updates of an hour's lines; of two lines with the same time, the first."""
        deeper: dict[datetime, dict[str, tuple[msgspec.Raw, msgspec.Raw]]] = {}
        for line in lines:
            if line.deeper:
                deeper.setdefault(line.at, {}).update(line.deeper)
        last: datetime | None = None
        for line in lines:
            if not line.quotes or line.at == last:
                continue
            last, more = line.at, deeper.get(line.at, {})
            quotes = {
                symbol: Quote(
                    symbol,
                    line.at,
                    encoded.bid,
                    encoded.ask,
                    encoded.mark,
                    partial(decode_book, symbol, line.at, encoded, more),
                )
                for symbol, encoded in line.quotes.items()
                if symbol in self._symbols
            }
            if quotes:
                yield Tick(line.at, quotes)

    def _read_hour(self, hour: datetime) -> list[RecordedLine]:
        return read_hour(dict(self._hours)[hour])

    # --- the whole recording ------------------------------------------------------------------------------------------

    def _scan(self) -> tuple[datetime, datetime] | None:
        """Collect rules, rates, candles and the range of the marks. Return the times of the first and last update."""
        first = last = None
        for hour, _ in self._hours:
            lines = self._read_hour(hour)
            for line in lines:
                self._note(line)
            for tick in self._ticks(lines):
                first, last = first or tick.at, tick.at
                self._note_marks(tick)
        return None if first is None or last is None else (first, last)

    def _note(self, line: RecordedLine) -> None:
        if line.begins and self._began_at is None:
            self._began_at = line.at
        if rules := {symbol: market for symbol, market in line.rules.items() if symbol in self._symbols}:
            self._changes.append((line.at, rules))
        hour = floor_time(line.at, timedelta(hours=1))
        for symbol, rate in line.rates.items():
            self._rates.setdefault((symbol, hour), rate)
        for symbol, by_interval in line.candles.items():
            for interval, candles in by_interval.items():
                known = self._candles.setdefault((symbol, interval), {})
                known.update((candle.open_time, candle) for candle in candles)

    def _note_marks(self, tick: Tick) -> None:
        """Build minute candles from the marks; their volume is unknown."""
        minute = epoch_second(tick.at) // 60
        for symbol, quote in tick.quotes.items():
            minutes, mark = self._minutes.setdefault(symbol, Minutes()), float(quote.mark)
            if len(minutes) and minutes.minute[-1] == minute:
                minutes.high[-1] = max(minutes.high[-1], mark)
                minutes.low[-1] = min(minutes.low[-1], mark)
                minutes.close[-1] = mark
            else:
                minutes.append(FileRow(minute, mark, mark, mark, mark, 0.0))

    def _last_until(self, moment: datetime) -> datetime:
        """Return the time of the last update up to a moment: REPLAY_END may lie within a gap."""
        hours = [hour for hour, _ in self._hours if hour <= moment]
        return max(tick.at for hour in hours[-2:] for tick in self._ticks(self._hour(hour)) if tick.at <= moment)

    def _move_to(self, moment: datetime) -> None:
        """Apply the rules in force at a moment; before the first update, apply that update's rules."""
        for at, rules in self._changes:
            if at <= moment or not rules.keys() <= self._rules.keys():
                self._rules.update(rules)
        while self._changes and self._changes[0][0] <= moment:
            del self._changes[0]

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        minutes = self._minutes.get(symbol)
        if minutes is None:
            raise MarketUnavailable(f"{symbol} is not traded here")
        span, recorded = INTERVALS[interval], self._candles.get((symbol, interval), {})
        # Only those that start after the recording starts and end before it ends.
        first = ceil_time(max(start, moment_of(minutes.minute[0] * 60 + 60)), span)
        last = floor_time(min(end, moment_of(minutes.minute[-1] * 60)), span)
        candles = {candle.open_time: candle for candle in minutes.joined(span, first, last)}
        candles |= {at: candle for at, candle in recorded.items() if start <= at and at + span <= end}
        return [candles[at] for at in sorted(candles)]

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        known = self.known_funding_rate(symbol, boundary)
        return PLAIN_FUNDING_RATE if known is None else known

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        return self._rates.get((symbol, boundary))
