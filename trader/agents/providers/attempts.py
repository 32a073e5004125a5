"""Attempts of a provider request: failure kinds, totals over the attempts of one answer, and response reading."""

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

import aiohttp

from trader.agents.domain.conversation import Turn, value_in
from trader.agents.providers.keys import Key
from trader.agents.providers.refusals import decoded
from trader.agents.providers.replies import estimated_count
from trader.core.errors import ProviderError

ANSWER_BYTES_MAX = 4 * 1024 * 1024
PARSE_INLINE_MAX: Final = 64 * 1024
"""Maximum bytes parsed on the event loop; a longer answer may take seconds, so a thread parses it."""

RESET: Final = "x-ratelimit-reset"
REMAINING: Final = "x-ratelimit-remaining"
"""The beginnings of the headers that say when a rate limit is reset, and how much of it is left."""

DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
UNITS_S: Final = (3600.0, 60.0, 1.0, 0.001)

UNIX_TIME_MIN: Final = 1e9
"""A number of this size is a time, not a duration in seconds."""

T = TypeVar("T")


class Transient(ProviderError):
    """This attempt failed; another may succeed."""


class KeyUnusable(ProviderError):
    """The key of this attempt is in cooldown; another key may work."""


class FieldRefused(ProviderError):
    """The model rejects a field of the request; without it, the request may succeed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class AttemptTotals:
    """Totals over the attempts of one answer. `spent` holds the keys not to use again before a wait."""

    def __init__(self) -> None:
        self.spent: set[Key] = set()
        self.failed: set[Key] = set()
        self.failures = 0
        self.unmetered = 0
        self.unreported = (0, 0)
        self.waits = 0
        self.waited_s = 0.0
        self.raw = ""

    def add(self, error: ProviderError) -> None:
        """Add what a failed attempt may have cost, and keep its answer."""
        self.unmetered += error.unmetered_attempts
        self.unreported = sum_of(self.unreported, error.unreported)
        self.raw = error.raw


def sum_of(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return first[0] + second[0], first[1] + second[1]


def most_tokens(turn: Turn, body: bytes) -> tuple[int, int]:
    """Return the maximum tokens of a request as (input, output)."""
    return estimated_count(len(body)), turn.answer_tokens_max


def is_affordable(turn: Turn, progress: AttemptTotals, body: bytes) -> bool:
    """Return whether the turn's tokens allow another attempt, counting each attempt at its maximum."""
    if turn.tokens_max is None or not any(progress.unreported):
        return True
    return sum(progress.unreported) + sum(most_tokens(turn, body)) <= turn.tokens_max


async def read_bounded(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Return the body, or slightly more than the allowed bytes of a longer one."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > bytes_max:
            break
    return bytes(body)


async def apply(read: Callable[[bytes], T], content: bytes) -> T:
    """Parse an answer with `read`, in a thread if it is long."""
    return read(content) if len(content) <= PARSE_INLINE_MAX else await asyncio.to_thread(read, content)


def retry_after_of(status: int, headers: Mapping[str, str], content: bytes) -> float | None:
    """Return after how many seconds a refusal with this status asks to retry; None if it does not say.

    It says so in Retry-After, in milliseconds in retry-after-ms, or in the RetryInfo of Google's errors; for a rate
    limit also in the reset of the limit that has nothing left, in headers that OpenRouter repeats in its error. Times
    are relative to the answer's own Date.
    """
    answer = decoded(content)
    answer = answer[0] if isinstance(answer, list) and answer else answer  # as Gemini's streams send it
    details, repeated = value_in(answer, "error", "details"), value_in(answer, "error", "metadata", "headers")
    delays = [value_in(each, "retryDelay") for each in details] if isinstance(details, list) else []
    asked = [
        _seconds(headers.get("retry-after-ms", "") + "ms", headers),
        _seconds(headers.get("Retry-After", ""), headers),
        *(_seconds(delay, headers) for delay in delays if isinstance(delay, str)),
    ]
    if status == 429:
        asked += [
            _seconds(reset, headers)
            for reset in _resets({**(repeated if isinstance(repeated, dict) else {}), **headers})
        ]
    return next((seconds for seconds in asked if seconds is not None), None)


def _resets(headers: Mapping[str, str]) -> list[str]:
    """Return the resets of the rate limits that have nothing left, the longest one first."""
    lower = {name.lower(): str(value) for name, value in headers.items()}
    resets = [
        value
        for name, value in lower.items()
        if name.startswith(RESET) and lower.get(name.replace(RESET, REMAINING), "0") == "0"
    ]
    return sorted(resets, key=lambda reset: _seconds(reset, headers) or 0.0, reverse=True)


def _seconds(value: str, headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a wait: a number, a duration such as 1m2.5s, or a time as a date or a Unix time."""
    value = value.strip()
    if (duration := DURATION.fullmatch(value)) is not None and any(duration.groups()):
        return sum(float(part or 0) * unit_s for part, unit_s in zip(duration.groups(), UNITS_S, strict=True))
    try:
        seconds = float(value)
        if seconds > UNIX_TIME_MIN:
            unix_s = seconds / 1000 if seconds > UNIX_TIME_MIN * 1000 else seconds
            seconds = unix_s - parsedate_to_datetime(headers["Date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        try:
            seconds = (parsedate_to_datetime(value) - parsedate_to_datetime(headers["Date"])).total_seconds()
        except (KeyError, TypeError, ValueError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
