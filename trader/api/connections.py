"""What one connection may take: time for its headers, for its silence and for its answers; and how many there may be.

The framework bounds the size of headers and the requests that wait on one connection (31 here), and closes a connection
that is silent. It has no bound for a head that arrives byte by byte, for a caller who does not take its answer, and for
the number of connections; those are here. So is the answer to what no handler answers: bytes that are no request, a
request for no path (`OPTIONS *`, CONNECT), and a bug outside the procedures.
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from trader.api.requests import REQUEST_ID, REQUESTS, RequestLog
from trader.api.routes import refusal
from trader.errors import StartError
from trader.settings import Settings

log = logging.getLogger(__name__)

WAITING_MAX: Final = 1024
"""How many connections may wait to be accepted, as far as the system allows; a caller beyond it tries again after a
second. After a restart every subscriber of every stream comes back at once."""

_OTHER_FILES: Final = 256
"""What the process has open beside connections: the database, the venue, providers, the log."""

_REASON_CHARACTERS: Final = 200
"""How much of a complaint about bytes that are no request is told: it may hold those bytes."""

_NOT_HERE: Final = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""What an address of a host name says that this machine does not have: `localhost` where there is no IPv6."""

_TOO_SLOW_BODY: Final = b'{"error":"The head of the request took too long"}'
_TOO_SLOW: Final = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\nX-Request-Id: %b\r\n\r\n%b"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of connections. Times are seconds of real time, sizes bytes."""

    connections_max: int = 4096
    idle_s: float = 75.0
    head_s: float = 10.0
    answer_s: float = 30.0
    line_bytes_max: int = 8190

    @classmethod
    def of(cls, settings: Settings) -> "ConnectionLimits":
        return cls(
            connections_max=settings.http_connections_max,
            idle_s=settings.http_idle_timeout_s,
            head_s=settings.http_head_timeout_s,
            answer_s=settings.http_body_timeout_s,
            line_bytes_max=settings.http_header_bytes_max,
        )


class Connection(RequestHandler):
    """One connection. A timer runs only while a head is incomplete or an answer is not taken."""

    __slots__ = ("_held_up", "_late", "_limits", "_server", "_stuck")

    def __init__(self, server: "Server", limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._limits = limits
        self._held_up = False
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        # The parser stops at as many waiting requests as the framework, and counts one too many when a head came before
        # its body; at one fewer the framework goes on by itself with whatever the parser has left.
        self._max_msg_queue_size -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered: it waits for the next, whose head may have begun."""
        return self._waiter is not None and not self._waiter.done()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._end_broken_body(self._messages[-1][0].message)
        waiter = self._waiter
        if waiter is None or waiter.done():  # a whole head has come, or the body of one
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None and self.transport is not None:  # bytes came, and no whole head
            self._late = self._loop.call_later(self._limits.head_s, self._end_late)

    def pause_reading(self) -> None:
        self._held_up = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on where reading was paused. The framework asks for it whenever a body is read, paused or not.

        After the first pause every such wish is granted: the parser may stop for it later than reading goes on, and
        keeps what it has not looked at.
        """
        if self._held_up:
            super().resume_reading(resume_parser)

    def _end_broken_body(self, reason: str) -> None:
        """Bytes came that are no request: a body they were to belong to has no end, and nobody is to wait for it."""
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        else:
            return
        if not body.is_eof():
            body.set_exception(web.RequestPayloadError(reason))

    def _end_late(self) -> None:
        self._late = None
        if self.transport is not None and self.is_idle:
            request_id = self._server.requests.new_id()
            log.info("request %s: its head took too long", request_id)
            self.transport.write(_TOO_SLOW % (len(_TOO_SLOW_BODY), request_id.encode(), _TOO_SLOW_BODY))
            self.force_close()

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """No coroutine of its own: every answer passes here."""
        if isinstance(resp, web.HTTPException):  # of the router, for what is no path
            request[REQUEST_ID] = request_id = self._server.requests.new_id()
            log.info("request %s: %s is for no path", request_id, request.method)
            resp = refusal(resp.status, resp.reason)
        self._server.answered(self)
        return super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what no handler answered, with a line in the log that has its id. Closes the connection.

        :raises ConnectionError: a part of an answer has been sent already
        """
        request_id = request.get(REQUEST_ID) or self._server.requests.new_id()
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:  # bytes that are no request
            reason = " ".join(str(message or exc or "Bad Request").split())[:_REASON_CHARACTERS]
            log.info("request %s: refused a connection of %s: %s", request_id, request.remote, ascii(reason))
            text = reason
        else:
            log.error("request %s: %s %s failed", request_id, request.method, request.path, exc_info=exc)
            text = "Internal server error"
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent; the connection is closed")
        response = refusal(status, text, {"X-Request-Id": request_id})
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """What ended the connection. A body that nobody wanted and that cannot be read to its end is no bug."""
        if isinstance(options.get("exc_info"), web.RequestPayloadError):
            log.info("closed a connection: the rest of a body cannot be read")
        else:
            super().log_exception(*args, **options)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._loop.call_later(self._limits.answer_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_timer()
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _abort(self) -> None:
        self._stuck = None
        if self.transport is not None:
            self.transport.abort()


class Server(web.Server):
    """Makes the connections. When there are too many, the one that has been idle longest goes, else the newcomer.

    The framework's table of them is kept in the order in which they were made, or answered last.
    """

    def __init__(self, handler: Any, limits: ConnectionLimits, requests: RequestLog, **options: Any) -> None:
        super().__init__(handler, **options)
        self._limits = limits
        self.requests = requests

    def __call__(self) -> RequestHandler:
        return Connection(self, self._limits, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._limits.connections_max:
            idlest = next((one for one in self._connections if isinstance(one, Connection) and one.is_idle), None)
            if idlest is None:
                transport.abort()
            else:
                idlest.force_close()

    def answered(self, connection: Connection) -> None:
        """Note that the connection is answered now, and idle after that."""
        transport = self._connections.pop(connection, None)
        if transport is not None:  # else it was lost, or the server shuts down
            self._connections[connection] = transport


class Runner(web.AppRunner):
    """Runs an application on connections with limits."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(
            app,
            keepalive_timeout=limits.idle_s,
            max_line_size=limits.line_bytes_max,
            max_field_size=limits.line_bytes_max,
            **options,
        )
        self._limits = limits

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        requests = self.app.get(REQUESTS) or RequestLog()
        return Server(
            plain.request_handler, self._limits, requests, request_factory=plain.request_factory, **plain._kwargs
        )


def raise_file_limit(connections_max: int) -> None:
    """Let the process have as many open files as it may have connections, as far as the system allows."""
    wanted = connections_max + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("open files: at most %d instead of %d", wanted, soft)
    if wanted < connections_max + _OTHER_FILES:
        log.warning(
            "the system allows %d open files: fewer than HTTP_CONNECTIONS_MAX=%d needs", wanted, connections_max
        )


def bind(host: str, port: int) -> Sequence[socket.socket]:
    """Take the addresses of `host` for this process. Nobody is let in before they are listened on.

    :raises StartError: the host has no address here, or its port is taken or not ours to take
    """
    bound: list[socket.socket] = []
    refusal: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                bound.append(_bind_one(family, kind, protocol, address))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                refusal = error
    except OSError as error:
        refusal, bound = error, _close(bound)
    if not bound:
        raise cannot_listen(host, port, refusal)
    return bound


def cannot_listen(host: str, port: int, error: OSError | None) -> StartError:
    why = "it has no address" if error is None else error.strerror
    return StartError(f"cannot listen on {host} port {port}: {why}. HOST and PORT choose another address.")


def _bind_one(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the process before may linger
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.setblocking(False)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def _close(sockets: list[socket.socket]) -> list[socket.socket]:
    for one in sockets:
        one.close()
    return []
