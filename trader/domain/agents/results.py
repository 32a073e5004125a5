"""Results in the chain: records of the rows that decide a ranking, and their comparison with the tables.

A record is a JSON object in its canonical form (RFC 8785) with its `kind`; `rows` has rows of tables, by the table's
name. The record `begin` also says what was there before the chain of results began (`before`), and a record `results`
which part of the ledger and of the hours of each account it has (`spans`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents.entrants import canonical_json
from trader.domain.money import format_decimal

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""Rows by the name of their table."""

FindingKind = Literal["changed", "removed", "inserted", "rebuilt", "cut off"]

BEGIN: Final = "begin"
RESULTS: Final = "results"
REMOVED: Final = "removed"

SPAN_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "fills": ("account_id", "sequence"),
    "funding_payments": ("account_id", "sequence"),
    "insurance_payments": ("account_id", "sequence"),
    "portfolio_hourly": ("account_id", "hour"),
}
"""Tables whose rows are never changed once they are in the chain, with the columns that name a row."""

STATE_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "runs": ("account_id", "number"),
    "baselines": ("id",),
    "entrants": ("model_id", "number"),
    "halts": ("id",),
    "invocation_counts": ("model_id", "run_number", "entrant"),
    "season_records": ("season", "number"),
}
"""Tables whose rows may go on: the latest record of a row is what it must be."""

SETTABLE: Final[Mapping[str, frozenset[str]]] = {
    "runs": frozenset({"ended_at"}),
    "entrants": frozenset({"answered_by", "fingerprint"}),
    "halts": frozenset({"lifted_at", "lifted_by"}),
}
"""What a row may be given later that it did not have: null before, but for the fingerprint, which has the name too."""


class ChainFinding(NamedTuple):
    """A contradiction between chain and rows. `position` is the first place in the chain that it concerns."""

    kind: FindingKind
    position: int | None
    text: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an account in one record: the ledger's sequences and the hours (after, until].

    `until` is None for no hours, `hour_after` for those from the first on.
    """

    account_id: str
    sequence_after: int
    sequence_until: int
    hour_after: str | None
    hour_until: str | None


def utc_text(moment: datetime) -> str:
    """Return a time as the records have it: ISO 8601 in UTC with microseconds and `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def plain_row(columns: Iterable[tuple[str, Any]]) -> Row:
    """Return the columns of a row as the records have them: numbers with a fraction as text, times in UTC."""
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
    raise TypeError(f"a record of the chain cannot have a {type(value).__name__}")


def encode_record(kind: str, content: Mapping[str, Any]) -> str:
    """Return a record of the chain in its canonical form (RFC 8785)."""
    return canonical_json({**content, "kind": kind}).decode()


def spans_of(content: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a record.

    :raises msgspec.ValidationError: they are not as this module writes them
    """
    return msgspec.convert(content.get("spans", ()), list[Span])


class ResultsChecker:
    """Follows the records of results from the first to the last, and compares them with the rows of the tables."""

    def __init__(self, removed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Take the positions at which accounts were removed that had never traded: their rows of before are gone."""
        self._removed = removed
        self.has_begun = False
        self.rows = 0
        """Rows in the records so far."""

        self.accounts_before = 0
        """Accounts and baselines with results from before the first record."""

        self._states: dict[str, dict[tuple[Any, ...], tuple[Row, int]]] = {table: {} for table in STATE_TABLES}
        self._ends: dict[str, tuple[int, str | None]] = {}

    def follow(self, position: int, content: Mapping[str, Any], present: Rows) -> Iterator[ChainFinding]:
        """Yield what is wrong with a record; `present` are the rows that the tables have in its spans now."""
        self.has_begun |= content["kind"] == BEGIN
        for mark in content.get("before", ()):
            self._ends[mark["account_id"]] = mark["sequence"], mark["hour"]
            self.accounts_before += 1
        if content["kind"] == REMOVED:
            self._ends.pop(content["account_id"], None)
            runs = self._states["runs"]
            self._states["runs"] = {key: state for key, state in runs.items() if key[0] != content["account_id"]}
        for span in spans_of(content):
            yield from self._follow_span(position, span)
        recorded: Rows = content.get("rows", {})
        self.rows += sum(map(len, recorded.values()))
        for table, key in SPAN_TABLES.items():
            before = {_key(row, key): row for row in recorded.get(table, ()) if not self._is_gone(row, position)}
            after = {_key(row, key): row for row in present.get(table, ()) if not self._is_gone(row, position)}
            yield from _differences(table, {name: (row, position) for name, row in before.items()}, after)
        for table in STATE_TABLES.keys() & recorded.keys():
            for row in recorded[table]:
                yield from self._follow_state(position, table, row)

    def finish(self, present: Rows) -> Iterator[ChainFinding]:
        """Yield where the tables of states differ from what was last recorded of their rows."""
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

    def _is_gone(self, row: Row, position: int) -> bool:
        return position < self._removed.get(row["account_id"], 0)

    def _follow_span(self, position: int, span: Span) -> Iterator[ChainFinding]:
        expected = self._ends.get(span.account_id, (0, None))
        if (span.sequence_after, span.hour_after) != expected:
            text = f"the results of {span.account_id} do not go on where they ended: some are in no record, or in two"
            yield ChainFinding("changed", position, text)
        self._ends[span.account_id] = span.sequence_until, span.hour_until or span.hour_after

    def _follow_state(self, position: int, table: str, row: Row) -> Iterator[ChainFinding]:
        """Take a row of a table of states; whoever changes it before it is recorded again changes what was recorded."""
        key = _key(row, STATE_TABLES[table])
        was, before = self._states[table].get(key, (row, position))
        self._states[table][key] = row, position
        for column, value in row.items():
            if was[column] == value or _may_become(table, column, was, row):
                continue
            name = f"{table} {', '.join(map(str, key))}"
            text = f"{name}: {column} was recorded as {was[column]} at position {before}, and as {value} here"
            yield ChainFinding("changed", position, text)

    def _is_waiting(self, table: str, row: Row, after: Mapping[tuple[Any, ...], Row]) -> bool:
        """Whether what a row says is newer than the last record of its account, and will be in the next one.

        Runs and baselines are recorded from time to time, and counters at the first cycle that was missed. A run that
        has ended was followed by another.
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


def _may_become(table: str, column: str, was: Row, row: Row) -> bool:
    """Whether a column of a row may have another value than in its record before."""
    if table == "baselines":
        return bool(row["run_id"] != was["run_id"] and row["started_at"] > was["started_at"])
    if table == "invocation_counts":
        return bool(row[column] == was[column] + 1)
    return column in SETTABLE.get(table, ()) and (was[column] is None or was.get("answered_by", "") is None)


def _key(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[column] for column in columns)


def _differences(
    table: str, recorded: Mapping[tuple[Any, ...], tuple[Row, int]], present: Mapping[tuple[Any, ...], Row]
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
