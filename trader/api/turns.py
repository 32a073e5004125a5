"""Turns: the order in which callers get long answers and have long bodies parsed, and slices of long work.

The event loop serves everyone, so one caller's long work waits for others': callers with a key or token never wait
for those without one, and the anonymous ones of each address take turns with those of other addresses.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from trader.core.errors import Unavailable
from trader.operations.access import Caller

S = TypeVar("S")
T = TypeVar("T")

WAITING_MAX: Final = 256
"""How many calls of one address, or with one key, may wait for their turn."""

SLICE_S: Final = 0.001
"""How long a slice of long work may hold the event loop."""


class Turns:
    """At most `at_once` turns of anonymous callers, and as many of known ones, at the same time."""

    def __init__(self, at_once: int = 1) -> None:
        self._lanes = {is_known: _Lane(at_once) for is_known in (False, True)}

    @asynccontextmanager
    async def of(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for the caller's turn, which lasts for the block.

        :raises Unavailable: too many calls of the same source are waiting
        """
        lane = self._lanes[caller.is_known]
        await lane.begin(caller.source)
        try:
            yield
        finally:
            lane.end()


class _Lane:
    """The turns of callers, by source: each source waits in its own queue, and the queues take turns."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}  # the next source first

    async def begin(self, source: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        queue = self._queues.setdefault(source, deque())
        if len(queue) >= WAITING_MAX:
            raise Unavailable("Too many other calls of the same caller are waiting", 1)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn has come, but its caller is gone
                self.end()
            raise

    def end(self) -> None:
        while self._queues:
            source = next(iter(self._queues))
            queue = self._queues.pop(source)
            while queue and queue[0].done():  # the callers are gone
                queue.popleft()
            if queue:
                turn = queue.popleft()
                if queue:
                    self._queues[source] = queue
                turn.set_result(None)
                return
        self._free += 1


async def in_slices(make: Callable[[S], T], rows: Iterable[S]) -> list[T]:
    """Return what `make` returns for each row, and let other tasks run every `SLICE_S` seconds."""
    made, until_s = [], time.perf_counter() + SLICE_S
    for row in rows:
        made.append(make(row))
        if time.perf_counter() >= until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + SLICE_S
    return made
