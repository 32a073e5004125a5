"""Parsing of chat-completions responses, regular and odd ones."""

import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from support.chat_server import KEYS, OK, TURN, FakeServer, MakeClient, answering, completion, held

from trader.agents.domain.conversation import ModelAnswer
from trader.agents.domain.tools import BadCall, Holding, decode
from trader.agents.providers.replies import decode_reply

Read = Callable[..., Awaitable[ModelAnswer]]


@pytest.fixture
def read(server: FakeServer, client_of: MakeClient) -> Read:
    """Return the answer that a client reads in a message, with more fields of its completion."""
    client = client_of(KEYS[0])

    async def answer(message: dict[str, Any], **more: Any) -> ModelAnswer:
        server.script = [answering(200, completion(message, **more))]
        return await client.answer(TURN)

    return answer


async def test_several_calls_are_read_even_malformed_ones(read: Read) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "fetchIndicators", "arguments": '{"symbol": "BTC"'}},
        {"function": {"name": "holding", "arguments": {"reason": "as an object"}}},
        {"id": "c", "function": {"name": "sellEverything", "arguments": None}},
    ]
    answer = await read({"content": "text", "tool_calls": calls})
    assert [call.id for call in answer.calls] == ["a", "call_1_2", "c"]
    assert isinstance(decode(answer.calls[0]), BadCall)
    assert decode(answer.calls[1]) == Holding(reason="as an object")
    unknown = decode(answer.calls[2])
    assert isinstance(unknown, BadCall)
    assert "no tool 'sellEverything'" in unknown.error
    echoed = [call["function"]["arguments"] for call in answer.message["tool_calls"]]
    assert echoed[0] == "{}", "text that is no JSON would make the provider refuse its own call"


async def test_calls_are_sent_back_in_valid_form(read: Read) -> None:
    names = ("holding", "multi_tool_use.parallel", "", "x" * 300)
    calls: list[dict[str, Any]] = [{"id": "same", "function": {"name": name, "arguments": "{}"}} for name in names]
    calls += [{"id": 7, "function": {"name": "holding", "arguments": "{}"}}, {"function": {"name": None}}]
    answer = await read({"tool_calls": calls}, model=7)
    ids = [call.id for call in answer.calls]
    assert ids == ["same", "call_1_2", "call_1_3", "call_1_4", "call_1_5", "call_1_6"], "each result is told apart"
    assert [call.name for call in answer.calls] == [*names, "holding", ""], "as they came, for the record"
    assert [call["id"] for call in answer.message["tool_calls"]] == ids
    echoed = [call["function"]["name"] for call in answer.message["tool_calls"]]
    assert echoed == ["holding", "multi_tool_use_parallel", "_", "x" * 64, "holding", "_"]
    assert answer.model == "lab/one", "an invalid name is None"


async def test_a_truncated_or_refusing_answer_is_marked(server: FakeServer, client_of: MakeClient) -> None:
    client = client_of(KEYS[0])
    for reason, cut_by in (
        ("length", "length"), ("content_filter", "content_filter"), ("stop", None), (None, None), (["odd"], None),
    ):  # fmt: skip
        choice = {"finish_reason": reason, "message": {"content": None, "refusal": "I cannot help with that."}}
        server.script = [answering(200, {"choices": [choice]})]
        answer = await client.answer(TURN)
        assert (answer.cut_by, answer.text) == (cut_by, "I cannot help with that.")


async def test_a_long_answer_is_parsed_in_a_thread(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[bool] = []

    def noting(content: bytes) -> object:
        readers.append(threading.current_thread() is threading.main_thread())
        return decode_reply(content)

    monkeypatch.setattr("trader.agents.providers.client.decode_reply", noting)
    for size in (10, 200_000):
        answer = await read({"content": "x" * size})
        assert answer.text == "x" * size
    assert readers == [True, False]


async def test_messages_are_sent_back_unchanged(server: FakeServer, client_of: MakeClient, read: Read) -> None:
    client, huge, deep = client_of(KEYS[0]), 10**40, "[" * 300 + "]" * 300
    call = {
        "id": "a", "type": "function", "index": 0,
        "function": {"name": "holding", "arguments": '{"reason": "x"}', "signature": "s"},
        "extra_content": {"google": {"thought_signature": "abc=="}},
    }  # fmt: skip
    sent = {
        "role": "assistant", "content": None, "reasoning_content": "", "reasoning": None, "annotations": [],
        "reasoning_details": [{"index": huge}, msgspec.json.decode(deep)], "tool_calls": [call],
        "of_tomorrow": {"a": 1},
    }  # fmt: skip
    answer = await read(sent)
    assert decode(answer.calls[0]) == Holding(reason="x")
    server.script = [OK]
    turn = msgspec.structs.replace(TURN, number=2, messages=[*TURN.messages, answer.message])
    assert (await client.answer(turn)).calls
    assert server.bodies[-1]["messages"][-1] == sent, "every field, null and empty ones too"


async def test_a_message_without_reasoning_gets_none(read: Read) -> None:
    answer = await read({"content": "", "tool_calls": held()["tool_calls"]})
    assert answer.message == {"role": "assistant", "content": "", "tool_calls": held()["tool_calls"]}


async def test_calls_beyond_the_limit_and_legacy_calls_are_detected(read: Read) -> None:
    calls = [{"id": f"c{n}", "function": {"name": "holding", "arguments": "{}"}} for n in range(20)]
    answer = await read({"tool_calls": calls})
    assert (len(answer.calls), answer.calls_left_out, len(answer.message["tool_calls"])) == (16, 4, 16)
    answer = await read({"content": None, "function_call": {"name": "holding", "arguments": "{}"}})
    assert answer.calls == ()


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": 20, "total_tokens": 620},
        {"completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": 500}},
        {"completion_tokens": 520, "total_tokens": 620, "completion_tokens_details": {"reasoning_tokens": 500}},
        {"completion_tokens": 520, "completion_tokens_details": {"reasoning_tokens": 500}},
    ],
)
async def test_separately_counted_reasoning_tokens_are_output(read: Read, usage: dict[str, Any]) -> None:
    answer = await read(held(), usage={"prompt_tokens": 100, **usage})
    assert (answer.input_tokens, answer.output_tokens) == (100, 520)


async def test_missing_and_odd_usage(read: Read) -> None:
    for usage in (None, {}, "many", {"prompt_tokens": -1, "completion_tokens": 1.5, "cost": -2}):
        answer = await read(held(), usage=usage)
        assert (answer.input_tokens, answer.output_tokens, answer.cost_usd) == (None, None, None)
        assert answer.tokens_spent > 0, "the budget still counts"


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 4_096}}, 4_096),
        ({"prompt_cache_hit_tokens": 512, "prompt_cache_miss_tokens": 9}, 512),
        ({"cached_tokens": 256}, 256),
        ({"prompt_tokens_details": {"cached_tokens": 0}, "prompt_cache_hit_tokens": 7}, 0),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, None),
        ({"prompt_tokens_details": [1], "prompt_cache_hit_tokens": "many"}, None),
    ],
)
async def test_cached_tokens(read: Read, usage: dict[str, Any], cached: int | None) -> None:
    answer = await read({"content": "x"}, usage={"prompt_tokens": 5_000, **usage})
    assert answer.cached_tokens == cached


@pytest.mark.parametrize(
    "usage", [{"cache_write_tokens": 300}, {"prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 300}}]
)
async def test_cache_writes(read: Read, usage: dict[str, Any]) -> None:
    answer = await read(held(), usage={"prompt_tokens": 5_000, **usage})
    assert answer.cache_write_tokens == 300


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"cost": 0.00014}, "0.00014"),
        ({"cost": 1e-7}, "0.0000001"),
        ({"cost": 0.95, "is_byok": True, "cost_details": {"upstream_inference_cost": 19}}, "19.95"),
        ({"is_byok": True, "cost_details": {"upstream_inference_cost": 0.3}}, "0.3"),
        ({"cost": 0.95, "is_byok": True, "cost_details": {"upstream_inference_cost": None}}, None),
        ({"cost": 0.95, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.95}}, "0.95"),
        ({"cost": 0.95, "is_byok": True, "cost_details": []}, None),
    ],
)
async def test_the_cost_is_the_amount_paid_for_the_answer(read: Read, usage: dict[str, Any], cost: str | None) -> None:
    answer = await read(held(), usage=usage)
    assert answer.cost_usd == (None if cost is None else Decimal(cost))


async def test_text_in_parts_and_nul_characters(read: Read) -> None:
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a\x00b"}, {"type": "text", "text": "c"}]
    answer = await read({"content": parts, "reasoning_content": "x\x00"})
    assert answer.text == "abc"
    assert answer.message["reasoning_content"] == "x"
    assert answer.calls == ()
