"""Anthropic's Messages API.

Cache marks end the stable prefixes: the tools with the system message, which never change, and the candles of the view,
which change when one closes. A prefix below a model's minimum is harmlessly not cached.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from trader.agents.domain.conversation import ChatMessage, Turn
from trader.agents.domain.prompt import CANDLES_END
from trader.agents.providers.protocols import (
    NATIVE,
    Body,
    call_of,
    completion_of,
    functions,
    native_parts,
    split_by_role,
)

VERSION: Final = "2023-06-01"
"""The API version that requests specify."""

CACHED: Final = {"type": "ephemeral"}


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """All input tokens: cache reads and cache writes are reported separately from the rest."""
        if self.input_tokens is None:
            return None
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)


class _Answer(msgspec.Struct):
    """The fields of an answer that are used."""

    content: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None
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
        return {
            "model": turn.model.router_model_name,
            "system": [{"type": "text", "text": text, "cache_control": CACHED} for text in system],
            "messages": _messages([message for message in turn.messages if message["role"] != "system"]),
            "tools": tools,
            "tool_choice": {"type": "auto"},
            "temperature": turn.temperature,
            "stream": stream,
            limit_field: turn.answer_tokens_max,
        }

    def completion(self, content: bytes) -> bytes:
        answer = msgspec.json.decode(content, type=_Answer)
        if answer.error:
            return orjson.dumps({"error": answer.error})
        if answer.content is None:
            return b'{"choices": []}'
        text = "".join(part["text"] for part in answer.content if isinstance(part.get("text"), str))
        calls = [
            call_of(part.get("id"), part.get("name"), part.get("input"))
            for part in answer.content
            if part.get("type") == "tool_use"
        ]
        usage = answer.usage or _Usage()
        return completion_of(
            answer.content,
            text,
            calls,
            "length" if answer.stop_reason in ("max_tokens", "model_context_window_exceeded") else None,
            {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.output_tokens,
                "cached_tokens": usage.cache_read_input_tokens,
                "cache_write_tokens": usage.cache_creation_input_tokens,
            },
            answer.model,
            (text or "stop_reason is refusal") if answer.stop_reason == "refusal" else None,
        )


def _messages(messages: Sequence[ChatMessage]) -> list[Body]:
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
                parts = [*_marked(parts[0]["text"]), *parts[1:]]
            turns.append({"role": role, "content": parts})
    return turns


def _parts(message: ChatMessage) -> list[Body]:
    """Return the parts of a message; empty text, which the provider sends but refuses, is left out."""
    if not message.get(NATIVE):
        return _text(message["content"])
    return [
        part if call is None else {**part, "id": call["id"], "name": call["function"]["name"], "input": _input(part)}
        for part, call in native_parts(message, lambda part: part.get("type") == "tool_use")
        if part.get("type") != "text" or part.get("text")
    ]


def _input(part: Body) -> Body:
    return part["input"] if isinstance(part.get("input"), dict) else {}


def _marked(text: str) -> list[Body]:
    """Split the view into two parts, the first of which ends with a cache mark."""
    candles, end, others = text.partition(CANDLES_END)
    if not end:
        return _text(text)
    return [{"type": "text", "text": candles, "cache_control": CACHED}, *_text(end + others)]


def _text(text: str | None) -> list[Body]:
    return [{"type": "text", "text": text}] if text else []
