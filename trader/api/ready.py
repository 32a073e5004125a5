"""The shortest way of a good answer to its caller.

The framework finds a handler by patterns, builds a response from headers, calls every hook, and writes it: half of the
time of a kept answer. What most callers ask for is found by its path alone, and what they get is the same but for its
date, id and body, so it is put together in one piece and written at once. Whoever asks for more (another origin, an
older protocol, a batch, the end of the connection) gets the framework's way.
"""

import time
from collections.abc import Awaitable, Mapping
from email.utils import formatdate
from typing import Final

from aiohttp import HttpVersion11, Payload, hdrs, web
from aiohttp.abc import AbstractStreamWriter

from trader.api import batch
from trader.api.requests import Handler
from trader.api.schemas.common import Body, Pieces, whole

DIRECT: Final = web.AppKey("direct", Mapping[str, Handler])
"""Handlers by raw path: see `past_the_router`."""

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nDate: %b\r\nVary: Origin\r\n"
    b"X-Request-Id: %b\r\n\r\n"
)
_PIECE_BYTES_MAX: Final = 64 * 1024
"""A larger body is not copied to be in one piece with its head; more than this of a long one is not held up at once."""


class _Date:
    """The time as headers tell it, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = b""

    def now(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._text = formatdate(second, usegmt=True).encode()
        return self._text


_date: Final = _Date()


def suits(request: web.Request) -> bool:
    """Whether the caller needs nothing beyond the usual headers, and the connection goes on."""
    headers = request.headers
    return (
        request.keep_alive
        and request.version == HttpVersion11
        and hdrs.ORIGIN not in headers
        and hdrs.EXPECT not in headers
        and batch.HEADER not in headers
    )


def past_the_router(direct: Mapping[str, Handler], routed: Handler) -> Handler:
    """The handler of all requests: calls of a path in `direct` that `suits` go there, everything else is routed.

    No hook of responses is called for a direct one, and it has no match: its handler sees to the headers of errors too.
    """

    def handle(request: web.Request) -> Awaitable[web.StreamResponse]:
        handler = direct.get(request.rel_url.raw_path)
        if handler is None or request.method != hdrs.METH_POST or not suits(request):
            return routed(request)
        return handler(request)

    return handle


class ReadyResponse(web.StreamResponse):
    """A JSON answer with status 200 to a request that `suits`."""

    def __init__(self, body: Body, request_id: str) -> None:
        # The base's own beginning is left out, since nothing of it is used: headers, cookies, compression and the rest
        # are for the head that it would write, and making them takes as long as all that is done here.
        self._ready = body
        self._id = request_id

    @property
    def status(self) -> int:
        return 200

    @property
    def keep_alive(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._asked = request
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        request, body = self._asked, self._ready
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller has left")
        head = _HEAD % (len(body), _date.now(), self._id.encode())
        if len(body) <= _PIECE_BYTES_MAX:
            transport.write(head + whole(body))
        else:
            # Not by `writelines`: that of some versions of Python (3.13.0) never says that the caller is behind.
            for piece in (head, body) if isinstance(body, bytes) else (head, *body):
                transport.write(piece)
        if request.protocol.writing_paused:
            await request.writer.drain()


class PiecesPayload(Payload):
    """A long JSON body for the framework's response."""

    _default_content_type = "application/json"
    _value: Pieces

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self._size = len(pieces)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return whole(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        waiting: list[bytes | memoryview] = []
        size = 0
        for piece in self._value:
            waiting.append(piece)
            size += len(piece)
            if size >= _PIECE_BYTES_MAX:
                await writer.write(b"".join(waiting))
                waiting, size = [], 0
        await writer.write(b"".join(waiting))
