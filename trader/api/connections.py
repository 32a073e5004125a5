"""The HTTP server: aiohttp's low-level server on connections with limits.

aiohttp bounds the size of headers and the number of requests that wait on one connection, and closes connections that
are silent. It has no bound for a head that arrives byte by byte, for a caller who does not read its answer, and for the
number of connections: a protocol around aiohttp's own enforces those. What aiohttp answers itself, bytes that are no
request and a bug outside the handlers, is answered as JSON too.
"""

import asyncio
import errno
import logging
import math
import resource
import socket
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from trader.api.schemas.common import ENCODER
from trader.api.schemas.streams import Refusal
from trader.api.site import Site
from trader.errors import StartError
from trader.settings import Settings

log = logging.getLogger(__name__)

WAITING_MAX: Final = 1024
"""How many connections may wait to be accepted, as far as the system allows; a caller beyond it tries again after a
second. After a restart every subscriber of every stream comes back at once."""

_OTHER_FILES: Final = 256
"""Files that the process has open beside connections: the database, the venue, providers, the log."""

_REASON_CHARACTERS: Final = 200
"""How much of aiohttp's error message is sent: it may hold the bytes that are no request."""

_NOT_HERE: Final = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""Errors for an address of a host name that this machine does not have: `localhost` without IPv6."""

_TOO_SLOW: Final = "The head of the request took too long"
_HEAD: Final = b"HTTP/1."
_ID: Final = b"\r\nX-Request-Id: "
"""In the head of every answer of a handler, unlike aiohttp's own, to bytes that are no request."""

_PASSED_ON: Final = (
    "abort",
    "close",
    "get_extra_info",
    "get_write_buffer_size",
    "is_closing",
    "pause_reading",
    "resume_reading",
    "set_write_buffer_limits",
)
"""The methods of a transport, beside those that write, that aiohttp and handlers use."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections. Times are seconds of real time, sizes bytes."""

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


class Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol and enforces the limits.

    `Site` reports when a request begins and ends.
    """

    def __init__(self, http: asyncio.Protocol, server: "HttpServer") -> None:
        self._http = http
        self._server = server
        self._order = server.connections
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._is_busy = False
        self._late_body: StreamReader | None = None
        self._has_late_bodies = False
        self._head_due_s = math.inf  # of the event loop's time
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the next request, whose head may have begun: the last one is read and answered."""
        return not self._is_busy and self._stuck is None and (self._late_body is None or self._late_body.is_eof())

    def begin(self, body: StreamReader) -> None:
        """Note that the whole head of a request has arrived, and its handler begins."""
        self._is_busy = True
        self._head_due_s = math.inf
        if body.is_eof():
            self._late_body = None
        else:
            self._late_body = body
            self._has_late_bodies = True

    def end(self) -> None:
        """Note that the handler of a request has ended. aiohttp reads the rest of its body, which is no head.

        aiohttp's parser stops at 32 waiting requests. It counts one too many once a body came after its head, and
        aiohttp then does not resume it, so that is done here.
        """
        self._is_busy = False
        if self in self._order:
            self._order.move_to_end(self)
        if self._has_late_bodies:
            self._http.data_received(b"")

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self._http.connection_made(cast("asyncio.Transport", _HttpTransport(self._transport, self, self._server)))
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._head_due_s == math.inf and self.is_idle:
            self._head_due_s = self._loop.time() + self._limits.head_s
            if self._late is None:
                self._late = self._loop.call_at(self._head_due_s, self._check_head)
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._stuck = self._loop.call_later(self._limits.answer_s, self._transport.abort)
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._end_stuck()
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stuck()
        if self._late is not None:
            self._late.cancel()
        self._server.lost(self)
        self._http.connection_lost(exc)

    def _end_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _check_head(self) -> None:
        """Refuse a head that is late. The timer was set for an earlier one, so that not every request needs its own."""
        self._late = None
        if self._head_due_s == math.inf or self._transport.is_closing():
            return
        if self._head_due_s > self._loop.time():
            self._late = self._loop.call_at(self._head_due_s, self._check_head)
            return
        request_id = self._server.requests.new_id()
        log.info("request %s: the head took too long", request_id)
        self._transport.write(_closing_answer(HTTPStatus.REQUEST_TIMEOUT, _TOO_SLOW, request_id))
        self._transport.close()


class _HttpTransport:
    """The transport that aiohttp writes to: the connection's own, but refusals without a handler are JSON.

    aiohttp answers bytes that are no request itself, as text.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection, server: "HttpServer") -> None:
        self._transport = transport
        self._server = server
        self.connection = connection
        for name in _PASSED_ON:
            setattr(self, name, getattr(transport, name))

    def write(self, data: bytes | bytearray) -> None:
        if data.startswith(_HEAD) and data.find(_ID) < 0:
            self._write_refusal(data)
        else:
            self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        first, *others = pieces
        if first.startswith(_HEAD) and first.find(_ID) < 0:
            self.write(b"".join((first, *others)))
        else:
            self._transport.writelines((first, *others))

    def _write_refusal(self, data: bytes | bytearray) -> None:
        status = HTTPStatus(int(data[9:12]))
        if status == HTTPStatus.CONTINUE:
            self._transport.write(data)
            return
        text = data.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
        reason = " ".join(text.split())[:_REASON_CHARACTERS] if status == HTTPStatus.BAD_REQUEST else status.phrase
        request_id = self._server.requests.new_id()
        peer = self._transport.get_extra_info("peername")
        log.info("request %s: refused a connection of %s: %s", request_id, peer and peer[0], ascii(reason))
        self._transport.write(_closing_answer(status, reason, request_id))
        self._transport.close()


def _closing_answer(status: HTTPStatus, error: str, request_id: str) -> bytes:
    """Encode the last answer on a connection, to what is no request."""
    body = ENCODER.encode(Refusal(error=error))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\nX-Request-Id: {request_id}\r\n\r\n"
    )
    return head.encode() + body


class HttpServer:
    """Serves a site on connections with limits.

    When there are too many connections, the one that has been idle longest is closed, else the newcomer. The table of
    connections is kept in the order in which they were made, or answered last.
    """

    def __init__(self, site: Site, limits: ConnectionLimits, *, shutdown_timeout_s: float = 1.0) -> None:
        self._server = web.Server(
            site.handle,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=limits.idle_s,
            lingering_time=limits.head_s,
            max_line_size=limits.line_bytes_max,
            max_field_size=limits.line_bytes_max,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=shutdown_timeout_s)
        self._site = site
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Server] = []
        self.connections: OrderedDict[Connection, None] = OrderedDict()
        self.limits = limits
        self.requests = site.requests

    def __len__(self) -> int:
        """How many connections aiohttp has, or still has tasks of."""
        return len(self._server.connections)

    async def start(self, sockets: Iterable[socket.socket]) -> None:
        """Listen on these bound sockets.

        :raises OSError: another process took the port in the same moment
        """
        self._tasks = {asyncio.create_task(run(), name=name) for name, run in self._site.tasks.items()}
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for one in sockets:
            listening = await loop.create_server(
                lambda: Connection(self._server(), self), sock=one, backlog=WAITING_MAX
            )
            self._listening.append(listening)

    async def stop(self) -> None:
        """Accept no more connections, end the streams, and give requests their time to end."""
        for listening in self._listening:
            listening.close()
        for end in self._site.endings:
            await end()
        await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def opened(self, connection: Connection) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.limits.connections_max:
            idlest = next(one for one in self.connections if one.is_idle)
            self.lost(idlest)
            idlest.close()

    def lost(self, connection: Connection) -> None:
        self.connections.pop(connection, None)


def _is_bug(record: logging.LogRecord) -> bool:
    """Whether what aiohttp logs is a bug: bytes that are no request, or no body, are not."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_http_log = logging.getLogger(f"{__name__}.aiohttp")
_http_log.addFilter(_is_bug)


def raise_file_limit(connections_max: int) -> int:
    """Raise the limit of open files to what the connections need, as far as the system allows.

    Return how many connections it really allows, so that the idlest is closed before the system refuses the next.
    """
    wanted = connections_max + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit of open files from %d to %d", soft, wanted)
    allowed = max(1, wanted - _OTHER_FILES)
    if allowed < connections_max:
        log.warning("HTTP_CONNECTIONS_MAX is %d here, not %d: %d files may be open", allowed, connections_max, wanted)
    return min(allowed, connections_max)


def bind(host: str, port: int) -> Sequence[socket.socket]:
    """Bind the addresses of `host` for this process, without listening yet.

    :raises StartError: the host has no address here, or its port is taken or not permitted
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
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the previous process may linger
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
