"""Lenient parser of chat-completions responses: the answer for the workflow, and the meaning of errors."""

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
"""Sent back as received: models that reason between tool calls lose their reasoning without them."""

NAME_MAX: Final = 64
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
"""Characters that the protocol does not allow in the name of a function."""

NOT_ABOUT_KEY: Final = frozenset({"reasons", "flagged_input", "provider_name"})
"""Metadata that a gateway adds to a 401 or 403 not about its key: a moderation or a provider behind it refused."""


class _Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: Any = None


class _ReplyMessage(msgspec.Struct):
    content: Any = None
    refusal: Any = None
    tool_calls: list[_Call] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    reasoning_details: Any = None

    def make_storable(self) -> None:
        """Make the fields that are sent back storable. :raises RecursionError: they are nested too deep"""
        for name in REASONING_FIELDS:
            setattr(self, name, storable(getattr(self, name)))


class _Choice(msgspec.Struct):
    message: _ReplyMessage
    finish_reason: Any = None
    error: Any = None


class Reply(msgspec.Struct):
    """The parts of a response that are used; `raw` keeps all of it."""

    choices: list[_Choice] | None = None
    usage: Any = None
    model: Any = None
    error: Any = None
    raw: str = ""

    @property
    def failure(self) -> Any:
        """The error of the response, or of its first choice when the answer broke off."""
        if self.error or not self.choices:
            return self.error
        return self.choices[0].error or self.choices[0].finish_reason == "error"


def decode_reply(content: bytes) -> Reply:
    """Parse the body of a response. :raises MsgspecError, ValueError, RecursionError: it is unusable"""
    reply = msgspec.json.decode(content, type=Reply)
    for choice in reply.choices or ():
        choice.message.make_storable()
    reply.raw = content.decode(errors="replace")
    return reply


def answer_of(reply: Reply, turn: Turn, key_number: int | None, asked_bytes: int) -> ModelAnswer:
    """Return the answer of a reply with a choice. Without reported usage the tokens spent are estimated from bytes."""
    assert reply.choices, "the caller has checked that there is one"
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
    input_tokens, output_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return ModelAnswer(
        text=text,
        calls=calls,
        message=_message(message, text, calls),
        model=(storable(reply.model) if isinstance(reply.model, str) else "") or turn.model.router_model_name,
        raw=reply.raw,
        key_number=key_number,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cost_usd=_cost(usage),
        tokens_spent=input_tokens + output_tokens or (asked_bytes + len(reply.raw)) // 4,
        cut_by=reason if reason in ("length", "content_filter") else None,
    )


# Errors


def status_of(error: Any) -> int:
    """Return the status of an error inside a 200, which gateways put in `code`; without one, a server failure."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def refused_field(content: bytes) -> str | None:
    """Return the request field that, by this error, the model does not accept; None for any other error."""
    try:
        error = orjson.loads(content)["error"]
        code, field = error["code"], error["param"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return field if isinstance(field, str) and code in {"unsupported_parameter", "unsupported_value"} else None


def is_not_about_key(content: bytes) -> bool:
    """Return whether a 401 or 403 is about the input or from behind the gateway, so that the key stays usable.

    That holds for an answer with choices too: a model had begun it.
    """
    try:
        response = orjson.loads(content)
        return bool(response.get("choices")) or not NOT_ABOUT_KEY.isdisjoint(response["error"]["metadata"])
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return False


def brief(text: str) -> str:
    """Return the beginning of a text in one line, for an error message."""
    return storable(" ".join(text.split()))[:300]  # type: ignore[no-any-return]  # a string stays one


# The parts of an answer


def _text(content: Any) -> str | None:
    """Return the text of a message; some models send it in typed parts."""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(parts)
    return content or None if isinstance(content, str) else None


def _id_of(call: _Call, otherwise: str, taken: set[str]) -> str:
    """Return the id of a call, or `otherwise` when it has none or one that another call of the answer has."""
    own: str = storable(call.id) if isinstance(call.id, str) else ""
    call_id = otherwise if not own or own in taken else own
    taken.add(call_id)
    return call_id


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else msgspec.json.encode(arguments).decode()


def _message(reply: _ReplyMessage, text: str | None, calls: Sequence[ToolRequest]) -> Message:
    """Return the assistant's message as it is sent back to the provider."""
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
        if (value := getattr(reply, name)) is not None:
            message[name] = value
    return message


def _valid_name(name: str) -> str:
    """Return the name in characters that the protocol allows, since the provider would refuse others."""
    return _NO_NAME.sub("_", name)[:NAME_MAX] or "_"


def _valid_json(arguments: str) -> str:
    """Return the arguments, or an empty object for invalid JSON, which the provider would refuse."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "{}"
    return arguments


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0


def _cost(usage: Mapping[str, Any]) -> Decimal | None:
    """Return the cost in USD. With an own key for the provider behind a gateway, `cost` is only the gateway's fee."""
    cost, details = _amount(usage.get("cost")), usage.get("cost_details")
    if usage.get("is_byok") is not True or not isinstance(details, dict):
        return cost
    upstream = _amount(details.get("upstream_inference_cost"))
    return cost if upstream is None else upstream + (cost or 0)


def _amount(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10**6:
        return None
    return Decimal(repr(value))
