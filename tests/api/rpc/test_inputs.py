"""Inputs of every procedure: refusals of invalid values, and null, which in an optional field means absence."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_aiohttp.plugin import AiohttpClient
from support.served import AppClient, make_app

from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.tools import AGENT_TOOLS, TOOLS, BadCall, decode
from trader.api.openapi import EXAMPLES
from trader.api.registry import REGISTRY, Registry, load_procedures
from trader.api.schemas.simulator import PlaceOrderInput
from trader.core.inputs import ISSUES_MAX, describe, find_issues, struct_of
from trader.settings.settings import Settings

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
def test_every_invalid_field_is_reported_with_its_path(input_type: Any, data: st.DataObject) -> None:
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
    """Whether the path leads to a part of the value, or to a missing field of a part."""
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


REQUIRED: dict[str, dict[str, Any]] = {
    "trading.getTrade": {"id": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52"},
    "trading.getCandles": {"symbol": "BTC", "interval": "1h"},
    "analytics.getBehaviour": {"modelId": "apex"},
    "analytics.getComparison": {"modelId": "apex", "against": "other"},
    "analytics.getTradeTotals": {"by": "day"},
    "agent.declare": {"model": "lab/one"},
    "agent.note": {"viewId": "6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", "text": "flat", "parts": [{"text": "flat"}]},
    "agent.halt": {"reason": "maintenance"},
    "agent.flatten": {"reason": "maintenance"},
}
"""Inputs of procedures whose examples in the documents are empty."""


def optional_fields(struct: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of every optional field of an input, including fields of inner objects."""
    for field in msgspec.inspect.type_info(struct).fields:  # type: ignore[attr-defined]  # of structs only
        if not field.required:
            yield (field.encode_name,)
        inner = struct_of(field.type)
        if inner is not None:
            yield from ((field.encode_name, *path) for path in optional_fields(inner.cls))


def with_null(value: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    return {**value, name: with_null(value.get(name, {}), tuple(rest)) if rest else None}


def without(value: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**value, name: without(value.get(name, {}), tuple(rest))}
    return {key: member for key, member in value.items() if key != name}


NULLS = [
    pytest.param(name, path, id=f"{name}:{'.'.join(path)}")
    for name, declared in REGISTRY.procedures.items()
    for path in optional_fields(declared.input_type)
]


class Shown(msgspec.Struct):
    """The output of every procedure."""

    input: str


@pytest.fixture
async def inputs(aiohttp_client: AiohttpClient) -> AppClient:
    """A service that answers every procedure with its decoded input."""

    async def shown(_: object, request: Any) -> Shown:
        return Shown(repr(request))

    registry = Registry()
    for name, declared in REGISTRY.procedures.items():
        shown.__annotations__ = {"_": object, "request": declared.input_type, "return": Shown}
        registry.procedure(name)(shown)
    settings = Settings.load({}, None, demo=True)
    return await aiohttp_client(make_app(context=SimpleNamespace(settings=settings), registry=registry))


@pytest.mark.parametrize("is_enveloped", [False, True], ids=["plain", "orpc"])
@pytest.mark.parametrize(("name", "path"), NULLS)
async def test_null_in_an_optional_field_is_absence(
    inputs: AppClient, name: str, path: tuple[str, ...], is_enveloped: bool
) -> None:
    example = REQUIRED.get(name) or EXAMPLES.get(name, {})

    async def decoded(value: dict[str, Any]) -> str:
        url = f"/api/rpc/{name.replace('.', '/') if is_enveloped else name}"
        async with inputs.post(url, json={"json": value} if is_enveloped else value) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return str((answer["json"] if is_enveloped else answer)["input"])

    assert await decoded(with_null(example, path)) == await decoded(without(example, path))


async def test_null_in_a_required_field_is_refused(inputs: AppClient) -> None:
    async with inputs.post("/api/rpc/simulator.cancelOrder", json={"orderId": None, "accountId": None}) as response:
        assert response.status == 400
        assert [issue["path"] for issue in (await response.json())["issues"]] == [["orderId"]]


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name, tool in {**TOOLS, **AGENT_TOOLS}.items() for path in optional_fields(tool)],
)
def test_null_in_an_optional_argument_of_a_tool_is_absence(name: str, path: tuple[str, ...]) -> None:
    arguments = {
        "symbol": "BTC", "side": "buy" if name in AGENT_TOOLS else "LONG", "quantity": 0.01, "clientOrderId": "1",
        "leverage": 2, "stop": 9, "invalidation": "under 9", "confidence": 60, "reason": "flat",
        "text": "flat", "parts": [{"text": "flat"}],
    }  # fmt: skip
    tool = {**TOOLS, **AGENT_TOOLS}[name]
    known = {field.encode_name for field in msgspec.structs.fields(tool)}
    given = {key: value for key, value in arguments.items() if key in known}

    def call(value: dict[str, Any]) -> Any:
        return decode(ToolRequest("1", name, json.dumps(value)), {name: tool})

    decision = call(with_null(given, path))
    assert not isinstance(decision, BadCall)
    assert decision == call(without(given, path))
