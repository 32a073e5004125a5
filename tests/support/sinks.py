"""HTTP sinks on a port of this machine, as operators name them in NOTIFY_URL and HEARTBEAT_URL."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web
from aiohttp.test_utils import TestServer


class Received(NamedTuple):
    """A request that a sink was sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


class Sinks:
    """Paths that answer 200, and others: `/hangs` never answers, `/fails` answers 500, `/closes` hangs up.

    `arrived` is set with every request.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.arrived = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.received.append(Received(request.method, request.path_qs, request.headers.copy(), body))
        self.arrived.set()
        if request.path == "/hangs":
            await asyncio.Event().wait()
        if request.path == "/closes" and request.transport is not None:
            request.transport.abort()
        return web.Response(status=500 if request.path == "/fails" else 200)

    def of(self, path: str) -> list[Received]:
        return [one for one in self.received if one.target.partition("?")[0] == path]

    async def wait_for(self, path: str, count: int = 1) -> list[Received]:
        """Wait until a path was sent so many requests; the caller's own time limit ends it."""
        while len(self.of(path)) < count:
            self.arrived.clear()
            await self.arrived.wait()
        return self.of(path)


@asynccontextmanager
async def sinks() -> AsyncIterator[Sinks]:
    here = Sinks()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", here.answer)
    async with TestServer(app, shutdown_timeout=0) as server:
        here.url = str(server.make_url("")).rstrip("/")
        yield here
