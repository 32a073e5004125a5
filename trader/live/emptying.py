"""Empties an account at a venue from outside the service: at once, or when the service has stopped answering."""

import asyncio
import logging
from datetime import timedelta
from typing import Final

import aiohttp
import msgspec

from trader.core.clock import SystemClock
from trader.live.budget import Priority, spending_as
from trader.live.venue import VenueCloser

log = logging.getLogger("trader.live")

PAUSE_S: Final = 2.0
EMPTY_LOOKS: Final = 7
"""The venue shows what it executed up to ten seconds later: so many looks in a row must find the account empty."""

PATIENCE_S: Final = 65.0
"""How long a request waits for its turn: longer than the minute whose requests the venue limits."""

_ARMED_FOR: Final = timedelta(minutes=6)
"""The venue schedules nothing less than five minutes ahead."""


class _Health(msgspec.Struct):
    status: str


async def empty(closer: VenueCloser, *, looks: int, pause_s: float = PAUSE_S) -> bool:
    """Cancel all orders and close all positions until the venue shows none. Return False after `looks` in vain."""
    found_empty = 0
    for _ in range(looks):
        with spending_as(Priority.CLOSE, PATIENCE_S):
            found = await closer.look()
        found_empty = found_empty + 1 if found is None else 0
        if found is not None:
            log.warning("the account has %s", found)
        if found_empty == EMPTY_LOOKS:
            return True
        await asyncio.sleep(pause_s)
    return False


async def watch(closer: VenueCloser, health_url: str, silent_s: float, *, pause_s: float = PAUSE_S) -> None:
    """Empty the account whenever the service has not answered for `silent_s` seconds; until canceled.

    While it is silent, the account is kept empty: a service that hangs may still send. Once it is empty, the venue also
    has a scheduled cancellation of all orders, should this process end, too. It would cancel stops, so it is called off
    before anything else once the account is not empty, or the service answers.
    """
    loop, is_armed = asyncio.get_running_loop(), False
    answered_s = loop.time()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while True:
            has_answered = await _answers(http, health_url)
            answered_s = loop.time() if has_answered else answered_s
            is_silent = (silence_s := loop.time() - answered_s) >= silent_s
            with spending_as(Priority.CLOSE, PATIENCE_S):
                if is_armed and (has_answered or is_silent):
                    is_armed = not await closer.cancel_all_at(None)
                if is_silent:
                    log.error("%s has not answered for %.0f s: the account is emptied", health_url, silence_s)
                    if await empty(closer, looks=10 * EMPTY_LOOKS, pause_s=pause_s):
                        is_armed = await closer.cancel_all_at(SystemClock().now() + _ARMED_FOR) or is_armed
            await asyncio.sleep(pause_s)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a service answers there, healthy or not; the error page of a proxy is no answer."""
    try:
        async with http.get(url, allow_redirects=False) as answer:
            msgspec.json.decode(await answer.content.read(1 << 20), type=_Health)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return False
    return True
