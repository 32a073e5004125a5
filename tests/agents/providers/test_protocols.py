"""Every protocol in complete invocations, against servers as strict as its documentation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import MODEL, TURN, completion, held, raw_answer
from support.provider_documents import GeminiRequest, MessagesRequest, ResponsesRequest, application
from support.scripted import make_book
from support.trading_floor import Floor, open_floor

from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.domain.models import ModelConfiguration, ProviderDefinition, TokenPrice
from trader.agents.domain.prompt import CANDLES_END
from trader.agents.domain.view import ObservedMarket
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.provider import PROTOCOLS
from trader.agents.providers.providers import make_providers
from trader.agents.record import cost_of
from trader.agents.schedule import InvocationScheduler
from trader.agents.sql.invocations import select_steps
from trader.core.errors import ProviderError
from trader.database.pool import Database
from trader.market.domain.markets import MARKETS, Interval, Quote

KEY = "sk-lab-000000000001"
BASES = {"responses": "v1", "messages": "v1", "gemini": "v1beta"}
OWN: dict[str, dict[str, Any]] = {
    "responses": {"reasoning": {"effort": "high"}},
    "messages": {"thinking": {"type": "adaptive"}},
    "gemini": {"generationConfig": {"thinkingConfig": {"thinkingLevel": "high"}}},
}


@asynccontextmanager
async def floor_of(
    database: Database, protocol: Any, own: dict[str, Any] | None = None, stream: bool = False, **settings: str
) -> AsyncIterator[Floor]:
    """A floor with one model, whose provider is defined as in a models file."""
    async with TestServer(application(KEY)) as server, open_floor(database, LAB_API_KEY=KEY, **settings) as floor:
        definition = ProviderDefinition(
            name="lab", base_url=str(server.make_url(BASES[protocol])), protocol=protocol, key_variable="LAB_API_KEY",
            key_host=f"{server.host}:{server.port}", stream=stream,
        )  # fmt: skip
        providers = make_providers(floor.settings)
        floor.agents = InvocationScheduler(replace(floor.services, providers=providers))
        configuration = ModelConfiguration(
            request=own or OWN[protocol],
            price=TokenPrice(input=1, cached=0.1, output=2),
            provider_definition=definition,
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


@asynccontextmanager
async def client_of(protocol: Any, body: bytes, content_type: str = "application/json", **more: Any) -> Any:
    """A client whose server answers everything with this body."""
    app, answer = web.Application(), raw_answer(body, content_type)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        definition = ProviderDefinition(name="lab", base_url=str(server.make_url("/")), protocol=protocol, **more)
        client = ProviderClient(definition, ProviderAccess([]), AttemptTiming(backoff_s=0.001))
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


def part(arguments: Any, name: str | None = "holding", **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}, **more}]}


A, B = '{"reason": "a"}', '{"reason": "b"}'


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        ([part(A, id="a", index=0), part(B, id="b", index=0)], [("a", A), ("b", B)]),
        ([part(A, id="a", index=None), part(B, id="b", index=None)], [("a", A), ("b", B)]),
        ([part(A, id="a"), part(B, id="b")], [("a", A), ("b", B)]),
        ([part(A, id="a", index="0"), part(B, id="b", index="1")], [("a", A), ("b", B)]),
        ([part("", id="a", index=0), part(A[:5], None, index=0), part(A[5:], None, id="a", index=7)], [("a", A)]),
        ([part(A[:5], id="a"), part(A[5:], None), part(B[:3], id="b"), part(B[3:], None)], [("a", A), ("b", B)]),
        ([part("", id="a", index=0), part("", id="b", index=1), part(A, None, index=0), part(B, None, index=1)],
         [("a", A), ("b", B)]),
        ([part(A[:5], id="a", index=0), part(B[:5], id="b", index=0), part(A[5:], None, id="a", index=0),
          part(B[5:], None, id="b", index=0)], [("a", A), ("b", B)]),
        ([part(A[:5], id="a", index=0), part(A[5:], id="a", index=0)], [("a", A)]),
        ([part({"reason": "a"}, id="a", index=0), part({"reason": "b"}, id="b", index=0)], [("a", A), ("b", B)]),
        ([part(A, id="a", index=0), part(A, id="a", index=1)], [("a", A)]),
        ([part(A, id="a", index=0), part(B, id="a", index=0)], [("a", A), ("call_1_2", B)]),
        ([part(A, index=0), part(B, index=0)], [("call_1_1", A), ("call_1_2", B)]),
        ([part(A), part(B)], [("call_1_1", A), ("call_1_2", B)]),
        ([part(A[:5], index=0), part(A[5:], None, index=0), part(B, index=1)], [("call_1_1", A), ("call_1_2", B)]),
        ([part(B, id="b", index=1), part(A, id="a", index=0)], [("a", A), ("b", B)]),
        ([part("{}", id="a", index=0), part(A, None, index=0)], [("a", A)]),
        ([{"tool_calls": [{"id": "a", "function": None}]}, part(A)], [("a", A)]),
    ],
)  # fmt: skip
async def test_streamed_calls_are_told_apart_by_id(deltas: list[dict[str, Any]], calls: list[tuple[str, str]]) -> None:
    body = chunks(*deltas, usage={"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120})
    async with client_of("chat", body, "text/event-stream", stream=True) as client:
        answer = await client.answer(TURN)
    assert [(call.id, orjson.loads(call.arguments)) for call in answer.calls] == [
        (call_id, orjson.loads(arguments)) for call_id, arguments in calls
    ]
    assert [call["id"] for call in answer.message["tool_calls"]] == [call_id for call_id, _ in calls]
    assert {call.name for call in answer.calls} == {"holding"}


async def test_streamed_parts_are_joined() -> None:
    def thought(**more: Any) -> dict[str, Any]:
        return {"type": "reasoning.text", "index": 0, "format": "anthropic-claude-v1", **more}

    sealed = {"type": "reasoning.encrypted", "index": 1, "data": "gAAA"}
    body = chunks(
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Ca"}]}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "lm."}]}]},
        {"content": "So "},
        {"content": "hold", "reasoning_details": [thought(text="I "), sealed]},
        {"reasoning_details": [thought(text="think")]},
        {"reasoning_details": [thought(text=None, signature="EqQB")]},
        {"tool_calls": [{"index": 0, **held()["tool_calls"][0]}]},
    )
    async with client_of("chat", body, "text/event-stream", stream=True) as client:
        answer = await client.answer(TURN)
    assert answer.text == "So hold"
    assert answer.message["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Calm."}]},
        {"type": "text", "text": "So hold"},
    ]
    assert answer.message["reasoning_details"] == [thought(text="I think", signature="EqQB"), sealed]


HOLD_TWICE: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": (
        {
            "content": [
                {"type": "text", "text": ""},
                *[{"type": "tool_use", "id": "toolu_1", "name": "fetch indicators", "input": {"n": n}} for n in (1, 2)],
            ]
        },
        MessagesRequest,
    ),
    "responses": (
        {
            "output": [
                {"type": "function_call", "id": "fc", "call_id": "a", "name": "fetch indicators", "arguments": broken}
                for broken in ("{", "{{")
            ]
        },
        ResponsesRequest,
    ),
    "gemini": (
        {
            "candidates": [
                {
                    "content": {
                        "parts": [
                            {"text": ""},
                            {"functionCall": {"name": "fetch indicators", "args": [], "id": "a"}},
                            {"functionCall": {"name": "fetch indicators", "id": "a"}, "thoughtSignature": "s"},
                        ]
                    }
                }
            ]
        },
        GeminiRequest,
    ),
}
"""Answers that each provider sends but would refuse as a part of the next request, and its document of a request."""


@pytest.mark.parametrize("protocol", HOLD_TWICE)
async def test_calls_that_a_provider_would_refuse_are_repaired_before_they_are_sent_back(protocol: str) -> None:
    sent, document = HOLD_TWICE[protocol]
    async with client_of(protocol, orjson.dumps(sent)) as client:
        answer = await client.answer(TURN)
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"result {call.id}"} for call in answer.calls]
    turn = replace(TURN, messages=[*TURN.messages, answer.message, *results])
    body = PROTOCOLS[protocol].request(turn, PROTOCOLS[protocol].limit_fields[0], stream=False)
    body.pop("temperature", None)
    msgspec.convert(body, document)
    encoded = orjson.dumps(body).decode()
    ids = {call.id for call in answer.calls}
    assert len(ids) == 2
    assert all(encoded.count(f'"{each}"') == 2 for each in ids), "each call has its own result"
    assert "fetch indicators" not in encoded


async def test_a_server_that_does_not_stream_is_understood_too() -> None:
    async with client_of("chat", orjson.dumps(completion(held())), stream=True) as client:
        assert (await client.answer(TURN)).calls


async def test_a_changed_definition_replaces_its_client(database: Database) -> None:
    async with open_floor(database, LAB_API_KEY="k" * 20, LAB_API_KEY_2="l" * 20) as floor:
        providers = make_providers(floor.settings)
        first = ProviderDefinition(
            name="lab", base_url="http://127.0.0.1:1", key_variable="LAB_API_KEY", key_host="127.0.0.1:1"
        )
        model = replace(MODEL, provider="lab", configuration=ModelConfiguration(provider_definition=first))
        providers.learn([model])
        client = providers["lab"]
        providers.learn([model])
        assert providers["lab"] is client
        moved = replace(first, base_url="http://127.0.0.1:2", key_host="127.0.0.1:2")
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


def repeated(protocol: str, *reasons: str) -> dict[str, Any]:
    """An answer that holds for these reasons under one id."""
    given = [{"reason": reason} for reason in reasons]
    match protocol:
        case "messages":
            content = [{"type": "tool_use", "id": "c1", "name": "holding", "input": each} for each in given]
            return {"content": [{"type": "text", "text": "hm"}, *content], "stop_reason": "tool_use"}
        case "responses":
            calls = [
                {"type": "function_call", "id": f"fc{place}", "call_id": "c1", "name": "holding",
                 "arguments": orjson.dumps(each).decode()}
                for place, each in enumerate(given)
            ]  # fmt: skip
            return {"output": [{"type": "reasoning", "summary": []}, *calls], "status": "completed"}
        case _:
            parts = [{"functionCall": {"id": "c1", "name": "holding", "args": each}} for each in given]
            return {"candidates": [{"content": {"parts": [{"text": "hm"}, *parts]}, "finishReason": "STOP"}]}


@pytest.mark.parametrize("protocol", ["messages", "responses", "gemini"])
async def test_a_call_that_a_gateway_sent_twice_is_one_call(protocol: str) -> None:
    async with client_of(protocol, orjson.dumps(repeated(protocol, "calm", "calm", "busy"))) as client:
        answer = await client.answer(TURN)
    assert [orjson.loads(call.arguments)["reason"] for call in answer.calls] == ["calm", "busy"]
    assert len(answer.message["native"]) == 3, "what goes back has each call once"
    assert len({call.id for call in answer.calls}) == 2


USAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("usage", {"prompt_tokens": 1_000, "completion_tokens": 70}),
    "responses": ("usage", {"input_tokens": 1_000, "output_tokens": 70}),
    "messages": ("usage", {"input_tokens": 400, "cache_creation_input_tokens": 600, "output_tokens": 70}),
    "gemini": ("usageMetadata", {"promptTokenCount": 1_000, "candidatesTokenCount": 70}),
}
"""The field with the usage of an answer, and one of 1,000 and 70 tokens."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_failed_answer_is_charged_what_it_reports(protocol: str) -> None:
    field, usage = USAGES[protocol]
    failed: dict[str, Any] = {"error": {"message": "upstream broke", "code": 502}, "status": "failed"}
    async with client_of(protocol, orjson.dumps({field: usage, **failed})) as client:
        with pytest.raises(ProviderError) as caught:
            await client.answer(TURN)
    attempts = 4
    reported = (1_000 * attempts, 70 * attempts), 0
    is_known = protocol in ("chat", "responses")
    assert ((caught.value.unreported, caught.value.unmetered_attempts) == reported) == is_known
    assert sum(caught.value.unreported) > 0


async def test_one_hour_cache_writes_are_counted_separately() -> None:
    usage = {
        "input_tokens": 100, "cache_read_input_tokens": 600, "cache_creation_input_tokens": 300, "output_tokens": 70,
        "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
    }  # fmt: skip
    async with client_of("messages", orjson.dumps({"content": [], "usage": usage})) as client:
        answer = await client.answer(TURN)
    assert (answer.input_tokens, answer.cached_tokens) == (1_000, 600)
    assert (answer.cache_write_tokens, answer.cache_write_1h_tokens) == (300, 200)
    price = TokenPrice(input=1, cached=0.1, output=2)
    model = replace(MODEL, configuration=ModelConfiguration(price=price))
    assert float(cost_of(answer, model) or 0) == pytest.approx((100 + 60 + 125 + 400 + 140) / 1e6)


@pytest.mark.parametrize(
    ("every", "ttl", "candles", "marks"),
    [
        (None, None, ("15m", "1h"), (None, None)),
        ("4m", None, ("15m",), (None, None)),
        ("5m", None, ("15m",), ()),
        ("1h", None, ("1h",), ()),
        ("5m", "1h", ("15m", "4h"), ("1h", "1h")),
        ("15m", "1h", ("15m", "4h"), ("1h",)),
        ("55m", "1h", ("4h",), ("1h", "1h")),
        ("1h", "1h", ("4h",), ()),
        (None, None, (), (None,)),
    ],
)
def test_only_what_the_next_cycle_can_read_is_written_to_the_cache(
    every: str | None, ttl: Any, candles: tuple[Interval, ...], marks: tuple[str | None, ...]
) -> None:
    """The tools and the system message never change, the candles change with the shortest interval."""
    model = replace(MODEL, configuration=ModelConfiguration(every=every, cache_ttl=ttl))
    quote = Quote.of(make_book("BTC", "94000", TURN.view.at))
    market = ObservedMarket.of(
        MARKETS["BTC"],
        quote,
        TURN.view.at,
        opened_a_day_ago=None,
        funding_rate=Decimal(0),
        open_interest=None,
        candles=dict.fromkeys(candles, ()),
        indicators={},
        indicator_history={},
        supplementary=None,
    )
    view = replace(TURN.view, markets={"BTC": market})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"{{…{CANDLES_END}{{}}}}"}]
    body = PROTOCOLS["messages"].request(
        replace(TURN, model=model, view=view, messages=messages), "max_tokens", stream=False
    )
    request = msgspec.convert(body, MessagesRequest)
    blocks = [*request.system, *(block for turn in request.messages for block in turn.content)]
    found = [control for block in blocks if (control := getattr(block, "cache_control", None)) is not None]
    assert [control.ttl for control in found] == [ttl or "5m" for ttl in marks]
