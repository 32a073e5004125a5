"""A service on a port, which tests attack over raw sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from support.served import make_app
from support.waiting import until

from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.context import ACCESS
from trader.api.registry import Registry
from trader.api.requests import WAITING_BODIES
from trader.api.routes import Route
from trader.api.schemas.common import Empty, Wire
from trader.operations.access import Access
from trader.settings.settings import Settings

CALL = b"POST /api/rpc/demo.wait HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FAST = ConnectionLimits(connections_max=40, idle_s=0.4, head_s=0.2, answer_s=0.3)

registry = Registry()


class Large(Wire):
    text: str


@registry.procedure("demo.wait")
async def wait(_: object, __: Empty) -> Large:
    return Large(text="")


@registry.procedure("demo.large")
async def large(_: object, __: Empty) -> Large:
    return Large(text="x" * 8_000_000)


class Context:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class Service:
    """A service on a port, with an inspectable server."""

    def __init__(self, app: web.Application, server: HttpServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def waiting_bytes(self) -> int:
        """The bytes of partly received bodies."""
        return self.app[WAITING_BODIES].bytes

    @property
    def open(self) -> int:
        return len(self.server)

    async def until(self, fits: Callable[[int], bool]) -> None:
        await until(lambda: fits(self.open))

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def send(self, data: bytes) -> bytes:
        """Send data, and return everything received until the service closes."""
        reader, _ = await self.connect(data)
        async with asyncio.timeout(5):
            return await reader.read()

    async def leave(self) -> None:
        """Close every connection on this side."""
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.writers), return_exceptions=True)
        self.writers.clear()

    async def health_s(self) -> float:
        """Return how long the service takes to answer `/health` on a new connection."""
        started_s = time.perf_counter()
        async with ClientSession() as session, session.get(f"{self.url}/health") as response:
            assert response.status == 200
        return time.perf_counter() - started_s


def request_id_of(answer: bytes) -> str:
    return answer.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0].decode()


@asynccontextmanager
async def running(
    limits: ConnectionLimits, procedures: Registry = registry, body_wait_s: float = 1, **environ: str
) -> AsyncIterator[Service]:
    """Run a service with the procedures of the registry and two extra paths: one healthy, one with a bug."""
    settings = Settings.load(environ, None, demo=True)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("a bug")

    routes = [*Route("/health").get(health), *Route("/broken").get(broken)]
    app = make_app(routes, context=Context(settings), registry=procedures, settings=settings)
    if settings.api_token is not None:
        app[ACCESS] = Access(None, settings.api_token)
    server = HttpServer(app, limits, shutdown_timeout_s=0.1)
    sockets = bind("127.0.0.1", 0)
    await server.start(sockets)
    service = Service(app, server, int(sockets[0].getsockname()[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trader.api.requests.BODY_WAIT_S", body_wait_s)
        try:
            yield service
        finally:
            await service.leave()
            await server.stop()
