"""What the answers of the chat-completions protocol say: read leniently, and told in the terms of the workflow."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import orjson

from trader.domain.agents.conversation import Message, ModelAnswer, ToolRequest, Turn, storable

CALLS_MAX = 16
"""Tool calls taken from one answer."""

REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_details")
"""Given back as they came: models that think between tool calls lose the thread without them."""

NAME_MAX: Final = 64
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
"""What the name of a function cannot hold by the protocol."""

REFUSALS_OF_OTHERS: Final = frozenset({"reasons", "flagged_input", "provider_name"})
"""What a gateway adds to a 401 or 403 that is not of its key: a moderation flagged the input, or a provider refused."""


class _Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: Any = None


class _Said(msgspec.Struct):
    content: Any = None
    refusal: Any = None
    tool_calls: list[_Call] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    reasoning_details: Any = None

    def make_storable(self) -> None:
        """Of what goes back as it came. :raises RecursionError: it is nested too deep for that"""
        for name in REASONING_FIELDS:
            setattr(self, name, storable(getattr(self, name)))


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: Any = None
    error: Any = None


class Reply(msgspec.Struct):
    """The part of an answer that matters; whatever else a provider adds is kept in `raw`."""

    choices: list[_Choice] | None = None
    usage: Any = None
    model: Any = None
    error: Any = None
    raw: str = ""

    @property
    def failure(self) -> Any:
        """The error that it tells of, of the whole or of its first choice: it broke off while the model spoke."""
        if self.error or not self.choices:
            return self.error
        return self.choices[0].error or self.choices[0].finish_reason == "error"


def decode_reply(content: bytes) -> Reply:
    """The answer in a body of JSON. :raises MsgspecError, ValueError, RecursionError: there is none"""
    reply = msgspec.json.decode(content, type=Reply)
    for choice in reply.choices or ():
        choice.message.make_storable()
    reply.raw = content.decode(errors="replace")
    return reply


def answer_of(reply: Reply, turn: Turn, key_number: int | None, asked_bytes: int) -> ModelAnswer:
    """What a reply with a choice says. Of one without usage the tokens spent are estimated from the bytes."""
    assert reply.choices, "there is one"
    message, reason = reply.choices[0].message, reply.choices[0].finish_reason
    text = storable(_text(message.content) or _text(message.refusal))
    ids: set[str] = set()
    calls = tuple(
        ToolRequest(
            id=_id_of(call, f"call_{turn.number}_{index}", ids),
            name=storable(call.function.name) if isinstance(call.function.name, str) else "",
            arguments=storable(_arguments(call.function.arguments)),
        )
        for index, call in enumerate((message.tool_calls or [])[:CALLS_MAX], 1)
    )
    usage = reply.usage if isinstance(reply.usage, dict) else {}
    taken, given = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return ModelAnswer(
        text=text,
        calls=calls,
        message=_message(message, text, calls),
        model=(storable(reply.model) if isinstance(reply.model, str) else "") or turn.model.router_model_name,
        raw=reply.raw,
        key_number=key_number,
        input_tokens=taken,
        output_tokens=given,
        cost_usd=_cost(usage),
        tokens_spent=taken + given or (asked_bytes + len(reply.raw)) // 4,
        cut_by=reason if reason in ("length", "content_filter") else None,
    )


# Errors


def status_of(error: Any) -> int:
    """The status that an error inside a 200 stands for; gateways put it in `code`. Without one: a server failure."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def refused_field(content: bytes) -> str | None:
    """The field of the request that an error says the model does not take; None when it is about something else."""
    try:
        error = orjson.loads(content)["error"]
        code, field = error["code"], error["param"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return field if isinstance(field, str) and code in {"unsupported_parameter", "unsupported_value"} else None


def is_refusal_of_others(content: bytes) -> bool:
    """Whether a 401 or 403 is about what was asked, or comes from behind the gateway: the key is as good as before.

    So is that of an answer with choices, which a model had begun.
    """
    try:
        told = orjson.loads(content)
        return bool(told.get("choices")) or not REFUSALS_OF_OTHERS.isdisjoint(told["error"]["metadata"])
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return False


def brief(text: str) -> str:
    """The beginning of a text in one line, for a reason."""
    return storable(" ".join(text.split()))[:300]  # type: ignore[no-any-return]  # a string stays one


# The parts of an answer


def _text(content: Any) -> str | None:
    """The words of a message; some models send them in typed parts."""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(parts)
    return content or None if isinstance(content, str) else None


def _id_of(call: _Call, otherwise: str, taken: set[str]) -> str:
    """The id of a call; another one when it has none, or that of a call before: its result could not be told apart."""
    given: str = storable(call.id) if isinstance(call.id, str) else ""
    found = otherwise if not given or given in taken else given
    taken.add(found)
    return found


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else msgspec.json.encode(arguments).decode()


def _message(said: _Said, text: str | None, calls: Sequence[ToolRequest]) -> Message:
    """The assistant's message as it goes back to the provider."""
    message: Message = {"role": "assistant", "content": text or ""}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": _valid_name(call.name), "arguments": _valid_json(call.arguments)},
            }
            for call in calls
        ]
    for name in REASONING_FIELDS:
        if (value := getattr(said, name)) is not None:
            message[name] = value
    return message


def _valid_name(name: str) -> str:
    """The name, or the nearest that the protocol allows: with another the provider would refuse its own call."""
    return _NO_NAME.sub("_", name)[:NAME_MAX] or "_"


def _valid_json(arguments: str) -> str:
    """The arguments, or an empty object in place of text that would make the provider refuse its own call."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "{}"
    return arguments


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0


def _cost(usage: Mapping[str, Any]) -> Decimal | None:
    """What the answer cost. With an own key for the provider behind a gateway, `cost` is the gateway's fee alone."""
    cost, details = _amount(usage.get("cost")), usage.get("cost_details")
    if usage.get("is_byok") is not True or not isinstance(details, dict):
        return cost
    upstream = _amount(details.get("upstream_inference_cost"))
    return cost if upstream is None else upstream + (cost or 0)


def _amount(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10**6:
        return None
    return Decimal(repr(value))
