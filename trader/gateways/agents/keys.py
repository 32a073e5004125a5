"""API keys of one AI provider: used in turn, rested or taken out of use by what was refused, and counts of their usage.

    refusal          counts against    what follows
    RATE_LIMITED     key and model     rests for Retry-After, else 30 s, doubling to 10 min
    MODEL_REFUSED    key and model     the same
    OVERLOADED       key and model     rests for Retry-After
    OUT_OF_CREDIT    key               rests 10 min, doubling to 1 h
    (take_out)       key               out of use until a restart

A key that is out of credit stands for its account: other keys of the account are refused when their turn comes.
Logs and records name a key by its number, from 1. Its value leaves this module only for the request's own header.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec
import orjson

from trader.setting_forms import Secret

SCRUBBED_MIN = 8
"""Length from which on a key is scrubbed as a secret: local servers take words like `ollama`, or any letter."""

HIDDEN = "***"
NESTED_MAX = 3
"""Depth to which JSON within JSON texts is scrubbed; the arguments of a tool call are such a text."""

Outcome = Literal[
    "answered", "failed", "timed_out", "rate_limited", "overloaded", "out_of_credit", "model_refused", "key_refused"
]
"""How an attempt ended. `failed` are server errors, unusable answers and refused requests."""


class KeyRefusal(NamedTuple):
    """A kind of refusal: its outcome and words, whether it is about one model, and its shortest and longest rest."""

    outcome: Outcome
    words: str
    is_about_model: bool
    first_rest_s: float
    last_rest_s: float


RATE_LIMITED: Final = KeyRefusal("rate_limited", "is rate-limited", True, 30, 600)
MODEL_REFUSED: Final = KeyRefusal("model_refused", "was refused the model", True, 30, 600)
OVERLOADED: Final = KeyRefusal("overloaded", "was asked to wait by an overloaded server", True, 30, 600)
OUT_OF_CREDIT: Final = KeyRefusal("out_of_credit", "is out of credit", False, 600, 3600)

_log = logging.getLogger("trader.agents")


class Usage:
    """Usage of a provider since the start of the process: attempts and rests by outcome, tokens, keys out of use.

    `unmetered_attempts` counts those that may have cost tokens which nobody reported.
    """

    def __init__(self) -> None:
        self.attempts: Counter[Outcome] = Counter()
        self.rests: Counter[Outcome] = Counter()
        self.input_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.unmetered_attempts = 0
        self.keys_out = 0


class _Rest(msgspec.Struct):
    """The rest of a key, for one model or for all, and the answer that began it.

    `next_s` is how long the next one in a row takes.
    """

    refusal: KeyRefusal
    answer: str
    until_s: float
    next_s: float


class Key:
    """One key of a provider; `secret` is None for a local server without keys.

    `rests` are those for a model by its name, and under None the one for all of them.
    """

    __slots__ = ("number", "refused_with", "rests", "secret")

    def __init__(self, number: int | None, secret: Secret | None) -> None:
        self.number = number
        self.secret = secret
        self.rests: dict[str | None, _Rest] = {}
        self.refused_with: int | None = None

    def __repr__(self) -> str:
        return f"Key({self.number})"

    def longest_rest(self, model: str) -> _Rest | None:
        """Return the rest, over or not, that ends last of those that keep this key from the model."""
        rests = [rest for rest in (self.rests.get(None), self.rests.get(model)) if rest is not None]
        return max(rests, key=lambda rest: rest.until_s, default=None)


class KeyRing:
    """The keys of the provider `name`. `timer` is a monotonic clock in seconds."""

    def __init__(self, name: str, secrets: Sequence[Secret], timer: Callable[[], float]) -> None:
        self._name = name
        self._timer = timer
        self._keys = [Key(number, secret) for number, secret in enumerate(secrets, 1)] or [Key(None, None)]
        self._turn = 0
        self.usage = Usage()

    def take(self, model: str, spent: Collection[Key] = ()) -> Key | None:
        """Return the next key in turn for a model; None when each one rests, is out of use, or is among the `spent`."""
        for offset in range(len(self._keys)):
            key = self._keys[(self._turn + offset) % len(self._keys)]
            if key.refused_with is None and self._left_s(key, model) <= 0 and key not in spent:
                self._turn = (self._turn + offset + 1) % len(self._keys)
                return key
        return None

    def take_out(self, key: Key, status: int) -> None:
        """Stop using the key until the service restarts."""
        self.usage.keys_out += key.refused_with is None
        key.refused_with = status
        _log.error("%s: key %s was refused with status %d and is out of use", self._name, key.number, status)

    def rest(self, key: Key, model: str, refusal: KeyRefusal, answer: str, retry_after_s: float | None = None) -> None:
        """Rest the key for as long as the refusal says; `answer` is the provider's status and words.

        Several requests are under way at once: a refusal that arrives while the key rests does not double its rest.
        """
        about = model if refusal.is_about_model else None
        asked_s = retry_after_s if refusal.is_about_model else None
        now, rest = self._timer(), key.rests.get(about)
        if rest is None or rest.refusal is not refusal:
            until_s = now if rest is None else rest.until_s
            rest = key.rests[about] = _Rest(refusal, answer, until_s, refusal.first_rest_s)
        elif asked_s is None and rest.until_s > now:
            return
        if asked_s is None:
            asked_s = rest.next_s
            rest.next_s = min(asked_s * 2, refusal.last_rest_s)
        rest.answer = answer
        rest.until_s = max(rest.until_s, now + min(asked_s, refusal.last_rest_s))
        self.usage.rests[refusal.outcome] += 1
        subject = f"{_name(key)}, asked for {model}," if about else _name(key)
        rest_s = rest.until_s - now
        _log.warning("%s: %s %s (%s) and rests for %.0f s", self._name, subject, refusal.words, answer, rest_s)

    def accepted(self, key: Key, model: str) -> None:
        """Reset the next rests of a key that the provider accepted to the shortest."""
        for about in (None, model):
            if rest := key.rests.get(about):
                rest.next_s = rest.refusal.first_rest_s

    def free_in_s(self, model: str) -> float | None:
        """Return the seconds until a key can be used for a model; None when all are out of use."""
        return min((self._left_s(key, model) for key in self._keys if key.refused_with is None), default=None)

    def outage(self) -> str | None:
        """Return why no model at all can be asked now; None while a key may work."""
        reasons = []
        for key in self._keys:
            rest = key.rests.get(None)
            if key.refused_with is None and (rest is None or rest.until_s <= self._timer()):
                return None
            words = "is out of use" if rest is None or key.refused_with is not None else rest.refusal.words
            reasons.append(f"{_name(key)} {words}")
        return "; ".join(reasons)

    def unavailable_reason(self, model: str) -> str:
        """Return why no key can be used for a model now, for each key."""
        return f"{self._name} cannot be asked for {model} now: " + "; ".join(
            self._state(key, model) for key in self._keys
        )

    def _state(self, key: Key, model: str) -> str:
        if key.refused_with is not None:
            return f"{_name(key)} was refused ({key.refused_with}) and is out of use until a restart"
        rest = key.longest_rest(model)
        if rest is None:
            return f"{_name(key)} is free"
        return f"{_name(key)} {rest.refusal.words} ({rest.answer}) and rests for {self._left_s(key, model):.0f} s"

    def _left_s(self, key: Key, model: str) -> float:
        rest = key.longest_rest(model)
        return 0.0 if rest is None else max(0.0, rest.until_s - self._timer())

    def scrub(self, content: bytes) -> bytes:
        """Return a provider's answer with the values of all keys hidden, also within JSON escapes."""
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
            return HIDDEN.encode()  # nested so deep that the answer is unusable anyway
        return content if cleaned == answer else orjson.dumps(cleaned)


def _name(key: Key) -> str:
    return "it" if key.number is None else f"key {key.number}"


def _scrubbed(value: Any, secrets: Sequence[str], depth: int) -> Any:
    """Return the JSON value with every secret hidden in its texts, and in texts that are JSON themselves."""
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
