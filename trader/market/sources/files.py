"""Files of 1-minute candles and funding rates. Any mistake is rejected with file, line and reason.

A file is CSV (plain, gzip, or alone in a zip archive) or Parquet; `forms.py` says how candles may be written.
Funding-rate files have calc_time, funding_interval_hours and last_funding_rate, as Binance publishes them.
"""

import gzip
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, NamedTuple, NoReturn, TextIO, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from trader.core.clock import epoch_second, moment_of
from trader.core.errors import MarketDataError
from trader.core.files import open_regular
from trader.market.domain.markets import Candle, canonical_symbol
from trader.market.sources.forms import PLAIN_TIMES, CandleForm, Times

_FILE_NAME: Final = re.compile(
    r"(?P<market>[A-Za-z0-9]+)(?:-(?P<interval>\d+[A-Za-z]+))?(?:[-_.].*)?\.(?:csv|csv\.gz|zip|parquet)"
)
_FUNDING_NAMES: Final = ["calc_time", "funding_interval_hours", "last_funding_rate"]
_FUNDING_FILE: Final = re.compile(r"(?P<market>[A-Za-z0-9]+)-fundingRate(?:[-_.].*)?\.(?:csv|csv\.gz|zip)")
_FUNDING_LATE: Final = 1
"""How many minutes past the hour a funding time may be: it is when the rate was calculated."""
_INTERVALS: Final = frozenset(str(hours) for hours in range(1, 25) if 24 % hours == 0)
_RATE_MAX: Final = Decimal("0.1")


_LINE_MAX: Final = 65_536
"""Characters per line. A compressed file without line breaks could otherwise take a thousand times as much memory."""


_QUOTED: Final = frozenset(',"\n\r')

_BLANK_MAX: Final = 1_000
"""Empty lines at the end of a file."""

PLAIN_READ: Final = 1 << 22
"""Characters of a plain file that are read at once."""

_PLAIN_WIDTHS: Final = {13: 60_000, 16: 60_000_000}
"""A minute in the units of plain times, by the digits of these."""

_PLAIN_LINE: Final = re.compile(r"[0-9]{13,16},[0-9.,]{1,300}")

CANDLES_MAX: Final = 20_000_000
"""Rows of one file: 38 years of minutes."""


class PublishedRate(NamedTuple):
    """A published funding rate of a whole interval, in hours."""

    rate: Decimal
    interval: int


class FileRow(NamedTuple):
    """A candle, with its open time in minutes since 1970."""

    minute: int
    open: float
    high: float
    low: float
    close: float
    volume: float


class Minutes:
    """The 1-minute candles of one market, ascending, stored by column: 48 bytes per candle."""

    def __init__(self) -> None:
        self.minute = array("q")
        self.open, self.high, self.low, self.close, self.volume = (array("d") for _ in range(5))
        self.columns: Sequence[array[Any]] = self.minute, self.open, self.high, self.low, self.close, self.volume

    def __len__(self) -> int:
        return len(self.minute)

    def __getitem__(self, place: int) -> FileRow:
        return FileRow(*(column[place] for column in self.columns))

    @property
    def range_bp(self) -> float:
        """The median range of a minute, in basis points of its close."""
        return median(
            10_000 * (high - low) / close for high, low, close in zip(self.high, self.low, self.close, strict=True)
        )

    def joined(self, span: timedelta, first: datetime, last: datetime) -> Iterator[Candle]:
        """Yield the candles of a span within [first, last), which are multiples of it; none where nothing traded."""
        width = span // timedelta(minutes=1)
        stop = bisect_left(self.minute, epoch_second(first) // 60)
        for minute in range(epoch_second(first) // 60, epoch_second(last) // 60, width):
            begin, stop = stop, bisect_left(self.minute, minute + width, stop)
            if begin < stop:
                yield Candle(
                    moment_of(minute * 60),
                    self.open[begin],
                    max(self.high[begin:stop]),
                    min(self.low[begin:stop]),
                    self.close[stop - 1],
                    sum(self.volume[begin:stop]),
                )

    def append(self, row: FileRow) -> None:
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)

    def reverse(self) -> None:
        """Reverse candles that are newest first, as venues answer requests."""
        for column in self.columns:
            column.reverse()

    def extend(self, later: "Minutes") -> None:
        """Append candles that are all later than the existing ones."""
        for column, added in zip(self.columns, later.columns, strict=True):
            column.extend(added)


def find_files(place: Path) -> dict[str, list[Path]]:
    """Return the kline files of a folder, or one file, by market. Raise `MarketDataError` if there are none.

    An archive whose unpacked file lies next to it is skipped.
    """
    try:
        paths = sorted(place.iterdir()) if place.is_dir() else [place]
        place.stat()
    except OSError as error:
        raise MarketDataError(f"{place}: {error.strerror}") from error
    files: dict[str, list[Path]] = {}
    for path in paths:
        name = _FILE_NAME.fullmatch(path.name)
        if name is None or not path.is_file() or _FUNDING_FILE.fullmatch(path.name) is not None or _is_unpacked(path):
            continue
        if name["interval"] not in (None, "1m"):
            raise MarketDataError(f"{path}: these are {name['interval']} candles; a replay needs 1m candles")
        files.setdefault(canonical_symbol(name["market"]), []).append(path)
    if not files:
        names = "such as BTCUSDT-1m-2025-01.csv, .csv.gz, .zip or .parquet"
        raise MarketDataError(f"{place}: no kline files found ({names})")
    return files


def find_funding_files(place: Path) -> dict[str, list[Path]]:
    """Return the funding-rate files of a folder by market; none if the candles are a single file."""
    files: dict[str, list[Path]] = {}
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        name = _FUNDING_FILE.fullmatch(path.name)
        if name is not None and path.is_file() and not _is_unpacked(path):
            files.setdefault(canonical_symbol(name["market"]), []).append(path)
    return files


def _is_unpacked(path: Path) -> bool:
    return path.suffix == ".zip" and path.with_suffix(".csv").is_file()


def read_funding(paths: list[Path]) -> dict[int, PublishedRate]:
    """Return the published rates of one market's files by hour since 1970. An hour with two rates is rejected."""
    rates: dict[int, PublishedRate] = {}
    for path in paths:
        last_hour, times = None, Times(PLAIN_TIMES)
        for number, line in dated_lines(path):
            fields = line.split(",")
            if len(fields) != len(_FUNDING_NAMES):
                refuse(path, number, f"{len(fields)} columns instead of {len(_FUNDING_NAMES)}")
            if last_hour is None and number == 1 and not any(_is_number(field) for field in fields):
                if [field.strip().strip('"').lower() for field in fields] != _FUNDING_NAMES:
                    refuse(path, number, f"expected a header with the columns {','.join(_FUNDING_NAMES)}")
                continue
            try:
                hour, published = _funding_row(fields, times)
            except ValueError as error:
                refuse(path, number, str(error))
            if last_hour is not None and hour <= last_hour:
                refuse(path, number, "its time is not after the previous row's")
            if hour in rates:
                refuse(path, number, f"another file has a rate of {moment_of(hour * 3600).isoformat()} too")
            last_hour = hour
            rates[hour] = published
        if last_hour is None:
            refuse(path, 1, "no funding rates")
    return rates


def _funding_row(fields: list[str], times: Times) -> tuple[int, PublishedRate]:
    """Return the hour since 1970 and the rate published for it. Raise `ValueError` with the reason."""
    hour, late = divmod(times.read(fields[0]) // 60_000_000, 60)
    if late > _FUNDING_LATE:
        raise ValueError(f"the time {fields[0]} is not on the hour")
    if fields[1] not in _INTERVALS:
        raise ValueError(f"the interval {fields[1][:40]!r} is not a number of hours that divides 24")
    _number(fields[2])
    rate = Decimal(fields[2].strip())
    if abs(rate) > _RATE_MAX:
        raise ValueError(f"the rate {rate} is beyond ±{_RATE_MAX}")
    return hour, PublishedRate(rate, int(fields[1]))


def read_market(paths: list[Path]) -> Minutes:
    """Return the candles of all files of one market in time order. Overlapping files are rejected."""
    parts = sorted(((read_file(path), path) for path in paths), key=lambda part: part[0].minute[0])
    joined, previous = parts[0]
    for minutes, path in parts[1:]:
        if minutes.minute[0] <= joined.minute[-1]:
            at = moment_of(minutes.minute[0] * 60).isoformat()
            raise MarketDataError(f"{path}: begins at {at}, which {previous.name} already contains")
        joined.extend(minutes)
        previous = path
    return joined


def read_file(path: Path) -> Minutes:
    """Return the candles of one file. Raise `MarketDataError` with file, line and reason."""
    minutes = _read_plain(path) or _read_lines(path)
    if not minutes:
        refuse(path, 1, "no candles")
    if len(minutes) > 1 and minutes.minute[1] < minutes.minute[0]:
        minutes.reverse()
    if len(minutes) > 1 and all(later - minute > 1 for minute, later in pairwise(minutes.minute)):
        refuse(path, 2, "no two candles are a minute apart; a replay needs 1m candles")
    return minutes


def _read_plain(path: Path) -> Minutes | None:
    """Return the candles of a file in Binance's form, which numpy reads; None if it has another form or a mistake."""
    if path.suffix == ".parquet":
        return None
    minutes = Minutes()
    try:
        with _text(path) as file:
            first = file.readline(_LINE_MAX)
            form = _form_of(first.rstrip("\n").split(","))
            text, width = "" if form.has_header else first, None
            while form.is_plain and (text := text + file.read(PLAIN_READ) + file.readline(_LINE_MAX)):
                width = width or text.find(",")
                if not _add_plain(minutes, text.removesuffix("\n").split("\n"), form.count, width):
                    return None
                text = ""
    except (OSError, EOFError, ValueError, zlib.error, BadZipFile):
        return None
    return minutes if (np.diff(minutes.minute) > 0).all() and len(minutes) <= CANDLES_MAX else None


def _add_plain(minutes: Minutes, lines: list[str], count: int, width: int) -> bool:
    """Add the candles of lines of `count` numbers; False if one is another, or its time has not `width` digits.

    :raises ValueError: one of them is no number
    """
    if width not in _PLAIN_WIDTHS or not all(_PLAIN_LINE.fullmatch(line) and line[width] == "," for line in lines):
        return False
    table = np.loadtxt(lines, delimiter=",", ndmin=2)
    if table.shape != (len(lines), count):
        return False
    times, opened, high, low, close, volume = table.T[:6]
    minute, rest = np.divmod(times, _PLAIN_WIDTHS[width])
    is_within = (low <= np.minimum(opened, close)) & (np.maximum(opened, close) <= high)
    values = minute.astype(np.int64), opened, high, low, close, volume
    for column, each in zip(minutes.columns, values, strict=True):
        column.frombytes(each.tobytes())
    return bool(((rest == 0) & (low > 0) & is_within & np.isfinite(volume)).all())


def _form_of(fields: list[str]) -> CandleForm:
    """Return the form of a file with these fields in its first line. Raise `FormError`."""
    return CandleForm(fields, is_header=not any(_is_number(field) for field in fields))


def _read_lines(path: Path) -> Minutes:
    """Return the candles of one file, in the order of its lines."""
    minutes, form = Minutes(), None
    for number, line in dated_lines(path):
        fields = line.split(",")
        try:
            if form is None:
                form = _form_of(fields)
                if form.has_header:
                    continue
            minutes.append(_row(*form.read(fields)))
        except ValueError as error:
            refuse(path, number, str(error))
        step = minutes.minute[-1] - minutes.minute[-2] if len(minutes) > 1 else 1
        is_newest_first = form.may_descend and len(minutes) > 1 and minutes.minute[1] < minutes.minute[0]
        if step >= 0 if is_newest_first else step <= 0:
            refuse(path, number, f"its time is not {'before' if is_newest_first else 'after'} the previous row's")
        if len(minutes) > CANDLES_MAX:
            refuse(path, number, f"more than {CANDLES_MAX:,} candles")
    return minutes


def dated_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, from 1; blank lines are allowed only at the end."""
    number = 0
    blank: int | None = None
    try:
        with _open_lines(path) as lines:
            for line in lines:
                number += 1
                if len(line) > _LINE_MAX:
                    refuse(path, number, f"has over {_LINE_MAX} characters")
                if not line.strip():
                    blank = blank or number
                    if number - blank < _BLANK_MAX:
                        continue
                if blank is not None:
                    refuse(path, blank, "an empty line")
                yield number, line.rstrip("\n")
    except (OSError, EOFError, zlib.error, BadZipFile) as error:
        refuse(path, number + 1, f"cannot be read ({error})")
    except UnicodeDecodeError:
        refuse(path, number + 1, "is not UTF-8 text")


@contextmanager
def _open_lines(path: Path) -> Iterator[Iterator[str]]:
    """Open a file as lines; a line of a table that is no text has its cells as CSV would."""
    if path.suffix == ".parquet":
        with open_regular(path) as file:
            yield _parquet_lines(path, file)
    else:
        with _text(path) as file:
            yield iter(partial(file.readline, _LINE_MAX + 1), "")


def _parquet_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Yield the names of the columns, then the rows; times are microseconds since 1970."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        refuse(path, 1, "pyarrow is not installed, which Parquet needs: pip install 'trader-service[results]'")
    try:
        table = parquet.ParquetFile(file)
        yield ",".join(table.schema_arrow.names)
        for batch in table.iter_batches():
            columns = [
                column.cast(arrow.timestamp("us", column.type.tz)).cast(arrow.int64())
                if arrow.types.is_timestamp(column.type)
                else column
                for column in batch.columns
            ]
            yield from (",".join(map(_cell, row)) for row in zip(*(each.to_pylist() for each in columns), strict=True))
    except arrow.ArrowException as error:
        refuse(path, 1, f"cannot be read ({error})")


def _cell(value: object) -> str:
    """Return a value as a cell of a line of CSV."""
    text = str(value)
    return text if not _QUOTED.intersection(text) else '"' + " ".join(text.replace('"', '""').splitlines()) + '"'


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """Open a file as text, unpacking it if needed."""
    with ExitStack() as stack:
        packed = stack.enter_context(open_regular(path))
        unpacked: IO[bytes] = packed
        if path.suffix == ".gz":
            unpacked = cast("IO[bytes]", stack.enter_context(gzip.open(packed)))
        elif path.suffix == ".zip":
            archive = stack.enter_context(ZipFile(packed))
            members = archive.infolist()
            if len(members) != 1:
                refuse(path, 1, f"{len(members)} files in the archive instead of one")
            if members[0].flag_bits & 1 or members[0].compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                refuse(path, 1, "the archive is encrypted, or not compressed with deflate")
            unpacked = stack.enter_context(archive.open(members[0]))
        yield TextIOWrapper(unpacked, encoding="utf-8-sig", newline=None)


def _row(minute: int, figures: list[str]) -> FileRow:
    """Return the candle of a row. Raise `ValueError` with the reason."""
    opened, high, low, close, volume = _numbers(figures)
    if low <= 0:
        raise ValueError("a price is not above 0")
    if high < low:
        raise ValueError(f"high {high} is below low {low}")
    if not low <= opened <= high:
        raise ValueError(f"open {opened} is outside [{low}, {high}]")
    if not low <= close <= high:
        raise ValueError(f"close {close} is outside [{low}, {high}]")
    if volume < 0:
        raise ValueError(f"volume {volume} is negative")
    return FileRow(minute, opened, high, low, close, volume)


def _numbers(fields: list[str]) -> list[float]:
    """Convert all fields at once; if that fails or looks suspicious, convert them one by one to name the wrong one."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        values = []
    if isfinite(sum(values, 0.0 if values else nan)) and "_" not in "".join(fields):
        return values
    return [_number(field) for field in fields]


def _number(field: str) -> float:
    try:
        value = float(field)
    except ValueError:
        raise ValueError(f"{field[:40]!r} is not a number") from None
    if not isfinite(value) or "_" in field:
        raise ValueError(f"{field[:40]!r} is not a number")
    return value


def _is_number(field: str) -> bool:
    try:
        _number(field)
    except ValueError:
        return False
    return True


def refuse(path: Path, line: int, reason: str) -> NoReturn:
    raise MarketDataError(f"{path}, line {line}: {reason}")
