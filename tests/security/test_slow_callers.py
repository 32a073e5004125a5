"""Slow callers on every route: endless heads and unread answers are cut off, and other callers are served."""

import asyncio
import socket
from contextlib import ExitStack, suppress
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from support.composed import composed
from support.served import Client, served
from support.waiting import until

from trader.api.connections import ConnectionLimits
from trader.app import build_app

pytestmark = pytest.mark.slow

LIMITS_OF_HEADS: Final = ConnectionLimits(head_s=0.5, idle_s=3600)
LIMITS_OF_ANSWERS: Final = ConnectionLimits(head_s=3600, answer_s=0.5, idle_s=1)
"""Only one of the limits can end a connection, however slow the machine is; `idle_s` ends the answers that have fit."""

GETS_AT_ONCE: Final = 30
"""How many pages or files a caller asks for and does not read: the long ones are more than all buffers hold."""

CALLS_AT_ONCE: Final = 3
"""The same of the procedures, whose answers are short here."""


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    """Return the method and the path of every route, with something in place of its parameters."""
    return {
        (route.method, resource.canonical.replace("{", "").replace("}", ""))
        for resource in app.router.resources()
        for route in resource
    }


async def test_slow_heads_and_slow_readers_of_every_route_are_ended_and_others_are_served(dsn: str) -> None:
    async with composed(dsn, MARKET_SOURCE="synthetic") as (service, _):
        app = build_app(service.context.settings, service)
        routes = sorted(routes_of(app))
        assert ("POST", "/api/rpc/simulator.placeOrder") in routes
        async with served(app, LIMITS_OF_HEADS) as client:
            heads = [slow_head(client, method, path) for method, path in routes]
            assert await asyncio.gather(*heads) == [b"HTTP/1.1 408"] * len(routes)
        async with served(build_app(service.context.settings, service), LIMITS_OF_ANSWERS) as client:
            with ExitStack() as open_sockets:
                for method, path in routes:
                    if not path.startswith("/api/events"):  # a stream stays open while its reader has room
                        open_sockets.enter_context(slow_reader(client, method, path))
                await until(lambda: is_healthy(client), "an answer to another caller")
                await until(lambda: not len(client.server), "the end of the connections", within_s=600)
            await until(lambda: is_healthy(client), "an answer afterward")


async def test_callers_of_every_route_may_leave_at_any_time(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """They leave within their body, before an answer, and after the beginning of one."""
    async with composed(dsn, MARKET_SOURCE="synthetic") as (service, _):
        app = build_app(service.context.settings, service)
        async with served(app) as client:
            for method, path in sorted(routes_of(app)):
                for body, reads in (("{", False), ("{}", False), ("{}", True)):
                    await leave(client, method, path, body, reads=reads)
            assert await is_healthy(client)
            await until(lambda: not any(len(stream) for stream in service.broadcasters.all.values()))
    bugs = [each for each in caplog.records if each.levelname == "ERROR" or each.exc_info]
    assert [each.getMessage() for each in bugs if each.name != "trader.api.health"] == [], "a slow machine is unhealthy"


async def leave(client: Client, method: str, path: str, body: str, *, reads: bool) -> None:
    """Send a request, and cut the connection, perhaps after the beginning of the answer."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    host = f"Host: 127.0.0.1:{client.port}"
    writer.write(f"{method} {path} HTTP/1.1\r\n{host}\r\nContent-Length: 2\r\n\r\n{body}".encode())
    async with asyncio.timeout(60):
        await (reader.read(1) if reads else asyncio.sleep(0))
    writer.transport.abort()


async def slow_head(client: Client, method: str, path: str) -> bytes:
    """Send a head that never ends. Return the beginning of the answer."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ".encode())
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer[:12]


def slow_reader(client: Client, method: str, path: str) -> socket.socket:
    """Ask for many answers and read none of them."""
    sock = socket.create_connection((client.host, client.port))
    sock.setblocking(False)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    with suppress(BlockingIOError):
        sock.send(head * (GETS_AT_ONCE if method == "GET" else CALLS_AT_ONCE))
    return sock


async def is_healthy(client: Client) -> bool:
    with suppress(aiohttp.ClientError):  # on a slow machine, a connection may be idle for too long before its request
        async with aiohttp.ClientSession() as session, session.get(client.make_url("/health/live")) as answer:
            return answer.status == 200
    return False
