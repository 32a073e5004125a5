"""How long the event loop was held: what a request that came just then would have waited."""

import asyncio
import time
from types import TracebackType
from typing import Self

EVERY_S = 0.002


class LoopLag:
    """Samples while it is entered. `real_ms` is the wait, other processes of the machine included; `cpu_ms` the time

    that this thread itself was at work between two samples, whoever else had the processor.
    """

    def __init__(self) -> None:
        self.real_ms: list[float] = []
        self.cpu_ms: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._sample(), name="loop lag")
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample(self) -> None:
        while True:
            real_s, cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(EVERY_S)
            self.real_ms.append((time.perf_counter() - real_s - EVERY_S) * 1000)
            self.cpu_ms.append((time.thread_time() - cpu_s) * 1000)

    def words(self) -> str:
        """The figures, in a line."""
        ordered = sorted(self.real_ms)
        return (
            f"p50 {ordered[len(ordered) // 2]:5.1f}   p99 {ordered[len(ordered) * 99 // 100]:5.1f}   "
            f"max {ordered[-1]:5.1f}   own work max {max(self.cpu_ms):5.1f} ms"
        )
