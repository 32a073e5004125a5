"""The edge of the service: what every request passes, whatever its route.

Each handler is wrapped by `served`, which gives its requests ids, counts and logs them, refuses foreign hosts, and
completes the head of the response.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from multidict import istr

from trader.api.compression import BYTES_MIN, compress_response
from trader.api.cors import CrossOrigin, HostRule, OriginRule, answer_plain_options
from trader.api.requests import GIVEN_UP, REQUEST_ID, UNKNOWN, Handler, RequestLog
from trader.api.schemas.common import ENCODER
from trader.api.schemas.streams import Refusal
from trader.settings import Settings

JSON: Final = "application/json"

_ID_HEADER: Final = istr("X-Request-Id")
_LAG_HEADER: Final = istr("X-Lag-Seconds")

log = logging.getLogger(__name__)


class MarkedConnection(Protocol):
    """A connection that is told when a request on it begins and ends."""

    def begin(self, body: StreamReader) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Edge:
    """What every request passes: the log, the rules for hosts and origins, and the headers of each response.

    `lag_s` is how old the data of a follower is at most, in seconds; None on the leader.
    """

    requests: RequestLog = field(default_factory=RequestLog)
    hosts: HostRule | None = None
    origins: OriginRule | None = None
    cors: CrossOrigin | None = None
    lag_s: Callable[[], float | None] = lambda: None

    async def finish_head(self, request: web.Request, response: web.StreamResponse, request_id: str) -> None:
        """Complete the headers of a response before it is sent, and compress it.

        aiohttp-cors omits `Vary`: no cache may serve one origin's response to another.
        """
        if isinstance(response, web.Response) and isinstance(body := response.body, bytes) and len(body) >= BYTES_MIN:
            await compress_response(request, response, body)
        headers = response.headers
        vary = headers.get(hdrs.VARY)
        headers[hdrs.VARY] = f"{vary}, {hdrs.ORIGIN}" if vary else hdrs.ORIGIN
        headers[_ID_HEADER] = request_id
        headers[hdrs.SERVER] = "trader"  # without versions
        if (lag_s := self.lag_s()) is not None:
            headers[_LAG_HEADER] = f"{lag_s:.3f}"
        if self.cors is not None and hdrs.ORIGIN in request.headers:
            await self.cors.add_headers(request, response)


EDGE: Final = web.AppKey("edge", Edge)


def setup(app: web.Application, settings: Settings, lag_s: Callable[[], float | None] = lambda: None) -> None:
    """Set up what every request passes. Routes that are added later take part in it."""
    app[EDGE] = Edge(hosts=HostRule(settings), origins=OriginRule(settings), cors=CrossOrigin.of(settings), lag_s=lag_s)


def served(app: web.Application, name: str, handler: Handler, *, changes: bool = False) -> Handler:
    """Wrap a handler: its requests have ids and end in the log, its connections know of them, its bugs answer 500.

    Neither a middleware nor a hook of the application: with one, aiohttp adds wrappers of its own to every request.
    A handler that prepares its response itself calls `finish_head` before. `changes` marks requests that change
    something.
    """
    edge = app.get(EDGE) or Edge()
    requests, hosts = edge.requests, edge.hosts

    async def handle(request: web.Request) -> web.StreamResponse:
        started_s = time.perf_counter()
        request[REQUEST_ID] = request_id = requests.new_id()
        connection: MarkedConnection | None = getattr(request.transport, "connection", None)  # only ours have one
        if connection is not None:
            connection.begin(request.content)
        status = 500
        try:
            try:
                foreign = None if hosts is None else hosts.refusal(request)
                response = refusal(421, foreign) if foreign else await handler(request)
            except Exception:
                log.exception("request %s: %s %s failed", request_id, request.method, request.path)
                response = _answer_bug(request)
            status = response.status
            if not response.prepared:
                await edge.finish_head(request, response, request_id)
                if status >= 400 and GIVEN_UP in request:
                    await _answer_and_close(request, response)
        finally:
            requests.finished(name, status, started_s, request_id, changes=changes)
            if connection is not None:
                connection.end()
        return response

    return handle


async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """Complete the headers of a response that its handler is about to prepare."""
    await (request.app.get(EDGE) or Edge()).finish_head(request, response, request[REQUEST_ID])


def _answer_bug(request: web.Request) -> web.Response:
    """Answer instead of a handler that has raised an exception, without the cause."""
    if request.writer.output_size and request.transport is not None:  # a response has begun
        request.transport.abort()
    response = refusal(500, "Internal server error")
    response.force_close()
    return response


async def _answer_and_close(request: web.Request, response: web.StreamResponse) -> None:
    """Answer at once and close: aiohttp would wait for the rest of the body, and inflate it."""
    response.force_close()
    with suppress(ConnectionError):  # the caller has left
        await response.prepare(request)
        await response.write_eof()
    if request.transport is not None:
        request.transport.close()


def json_answer(status: int, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=ENCODER.encode(body), headers={hdrs.CONTENT_TYPE: JSON, **(headers or {})})


def refusal(status: int, error: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_answer(status, Refusal(error=error), headers)


async def _refuse_expectation(request: web.Request) -> web.Response:
    expected = request.headers.get(hdrs.EXPECT, "")[:100]
    response = refusal(417, f"Expect: {expected} is not supported here; use 100-continue, or leave it out")
    response.force_close()  # the body may or may not follow
    return response


async def answer_options(request: web.Request) -> web.StreamResponse:
    """Answer OPTIONS: a browser's preflight, or any other."""
    cors = (request.app.get(EDGE) or Edge()).cors
    return await (answer_plain_options(request) if cors is None else cors.answer_preflight(request))


async def answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`, and refuse any other expectation as JSON; aiohttp's own refusal is text."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return await served(request.app, UNKNOWN, _refuse_expectation)(request)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None
