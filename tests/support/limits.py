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


def shift_loop(patch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what lets seconds pass at once for the timers of this event loop; the real ones go on."""
    loop, passed_s = asyncio.get_running_loop(), 0.0
    time = loop.time

    def pass_time(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    patch.setattr(loop, "time", lambda: time() + passed_s)
    return pass_time
