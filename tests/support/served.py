"""Applications of a few routes, and one served by the service's own HTTP server with a client of it."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient
from support.house import House
from yarl import URL

from trader.api import edge, health, rpc, streams
from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.context import ACCESS
from trader.api.registry import Registry
from trader.api.rpc import DISPATCHER
from trader.api.streams import HUBS, Hubs, Timing
from trader.services.operations.access import Access
from trader.settings import Settings
from trader.store.database.pool import Database

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
    """An application of these routes, and of the procedures of a registry when it has a context."""
    app = web.Application()
    settings = settings or Settings.load({"PORT": "0"}, None, demo=True)  # its own origin is where it is served
    app[ACCESS] = Access(database, settings.api_token)  # type: ignore[arg-type]  # without keys it is not read
    if context is not None:
        app[DISPATCHER] = rpc.make_dispatcher(context, registry)
        app.add_routes(app[DISPATCHER].routes())
    for each in routes:
        app.add_routes(each)
    edge.setup(app, settings)
    return app


def make_health_app(house: House) -> web.Application:
    """An application of the health endpoints."""
    app = make_app(health.routes())
    house.hand_to(app)
    app.cleanup_ctx.append(health.watch)
    return app


def make_stream_app(
    hubs: Hubs,
    timing: Timing | None = None,
    routes: Iterable[web.RouteDef] = (),
    settings: Settings | None = None,
) -> web.Application:
    """An application of the event streams, and of other routes."""
    app = make_app(streams.routes(timing), routes, settings=settings)
    app[HUBS] = hubs
    app.cleanup_ctx.append(streams.run)
    app.on_shutdown.append(streams.end)
    return app


class Client:
    """Requests to one server, by path."""

    host = HOST

    def __init__(self, session: ClientSession, port: int) -> None:
        self.port = port
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
            yield Client(session, port)
    finally:
        await server.stop()
