"""OpenAI's Responses API, used statelessly: the next step sends back the model's encrypted reasoning."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trader.agents.domain.conversation import ChatMessage, Turn
from trader.agents.providers.protocols import (
    CUT_OFF,
    NATIVE,
    STREAM_END,
    Body,
    bearer,
    completion_of,
    empty_completion,
    functions,
    native_parts,
    parts_once,
)
from trader.agents.providers.replies import count_in

FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Maps the reason of an incomplete response to the finish reason of a completion."""


class _Response(msgspec.Struct):
    """The fields of a response that are used."""

    output: list[dict[str, Any]] | None = None
    status: Any = None
    incomplete_details: dict[str, Any] | None = None
    usage: Any = None
    model: Any = None
    error: Any = None


class _Event(msgspec.Struct):
    type: str = ""
    response: msgspec.Raw = msgspec.Raw(b"null")
    code: Any = None
    message: Any = None
    error: Any = None


class ResponsesWire:
    """Protocol of OpenAI's Responses API."""

    limit_fields = ("max_output_tokens",)
    charges_cache_writes = False

    def path(self, model: str) -> str:
        return "/responses"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return bearer(secret)

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        tools = [
            {"type": "function", "name": name, "description": description, "parameters": schema, "strict": True}
            for name, description, schema in functions(turn)
        ]
        return {
            "model": turn.model.router_model_name,
            "input": _input(turn.messages),
            "tools": tools,
            "tool_choice": "auto",
            "temperature": turn.temperature,
            "stream": stream,
            "prompt_cache_key": turn.model.id,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            limit_field: turn.answer_tokens_max,
        }

    def completion(self, content: bytes) -> bytes:
        response = msgspec.json.decode(content, type=_Response)
        counted = {
            "prompt_tokens": count_in(response.usage, "input_tokens"),
            "completion_tokens": count_in(response.usage, "output_tokens"),
            "cached_tokens": count_in(response.usage, "input_tokens_details", "cached_tokens"),
        }
        if response.error or response.status in ("failed", "cancelled"):
            error = response.error or {"message": f"the response {response.status}"}
            return msgspec.json.encode({"error": error, "usage": counted})
        if not response.output:
            return empty_completion(counted, response.model)
        items, calls = parts_once(response.output, ("call_id", "name", "arguments"), _call_in)
        parts = [
            part
            for item in items
            if item.get("type") == "message" and isinstance(item.get("content"), list)
            for part in item["content"]
            if isinstance(part, dict)
        ]
        reason = (response.incomplete_details or {}).get("reason")
        return completion_of(
            items,
            "".join(part["text"] for part in parts if isinstance(part.get("text"), str)),
            calls,
            FINISH.get(str(reason), "length") if response.status == "incomplete" else None,
            counted,
            response.model,
            "".join(part["refusal"] for part in parts if isinstance(part.get("refusal"), str)),
        )

    def joined(self, events: Sequence[bytes]) -> bytes:
        """Return the whole response, which the last event contains."""
        for event in reversed([each for each in events if each != STREAM_END]):
            decoded = msgspec.json.decode(event, type=_Event)
            if decoded.type in ("response.completed", "response.incomplete", "response.failed"):
                return bytes(decoded.response)
            if decoded.type == "error":
                error = decoded.error or {"code": decoded.code, "message": decoded.message}
                return msgspec.json.encode({"error": error})
        raise msgspec.ValidationError(CUT_OFF)


def _call_in(item: Body) -> Body | None:
    return item if item.get("type") == "function_call" else None


def _input(messages: Sequence[ChatMessage]) -> list[Body]:
    """Convert the conversation to input items; the model's own answers go back, with calls that can be sent again."""
    items: list[Body] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            items.append(result)
        elif NATIVE in message:
            items += [
                item if call is None else {**item, "call_id": call["id"], **call["function"]}
                for item, call in native_parts(message, _call_in)
            ]
        else:
            role = "developer" if message["role"] == "system" else message["role"]
            items.append({"role": role, "content": message["content"]})
    return items
