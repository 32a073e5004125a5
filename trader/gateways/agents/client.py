"""Client of an AI provider, for every protocol.

Every attempt has its own deadline, from connecting to the last byte. A refusal puts what it is about into cooldown
(`keys.py`), and the next key is asked; when none is free, the cooldown is waited out as far as the turn allows. Server
errors, broken and unusable answers are retried, on another key if any; a time-out is not, since what the model saw is
old by then.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.market.markets import Interval
from trader.domain.models import RESERVED_REQUEST_FIELDS, Model, ProtocolName, ProviderDefinition
from trader.errors import ProviderError, ProviderTimeout
from trader.gateways.agents.attempts import (
    FieldRefused,
    KeyUnusable,
    Progress,
    Transient,
    apply,
    is_affordable,
    most_tokens,
    read_bounded,
    retry_after_of,
    sum_of,
)
from trader.gateways.agents.gemini import GeminiWire
from trader.gateways.agents.keys import (
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
from trader.gateways.agents.messages import MessagesWire
from trader.gateways.agents.protocols import ChatWire, Wire, events_of
from trader.gateways.agents.refusals import About, brief, refused_field, status_of, subject_of, words_of
from trader.gateways.agents.replies import Reply, answer_of, decode_reply
from trader.gateways.agents.responses import ResponsesWire
from trader.setting_forms import Secret
from trader.variants import VARIANTS

ATTEMPT_LIMIT_S = 120.0
RETRIES_MAX = 3
FAILED_TURNS_MAX: Final = 3
"""So many failed turns in a row are an outage of the provider, unless a model's last turn was answered recently."""

ANSWERED_RECENTLY_S: Final = 600.0

BACKOFF_S = 0.5
"""Before the first retry; doubled for each further one, and spread by half to one and a half times."""

RAW_BYTES_MAX = 16 * 1024
"""Bytes of an unusable answer that are kept for the record."""

REASON_MAX: Final = 150
"""Characters of a refusal's own words in the reason of a failed invocation."""

WIRES: Final[Mapping[ProtocolName, Wire]] = {
    "chat": ChatWire(),
    "responses": ResponsesWire(),
    "messages": MessagesWire(),
    "gemini": GeminiWire(),
}

COOLDOWN_REFUSALS: Final[Mapping[About, KeyRefusal]] = {
    "key": KEY_REFUSED,
    "credit": OUT_OF_CREDIT,
    "size": UNAFFORDABLE,
    "rate": RATE_LIMITED,
    "model": MODEL_REFUSED,
}
"""The refusals that put a key into cooldown, by what they are about."""

WAIT_STEP_S: Final = 1.0
"""Shortest wait for a cooldown within one answer, doubled for each further one: some servers ask for 0 s, forever."""

TIMER_S: Final = 0.01
"""Added to a wait: a timer may fire a moment before its time, and the cooldown would not be over yet."""

_log = logging.getLogger("trader.agents")


class ProviderClient:
    """The client of one provider. `set_by` says where its address is configured, for errors about it."""

    is_remote = True

    def __init__(
        self,
        definition: ProviderDefinition,
        secrets: Sequence[Secret],
        *,
        base_url: str | None = None,
        set_by: str = "base_url of its [[providers]]",
        key_variable: str | None = None,
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        attempt_limit_s: float = ATTEMPT_LIMIT_S,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self.name = definition.name
        self.definition = definition
        self._wire = WIRES[definition.protocol]
        self._base_url = (base_url or definition.base_url).rstrip("/")
        self._host = "/".join(self._base_url.split("/")[:3])  # what follows may have a key in it
        self._place = f"{self._host} ({set_by})"
        self._keys = KeyRing(definition.name, secrets, timer, key_variable)
        self.usage = self._keys.usage
        self._sleep = sleep
        self._attempt_limit_s = attempt_limit_s
        self._backoff_s = backoff_s
        self._jitter = random.Random()
        self._left_out: dict[tuple[str, str], set[str]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._timer = timer
        self._failed_turns = 0
        self._last_failure = ""
        self._answered_at_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"ProviderClient({self.name})"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def outage(self) -> str | None:
        """Return why no model can be called at present: every key is in cooldown, or the turns of all models fail.

        There is no outage while one model is answered, even if others fail.
        """
        if (reason := self._keys.outage()) is not None:
            return reason
        since_s = self._timer() - ANSWERED_RECENTLY_S
        is_answering = any(at_s > since_s for at_s in self._answered_at_s.values())
        if self._failed_turns < FAILED_TURNS_MAX or is_answering:
            return None
        return f"the last {self._failed_turns} turns failed: {self._last_failure}"

    def keys_in_cooldown(self) -> dict[str, str]:
        """Return the keys in cooldown for all models, by their names, with the reasons."""
        return self._keys.in_cooldown()

    def left_out(self, model: Model) -> Collection[str]:
        """Return the fields that requests for this model leave out, since the provider has refused them."""
        return self._left_out.get((model.id, model.router_model_name), ())

    async def intervals(self, model: Model) -> Sequence[Interval]:
        """Return the intervals of the variant."""
        return VARIANTS[model.variant].intervals

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Ask the provider.

        :raises ProviderTimeout: it did not answer in time
        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        began_s = time.monotonic()
        progress = Progress()
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
        self._answered_at_s[turn.model.id] = self._timer()
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

    async def _answer(self, turn: Turn, progress: Progress) -> ModelAnswer:
        model = turn.model
        while True:
            key = self._keys.take(model, progress.spent | progress.failed) or self._keys.take(model, progress.spent)
            if key is None:
                await self._wait_for_key(turn, progress)
                continue
            request = self._request(turn)
            body = msgspec.json.encode(request)
            try:
                reply = await self._attempt(turn, key, body, request.keys() - set(RESERVED_REQUEST_FIELDS))
            except KeyUnusable as error:
                progress.spent.add(key)
                progress.unmetered += error.unmetered_attempts
                progress.raw = error.raw
            except FieldRefused as error:
                self._leave_out(model, error.field)
            except ProviderError as error:
                self._keys.failed(key, model)
                if not isinstance(error, Transient):
                    raise
                progress.failed.add(key)
                progress.failures += 1
                progress.unmetered += error.unmetered_attempts
                progress.unreported = sum_of(progress.unreported, error.unreported)
                if progress.failures > RETRIES_MAX or not is_affordable(turn, progress, body):
                    raise ProviderError(f"{error}; gave up after {progress.failures} attempts", error.raw) from error
                _log.info("%s (attempt %d, key %s)", error, progress.failures, key.number)
                progress.raw = error.raw
                await self._sleep(self._backoff_s * 2 ** (progress.failures - 1) * self._jitter.uniform(0.5, 1.5))
            else:
                self._keys.accepted(key, model)
                return answer_of(reply, turn, key.number, len(body))

    async def _wait_for_key(self, turn: Turn, progress: Progress) -> None:
        """Wait until a key is free again.

        :raises ProviderError: that takes longer than the turn may wait
        """
        free_s, left_s = self._keys.free_in_s(turn.model), turn.wait_max_s - progress.waited_s
        if left_s <= 0 or free_s > left_s:
            raise ProviderError(self._keys.unavailable_reason(turn.model), progress.raw)
        wait_s = min(left_s, max(free_s + TIMER_S, WAIT_STEP_S * 2**progress.waits))
        _log.info("%s; waits %.1f s for it", self._keys.unavailable_reason(turn.model), wait_s)
        progress.waits += 1
        progress.waited_s += wait_s
        progress.spent.clear()
        await self._sleep(wait_s)

    def _request(self, turn: Turn) -> dict[str, Any]:
        """Return the body of a request: the protocol's fields, then those of the provider and of the model."""
        left_out, fields = self.left_out(turn.model), (self.definition.request, turn.model.configuration.request)
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
        return {name: value for name, value in request.items() if value is not None and name not in left_out}

    def _leave_out(self, model: Model, field: str) -> None:
        """Omit the field from this model's requests from now on. Concurrent requests may each report it."""
        left_out = self._left_out.setdefault((model.id, model.router_model_name), set())
        if field not in left_out:
            left_out.add(field)
            accepts = f"{model.router_model_name} does not accept {field}"
            _log.warning("%s: %s; requests of %s leave it out from now on", self.name, accepts, model.id)

    async def _attempt(self, turn: Turn, key: Key, body: bytes, fields: Collection[str]) -> Reply:
        """Make one request; `fields` are its optional fields."""
        model, most = turn.model, most_tokens(turn, body)
        accepted = "text/event-stream" if self.definition.stream else "application/json"
        headers = {"Content-Type": "application/json", "Accept": accepted, **self.definition.headers}
        headers |= self._wire.headers(None if key.secret is None else key.secret.reveal())
        url = self._base_url + self._wire.path(model.router_model_name)
        limit_s = model.configuration.attempt_timeout_s or self._attempt_limit_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client().post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                content = await apply(self._keys.scrub, await read_bounded(response, self.name))
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
        except ProviderError as error:  # it was too long
            error.unreported = most
            raise
        try:
            if response.status == 200:
                return await self._decode(model, key, response, content, fields)
            retry_after_s = retry_after_of(response.headers)
            raise self._failure(model, key, response.status, retry_after_s, content, fields)
        except ProviderError as error:
            if response.status == 200 and not isinstance(error, KeyUnusable | FieldRefused):
                error.unreported = most
            error.raw = content[:RAW_BYTES_MAX].decode(errors="replace")
            raise

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def _decode(
        self, model: Model, key: Key, response: aiohttp.ClientResponse, content: bytes, fields: Collection[str]
    ) -> Reply:
        is_streamed = self.definition.stream and response.content_type == "text/event-stream"
        if not is_streamed and not response.content_type.endswith("json"):
            raise self._not_json(f"{response.content_type} instead of JSON")
        try:
            reply = await apply(partial(self._reply, is_streamed=is_streamed), content)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self._transient(f"{self.name} answered 200 with unusable JSON: {brief(str(error))}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_json(f"a body that is not JSON: {brief(str(error))}") from None
        if reply.failure:
            raise self._failure(model, key, status_of(reply.failure), None, content, fields)
        if not reply.choices:
            raise self._transient(f"{self.name} answered 200 without choices")
        return reply

    def _reply(self, content: bytes, *, is_streamed: bool) -> Reply:
        """Parse an answer. :raises MsgspecError, ValueError, RecursionError: it is unusable"""
        whole = self._wire.joined(events_of(content)) if is_streamed else content
        reply = decode_reply(self._wire.completion(whole))
        reply.raw = content.decode(errors="replace")
        return reply

    def _failure(
        self,
        model: Model,
        key: Key,
        status: int,
        retry_after_s: float | None,
        content: bytes,
        fields: Collection[str],
    ) -> ProviderError:
        """Apply the consequences of an answer other than 200 to the key, and return its error."""
        message = f"{self.name} answered {status}: {brief(content.decode(errors='replace'))}"
        if status >= 500 or status == 408:
            if retry_after_s is None:
                return self._transient(f"{self.name} answered {status}")
            self.usage.attempts["overloaded"] += 1
            self._keys.cool_down(key, model, OVERLOADED, str(status), retry_after_s)
            return KeyUnusable(f"{self.name} answered {status}", unmetered_attempts=1)
        about = subject_of(status, content) if 400 <= status < 500 else "request"
        if about in COOLDOWN_REFUSALS:
            refusal = COOLDOWN_REFUSALS[about]
            self.usage.attempts[refusal.outcome] += 1
            said = words_of(content)
            answer = brief(f"{status}: {said}" if said else str(status), REASON_MAX)
            self._keys.cool_down(key, model, refusal, answer, retry_after_s)
            return KeyUnusable(message)
        self.usage.attempts["failed"] += 1
        field = refused_field(content, fields) if status in {400, 422} else None
        return ProviderError(message) if field is None else FieldRefused(field, message)

    def _not_json(self, what: str) -> ProviderError:
        """Return the error of a 200 that is not JSON. It is not retried, since each attempt may be charged."""
        self.usage.attempts["failed"] += 1
        return ProviderError(f"{self.name} answered 200 with {what}", unmetered_attempts=1)

    def _transient(self, message: str, *, unmetered: int = 1) -> Transient:
        self.usage.attempts["failed"] += 1
        return Transient(message, unmetered_attempts=unmetered)
