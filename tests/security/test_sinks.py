"""Sinks of notices: a redirect leads nowhere, an endless answer holds nothing up, and no error shows an address."""

import asyncio
import socket
from datetime import UTC, datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.waiting import turns

from trader.core.errors import SinkUnavailable
from trader.operations.domain.alarms import AlarmCause, Notice
from trader.operations.notifications import make_sinks
from trader.settings.forms import Secret

AT = datetime(2026, 1, 1, tzinfo=UTC)
NOTICE = Notice(state="firing", cause=AlarmCause("database", "one"), text="gone", at=AT, since=AT)
TOKEN = "s3cret-t0ken"


async def send(address: str, *, timeout_s: float = 30) -> str:
    """Send a notice. Return why it did not arrive, or nothing."""
    (sink,) = make_sinks([Secret(address)], "here:1", timeout_s=timeout_s)
    try:
        await sink.send(NOTICE)
    except SinkUnavailable as error:
        return str(error)
    finally:
        await sink.close()
    return ""


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_to_an_inside_address_is_not_followed(status: int) -> None:
    asked = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, headers={"Location": "/inside"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", redirect)
    async with TestServer(app) as server:
        why = await send(f"http://127.0.0.1:{server.port}/{TOKEN}")
    assert asked == [f"/{TOKEN}"]
    assert why == f"the answer was HTTP {status}"


async def test_a_name_that_moves_inside_gets_the_notice_and_shows_only_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is the operator's setting, so it may be an inside one: now, or whenever the resolver says so."""
    asked: list[tuple[str, str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.method, request.path, (await request.json())["message"]))
        status = 200 if len(asked) == 1 else 307
        return web.Response(status=status, text="secret of the inside", headers={"Location": "/other"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as first, TestServer(app, host="127.0.0.2", port=first.port):
        places = iter(["127.0.0.1", "127.0.0.2"])

        def resolve(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(places), first.port))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        address = f"http://alerts.example:{first.port}/{TOKEN}"
        assert await send(address) == ""
        assert await send(address) == "the answer was HTTP 307"
    assert asked == [("POST", f"/{TOKEN}", "gone")] * 2


async def test_an_answer_that_never_ends_does_not_hold_up_the_next_notice() -> None:
    left = asyncio.Event()

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 4096)
                await turns(1)
        finally:
            left.set()

    app = web.Application()
    app.router.add_post("/", trickle)
    async with TestServer(app) as server:
        assert await send(f"http://127.0.0.1:{server.port}/") == ""
        async with asyncio.timeout(30):
            await left.wait()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, b"\xff\xfe\r\n\r\n", b"SSH-2.0-x\r\n"]
)
async def test_what_listens_inside_shows_nothing_of_itself_or_the_address(answer: bytes) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        why = await send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{TOKEN}?chat={TOKEN}")
    assert why.startswith("no answer (")
    assert TOKEN not in why
    assert "SSH" not in why
