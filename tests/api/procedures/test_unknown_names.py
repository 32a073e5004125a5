"""Names that do not exist: every procedure answers with nothing, or refuses; none makes something up."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from support.process import ServiceProcess

from trader.api.registry import REGISTRY, load_procedures

pytestmark = pytest.mark.processes

FREE = {"before", "from", "to", "startDate", "endDate", "clientOrderId", "reason", "by", "place"}
"""Text fields that name nothing of the service."""

CHOSEN = {"symbol": "BTC", "side": "buy", "quantity": 0.1, "interval": "1h", "by": "day", "reason": "test"}
"""Values of required fields."""

NOT_FOUND = {
    "simulator.cancelOrder": ("accountId", "orderId"),
    "trading.getTrade": ("id",),
    "models.getConversation": ("invocationId",),
    "operations.halt": ("accountId",),
    "operations.flatten": ("accountId",),
    "operations.resume": ("accountId",),
    "operations.approve": ("name",),
}
OPENED = "simulator.placeOrder", "accountId"
"""An order opens an account of any name."""

SHOWN = {"simulator.getAccount", "simulator.resetAccount"}
"""They show the account that an order would open, with `exists` false."""


def names() -> Iterator[tuple[str, str]]:
    """Yield every procedure without a key, with each text field of its input that names something."""
    load_procedures()
    for name, declared in REGISTRY.procedures.items():
        for field in fields_of(declared.input_type) if declared.scope is None else ():
            if _is_text(field.type) and field.encode_name not in FREE and (name, field.encode_name) != OPENED:
                yield name, field.encode_name


def fields_of(input_type: type[Any]) -> Any:
    info: Any = msgspec.inspect.type_info(input_type)
    return info.fields


def _is_text(kind: Any) -> bool:
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_is_text, kind.types))
    item = kind.item_type if isinstance(kind, msgspec.inspect.ListType) else kind
    return isinstance(item, msgspec.inspect.StrType | msgspec.inspect.UUIDType)


@pytest.mark.parametrize(("name", "field"), list(names()))
@pytest.mark.asyncio(loop_scope="session")
async def test_no_answer_is_made_up_for_a_name_that_does_not_exist(
    service: ServiceProcess, name: str, field: str
) -> None:
    required = [each.encode_name for each in fields_of(REGISTRY.procedures[name].input_type) if each.required]
    request = {each: CHOSEN.get(each, str(uuid4())) for each in required}
    unknown: Any = str(uuid4()) if field in {"id", "orderId", "invocationId"} else "nobody"
    status, answer = await service.try_call(name, **request | {field: [unknown] if field == "symbols" else unknown})
    if field == "symbol":
        (issue,) = answer["issues"]
        assert (status, issue["path"]) == (400, ["symbol"])
        assert issue["message"] == "'nobody' is not traded here; markets are BTC, ETH, SOL"
    elif field in NOT_FOUND.get(name, ()):
        assert (status, answer["code"]) == (404, "NOT_FOUND")
    elif name in SHOWN:
        assert (status, answer["account"]["exists"], answer["account"]["runId"]) == (200, False, None)
    else:
        assert status == 200, answer
        answer.pop("times", None) if name == "trading.getEquityCurves" else None  # the axis of the range
        assert not list(figures_of(answer)), "nothing is listed, and no figure is shown"


def figures_of(answer: Any) -> Iterator[Any]:
    """Yield every number but 0, and every entry of a list that is not an empty list."""
    if isinstance(answer, list):
        yield from (each for each in answer if each != [])
    elif isinstance(answer, dict):
        for value in answer.values():
            yield from figures_of(value)
    elif isinstance(answer, float | int) and answer:
        yield answer
