"""Forms of dated files: what their columns are called, by several venues, and how their times are written."""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from trader.core.clock import EPOCH

COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    "open_time": (
        "opentime", "timestamp", "unix", "ts", "time", "start", "startat", "starttime", "datetime", "date",
        "", "unnamed0", "index", "indexlevel0",
    ),
    "open": ("open", "o", "openprice"),
    "high": ("high", "h", "highprice"),
    "low": ("low", "l", "lowprice"),
    "close": ("close", "c", "closeprice"),
    "volume": ("volume", "v", "vol", "basevolume", "volumebase"),
}  # fmt: skip
"""What the columns of a candle are called in lower-case letters and digits, the most certain name first: by Binance,
Bybit, OKX and Coinbase, and as the index of a DataFrame."""

_IN_CURRENCY, _IN_QUOTE, _CONFIRM = "volccy", ("volccyquote", "volquote"), "confirm"
"""OKX: the volume in base currency for derivatives, but in quote currency for spot; the one in quote currency; and
whether a candle is complete."""

_PLAIN_COUNTS: Final = (6, 12)
PLAIN_TIMES: Final = ("milliseconds", "microseconds")
_UNITS: Final = {"seconds": 10, "milliseconds": 13, "microseconds": 16, "nanoseconds": 19}
"""The digits of a time since 1970 in each unit, from 2001 to 2286."""

_YEARS: Final = range(2001, 2287)
_ISO: Final = "ISO 8601"


class FormError(ValueError):
    """A line that has no known form, or not the file's. The message says what is expected."""


class Times:
    """Reads the times of one file, which all have the form of the first: one of `allowed`."""

    def __init__(self, allowed: Collection[str] = (_ISO, *_UNITS)) -> None:
        self._allowed = allowed
        self._form: str | None = None

    def read(self, text: str) -> int:
        """Return the microseconds since 1970 of a time. Raise `FormError`."""
        form, microseconds = _epoch(text) if text.isascii() and text.isdigit() else _iso(text)
        if form is None or form.partition(",")[0] not in self._allowed:
            expected = " or ".join(f"{name} since 1970" if name in _UNITS else name for name in self._allowed)
            raise FormError(f"the time {text[:40]!r} has no known form; expected {expected}")
        if self._form is None:
            self._form = form
        elif form != self._form:
            raise FormError(f"the time {text[:40]!r} is in {form}, unlike the first row's, which is in {self._form}")
        return microseconds


def _epoch(text: str) -> tuple[str | None, int]:
    """Return the unit of a time since 1970 (None: there is none with so many digits), and its microseconds."""
    unit = next((name for name, digits in _UNITS.items() if digits == len(text)), None)
    return unit, 0 if unit is None else int(text.ljust(16, "0")[:16])


def _iso(text: str) -> tuple[str | None, int]:
    """Return how a text in ISO 8601 gives the zone (None: it is none), and its microseconds since 1970."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None, 0
    utc = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    zone = "without a zone" if moment.tzinfo is None else "with a zone"
    return f"{_ISO}, {zone}" if moment.year in _YEARS else None, (utc - EPOCH) // timedelta(microseconds=1)


class CandleForm:
    """The form of one file of candles. Every row must have it.

    Files without a header have Binance's 6 or 12 columns and times in milliseconds or microseconds: where the columns
    are in another order, or the unit is another, nobody could tell.

    :raises FormError: there are neither as many columns nor a header that names them
    """

    def __init__(self, fields: Sequence[str], *, is_header: bool) -> None:
        if not is_header and len(fields) not in _PLAIN_COUNTS:
            raise FormError(f"{len(fields)} columns instead of 6 or 12, or of a header that names them")
        self.count, self.has_header = len(fields), is_header
        self._times = Times() if is_header else Times(PLAIN_TIMES)
        names = plain_names(fields) if is_header else []
        self.may_descend = is_header and names[0] != "opentime"
        """Whether the newest row may come first, as in answers of Bybit, OKX and Coinbase, but never of Binance."""

        self._places = [place_of(role, names) for role in COLUMNS] if is_header else list(range(6))
        places = {name: place for place, name in enumerate(names)}
        self._in_currency, self._confirm = places.get(_IN_CURRENCY), places.get(_CONFIRM)
        self._in_quote = next((places[name] for name in _IN_QUOTE if name in places), None)
        if self._in_currency is not None and self._in_quote is None:
            raise FormError(f"volCcy may be in base or quote currency; expected a column {_IN_QUOTE[0]}")
        self.is_plain = self._places == list(range(6)) and self._confirm is self._in_currency is None
        """Whether the first six columns are Binance's and hold the whole candle."""

    def read(self, fields: Sequence[str]) -> tuple[int, list[str]]:
        """Return the minute since 1970 of a row, and its open, high, low, close and volume. Raise `FormError`."""
        if len(fields) != self.count:
            raise FormError(f"{len(fields)} columns instead of {self.count}")
        if self._confirm is not None and fields[self._confirm] != "1":
            raise FormError(f"{_CONFIRM} is {fields[self._confirm][:40]!r}: the candle is not complete")
        time, *figures = (fields[place] for place in self._places)
        if self._in_currency is not None and fields[self._in_currency] != fields[self._in_quote or 0]:
            figures[-1] = fields[self._in_currency]
        minute, rest = divmod(self._times.read(time.strip('" ')), 60_000_000)
        if rest:
            raise FormError(f"the time {time} is not on the minute")
        return minute, figures


def plain_names(header: Sequence[str]) -> list[str]:
    """Return the names of columns in lower-case letters and digits."""
    return [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]


def place_of(role: str, names: Sequence[str]) -> int:
    """Return the place of the column with this role among plain names. Raise `FormError` unless there is one."""
    for name in COLUMNS[role]:
        if names.count(name) > 1:
            raise FormError(f"the header has the column {name!r} {names.count(name)} times")
        if name in names:
            return names.index(name)
    raise FormError(f"no column is the {role}; expected a header with the columns {','.join(COLUMNS)}")
