"""Client of the OpenAI chat-completions protocol with tools.

Every attempt has its own deadline, from connecting to the last byte. A 429 rests the key and continues with the next;
401 and 403 take the key out of use; 5xx, timeouts, truncated and unusable answers are retried, on another key if any.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.agents.tools import TOOL_SCHEMAS
from trader.errors import ProviderError
from trader.gateways.agents.keys import Key, KeyRing
from trader.gateways.agents.replies import (
    Reply,
    answer_of,
    brief,
    decode_reply,
    is_not_about_key,
    refused_field,
    status_of,
)
from trader.setting_forms import Secret

ATTEMPT_LIMIT_S = 60.0
RETRIES_MAX = 3
BACKOFF_S = 0.5
"""Before the first retry; doubled for each further one, and spread by half to one and a half times."""

ANSWER_BYTES_MAX = 4 * 1024 * 1024
RAW_BYTES_MAX = 16 * 1024
"""Bytes of an unusable answer that are kept for the record."""

PARSE_INLINE_MAX: Final = 64 * 1024
"""Bytes up to which an answer is parsed on the event loop; a longer one may take seconds and is parsed in a thread."""

LIMIT_FIELDS: Final = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""The fields that limit an answer's tokens, each with the alternative for a model that does not accept it."""

OPTIONAL_FIELDS: Final = ("temperature", "tool_choice", *LIMIT_FIELDS)
"""Fields that a request can do without: some models refuse every temperature but their own."""

T = TypeVar("T")

_log = logging.getLogger("trader.agents")


class ProviderRow(NamedTuple):
    """A provider of the protocol. `limit_field` limits the tokens of an answer; `extra` is added to every request."""

    name: str
    base_url: str
    limit_field: str = "max_tokens"
    extra: Mapping[str, Any] = {}


class _Transient(ProviderError):
    """This attempt failed; another may succeed."""


class _KeyUnusable(ProviderError):
    """The key of this attempt rests or is out of use; another key may work."""


class _FieldRefused(ProviderError):
    """The model does not accept a field of the request; without it the request may succeed."""

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

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Ask the provider.

        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        request = self._request(turn)
        body = msgspec.json.encode(request)
        began_s = time.monotonic()
        failures, raw = 0, ""
        spent: set[Key] = set()  # a key whose rest is over at once is still not used again for this answer
        failed: set[Key] = set()
        while True:
            key = self._keys.take(spent | failed) or self._keys.take(spent)
            if key is None:
                raise ProviderError(self._keys.unavailable_reason(), raw)
            try:
                reply = await self._attempt(key, body)
            except _KeyUnusable as error:
                spent.add(key)
                raw = error.raw
            except _FieldRefused as error:
                if error.field not in request:
                    raise
                self._leave_out(turn.model.router_model_name, error.field)
                request = self._request(turn)
                body = msgspec.json.encode(request)
            except _Transient as error:
                self.usage.attempts["failed"] += 1
                failed.add(key)
                failures += 1
                if failures > RETRIES_MAX:
                    raise ProviderError(f"{error}; gave up after {failures} attempts", error.raw) from error
                _log.info("%s (attempt %d, key %s)", error, failures, key.number)
                await asyncio.sleep(self._backoff_s * 2 ** (failures - 1) * self._jitter.uniform(0.5, 1.5))
            else:
                self._keys.accepted(key)
                answer = answer_of(reply, turn, key.number, len(body))
                self.usage.attempts["answered"] += 1
                self.usage.input_tokens += answer.input_tokens
                self.usage.output_tokens += answer.output_tokens
                return msgspec.structs.replace(answer, duration_ms=round((time.monotonic() - began_s) * 1000))

    def _request(self, turn: Turn) -> dict[str, Any]:
        left_out = self._left_out.get(turn.model.router_model_name, set())
        own = turn.model.configuration.request
        limit_field = next((field for field in LIMIT_FIELDS if own.get(field)), self._row.limit_field)
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
            **own,
        }
        dropped = left_out | {field for field, value in own.items() if value is None}
        return {field: value for field, value in request.items() if field not in dropped}

    def _leave_out(self, model: str, field: str) -> None:
        """Leave the field out of this model's requests from now on. Several requests under way may ask for it."""
        left_out = self._left_out.setdefault(model, set())
        if field not in left_out:
            left_out.add(field)
            _log.warning("%s: %s does not accept %s; its requests leave it out", self.name, model, field)

    async def _attempt(self, key: Key, body: bytes) -> Reply:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key.secret is not None:
            headers["Authorization"] = f"Bearer {key.secret.reveal()}"
        try:
            async with (
                asyncio.timeout(self._attempt_limit_s),
                self._client().post(self._url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                content = await _read(self._keys.scrub, await _bounded(response, self.name))
        except TimeoutError:
            raise _Transient(f"{self.name} did not answer within {self._attempt_limit_s:g} s") from None
        except aiohttp.InvalidURL:
            raise ProviderError(f"the address of {self.name} is not usable") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient(f"{self.name} could not be reached or broke off ({type(error).__name__})") from None
        try:
            if response.status == 200:
                return await self._decode(key, response, content)
            raise self._failure(key, response.status, _retry_after_s(response.headers), content)
        except ProviderError as error:
            error.raw = content[:RAW_BYTES_MAX].decode(errors="replace")
            raise

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def _decode(self, key: Key, response: aiohttp.ClientResponse, content: bytes) -> Reply:
        if not response.content_type.endswith("json"):
            raise _Transient(f"{self.name} answered 200 with {response.content_type} instead of JSON")
        try:
            reply = await _read(decode_reply, content)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _Transient(f"{self.name} answered 200 with unusable JSON: {brief(str(error))}") from None
        if reply.failure:
            raise self._failure(key, status_of(reply.failure), None, content)
        if not reply.choices:
            raise _Transient(f"{self.name} answered 200 without choices")
        return reply

    def _failure(self, key: Key, status: int, retry_after_s: float | None, content: bytes) -> ProviderError:
        """Return the error of an answer other than 200, after its consequences for the key."""
        if status in {402, 429}:
            self.usage.attempts["rate_limited"] += 1
            self._keys.rest(key, retry_after_s)
            return _KeyUnusable(f"{self.name} answered {status}")
        if status in {401, 403} and not is_not_about_key(content):
            self.usage.attempts["refused"] += 1
            self._keys.take_out(key, status)
            return _KeyUnusable(f"{self.name} answered {status}")
        if status >= 500 or status == 408:
            return _Transient(f"{self.name} answered {status}")
        self.usage.attempts["failed"] += 1
        message = f"{self.name} answered {status}: {brief(content.decode(errors='replace'))}"
        field = refused_field(content)
        return _FieldRefused(field, message) if field in OPTIONAL_FIELDS else ProviderError(message)


async def _bounded(response: aiohttp.ClientResponse, name: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES_MAX:
            raise ProviderError(f"{name} answered with more than {ANSWER_BYTES_MAX // 1024 // 1024} MiB")
        parts.append(part)
    return b"".join(parts)


async def _read(read: Callable[[bytes], T], content: bytes) -> T:
    """Apply `read` to an answer, in a thread when it is long."""
    return read(content) if len(content) <= PARSE_INLINE_MAX else await asyncio.to_thread(read, content)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After in either of its forms; a date is relative to the answer's own Date."""
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
