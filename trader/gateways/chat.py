"""A thin client of the OpenAI chat-completions protocol with tools.

An attempt has a deadline of its own, from connecting to the last byte. A 429 rests the key and goes on with the next;
401 and 403 take it out; 5xx, timeouts, cut and unusable answers are tried again, on another key when there is one.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import orjson

from trader.domain.conversation import Answer, Message, ToolRequest, Turn, storable
from trader.domain.tool_schemas import TOOL_SCHEMAS
from trader.errors import ProviderError
from trader.gateways.keys import Key, KeyRing
from trader.setting_forms import Secret

ATTEMPT_LIMIT_S = 60.0
RETRIES_MAX = 3
BACKOFF_S = 0.5
"""Before the first retry; doubled for each further one, and spread by half to one and a half times."""

ANSWER_BYTES_MAX = 4 * 1024 * 1024
SAID_BYTES_MAX = 16 * 1024
"""Of an answer that cannot be used, kept for the record."""

CALLS_MAX = 16
"""Tool calls taken from one answer."""

REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_details")
"""Given back as they came: models that think between tool calls lose the thread without them."""

LIMIT_FIELDS: Final = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""The fields that bound an answer's tokens, and what to try for a model that does not take the one."""

OPTIONAL_FIELDS: Final = ("temperature", "tool_choice", *LIMIT_FIELDS)
"""What a request can do without: some models refuse every temperature but their own."""

_log = logging.getLogger("trader.agents")


class ProviderRow(NamedTuple):
    """A provider of the protocol. `limit_field` bounds the tokens of an answer; `extra` goes into every request."""

    name: str
    base_url: str
    limit_field: str = "max_tokens"
    extra: Mapping[str, Any] = {}


class _Transient(ProviderError):
    """This attempt failed; another may not."""


class _KeyUnusable(ProviderError):
    """The key of this attempt rests or is out; the next one may do."""


class _FieldRefused(ProviderError):
    """The model takes no such field in a request; without it the request may do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ChatClient:
    """The client of one provider."""

    is_remote = True

    def __init__(
        self,
        row: ProviderRow,
        secrets: Sequence[Secret],
        *,
        base_url: str | None = None,
        timer: Callable[[], float] = time.monotonic,
        attempt_limit_s: float = ATTEMPT_LIMIT_S,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self.name = row.name
        self._row = row
        self._url = (base_url or row.base_url).rstrip("/") + "/chat/completions"
        self._keys = KeyRing(row.name, secrets, timer)
        self.usage = self._keys.usage
        self._attempt_limit_s = attempt_limit_s
        self._backoff_s = backoff_s
        self._jitter = random.Random()
        self._left_out: dict[str, set[str]] = {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"ChatClient({self.name})"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, turn: Turn) -> Answer:
        """Ask the provider. :raises ProviderError: no usable answer; the message says why, without secrets"""
        body = msgspec.json.encode(self._request(turn))
        began_s = time.monotonic()
        failures, said = 0, ""
        spent: set[Key] = set()  # a key may be free again at once, and is all the same asked to wait until next time
        while True:
            key = self._keys.take(spent)
            if key is None:
                raise _told(self._keys.why_none(), said)
            try:
                reply = await self._attempt(key, body)
            except _KeyUnusable as error:
                spent.add(key)
                said = error.said
            except _FieldRefused as error:
                if not self._leave_out(turn.model.router_model_name, error.field):
                    raise
                body = msgspec.json.encode(self._request(turn))
            except _Transient as error:
                self.usage.attempts["failed"] += 1
                failures += 1
                if failures > RETRIES_MAX:
                    raise _told(f"{error}; gave up after {failures} attempts", error.said) from error
                _log.info("%s (attempt %d, key %s)", error, failures, key.number)
                await asyncio.sleep(self._backoff_s * 2 ** (failures - 1) * self._jitter.uniform(0.5, 1.5))
            else:
                self._keys.worked(key)
                answer = self._read(reply, key, turn, body)
                self.usage.attempts["answered"] += 1
                self.usage.input_tokens += answer.input_tokens
                self.usage.output_tokens += answer.output_tokens
                return msgspec.structs.replace(answer, duration_ms=round((time.monotonic() - began_s) * 1000))

    def _request(self, turn: Turn) -> dict[str, Any]:
        left_out = self._left_out.get(turn.model.router_model_name, set())
        limit_field = self._row.limit_field
        if limit_field in left_out:
            limit_field = LIMIT_FIELDS[limit_field]
        request = {
            "model": turn.model.router_model_name,
            "messages": turn.messages,
            "tools": TOOL_SCHEMAS,
            "tool_choice": "auto",
            "temperature": turn.temperature,
            limit_field: turn.answer_tokens_max,
            "stream": False,
            **self._row.extra,
        }
        return {field: value for field, value in request.items() if field not in left_out}

    def _leave_out(self, model: str, field: str) -> bool:
        """Ask this model without the field from now on. False when it was left out already."""
        left_out = self._left_out.setdefault(model, set())
        if field in left_out:
            return False
        left_out.add(field)
        _log.warning("%s: %s takes no %s; it is asked without it", self.name, model, field)
        return True

    async def _attempt(self, key: Key, body: bytes) -> "_Reply":
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key.secret is not None:
            headers["Authorization"] = f"Bearer {key.secret.reveal()}"
        try:
            async with (
                asyncio.timeout(self._attempt_limit_s),
                self._client().post(self._url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                content = self._keys.scrub(await _bounded(response, self.name))
        except TimeoutError:
            raise _Transient(f"{self.name} did not answer within {self._attempt_limit_s:g} s") from None
        except aiohttp.InvalidURL:
            raise ProviderError(f"the address of {self.name} is not usable") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient(f"{self.name} could not be reached or broke off ({type(error).__name__})") from None
        try:
            if response.status == 200:
                return self._decode(key, response, content)
            raise self._failure(key, response.status, _retry_after_s(response.headers), content)
        except ProviderError as error:
            error.said = content[:SAID_BYTES_MAX].decode(errors="replace")
            raise

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    def _decode(self, key: Key, response: aiohttp.ClientResponse, content: bytes) -> "_Reply":
        if not response.content_type.endswith("json"):
            raise _Transient(f"{self.name} answered 200 with {response.content_type} instead of JSON")
        try:
            reply = msgspec.json.decode(content, type=_Reply)
            for choice in reply.choices:
                choice.message.make_storable()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _Transient(f"{self.name} answered 200 with unusable JSON: {_brief(str(error))}") from None
        if reply.error is not None:
            raise self._failure(key, _status_of(reply.error), None, content)
        if not reply.choices:
            raise _Transient(f"{self.name} answered 200 without choices")
        reply.raw = content.decode(errors="replace")
        return reply

    def _failure(self, key: Key, status: int, retry_after_s: float | None, content: bytes) -> ProviderError:
        """What an answer other than 200 means for the key and for the run."""
        if status in {402, 429}:
            self.usage.attempts["rate_limited"] += 1
            self._keys.rest(key, retry_after_s)
            return _KeyUnusable(f"{self.name} answered {status}")
        if status in {401, 403}:
            self.usage.attempts["refused"] += 1
            self._keys.take_out(key, status)
            return _KeyUnusable(f"{self.name} answered {status}")
        if status >= 500 or status == 408:
            return _Transient(f"{self.name} answered {status}")
        self.usage.attempts["failed"] += 1
        told = f"{self.name} answered {status}: {_brief(content.decode(errors='replace'))}"
        field = _refused_field(content)
        return ProviderError(told) if field is None else _FieldRefused(field, told)

    def _read(self, reply: "_Reply", key: Key, turn: Turn, body: bytes) -> Answer:
        message = reply.choices[0].message
        text = storable(_text(message.content))
        calls = tuple(
            ToolRequest(
                id=storable(call.id) or f"call_{turn.number}_{index}",
                name=storable(call.function.name),
                arguments=storable(_arguments(call.function.arguments)),
            )
            for index, call in enumerate((message.tool_calls or [])[:CALLS_MAX], 1)
        )
        usage = reply.usage if isinstance(reply.usage, dict) else {}
        taken, given = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        return Answer(
            text=text,
            calls=calls,
            message=_message(message, text, calls),
            model=storable(reply.model) or turn.model.router_model_name,
            raw=reply.raw,
            key_number=key.number,
            input_tokens=taken,
            output_tokens=given,
            cost_usd=_cost(usage.get("cost")),
            tokens_spent=taken + given or (len(body) + len(reply.raw)) // 4,
        )


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Said(msgspec.Struct):
    content: Any = None
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


class _Reply(msgspec.Struct):
    """The part of an answer that matters; whatever else a provider adds is kept in `raw`."""

    choices: list[_Choice] = []
    usage: Any = None
    model: str | None = None
    error: Any = None
    raw: str = ""


async def _bounded(response: aiohttp.ClientResponse, name: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES_MAX:
            raise ProviderError(f"{name} answered with more than {ANSWER_BYTES_MAX // 1024 // 1024} MiB")
        parts.append(part)
    return b"".join(parts)


def _told(message: str, said: str) -> ProviderError:
    error = ProviderError(message)
    error.said = said
    return error


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After in either of its forms; a date is read against the answer's own Date."""
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - parsedate_to_datetime(headers["Date"])).total_seconds()
        except (KeyError, TypeError, ValueError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _status_of(error: Any) -> int:
    """The status that an error inside a 200 stands for; gateways put it in `code`. Without one: a server failure."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def _refused_field(content: bytes) -> str | None:
    """The field of the request that the model does not take, when that is what the error says."""
    try:
        error = orjson.loads(content)["error"]
        code, field = error["code"], error["param"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    refused = code in {"unsupported_parameter", "unsupported_value"} and field in OPTIONAL_FIELDS
    return str(field) if refused else None


def _text(content: Any) -> str | None:
    """The words of a message; some models send them in typed parts."""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(parts)
    return content or None if isinstance(content, str) else None


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
                "function": {"name": call.name, "arguments": _valid_json(call.arguments)},
            }
            for call in calls
        ]
    for name in REASONING_FIELDS:
        if (value := getattr(said, name)) is not None:
            message[name] = value
    return message


def _valid_json(arguments: str) -> str:
    """The arguments, or an empty object in place of text that would make the provider refuse its own call."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "{}"
    return arguments


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0


def _cost(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10**6:
        return None
    return Decimal(repr(value))


def _brief(text: str) -> str:
    return storable(" ".join(text.split()))[:300]  # type: ignore[no-any-return]  # a string stays one
