"""Gemini's own API (generateContent). Parts are sent back unchanged, with their thought signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec
import orjson

from trader.domain.agents.conversation import Message, Turn
from trader.gateways.agents.protocols import (
    NATIVE,
    NOT_EXECUTED,
    Body,
    call_ids,
    call_of,
    completion_of,
    functions,
    split_by_role,
)

FILTERED: Final = frozenset(
    {"SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"}
)
"""The reasons for which a filter ends an answer."""


class _Content(msgspec.Struct):
    parts: list[dict[str, Any]] = []


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    cached_content_token_count: int | None = None

    @property
    def output_tokens(self) -> int | None:
        """The output tokens with the thought tokens, which Gemini counts apart."""
        if self.candidates_token_count is None and self.thoughts_token_count is None:
            return None
        return (self.candidates_token_count or 0) + (self.thoughts_token_count or 0)


class _Response(msgspec.Struct, rename="camel"):
    """The parts of a response that are used."""

    candidates: list[_Candidate] | None = None
    prompt_feedback: dict[str, Any] | None = None
    usage_metadata: _Usage | None = None
    model_version: Any = None
    error: Any = None


class GeminiWire:
    """Protocol of Gemini's generateContent."""

    limit_fields = ("maxOutputTokens",)

    def path(self, model: str) -> str:
        return f"/models/{quote(model.removeprefix('models/'), safe='')}:generateContent"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return {} if secret is None else {"x-goog-api-key": secret}

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        tools = [
            {"name": name, "description": description, "parametersJsonSchema": schema}
            for name, description, schema in functions(turn)
        ]
        system = [{"text": message["content"]} for message in turn.messages if message["role"] == "system"]
        return {
            "systemInstruction": {"parts": system},
            "contents": _contents([message for message in turn.messages if message["role"] != "system"]),
            "tools": [{"functionDeclarations": tools}],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": {"temperature": turn.temperature, limit_field: turn.answer_tokens_max},
        }

    def completion(self, content: bytes) -> bytes:
        response = msgspec.json.decode(content, type=_Response)
        if response.error:
            return orjson.dumps({"error": response.error})
        usage = response.usage_metadata or _Usage()
        counted = {
            "prompt_tokens": usage.prompt_token_count,
            "completion_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_content_token_count,
        }
        if blocked := (response.prompt_feedback or {}).get("blockReason"):
            return completion_of([], "", [], "content_filter", counted, response.model_version, f"blocked: {blocked}")
        if not response.candidates:
            return b'{"choices": []}'
        candidate = response.candidates[0]
        parts = (candidate.content or _Content()).parts
        requested = [part["functionCall"] for part in parts if isinstance(part.get("functionCall"), dict)]
        calls = [call_of(call.get("id"), call.get("name"), call.get("args")) for call in requested]
        shown = [part["text"] for part in parts if isinstance(part.get("text"), str) and not part.get("thought")]
        finish = "length" if candidate.finish_reason == "MAX_TOKENS" else None
        if candidate.finish_reason in FILTERED:
            finish = "content_filter"
        return completion_of(parts, "".join(shown), calls, finish, counted, response.model_version)

    def joined(self, events: Sequence[bytes]) -> bytes:
        raise msgspec.ValidationError("this protocol is not streamed")


def _contents(messages: Sequence[Message]) -> list[Body]:
    """Convert the conversation. The results of an answer's calls are in call order, each with its call id."""
    contents: list[Body] = []
    asked: Message = {}
    for role, group in split_by_role(messages):
        if role == "tool":
            results = {message["tool_call_id"]: message["content"] for message in group}
            requested = [part["functionCall"] for part in asked[NATIVE] if isinstance(part.get("functionCall"), dict)]
            ids = [*call_ids(asked), *("" for _ in requested)]
            parts = [_result(call, results.get(own)) for call, own in zip(requested, ids, strict=False)]
            contents.append({"role": "user", "parts": parts})
        else:
            asked = group[-1]
            parts = [part for message in group for part in message.get(NATIVE) or [{"text": message["content"]}]]
            contents.append({"role": "model" if role == "assistant" else role, "parts": parts})
    return contents


def _result(call: Body, result: str | None) -> Body:
    own_id = {"id": call["id"]} if "id" in call else {}
    response = {"output": NOT_EXECUTED if result is None else result}
    return {"functionResponse": {**own_id, "name": call.get("name"), "response": response}}
