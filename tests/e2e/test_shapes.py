"""The matcher of the contract tests: it finds every mismatch and says where it is."""

from typing import Any

import pytest
from support.contract import FIGURE, POSITION_EVENT
from support.shapes import Shape, decimal, hour, iso, mismatches, number, text

AT = "2025-01-31T12:00:00.000Z"


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({"a": 1}, {"a": number}),
        ({"a": 1}, {"a": number, "b?": text}),
        ([1, 2.5], [number]),
        ([], [text]),
        (None, (number, None)),
        ("N/A", FIGURE),
        (AT, iso),
        (AT, hour),
        ("-0.001", decimal),
    ],
)
def test_matching_values_are_accepted(value: Any, shape: Shape) -> None:
    assert mismatches(value, shape) == []


@pytest.mark.parametrize(
    ("value", "shape", "where"),
    [
        ({"a": "1"}, {"a": number}, "$.a: no number"),
        ({"a": True}, {"a": number}, "$.a: no number"),
        ({"a": None}, {"a": number}, "$.a: no number"),
        ({}, {"a": (number, None)}, "$.a: missing"),
        ({"a": 1, "b": None}, {"a": number, "b?": text}, "$.b: no text"),
        ({"a": 1, "c": 2}, {"a": number}, "$.c: unexpected"),
        ({"a": [{"b": 1}, {"b": ""}]}, {"a": [{"b": (number, text)}]}, "$.a[1].b: no number"),
        ({"a": {}}, {"a": [text]}, "$.a: no list"),
        ([], {"a": text}, "$: no object"),
        ("NaN", FIGURE, "$: no number"),
        (1, True, "$: not True"),
        ("2025-01-31T12:00:00Z", iso, "$: no ISO time"),
        ("2025-01-31T12:00:00.000+00:00", iso, "$: no ISO time"),
        ("2025-01-31T12:30:00.000Z", hour, "$: no whole hour"),
        ("1E+2", decimal, "$: no decimal text"),
        (1.5, decimal, "$: no decimal text"),
        ([{"modelId": "a"}], [POSITION_EVENT], "$[0].availableCash: missing"),
    ],
)
def test_mismatches_are_reported_with_their_path(value: Any, shape: Shape, where: str) -> None:
    assert mismatches(value, shape)[0].startswith(where)
