"""Workers: the processes of this machine that execute the runs of a sweep."""

import asyncio
import pickle
from types import TracebackType
from typing import Self

from trader.backtest.cluster import WORKER
from trader.backtest.spec import BacktestSpec
from trader.backtest.worker import LENGTH


class Workers:
    """A number of processes, each started when a run needs it, and again after it died."""

    def __init__(self, count: int) -> None:
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all = [_Worker() for _ in range(count)]
        for worker in self._all:
            self._idle.put_nowait(worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(worker.end() for worker in self._all))

    async def run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        """Execute a run once a process is free. Return its output on standard error, and its exit code."""
        worker = await self._idle.get()
        try:
            return await worker.run(spec)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """A process that executes one run after another, on a market that it opens once."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *WORKER, "serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        specs, answers = self._process.stdin, self._process.stdout
        assert specs is not None
        assert answers is not None
        content = pickle.dumps(spec)
        try:
            specs.write(LENGTH.pack(len(content)) + content)
            answer = await answers.readexactly(*LENGTH.unpack(await answers.readexactly(LENGTH.size)))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            self._process = None
            return b"", code
        ended: tuple[bytes, int] = pickle.loads(answer)  # noqa: S301  # written by our own process
        return ended

    async def end(self) -> None:
        """End the process, and the run that it executes."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
