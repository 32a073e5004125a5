"""Refusals of every procedure's input, whatever is sent."""

import json
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.api.inputs import ISSUES_MAX, describe, find_issues
from trader.api.registry import REGISTRY, load_procedures
from trader.api.schemas.simulator import PlaceOrderInput

load_procedures()
INPUTS = sorted({declared.input_type for declared in REGISTRY.procedures.values()}, key=lambda kind: kind.__name__)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["all", "7d", "BTC", "buy", "2025-01-01T00:00:00Z"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["stop", "timeExit", "x"]), inner),
    max_leaves=5,
)


def objects(input_type: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = [field.encode_name for field in msgspec.structs.fields(input_type)]
    return st.dictionaries(st.sampled_from([*names, "unknown", ""]), values, max_size=len(names) + 2)


@pytest.mark.parametrize("input_type", INPUTS, ids=lambda kind: str(kind.__name__))
@given(data=st.data())
def test_whatever_does_not_fit_is_told_with_its_place(input_type: Any, data: st.DataObject) -> None:
    value = data.draw(objects(input_type) | values)
    text = json.dumps(value).encode()
    try:
        msgspec.json.decode(text, type=input_type)
    except msgspec.ValidationError as error:
        issues = find_issues(input_type, text, error)
        assert 1 <= len(issues) <= ISSUES_MAX
        for issue in issues:
            assert issue.message
            assert points_at_a_part(value, issue.path)


def points_at_a_part(value: Any, path: tuple[str | int, ...]) -> bool:
    """The path leads to a part of the value, or to a field that is missing from one."""
    for part in path:
        if isinstance(part, int):
            value = value[part]
        elif part not in value:
            return isinstance(value, dict)
        else:
            value = value[part]
    return True


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("accountId", "1 to 64 characters out of letters, digits, `.`, `_`, `:` and `-`"),
        ("side", "one of buy, long, sell, short"),
        ("quantity", "a number above 0 up to 1e+12"),
        ("reduceOnly", "true or false"),
        ("type", "one of market, limit"),
        ("exitPlan", "an object"),
    ],
)
def test_fields_are_described_in_words(field: str, words: str) -> None:
    schema = msgspec.inspect.type_info(PlaceOrderInput)
    assert isinstance(schema, msgspec.inspect.StructType)
    (named,) = [candidate for candidate in schema.fields if candidate.encode_name == field]
    assert describe(named.type) == words


@pytest.mark.parametrize("input_type", INPUTS, ids=lambda kind: str(kind.__name__))
def test_only_an_object_is_described_as_one(input_type: Any) -> None:
    schema = msgspec.inspect.type_info(input_type)
    assert isinstance(schema, msgspec.inspect.StructType)
    for field in schema.fields:
        assert "an object" not in describe(field.type) or "StructType" in repr(field.type), field.encode_name
