"""Tasks: how the service starts its tasks and ends them, so that none ends unnoticed.

`start` is for work that ends, and `keep` for work that continues until it is canceled. All other tasks have an owner
that awaits them: those of `app.py` and `composition/leadership.py` end the process with their error, so that its
supervisor starts it again.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar

from trader.core.errors import TraderError

T = TypeVar("T")

RESTART_S: Final = 1.0
"""Real seconds until work that was ended by a bug begins again."""

log = logging.getLogger("trader")


def start(work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> asyncio.Task[T]:
    """Start work that ends, by default in a copy of the present context; its failure is logged."""
    task = asyncio.create_task(work, name=name, context=context)
    task.add_done_callback(log_failure)
    return task


def keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Start work that continues until it is canceled; if a bug ends it, the bug is logged and the work begins again.

    It outlives what starts it, and inherits nothing of it, such as its patience.
    """
    return start(_keep(work, name), name, Context())


async def end(*tasks: asyncio.Task[Any] | None, limit_s: float | None = None) -> Collection[asyncio.Task[Any]]:
    """Cancel the tasks, and wait for their ends, at most `limit_s` real seconds. Return those that go on."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    return (await asyncio.wait(begun, timeout=limit_s))[1] if begun else ()


async def _keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    task = asyncio.current_task()
    while True:
        error: BaseException | None = None
        try:
            await work()
        except (Exception, asyncio.CancelledError) as caught:  # noqa: BLE001 - work that continues must outlive any bug
            error = caught
        if task is None or task.cancelling():  # by its owner, not something that the work awaited
            if error is not None:
                raise error
            return
        log.error("%s ended by a bug; it begins again in %g s", name, RESTART_S, exc_info=error)
        await asyncio.sleep(RESTART_S)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the error that ended a task; a done callback for tasks whose result is not awaited."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, TraderError):
        log.warning("%s failed: %s", task.get_name(), error)
    else:
        log.error("%s ended by a bug", task.get_name(), exc_info=error)
