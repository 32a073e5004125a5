"""A site served by the service's own HTTP server, and a client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import ClientSession
from yarl import URL

from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.site import Site

HOST: Final = "127.0.0.1"


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
async def served(site: Site, limits: ConnectionLimits | None = None) -> AsyncIterator[Client]:
    """Serve the site on a free port."""
    server = HttpServer(site, limits or ConnectionLimits(), shutdown_timeout_s=0.1)
    sockets = bind(HOST, 0)
    try:
        await server.start(sockets)
        port = int(sockets[0].getsockname()[1])
        async with ClientSession(f"http://{HOST}:{port}") as session:
            yield Client(session, port)
    finally:
        await server.stop()
