"""Texts that contain a tool call as prose or are refusals, and texts that only mention tools."""

from typing import Any

import pytest
from msgspec.structs import replace
from support.trading_floor import calling

from trader.agents.domain.as_written import contains_tool_call
from trader.agents.domain.conversation import reasoning_in, refusal_in


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "createPosition", "arguments": {"symbol": "BTC"}}\n</tool_call>',
        '<function=holding>{"reason": "calm"}</function>',
        '[TOOL_CALLS][{"name": "holding", "arguments": {}}]',
        "<｜tool▁calls▁begin｜>function",
        '<function_calls><invoke name="holding">',
        'I will wait.\n\n```json\n{"name": "holding", "arguments": {"reason": "calm"}}\n```',
        '{"tool": "closePosition", "symbol": "BTC"}',
        "{'action': 'functions.createPosition'}",
        'holding({"reason": "calm"})',
        "createPosition(symbol='BTC', side='LONG')",
        "I call holding() now.",
        '**updateExitPlan**:\n```json\n{"symbol": "BTC", "stop": 1}',
        'holding{"reason": "calm"}',
    ],
)
def test_a_tool_call_as_prose_is_found(text: str) -> None:
    assert contains_tool_call(text)


@pytest.mark.parametrize(
    "text",
    [
        "I am holding (no setup anywhere).",
        "Holding BTC: the stop of createPosition stands, and closePosition is not needed.",
        "The next createPosition waits for a release {squeezeOn false}.",
        "After `holding` the cycle ends.",
        "",
    ],
)
def test_a_text_about_tools_is_not_a_call(text: str) -> None:
    assert not contains_tool_call(text)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that request.",
        "I cannot provide financial advice or place trades.",
        "Sorry, I am not able to help with trading.",
        "I\u2019m unable to comply.",
    ],
)
def test_a_refusal_is_found(text: str) -> None:
    assert refusal_in(calling(text=text)) == text


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning_content": "It falls."},
        {"reasoning": " It falls.\n", "reasoning_details": [{"type": "reasoning.text", "text": "It falls."}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "It falls."}, {"data": "gAAA"}]},
        {"native": [{"type": "thinking", "thinking": "It falls.", "signature": "x"}, {"type": "text", "text": "No."}]},
        {"native": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "It falls."}]}]},
        {"native": [{"thought": True, "text": "It falls."}, {"text": "No."}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "It falls."}]}]},
    ],
)
def test_what_a_model_thought_is_found(message: dict[str, Any]) -> None:
    assert reasoning_in(message) == "It falls."
    assert reasoning_in({"role": "assistant", "content": "No.", "native": [{"type": "text", "text": "No."}]}) is None


@pytest.mark.parametrize("text", ["I cannot open BTC at 10x: the leverage cap is 5.", "Nothing to do.", ""])
def test_other_texts_are_not_refusals(text: str) -> None:
    assert refusal_in(calling(text=text)) is None
    assert refusal_in(replace(calling(text=text), is_refusal=True)) == text
