"""Protocols of AI providers: requests, and answers converted to chat completions.

The conversation of an invocation consists of chat completion messages. Other protocols translate these, and translate
the answer to a completion whose message keeps the provider's own parts under `NATIVE`: the next step sends them back
unchanged, with reasoning and signatures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import orjson

from trader.agents.domain.conversation import ChatMessage, Turn, value_in
from trader.agents.domain.tools import calls_schema, calls_text, tool_schemas

NATIVE: Final = "native"
"""The key of an assistant message that holds the provider's own parts."""

STREAM_END: Final = b"[DONE]"
"""The data of the event that ends a streamed chat completion."""

CUT_OFF: Final = "the stream ended before the answer did"

CALLS_OPEN_MAX: Final = 64
"""A streamed piece may continue one of so many last calls."""

JOINED_FIELDS: Final = frozenset({"data", "summary", "text", "thinking"})
"""The fields of an answer's part that arrive in pieces."""

THINKING_BUDGETS: Final = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("generationConfig", "thinkingConfig", "thinkingBudget"),
)
"""Where requests of Anthropic, OpenRouter and Gemini limit the tokens that a model thinks before it answers."""

THINKING_TOKENS_MIN: Final = 1024
"""The smallest thinking budget that providers accept."""

ANSWER_TOKENS_MIN: Final = 256
"""The fewest tokens for an answer, not counting a thinking budget."""

Body = dict[str, Any]
"""The JSON body of a request or response."""


class ProviderProtocol(Protocol):
    """Protocol of an AI provider: converts requests to its format, and its answers to chat completions."""

    @property
    def limit_fields(self) -> Sequence[str]:
        """The possible names of the field that limits an answer's tokens, the usual one first."""
        ...

    @property
    def charges_cache_writes(self) -> bool:
        """Whether input that is written to the provider's cache costs more than other input."""
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
        """Return an answer as a chat completion. Raise `MsgspecError`."""
        ...


@runtime_checkable
class StreamedProtocol(ProviderProtocol, Protocol):
    """A protocol whose answers can be streamed."""

    def joined(self, events: Sequence[bytes]) -> bytes:
        """Return the answer that these streamed events form. Raise `MsgspecError`, also if its end is missing."""
        ...


class ChatWire:
    """Protocol of OpenAI's chat completions and compatible servers."""

    limit_fields = ("max_tokens", "max_completion_tokens")
    charges_cache_writes = False

    def path(self, model: str) -> str:
        return "/chat/completions"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return bearer(secret)

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> Body:
        configuration, (system, *others) = turn.model.configuration, turn.messages
        tools = tool_schemas(turn.symbols, configuration.tools_off)
        asked: Body = {"messages": turn.messages, "tools": tools, "tool_choice": "auto"}
        if configuration.calls_as_json:
            schema = {"name": "calls", "strict": True, "schema": calls_schema(tools)}
            told = {**system, "content": f"{system['content']}\n\n{calls_text(tools)}"}
            asked = {
                "messages": [told, *others],
                "response_format": {"type": "json_schema", "json_schema": schema},
            }
        return {
            "model": turn.model.router_model_name,
            **asked,
            "temperature": turn.temperature,
            "stream": stream,
            limit_field: turn.answer_tokens_max,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }

    def completion(self, content: bytes) -> bytes:
        return content

    def joined(self, events: Sequence[bytes]) -> bytes:
        """Join the deltas of a streamed completion. The last event with `usage` has the answer's totals."""
        whole: Body = {"choices": []}
        message: ChatMessage = {"role": "assistant"}
        finish: Any = None
        for event in events:
            if event == STREAM_END:
                finish = finish or "stop"
                continue
            chunk = msgspec.json.decode(event, type=_Chunk)
            whole |= {name: value for name in ("model", "usage") if (value := getattr(chunk, name))}
            if chunk.error:
                return msgspec.json.encode({**whole, "error": chunk.error})
            for choice in chunk.choices or ():
                _add_delta(message, choice.delta)
                finish = choice.finish_reason or finish
                whole["choices"] = [{"message": message, "finish_reason": finish}]
        if finish is None:
            raise msgspec.ValidationError(CUT_OFF)
        if calls := message.get("tool_calls"):
            places = [call.pop("index") for call in calls]
            if None not in places and len(set(places)) == len(places):
                message["tool_calls"] = [call for _, call in sorted(zip(places, calls, strict=True), key=itemgetter(0))]
        return msgspec.json.encode(whole)


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
    arguments: str | dict[str, Any] | None = None


class _CallDelta(msgspec.Struct):
    id: Any = None
    index: Any = None
    function: _FunctionDelta | None = None


def _add_delta(message: ChatMessage, delta: Body) -> None:
    """Add a delta to a streamed message: append text and parts, merge calls, replace everything else."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in msgspec.convert(value or [], list[dict[str, Any]]):
                _add_call(calls, part, msgspec.convert(part, _CallDelta))
        elif name != "role" and value is not None:
            message[name] = _joined(message.get(name), value)


def _joined(sent: Any, added: Any) -> Any:
    """Return a streamed value with its next piece: text, a list of parts, or text that parts preceded or follow."""
    if isinstance(added, str) and isinstance(sent, str | None):
        return (sent or "") + added
    if not isinstance(added, list) and not isinstance(sent, list):
        return added
    parts: list[Any] = _parts(sent)
    for part in _parts(added):
        earlier = _place_of_continued(parts, part)
        if earlier is None:
            parts.append(part)
        else:
            parts[earlier] = _joined_part(parts[earlier], part)
    return parts


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(value)
    return [{"type": "text", "text": value}] if value else []


def _place_of_continued(parts: Sequence[Any], added: Any) -> int | None:
    """Return the place of the part that a piece continues: that of its index and type, or without one the last."""
    form, index = value_in(added, "type"), value_in(added, "index")
    same = [place for place, each in enumerate(parts) if isinstance(each, dict) and each.get("type") == form]
    if index is not None:
        return next((place for place in same if parts[place].get("index") == index), None)
    return same[-1] if form in JOINED_FIELDS and same[-1:] == [len(parts) - 1] else None


def _joined_part(sent: Body, added: Body) -> Body:
    known = {name: value for name, value in added.items() if value is not None}
    return sent | {
        name: _joined(sent.get(name), known[name]) if name in JOINED_FIELDS else known[name] for name in known
    }


def _add_call(calls: list[Body], part: Body, added: _CallDelta) -> None:
    """Add a delta to the call that it continues, or begin a call: servers number calls wrongly, or not at all.

    A known id continues its call, and a new id begins one. Without an id, a delta continues the last call, or the last
    one at its index if several are sent at a time. A whole call after a whole call is another one in any case.
    """
    index = int(added.index) if str(added.index).isdecimal() else None
    function = added.function or _FunctionDelta()
    text = function.arguments
    text = text if isinstance(text, str | None) else msgspec.json.encode(text).decode()
    if isinstance(added.id, str | int) and added.id != "":
        continued = [call for call in calls[-CALLS_OPEN_MAX:] if call.get("id") == added.id]
    else:
        at_index = [call for call in calls[-CALLS_OPEN_MAX:] if call["index"] == index is not None]
        is_first = function.name and index is not None and calls and calls[-1]["index"] is not None
        continued = at_index or ([] if is_first else calls)
    is_whole = continued and (text or "").lstrip().startswith("{") and is_json(continued[-1]["function"]["arguments"])
    if is_whole and continued[-1]["function"]["arguments"] == "{}" and not function.name:
        continued[-1]["function"]["arguments"] = ""  # it only stood for arguments that follow
    elif not continued or is_whole:
        continued = [{"function": {"name": None, "arguments": ""}, "index": index}]
        calls += continued
    call = continued[-1]
    call.update({name: value for name, value in part.items() if name not in ("function", "index") and value})
    call["function"]["name"] = call["function"]["name"] or function.name
    call["function"]["arguments"] += text or ""


def thinking_budget(request: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a request lets the model think; None if it does not limit them."""
    for path in THINKING_BUDGETS:
        value = value_in(request, *path)
        if isinstance(value, int) and value > 0:
            return value
    return None


def fit_thinking(request: Body, limit: int) -> Body:
    """Return the request with a thinking budget that leaves room for an answer within `limit` tokens.

    Thinking counts toward the limit, and providers refuse a budget that is not below it.
    """
    most = max(limit - ANSWER_TOKENS_MIN, THINKING_TOKENS_MIN)
    for path in THINKING_BUDGETS:
        request = _capped(request, path, most)
    return request


def _capped(value: Any, path: Sequence[str], most: int) -> Any:
    """Return the JSON value with the number at `path` lowered to `most`; unchanged if there is none."""
    if not path:
        return min(value, most) if isinstance(value, int) else value
    name, *rest = path
    if not isinstance(value, Mapping) or name not in value:
        return value
    return {**value, name: _capped(value[name], rest, most)}


def bearer(secret: str | None) -> dict[str, str]:
    """Return the header with a bearer token."""
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


def events_of(content: bytes) -> list[bytes]:
    """Return the data of each event in the body of an event stream; an incomplete last event is ignored."""
    *events, last = (
        b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        for block in content.replace(b"\r\n", b"\n").split(b"\n\n")
    )
    return [each for each in events if each] + ([last] if last == STREAM_END or is_json(last) else [])


def is_json(content: bytes | str) -> bool:
    """Return whether a text is JSON."""
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def functions(turn: Turn) -> Iterator[tuple[str, str, Body]]:
    """Yield name, description and JSON Schema of every tool of a turn."""
    for tool in tool_schemas(turn.symbols, turn.model.configuration.tools_off):
        function = tool["function"]
        yield function["name"], function["description"], function["parameters"]


def call_of(call_id: Any, name: Any, arguments: Any) -> Body:
    """Return a tool call in chat completion form; `arguments` is JSON text or a JSON value."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parts_once(
    parts: Sequence[Body], names: Sequence[str], call_in: Callable[[Body], Body | None]
) -> tuple[list[Body], list[Body]]:
    """Return the parts of an answer, and their calls, without those that a gateway sent twice: id and all.

    `call_in` returns the call of a part, whose fields have these names, and None for another part.
    """
    seen: set[Any] = set()
    once, calls = [], []
    for place, part in enumerate(parts):
        call = call_in(part)
        call_id, name, arguments = (None, None, None) if call is None else map(call.get, names)
        key = (call_id, str(name), _argument_key(arguments)) if isinstance(call_id, str) and call_id else place
        if key not in seen:
            once.append(part)
            calls += [] if call is None else [call_of(call_id, name, arguments)]
        seen.add(key)
    return once, calls


def _argument_key(arguments: Any) -> bytes:
    with suppress(TypeError, ValueError):
        value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return str(arguments).encode()


def empty_completion(usage: Mapping[str, int | None], model: Any) -> bytes:
    """Return a chat completion without an answer; unknown figures of `usage` are None."""
    return msgspec.json.encode({"model": model, "choices": [], "usage": _known(usage)})


def completion_of(
    parts: Sequence[Any],
    text: str,
    calls: Sequence[Body],
    finish: str | None,
    usage: Mapping[str, int | None],
    model: Any,
    refusal: str | None = None,
) -> bytes:
    """Return a chat completion built from the parts of an answer; unknown figures of `usage` are None."""
    message: ChatMessage = {"role": "assistant", "content": text or None, NATIVE: list(parts)}
    if calls:
        message["tool_calls"] = list(calls)
    if refusal:
        message["refusal"] = refusal
    whole = {"model": model, "choices": [{"message": message, "finish_reason": finish}], "usage": _known(usage)}
    return msgspec.json.encode(whole)


def _known(usage: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in usage.items() if value is not None}


def split_by_role(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, list[ChatMessage]]]:
    """Yield the messages grouped by role; the results of one answer's calls form one group."""
    group: list[ChatMessage] = []
    for message in messages:
        if group and group[0]["role"] != message["role"]:
            yield group[0]["role"], group
            group = []
        group.append(message)
    if group:
        yield group[0]["role"], group


def native_parts(message: ChatMessage, call_in: Callable[[Body], Body | None]) -> Iterator[tuple[Body, Body | None]]:
    """Yield the provider's own parts of an assistant message, those with a call (`call_in`) with the completion's.

    The completion's calls have valid names and arguments and unique ids. Calls beyond the limit of an answer, which are
    not executed, are omitted.
    """
    calls = iter(message.get("tool_calls", ()))
    for part in message[NATIVE]:
        if call_in(part) is None:
            yield part, None
        elif (call := next(calls, None)) is not None:
            yield part, call
