"""Forms of candle files: which columns a header names, in the words of several venues, and how times are written."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from trader.core.clock import EPOCH

_COLUMNS: Final[Mapping[str, Sequence[str]]] = {
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

_VOLUME_IN_CURRENCY: Final = "volccy"
_VOLUMES_IN_QUOTE: Final = ("volccyquote", "volquote")
"""OKX: the volume in base currency for derivatives, but in quote currency for spot; and the one in quote currency."""

_CONFIRM: Final = "confirm"
_PLAIN_COUNTS: Final = (6, 12)


class FormError(ValueError):
    """A line that has no known form, or not the file's. The message says what is expected."""


class Form:
    """The form of one file. Every row must have it, the times in the form of the first row.

    Files without a header have Binance's 6 or 12 columns and times in milliseconds or microseconds: where the columns
    are in another order, or the unit is another, nobody could tell.
    """

    def __init__(self, names: Sequence[str] | None, count: int) -> None:
        self._count = count
        self._time: _TimeForm | None = None
        self.has_header = names is not None
        known = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names or ()]
        self.may_descend = self.has_header and known[0] != "opentime"
        """Whether the newest row may come first, as in answers of Bybit, OKX and Coinbase, but never of Binance."""

        self._places = [_place(known, role) for role in _COLUMNS] if names is not None else list(range(6))
        self._in_currency = known.index(_VOLUME_IN_CURRENCY) if _VOLUME_IN_CURRENCY in known else None
        self._in_quote = next((known.index(name) for name in _VOLUMES_IN_QUOTE if name in known), None)
        self._confirm = known.index(_CONFIRM) if _CONFIRM in known else None
        if self._in_currency is not None and self._in_quote is None:
            raise FormError(f"volCcy may be in base or quote currency; expected a column {_VOLUMES_IN_QUOTE[0]}")

    @classmethod
    def of(cls, fields: Sequence[str], *, is_header: bool) -> "Form":
        """Return the form that a file's first line tells. Raise `FormError`."""
        if not is_header and len(fields) not in _PLAIN_COUNTS:
            raise FormError(f"{len(fields)} columns instead of 6 or 12, or of a header that names them")
        return cls(fields if is_header else None, len(fields))

    def read(self, fields: Sequence[str]) -> tuple[int, list[str]]:
        """Return the minute since 1970 of a row, and its open, high, low, close and volume. Raise `FormError`."""
        if len(fields) != self._count:
            raise FormError(f"{len(fields)} columns instead of {self._count}")
        if self._confirm is not None and fields[self._confirm] != "1":
            raise FormError(f"{_CONFIRM} is {fields[self._confirm][:40]!r}: the candle is not complete")
        time, *figures = (fields[place] for place in self._places)
        if self._in_currency is not None and fields[self._in_currency] != fields[self._in_quote or 0]:
            figures[-1] = fields[self._in_currency]
        return self._minute(time.strip('" ') if self.has_header else time), figures

    def _minute(self, text: str) -> int:
        form = _time_form(text)
        if self._time is None:
            if form is None or (not self.has_header and form.name not in ("milliseconds", "microseconds")):
                units = "milliseconds or microseconds since 1970"
                expected = f"ISO 8601, or seconds, {units}" if self.has_header else units
                raise FormError(f"the time {text[:40]!r} has no known form; expected {expected}")
            self._time = form
        elif form != self._time:
            raise FormError(f"the time {text[:40]!r} has another form than the first row's: {self._time.name}")
        minute, rest = self._time.minute(text)
        if rest:
            raise FormError(f"the time {text} is not on the minute")
        return minute


class _TimeForm(NamedTuple):
    """How times are written. `per_minute` is the number of its units in a minute; 0: ISO 8601."""

    name: str
    per_minute: int

    def minute(self, text: str) -> tuple[int, int]:
        """Return the full minutes since 1970 of a time in this form, and what remains."""
        if self.per_minute:
            return divmod(int(text), self.per_minute)
        moment = datetime.fromisoformat(text)
        utc = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return divmod((utc - EPOCH) // timedelta(microseconds=1), 60_000_000)


def _time_form(text: str) -> _TimeForm | None:
    """Return the form of a time between 2001 and 2286; None if it has no known one."""
    if text.isascii() and text.isdigit():
        return _UNITS.get(len(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    zone = "without a zone, which is UTC" if moment.tzinfo is None else "with a zone"
    return _TimeForm(f"ISO 8601 {zone}", 0) if moment.year in _YEARS else None


_UNITS: Final = {
    10: _TimeForm("seconds", 60),
    13: _TimeForm("milliseconds", 60_000),
    16: _TimeForm("microseconds", 60_000_000),
    19: _TimeForm("nanoseconds", 60_000_000_000),
}
"""The form of a time since 1970 by the number of its digits."""

_YEARS: Final = range(2001, 2287)


def _place(names: Sequence[str], role: str) -> int:
    """Return the place of the column with this role. Raise `FormError` if none or several have its name."""
    for name in _COLUMNS[role]:
        if name in names:
            if names.count(name) > 1:
                raise FormError(f"the header has the column {name!r} {names.count(name)} times")
            return names.index(name)
    raise FormError(f"no column is the {role}; expected a header with the columns {','.join(_COLUMNS)}")
