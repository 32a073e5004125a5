"""Lag of the event loop: how long a request arriving at some moment would have waited."""

import asyncio
import time
from types import TracebackType
from typing import Self

from support.waiting import turns

EVERY_S = 0.002


class LoopLag:
    """Samples the lag while it is entered.

    `real_ms` is the wait, including time taken by other processes on the machine; `cpu_ms` is the processor time of
    only this thread between two samples.
    """

    def __init__(self) -> None:
        self.real_ms: list[float] = []
        self.cpu_ms: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._sample(), name="loop lag")
        await turns(1)  # begins the first sample
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.sleep(EVERY_S)  # for the pending sample
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample(self) -> None:
        while True:
            real_s, cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(EVERY_S)
            self.real_ms.append((time.perf_counter() - real_s - EVERY_S) * 1000)
            self.cpu_ms.append((time.thread_time() - cpu_s) * 1000)
