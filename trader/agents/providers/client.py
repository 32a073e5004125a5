"""Client of an AI provider, for every protocol.

Every attempt has its own deadline, from connecting to the last byte. A refusal puts its scope (`keys.py`) into
cooldown, and the next key is tried; when none is free, the client waits for a cooldown to end as long as the turn
allows. Server errors and broken or unusable answers are retried, on another key if there is one; a timeout is not,
since the model's view is stale by then.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import RESERVED_REQUEST_FIELDS, Model, ProviderDefinition
from trader.agents.domain.view import Shown
from trader.agents.providers.attempts import (
    ANSWER_BYTES_MAX,
    AttemptTotals,
    FieldRefused,
    KeyUnusable,
    Transient,
    apply,
    is_affordable,
    most_tokens,
    read_bounded,
    retry_after_of,
    sum_of,
)
from trader.agents.providers.batches import Answered, Batches, call_provider
from trader.agents.providers.keys import (
    ANSWERED_RECENTLY_S,
    KEY_REFUSED,
    MODEL_REFUSED,
    OUT_OF_CREDIT,
    OVERLOADED,
    RATE_LIMITED,
    UNAFFORDABLE,
    Key,
    KeyRefusal,
    KeyRing,
)
from trader.agents.providers.protocols import StreamedProtocol, events_of, fit_thinking
from trader.agents.providers.provider import PROTOCOLS
from trader.agents.providers.refusals import (
    About,
    brief,
    context_limit,
    is_loading,
    refused_field,
    status_of,
    subject_of,
    words_of,
)
from trader.agents.providers.replies import ChatCompletion, answer_of, context_in, decode_reply
from trader.agents.variants import VARIANTS
from trader.core.errors import ContextExceeded, ProviderError, ProviderTimeout
from trader.settings.checks import is_private
from trader.settings.forms import Secret

ATTEMPT_LIMIT_S = 120.0
RETRIES_MAX = 3
FAILED_TURNS_MAX: Final = 3
"""This many consecutive failed turns are a provider outage, unless a model's last turn was answered recently."""

LOADING_S: Final = 5.0
"""How often a server is asked again that is loading its model."""

CONTEXT_PATHS: Final = ("/props", "/api/v0/models", "/api/ps")
CONTEXT_WAIT_S: Final = 2.0
"""How long a server is asked for the length of its contexts."""

LEFT_OUT_S: Final = 3600.0
"""A field that a provider refused is left out of requests for this long, then sent again."""

BACKOFF_S = 0.5
"""Delay before the first retry; doubles with each retry, with jitter from half to one and a half times."""

RAW_BYTES_MAX = 16 * 1024
"""Maximum bytes of an unusable answer kept for the record."""

REASON_MAX: Final = 150
"""Maximum characters of a refusal's message in the reason of a failed invocation."""

COOLDOWN_REFUSALS: Final[Mapping[About, KeyRefusal]] = {
    "key": KEY_REFUSED,
    "credit": OUT_OF_CREDIT,
    "size": UNAFFORDABLE,
    "rate": RATE_LIMITED,
    "model": MODEL_REFUSED,
}
"""The refusals that put a key into cooldown, by subject."""

CONTEXT_STATUSES: Final = frozenset({400, 413, 422, 500, 502})
"""Statuses of refusals because a request exceeds the model's context; 502 stands for errors without a status."""

WAIT_STEP_S: Final = 1.0
"""Minimum wait for a cooldown within one answer; doubles with each wait: some servers request 0 s forever."""

TIMER_S: Final = 0.01
"""Added to a wait: a timer may fire slightly early, before the cooldown is over."""

_log = logging.getLogger("trader.agents")


class ProviderAccess(msgspec.Struct, frozen=True):
    """Keys and address of a provider from the settings; without `base_url`, the definition's address applies.

    For error messages, `set_by` says where the address is configured and `key_variable` where the keys are.
    """

    secrets: Sequence[Secret]
    base_url: str | None = None
    set_by: str = "base_url of its [[providers]]"
    key_variable: str | None = None


class AttemptTiming(msgspec.Struct, frozen=True):
    """Time limit of one attempt and delay before the second, in seconds; `timer` and `sleep` use real time."""

    limit_s: float = ATTEMPT_LIMIT_S
    backoff_s: float = BACKOFF_S
    timer: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


DEFAULT_TIMING: Final = AttemptTiming()


class _Attempt(NamedTuple):
    """One request with a key. `fields` are its optional fields, `most` the most tokens of input and output."""

    turn: Turn
    key: Key
    body: bytes
    fields: Collection[str]
    most: tuple[int, int]


class ProviderClient:
    """The client of one provider. `slots` are those of its server, if it states them: more requests wait.

    With `batches`, requests are sent together, and answered within a day.
    """

    is_remote = True

    def __init__(
        self,
        definition: ProviderDefinition,
        access: ProviderAccess,
        timing: AttemptTiming = DEFAULT_TIMING,
        slots: asyncio.Semaphore | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.name = definition.name
        self.definition = definition
        self._wire = PROTOCOLS[definition.protocol]
        self._base_url = (access.base_url or definition.base_url).rstrip("/")
        self._host = "/".join(self._base_url.split("/")[:3])  # the rest may contain a key
        self._place = f"{self._host} ({access.set_by})"
        self._keys = KeyRing(definition.name, access.secrets, timing.timer, access.key_variable)
        self.usage = self._keys.usage
        self._secret = access.secrets[0].reveal() if access.secrets else None
        self._timing = timing
        self._slots: AbstractAsyncContextManager[object] = nullcontext() if slots is None else slots
        self._batches = batches
        self._jitter = random.Random()
        self._left_out: dict[tuple[str, str], dict[str, float]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._failed_turns = 0
        self._last_failure = ""
        self._answered_at_s: dict[str, float] = {}
        self._contexts: dict[str, tuple[int | None, float]] = {}

    def __repr__(self) -> str:
        return f"ProviderClient({self.name})"

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        if self._session is not None:
            await self._session.close()

    def outage(self) -> str | None:
        """Return why no model can be called now: every key is in cooldown, or the turns of all models fail.

        There is no outage while any model gets answers, even if others fail.
        """
        if (reason := self._keys.outage()) is not None:
            return reason
        since_s = self._timing.timer() - ANSWERED_RECENTLY_S
        is_answering = any(at_s > since_s for at_s in self._answered_at_s.values())
        if self._failed_turns < FAILED_TURNS_MAX or is_answering:
            return None
        return f"the last {self._failed_turns} turns failed: {self._last_failure}"

    def keys_in_cooldown(self) -> dict[str, str]:
        """Return the reasons of the keys that are refused and answer no model, by key name."""
        return self._keys.in_cooldown()

    def left_out(self, model: Model) -> Collection[str]:
        """Return the fields omitted from this model's requests because the provider refused them."""
        return set(self._left_out.get((model.id, model.router_model_name), ()))

    def _omitted(self, model: Model) -> Collection[str]:
        """Return the fields to omit now: a field that was refused an hour ago is sent again."""
        left_out = self._left_out.get((model.id, model.router_model_name), {})
        return {field for field, until_s in left_out.items() if until_s > self._timing.timer()}

    async def shown(self, model: Model) -> Shown:
        """Return what the variant shows, and the context: as configured, or as a server on a private network tells."""
        context = model.configuration.known_context
        if context is None and is_private(urlsplit(self._base_url).hostname or ""):
            name, now_s = model.router_model_name, self._timing.timer()
            if self._contexts.get(name, (None, 0.0))[1] <= now_s:
                self._contexts[name] = (None, now_s + LEFT_OUT_S)  # others need not ask meanwhile
                self._contexts[name] = (await self._asked_context(name), now_s + LEFT_OUT_S)
            context = self._contexts[name][0]
        return Shown(VARIANTS[model.variant].intervals, context_tokens=context)

    async def _asked_context(self, name: str) -> int | None:
        """Return the context that vLLM, llama.cpp, LM Studio or Ollama states for a model; None if none does."""
        headers, get = self._wire.headers(self._secret), partial(self._client().get, allow_redirects=False)
        for url in (f"{self._base_url}/models", *(self._host + path for path in CONTEXT_PATHS)):
            with suppress(TimeoutError, aiohttp.ClientError, OSError, ProviderError):
                async with asyncio.timeout(CONTEXT_WAIT_S), get(url, headers=headers) as response:
                    content = await read_bounded(response, ANSWER_BYTES_MAX)
                if response.status == 200 and (found := context_in(content, name)) is not None:
                    return found
        return None

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Ask the provider.

        :raises ProviderTimeout: the provider did not answer in time
        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        began_s = time.monotonic()
        progress = AttemptTotals()
        try:
            answer = await self._answer(turn, progress)
        except ProviderError as error:
            error.unmetered_attempts += progress.unmetered
            error.unreported = sum_of(error.unreported, progress.unreported)
            self.usage.unmetered_attempts += error.unmetered_attempts
            self._failed_turns += 1
            self._last_failure = str(error)
            self._answered_at_s.pop(turn.model.id, None)
            raise
        self._failed_turns = 0
        self._answered_at_s[turn.model.id] = self._timing.timer()
        self.usage.attempts["answered"] += 1
        self.usage.input_tokens += answer.input_tokens or 0
        self.usage.output_tokens += answer.output_tokens or 0
        self.usage.cached_tokens += answer.cached_tokens or 0
        unmetered = answer.unmetered_attempts + progress.unmetered
        self.usage.unmetered_attempts += unmetered
        return msgspec.structs.replace(
            answer,
            unmetered_attempts=unmetered,
            unreported=sum_of(answer.unreported, progress.unreported),
            tokens_spent=answer.tokens_spent + sum(progress.unreported),
            duration_ms=round((time.monotonic() - began_s) * 1000),
            waited_s=progress.waited_s,
        )

    async def _answer(self, turn: Turn, progress: AttemptTotals) -> ModelAnswer:
        model = turn.model
        while True:
            key = self._keys.take(model, progress.spent | progress.failed) or self._keys.take(model, progress.spent)
            if key is None:
                await self._wait_for_key(turn, progress)
                continue
            request = self._request(turn)
            body = msgspec.json.encode(request)
            attempt = _Attempt(turn, key, body, request.keys() - set(RESERVED_REQUEST_FIELDS), most_tokens(turn, body))
            try:
                reply = await self._attempt(attempt)
            except KeyUnusable as error:
                progress.spent.add(key)
                progress.add(error)
            except FieldRefused as error:
                if not self._leave_out(model, error.field):
                    self._keys.failed(key, model)
                    raise
            except ProviderError as error:
                self._keys.failed(key, model)
                if not isinstance(error, Transient):
                    raise
                progress.failed.add(key)
                progress.failures += 1
                progress.add(error)
                if progress.failures > RETRIES_MAX or not is_affordable(turn, progress, body):
                    raise ProviderError(f"{error}; gave up after {progress.failures} attempts", error.raw) from error
                _log.info("%s (attempt %d, key %s)", error, progress.failures, key.number)
                backoff_s = self._timing.backoff_s * 2 ** (progress.failures - 1)
                await self._timing.sleep(backoff_s * self._jitter.uniform(0.5, 1.5))
            else:
                self._keys.accepted(key, model)
                once_refused = self._left_out.get((model.id, model.router_model_name), {})
                for field in once_refused.keys() & request.keys():
                    del once_refused[field]
                return answer_of(reply, turn, key.number, len(body))

    async def _wait_for_key(self, turn: Turn, progress: AttemptTotals) -> None:
        """Wait until a key is free again.

        :raises ProviderError: the wait would exceed the turn's limit
        """
        free_s, left_s = self._keys.free_in_s(turn.model), turn.wait_max_s - progress.waited_s
        if left_s <= 0 or free_s > left_s:
            raise ProviderError(self._keys.unavailable_reason(turn.model), progress.raw)
        wait_s = min(left_s, max(free_s + TIMER_S, WAIT_STEP_S * 2**progress.waits))
        _log.info("%s; waiting %.1f s", self._keys.unavailable_reason(turn.model), wait_s)
        progress.waits += 1
        progress.waited_s += wait_s
        progress.spent.clear()
        await self._timing.sleep(wait_s)

    def _request(self, turn: Turn) -> dict[str, Any]:
        """Return the body of a request: the fields of the protocol, then of the provider, then of the model."""
        left_out, fields = self._omitted(turn.model), (self.definition.request, turn.model.configuration.request)
        names = self._wire.limit_fields
        own_limits = [name for own in reversed(fields) for name in own if name in names and own[name]]
        limits = [*own_limits, *filter(None, [self.definition.limit_field]), *names]
        limit_field = next((name for name in limits if name not in left_out), names[0])
        request = self._wire.request(turn, limit_field, stream=self.definition.stream)
        for own in fields:
            for name, value in own.items():
                present = request.get(name)
                if isinstance(value, Mapping) and isinstance(present, Mapping):
                    limit = {limit_field: turn.answer_tokens_max} if limit_field in present else {}
                    request[name] = {**present, **value, **limit}
                elif name != limit_field or value is None:
                    request[name] = value
        request = {name: value for name, value in request.items() if value is not None and name not in left_out}
        return fit_thinking(request, turn.answer_tokens_max)

    def _leave_out(self, model: Model, field: str) -> bool:
        """Omit the field from this model's requests for an hour. Concurrent requests may each report it.

        Return False for the last name of the limit of the answer's tokens, which is never left out.
        """
        names = self._wire.limit_fields
        if field in names and {*names} <= {field, *self._omitted(model)}:
            return False
        left_out = self._left_out.setdefault((model.id, model.router_model_name), {})
        if field not in left_out:
            accepts = f"{model.router_model_name} does not accept {field}"
            _log.warning("%s: %s; requests for %s omit it for an hour", self.name, accepts, model.id)
        left_out[field] = self._timing.timer() + LEFT_OUT_S
        return True

    async def _attempt(self, attempt: _Attempt) -> ChatCompletion:
        model, key, most = attempt.turn.model, attempt.key, attempt.most
        accepted = "text/event-stream" if self.definition.stream else "application/json"
        headers = {"Content-Type": "application/json", "Accept": accepted, **self.definition.headers}
        headers |= self._wire.headers(None if key.secret is None else key.secret.reveal())
        url = self._base_url + self._wire.path(model.router_model_name)
        limit_s = model.configuration.attempt_timeout_s or self._timing.limit_s
        try:
            answered = await self._send(url, attempt, headers, limit_s)
            content = answered.content
            if len(content) > ANSWER_BYTES_MAX:
                too_long = f"{self.name} answered with more than {ANSWER_BYTES_MAX // 1024 // 1024} MiB"
                raise ProviderError(too_long, unmetered_attempts=1, unreported=most)
            content = await apply(self._keys.scrub, content)
        except TimeoutError:
            self.usage.attempts["timed_out"] += 1
            late = f"{self.name} did not answer within {limit_s:g} s at {self._place}"
            raise ProviderTimeout(late, unmetered_attempts=1, unreported=most) from None
        except aiohttp.InvalidURL:
            raise ProviderError(f"the address of {self.name} is not usable: {self._place}") from None
        except (aiohttp.ClientError, OSError) as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            failure = self._transient(
                f"{self.name} could not be reached at {self._place} or broke off ({type(error).__name__})",
                unmetered=int(was_sent),
            )
            failure.unreported = most if was_sent else (0, 0)
            raise failure from None
        try:
            if answered.status == 200:
                return await self._decode(attempt, answered, content)
            raise self._failure(attempt, answered.status, answered.headers, content)
        except ProviderError as error:
            is_charged = answered.status == 200 and not isinstance(error, KeyUnusable | FieldRefused)
            if is_charged and not any(error.unreported):
                error.unreported = most
            error.raw = content[:RAW_BYTES_MAX].decode(errors="replace")
            raise

    async def _send(self, url: str, attempt: _Attempt, headers: Mapping[str, str], limit_s: float) -> Answered:
        """Send a request, on its own or in a batch. Raise `TimeoutError`, `aiohttp.ClientError` or `OSError`."""
        if self._batches is not None:
            own = {name: value for name, value in headers.items() if name != "Content-Type"}
            call = partial(call_provider, self._client(), self._base_url, own)
            path = url.removeprefix(self._base_url)
            return await self._batches.answer(call, path, attempt.turn.model.id, attempt.body)
        post = self._client().post(url, data=attempt.body, headers=headers, allow_redirects=False)
        async with self._slots, asyncio.timeout(limit_s), post as response:
            content = await read_bounded(response, ANSWER_BYTES_MAX)
            return Answered(response.status, response.headers, response.content_type, content)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def _decode(self, attempt: _Attempt, answered: Answered, content: bytes) -> ChatCompletion:
        is_streamed = self.definition.stream and answered.content_type == "text/event-stream"
        if not is_streamed and not answered.content_type.endswith("json"):
            raise self._not_json(f"{answered.content_type} instead of JSON")
        try:
            reply = await apply(partial(self._reply, is_streamed=is_streamed), content)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self._transient(f"{self.name} answered 200 with unusable JSON: {brief(str(error))}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_json(f"a body that is not JSON: {brief(str(error))}") from None
        if reply.failure:
            said = msgspec.json.encode({"error": reply.failure}) if is_streamed else content
            failure = self._failure(attempt, status_of(reply.failure), answered.headers, said)
            if (reported := reply.reported_tokens) is not None:
                failure.unmetered_attempts, failure.unreported = 0, reported
            raise failure
        if not reply.choices:
            raise self._transient(f"{self.name} answered 200 without choices")
        return reply

    def _reply(self, content: bytes, *, is_streamed: bool) -> ChatCompletion:
        """Parse an answer. :raises MsgspecError, ValueError, RecursionError: it is unusable"""
        whole = content
        if is_streamed:
            if not isinstance(self._wire, StreamedProtocol):
                raise msgspec.ValidationError("this protocol is not streamed")
            whole = self._wire.joined(events_of(content))
        reply = decode_reply(self._wire.completion(whole))
        reply.raw = whole.decode(errors="replace")
        return reply

    def _failure(self, attempt: _Attempt, status: int, headers: Mapping[str, str], content: bytes) -> ProviderError:
        """Apply a non-200 answer to the key's cooldowns, and return its error."""
        asked, cool_down = sum(attempt.most), partial(self._keys.cool_down, attempt.key, attempt.turn.model)
        retry_after_s = retry_after_of(status, headers, content)
        message = f"{self.name} answered {status}: {brief(content.decode(errors='replace'))}"
        if status in CONTEXT_STATUSES and (limit := context_limit(content, asked)) is not None:
            self.usage.attempts["failed"] += 1
            return ContextExceeded(message, limit or 1 << ((asked - 1).bit_length() - 1))  # as contexts usually are
        if status >= 500 or status == 408:
            if retry_after_s is None and status == 503 and is_loading(content):
                retry_after_s = LOADING_S
            if retry_after_s is None:
                return self._transient(f"{self.name} answered {status}")
            self.usage.attempts["overloaded"] += 1
            cool_down(OVERLOADED, str(status), retry_after_s)
            return KeyUnusable(f"{self.name} answered {status}", unmetered_attempts=1)
        about = subject_of(status, content) if 400 <= status < 500 else "request"
        if about in COOLDOWN_REFUSALS:
            refusal = COOLDOWN_REFUSALS[about]
            self.usage.attempts[refusal.outcome] += 1
            said = words_of(content)
            answer = brief(f"{status}: {said}" if said else str(status), REASON_MAX)
            cool_down(refusal, answer, retry_after_s)
            return KeyUnusable(message)
        self.usage.attempts["failed"] += 1
        field = refused_field(content, attempt.fields) if status in {400, 422} else None
        return ProviderError(message) if field is None else FieldRefused(field, message)

    def _not_json(self, what: str) -> ProviderError:
        """Return the error for a 200 that is not JSON. Such an answer is not retried: each attempt may be charged."""
        self.usage.attempts["failed"] += 1
        return ProviderError(f"{self.name} answered 200 with {what}", unmetered_attempts=1)

    def _transient(self, message: str, *, unmetered: int = 1) -> Transient:
        self.usage.attempts["failed"] += 1
        return Transient(message, unmetered_attempts=unmetered)
