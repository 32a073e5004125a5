"""Calls left in a text, and arguments in other forms: read when they are certain, else noticed or refused."""

import json
from typing import Any

import pytest
from support.trading_floor import calling, opening

from trader.agents.domain.as_written import contains_tool_call, readable, with_calls_of_text
from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.tools import BadCall, CreatePosition, decode

ORDER = opening()[1]
JSON = json.dumps(ORDER)
CLOSE = '<tool_call>{"name": "closePosition", "arguments": {"symbol": "BTC"}}</tool_call>'


def tagged(opening: str, closing: str) -> str:
    """The order with each argument between tags, whose opening has the argument's name."""
    return "\n".join(
        f"{opening.format(name)}{value if isinstance(value, str) else json.dumps(value)}{closing}"
        for name, value in ORDER.items()
    )


DSML = tagged('<｜DSML｜parameter name="{}" string="true">', "</｜DSML｜parameter>")
PLAIN = tagged('<parameter name="{}">', "</parameter>")
PREFIXED = tagged('<ns:parameter name="{}">', "</ns:parameter>")
GEMMA = ",".join(
    f"{name}:<escape>{value}<escape>" if isinstance(value, str) else f"{name}:{json.dumps(value)}"
    for name, value in ORDER.items()
)


@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.createPosition:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>createPosition<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>createPosition\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="createPosition">\n{DSML}\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        f'Up.\n<function_calls>\n<invoke name="createPosition">\n{PLAIN}\n</invoke>\n</function_calls>',
        f'<ns:function_calls>\n<ns:invoke name="createPosition">\n{PREFIXED}\n</ns:invoke>',
        f"<|channel|>commentary to=functions.createPosition <|constrain|>json<|message|>{JSON}<|call|>",
        f"<|start|>assistant to=functions.createPosition<|channel|>commentary json<|message|>{JSON}",
        f"to=functions.createPosition {JSON}",
        f"createPosition[ARGS]{JSON}",
        f'[TOOL_CALLS][{{"name": "createPosition", "arguments": {JSON}}}]',
        f'<tool_call>\n{{"name": "createPosition", "arguments": {json.dumps(JSON)}}}\n</tool_call>',
        f'<|python_tag|>{{"name": "createPosition", "parameters": {JSON}}}<|eom_id|>',
        f"<function=createPosition>{JSON}</function>",
        "<tool_call><function=createPosition>"
        + tagged("<parameter={}>\n", "\n</parameter>")
        + "</function></tool_call>",
        "<tool_call>createPosition\n" + tagged("<arg_key>{}</arg_key><arg_value>", "</arg_value>") + "\n</tool_call>",
        f"<start_function_call>call:createPosition{{{GEMMA}}}<end_function_call>",
        f"<think>{CLOSE}</think>createPosition[ARGS]{JSON}",
    ],
)
def test_a_complete_call_in_a_known_form_is_read_as_any_other(text: str) -> None:
    (call,) = with_calls_of_text(calling(text=text), 1).calls
    assert call.form is not None
    assert decode(readable(call)) == decode(ToolRequest("1", "createPosition", JSON))
    assert contains_tool_call(text)


@pytest.mark.parametrize(
    ("text", "is_noticed"),
    [
        (f"For example `{CLOSE}` would close it.", True),
        (f"I could write\n```\n{CLOSE}\n```", True),
        (f"`{CLOSE}`", True),
        (f"{CLOSE} But I do not.", True),
        (CLOSE[:-15], True),
        (f"{CLOSE}{CLOSE[:40]}", True),
        (CLOSE.replace("closePosition", "withdraw"), True),
        ('<tool_call>{"name": "closePosition", "arguments": [1]}</tool_call>', True),
        ("[closePosition(symbol=open('x'))]", True),
        ("[closePosition(symbol='BTC'), *x]", True),
        (f"<think>{CLOSE}</think>I hold.", False),
        (f"{CLOSE}</think>I hold.", False),
        (f"<think>{CLOSE}", False),
        ("<|begin_of_action|>wait<|end_of_action|>", True),
        ('```json\n{"symbol": "BTC", "fraction": 0.5}\n```', True),
        ('{"reason": "calm"}', True),
        ("Action: close_position\nAction Input: all of it", True),
        ("default_api.closePosition(BTC)", True),
        ("/closePosition symbol=BTC", True),
        ("createPosition BTC LONG 0.01, leverage 2, stop 90000", True),
        ("**createPosition**\n- symbol: BTC\n- side: LONG", True),
        ("I will call createPosition with symbol BTC, side LONG and quantity 0.01.", True),
        ("Decision: CLOSE_POSITION BTC", True),
        ("I would not close position BTC; target not reached.", False),
        ("I wait; createPosition was refused (leverage: 11). My note [above] stands {so far}.", False),
    ],
)
def test_what_is_not_certainly_a_call_is_not_executed(text: str, is_noticed: bool) -> None:
    assert not with_calls_of_text(calling(text=text), 1).calls
    assert contains_tool_call(text) == is_noticed


@pytest.mark.parametrize(
    ("changes", "means"),
    [
        ({"quantity": "0.1", "leverage": " 3 ", "side": "long"}, {}),
        ({"side": "Buy"}, {}),
        ({"target": 0}, {"target": None}),
        ({"target": "0.0", "invalidationPrice": "", "timeExit": "null"}, {"target": None}),
        ({"timeExit": "2026-01-31T12:00Z"}, {"timeExit": "2026-01-31T12:00:00Z"}),
        ({"timeExit": "2026-01-31 12:00"}, {"timeExit": "2026-01-31T12:00:00Z"}),
        ({"confidence": 0.55}, {"confidence": 55}),
        ({"confidence": "0.7"}, {"confidence": 70}),
        ({"confidence": 1}, {"confidence": 1}),
    ],
)
def test_arguments_are_read_as_models_write_them(changes: dict[str, Any], means: dict[str, Any]) -> None:
    written, expected = (
        json.dumps(ORDER | changes),
        decode(ToolRequest("1", "createPosition", json.dumps(ORDER | means))),
    )
    assert isinstance(expected, CreatePosition)
    for arguments in (written, json.dumps(written), json.dumps(json.dumps(written))):
        assert decode(readable(ToolRequest("1", "createPosition", arguments))) == expected


def test_a_call_left_in_the_text_beside_others_is_counted_as_left_out() -> None:
    parsed = calling(("holding", {"reason": "done"}), text=f"Closing. {CLOSE}")
    assert with_calls_of_text(parsed, 1).calls_left_out == 1
    both = calling(("closePosition", {"symbol": "BTC"}), text=f"Closing. {CLOSE}")
    assert with_calls_of_text(both, 1) == both, "a server may leave in the text what it parsed"


def test_the_placeholder_of_the_example_is_no_reason() -> None:
    refused = decode(ToolRequest("1", "holding", '{"reason": "..."}'))
    assert isinstance(refused, BadCall)
    assert "reason: expected why, in words" in refused.error


def test_unknown_fields_of_holding_are_ignored() -> None:
    written = ToolRequest("1", "holding", '{"reason": "calm", "symbol": "BTC", "quantity": 0}')
    assert decode(readable(written)) == decode(ToolRequest("1", "holding", '{"reason": "calm"}'))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantity": "0,1"}, 'quantity: expected a number above 0 up to 1e+12, got "0,1"'),
        ({"quantity": 0}, "quantity: expected a number above 0 up to 1e+12, got 0"),
        ({"stop": "null"}, 'stop: expected a number above 0 up to 1e+12, got "null"'),
        ({"quantity": "nan"}, 'got "nan"'),
        ({"confidence": True}, "confidence: expected a number from 0 up to 100, got true"),
        ({"target": False}, "got false"),
        ({"side": "up"}, 'side: expected one of LONG, SHORT, got "up"'),
        ({"timeExit": "2026-01-31"}, 'got "2026-01-31"'),
        ({"size": 1}, "size: unknown field"),
    ],
)
def test_what_has_no_certain_meaning_is_refused_as_written(changes: dict[str, Any], error: str) -> None:
    refused = decode(readable(ToolRequest("1", "createPosition", json.dumps(ORDER | changes))))
    assert isinstance(refused, BadCall)
    assert error in refused.error
