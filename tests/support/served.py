"""Applications with a few routes, served by the service's own HTTP server, and a client."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient
from support.service_parts import ServiceParts
from yarl import URL

from trader.api import edge, health, rpc, streams
from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.registry import Registry
from trader.api.requests import REQUESTS
from trader.api.streams import BROADCASTERS, Broadcasters, Timing
from trader.database.pool import Database
from trader.operations.access import Access
from trader.settings.settings import Settings

HOST: Final = "127.0.0.1"

AppClient = TestClient[web.Request, web.Application]
"""What `aiohttp_client` makes of an application."""


def make_app(
    *routes: Iterable[web.RouteDef],
    context: Any = None,
    database: Database | None = None,
    registry: Registry | None = None,
    settings: Settings | None = None,
) -> web.Application:
    """An application with these routes and, given a context, the procedures of a registry."""
    settings = settings or Settings.load({"PORT": "0"}, None, demo=True)  # its own origin is its address
    if context is None:
        context, registry = SimpleNamespace(settings=settings), Registry()
    access = Access(database, settings.api_token)  # without keys it is not read
    return edge.make_app(settings, access, rpc.make_dispatcher(context, registry), chain(*routes))


def counted(app: web.Application | None) -> dict[tuple[str, str], float]:
    """Return how many requests an application has counted, by name and status."""
    assert app is not None
    samples = (sample for metric in app[REQUESTS].durations.collect() for sample in metric.samples)
    return {
        (sample.labels["procedure"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name.endswith("_count")
    }


async def call(client: AppClient, name: str, request: Mapping[str, object] | None = None, status: int = 200) -> Any:
    """Call a procedure, and return the body of its answer, which has this status."""
    async with client.post(f"/api/rpc/{name}", json=request or {}) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


def make_health_app(service_parts: ServiceParts) -> web.Application:
    """An application with the health endpoints."""
    app = make_app(health.routes())
    service_parts.hand_to(app)
    app.cleanup_ctx.append(health.watch)
    return app


def make_stream_app(
    broadcasters: Broadcasters,
    timing: Timing | None = None,
    routes: Iterable[web.RouteDef] = (),
    settings: Settings | None = None,
) -> web.Application:
    """An application with the event streams and other routes."""
    app = make_app(streams.routes(timing), routes, settings=settings)
    app[BROADCASTERS] = broadcasters
    app.cleanup_ctx.append(streams.run)
    app.on_shutdown.append(streams.end)
    return app


class Client:
    """Requests to one server, by path."""

    host = HOST

    def __init__(self, session: ClientSession, port: int, server: HttpServer) -> None:
        self.port = port
        self.server = server
        self.request = session.request
        self.get, self.head, self.options, self.post = session.get, session.head, session.options, session.post

    def make_url(self, path: str) -> URL:
        return URL.build(scheme="http", host=HOST, port=self.port, path=path)


@asynccontextmanager
async def served(app: web.Application, limits: ConnectionLimits | None = None) -> AsyncIterator[Client]:
    """Serve the application on a free port."""
    server = HttpServer(app, limits or ConnectionLimits(), shutdown_timeout_s=0.1)
    sockets = bind(HOST, 0)
    try:
        await server.start(sockets)
        port = int(sockets[0].getsockname()[1])
        async with ClientSession(f"http://{HOST}:{port}") as session:
            yield Client(session, port, server)
    finally:
        await server.stop()
