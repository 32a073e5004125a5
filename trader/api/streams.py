"""Event streams: `GET /api/events/<stream>`, `text/event-stream`.

Each response has one writer, its handler. It waits for the next frame until the ping is due; every write has a timeout,
and a client that does not read is disconnected. The streams end when the application shuts down, else an open one would
hold the process for the whole shutdown timeout.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter

from trader.api.broadcast import Broadcaster, EventBroadcaster, Load, StateBroadcaster, Subscriber, frame
from trader.api.requests import REQUEST_ID, Handler
from trader.api.routes import Documented, Route, refusal
from trader.api.schemas.common import ENCODER, iso
from trader.api.schemas.health import HaltInForce
from trader.api.schemas.models import InvocationView
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.streams import PositionEventData, Refusal, WorkflowMessage
from trader.api.schemas.trades import TradeView
from trader.clock import Clock
from trader.errors import Unavailable
from trader.services.events import (
    ConversationsChanged,
    Event,
    EventBus,
    HaltsChanged,
    MarketChecked,
    PositionsChanged,
    TradesChanged,
    WorkflowProgress,
)

log = logging.getLogger(__name__)

PING = b"event: ping\ndata:\n\n"

PREFIX: Final = "/api/events/"

HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream",
    hdrs.CACHE_CONTROL: "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}

GONE_MS = 30_000
"""A client that acknowledges nothing for this long is disconnected, whatever the kernel would still retry."""

EOF_S = 1.0
"""The timeout of a write after the stream has ended: it must not hold up a shutdown."""

SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel buffers for a client that has stopped reading; newer states replace those beyond it."""


_RESPONSES: Final = {
    200: Documented(
        "An endless stream of events; `x-event-data` is the schema of their `data`.",
        str,
        ("X-Request-Id", "Cache-Control"),
        "text/event-stream",
    ),
    500: Documented("The state cannot be read.", Refusal, headers=()),
    503: Documented(
        "The stream has all its subscribers, or the state cannot be read now.", Refusal, ("X-Request-Id", "Retry-After")
    ),
}


ROUTES: Final[Mapping[str, Route]] = {
    name: Route(PREFIX + name, title, sent, "streams", _RESPONSES, event_data=data)
    for name, data, title, sent in (
        (
            "positions",
            list[PositionEventData],
            "Open positions",
            "One entry per active model, whatever it holds. Sent about every 10 seconds and at every change of a "
            "position.",
        ),
        (
            "trades",
            list[TradeView],
            "Completed trades",
            "The latest 100, the newest first. Sent when a trade closes.",
        ),
        (
            "conversations",
            list[InvocationView],
            "Runs of the models",
            "The latest 50, the newest first. Sent when a run was recorded.",
        ),
        ("portfolio", PortfolioUpdate, "Live equity of the models", "Sent about every 10 seconds."),
        (
            "workflow",
            WorkflowMessage,
            "What the models are doing",
            "Named events: the event's name is the `type` of its data. The first is `connected`. A subscriber that "
            "cannot keep up is dropped and reconnects.",
        ),
    )
}
"""The streams by name: what each sends as the data of an event, its title, and when it sends."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of real time: between pings, for one write, between two checks that the client is connected."""

    ping_s: float = 15.0
    write_s: float = 10.0
    watch_s: float = 1.0


class Hubs:
    """The five streams, fed by the events of the services.

    `loads` has, for each stream but `workflow`, the function that returns the current state as JSON.
    """

    def __init__(self, loads: Mapping[str, Load], events: EventBus, clock: Clock) -> None:
        self.positions = StateBroadcaster("positions", loads["positions"])
        self.trades = StateBroadcaster("trades", loads["trades"])
        self.conversations = StateBroadcaster("conversations", loads["conversations"])
        self.portfolio = StateBroadcaster("portfolio", loads["portfolio"])
        self.workflow = EventBroadcaster("workflow", lambda: _workflow_frame("connected", iso(clock.now()), {}))
        self.all: dict[str, Broadcaster] = {
            hub.name: hub for hub in (self.positions, self.trades, self.conversations, self.portfolio, self.workflow)
        }
        events.subscribe(self._on_event)

    async def start(self) -> None:
        for hub in self.all.values():
            await hub.start()

    async def close(self) -> None:
        for hub in self.all.values():
            await hub.close()

    def _on_event(self, event: Event) -> None:
        match event:
            case MarketChecked():
                self.positions.changed()
                self.portfolio.changed()
            case PositionsChanged(at=at, account_ids=account_ids):
                self.positions.changed()
                self._tell("positions:changed", iso(at), {"accountIds": account_ids})
            case TradesChanged(at=at, account_ids=account_ids):
                self.trades.changed()
                self._tell("trades:changed", iso(at), {"accountIds": account_ids})
            case ConversationsChanged(at=at, model_id=model_id):
                self.conversations.changed()
                self._tell("conversations:changed", iso(at), {"modelId": model_id})
            case HaltsChanged(at=at, halts=halts):
                self._tell("halts:changed", iso(at), {"halts": [HaltInForce.of(halt) for halt in halts]})
            case WorkflowProgress(type=kind, at=at, details=details):
                self._tell(kind, iso(at), details)

    def _tell(self, kind: str, timestamp: str, details: Mapping[str, Any]) -> None:
        if not len(self.workflow):
            return
        try:
            message = _workflow_frame(kind, timestamp, details)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            # The publisher must not fail because a detail cannot be encoded.
            log.error("workflow event %s cannot be encoded: %s", kind, error)
            return
        self.workflow.post(message)


def _workflow_frame(kind: str, timestamp: str, details: Mapping[str, Any]) -> bytes:
    return frame(ENCODER.encode({**details, "type": kind, "timestamp": timestamp}), kind)


def setup(app: web.Application, hubs: Hubs, timing: Timing | None = None) -> None:
    """Add the streams to the application, and end them when it shuts down.

    `Hubs.start` and `Hubs.close` stay with the owner of the hubs; closing twice does no harm.
    """
    for name, hub in hubs.all.items():
        ROUTES[name].add_to(app, _handler(hub, timing or Timing()))
    Route(PREFIX + "{path:.*}").add_to(app, _refuse_path)

    async def end_streams(_: web.Application) -> None:
        await hubs.close()

    app.on_shutdown.append(end_streams)


def _handler(hub: Broadcaster, timing: Timing) -> Handler:
    async def stream(request: web.Request) -> web.StreamResponse:
        try:
            subscriber = hub.subscribe()
        except Unavailable as error:
            return _refusal(error)
        try:
            # Nothing is sent before the first state is loaded, so a failure can still be answered by its status.
            while not (first := subscriber.take()) and not subscriber.ended and _is_connected(request):
                await subscriber.wait(timing.watch_s)
            if not first:
                if subscriber.error is not None:
                    log.warning(
                        "stream %s refused: %s (request %s)", hub.name, subscriber.error, request.get(REQUEST_ID)
                    )
                return _refusal(subscriber.error or Unavailable("The stream has ended"))
            log.info("stream %s opened (request %s)", hub.name, request.get(REQUEST_ID))
            return await _serve(request, hub, subscriber, first, timing)
        finally:
            hub.unsubscribe(subscriber)

    return stream


async def _serve(
    request: web.Request, hub: Broadcaster, subscriber: Subscriber, first: bytes, timing: Timing
) -> web.StreamResponse:
    """Write to one client until it disconnects, cannot keep up, or the stream ends."""
    response = web.StreamResponse(headers=HEADERS)
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        payload = await response.prepare(request)
        assert payload is not None
        _tune(request)
        writer = _Writer(request, response, payload, subscriber, timing.write_s)
        ping_at = loop.time() + timing.ping_s
        alive = await writer.begin(first)
        while alive and not subscriber.ended and _is_connected(request):
            await subscriber.wait(max(0.0, min(ping_at - loop.time(), timing.watch_s)))
            if not (alive := await writer.caught_up()):
                break
            message = subscriber.take()  # only now: newer states replace those of before the wait
            if (now := loop.time()) >= ping_at:
                message += PING
                ping_at += timing.ping_s
                if ping_at <= now:  # pings missed during a wait are not made up for
                    ping_at = now + timing.ping_s
            writer.put(message)
        if not alive and not subscriber.ended:
            hub.drop(subscriber)
        await writer.finish()
    return response


class _Writer:
    """Writes to one response and waits for its client, with a timeout; the end of the subscription ends the wait.

    A message is written to the transport as a whole, by the handler or by the broadcaster, so the two never mix.
    Nothing is pushed while the client is behind: beside the kernel's buffer there is at most one message in the
    transport, and one message (or the backlog) in the subscriber.
    """

    def __init__(
        self,
        request: web.Request,
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

    def _push(self, message: bytes) -> bool:
        if self._is_behind() or not _is_connected(self._request):
            return False
        self.put(message)
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


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _tune(request: web.Request) -> None:
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


def _refusal(error: BaseException) -> web.Response:
    """Return the response before any stream header: 503, or 500 without the cause."""
    if isinstance(error, Unavailable):
        return refusal(503, str(error), {hdrs.RETRY_AFTER: str(error.retry_after_s)})
    return refusal(500, "Internal server error")


async def _refuse_path(_: web.Request) -> web.Response:
    return refusal(404, "Not Found")
