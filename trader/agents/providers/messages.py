"""Anthropic's Messages API.

Cache marks end the stable prefixes: the tools with the system message, which never change, and the candles of the view,
which change when one closes. A write costs more than other input, so a prefix is marked only if the model's next cycle
comes within its life and finds it unchanged. A prefix below a model's minimum is harmlessly not cached.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec

from trader.agents.domain.conversation import ChatMessage, Turn
from trader.agents.domain.prompt import CANDLES_END
from trader.agents.providers.protocols import (
    NATIVE,
    Body,
    completion_of,
    empty_completion,
    functions,
    native_parts,
    parts_once,
    split_by_role,
)
from trader.agents.providers.replies import count_in
from trader.market.domain.markets import INTERVALS

VERSION: Final = "2023-06-01"
"""The API version that requests specify."""

CACHED: Final[Body] = {"type": "ephemeral"}

CACHE_LIVES: Final = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1)}
"""How long a marked prefix stays in the cache after its last use, by the `cache_ttl` of a model's configuration."""


class _Answer(msgspec.Struct):
    """The fields of an answer that are used."""

    content: list[dict[str, Any]] | None = None
    stop_reason: Any = None
    usage: Any = None
    model: Any = None
    error: Any = None


class MessagesWire:
    """Protocol of Anthropic's Messages API."""

    limit_fields = ("max_tokens",)
    charges_cache_writes = True

    def path(self, model: str) -> str:
        return "/messages"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return {"anthropic-version": VERSION, **({} if secret is None else {"x-api-key": secret})}

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        tools = [
            {"name": name, "description": description, "input_schema": schema}
            for name, description, schema in functions(turn)
        ]
        system = [message["content"] for message in turn.messages if message["role"] == "system"]
        intervals = [INTERVALS[interval] for market in turn.view.markets.values() for interval in market.candles]
        candles_mark = _mark(turn, min(intervals, default=timedelta(0)))
        return {
            "model": turn.model.router_model_name,
            "system": [{"type": "text", "text": text, **_mark(turn)} for text in system],
            "messages": _messages([each for each in turn.messages if each["role"] != "system"], candles_mark),
            "tools": tools,
            "tool_choice": {"type": "auto"},
            "temperature": turn.temperature,
            "stream": stream,
            limit_field: turn.answer_tokens_max,
        }

    def completion(self, content: bytes) -> bytes:
        answer = msgspec.json.decode(content, type=_Answer)
        if answer.error:
            return msgspec.json.encode({"error": answer.error})
        if answer.content is None:
            return empty_completion(_counted(answer.usage), answer.model)
        parts, calls = parts_once(answer.content, ("id", "name", "input"), _call_in)
        text = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        return completion_of(
            parts,
            text,
            calls,
            "length" if answer.stop_reason in ("max_tokens", "model_context_window_exceeded") else None,
            _counted(answer.usage),
            answer.model,
            (text or "stop_reason is refusal") if answer.stop_reason == "refusal" else None,
        )


def _call_in(part: Body) -> Body | None:
    return part if part.get("type") == "tool_use" else None


def _counted(usage: Any) -> dict[str, int | None]:
    """Return the tokens of an answer; cache reads and cache writes are reported separately from other input."""
    fresh, read = count_in(usage, "input_tokens"), count_in(usage, "cache_read_input_tokens")
    written = count_in(usage, "cache_creation_input_tokens")
    return {
        "prompt_tokens": None if fresh is None else fresh + (read or 0) + (written or 0),
        "completion_tokens": count_in(usage, "output_tokens"),
        "cached_tokens": read,
        "cache_write_tokens": written,
        "cache_write_1h_tokens": count_in(usage, "cache_creation", "ephemeral_1h_input_tokens"),
    }


def _mark(turn: Turn, changes_after: timedelta = timedelta.max) -> Body:
    """Return the field that marks the end of a prefix; empty if the model's next cycle cannot read it.

    The prefix changes `changes_after` it was written.
    """
    configuration = turn.model.configuration
    ttl = configuration.cache_ttl
    if configuration.cadence >= min(CACHE_LIVES[ttl or "5m"], changes_after):
        return {}
    return {"cache_control": CACHED if ttl is None else {**CACHED, "ttl": ttl}}


def _messages(messages: Sequence[ChatMessage], candles_mark: Body) -> list[Body]:
    """Convert the conversation; one message holds the results of all calls of an answer."""
    turns: list[Body] = []
    for role, group in split_by_role(messages):
        if role == "tool":
            parts = [
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
                for message in group
            ]
            turns.append({"role": "user", "content": parts})
        else:
            parts = [part for message in group for part in _parts(message)]
            if not turns:
                parts = [*_marked(parts[0]["text"], candles_mark), *parts[1:]]
            turns.append({"role": role, "content": parts})
    return turns


def _parts(message: ChatMessage) -> list[Body]:
    """Return the parts of a message; empty text, which the provider sends but refuses, is left out."""
    if not message.get(NATIVE):
        return _text(message["content"])
    return [
        part if call is None else {**part, "id": call["id"], "name": call["function"]["name"], "input": _input(part)}
        for part, call in native_parts(message, _call_in)
        if part.get("type") != "text" or part.get("text")
    ]


def _input(part: Body) -> Body:
    return part["input"] if isinstance(part.get("input"), dict) else {}


def _marked(text: str, mark: Body) -> list[Body]:
    """Split the view into two parts, the first of which ends with the cache mark, if there is one."""
    candles, end, others = text.partition(CANDLES_END)
    if not end or not mark:
        return _text(text)
    return [{"type": "text", "text": candles, **mark}, *_text(end + others)]


def _text(text: str | None) -> list[Body]:
    return [{"type": "text", "text": text}] if text else []
