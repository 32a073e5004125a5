"""API keys of one AI provider: rotation, cooldowns after refusals, and usage counts.

    refusal          applies to                         cooldown
    RATE_LIMITED     key and the provider's model       Retry-After, else 30 s, doubling to 10 min
    MODEL_REFUSED    key and the provider's model       the same
    OVERLOADED       key and the provider's model       Retry-After
    UNAFFORDABLE     key and the model of the service   30 s, doubling to 10 min
    OUT_OF_CREDIT    key and the model of the service   10 min, doubling to 1 h
    KEY_REFUSED      key and the model of the service   10 min, doubling to 1 h

The last two are about the key or its account, but they count for the whole key only while no model is answered on it:
a refusal of one model may be a fault of its own, or of a moment. So each model is in cooldown for its own refusal, and
the others use the key. A model that is answered after such a refusal ends the same cooldowns of the others: the key
works again. While a key without credit answers nobody, the models that it refused probe it once a minute.
Logs and records identify a key by its number, from 1. Its value leaves this module only in the request's header.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec
import orjson

from trader.agents.domain.models import Model
from trader.settings.forms import Secret

SCRUBBED_MIN = 8
"""Minimum length of a key that is scrubbed as a secret: local servers accept words like `ollama`, or any letter."""

HIDDEN = "***"
NESTED_MAX = 3
"""Maximum depth of scrubbing JSON nested in JSON strings, such as the arguments of a tool call."""

AttemptOutcome = Literal[
    "answered",
    "failed",
    "timed_out",
    "rate_limited",
    "overloaded",
    "unaffordable",
    "out_of_credit",
    "model_refused",
    "key_refused",
]
"""How an attempt ended. `failed` covers server errors, unusable answers and refused requests."""


CooldownScope = Literal["key", "provider model", "model"]
"""What a refusal is about: the key, as far as one of our models says so; one provider model; one of our models."""

ANSWERED_RECENTLY_S: Final = 600.0
"""A key, or a provider, with an answer within this time works, whatever it refuses to some models."""


class KeyRefusal(NamedTuple):
    """A kind of refusal: its outcome and message, and its cooldown's scope, minimum and maximum.

    If `is_probed`, a key that answers nobody is probed once every `PROBE_EVERY_S` during the cooldown.
    """

    outcome: AttemptOutcome
    words: str
    scope: CooldownScope
    shortest_s: float
    longest_s: float
    is_probed: bool = False


RATE_LIMITED: Final = KeyRefusal("rate_limited", "is rate-limited", "provider model", 30, 600)
MODEL_REFUSED: Final = KeyRefusal("model_refused", "was refused the model", "provider model", 30, 600)
OVERLOADED: Final = KeyRefusal("overloaded", "was asked to wait by an overloaded server", "provider model", 30, 600)
UNAFFORDABLE: Final = KeyRefusal("unaffordable", "cannot pay for a request of this size or upstream", "model", 30, 600)
OUT_OF_CREDIT: Final = KeyRefusal("out_of_credit", "is out of credit", "key", 600, 3600, is_probed=True)
KEY_REFUSED: Final = KeyRefusal("key_refused", "was refused", "key", 600, 3600)

PROBE_EVERY_S: Final = 60.0

_log = logging.getLogger("trader.agents")


class Usage:
    """Usage of a provider since the process started: attempts and cooldowns by outcome, and tokens.

    `unmetered_attempts` counts attempts that may have cost unreported tokens.
    """

    def __init__(self) -> None:
        self.attempts: Counter[AttemptOutcome] = Counter()
        self.cooldowns: Counter[AttemptOutcome] = Counter()
        self.input_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.unmetered_attempts = 0


CooldownKey = tuple[CooldownScope, str]
"""Identifies a cooldown: its scope, and the name of the provider model or the id of our model."""


def _cooldown_keys(model: Model) -> tuple[CooldownKey, ...]:
    """Return the cooldowns that exclude a key for a model."""
    return ("key", model.id), ("provider model", model.router_model_name), ("model", model.id)


class _Cooldown(msgspec.Struct):
    """A cooldown of a key and the answer that caused it. `next_s` is the length of the next consecutive cooldown."""

    refusal: KeyRefusal
    answer: str
    until_s: float
    next_s: float


class Key:
    """One key of a provider; `secret` is None for a local server without keys.

    `answered_at_s` holds the times of the last answers of the models whose last request with this key was answered;
    `probe_s` is the earliest time of the next probe during a cooldown.
    """

    __slots__ = ("answered_at_s", "cooldowns", "number", "probe_s", "secret")

    def __init__(self, number: int | None, secret: Secret | None) -> None:
        self.number = number
        self.secret = secret
        self.cooldowns: dict[CooldownKey, _Cooldown] = {}
        self.answered_at_s: dict[str, float] = {}
        self.probe_s = 0.0

    def __repr__(self) -> str:
        return f"Key({self.number})"

    def is_answering(self, now_s: float) -> bool:
        """Return whether it answered a model recently that it has not refused since."""
        return any(at_s > now_s - ANSWERED_RECENTLY_S for at_s in self.answered_at_s.values())

    def refusal(self, now_s: float) -> _Cooldown | None:
        """Return the latest-ending refusal of the key itself; None while it answers any model."""
        cooldowns = [cooldown for (scope, _), cooldown in self.cooldowns.items() if scope == "key"]
        latest = max(cooldowns, key=lambda cooldown: cooldown.until_s, default=None)
        return None if latest is None or latest.until_s <= now_s or self.is_answering(now_s) else latest


class KeyRing:
    """The keys of the provider `name`, from `variable` and its numbered variants.

    `timer` is a monotonic clock in seconds.
    """

    def __init__(
        self, name: str, secrets: Sequence[Secret], timer: Callable[[], float], variable: str | None = None
    ) -> None:
        self._name = name if variable is None else f"{name} ({variable})"
        self._timer = timer
        self._keys = [Key(number, secret) for number, secret in enumerate(secrets, 1)] or [Key(None, None)]
        self._turn = 0
        self.usage = Usage()

    def take(self, model: Model, spent: Collection[Key] = ()) -> Key | None:
        """Return the next key in turn for a model; None when every key is in cooldown or in `spent`."""
        for offset in range(len(self._keys)):
            key = self._keys[(self._turn + offset) % len(self._keys)]
            if key not in spent and self._left_s(key, model) <= 0:
                self._turn = (self._turn + offset + 1) % len(self._keys)
                key.probe_s = self._timer() + PROBE_EVERY_S
                return key
        return None

    def cool_down(
        self, key: Key, model: Model, refusal: KeyRefusal, answer: str, retry_after_s: float | None = None
    ) -> None:
        """Start or extend the key's cooldown for a refusal; `answer` is the provider's status and message.

        Requests are concurrent: a refusal that arrives during the cooldown does not double the next one.
        """
        cooldown_key = refusal.scope, model.router_model_name if refusal.scope == "provider model" else model.id
        asked_s = None if refusal.scope == "key" else retry_after_s
        now, cooldown = self._timer(), key.cooldowns.get(cooldown_key)
        if cooldown is None or cooldown.refusal is not refusal:
            until_s = now if cooldown is None else cooldown.until_s
            cooldown = key.cooldowns[cooldown_key] = _Cooldown(refusal, answer, until_s, refusal.shortest_s)
        elif asked_s is None and cooldown.until_s > now:
            return
        key.answered_at_s.pop(model.id, None)
        if asked_s is None:
            asked_s = cooldown.next_s
            cooldown.next_s = min(asked_s * 2, refusal.longest_s)
        cooldown.answer = answer
        cooldown.until_s = max(cooldown.until_s, now + min(asked_s, refusal.longest_s))
        self.usage.cooldowns[refusal.outcome] += 1
        subject = f"{_name(key)}, asked for {model.router_model_name},"
        left_s = cooldown.until_s - now
        _log.warning("%s: %s %s (%s) and is in cooldown for %.0f s", self._name, subject, refusal.words, answer, left_s)

    def accepted(self, key: Key, model: Model) -> None:
        """Record a success: cooldowns that expired restart at the minimum length.

        If the key had refused the model, it works again for all models. A cooldown of another scope that began during
        the request stays.
        """
        key.answered_at_s[model.id] = self._timer()
        if (own := key.cooldowns.get(("key", model.id))) is not None:
            for cooldown_key in [each for each, cooldown in key.cooldowns.items() if cooldown.refusal is own.refusal]:
                del key.cooldowns[cooldown_key]
        for cooldown_key in _cooldown_keys(model):
            if (cooldown := key.cooldowns.get(cooldown_key)) and cooldown.until_s <= self._timer():
                del key.cooldowns[cooldown_key]

    def failed(self, key: Key, model: Model) -> None:
        """Record a request without an answer."""
        key.answered_at_s.pop(model.id, None)

    def free_in_s(self, model: Model) -> float:
        """Return the seconds until a key can be used for a model."""
        return min(self._left_s(key, model) for key in self._keys)

    def in_cooldown(self) -> dict[str, str]:
        """Return the reasons of the keys that are refused and answer no model, by key name."""
        refusals = {_name(key): key.refusal(self._timer()) for key in self._keys}
        return {
            name: f"{cooldown.refusal.words} ({cooldown.answer})"
            for name, cooldown in refusals.items()
            if cooldown is not None
        }

    def outage(self) -> str | None:
        """Return why no model can be called now; None while a key may work."""
        reasons = self.in_cooldown()
        if len(reasons) < len(self._keys):
            return None
        return "; ".join(f"{name} {why}" for name, why in reasons.items())

    def unavailable_reason(self, model: Model) -> str:
        """Return, for each key, why it cannot be used for a model now."""
        return f"{self._name} cannot be asked for {model.router_model_name} now: " + "; ".join(
            self._state(key, model) for key in self._keys
        )

    def _state(self, key: Key, model: Model) -> str:
        cooldowns = [key.cooldowns[each] for each in _cooldown_keys(model) if each in key.cooldowns]
        cooldown = max(cooldowns, key=lambda cooldown: cooldown.until_s, default=None)
        if cooldown is None:
            return f"{_name(key)} is free"
        left_s = max(0.0, cooldown.until_s - self._timer())
        return f"{_name(key)} {cooldown.refusal.words} ({cooldown.answer}) and is in cooldown for {left_s:.0f} s"

    def _left_s(self, key: Key, model: Model) -> float:
        """Return the seconds until a key can be used for a model: until its cooldowns end, or it may be probed."""
        now, left_s = self._timer(), 0.0
        for cooldown_key in _cooldown_keys(model):
            if cooldown := key.cooldowns.get(cooldown_key):
                is_probed = cooldown.refusal.is_probed and not key.is_answering(now)
                until_s = min(cooldown.until_s, key.probe_s) if is_probed else cooldown.until_s
                left_s = max(left_s, until_s - now)
        return left_s

    def scrub(self, content: bytes) -> bytes:
        """Return a provider's answer with all key values redacted, including those in JSON escapes."""
        secrets = [key.secret.reveal() for key in self._keys if key.secret is not None]
        secrets = [secret for secret in secrets if len(secret) >= SCRUBBED_MIN]
        for secret in secrets:
            content = content.replace(secret.encode(), HIDDEN.encode())
        if b"\\" not in content or not secrets:
            return content
        try:
            answer = orjson.loads(content)
            cleaned = _scrubbed(answer, secrets, NESTED_MAX)
        except orjson.JSONDecodeError:
            return content
        except RecursionError:
            return HIDDEN.encode()  # nested too deeply for the answer to be usable anyway
        return content if cleaned == answer else orjson.dumps(cleaned)


def _name(key: Key) -> str:
    return "it" if key.number is None else f"key {key.number}"


def _scrubbed(value: Any, secrets: Sequence[str], depth: int) -> Any:
    """Return the JSON value with every secret redacted in its strings, and in JSON nested in its strings."""
    if isinstance(value, dict):
        return {_scrubbed(key, secrets, 0): _scrubbed(item, secrets, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrubbed(item, secrets, depth) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    if depth and "\\" in value:
        with suppress(orjson.JSONDecodeError):
            inner = orjson.loads(value)
            cleaned = _scrubbed(inner, secrets, depth - 1)
            return value if cleaned == inner else orjson.dumps(cleaned).decode()
    return value
