"""Routes for GET requests: each is declared once, with its path, methods and documentation."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from multidict import istr

from trader.api.compression import compress_response
from trader.api.cors import HOSTS, ORIGINS, answer_options
from trader.api.requests import GIVEN_UP, NAME, REQUEST_ID, REQUESTS, UNKNOWN, Handler, RequestLog
from trader.api.schemas.common import ENCODER
from trader.api.schemas.streams import Refusal

JSON: Final = "application/json"

_ID_HEADER: Final = istr("X-Request-Id")

log = logging.getLogger(__name__)


class MarkedConnection(Protocol):
    """A connection that is told when a request on it begins and ends."""

    def begin(self, body: StreamReader) -> None: ...

    def end(self) -> None: ...


def connection_of(request: web.Request) -> MarkedConnection | None:
    """Return the connection of a request; None when its transport is not one of ours."""
    connection: MarkedConnection | None = getattr(request.transport, "connection", None)
    return connection


def served(app: web.Application, name: str, handler: Handler) -> Handler:
    """Wrap a handler: its requests have ids and end in the log, its connections know of them, its bugs answer 500.

    The log of requests and the rule for hosts are those that the application has now. Not a middleware: with one,
    aiohttp adds a wrapper of its own to every request.
    """
    requests, hosts = app.get(REQUESTS) or RequestLog(), app.get(HOSTS)

    async def handle(request: web.Request) -> web.StreamResponse:
        started_s = time.perf_counter()
        request[REQUEST_ID] = request_id = requests.new_id()
        request[NAME] = name  # set, since looking for what is not there is dear in every request
        connection = connection_of(request)
        if connection is not None:
            connection.begin(request.content)
        status = 500
        try:
            foreign = None if hosts is None else hosts.refusal(request)
            response = refusal(421, foreign) if foreign else await handler(request)
            status = response.status
            if status >= 400 and GIVEN_UP in request:
                await _answer_and_close(request, response)
        except Exception:
            status = 500
            log.exception("request %s: %s %s failed", request_id, request.method, request.path)
            if request.writer.output_size and request.transport is not None:  # a response has begun
                request.transport.abort()
            response = refusal(status, "Internal server error")
            response.force_close()
        finally:
            requests.finished(request[NAME], status, started_s, request_id)
            if connection is not None:
                connection.end()
        return response

    return handle


async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """Give a response the id of its request, compress it, and add the header that aiohttp-cors omits: no cache may
    serve one origin's response to another. A hook of the application, called before each head is sent.

    aiohttp's router refuses a request without a path (`OPTIONS *`, CONNECT) as text and without any handler; that
    response becomes JSON here.
    """
    await compress_response(request, response)
    headers = response.headers
    vary = headers.get(hdrs.VARY)
    headers[hdrs.VARY] = f"{vary}, {hdrs.ORIGIN}" if vary else hdrs.ORIGIN
    request_id = request.get(REQUEST_ID)
    if request_id is None:
        request_id = _answer_without_handler(request, response)
    headers[_ID_HEADER] = request_id
    headers[hdrs.SERVER] = "trader"  # without versions


def _answer_without_handler(request: web.Request, response: web.StreamResponse) -> str:
    """Make the refusal of aiohttp's router JSON, and return an id for its request."""
    request_id = (request.app.get(REQUESTS) or RequestLog()).new_id()
    if isinstance(response, web.HTTPException):
        connection = connection_of(request)
        if connection is not None:
            connection.begin(request.content)
            connection.end()
        log.info("request %s: %s without a path", request_id, request.method)
        response.body = ENCODER.encode(Refusal(error=response.reason))
        response.headers.update({hdrs.CONTENT_TYPE: JSON, hdrs.CONTENT_LENGTH: str(len(response.body))})
    return request_id


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


async def answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`, and refuse any other expectation as JSON; aiohttp's own refusal is text."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return await served(request.app, UNKNOWN, _refuse_expectation)(request)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


class Documented(NamedTuple):
    """One response of a route in the OpenAPI document. `body` is the type of the body, `headers` are names."""

    description: str
    body: Any
    headers: tuple[str, ...] = ("X-Request-Id",)
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Route:
    """A path for GET requests, with its documentation.

    `event_data` is the type of what a stream sends as the data of an event; `parameters` are those of the query, with
    their descriptions.
    """

    path: str
    summary: str = ""
    description: str = ""
    tag: str = ""
    responses: Mapping[int, Documented] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    event_data: Any = None
    alias: str | None = None
    head: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if self.alias is None else (self.path, self.alias)

    @property
    def name(self) -> str:
        """The name in the log and in metrics."""
        return UNKNOWN if "{" in self.path else self.path.removeprefix("/api").strip("/")

    def add_to(self, app: web.Application, handler: Handler) -> None:
        """Serve GET (and HEAD); every other method is a 405, except the OPTIONS of a browser's preflight."""
        allowed = (hdrs.METH_GET, hdrs.METH_HEAD) if self.head else (hdrs.METH_GET,)

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.method in allowed:
                origins = request.app.get(ORIGINS)
                foreign = None if origins is None else origins.refusal(request)
                return await handler(request) if foreign is None else refusal(403, foreign)
            if request.method == hdrs.METH_OPTIONS:
                answer = await answer_options(request)
                answer.headers[hdrs.ALLOW] = ", ".join(allowed)
                return answer
            return refusal(405, "Method Not Allowed", {hdrs.ALLOW: ", ".join(allowed)})

        for path in self.paths:
            app.router.add_route(hdrs.METH_ANY, path, served(app, self.name, handle), expect_handler=answer_expect)
