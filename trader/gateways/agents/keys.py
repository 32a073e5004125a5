"""The keys of one AI provider: used in turn, rested when the provider asks for it, taken out when it refuses them.

A key is known by its number, from 1. Its value leaves this module only for the request's own header.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import orjson

from trader.gateways.agents.usage import Usage
from trader.setting_forms import Secret

REST_S = 30.0
"""How long a key rests after a 429 that does not say; doubled for each further one in a row."""

REST_S_MAX = 600.0

SCRUBBED_MIN = 8
"""Characters from which on a key is taken for a secret: local servers want words like `ollama`, or any letter."""

HIDDEN = "***"
NESTED_MAX = 3
"""How deep texts that are JSON are looked into; the arguments of a tool call are such a text."""

_log = logging.getLogger("trader.agents")


class Key:
    """One key of a provider; `secret` None is the access without a key that local servers give."""

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
    """The keys of the provider `name`. `timer` gives seconds that only ever grow."""

    def __init__(self, name: str, secrets: Sequence[Secret], timer: Callable[[], float]) -> None:
        self._name = name
        self._timer = timer
        self._keys = [Key(number, secret) for number, secret in enumerate(secrets, 1)] or [Key(None, None)]
        self._turn = 0
        self.usage = Usage()

    def take(self, spent: Collection[Key] = ()) -> Key | None:
        """The next key whose turn it is; None when every key rests, is out, or is among the `spent`."""
        now = self._timer()
        for offset in range(len(self._keys)):
            key = self._keys[(self._turn + offset) % len(self._keys)]
            if not key.refused and key.rests_until <= now and key not in spent:
                self._turn = (self._turn + offset + 1) % len(self._keys)
                return key
        return None

    def rest(self, key: Key, retry_after_s: float | None) -> None:
        """Leave the key alone for as long as the provider asked (at most 10 minutes), else 30 s, doubling.

        Requests of several runs are under way at once: what answers them while the key rests does not double it.
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
        """Never use the key again until the service starts anew."""
        self.usage.keys_out += not key.refused
        key.refused = True
        _log.error("%s: key %s was refused with status %d and is out of use", self._name, key.number, status)

    def worked(self, key: Key) -> None:
        """The provider took the key: its next rest is a short one again."""
        key.next_rest_s = REST_S

    def why_none(self) -> str:
        """Why no key can be used now."""
        resting = [key for key in self._keys if not key.refused]
        if not resting:
            return f"{self._name} refused every key ({len(self._keys)}); they are out of use until a restart"
        wait_s = max(0.0, min(key.rests_until for key in resting) - self._timer())
        refused = len(self._keys) - len(resting)
        return f"every key of {self._name} rests after rate limits; the first is free in {wait_s:.0f} s" + (
            f" ({refused} of {len(self._keys)} refused)" if refused else ""
        )

    def scrub(self, content: bytes) -> bytes:
        """What a provider said without the value of any key, should it repeat one, in escapes of JSON too."""
        secrets = [key.secret.reveal() for key in self._keys if key.secret is not None]
        secrets = [secret for secret in secrets if len(secret) >= SCRUBBED_MIN]
        for secret in secrets:
            content = content.replace(secret.encode(), HIDDEN.encode())
        if b"\\" not in content or not secrets:
            return content
        try:
            said = orjson.loads(content)
            cleaned = _scrubbed(said, secrets, NESTED_MAX)
        except orjson.JSONDecodeError:
            return content
        except RecursionError:
            return HIDDEN.encode()  # nobody nests an answer like this; it is unusable anyway
        return content if cleaned == said else orjson.dumps(cleaned)


def _scrubbed(value: Any, secrets: Sequence[str], depth: int) -> Any:
    """The JSON value with every secret hidden in its texts, and in those that are JSON themselves."""
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
