"""API keys of one AI provider: used in turn, rested after rate limits, taken out of use when refused; and usage counts.

Logs and records name a key by its number, from 1. Its value leaves this module only for the request's own header.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Literal

import orjson

from trader.setting_forms import Secret

REST_S = 30.0
"""How long a key rests after a 429 without Retry-After; doubled for each further one in a row."""

REST_S_MAX = 600.0

SCRUBBED_MIN = 8
"""Length from which on a key is scrubbed as a secret: local servers take words like `ollama`, or any letter."""

HIDDEN = "***"
NESTED_MAX = 3
"""Depth to which JSON within JSON texts is scrubbed; the arguments of a tool call are such a text."""

Outcome = Literal["answered", "failed", "rate_limited", "refused"]

_log = logging.getLogger("trader.agents")


class Usage:
    """Usage of a provider since the start of the process: attempts by outcome, tokens, rests and refusals of keys."""

    def __init__(self) -> None:
        self.attempts: Counter[Outcome] = Counter()
        self.input_tokens = 0
        self.output_tokens = 0
        self.key_rests = 0
        self.keys_out = 0


class Key:
    """One key of a provider; `secret` is None for a local server without keys."""

    __slots__ = ("next_rest_s", "number", "refused", "rests_until", "secret")

    def __init__(self, number: int | None, secret: Secret | None) -> None:
        self.number = number
        self.secret = secret
        self.rests_until = 0.0
        self.next_rest_s = REST_S
        self.refused = False

    def __repr__(self) -> str:
        return f"Key({self.number})"


class KeyRing:
    """The keys of the provider `name`. `timer` is a monotonic clock in seconds."""

    def __init__(self, name: str, secrets: Sequence[Secret], timer: Callable[[], float]) -> None:
        self._name = name
        self._timer = timer
        self._keys = [Key(number, secret) for number, secret in enumerate(secrets, 1)] or [Key(None, None)]
        self._turn = 0
        self.usage = Usage()

    def take(self, spent: Collection[Key] = ()) -> Key | None:
        """Return the next key in turn; None when every key rests, is out of use, or is among the `spent`."""
        now = self._timer()
        for offset in range(len(self._keys)):
            key = self._keys[(self._turn + offset) % len(self._keys)]
            if not key.refused and key.rests_until <= now and key not in spent:
                self._turn = (self._turn + offset + 1) % len(self._keys)
                return key
        return None

    def rest(self, key: Key, retry_after_s: float | None) -> None:
        """Rest the key for as long as the provider asked (at most 10 minutes), else for 30 s, doubling.

        Several requests are under way at once: a refusal that arrives while the key rests does not double its rest.
        """
        if retry_after_s is None:
            if key.rests_until > self._timer():
                return
            rest_s = key.next_rest_s
            key.next_rest_s = min(rest_s * 2, REST_S_MAX)
        else:
            rest_s = min(retry_after_s, REST_S_MAX)
        self.usage.key_rests += 1
        key.rests_until = max(key.rests_until, self._timer() + rest_s)
        _log.warning("%s: key %s is rate-limited and rests for %.0f s", self._name, key.number, rest_s)

    def take_out(self, key: Key, status: int) -> None:
        """Stop using the key until the service restarts."""
        self.usage.keys_out += not key.refused
        key.refused = True
        _log.error("%s: key %s was refused with status %d and is out of use", self._name, key.number, status)

    def accepted(self, key: Key) -> None:
        """Reset the next rest of a key that the provider accepted to the shortest."""
        key.next_rest_s = REST_S

    def unavailable_reason(self) -> str:
        """Return why no key can be used now."""
        resting = [key for key in self._keys if not key.refused]
        if not resting:
            return f"{self._name} refused every key ({len(self._keys)}); they are out of use until a restart"
        wait_s = max(0.0, min(key.rests_until for key in resting) - self._timer())
        refused = len(self._keys) - len(resting)
        return f"every key of {self._name} rests after rate limits; the first is free in {wait_s:.0f} s" + (
            f" ({refused} of {len(self._keys)} refused)" if refused else ""
        )

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
