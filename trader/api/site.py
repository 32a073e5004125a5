"""The site: a handler for each path, and what every request passes, whatever its path.

Each handler is wrapped when its path is added: its requests have ids and end in the log, foreign hosts are refused, its
bugs answer 500, and the head of its response is completed.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, web
from multidict import istr

from trader.api.cors import PATHS, CrossOrigin, HostRule, OriginRule, answer_plain_options
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


class Site:
    """Everything that is served over HTTP: the handlers by path, the log of requests, the rules for hosts and origins.

    Without settings there are no rules. `lag_s` is how old the data of a follower is at most, in seconds; None on the
    leader.
    """

    def __init__(self, settings: Settings | None = None, lag_s: Callable[[], float | None] = lambda: None) -> None:
        self.requests = RequestLog()
        self.origins = None if settings is None else OriginRule(settings)
        self._hosts = None if settings is None else HostRule(settings)
        self._cors = None if settings is None else CrossOrigin.of(settings)
        self._lag_s = lag_s
        self._paths: dict[str, Handler] = {}
        self._patterns: list[tuple[re.Pattern[str], Handler]] = []
        self._elsewhere = self._wrap(UNKNOWN, self._answer_elsewhere)
        self._refuse_expectation = self._wrap(UNKNOWN, _refuse_expectation)
        self.tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        """What runs while the site is served, by the name of its task."""
        self.endings: list[Callable[[], Awaitable[None]]] = []
        """What ends the answers that would not end by themselves, before the server stops."""

    def add(self, path: str, name: str, handler: Handler, *, changes: bool = False) -> None:
        """Serve a path, by every method.

        `name` is that of its requests in the log and in metrics; `changes` marks those that change something. A handler
        that prepares its response itself calls `finish_head` before.
        """
        self._paths[path] = self._wrap(name, handler, changes=changes)

    def add_pattern(self, pattern: str, name: str, handler: Handler) -> None:
        """Serve every path that a regular expression matches whole, and no path or earlier pattern."""
        self._patterns.append((re.compile(pattern), self._wrap(name, handler)))

    def handle(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        """Answer a request: the handler of a `web.Server`."""
        handler = self._paths.get(request.rel_url.raw_path) or self._find(request.rel_url.path_safe)
        return self._expect(request, handler) if hdrs.EXPECT in request.headers else handler(request)

    async def finish_head(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Complete the headers of a response before it is sent.

        aiohttp-cors omits `Vary`: no cache may serve one origin's response to another.
        """
        headers = response.headers
        vary = headers.get(hdrs.VARY)
        headers[hdrs.VARY] = f"{vary}, {hdrs.ORIGIN}" if vary else hdrs.ORIGIN
        headers[_ID_HEADER] = request[REQUEST_ID]
        headers[hdrs.SERVER] = "trader"  # without versions
        if (lag_s := self._lag_s()) is not None:
            headers[_LAG_HEADER] = f"{lag_s:.3f}"
        if self._cors is not None and hdrs.ORIGIN in request.headers:
            await self._cors.add_headers(request, response)

    async def answer_options(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer OPTIONS: a browser's preflight, or any other."""
        return await (answer_plain_options(request) if self._cors is None else self._cors.answer_preflight(request))

    def _find(self, path: str) -> Handler:
        """Return the handler of a path whose characters were escaped, or of a pattern, or of any other path."""
        if (handler := self._paths.get(path)) is not None:
            return handler
        return next((handler for pattern, handler in self._patterns if pattern.fullmatch(path)), self._elsewhere)

    def _wrap(self, name: str, handler: Handler, *, changes: bool = False) -> Handler:
        requests, hosts = self.requests, self._hosts

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
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
                    await self.finish_head(request, response)
                    if status >= 400 and GIVEN_UP in request:
                        await _answer_and_close(request, response)
            finally:
                requests.finished(name, status, started_s, request_id, changes=changes)
                if connection is not None:
                    connection.end()
            return response

        return handle

    async def _expect(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Answer `Expect: 100-continue`, and refuse any other expectation as JSON; aiohttp's own refusal is text."""
        if request.version >= HttpVersion11:
            if request.headers[hdrs.EXPECT].lower() != "100-continue":
                return await self._refuse_expectation(request)
            if request.transport is not None:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await handler(request)

    async def _answer_elsewhere(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == hdrs.METH_OPTIONS and request.rel_url.raw_path.startswith(PATHS):
            return await self.answer_options(request)
        return refusal(404, "Not Found")


def _answer_bug(request: web.BaseRequest) -> web.Response:
    """Answer instead of a handler that has raised an exception, without the cause."""
    if request.writer.output_size and request.transport is not None:  # a response has begun
        request.transport.abort()
    response = refusal(500, "Internal server error")
    response.force_close()
    return response


async def _answer_and_close(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Answer at once and close: aiohttp would wait for the rest of the body, and inflate it."""
    response.force_close()
    with suppress(ConnectionError):  # the caller has left
        await response.prepare(request)
        await response.write_eof()
    if request.transport is not None:
        request.transport.close()


async def _refuse_expectation(request: web.BaseRequest) -> web.Response:
    expected = request.headers.get(hdrs.EXPECT, "")[:100]
    response = refusal(417, f"Expect: {expected} is not supported here; use 100-continue, or leave it out")
    response.force_close()  # the body may or may not follow
    return response


def json_answer(status: int, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=ENCODER.encode(body), headers={hdrs.CONTENT_TYPE: JSON, **(headers or {})})


def refusal(status: int, error: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_answer(status, Refusal(error=error), headers)
