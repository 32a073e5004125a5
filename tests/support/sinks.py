"""HTTP sinks on a port of this machine, as configured in NOTIFY_URL and HEARTBEAT_URL.

Three of them refuse what the services that they imitate would refuse, according to public documentation.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer


class Received(NamedTuple):
    """A request sent to a sink. `is_taken`: the sink was available."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    is_taken: bool = True


NTFY = "/trader-alarms"
SLACK = "/services/T0/B0/s3cret"
TELEGRAM = "/bot1:s3cret/sendMessage"


def ntfy_status(request: web.Request, body: bytes) -> int:
    """Refuse longer messages, which ntfy turns into files that phones do not show."""
    is_known = request.headers.get("Priority") in ("min", "low", "default", "high", "max", "urgent")
    is_text = request.content_type == "text/plain" and request.headers.get("Title", "").isascii()
    return 200 if is_known and is_text and body.decode() and len(body) <= 4096 else 400


def slack_status(request: web.Request, body: bytes) -> int:
    """Refuse raw control characters, which Slack accepts and renders as links or channel mentions."""
    if request.content_type != "application/json" or not isinstance(fields := orjson.loads(body), dict):
        return 400
    text = fields.get("text", "")
    raw = re.sub("&(amp|lt|gt);", "", text)
    return 200 if 0 < len(text) <= 40_000 and not re.search("[&<>]", raw) else 400


def telegram_status(request: web.Request, body: bytes) -> int:
    """Without `parse_mode` every character is literal; the limit counts UTF-16 units."""
    if request.content_type != "application/json" or not isinstance(fields := orjson.loads(body), dict):
        return 400
    is_chat = re.fullmatch(r"-?\d+|@\w+", str(fields.get("chat_id", ""))) is not None
    text = fields.get("text", "")
    return 200 if is_chat and "parse_mode" not in fields and 0 < len(text.encode("utf-16-le")) // 2 <= 4096 else 400


SERVICES = {NTFY: ntfy_status, SLACK: slack_status, TELEGRAM: telegram_status}


class Sinks:
    """Paths that answer 200, and others: `/hangs` never answers, `/fails` answers 500, `/closes` disconnects.

    `/away` answers 503 while `away` is set. `arrived` is set with every request.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.arrived = asyncio.Event()
        self.away = False
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_away = request.path == "/away" and self.away
        self.received.append(Received(request.method, request.path_qs, request.headers.copy(), body, not is_away))
        self.arrived.set()
        if request.path == "/hangs":
            await asyncio.Event().wait()
        if request.path == "/closes" and request.transport is not None:
            request.transport.abort()
        if request.path in SERVICES and request.method == "POST":
            return web.Response(status=SERVICES[request.path](request, body))
        if is_away:
            return web.Response(status=503)
        return web.Response(status=500 if request.path == "/fails" else 200)

    def of(self, path: str) -> list[Received]:
        return [message for message in self.received if message.target.partition("?")[0] == path]

    async def wait_for(self, path: str, count: int = 1) -> list[Received]:
        """Wait until a path has received this many requests, within the caller's time limit."""
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
