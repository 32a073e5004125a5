"""The HTTP server: the application on connections with limits.

aiohttp limits the size of headers and the number of requests waiting on one connection, and closes silent connections.
It has no limit for a head that arrives byte by byte, for a caller that does not read its response, or for the number of
connections: a protocol around aiohttp's own enforces these.
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import HttpProcessingError

from trader.api.requests import REQUESTS
from trader.core import tasks
from trader.core.errors import StartError
from trader.settings.settings import Settings

log = logging.getLogger(__name__)

SERVER: Final = "trader"
"""The header `Server` of every response: no versions."""

_VERSIONS: Final = f"Server: {SERVER_SOFTWARE}\r\n".encode()
_NO_VERSIONS: Final = f"Server: {SERVER}\r\n".encode()

OTHER_ADDRESS: Final = "HOST and PORT select another address."

WAITING_MAX: Final = 1024
"""How many connections may wait to be accepted, if the system allows; further callers retry after a second. After a
restart every subscriber of every stream reconnects at once."""

_OTHER_FILES: Final = 256
"""Open files other than connections: the database, the venue, providers, the log."""

_CONNECTIONS_LEAST: Final = 16
"""A limit of open files that leaves fewer connections than this refuses the start."""

_NOT_HERE: Final = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""Errors for a host name's address that this machine lacks, such as `localhost` without IPv6."""

_SLOW_HEAD: Final = b'{"error":"The head of the request took too long"}'
_SLOW_HEAD_ANSWER: Final = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\nX-Request-Id: %b\r\n\r\n%b"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections. Times are seconds of real time."""

    connections_max: int = 4096
    idle_s: float = 75.0
    head_s: float = 10.0
    answer_s: float = 30.0


class _WithoutVersions:
    """A transport for aiohttp, which answers malformed requests by itself and names its version and Python's there."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        """Return another method of the transport, which is looked up once: aiohttp calls some for every request."""
        self.__dict__[name] = method = getattr(self._transport, name)
        return method

    def write(self, data: bytes) -> None:
        self._transport.write(_without_versions(data))

    def writelines(self, parts: Iterable[bytes]) -> None:
        self._transport.writelines([_without_versions(part) for part in parts])


def _without_versions(data: bytes) -> bytes:
    return data.replace(_VERSIONS, _NO_VERSIONS, 1) if data[:5] == b"HTTP/" and _VERSIONS in data else data


class Connection(asyncio.Protocol):
    """Protocol around aiohttp's own: passes everything on, and records the data behind the limits.

    The middleware finds it with `connection_of`, and reports when a request begins and ends. `others` are all open
    connections, the longest idle first.
    """

    def __init__(self, http: asyncio.Protocol, others: dict["Connection", None], limits: ConnectionLimits) -> None:
        self._http = http
        self._others = others
        self._limits = limits
        self._time = asyncio.get_running_loop().time
        self._is_busy = False
        self._is_known = False
        self._body: StreamReader = EMPTY_PAYLOAD
        self._head_began_s: float | None = None
        self._answer_stuck_s: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the last request was read and answered; the head of the next one may have begun."""
        return not self._is_busy and self._answer_stuck_s is None and self._body.is_eof()

    @property
    def waits_for_stranger(self) -> bool:
        """Whether an anonymous caller has not sent all of its body, or does not read its response."""
        return not self._is_known and (self._answer_stuck_s is not None or not self._body.is_eof())

    def begin(self, body: StreamReader) -> None:
        """Record that the whole head of a request has arrived and its handler begins."""
        self._is_busy, self._is_known, self._body, self._head_began_s = True, False, body, None

    def know(self) -> None:
        """Record that the caller of the present request has a valid key or token."""
        self._is_known = True

    def end(self) -> None:
        """Record that the handler of a request has ended. aiohttp reads the rest of its body, which is not a head."""
        self._is_busy = False
        if self in self._others:
            self._others[self] = self._others.pop(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass of it
        self._http.connection_made(cast("asyncio.Transport", _WithoutVersions(self._transport)))
        self._others[self] = None
        if len(self._others) > self._limits.connections_max:
            others = [connection for connection in self._others if connection is not self]
            idle = next((connection for connection in others if connection.is_idle), None)
            (idle or next((connection for connection in others if connection.waits_for_stranger), self)).close()

    def data_received(self, data: bytes) -> None:
        if self._head_began_s is None and self.is_idle:
            self._head_began_s = self._time()
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._answer_stuck_s = self._time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._answer_stuck_s = None
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.pop(self, None)
        self._http.connection_lost(exc)

    def close(self) -> None:
        self._others.pop(self, None)
        if self.is_idle:
            self._transport.close()
        else:
            self._transport.abort()

    def enforce_times(self, new_id: Callable[[], str]) -> None:
        """Refuse a head that takes too long, and drop a response that the caller does not read."""
        now_s = self._time()
        if self._answer_stuck_s is not None and now_s - self._answer_stuck_s > self._limits.answer_s:
            self._transport.abort()
        elif self._head_began_s is not None and now_s - self._head_began_s > self._limits.head_s:
            request_id = new_id()
            log.info("request %s: the head took too long", request_id)
            self._transport.write(_SLOW_HEAD_ANSWER % (len(_SLOW_HEAD), request_id.encode(), _SLOW_HEAD))
            self._others.pop(self, None)
            self._transport.close()  # after the answer, which an abort could drop


def connection_of(request: web.Request) -> Connection | None:
    """Return the connection of a request; None if the caller has left or another server took the request."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


class HttpServer:
    """Serves an application on connections with limits.

    If there are too many connections, the longest idle one is closed, or else one that waits for an anonymous caller,
    or else the newcomer.
    """

    def __init__(self, app: web.Application, limits: ConnectionLimits, *, shutdown_timeout_s: float = 1.0) -> None:
        self._runner = web.AppRunner(
            app,
            shutdown_timeout=shutdown_timeout_s,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=limits.idle_s,
            lingering_time=limits.head_s,
        )
        self._limits = limits
        self._new_id = app[REQUESTS].new_id
        self._connections: dict[Connection, None] = {}
        self._listening: list[asyncio.Server] = []
        self._enforcing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of connections that aiohttp has, or still has tasks for."""
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    async def start(self, sockets: Iterable[socket.socket]) -> None:
        """Listen on these bound sockets.

        :raises OSError: another process took the port at the same moment
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        for sock in sockets:
            listening = await asyncio.get_running_loop().create_server(
                lambda: Connection(server(), self._connections, self._limits),
                sock=sock,
                backlog=WAITING_MAX,
            )
            self._listening.append(listening)
        self._enforcing = tasks.keep(self._enforce_times, "limits of connections")

    async def stop(self) -> None:
        """Accept no more connections, end the streams, and give requests time to end."""
        for listening in self._listening:
            listening.close()
        await self._runner.cleanup()
        await tasks.end(self._enforcing)

    async def _enforce_times(self) -> None:
        """Check every connection ten times within the shorter limit, which costs less than a timer per request."""
        while True:
            await asyncio.sleep(min(self._limits.head_s, self._limits.answer_s) / 10)
            for connection in list(self._connections):
                connection.enforce_times(self._new_id)


def _is_bug(record: logging.LogRecord) -> bool:
    """Return whether aiohttp's log record is a bug; malformed requests and bodies are not."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_http_log = logging.getLogger(f"{__name__}.aiohttp")
_http_log.addFilter(_is_bug)


def raise_file_limit(connections_max: int) -> int:
    """Raise the limit of open files for the connections, as far as the system allows.

    Return how many connections fit, so that the longest idle one is closed before the system refuses the next.

    :raises StartError: too few fit to serve anybody
    """
    wanted = connections_max + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit of open files from %d to %d", soft, wanted)
    allowed = wanted - _OTHER_FILES
    if allowed < min(connections_max, _CONNECTIONS_LEAST):
        raise StartError(
            f"{wanted} files may be open here (ulimit -n, LimitNOFILE), and the service needs at least "
            f"{_OTHER_FILES + _CONNECTIONS_LEAST}."
        )
    if allowed < connections_max:
        log.warning("HTTP_CONNECTIONS_MAX is %d here, not %d: %d files may be open", allowed, connections_max, wanted)
    return min(allowed, connections_max)


@asynccontextmanager
async def serving(app: web.Application, settings: Settings, sockets: Sequence[socket.socket]) -> AsyncIterator[int]:
    """Serve an application on bound sockets, within the limits of the settings, and yield the port.

    :raises StartError: another process took the port at the same moment
    """
    server = HttpServer(app, ConnectionLimits(connections_max=raise_file_limit(settings.http_connections_max)))
    host, port = sockets[0].getsockname()[:2]
    try:
        try:
            await server.start(sockets)
        except OSError as error:
            raise _cannot_listen(host, port, error, OTHER_ADDRESS) from error
        yield int(port)
    finally:
        await server.stop()


def bind(host: str, port: int, advice: str = OTHER_ADDRESS) -> Sequence[socket.socket]:
    """Bind the addresses of `host` for this process, without listening yet. `advice` is the end of an error's text.

    :raises StartError: the host has no address on this machine, or its port is taken or not permitted
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
        raise _cannot_listen(host, port, refusal, advice)
    return bound


def _cannot_listen(host: str, port: int, error: OSError | None, advice: str) -> StartError:
    why = "it has no address" if error is None else error.strerror
    return StartError(f"cannot listen on {host} port {port}: {why}. {advice}")


def _bind_one(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the previous process may linger
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _close(sockets: list[socket.socket]) -> list[socket.socket]:
    for sock in sockets:
        sock.close()
    return []
