"""Lenient parser of chat completions: the answer for the workflow, and the message for the next request."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import orjson

from trader.agents.domain.conversation import ChatMessage, ModelAnswer, ToolRequest, Turn, storable, value_in
from trader.agents.providers.protocols import NATIVE, is_json, parts_once

CALLS_MAX = 16
"""Maximum tool calls taken from one answer."""

NAME_MAX: Final = 64
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
"""Characters that the protocol does not allow in a function name."""


class _Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: Any = None


class _ReplyMessage(msgspec.Struct):
    """The fields of a message that are used."""

    content: Any = None
    refusal: Any = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: Any = None
    error: Any = None


class ChatCompletion(msgspec.Struct):
    """The fields of a response that are used; `raw` keeps the whole response."""

    choices: list[_Choice] | None = None
    usage: Any = None
    model: Any = None
    error: Any = None
    raw: str = ""

    @property
    def failure(self) -> Any:
        """The error of the response, or of its first choice if the answer was interrupted."""
        if self.error or not self.choices:
            return self.error
        return self.choices[0].error or self.choices[0].finish_reason == "error"

    @property
    def reported_tokens(self) -> tuple[int, int] | None:
        """The input and output tokens that the response reports; None if it reports none."""
        usage = self.usage if isinstance(self.usage, dict) else {}
        tokens = count_in(usage, "prompt_tokens") or 0, _output_tokens(usage) or 0
        return tokens if any(tokens) else None


def decode_reply(content: bytes) -> ChatCompletion:
    """Parse the body of a response. :raises MsgspecError, ValueError, RecursionError: it is unusable"""
    reply = msgspec.json.decode(content, type=ChatCompletion)
    if not reply.choices and not reply.error and reply.reported_tokens is not None:
        reply.choices = [_Choice({"role": "assistant", "content": None})]  # an empty answer that is charged
    for choice in reply.choices or ():
        choice.message = storable(choice.message)
        msgspec.convert(choice.message, _ReplyMessage)
    reply.raw = content.decode(errors="replace")
    return reply


def answer_of(reply: ChatCompletion, turn: Turn, key_number: int | None, asked_bytes: int) -> ModelAnswer:
    """Return the answer in a reply that has a choice. Estimate unreported tokens at their maximum."""
    assert reply.choices, "the caller has checked that there is one"
    sent, reason = reply.choices[0].message, reply.choices[0].finish_reason
    message = msgspec.convert(sent, _ReplyMessage)
    requested = message.tool_calls or []
    if requested and NATIVE not in sent:
        names = "id", "name", "arguments"
        once, _ = parts_once(sent["tool_calls"], names, lambda call: {**call["function"], "id": call.get("id")})
        sent, requested = {**sent, "tool_calls": once}, msgspec.convert(once, list[_Call])
    ids: set[str] = set()
    calls = tuple(
        ToolRequest(
            id=_id_of(call, f"call_{turn.number}_{index}", ids),
            name=call.function.name if isinstance(call.function.name, str) else "",
            arguments=_arguments(call.function.arguments),
        )
        for index, call in enumerate(requested[:CALLS_MAX], 1)
    )
    usage = reply.usage if isinstance(reply.usage, dict) else {}
    input_tokens, output_tokens, cost = count_in(usage, "prompt_tokens"), _output_tokens(usage), _cost(usage)
    estimated = (
        estimated_count(asked_bytes) if input_tokens is None else 0,
        turn.answer_tokens_max if output_tokens is None else 0,
    )
    return ModelAnswer(
        text=_text(message.content) or _text(message.refusal),
        calls=calls,
        calls_left_out=len(requested) - len(calls),
        is_refusal=_text(message.refusal) is not None,
        message=_message(sent, calls),
        model=(storable(reply.model) if isinstance(reply.model, str) else "") or turn.model.router_model_name,
        raw=reply.raw,
        key_number=key_number,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=_first_count(usage, CACHE_READS),
        cache_write_tokens=_first_count(usage, CACHE_WRITES),
        cache_write_1h_tokens=count_in(usage, "cache_write_1h_tokens"),
        cost_usd=cost,
        tokens_spent=(input_tokens or 0) + (output_tokens or 0) + sum(estimated),
        unmetered_attempts=int(input_tokens is None and output_tokens is None and cost is None),
        unreported=estimated if cost is None else (0, 0),
        cut_by=reason if reason in ("length", "content_filter") else None,
    )


# The parts of an answer


def _text(content: Any) -> str | None:
    """Return the text of a message; some models send it as typed parts."""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(parts)
    return content or None if isinstance(content, str) else None


def _id_of(call: _Call, otherwise: str, taken: set[str]) -> str:
    """Return the id of a call, or `otherwise` if it is missing or repeated in the answer."""
    own = call.id if isinstance(call.id, str) else ""
    call_id = otherwise if not own or own in taken else own
    taken.add(call_id)
    return call_id


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else msgspec.json.encode(arguments).decode()


def _message(sent: ChatMessage, calls: Sequence[ToolRequest]) -> ChatMessage:
    """Return the assistant message for the next request, unchanged, with all fields that the provider added.

    Without these, models that reason between tool calls lose their reasoning. Fix only what the provider would refuse
    in its own calls: missing or repeated ids, invalid names and arguments, and calls beyond the limit.
    """
    message = {**sent, "role": "assistant"}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **original,
                "id": call.id,
                "function": {
                    **original["function"],
                    "name": _NO_NAME.sub("_", call.name)[:NAME_MAX] or "_",
                    "arguments": call.arguments if is_json(call.arguments) else "{}",
                },
            }
            for original, call in zip(sent["tool_calls"], calls, strict=False)
        ]
    return message


def count_in(usage: Any, *path: str) -> int | None:
    """Return the count at the path within a usage, as its provider sent it; None for anything but a whole number."""
    count = value_in(usage, *path)
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 10**12 else None


CONTEXT_NAMES: Final = ("n_ctx", "max_model_len", "loaded_context_length", "context_length", "max_context_length")
"""The fields in which llama.cpp, vLLM, LM Studio and Ollama state the length of a context, the effective one first."""


def context_in(content: bytes, name: str) -> int | None:
    """Return the length of a model's context in a server's properties or list of models; None if it is not there."""
    try:
        said = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    listed = (said.get("data") or said.get("models")) if isinstance(said, dict) else None
    places = [said] if not isinstance(listed, list) else [each for each in listed if name in _names(each)]
    settings = [each.get("default_generation_settings") for each in places if isinstance(each, dict)]
    found = (count_in(each, field) for each in (*settings, *places) for field in CONTEXT_NAMES)
    return next((tokens for tokens in found if tokens), None)


def _names(listed: Any) -> list[Any]:
    return [listed.get(key) for key in ("id", "name", "model")] if isinstance(listed, dict) else []


def _output_tokens(usage: Mapping[str, Any]) -> int | None:
    """Return the output tokens, including the reasoning tokens, which some gateways count separately."""
    prompt, output = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
    if output is None:
        return None
    total = count_in(usage, "total_tokens")
    if prompt is not None and total is not None:
        return max(output, total - prompt)
    reasoning = count_in(usage, "completion_tokens_details", "reasoning_tokens")
    return output + reasoning if reasoning is not None and reasoning > output else output


def estimated_count(size: int) -> int:
    """Return the maximum number of tokens in a request of this many bytes."""
    return size // 3


CACHE_READS: Final = ("prompt_tokens_details", "cached_tokens"), ("prompt_cache_hit_tokens",), ("cached_tokens",)
CACHE_WRITES: Final = ("prompt_tokens_details", "cache_write_tokens"), ("cache_write_tokens",)
"""Where OpenAI, OpenRouter, DeepSeek and Kimi state the input tokens read from their caches, and written to them."""


def _first_count(usage: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> int | None:
    return next((count for path in paths if (count := count_in(usage, *path)) is not None), None)


def _cost(usage: Mapping[str, Any]) -> Decimal | None:
    """Return the cost in USD; None if it is unknown.

    With your own key for the provider behind a gateway, `cost` is only the gateway's fee.
    """
    cost = _amount(usage.get("cost"))
    if usage.get("is_byok") is not True:
        return cost
    upstream = _amount(value_in(usage, "cost_details", "upstream_inference_cost"))
    return None if upstream is None else upstream + (cost or 0)


def _amount(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10**6:
        return None
    return Decimal(repr(value))
