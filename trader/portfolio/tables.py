"""Tables of a result: trades, fills, equity by minute and decisions, in files and as typed columns.

    >>> from trader import results
    >>> run = results.load("backtest")
    >>> run.trades["net_pnl"].sum()            # a numpy array
    >>> run.equity.frame().pivot(index="at", columns="account", values="equity")

Numbers are doubles; the exact amounts are in the ledger, or in the database.
"""

import csv
import importlib
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from trader.core.clock import EPOCH
from trader.core.errors import SettingsError
from trader.core.files import open_regular, read_lines, replacing

if TYPE_CHECKING:
    import pandas as pd

Format = Literal["csv", "parquet"]
ColumnKind = Literal["time", "text", "number", "flag"]

COLUMNS: Final[Mapping[str, Mapping[str, ColumnKind]]] = {
    "trades": {
        "account": "text", "symbol": "text", "side": "text", "quantity": "number", "entry_price": "number",
        "exit_price": "number", "leverage": "number", "gross_pnl": "number", "fees": "number", "funding": "number",
        "net_pnl": "number", "close_reason": "text", "confidence": "number", "opened_at": "time", "closed_at": "time",
        "entry_tag": "text", "exit_tag": "text",
    },
    "fills": {
        "at": "time", "account": "text", "symbol": "text", "side": "text", "quantity": "number", "price": "number",
        "fee": "number", "maker": "flag", "cause": "text",
    },
    "equity": {"at": "time", "account": "text", "equity": "number", "cash": "number", "unrealized": "number"},
    "decisions": {
        "at": "time", "account": "text", "tool": "text", "symbol": "text", "status": "text", "rule": "text",
        "reason": "text",
    },
    "series": {"at": "time", "symbol": "text", "name": "text", "value": "number", "panel": "flag"},
    "models": {
        "account": "text", "name": "text", "variant": "text", "provider": "text", "router_model": "text",
        "owner": "text", "replicate_of": "text", "training_cutoff": "text", "created_at": "time",
    },
    "runs": {
        "account": "text", "run": "text", "is_baseline": "flag", "number": "number", "capital": "number",
        "started_at": "time", "leverage": "number", "cost_usd": "number",
    },
    "past_runs": {
        "account": "text", "started_at": "time", "first": "number", "last": "number", "manual_since": "time",
    },
    "past_entrants": {
        "account": "text", "run_number": "number", "number": "number", "fingerprint": "text", "began_at": "time",
        "ended_at": "time",
    },
    "entrants": {
        "account": "text", "number": "number", "fingerprint": "text", "began_at": "time", "ended_at": "time",
        "finished": "number", "decided": "number", "due": "number", "manual_since": "time", "declared": "text",
    },
    "hours": {"account": "text", "hour": "time", "equity": "number", "at": "time", "leverage": "number"},
    "positions": {
        "account": "text", "symbol": "text", "is_long": "flag", "quantity": "number", "entry_notional": "number",
        "exit_notional": "number", "gross": "number", "fees": "number", "net": "number", "reason": "text",
        "stop": "number", "target": "number", "opened_at": "time", "closed_at": "time", "lowest": "number",
        "highest": "number",
    },
    "payments": {"at": "time", "account": "text", "kind": "text", "symbol": "text", "amount": "number"},
    "plan_changes": {"account": "text", "symbol": "text", "at": "time"},
    "closes": {"symbol": "text", "hour": "time", "close": "number"},
}  # fmt: skip
"""The columns of each table: the tables of a result, what its strategy draws, and the tables behind a season's card.

`status` of a decision is ok, rejected (then with the rule and the reason) or failed.
"""

_CODES: Final[Mapping[ColumnKind, str]] = {"time": "q", "number": "d", "flag": "b"}
_FORMULA: Final = re.compile(r"[-=+@\t\r\n'＝＋－＠]")
_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
FILE_BYTES_MAX: Final = 1 << 31
_NO_TIME: Final = int(np.datetime64("NaT", "ms").astype(np.int64))


class Table:
    """A table with a name in `COLUMNS`. Times are UTC, in numpy without a zone; missing values are NaN or ''."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kinds = COLUMNS[name]
        self._columns: dict[str, Any] = {
            column: [] if kind == "text" else array(_CODES[kind]) for column, kind in self._kinds.items()
        }
        self._add = [(self._columns[column].append, _TO_COLUMN[kind]) for column, kind in self._kinds.items()]

    def add(self, *values: Any) -> None:
        """Add a row, in the order of the columns."""
        for (append, convert), value in zip(self._add, values, strict=True):
            append(convert(value))

    def extend(self, *columns: Iterable[Any]) -> None:
        """Add rows without missing values by their columns, in the order of the table's."""
        for (column, kind), values in zip(self._kinds.items(), columns, strict=True):
            self._columns[column].extend(map(float if kind == "number" else _TO_COLUMN[kind], values))

    def sort(self, column: str) -> None:
        """Sort the rows by a column; equal ones keep their order."""
        order = np.argsort(self[column], kind="stable").tolist()
        for name, kind in self._kinds.items():
            cells = map(self._columns[name].__getitem__, order)
            self._columns[name][:] = list(cells) if kind == "text" else array(_CODES[kind], cells)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a row by the names of the columns."""
        self.add(*(row[column] for column in self._kinds))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as Python values, times with their zone; None for missing values."""
        convert = [_OF_COLUMN[kind] for kind in self._kinds.values()]
        for cells in zip(*self._columns.values(), strict=True):
            yield tuple(each(cell) for each, cell in zip(convert, cells, strict=True))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as `rows` does, each by the names of the columns."""
        for row in self.rows():
            yield dict(zip(self._kinds, row, strict=True))

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """Return a column: datetime64[ms], float64, bool, or text as objects."""
        match self._kinds[column]:
            case "time":
                return np.array(self._columns[column], dtype="datetime64[ms]")
            case "text":
                return np.array(self._columns[column], dtype=object)
            case "flag":
                return np.array(self._columns[column], dtype=np.bool_)
            case "number":
                return np.array(self._columns[column], dtype=np.float64)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all columns by name."""
        return {column: self[column] for column in self._kinds}

    def frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame with times in UTC. Requires pandas."""
        pandas = extra("pandas")
        frame: pd.DataFrame = pandas.DataFrame(self.arrays())
        for column, kind in self._kinds.items():
            if kind == "time":
                frame[column] = frame[column].dt.tz_localize("UTC")
        return frame

    def write(self, folder: Path, form: Format) -> None:
        """Write the table to a file named after it. Raises `OSError`, and `SettingsError` without pyarrow."""
        file = folder / f"{self.name}.{form}"
        if form == "parquet":
            arrow = extra("pyarrow")
            utc = arrow.timestamp("ms", tz="UTC")
            columns = {
                name: arrow.array(self[name], utc if kind == "time" else None) for name, kind in self._kinds.items()
            }
            with replacing(file) as opened:
                extra("pyarrow.parquet").write_table(arrow.table(columns), opened)
            return
        write_csv(file, chain([self._kinds], zip(*(self._cells(column) for column in self._kinds), strict=True)))

    def _cells(self, column: str) -> Iterable[Any]:
        """Return the cells of a column as CSV has them."""
        cells: Iterable[Any] = self._columns[column]
        match self._kinds[column]:
            case "time":
                cells = np.datetime_as_string(self[column], unit="ms", timezone="UTC").tolist()
            case "text":
                cells = map(defused, cells)
        return cells


class Results(NamedTuple):
    """The tables of a backtest or of an export."""

    trades: Table
    fills: Table
    equity: Table
    decisions: Table


def empty() -> Results:
    """Return the tables without rows."""
    return Results(*(Table(name) for name in Results._fields))


def check_format(form: Format | None) -> None:
    """Check that files of this format, if any, can be written. Raises `SettingsError`."""
    if form is not None and form not in get_args(Format):
        raise SettingsError([f"--tables is {form!r}; it must be one of {', '.join(get_args(Format))}"])
    if form == "parquet":
        extra("pyarrow.parquet")


def load(path: str | Path) -> Results:
    """Return the tables in the folder of a backtest or of an export.

    :raises SettingsError: a table is missing or has other columns; Parquet without pyarrow
    """
    folder = Path(path)
    return Results(*(load_table(folder, name) for name in Results._fields))


def load_table(folder: Path, name: str) -> Table:
    """Return a table of a folder, as `load` does."""
    parquet, text = folder / f"{name}.parquet", folder / f"{name}.csv"
    file = parquet if parquet.exists() else text
    if not file.exists():
        raise SettingsError([f"{folder} has neither {parquet.name} nor {text.name}: it is not a backtest result"])
    try:
        return _read_table(file, name)
    except (OSError, ValueError, TypeError, ArithmeticError, LookupError, NotImplementedError, csv.Error) as error:
        raise SettingsError([f"{file} cannot be read: {error}"]) from None


def _read_table(file: Path, name: str) -> Table:
    table, kinds = Table(name), COLUMNS[name]
    rows: Iterator[Sequence[Any]]
    if file.suffix == ".parquet":
        with open_regular(file, FILE_BYTES_MAX) as opened:
            read = extra("pyarrow.parquet").read_table(opened)
        names = read.column_names
        rows = (
            [cell.replace(tzinfo=UTC) if isinstance(cell, datetime) else cell for cell in row]
            for row in zip(*(column.to_pylist() for column in read.columns), strict=True)
        )
    else:
        lines = csv.reader(line.decode() for line in read_lines(file, FILE_BYTES_MAX))
        names = next(lines, [])
        rows = ([_OF_TEXT[kind](cell) for kind, cell in zip(kinds.values(), row, strict=True)] for row in lines)
    if names != list(kinds):
        raise SettingsError([f"{file.parent}: {name} has the columns {', '.join(names)}, not {', '.join(kinds)}"])
    for row in rows:
        table.add(*row)
    for column, kind in kinds.items():
        if kind == "number" and np.isinf(table[column]).any():
            raise ValueError(f"{column} has a number that is too large")
    return table


def write_csv(file: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV; `defused` are the cells that may be texts of strangers. Raises `OSError`."""
    with replacing(file) as opened, TextIOWrapper(opened, encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows(rows)


def defused(cell: Any) -> Any:
    """Return a cell with an apostrophe before a text that a spreadsheet would execute, or that begins with one."""
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


_TO_COLUMN: Final[Mapping[ColumnKind, Callable[[Any], Any]]] = {
    "time": lambda moment: _NO_TIME if moment is None else round(moment.timestamp() * 1000),
    "text": lambda value: "" if value is None else str(value),
    "number": lambda value: float("nan") if value is None else float(value),
    "flag": bool,
}
_OF_COLUMN: Final[Mapping[ColumnKind, Callable[[Any], Any]]] = {
    "time": lambda value: None if value == _NO_TIME else EPOCH + timedelta(milliseconds=value),
    "text": lambda value: value or None,
    "number": lambda value: None if math.isnan(value) else value,
    "flag": bool,
}
_OF_TEXT: Final[Mapping[ColumnKind, Callable[[str], Any]]] = {
    "time": lambda text: None if text == "NaT" else datetime.fromisoformat(text),
    "text": lambda text: text.removeprefix("'"),
    "number": float,
    "flag": lambda text: text == "1",
}


def extra(module: str, of: str = "results") -> Any:
    """Return a module from one of the package's extras. Raises `SettingsError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise SettingsError(
            [f"{name} is not installed, which this needs: pip install 'trader-service[{of}]'"]
        ) from None
