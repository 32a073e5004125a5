"""Requests: ids, bodies with size and time limits, latencies, and log lines for the ones that matter."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from itertools import chain, count
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from prometheus_client import Histogram

from trader.core.errors import InvalidInput, Issue, PayloadTooLarge, RequestError
from trader.operations.access import ANYBODY, Caller

log = logging.getLogger("trader.request")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_SIZE_MAX: Final = 64 * 2**10
"""Maximum bytes of a decompressed request body. No procedure needs more, and parsing it takes milliseconds."""

BODY_WAIT_S = 30.0
"""How long a caller may take to send its body."""

WAITING_BYTES_MAX: Final = 16 * 2**20
"""Maximum bytes of all partially received bodies together."""

_BROKEN: Final = (ContentEncodingError, web.RequestPayloadError, ConnectionError)
"""Errors of reading a body; the last one means that the caller has disconnected."""

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the latency histogram, in seconds."""

SLOW_S: Final = 1.0
"""A request that takes longer is logged at level info."""

UNKNOWN: Final = "unknown"
"""The name of every request for an unknown path: callers must not add names."""


@dataclass(slots=True)
class RequestInfo:
    """State of a request while it is being answered."""

    id: str
    """In its log line, and in the header `X-Request-Id` of its response."""
    caller: Caller = ANYBODY
    """Its caller: anonymous, until the bearer secret identifies one."""
    changes: bool = False
    """Whether it changes something."""
    given_up: bool = False
    """Whether to close the connection after the response without waiting for the rest of the body."""
    name: str = UNKNOWN
    """Its name in logs and metrics if no route matches it."""


INFO: Final = web.RequestKey("info", RequestInfo)


class RequestLog:
    """Issues request ids, and records how each request ended.

    Requests that change something, fail or are slow are logged at level info, all others at level debug: dashboards
    send thousands of reads per order, whose lines would hide the order.
    """

    def __init__(self) -> None:
        self._boot = secrets.token_hex(4)
        self._count = count(1)
        self.durations = Histogram(
            "trader_request_duration_seconds",
            "Requests by procedure (or path) and status; for a stream, how long it was open.",
            ["procedure", "status"],
            registry=None,
            buckets=BUCKETS_S,
        )

    def new_id(self) -> str:
        """Return an id that is unique across restarts and processes."""
        return f"{self._boot}-{next(self._count)}"

    def finished(self, name: str, status: int, started_s: float, request_id: str, *, changes: bool) -> None:
        """Record the end of a request. `name` is from a fixed set; `started_s` comes from `time.perf_counter`."""
        duration_s = time.perf_counter() - started_s
        self.durations.labels(name, int(status)).observe(duration_s)
        is_notable = (status >= 400 and not name.startswith("health")) or duration_s > SLOW_S or changes
        level = logging.INFO if is_notable else logging.DEBUG  # a supervisor's polls while unhealthy say nothing new
        if log.isEnabledFor(level):
            duration_ms = round(duration_s * 1000, 2)  # the shortest take less than a tenth
            fields = {"procedure": name, "status": status, "duration_ms": duration_ms, "request_id": request_id}
            log.log(level, "answered", extra=fields)


REQUESTS: Final = web.AppKey("requests", RequestLog)


class BodyTimeout(RequestError):
    """The body did not arrive in time."""


class WaitingBodies:
    """The partially received bodies. Beyond `WAITING_BYTES_MAX` the anonymous one that has waited longest is dropped.

    Bodies of known callers are dropped only if there is no other.
    """

    def __init__(self) -> None:
        self._sizes: dict[bool, dict[asyncio.Timeout, int]] = {False: {}, True: {}}  # by whether the caller is known
        self.bytes = 0

    def grow(self, deadline: asyncio.Timeout, size: int, *, is_known: bool = False) -> None:
        """Count bytes of the body with this deadline."""
        sizes = self._sizes[is_known]
        sizes[deadline] = sizes.get(deadline, 0) + size
        self.bytes += size
        while self.bytes > WAITING_BYTES_MAX:
            oldest = next(chain(*self._sizes.values()))
            self.end(oldest)
            oldest.reschedule(asyncio.get_running_loop().time())

    def end(self, deadline: asyncio.Timeout) -> None:
        """Stop counting the body with this deadline."""
        self.bytes -= sum(sizes.pop(deadline, 0) for sizes in self._sizes.values())


WAITING_BODIES: Final = web.AppKey("waiting_bodies", WaitingBodies)


def address_of(request: web.Request) -> str:
    """Return the source of a request: an IPv4 address, the 64-bit network of an IPv6 one, or empty text."""
    return _network_of(request.remote or "")


@lru_cache
def _network_of(remote: str) -> str:
    try:
        address = ip_address(remote.partition("%")[0])
    except ValueError:  # a Unix socket
        return ""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    if isinstance(address, IPv6Address) and mapped is None:
        return str(ip_network((int(address) >> 64 << 64, 64)))
    return str(mapped or address)


def arrived_body(request: web.Request) -> bytes | None:
    """Return the request's body if all of it arrived with the head, as short ones do; otherwise None.

    :raises PayloadTooLarge: the body exceeds `BODY_SIZE_MAX`
    """
    content = request.content
    if not content.is_eof():
        return None
    try:
        body = content.read_nowait()
    except _BROKEN:  # `read_body` reports the error
        return None
    if len(body) > BODY_SIZE_MAX:
        raise _too_large()
    return body


async def read_body(request: web.Request) -> bytes:
    """Return the request's body, decompressed, waiting at most `BODY_WAIT_S`.

    A body with a declared size is refused before it is read; any other, including a compressed one, once it is too big.

    :raises PayloadTooLarge: the body exceeds `BODY_SIZE_MAX`
    :raises InvalidInput: its compression is broken, or it ends early
    :raises BodyTimeout: it did not arrive in time
    """
    if (arrived := arrived_body(request)) is not None:
        return arrived
    if request.content_length is not None and request.content_length > BODY_SIZE_MAX:
        raise _too_large()
    body, deadline, waiting = bytearray(), asyncio.timeout(BODY_WAIT_S), request.app[WAITING_BODIES]
    try:
        async with deadline:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > BODY_SIZE_MAX:
                    raise _too_large()
                waiting.grow(deadline, len(chunk), is_known=request[INFO].caller.is_known)
    except TimeoutError:
        request[INFO].given_up = True
        late = f"the body did not arrive within {BODY_WAIT_S:g} s, or too many other bodies are incomplete"
        raise BodyTimeout(late) from None
    except _BROKEN:
        request[INFO].given_up = True
        raise InvalidInput(Issue((), "the body cannot be read: it is cut off, or its encoding is broken")) from None
    except PayloadTooLarge:
        if "Content-Encoding" in request.headers:  # aiohttp would keep inflating the rest to reuse the connection
            request[INFO].given_up = True
        raise
    finally:
        waiting.end(deadline)
    return bytes(body)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over {BODY_SIZE_MAX} bytes")
