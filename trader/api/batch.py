"""Batch requests of the oRPC client's BatchLinkPlugin: several calls in one POST.

The request is a JSON list of `{url, method?, headers?, body?}`. The response holds `{index, status, headers?, body}`
for each, in the order in which the calls end: as one JSON list if the client asks for `buffered`, otherwise as an event
stream that sends each as soon as it ends. The framing is that of @orpc/server 1.16.1.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from multidict import istr

from trader.api import envelope
from trader.api.compression import GZIP, StreamPacker, accepts_gzip
from trader.core.errors import InvalidInput, Issue, PayloadTooLarge

HEADER: Final = istr("x-orpc-batch")
BUFFERED: Final = "buffered"
ITEMS_MAX: Final = 10
KEEP_ALIVE_S: Final = 5.0
WRITE_WAIT_S: Final = 10.0
"""The time limit for writing one message of a streamed response."""

_COMMENT: Final = b": \n\n"


class _WireItem(msgspec.Struct):
    url: str
    method: str = "POST"
    headers: dict[str, Any] | None = None
    body: msgspec.Raw | UnsetType = UNSET


_wire_items = msgspec.json.Decoder(list[_WireItem])


class Item(NamedTuple):
    """One call of a batch. `authorization` is its own header, if it has one."""

    path: str
    method: str
    authorization: str | None
    body: bytes


class Reply(NamedTuple):
    """The answer to the call at index `number`; `body` is JSON text."""

    number: int
    status: int
    headers: Mapping[str, str]
    body: bytes


Call = Callable[[int, Item], Coroutine[None, None, Reply]]


def parse(body: bytes) -> list[Item]:
    """Return the calls in a batch request.

    :raises InvalidInput: the body is not a list of requests
    :raises PayloadTooLarge: it has more than `ITEMS_MAX`
    """
    issue = envelope.text_issue(body)
    if issue is not None:
        raise InvalidInput(issue)
    try:
        wire_items = _wire_items.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidInput(Issue((), f"expected a list of requests: {error}")) from None
    if not wire_items:
        raise InvalidInput(Issue((), "a batch holds at least one request"))
    if len(wire_items) > ITEMS_MAX:
        raise PayloadTooLarge(f"a batch holds at most {ITEMS_MAX} requests; this one has {len(wire_items)}")
    return [_item(index, wire_item) for index, wire_item in enumerate(wire_items)]


def _item(index: int, wire_item: _WireItem) -> Item:
    try:
        parts = urlsplit(wire_item.url)
    except ValueError:
        parts = urlsplit("")
    if not parts.scheme or not parts.netloc:
        raise InvalidInput(Issue((index, "url"), "expected an absolute URL"))
    own = {name.lower(): value for name, value in (wire_item.headers or {}).items()}
    authorization = own.get("authorization")
    return Item(
        path=parts.path,
        method=wire_item.method,
        authorization=authorization if isinstance(authorization, str) else None,
        body=b"" if wire_item.body is UNSET else bytes(wire_item.body),
    )


async def respond(request: web.Request, items: list[Item], call: Call, mode: str, status: int) -> web.StreamResponse:
    """Run all calls concurrently and respond. Calls in progress continue if the caller disconnects."""
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(call(index, item)) for index, item in enumerate(items)]
        if mode == BUFFERED:
            replies = [encode(await ended) for ended in asyncio.as_completed(calls)]
            body = b"[" + b",".join(replies) + b"]"
            return web.Response(status=status, body=body, headers={"Content-Type": "application/json"})
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        response.headers["Cache-Control"] = "no-cache, no-transform"
        response.headers["X-Accel-Buffering"] = "no"
        response.headers["Vary"] = "Accept-Encoding"
        packer = StreamPacker(compress=accepts_gzip(request))
        if packer.compresses:
            response.headers["Content-Encoding"] = GZIP
        try:
            await _stream(request, response, calls, packer)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the caller has disconnected; the calls continue
    return response


async def _stream(
    request: web.Request, response: web.StreamResponse, calls: list[asyncio.Task[Reply]], packer: StreamPacker
) -> None:
    async with asyncio.timeout(WRITE_WAIT_S):
        await response.prepare(request)
        await response.write(await packer.pack(_COMMENT))
    waiting = set(calls)
    while waiting:
        ended, waiting = await asyncio.wait(waiting, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        replies = sorted(task.result() for task in ended)
        messages = [b"event: message\ndata: " + encode(reply) + b"\n\n" for reply in replies]
        packed = await packer.pack(b"".join(messages) or _COMMENT)
        async with asyncio.timeout(WRITE_WAIT_S):
            await response.write(packed)
    async with asyncio.timeout(WRITE_WAIT_S):
        await response.write_eof(packer.end())


def encode(reply: Reply) -> bytes:
    """Encode one item of a batch response."""
    head = f'{{"index":{reply.number},"status":{int(reply.status)}'.encode()
    if reply.headers:
        lowered = {name.lower(): value for name, value in reply.headers.items()}
        head += b',"headers":' + msgspec.json.encode(lowered)
    return head + b',"body":' + reply.body + b"}"
