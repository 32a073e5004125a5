"""Own data: dated columns of a researcher's files, of which a view shows only what was known at its time."""

import csv
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Final

from trader.core.clock import EPOCH, iso, moment_of
from trader.core.errors import MarketDataError
from trader.market.sources.files import dated_lines, refuse
from trader.market.sources.forms import COLUMNS, FormError, Times, place_of, plain_names

_ABSENT: Final = frozenset({"", "nan", "NaN", "None", "null"})
"""Cells that leave the value of their column as it was."""

_CLOSE_TIME: Final = "closetime"

Known = Mapping[str, float | str]
"""The latest value of each column: a number, or any other text."""


class OwnData:
    """The columns of several files. A row is known from its time on, and a column has its latest value."""

    def __init__(self, rows: Iterable[tuple[int, Known]] = ()) -> None:
        """`rows` have microseconds since 1970, and the values that are new then."""
        self._times: list[int] = []
        self._known: list[Known] = [{}]
        for at, values in sorted(rows, key=itemgetter(0)):
            self._times.append(at)
            self._known.append({**self._known[-1], **values})

    def at(self, now: datetime) -> Known:
        """Return what is known at a time, as a copy that its reader may change."""
        return dict(self._known[bisect_right(self._times, (now - EPOCH) // timedelta(microseconds=1))])

    @classmethod
    def read(cls, paths: Sequence[Path], span: range) -> "OwnData":
        """Read files for a run over these seconds since 1970. Raise `MarketDataError` with file, line and reason."""
        rows: list[tuple[int, Known]] = []
        file_of: dict[str, Path] = {}
        for path in paths:
            own = _read(path)
            for name in {name for _, values in own for name in values}:
                if (other := file_of.setdefault(name, path)) != path:
                    raise MarketDataError(f"{path}: {other} has a column {name!r}, too; names must differ")
            if own[0][0] >= span.stop * 1_000_000:
                ends_at, first = iso(moment_of(span.stop - 1)), iso(moment_of(own[0][0] // 1_000_000))
                raise MarketDataError(f"{path}: its first time, {first}, is after the end of the run, {ends_at}")
            rows += own
        return cls(rows)


def _read(path: Path) -> list[tuple[int, Known]]:
    rows: list[tuple[int, Known]] = []
    names: list[str] = []
    times, place = Times(), 0
    for number, line in dated_lines(path):
        fields = [field.strip() for field in next(csv.reader([line]))]
        try:
            if not names:
                names, place = fields, _place_of_time(plain_names(fields))
                if repeated := sorted({name for name in names if names.count(name) > 1}):
                    raise ValueError(f"the header has the column {repeated[0]!r} {names.count(repeated[0])} times")
                continue
            if len(fields) != len(names):
                raise ValueError(f"{len(fields)} columns instead of {len(names)}")
            microseconds = times.read(fields[place])
        except ValueError as error:
            refuse(path, number, str(error))
        if rows and microseconds <= rows[-1][0]:
            refuse(path, number, f"its time {fields[place]} is not after the previous row's")
        cells = zip(names, fields, strict=True)
        rows.append(
            (microseconds, {name: _value(cell) for name, cell in cells if name != names[place] and cell not in _ABSENT})
        )
    if not rows:
        refuse(path, 1, "no rows; expected a header with a time, and dated rows")
    return rows


def _place_of_time(names: Sequence[str]) -> int:
    """Return the place of the time from which on a row is known: of candles, when they close. Raise `ValueError`."""
    if _CLOSE_TIME in names:
        return names.index(_CLOSE_TIME)
    if all(not set(names).isdisjoint(COLUMNS[role]) for role in ("open", "high", "low", "close")):
        raise ValueError("these are candles, which are known once they close; expected a column close_time")
    try:
        return place_of("open_time", names)
    except FormError:
        raise ValueError("it needs one column time, date or timestamp; of candles, close_time") from None


def _value(cell: str) -> float | str:
    try:
        number = float(cell)
    except ValueError:
        return cell
    return number if isfinite(number) else cell
