"""Waiting for what another task or process does, where no event announces it."""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

PATIENCE_S: Final = 60.0
"""Bounds a hang only: a loaded machine must not fail a test."""

_PAUSES_S: Final = 0.001, 0.1
"""The first and the longest pause between two checks: each is 1.5 times the previous one."""


async def until(condition: Callable[[], Any], what: str = "it", *, within_s: float = PATIENCE_S) -> Any:
    """Poll a function or coroutine function, and return its first true result. Without one, fail and name `what`."""
    found: Any = None
    pause_s, longest_s = _PAUSES_S
    try:
        async with asyncio.timeout(within_s):
            while not (found := await _result(condition)):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, longest_s)
    except TimeoutError as error:
        raise AssertionError(f"{what} never came within {within_s:g} s; the last result was {found!r}") from error
    return found


async def turns(count: int = 20) -> None:
    """Let every other task that can run do so, for this many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def becomes(ask: Callable[[], Any], expected: Any, *, within_s: float = PATIENCE_S) -> None:
    """Poll a function or coroutine function until its result equals `expected`."""
    found: Any = None

    async def is_expected() -> bool:
        nonlocal found
        found = await _result(ask)
        return bool(found == expected)

    try:
        await until(is_expected, within_s=within_s)
    except AssertionError as error:
        raise AssertionError(f"expected {expected!r}, found {found!r}") from error


async def retried(ask: Callable[[], Any], refused: type[Exception], *, within_s: float = PATIENCE_S) -> Any:
    """Call a function or coroutine function until it no longer raises `refused`, and return its result."""
    results: list[Any] = []

    async def succeeds() -> bool:
        with suppress(refused):
            results.append(await _result(ask))
        return bool(results)

    await until(succeeds, within_s=within_s)
    return results[0]


async def _result(ask: Callable[[], Any]) -> Any:
    found = ask()
    return await found if inspect.isawaitable(found) else found
