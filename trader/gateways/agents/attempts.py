"""Attempts of a provider request: failure kinds, totals over the attempts of one answer, and response reading."""

import asyncio
import math
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

import aiohttp

from trader.domain.agents.conversation import Turn
from trader.errors import ProviderError
from trader.gateways.agents.keys import Key
from trader.gateways.agents.replies import estimated_count

ANSWER_BYTES_MAX = 4 * 1024 * 1024
PARSE_INLINE_MAX: Final = 64 * 1024
"""Bytes up to which an answer is parsed on the event loop; a longer one may take seconds and is parsed in a thread."""

T = TypeVar("T")


class Transient(ProviderError):
    """This attempt failed; another may succeed."""


class KeyUnusable(ProviderError):
    """The key of this attempt is in cooldown; another key may work."""


class FieldRefused(ProviderError):
    """The model does not accept a field of the request; without it the request may succeed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Progress:
    """Totals over the attempts of one answer. `spent` are keys that are not used again before a wait."""

    def __init__(self) -> None:
        self.spent: set[Key] = set()
        self.failed: set[Key] = set()
        self.failures = 0
        self.unmetered = 0
        self.unreported = (0, 0)
        self.waits = 0
        self.waited_s = 0.0
        self.raw = ""


def sum_of(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return first[0] + second[0], first[1] + second[1]


def most_tokens(turn: Turn, body: bytes) -> tuple[int, int]:
    """Return the maximal tokens, (input, output), of a request."""
    return estimated_count(len(body)), turn.answer_tokens_max


def is_affordable(turn: Turn, progress: Progress, body: bytes) -> bool:
    """Return whether the turn's tokens allow another attempt, each attempt counted at its maximum."""
    if turn.tokens_max is None or not any(progress.unreported):
        return True
    return sum(progress.unreported) + sum(most_tokens(turn, body)) <= turn.tokens_max


async def read_bounded(response: aiohttp.ClientResponse, name: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES_MAX:
            too_long = f"{name} answered with more than {ANSWER_BYTES_MAX // 1024 // 1024} MiB"
            raise ProviderError(too_long, unmetered_attempts=1)
        parts.append(part)
    return b"".join(parts)


async def apply(read: Callable[[bytes], T], content: bytes) -> T:
    """Parse an answer with `read`, in a thread when it is long."""
    return read(content) if len(content) <= PARSE_INLINE_MAX else await asyncio.to_thread(read, content)


def retry_after_of(headers: Mapping[str, str]) -> float | None:
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
