"""Records of results: a row changed before it is recorded again contradicts its earlier record."""

from collections.abc import Mapping
from typing import Any

import pytest

from trader.record.domain.results import STATE_TABLES, ChainFinding, ResultsChecker, encode_record

RUN = {"account_id": "ada", "number": 1, "initial_capital": "10000", "started_at": "a", "ended_at": None}
ENTRANT = {"model_id": "ada", "number": 1, "fingerprint": "f", "answered_by": None, "began_at": "a"}
HALT = {"id": 1, "reason": "lunch", "lifted_by": None, "lifted_at": None}
COUNT = {"model_id": "ada", "run_number": 1, "entrant": 1, "season": 0, "missed": 3, "missed_at": "a"}
BASELINE = {"id": "baseline/x", "run_id": "1", "initial_capital": "10000", "started_at": "a"}
MODEL = {"id": "ada", "name": "Ada", "owner": None}
SEASON = {"season": 1, "number": 0, "record": "{}", "digest": "d"}


def _followed(table: str, *rows: Mapping[str, Any]) -> list[str]:
    checker = ResultsChecker()
    records = [{"kind": table, "rows": {table: [row]}} for row in rows]
    return [found.text for at, record in enumerate(records, 1) for found in checker.follow(at, record, {})]


@pytest.mark.parametrize(
    ("table", "row", "change"),
    [
        ("runs", RUN, {"ended_at": "b"}),
        ("entrants", ENTRANT, {"answered_by": "lab/one", "fingerprint": "g"}),
        ("halts", HALT, {"lifted_by": "eve", "lifted_at": "b"}),
        ("invocation_counts", COUNT, {"missed": 4, "missed_at": "b"}),
        ("baselines", BASELINE, {"run_id": "2", "initial_capital": "5000", "started_at": "b"}),
        ("models", MODEL, {"name": "Ada II", "owner": "eve"}),
        ("season_records", SEASON, {}),
    ],
)
def test_a_row_may_change_in_the_allowed_ways(table: str, row: dict[str, Any], change: dict[str, Any]) -> None:
    assert _followed(table, row, row, row | change) == []


@pytest.mark.parametrize(
    ("table", "row", "change"),
    [
        ("runs", RUN, {"initial_capital": "9000", "ended_at": "b"}),
        ("runs", RUN | {"ended_at": "b"}, {"ended_at": "c"}),
        ("entrants", ENTRANT, {"began_at": "b", "answered_by": "lab/one"}),
        ("entrants", ENTRANT | {"answered_by": "lab/one"}, {"fingerprint": "g"}),
        ("halts", HALT | {"lifted_by": "eve"}, {"lifted_by": "mallory"}),
        ("invocation_counts", COUNT, {"missed": 9}),
        ("invocation_counts", COUNT, {"missed": 0}),
        ("baselines", BASELINE, {"initial_capital": "9000"}),
        ("season_records", SEASON, {"record": "[]"}),
    ],
)
def test_a_row_changed_between_its_records_is_found(table: str, row: dict[str, Any], change: dict[str, Any]) -> None:
    (text,) = _followed(table, row, row | change)
    assert text.startswith(f"{table} ")
    assert text.endswith("here")


def test_missing_or_repeated_results_are_found() -> None:
    def span(after: int, until: int) -> dict[str, Any]:
        hours = {"hour_after": None, "hour_until": None}
        return {
            "kind": "results",
            "spans": [{"account_id": "ada", "sequence_after": after, "sequence_until": until} | hours],
        }

    for second, is_found in ((span(4, 9), False), (span(5, 9), True), (span(3, 9), True)):
        checker = ResultsChecker()
        assert list(checker.follow(1, span(0, 4), {})) == []
        assert bool(list(checker.follow(2, second, {}))) == is_found


def test_before_the_results_begin_nothing_needs_a_record() -> None:
    empty: dict[str, list[Mapping[str, Any]]] = {table: [] for table in STATE_TABLES}
    present = empty | {"halts": [HALT]}
    checker = ResultsChecker()
    assert list(checker.finish(present)) == []
    assert list(checker.follow(1, {"kind": "begin"}, {})) == []
    assert [found.text for found in checker.finish(present)] == ["halts 1 is in no record"]


def test_a_record_is_canonical() -> None:
    assert encode_record("halts", {"rows": {"halts": [{"reason": "größer", "id": 1}]}}) == (
        '{"kind":"halts","rows":{"halts":[{"id":1,"reason":"größer"}]}}'
    )


LIFTED = HALT | {"lifted_by": "eve", "lifted_at": "b"}
LATER = ENTRANT | {"answered_by": "lab/one", "fingerprint": "g"}


def _checked(*records: tuple[str, str, Mapping[str, Any]], present: Mapping[str, Any] | None = None) -> list[str]:
    """Return the findings, by kind, in records (kind, table, row), with the last row in its table or `present`."""
    checker = ResultsChecker()
    found: list[ChainFinding] = []
    for at, (kind, table, row) in enumerate(records, 1):
        found += checker.follow(at, {"kind": kind, "rows": {table: [row]}}, {})
    rows: dict[str, list[Mapping[str, Any]]] = {table: [] for table in STATE_TABLES}
    _, table, last = records[-1]
    found += checker.finish(rows | {table: [present or last]})
    return [finding.kind for finding in found]


@pytest.mark.parametrize(
    ("table", "newer", "older"),
    [
        ("halts", LIFTED, HALT),
        ("halts", LIFTED, HALT | {"reason": "rest"}),
        ("entrants", LATER, ENTRANT | {"began_at": "earlier"}),
        ("invocation_counts", COUNT, COUNT | {"missed": 9}),
        ("season_records", SEASON, SEASON | {"record": "[]"}),
    ],
)
def test_a_first_record_with_another_state_than_the_record_before_it_is_a_change(
    table: str, newer: dict[str, Any], older: dict[str, Any]
) -> None:
    assert "changed" in _checked((table, table, newer), ("begin", table, older), present=newer)
    assert "changed" in _checked(("begin", table, newer), (table, table, older), present=older)
