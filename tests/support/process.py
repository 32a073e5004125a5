"""The service as a separate process on a free port, called over its real ports."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-m", "trader")
_LISTENING = re.compile(rb"listening on (http://127\.0\.0\.1:\d+)")
_READY_TIMEOUT_S = 240
_ALL_LOCAL = {"SSL_CERT_FILE": os.devnull}
"""Importing aiohttp reads the machine's certificates, which takes 30 ms; services of tests call this machine only."""

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "XDG_STATE_HOME", "OPENBLAS_NUM_THREADS")


def passed_on() -> dict[str, str]:
    """Return what a process gets of the caller's environment; the caller's marks of folders belong to all of them."""
    marks = {"XDG_STATE_HOME": str(Path.home() / ".local" / "state")}
    return marks | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


class ServiceProcess:
    """A running `python -m trader --demo`. `log` holds the lines written so far."""

    def __init__(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession) -> None:
        self.process = process
        self.http = http
        self.log: list[bytes] = []
        self.url = ""
        self.listening = asyncio.Event()
        self.reads_log = asyncio.Event()
        """Cleared by a test that stops the reader of the log."""

        self.reads_log.set()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def spawn(
        cls,
        folder: Path,
        http: aiohttp.ClientSession,
        *arguments: str,
        command: Sequence[str] = COMMAND,
        **environ: str,
    ) -> Self:
        """Start it in `folder`, with only PATH from the caller's environment. It has no `url` until it listens."""
        process = await asyncio.create_subprocess_exec(
            *command,
            *(arguments or ("--demo=fresh",)),
            cwd=folder,
            env={**passed_on(), **_ALL_LOCAL, "HOME": str(folder), "PORT": "0", "LOG_FORMAT": "json", **environ},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process, http)

    @classmethod
    async def start(cls, *place: Any, **how: Any) -> Self:
        """Start it like `spawn`, and return once it listens."""
        service = await cls.spawn(*place, **how)
        ended = asyncio.create_task(service.process.wait())
        listening = asyncio.create_task(service.listening.wait())
        try:
            await asyncio.wait([ended, listening], timeout=_READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            listening.cancel()
            if not service.url and service.process.returncode is None:
                await service.kill()
        assert service.url, b"".join(service.log).decode()
        return service

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            await self.reads_log.wait()
            self.log.append(line)
            if (match := _LISTENING.search(line)) is not None:
                self.url = match[1].decode()
                self.listening.set()

    async def call(self, procedure: str, **request: Any) -> Any:
        """Return the answer of a procedure in the plain style; any status other than 200 is an error."""
        status, body = await self.try_call(procedure, **request)
        assert status == 200, (procedure, status, body, b"".join(self.log[-20:]).decode())
        return body

    async def try_call(self, procedure: str, key: str | None = None, **request: Any) -> tuple[int, Any]:
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{self.url}/api/rpc/{procedure}"
        async with self.http.post(url, data=orjson.dumps(request), headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, orjson.loads(await response.read())

    async def role(self) -> str:
        """`leader`, `standby` or `reader`."""
        return str((await self.get("/health/schedulers"))[1]["role"])

    async def status(self) -> int:
        """The HTTP status of its health report; 200 soon after the schedulers have started."""
        return (await self.get("/health"))[0]

    def traceback(self) -> str:
        """The bugs that it has logged: every record with a traceback, or at the level of an error."""
        lines = (line.decode() for line in self.log)
        return "".join(line for line in lines if "Traceback" in line or '"level": "error"' in line)

    async def kill(self) -> None:
        """End it as in a power cut."""
        self.process.send_signal(signal.SIGKILL)
        await self._end()

    async def stop(self) -> int:
        """Ask it to stop as systemd does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return await self._end()

    async def _end(self) -> int:
        code = await self.process.wait()
        await self._reader
        return code


@asynccontextmanager
async def serving(folder: Path, *arguments: str, **environ: str) -> AsyncIterator[ServiceProcess]:
    """Run a service for the duration of the block; it is killed at the end if still running."""
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(folder, http, *arguments, **environ)
        try:
            yield service
        finally:
            if service.process.returncode is None:
                await service.kill()


async def run_command(folder: Path, *arguments: str, port: str = "0") -> tuple[int, Any]:
    """Run a command of `trader` in this folder. Return its exit code and its JSON."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, "--json",
        cwd=folder, env={**passed_on(), **_ALL_LOCAL, "HOME": str(folder), "PORT": port},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(240):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, orjson.loads(out) if out else None
