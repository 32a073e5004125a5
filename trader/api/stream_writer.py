"""Writer of one event stream: sends messages to its client, and disconnects one that does not read."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from trader.api.subscriber import Subscriber

GONE_MS: Final = 30_000
"""A client that acknowledges nothing for this long is disconnected, whatever the kernel would still retry."""

EOF_S: Final = 1.0
"""The timeout of a write after the stream has ended: it must not hold up a shutdown."""

SEND_BUFFER_BYTES: Final = 128 * 1024
"""What the kernel buffers for a client that has stopped reading; newer states replace those beyond it."""


class StreamWriter:
    """Writes to one response and waits for its client, with a timeout; the end of the subscription ends the wait.

    A message is written to the transport as a whole, by the handler or by the broadcaster, so the two never mix.
    Nothing is pushed while the client is behind: beside the kernel's buffer there is at most one message in the
    transport, and one message (or the backlog) in the subscriber.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        payload: AbstractStreamWriter,
        subscriber: Subscriber,
        timeout_s: float,
    ) -> None:
        self._request = request
        self._response = response
        self._payload = payload
        self._subscriber = subscriber
        self._timeout_s = timeout_s

    async def begin(self, message: bytes) -> bool:
        """Write the headers and the first message. Return False when the client was too slow and is disconnected."""
        alive = await self._bounded(self._response.write(message)) and await self.caught_up()
        self._subscriber.push = self._push
        return alive

    async def caught_up(self) -> bool:
        """Wait for a client that is behind. Return False when it was too slow and is disconnected."""
        return not self._is_behind() or await self._bounded(self._payload.drain())

    def put(self, message: bytes) -> None:
        """Write a message, which may be empty, for a client that is not behind."""
        transport = self._request.transport
        if message and transport is not None:
            transport.write(_chunk(message) if self._response.chunked else message)

    async def finish(self) -> None:
        """End the response; aiohttp would wait for a stalled client without a timeout."""
        await self._bounded(self._response.write_eof())

    def _push(self, make: Callable[[], bytes]) -> bool:
        if self._is_behind() or not is_connected(self._request):
            return False
        self.put(make())
        return True

    def _is_behind(self) -> bool:
        return self._request.protocol.writing_paused

    async def _bounded(self, wait: Awaitable[None]) -> bool:
        self._subscriber.cut = self._abort
        timeout_s = min(self._timeout_s, EOF_S) if self._subscriber.ended else self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await wait
        except TimeoutError:
            self._abort()
            return False
        finally:
            self._subscriber.cut = None
        return True

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


@lru_cache(maxsize=8)
def _chunk(message: bytes) -> bytes:
    """Return a message as a chunk of HTTP/1.1, made once for all its subscribers."""
    return b"%x\r\n%b\r\n" % (len(message), message)


def is_connected(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def tune(request: web.BaseRequest) -> None:
    """Keep buffers for the client small, and detect early that it has vanished.

    Without a write buffer the transport keeps only the unsent rest of one message, and a newer state replaces the next.
    """
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)
    sock = request.get_extra_info("socket")
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
