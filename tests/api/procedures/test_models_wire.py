"""`models.*` over HTTP: the runs of real agents on a real database, as callers see them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.records import make_model
from support.scripted import START
from support.served import AppClient, call, make_app
from support.trading_floor import Floor, calling, hold, open_floor, opening

from trader.agents.invocations import InvocationReader
from trader.agents.variants import color_of
from trader.core.clock import iso
from trader.core.errors import ProviderError
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.settings.settings import Settings


@dataclass
class AgentsContext:
    """The part of the context that the procedures of the models use."""

    settings: Settings
    invocations: InvocationReader


class Caller:
    """A floor with a caller of its procedures."""

    def __init__(self, floor: Floor, client: AppClient) -> None:
        self.floor = floor
        self.call = partial(call, client)


@pytest.fixture
async def caller(database: Database, aiohttp_client: AiohttpClient) -> AsyncIterator[Caller]:
    async with open_floor(database) as floor:
        context: Any = AgentsContext(floor.settings, floor.invocations)
        yield Caller(floor, await aiohttp_client(make_app(context=context)))


async def test_models_are_listed_with_their_activity(caller: Caller) -> None:
    assert await caller.call("models.getModels") == {
        "models": [],
        "warning": "No model is active, so nothing trades. Add models with `trader models add FILE`.",
    }
    await caller.floor.add("ada")
    plain = {
        "id": "ada", "name": "Ada", "variant": "Apex", "provider": "fake", "routerModelName": "lab/ada",
        "color": color_of(make_model("ada")), "active": True, "createdAt": iso(START), "invocationCount": 0,
    }  # fmt: skip
    assert await caller.call("models.getModels") == {"models": [plain]}
    await caller.floor.cycle()
    active = plain | {"invocationCount": 1, "lastInvokedAt": iso(caller.floor.clock.now())}
    assert await caller.call("models.getModels") == {"models": [active]}
    await caller.floor.add("eve", provider="nim")
    answer = await caller.call("models.getModels")
    assert answer["warning"] == "1 active model(s) name a provider that is not configured: eve (nim)"


async def test_a_model_that_failed_three_times_in_a_row_is_named(caller: Caller) -> None:
    floor = caller.floor
    await floor.add("ada", "bob")
    floor.provider.scripts["ada"] = [ProviderError("fake answered 400")]
    for _ in range(2):
        await floor.cycle()
        assert "warning" not in await caller.call("models.getModels")
    await floor.cycle()
    answer = await caller.call("models.getModels")
    warnings = {model["id"]: model.get("warning") for model in answer["models"]}
    assert warnings == {"ada": "ada failed 3 times in a row: fake answered 400", "bob": None}
    assert answer["warning"] == warnings["ada"]
    assert floor.agents.failing() == {"ada": (3, "fake answered 400")}
    floor.provider.scripts["ada"] = [hold()]
    await floor.cycle()
    assert "warning" not in await caller.call("models.getModels")


async def test_an_invocation_is_returned_in_full(caller: Caller) -> None:
    await caller.floor.add("ada")
    caller.floor.provider.scripts["ada"] = [calling(opening(leverage=11), text="all in"), hold("told off")]
    (record,) = await caller.floor.cycle()
    (shown,) = (await caller.call("models.getInvocations"))["conversations"]
    calls = shown.pop("toolCalls")
    assert shown == {
        "id": str(record.invocation.id), "modelId": "ada", "modelName": "Ada", "modelVariant": "Apex",
        "modelLogo": None, "response": "all in\n\ntold off",
        "status": "completed", "endedBy": "holding", "failureReason": None, "steps": 2, "inputTokens": 200,
        "outputTokens": 200, "durationMs": 0, "timestamp": iso(record.invocation.started_at),
            "responsePayload": ['{"said": 1}', '{"said": 1}'],
    }  # fmt: skip
    assert [(call["type"], call["status"]) for call in calls] == [("CREATE_POSITION", "rejected"), ("HOLDING", "ok")]
    assert calls[0]["metadata"]["decisions"][0]["leverage"] == 11
    assert calls[0]["metadata"]["results"][0]["rule"] == "leverage"
    assert calls[0]["metadata"]["raw"]["name"] == "createPosition"
    assert calls[0]["timestamp"] == iso(record.invocation.started_at)


async def test_filters_order_and_failures(caller: Caller) -> None:
    floor = caller.floor
    await floor.add("ada")
    await floor.add("sol", variant=VariantId.SOVEREIGN)
    floor.provider.scripts["sol"] = [ProviderError("every key of fake rests")]
    await floor.cycle()
    await floor.cycle()

    async def listed(**request: object) -> list[tuple[str, str]]:
        answer = await caller.call("models.getInvocations", request)
        return [(conversation["modelId"], conversation["status"]) for conversation in answer["conversations"]]

    ada, sol = ("ada", "completed"), ("sol", "failed")
    assert await listed() == [ada, sol, ada, sol]
    assert await listed(limit=1) == [ada]
    assert await listed(modelId="sol") == [sol, sol]
    assert await listed(variant="Apex") == [ada, ada]
    assert await listed(variant="all", modelId="ada") == [ada, ada]
    assert await listed(variant="Contrarian") == []
    assert await listed(modelId="nobody") == []
    assert await listed(modelId="x" * 129) == []
    (failed,) = (await caller.call("models.getInvocations", {"variant": "Sovereign", "limit": 1}))["conversations"]
    assert failed["failureReason"] == "every key of fake rests"
    assert failed["toolCalls"] == []
    assert failed["response"] is None


@pytest.mark.parametrize(
    ("request_body", "path"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"variant": "apex"}, "variant"),
        ({"modelId": 5}, "modelId"),
        ({"model": "ada"}, "model"),
    ],
)
async def test_inputs_are_strict(caller: Caller, request_body: dict[str, object], path: str) -> None:
    answer = await caller.call("models.getInvocations", request_body, status=400)
    assert answer["code"] == "VALIDATION_ERROR"
    assert answer["issues"][0]["path"] == [path]
