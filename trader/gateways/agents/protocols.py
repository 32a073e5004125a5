"""Protocols of AI providers: requests, and answers converted to chat completions.

The conversation of an invocation has the messages of chat completions. Another protocol is asked with their
translation, and its answer is translated to a completion, whose message keeps the provider's own parts under `NATIVE`:
they go back in the next step as they came, with reasoning and signatures.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import orjson

from trader.domain.agents.conversation import Message, Turn
from trader.domain.agents.tools import tool_schemas

NATIVE: Final = "native"
"""The key of an assistant's message under which a provider's own parts are kept."""

NOT_EXECUTED: Final = "This call was not executed."
"""The result of a call beyond the limit of an answer: every call must have one."""

Body = dict[str, Any]
"""The JSON body of a request, or of a response."""


class Wire(Protocol):
    """Protocol of an AI provider: converts requests, and answers to chat completions."""

    @property
    def limit_fields(self) -> Sequence[str]:
        """The names of the field that limits the tokens of an answer, the usual one first."""
        ...

    def path(self, model: str) -> str:
        """Return the path of requests under the base address."""
        ...

    def headers(self, secret: str | None) -> Mapping[str, str]:
        """Return the headers of the protocol, with the key."""
        ...

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        """Return the body of a request."""
        ...

    def completion(self, content: bytes) -> bytes:
        """Return an answer as a chat completion. Raises `MsgspecError`."""
        ...

    def joined(self, events: Sequence[bytes]) -> bytes:
        """Return the answer that these streamed events form. Raises `MsgspecError`."""
        ...


class ChatWire:
    """Protocol of OpenAI's chat completions and compatible servers."""

    limit_fields = ("max_tokens", "max_completion_tokens")

    def path(self, model: str) -> str:
        return "/chat/completions"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return bearer(secret)

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        return {
            "model": turn.model.router_model_name,
            "messages": turn.messages,
            "tools": tool_schemas(turn.symbols),
            "tool_choice": "auto",
            "temperature": turn.temperature,
            "stream": stream,
            limit_field: turn.answer_tokens_max,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }

    def completion(self, content: bytes) -> bytes:
        return content

    def joined(self, events: Sequence[bytes]) -> bytes:
        """Join the deltas of a streamed completion. The last event with a usage has the totals of the answer."""
        whole: Body = {"choices": []}
        message: Message = {"role": "assistant"}
        finish: Any = None
        for event in events:
            chunk = msgspec.json.decode(event, type=_Chunk)
            if chunk.error:
                return orjson.dumps({"error": chunk.error})
            whole |= {name: value for name in ("model", "usage") if (value := getattr(chunk, name))}
            for choice in chunk.choices or ():
                _add_delta(message, choice.delta)
                finish = choice.finish_reason or finish
                whole["choices"] = [{"message": message, "finish_reason": finish}]
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return orjson.dumps(whole)


class _ChunkChoice(msgspec.Struct):
    delta: dict[str, Any] = {}
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] | None = None
    usage: Any = None
    model: Any = None
    error: Any = None


class _FunctionDelta(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    function: _FunctionDelta = _FunctionDelta()


def _add_delta(message: Message, delta: Body) -> None:
    """Add a part of a streamed message: texts are appended, calls by their index, everything else is replaced."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for part in msgspec.convert(value or [], list[dict[str, Any]]):
                added = msgspec.convert(part, _CallDelta)
                _add_call(calls.setdefault(added.index, {"function": {}}), part, added.function)
        elif name != "role" and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        elif name != "role" and value is not None:
            message[name] = value


def _add_call(call: Body, part: Body, function: _FunctionDelta) -> None:
    call.update({name: value for name, value in part.items() if name not in ("function", "index") and value})
    call["function"]["name"] = call["function"].get("name") or function.name
    call["function"]["arguments"] = (call["function"].get("arguments") or "") + (function.arguments or "")


def bearer(secret: str | None) -> dict[str, str]:
    """Return the header of a bearer token."""
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


def events_of(content: bytes) -> list[bytes]:
    """Return the data of each event in the body of an event stream, without the closing `[DONE]`."""
    blocks = content.replace(b"\r\n", b"\n").split(b"\n\n")
    data = (
        b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")) for block in blocks
    )
    return [each for each in data if each and each != b"[DONE]"]


def functions(turn: Turn) -> Iterator[tuple[str, str, Body]]:
    """Yield name, description and JSON Schema of every tool of a turn."""
    for tool in tool_schemas(turn.symbols):
        function = tool["function"]
        yield function["name"], function["description"], function["parameters"]


def call_of(call_id: Any, name: Any, arguments: Any) -> Body:
    """Return a tool call in the form of chat completions; `arguments` is JSON text or a JSON value."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def completion_of(
    parts: Sequence[Any],
    text: str,
    calls: Sequence[Body],
    finish: str | None,
    usage: Mapping[str, int | None],
    model: Any,
    refusal: str | None = None,
) -> bytes:
    """Return a chat completion built from the parts of an answer; an unknown figure of `usage` is None."""
    message: Message = {"role": "assistant", "content": text or None, NATIVE: list(parts)}
    if calls:
        message["tool_calls"] = list(calls)
    if refusal:
        message["refusal"] = refusal
    known = {name: value for name, value in usage.items() if value is not None}
    if "cached_tokens" in known:
        known["prompt_cache_hit_tokens"] = known.pop("cached_tokens")
    whole = {"model": model, "choices": [{"message": message, "finish_reason": finish}], "usage": known}
    return msgspec.json.encode(whole)


def split_by_role(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Yield the messages in groups of one role; the results of one answer's calls are together."""
    group: list[Message] = []
    for message in messages:
        if group and group[0]["role"] != message["role"]:
            yield group[0]["role"], group
            group = []
        group.append(message)
    if group:
        yield group[0]["role"], group


def call_ids(message: Message) -> list[str]:
    """Return the ids of the calls of an assistant's message."""
    return [call["id"] for call in message.get("tool_calls", ())]
