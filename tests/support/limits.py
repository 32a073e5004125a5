"""Limits: what is accepted up to n, and not beyond."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

Accepts = Callable[[int, pytest.MonkeyPatch, Path], bool | Coroutine[Any, Any, bool]]


async def outcomes(most: int, accepts: Accepts, patch: pytest.MonkeyPatch, folder: Path) -> list[bool]:
    """Return whether as much as a limit allows is accepted, and whether one more is."""
    found = []
    for count in (most, most + 1):
        outcome = accepts(count, patch, folder)
        found.append(await outcome if isinstance(outcome, Awaitable) else outcome)
    return found


def stop_loop(patch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stop the time of this event loop's timers, and return what lets milliseconds pass for them."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()

    def pass_ms(count: int) -> None:
        nonlocal now_s
        now_s += count / 1000

    patch.setattr(loop, "time", lambda: now_s)
    return pass_ms
