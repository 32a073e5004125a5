"""Recorder: market updates as the exchange sees them, written to hourly files of compressed JSON lines.

A file is named for its hour, `2025-06-02T23.jsonl.gz`, with an added number after each further start within the hour. A
line has the time of an update and, for each market, mark, best bid and ask, and 10 levels of each side of the book.
Market rules come with the first update to which they apply, funding rates with the first update of an hour. The deeper
levels of a book follow on a separate line as soon as an order or a model reads that book. Every line is in the file
before the exchange acts on it, so that a killed process omits nothing; readers skip a truncated last line.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from io import BufferedWriter
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import msgspec

from trader.core.clock import floor_time
from trader.core.errors import MarketDataError, StartError
from trader.core.files import open_regular
from trader.core.money import require_figure
from trader.market.domain.markets import Book, Candle, Interval, Level, Market, Quote, Tick
from trader.market.sources.source import MarketSource

log = logging.getLogger("trader.recorder")

LEVELS: Final = 10
"""Levels of each side of a book that are always recorded."""

LINE_BYTES_MAX: Final = 16 * 2**20
"""Longer lines are refused: a compressed one-line file could take a thousand times as much memory."""

LINES_MAX: Final = 4_000_000
FILE_NAMES: Final = "????-??-??T??*.jsonl.gz"
_HOUR: Final = timedelta(hours=1)
_GZIP: Final = zlib.MAX_WBITS | 16
_CHUNK: Final = 1 << 20


class EncodedQuote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A quote with the best levels of its book, which stay encoded because few books are ever read."""

    mark: Decimal
    bid: Decimal
    ask: Decimal
    bids: msgspec.Raw
    asks: msgspec.Raw


class RecordedLine(msgspec.Struct, omit_defaults=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A line of a recording. `begins`: the service started trading at this time. `rules` apply from this update on,
    `rates` are the hourly funding rates due at the last whole hour, `deeper` holds the levels after the first 10 of the
    books at `at`, and `candles` the closed candles that were requested.
    """

    at: Annotated[datetime, msgspec.Meta(tz=True)]
    begins: bool = False
    quotes: dict[str, EncodedQuote] = {}
    rules: dict[str, Market] = {}
    rates: dict[str, Decimal] = {}
    deeper: dict[str, tuple[msgspec.Raw, msgspec.Raw]] = {}
    candles: dict[str, dict[Interval, list[Candle]]] = {}


_encode: Final = msgspec.json.Encoder().encode
_line_decoder: Final = msgspec.json.Decoder(RecordedLine)
_levels_decoder: Final = msgspec.json.Decoder(tuple[Level, ...])


class Recorder:
    """Writes the recording of one source. A disk error ends only the recording, with one line in the log."""

    def __init__(self, folder: Path, source: MarketSource) -> None:
        self._folder = folder
        self._source = source
        self._file: _HourFile | None = None
        self._has_failed = False
        self._rules: dict[str, Market] = {}
        self._funded: set[str] = set()
        """The markets whose rate for the file's hour is written: due funding is paid with a market's first update."""

    def open(self) -> None:
        """Create the folder. Raise `StartError` if it is not writable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartError(f"RECORD: {self._folder} cannot be written to: {error.strerror}") from error

    def begin(self, at: datetime) -> None:
        """Mark the start of trading, after the warm-up updates."""
        self._write(at, lambda: RecordedLine(at=at, begins=True))

    def record(self, tick: Tick) -> Tick:
        """Write an update. Return it with quotes that record their book when it is first read."""
        if self._has_failed:
            return tick
        books = {symbol: quote.book for symbol, quote in tick.quotes.items()}
        quotes = {symbol: _recorded(quote, books[symbol]) for symbol, quote in tick.quotes.items()}

        def line() -> RecordedLine:
            return RecordedLine(at=tick.at, quotes=quotes, rules=self._new_rules(), rates=self._new_rates(tick))

        if not self._write(tick.at, line):
            return tick
        return Tick(tick.at, {symbol: self._watched(quote, books[symbol]) for symbol, quote in tick.quotes.items()})

    def record_candles(self, symbol: str, interval: Interval, candles: Sequence[Candle], at: datetime) -> None:
        """Write candles that were read from the source."""
        if candles:
            self._write(at, lambda: RecordedLine(at=at, candles={symbol: {interval: list(candles)}}))

    def close(self) -> None:
        """Close the current file; the next update opens another."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._fail(error)

    def _watched(self, quote: Quote, book: Book) -> Quote:
        if max(len(book.bids), len(book.asks)) <= LEVELS:
            return quote
        return Quote(quote.symbol, quote.at, quote.bid, quote.ask, quote.mark, partial(self._read_deeper, book))

    def _read_deeper(self, book: Book) -> Book:
        """Write the deeper levels of a book when it is read during the recording."""
        if self._file is not None:
            rest = (msgspec.Raw(_encode(book.bids[LEVELS:])), msgspec.Raw(_encode(book.asks[LEVELS:])))
            self._write(book.at, lambda: RecordedLine(at=book.at, deeper={book.symbol: rest}))
        return book

    def _new_rules(self) -> dict[str, Market]:
        new = {symbol: market for symbol, market in self._source.markets.items() if self._rules.get(symbol) != market}
        self._rules |= new
        return new

    def _new_rates(self, tick: Tick) -> dict[str, Decimal]:
        hour = floor_time(tick.at, _HOUR)
        new = {s: self._source.funding_rate(s, hour) for s in tick.quotes if s not in self._funded}
        self._funded |= new.keys()
        return new

    def _move_to(self, at: datetime) -> "_HourFile":
        """Return the file of the hour, which starts with all rules and rates."""
        hour = floor_time(at, _HOUR)
        if self._file is None or self._file.hour != hour:
            self.close()
            self._rules, self._funded = {}, set()
            self._file = _HourFile(self._folder, hour)
        return self._file

    def _write(self, at: datetime, make_line: Callable[[], RecordedLine]) -> bool:
        """Write a line that is made for the file of its hour. Return False if the recording has ended."""
        if self._has_failed:
            return False
        try:
            self._move_to(at).write(_encode(make_line()))
        except OSError as error:
            self._fail(error)
        return not self._has_failed

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.error("the recording in %s has ended: %s; trading continues without it", self._folder, error.strerror)
        self.close()


class _HourFile:
    """One file being written. Each line is compressed and handed to the operating system at once."""

    def __init__(self, folder: Path, hour: datetime) -> None:
        self.hour = hour
        self._file: BufferedWriter = _new_file(folder, f"{hour:%Y-%m-%dT%H}")
        self._packer = zlib.compressobj(wbits=_GZIP)

    def write(self, line: bytes) -> None:
        packed = self._packer.compress(line + b"\n") + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._file.write(packed)
        self._file.flush()

    def close(self) -> None:
        try:
            self._file.write(self._packer.flush(zlib.Z_FINISH))
        finally:
            self._file.close()


def _new_file(folder: Path, name: str) -> BufferedWriter:
    """Create the hour's next file; never append to a file of an earlier process."""
    number = 0
    while True:
        try:
            return (folder / f"{name}{f'.{number:04}' if number else ''}.jsonl.gz").open("xb")
        except FileExistsError:
            number += 1


def _recorded(quote: Quote, book: Book) -> EncodedQuote:
    bids, asks = (msgspec.Raw(_encode(side[:LEVELS])) for side in (book.bids, book.asks))
    return EncodedQuote(quote.mark, quote.bid, quote.ask, bids, asks)


# --- reading ----------------------------------------------------------------------------------------------------------


def find_recording(place: Path) -> dict[datetime, list[Path]]:
    """Return the files of a recording by hour, ascending; none if the folder holds no recording."""
    files: dict[datetime, list[Path]] = {}
    for path in sorted(place.glob(FILE_NAMES)) if place.is_dir() else ():
        try:
            hour = datetime.fromisoformat(f"{path.name[:13]}:00:00+00:00")
        except ValueError:
            continue
        files.setdefault(hour, []).append(path)
    return files


def recorded_symbols(place: Path) -> list[str]:
    """Return the markets of a recording. Raise `StartError` if there is none, `MarketDataError` if it is broken."""
    for paths in find_recording(place).values():
        for path in paths:
            for line in read_lines(path):
                if line.rules:
                    return list(line.rules)
    raise StartError(f"{place} holds no recording: expected a file such as 2025-06-02T23.jsonl.gz with an update")


def read_hour(paths: Sequence[Path]) -> list[RecordedLine]:
    """Return the lines of an hour in order of time; lines with the same time keep the order in which they were written.

    Raise `MarketDataError` with file, line and reason.
    """
    lines = [line for path in paths for line in read_lines(path)]
    lines.sort(key=lambda line: line.at)
    return lines


def read_lines(path: Path) -> Iterator[RecordedLine]:
    """Yield the complete lines of a file; a killed process may leave a truncated last line. Raise `MarketDataError`."""
    for number, text in enumerate(_texts(path), start=1):
        if number > LINES_MAX:
            raise MarketDataError(f"{path} has more than {LINES_MAX:,} lines, too many for an hour")
        try:
            line = _line_decoder.decode(text)
            _check(line)
            yield line
        except (ValueError, RecursionError) as error:  # includes errors of msgspec
            raise MarketDataError(f"{path}, line {number}: {error}") from error


def _check(line: RecordedLine) -> None:
    """Raise `ValueError` for a figure with which nothing can be computed; JSON numbers have no end."""
    figures = [*line.rates.values()]
    for quote in line.quotes.values():
        figures += (quote.mark, quote.bid, quote.ask)
    for market in line.rules.values():
        figures += (market.min_notional, market.maintenance_rate, market.funding_rate)
        if not (market.leverage_max > 0 and all(each.is_finite() and each > 0 for each in (market.tick, market.lot))):
            raise ValueError(f"the rules of {market.symbol} lack a tick, a lot or leverage")
    for figure in figures:
        require_figure(figure)


def _texts(path: Path) -> Iterator[bytes]:
    unpacker, rest = zlib.decompressobj(wbits=_GZIP), b""
    try:
        with open_regular(path) as file:
            while chunk := unpacker.unconsumed_tail or file.read(_CHUNK):
                *whole, rest = (rest + unpacker.decompress(chunk, _CHUNK)).split(b"\n")
                yield from whole
                if len(rest) > LINE_BYTES_MAX:
                    raise MarketDataError(f"{path} has a line of over {LINE_BYTES_MAX:,} bytes, too long for an update")
    except OSError as error:
        raise MarketDataError(f"{path} cannot be read: {error.strerror}") from error
    except zlib.error as error:
        raise MarketDataError(f"{path} cannot be unpacked: {error}") from error


def decode_book(symbol: str, at: datetime, quote: EncodedQuote, deeper: Mapping[str, tuple[msgspec.Raw, ...]]) -> Book:
    """Return the book of a recorded quote. Raise `MarketDataError`."""
    sides = [(quote.bids, quote.asks), *([deeper[symbol]] if symbol in deeper else [])]
    try:
        bids, asks = (
            tuple(chain.from_iterable(map(_levels_decoder.decode, side))) for side in zip(*sides, strict=True)
        )
        for figure in chain.from_iterable(bids + asks):
            require_figure(figure)
    except ValueError as error:  # includes errors of msgspec
        raise MarketDataError(f"the recorded book of {symbol} at {at} cannot be read: {error}") from None
    return Book(symbol, at, bids, asks)
