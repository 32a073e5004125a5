"""Gemini's own API (generateContent). Parts are sent back unchanged, with their thought signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from trader.agents.domain.conversation import ChatMessage, Turn
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

FILTERED: Final = ("SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY")
"""The finish reasons of answers that a filter ended."""


class _Content(msgspec.Struct):
    parts: list[dict[str, Any]] = []


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: Any = None


class _Response(msgspec.Struct, rename="camel"):
    """The fields of a response that are used."""

    candidates: list[_Candidate] | None = None
    prompt_feedback: dict[str, Any] | None = None
    usage_metadata: Any = None
    model_version: Any = None
    error: Any = None


class GeminiWire:
    """Protocol of Gemini's generateContent."""

    limit_fields = ("maxOutputTokens",)
    charges_cache_writes = False

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
            return msgspec.json.encode({"error": response.error})
        counted = _counted(response.usage_metadata)
        if blocked := (response.prompt_feedback or {}).get("blockReason"):
            return completion_of([], "", [], "content_filter", counted, response.model_version, f"blocked: {blocked}")
        if not response.candidates:
            return empty_completion(counted, response.model_version)
        candidate = response.candidates[0]
        parts, calls = parts_once((candidate.content or _Content()).parts, ("id", "name", "args"), _call_in)
        shown = [part["text"] for part in parts if isinstance(part.get("text"), str) and not part.get("thought")]
        finish = "length" if candidate.finish_reason == "MAX_TOKENS" else None
        if candidate.finish_reason in FILTERED:
            finish = "content_filter"
        return completion_of(parts, "".join(shown), calls, finish, counted, response.model_version)


def _counted(usage: Any) -> dict[str, int | None]:
    """Return the tokens of an answer; Gemini counts the tokens of thoughts separately from the rest of the output."""
    said, thought = count_in(usage, "candidatesTokenCount"), count_in(usage, "thoughtsTokenCount")
    return {
        "prompt_tokens": count_in(usage, "promptTokenCount"),
        "completion_tokens": None if said is None and thought is None else (said or 0) + (thought or 0),
        "cached_tokens": count_in(usage, "cachedContentTokenCount"),
    }


def _contents(messages: Sequence[ChatMessage]) -> list[Body]:
    """Convert the conversation. Results of an answer's calls are in call order, each with its call id."""
    contents: list[Body] = []
    for role, group in split_by_role(messages):
        if role == "tool":
            asked = [call for part in contents[-1]["parts"] if (call := _call_in(part)) is not None]
            parts = [_result(call, message["content"]) for call, message in zip(asked, group, strict=True)]
            contents.append({"role": "user", "parts": parts})
        else:
            parts = [part for message in group for part in _parts(message)]
            contents.append({"role": "model" if role == "assistant" else role, "parts": parts})
    return contents


def _call_in(part: Body) -> Body | None:
    call = part.get("functionCall")
    return call if isinstance(call, dict) else None


def _parts(message: ChatMessage) -> list[Body]:
    """Return the parts of a message; empty text without a signature, which the provider refuses, is left out."""
    if not message.get(NATIVE):
        return [{"text": message["content"]}]
    return [
        part if call is None else {**part, "functionCall": _sent_again(part["functionCall"], call)}
        for part, call in native_parts(message, _call_in)
        if part.get("text") != "" or "thoughtSignature" in part
    ]


def _sent_again(requested: Body, call: Body) -> Body:
    own_id = {"id": call["id"]} if "id" in requested else {}
    args: Body = {} if isinstance(requested.get("args", {}), dict) else {"args": {}}
    return {**requested, **own_id, **args, "name": call["function"]["name"]}


def _result(call: Body, result: str) -> Body:
    own_id = {"id": call["id"]} if "id" in call else {}
    return {"functionResponse": {**own_id, "name": call["name"], "response": {"output": result}}}
