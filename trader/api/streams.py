"""Event streams: `GET /api/events/<stream>`, and `GET /api/events` with several in one; `text/event-stream`.

Each response has one writer, its handler. It waits for the next frame until the ping is due; every write has a timeout,
and a client that does not read is disconnected. In addition to the kernel's buffer there is at most one message in its
transport, and one message (or the backlog) in its subscriber. The streams end when the application shuts down;
otherwise an open one would delay the process for the whole shutdown timeout.
"""

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from trader.api.broadcast import ID_PATTERN, Broadcaster, EventBroadcaster, EventRing
from trader.api.compression import GZIP, accepts_gzip
from trader.api.context import ACCESS
from trader.api.requests import INFO, address_of
from trader.api.routes import Documented, Route, answer_expectation, refusal
from trader.api.schemas.common import ENCODER, Refusal, decoder_of, encoded, iso
from trader.api.schemas.health import HaltInForce
from trader.api.schemas.streams import NoteMessage, Reset, WorkflowCall, WorkflowMessage
from trader.api.state_broadcast import Load, StateBroadcaster
from trader.api.stream_messages import GZIP_HEADER, MessageForm
from trader.api.stream_table import STREAMS, StreamEvents
from trader.api.subscriber import Subscriber
from trader.core.clock import Clock
from trader.core.errors import InvalidInput, Issue, Unavailable
from trader.core.events import (
    ConversationsChanged,
    Event,
    EventBus,
    LeadershipChanged,
    PositionsChanged,
    WorkflowProgress,
)
from trader.exchange.events import HaltsChanged, TradesChanged

log = logging.getLogger(__name__)

PING = b"event: ping\ndata:\n\n"

GONE_MS: Final = 30_000
"""A client that acknowledges nothing for this long is disconnected, regardless of the kernel's retries."""

EOF_S: Final = 1.0
"""The timeout of a write after the stream has ended, which must not delay a shutdown."""

SEND_BUFFER_BYTES: Final = 128 * 1024
"""How much the kernel buffers for a client that has stopped reading; beyond that, newer states replace older ones."""

PATH: Final = "/api/events"
PREFIX: Final = f"{PATH}/"

HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream",
    hdrs.CACHE_CONTROL: "no-cache, no-transform",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
    "X-Accel-Buffering": "no",
}

_RESPONSES: Final = {
    200: Documented(
        "An endless stream of events; `x-event-data` is the schema of their `data`.",
        str,
        ("X-Request-Id", "Cache-Control"),
        "text/event-stream",
    ),
    500: Documented("The state cannot be read.", Refusal, headers=()),
    503: Documented("The stream is full, or the state cannot be read now.", Refusal, ("X-Request-Id", "Retry-After")),
}


ROUTES: Final[Mapping[str, Route]] = {
    stream.name: Route(PREFIX + stream.name, stream.title, stream.sent, "streams", _RESPONSES, event_data=stream.data)
    for stream in STREAMS
}
"""The routes of the streams by name."""

ONE_STREAM: Final = Route(
    PATH,
    "Several streams in one",
    "An event has the name of its stream, or the workflow event's own, and an `id`. A client that reconnects with the "
    "last id (the header `Last-Event-ID`, or `lastEventId`) gets the latest states and the workflow events it missed; "
    "if some of those are lost, an event `reset` comes first. After the whole state, new trades and runs come alone, "
    "as events `trades:new` and `conversations:new`. A long state that keeps changing comes again after a second for "
    "each 7 kB, at most after 30. It takes a slot in each of its streams.",
    "streams",
    {
        200: _RESPONSES[200],
        400: Documented("An unknown stream, or a malformed id.", Refusal),
        500: _RESPONSES[500],
        503: _RESPONSES[503],
    },
    {
        "streams": f"Which streams, separated by commas: any of {', '.join(ROUTES)}. Without it, all of them.",
        "lastEventId": "The id of the last message, for clients that cannot send the header.",
    },
    StreamEvents,
)
"""The combined stream for a page, which would otherwise use up its browser's connections to an origin."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Real times: between pings, for one write, between two checks that the client is connected and its key is valid,
    until a client that reads nothing is disconnected, and until it returns.

    `retry_ms` is the first line of the combined stream: how long a browser waits before it reconnects.
    """

    ping_s: float = 15.0
    write_s: float = 10.0
    watch_s: float = 0.4
    stalled_s: float = 30.0
    retry_ms: float = 2000


class Broadcasters:
    """The broadcasters of all streams, fed by the events of the services.

    `loads` maps each state stream to the function that returns its current state as JSON.
    """

    def __init__(self, loads: Mapping[str, Load], events: EventBus, clock: Clock) -> None:
        ring = EventRing(lambda kind: _workflow_data(kind, iso(clock.now()), {}))
        self.workflow = EventBroadcaster("workflow", ring)
        self.states = {
            stream.name: StateBroadcaster(stream.name, loads[stream.name], ring.last_id, stream.options)
            for stream in STREAMS
            if stream.load is not None
        }
        self.all: dict[str, Broadcaster] = {
            stream.name: self.states.get(stream.name, self.workflow) for stream in STREAMS
        }
        events.subscribe(self._on_event)

    async def start(self) -> None:
        for broadcaster in self.all.values():
            await broadcaster.start()

    async def close(self) -> None:
        """End every stream and accept no more subscribers; closing twice is harmless."""
        for broadcaster in self.all.values():
            await broadcaster.close()

    def _on_event(self, event: Event) -> None:
        for stream in STREAMS:
            if isinstance(event, stream.changed_by):
                self.states[stream.name].changed()
        match event:
            case PositionsChanged(at=at, account_ids=account_ids):
                self._post("positions:changed", at, {"accountIds": account_ids})
            case TradesChanged(at=at, account_ids=account_ids):
                self._post("trades:changed", at, {"accountIds": account_ids})
            case ConversationsChanged(at=at, model_id=model_id):
                self._post("conversations:changed", at, {"modelId": model_id})
            case LeadershipChanged():
                self.workflow.restart()
            case HaltsChanged(at=at, halts=halts):
                self._post("halts:changed", at, {"halts": [HaltInForce.from_attributes(halt) for halt in halts]})
            case WorkflowProgress(type=kind, at=at, details=details):
                self._post(kind, at, details)

    def _post(self, kind: str, at: datetime, details: Mapping[str, Any]) -> None:
        data = _workflow_data(kind, iso(at), details)
        # The encoded event is what must match its schema; and a follower has its details as the leader encoded them.
        message = _WORKFLOW.decode(data)
        self.workflow.post(kind, data)
        if isinstance(message, WorkflowCall) and (note := NoteMessage.of(message)) is not None:
            self.states["conversations"].send_event("note", encoded(note, decoder_of(NoteMessage)))


_WORKFLOW: Final = msgspec.json.Decoder[Any](WorkflowMessage | Reset)


def _workflow_data(kind: str, timestamp: str, details: Mapping[str, Any]) -> bytes:
    return ENCODER.encode({**details, "type": kind, "timestamp": timestamp})


BROADCASTERS: Final = web.AppKey("broadcasters", Broadcasters)


def routes(timing: Timing | None = None) -> list[web.RouteDef]:
    timing = timing or Timing()
    definitions = ONE_STREAM.get(partial(_stream, None, timing))
    for name, route in ROUTES.items():
        definitions += route.get(partial(_stream, name, timing))
    unknown = web.get(PREFIX + "{name:.*}", _refuse_name, allow_head=False, expect_handler=answer_expectation)
    return [*definitions, unknown]


async def run(app: web.Application) -> AsyncIterator[None]:
    """Load and send states while the application runs."""
    broadcasters = app[BROADCASTERS]
    await broadcasters.start()
    yield
    await broadcasters.close()


async def end(app: web.Application) -> None:
    """End the open streams, because the server would otherwise wait for them when it stops."""
    await app[BROADCASTERS].close()


def _chosen(request: web.Request) -> tuple[Sequence[str], str | None]:
    """Return the streams that the query names, or all, and the id with which the client returns.

    :raises InvalidInput: a stream does not exist, or the id is malformed
    """
    named = request.query.getall("streams", [])
    streams = dict.fromkeys(name for text in named for name in text.split(","))
    unknown = [name for name in streams if name not in ROUTES]
    if unknown:
        allowed = ", ".join(ROUTES)
        raise InvalidInput(Issue(("streams",), f"{unknown[0][:40]!r} is not a stream; expected one of {allowed}"))
    last_id = request.headers.get(hdrs.LAST_EVENT_ID) or request.query.get("lastEventId") or None
    if last_id is not None and ID_PATTERN.fullmatch(last_id) is None:
        raise InvalidInput(
            Issue(("lastEventId",), f"{last_id[:40]!r} is not the id of a message, such as 5f0c77d1-42; leave it out")
        )
    return tuple(streams or ROUTES), last_id


async def _refuse_name(_: web.Request) -> web.Response:
    return refusal(404, f"There is no such stream; the streams are {', '.join(ROUTES)}")


async def _stream(name: str | None, timing: Timing, request: web.Request) -> web.StreamResponse:
    """Answer with the stream of this name; None: with the combined one, whose messages have names and ids."""
    streams, last_id = _chosen(request) if name is None else ((name,), None)
    followed = [request.app[BROADCASTERS].all[each] for each in streams]
    states = [broadcaster.name for broadcaster in followed if isinstance(broadcaster, StateBroadcaster)]
    subscriber = Subscriber(
        MessageForm(name is None, accepts_gzip(request)),
        address=address_of(request),
        is_known=request[INFO].caller.is_known,
    )
    names, request_id = ", ".join(streams), request[INFO].id
    try:
        for broadcaster in followed:
            broadcaster.add(subscriber, last_id)
        # Nothing is sent before the first states are loaded, so a failure can still set the status.
        while not subscriber.has(states) and not subscriber.ended and _is_connected(request):
            await subscriber.wait(timing.watch_s)
        if not subscriber.has(states) or subscriber.ended:
            if subscriber.error is None:
                raise Unavailable("The stream has ended")
            log.warning("stream %s refused: %s (request %s)", names, subscriber.error, request_id)
            if isinstance(subscriber.error, Unavailable):
                raise subscriber.error
            return refusal(500, "Internal server error")  # the broadcaster has logged the cause
        log.info("stream %s opened (request %s)", names, request_id)
        return await _send(request, followed, subscriber, timing)
    finally:
        for broadcaster in followed:
            broadcaster.unsubscribe(subscriber)


async def _send(
    request: web.Request, followed: Sequence[Broadcaster], subscriber: Subscriber, timing: Timing
) -> web.StreamResponse:
    """Send messages to one client until it disconnects, cannot keep up, or the stream ends."""
    form, loop = subscriber.form, asyncio.get_running_loop()
    response = web.StreamResponse(headers=HEADERS)
    if form.compressed:
        response.headers[hdrs.CONTENT_ENCODING] = GZIP
    with suppress(ConnectionError):
        writer = await response.prepare(request)
        assert writer is not None
        _tune(request)

        async def write(message: bytes) -> None:
            await response.write(message)
            await writer.drain()  # `write` itself waits only after 64 KiB

        is_quick = partial(_in_time, request, subscriber, timing.write_s)
        ping_at, reader = loop.time() + timing.ping_s, _Reader(request)
        retry = b"retry: %d\n\n" % timing.retry_ms if form.numbered else b""
        alive = await is_quick(write((GZIP_HEADER if form.compressed else b"") + subscriber.take(before=retry)))
        while alive and not subscriber.ended and _is_connected(request) and await _is_admitted(request):
            await subscriber.wait(max(0.0, min(ping_at - loop.time(), timing.watch_s)))
            is_ping_due = (now := loop.time()) >= ping_at
            if reader.stalled_s(now) > timing.stalled_s:
                alive = False
                if request.transport is not None:
                    request.transport.abort()
            elif message := subscriber.take(after=PING if is_ping_due else b""):
                alive = await is_quick(write(message))
            if is_ping_due:
                ping_at += timing.ping_s
                if ping_at <= now:  # pings missed during a wait are not sent later
                    ping_at = now + timing.ping_s
        if not alive and not subscriber.ended:
            for broadcaster in followed:
                broadcaster.drop(subscriber)
        await is_quick(response.write_eof())
    return response


class _Reader:
    """Detects whether a client reads from the buffers of this machine, which can hold hours of messages."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._taken_bytes = 0
        self._since_s = asyncio.get_running_loop().time()

    def stalled_s(self, now_s: float) -> float:
        """Return how long data has been waiting without the client reading any."""
        waiting_bytes = _waiting_bytes(self._request)
        taken_bytes = self._request.writer.output_size - waiting_bytes
        if not waiting_bytes or taken_bytes > self._taken_bytes:
            self._taken_bytes, self._since_s = taken_bytes, now_s
        return now_s - self._since_s


def _waiting_bytes(request: web.Request) -> int:
    """Return how many bytes the other side has not acknowledged; 0 if the system does not report it."""
    sock, queued = request.get_extra_info("socket"), bytearray(4)
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        with suppress(OSError):
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, queued)
    in_process = 0 if request.transport is None else request.transport.get_write_buffer_size()
    return int.from_bytes(queued, sys.byteorder) + in_process


async def _in_time(
    request: web.Request, subscriber: Subscriber, timeout_s: float, sending: Coroutine[Any, Any, None]
) -> bool:
    """Send something to the client. Return False if it was too slow and was disconnected.

    The end of the subscription disconnects a client that is behind, which would delay a shutdown.
    """
    transport = request.transport
    subscriber.cut = None if transport is None else transport.abort
    try:
        async with asyncio.timeout(min(timeout_s, EOF_S) if subscriber.ended else timeout_s):
            await sending
    except TimeoutError:
        if transport is not None:
            transport.abort()
        return False
    finally:
        subscriber.cut = None
    return True


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _is_admitted(request: web.Request) -> bool:
    """Return whether the caller's key or token is still valid."""
    access = request.app.get(ACCESS)
    return access is None or await access.is_valid(request[INFO].caller)


def _tune(request: web.Request) -> None:
    """Keep the client's buffers small, and detect early that it has vanished.

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
