"""Results in the chain: records of the rows that decide a ranking, and their comparison with the tables.

A record is a JSON object in canonical form (RFC 8785) with its `kind`; `rows` has rows of tables by table name. A
record of kind `results` also says which part of each account's ledger and hours it covers (`spans`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from trader.core.canonical_json import canonical_json
from trader.core.money import format_decimal

ResultRow = Mapping[str, Any]
ResultRows = Mapping[str, Sequence[ResultRow]]
"""Rows by table name."""

FindingKind = Literal["changed", "removed", "inserted", "rebuilt", "cut off"]

BEGIN: Final = "begin"
RESULTS: Final = "results"
CANDLES: Final = "candles"
REMOVED: Final = "removed"
APPROVED: Final = "approved"

SPAN_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "fills": ("account_id", "sequence"),
    "funding_payments": ("account_id", "sequence"),
    "insurance_payments": ("account_id", "sequence"),
    "portfolio_hourly": ("account_id", "hour"),
    "candles": ("symbol", "open_time"),
}
"""Tables whose rows never change once they are in the chain, with the columns that identify a row."""

STATE_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "models": ("id",),
    "runs": ("account_id", "number"),
    "baselines": ("id",),
    "entrants": ("model_id", "number"),
    "halts": ("id",),
    "invocation_counts": ("model_id", "run_number", "entrant", "season"),
    "season_records": ("season", "number"),
}
"""Tables whose rows may change: a row must equal its latest record."""

SETTABLE: Final[Mapping[str, frozenset[str]]] = {
    "runs": frozenset({"ended_at"}),
    "entrants": frozenset({"answered_by", "fingerprint"}),
    "halts": frozenset({"lifted_at", "lifted_by"}),
}
"""Columns that are set later: null before, except a fingerprint, which may change until `answered_by` is set."""


class ChainFinding(NamedTuple):
    """A contradiction between chain and rows. `position` is the first position in the chain that it concerns."""

    kind: FindingKind
    position: int | None
    text: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an account in one record: the ledger's sequences and the hours, both (after, until].

    `hour_until` is None if there are no hours, `hour_after` if they start with the first one.
    """

    account_id: str
    sequence_after: int
    sequence_until: int
    hour_after: str | None
    hour_until: str | None


def utc_text(moment: datetime) -> str:
    """Return a time in the form used by records: ISO 8601 in UTC with microseconds and `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def plain_row(columns: Iterable[tuple[str, Any]]) -> ResultRow:
    """Return the columns of a row in the form used by records: numbers with a fraction as text, times in UTC."""
    return {name: _plain(value) for name, value in columns}


def _plain(value: Any) -> str | int | bool | None:
    match value:
        case Decimal():
            return format_decimal(value)
        case datetime():
            return utc_text(value)
        case float() | UUID():
            return str(value)
        case str() | int() | bool() | None:
            return value
    raise TypeError(f"a record of the chain cannot contain a {type(value).__name__}")


def encode_record(kind: str, content: Mapping[str, Any]) -> str:
    """Return a record of the chain in its canonical form (RFC 8785)."""
    return canonical_json({**content, "kind": kind}).decode()


def spans_of(content: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a record.

    :raises msgspec.ValidationError: they do not have the form that this module writes
    """
    return msgspec.convert(content.get("spans", ()), list[Span])


def forget_removed(states: dict[str, dict[tuple[Any, ...], Any]], content: Mapping[str, Any]) -> None:
    """Drop the runs of the account, or the model, that a record says was removed, from states by table and key."""
    for table, name in (("runs", content.get("account_id")), ("models", content.get("model_id"))):
        states[table] = {key: state for key, state in states[table].items() if key[0] != name}


class ResultsChecker:
    """Follows the records of results from first to last, and compares them with the rows of the tables."""

    def __init__(self, removed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Take the positions at which accounts that had never traded were removed: their earlier rows are gone."""
        self._removed = removed
        self.has_begun = False
        self.rows = 0
        """The number of rows in the records so far."""

        self._states: dict[str, dict[tuple[Any, ...], tuple[ResultRow, int]]] = {table: {} for table in STATE_TABLES}
        self._ends: dict[str, tuple[int, str | None]] = {}

    def follow(self, position: int, content: Mapping[str, Any], present: ResultRows) -> Iterator[ChainFinding]:
        """Yield the findings about a record; `present` has the current rows of the tables within its spans."""
        if content["kind"] == BEGIN:
            self.has_begun = True
        if content["kind"] == REMOVED:
            self._ends.pop(content.get("account_id", ""), None)
            forget_removed(self._states, content)
        for span in spans_of(content):
            yield from self._follow_span(position, span)
        recorded: ResultRows = content.get("rows", {})
        self.rows += sum(map(len, recorded.values()))
        for table, key in SPAN_TABLES.items():
            before = {_key(row, key): row for row in recorded.get(table, ()) if not self._is_gone(row, position)}
            after = {_key(row, key): row for row in present.get(table, ()) if not self._is_gone(row, position)}
            yield from _differences(table, {name: (row, position) for name, row in before.items()}, after)
        for table in STATE_TABLES.keys() & recorded.keys():
            for row in recorded[table]:
                yield from self._follow_state(position, table, row)

    def finish(self, present: ResultRows) -> Iterator[ChainFinding]:
        """Yield where the state tables differ from the last record of their rows."""
        for table, key in STATE_TABLES.items():
            recorded = self._states[table]
            after = {_key(row, key): row for row in present[table]}
            if not self.has_begun:
                after = {name: row for name, row in after.items() if name in recorded}
            waiting = {name for name, row in after.items() if self._is_waiting(table, row, after)}
            yield from _differences(
                table,
                {name: state for name, state in recorded.items() if name not in waiting},
                {name: row for name, row in after.items() if name not in waiting},
            )

    def _is_gone(self, row: ResultRow, position: int) -> bool:
        return position < self._removed.get(row.get("account_id", ""), 0)

    def _follow_span(self, position: int, span: Span) -> Iterator[ChainFinding]:
        expected = self._ends.get(span.account_id, (0, None))
        if (span.sequence_after, span.hour_after) != expected:
            text = (
                f"the results of {span.account_id} do not continue where they ended: some are in no record, or in two"
            )
            yield ChainFinding("changed", position, text)
        self._ends[span.account_id] = span.sequence_until, span.hour_until or span.hour_after

    def _follow_state(self, position: int, table: str, row: ResultRow) -> Iterator[ChainFinding]:
        """Follow a row of a state table; a row changed before it is recorded again contradicts its last record."""
        key = _key(row, STATE_TABLES[table])
        was, before = self._states[table].get(key, (row, position))
        self._states[table][key] = row, position
        for column, value in row.items():
            if value == was[column] or _may_become(table, column, was, row):
                continue
            name = f"{table} {', '.join(map(str, key))}"
            text = f"{name}: {column} was recorded as {was[column]} at position {before}, and as {value} here"
            yield ChainFinding("changed", position, text)

    def _is_waiting(self, table: str, row: ResultRow, after: Mapping[tuple[Any, ...], ResultRow]) -> bool:
        """Return whether a row is newer than its account's last record, and will be in the next one.

        Runs and baselines are recorded periodically, and counters at the first missed cycle. A run that has ended is
        followed by another.
        """
        states = self._states[table]
        was, _ = states.get(_key(row, STATE_TABLES[table]), (None, 0))
        if table == "runs":
            following = row["account_id"], row["number"] + 1
            if was is None:
                return not any(name == row["account_id"] and number > row["number"] for name, number in states)
            return {**was, "ended_at": row["ended_at"]} == row and following in after and following not in states
        if table == "baselines":
            return was is None or row["started_at"] > was["started_at"]
        return table == "invocation_counts" and was is None and row["missed"] == 0


def _may_become(table: str, column: str, was: ResultRow, row: ResultRow) -> bool:
    """Return whether a column of a row may differ from its value in the previous record."""
    if table == "baselines":
        return bool(row["run_id"] != was["run_id"] and row["started_at"] > was["started_at"])
    if table == "invocation_counts":
        return column == "missed_at" or bool(row[column] == was[column] + 1)
    if table == "models":
        return True  # every change of a model is recorded together with it
    return column in SETTABLE.get(table, ()) and (was[column] is None or was.get("answered_by", "") is None)


def _key(row: ResultRow, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[column] for column in columns)


def _differences(
    table: str, recorded: Mapping[tuple[Any, ...], tuple[ResultRow, int]], present: Mapping[tuple[Any, ...], ResultRow]
) -> Iterator[ChainFinding]:
    """Yield the rows that were changed, removed or inserted since they were recorded."""
    for key, (row, position) in recorded.items():
        name = f"{table} {', '.join(map(str, key))}"
        if key not in present:
            yield ChainFinding("removed", position, f"{name} is gone")
            continue
        for column, value in row.items():
            if present[key].get(column) != value:
                text = f"{name}: {column} is {present[key].get(column)}, and was recorded as {value}"
                yield ChainFinding("changed", position, text)
    for key in present.keys() - recorded.keys():
        yield ChainFinding("inserted", None, f"{table} {', '.join(map(str, key))} is in no record")
