"""Every protocol in whole invocations, against servers that are as strict as its documents."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import MODEL, TURN, completion, held, raw_answer
from support.floor import Floor, open_floor
from support.provider_documents import application

from trader.domain.models import ModelConfiguration, Price, ProviderDefinition
from trader.errors import ProviderError
from trader.gateways.agents.client import ProviderClient
from trader.gateways.agents.providers import make_providers
from trader.services.agents.invocations import FinishedInvocation
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.setting_forms import Secret
from trader.store.agents.invocations import select_steps
from trader.store.database.pool import Database

KEY = "sk-lab-000000000001"
BASES = {"responses": "v1", "messages": "v1", "gemini": "v1beta"}
OWN: dict[str, dict[str, Any]] = {
    "responses": {"reasoning": {"effort": "high"}},
    "messages": {"thinking": {"type": "adaptive"}},
    "gemini": {"generationConfig": {"thinkingConfig": {"thinkingLevel": "high"}}},
}


@asynccontextmanager
async def floor_of(database: Database, protocol: Any, **more: Any) -> AsyncIterator[Floor]:
    """A floor with one model, whose provider is defined as a models file defines it."""
    async with TestServer(application(KEY)) as server, open_floor(database, LAB_API_KEY=KEY) as floor:
        definition = ProviderDefinition(
            name="lab", base_url=str(server.make_url(BASES[protocol])), protocol=protocol, key_variable="LAB_API_KEY",
            **more,
        )  # fmt: skip
        providers = make_providers(floor.settings)
        parts = database, floor.exchange, floor.market, floor.clock, EventBus(), floor.settings
        floor.agents = Agents(*parts, providers)
        configuration = ModelConfiguration(
            request=OWN[protocol], price=Price(input=1, cached=0.1, output=2), provider_definition=definition
        )
        await floor.add("ada", provider="lab", router_model="gemini-3.5-flash", configuration=configuration)
        yield floor
        await providers.close()


async def run(floor: Floor) -> FinishedInvocation:
    (record,) = await floor.cycle()
    return record


@pytest.mark.parametrize(("protocol", "stream"), [(name, False) for name in BASES] + [("responses", True)])
async def test_an_invocation_in_two_steps(database: Database, protocol: str, stream: bool) -> None:
    async with floor_of(database, protocol, stream=stream) as floor:
        record = await run(floor)
        async with database.connection() as conn:
            steps = (await select_steps(conn, [record.invocation.id]))[record.invocation.id]
    assert record.invocation.status == "completed", record.invocation.failure_reason
    calls = [(call.type, call.status) for call in record.tool_calls]
    assert calls == [("FETCH_INDICATORS", "ok"), ("FETCH_INDICATORS", "ok"), ("HOLDING", "ok")]
    figures = {(step.input_tokens, step.cached_tokens, step.output_tokens) for step in steps}
    assert figures == {(1000, 600, 70)}, "of the cache, and of reasoning, wherever the provider counts them"
    written = 300 if protocol == "messages" else 0
    assert {step.cache_write_tokens or 0 for step in steps} == {written}
    assert float(record.invocation.cost_usd or 0) == pytest.approx(2 * (400 + written / 4 + 60 + 140) / 1e6)


async def test_a_refused_key_of_any_protocol_rests() -> None:
    for protocol, base in BASES.items():
        async with TestServer(application(KEY)) as server:
            definition = ProviderDefinition(
                name="lab",
                base_url=str(server.make_url(base)),
                protocol=protocol,  # type: ignore[arg-type]
            )
            client = ProviderClient(definition, [Secret("sk-wrong-0000000001")])
            with pytest.raises(ProviderError, match=r"key 1 was refused \(401: Invalid API key\)"):
                await client.answer(replace(TURN, model=replace(MODEL, router_model_name="gemini-3.5-flash")))
            await client.close()


@asynccontextmanager
async def client_of(protocol: Any, body: bytes, content_type: str = "application/json", **more: Any) -> Any:
    """A client whose server answers everything with this body."""
    app, answer = web.Application(), raw_answer(body, content_type)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        definition = ProviderDefinition(name="lab", base_url=str(server.make_url("/")), protocol=protocol, **more)
        client = ProviderClient(definition, [], backoff_s=0.001)
        yield client
        await client.close()


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("messages", {"content": [], "stop_reason": "refusal"}),
        (
            "responses",
            {
                "output": [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}],
                "status": "completed",
            },
        ),
        ("gemini", {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 9}}),
    ],
)
async def test_a_refusal_is_recognized(protocol: str, body: dict[str, Any]) -> None:
    async with client_of(protocol, orjson.dumps(body)) as client:
        assert (await client.answer(TURN)).is_refusal


@pytest.mark.parametrize(
    ("protocol", "body", "cut_by"),
    [
        ("messages", {"content": [{"type": "text", "text": "a"}], "stop_reason": "max_tokens"}, "length"),
        (
            "responses",
            {
                "output": [{"type": "reasoning"}],
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
            },
            "length",
        ),
        ("gemini", {"candidates": [{"content": {"parts": []}, "finishReason": "MAX_TOKENS"}]}, "length"),
        ("gemini", {"candidates": [{"finishReason": "SAFETY"}]}, "content_filter"),
    ],
)
async def test_an_answer_that_was_cut_off_says_so(protocol: str, body: dict[str, Any], cut_by: str) -> None:
    async with client_of(protocol, orjson.dumps(body)) as client:
        answer = await client.answer(TURN)
    assert answer.cut_by == cut_by
    assert sum(answer.unreported) > 0, "its usage is missing, so it is estimated"


@pytest.mark.parametrize("protocol", BASES)
@pytest.mark.parametrize(
    "body", [{}, {"error": {"message": "overloaded"}}, {"output": 1, "content": 1, "candidates": 1}]
)
async def test_unusable_answers_are_failures(protocol: str, body: dict[str, Any]) -> None:
    async with client_of(protocol, orjson.dumps(body)) as client:
        with pytest.raises(ProviderError, match="lab answered"):
            await client.answer(TURN)


def chunks(*deltas: dict[str, Any], usage: dict[str, int] | None = None) -> bytes:
    """The events of a streamed completion."""
    bodies = [{"model": "qwen", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    bodies.append({"model": "qwen", "choices": [], "usage": usage})  # type: ignore[dict-item]
    return b"".join(b"data: " + orjson.dumps(body) + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


async def test_a_streamed_completion_is_joined() -> None:
    function = held()["tool_calls"][0]["function"]
    first, rest = function["arguments"][:5], function["arguments"][5:]
    body = chunks(
        {"role": "assistant", "content": None, "reasoning_content": "I "},
        {"reasoning_content": "think", "content": "So"},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "holding", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": first}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": rest}}]},
        usage={"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    )
    async with client_of("chat", body, "text/event-stream", stream=True) as client:
        answer = await client.answer(TURN)
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [("c1", "holding", function["arguments"])]
    assert (answer.text, answer.message["reasoning_content"]) == ("So", "I think")
    assert (answer.input_tokens, answer.output_tokens, answer.model) == (100, 20, "qwen")


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": 5}, {"tool_calls": ["x"]}, {"tool_calls": [{"index": "a"}]}, {"tool_calls": [{"function": 1}]}],
)
async def test_odd_deltas_are_unusable(delta: dict[str, Any]) -> None:
    async with client_of("chat", chunks(delta), "text/event-stream", stream=True) as client:
        with pytest.raises(ProviderError, match="lab answered 200 with unusable JSON"):
            await client.answer(TURN)


async def test_a_server_that_does_not_stream_is_understood_as_well() -> None:
    async with client_of("chat", orjson.dumps(completion(held())), stream=True) as client:
        assert (await client.answer(TURN)).calls


async def test_a_definition_that_changes_replaces_its_client(database: Database) -> None:
    async with open_floor(database, LAB_API_KEY="k" * 20, LAB_API_KEY_2="l" * 20) as floor:
        providers = make_providers(floor.settings)
        first = ProviderDefinition(name="lab", base_url="http://127.0.0.1:1", key_variable="LAB_API_KEY")
        model = replace(MODEL, provider="lab", configuration=ModelConfiguration(provider_definition=first))
        providers.learn([model])
        client = providers["lab"]
        providers.learn([model])
        assert providers["lab"] is client
        moved = replace(first, base_url="http://127.0.0.1:2")
        providers.learn([replace(model, configuration=ModelConfiguration(provider_definition=moved))])
        assert providers["lab"] is not client
        with pytest.raises(
            ProviderError,
            match=r"lab could not be reached at http://127\.0\.0\.1:2 \(base_url of its \[\[providers\]\]\)",
        ):
            await providers["lab"].answer(replace(TURN, model=model))
        await providers.close()


async def test_the_slots_of_a_provider_limit_its_models(database: Database) -> None:
    definition = ProviderDefinition(name="fake", base_url="http://127.0.0.1:1", slots=1)
    async with open_floor(database) as floor:
        configuration = ModelConfiguration(provider_definition=definition)
        await floor.add("ada", "bob", router_model="lab/one", configuration=configuration)
        await floor.cycle()
        assert floor.provider.active_max == 1
