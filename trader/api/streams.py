"""Event streams: `GET /api/events/<stream>`, and `GET /api/events` with several in one; `text/event-stream`.

Each response has one writer, its handler. It waits for the next frame until the ping is due; every write has a timeout,
and a client that does not read is disconnected. The streams end when the application shuts down, else an open one would
hold the process for the whole shutdown timeout.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from trader.api.broadcast import Broadcaster, EventBroadcaster
from trader.api.compression import GZIP, accepts_gzip
from trader.api.requests import REQUEST_ID, UNKNOWN, Handler
from trader.api.routes import Documented, Route, for_reading
from trader.api.schemas.common import ENCODER, iso
from trader.api.schemas.health import HaltInForce
from trader.api.schemas.models import InvocationView
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.streams import PositionEventData, Refusal, StreamEvents, WorkflowMessage
from trader.api.schemas.trades import TradeView
from trader.api.site import Site, refusal
from trader.api.state_broadcast import Load, StateBroadcaster
from trader.api.stream_events import ID_PATTERN, EventRing
from trader.api.stream_messages import GZIP_HEADER, MessageForm
from trader.api.stream_writer import StreamWriter, is_connected, tune
from trader.api.subscriber import Subscriber
from trader.clock import Clock
from trader.errors import InvalidInput, Issue, Unavailable
from trader.services.events import (
    ConversationsChanged,
    Event,
    EventBus,
    HaltsChanged,
    LeadershipChanged,
    MarketChecked,
    PositionsChanged,
    TradesChanged,
    WorkflowProgress,
)

log = logging.getLogger(__name__)

PING = b"event: ping\ndata:\n\n"

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

ONE_STREAM: Final = Route(
    PATH,
    "Several streams in one",
    "An event has the name of its stream, or the workflow event's own, and an `id`. A client that returns with the "
    "last id (the header `Last-Event-ID`, or `lastEventId`) gets the newest states and the workflow events it missed; "
    "when some of those are lost, an event `reset` comes first. It takes a place in each of its streams.",
    "streams",
    {
        200: _RESPONSES[200],
        400: Documented("A stream that does not exist, or an id of another form.", Refusal),
        500: _RESPONSES[500],
        503: _RESPONSES[503],
    },
    {
        "streams": f"Which streams, separated by commas: any of {', '.join(ROUTES)}. Without it, all of them.",
        "patches": "With `true`, events `<stream>:patch` with what changed follow the first state of a stream.",
        "lastEventId": "The id of the last message, for clients that cannot send the header.",
    },
    StreamEvents,
)
"""The stream of a page, which would else use up the connections that its browser has for an origin."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Real time: between pings, for one write, between two checks that the client is connected, and until it returns.

    `retry_ms` is the first line of the one stream: how long a browser waits before it connects again.
    """

    ping_s: float = 15.0
    write_s: float = 10.0
    watch_s: float = 1.0
    retry_ms: float = 2000


class Hubs:
    """The five streams, fed by the events of the services.

    `loads` has, for each stream but `workflow`, the function that returns the current state as JSON.
    """

    def __init__(self, loads: Mapping[str, Load], events: EventBus, clock: Clock) -> None:
        ring = EventRing(lambda kind: _workflow_data(kind, iso(clock.now()), {}))
        self.positions = StateBroadcaster("positions", loads["positions"], ring.last_id)
        self.trades = StateBroadcaster("trades", loads["trades"], ring.last_id)
        self.conversations = StateBroadcaster("conversations", loads["conversations"], ring.last_id)
        self.portfolio = StateBroadcaster("portfolio", loads["portfolio"], ring.last_id)
        self.workflow = EventBroadcaster("workflow", ring)
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
            case LeadershipChanged():
                self.workflow.restart()
            case HaltsChanged(at=at, halts=halts):
                self._tell("halts:changed", iso(at), {"halts": [HaltInForce.of(halt) for halt in halts]})
            case WorkflowProgress(type=kind, at=at, details=details):
                self._tell(kind, iso(at), details)

    def _tell(self, kind: str, timestamp: str, details: Mapping[str, Any]) -> None:
        try:
            data = _workflow_data(kind, timestamp, details)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            # The publisher must not fail because a detail cannot be encoded.
            log.error("workflow event %s cannot be encoded: %s", kind, error)
            return
        self.workflow.post(kind, data)


def _workflow_data(kind: str, timestamp: str, details: Mapping[str, Any]) -> bytes:
    return ENCODER.encode({**details, "type": kind, "timestamp": timestamp})


def setup(site: Site, hubs: Hubs, timing: Timing | None = None) -> None:
    """Add the streams to the site, and end them before its server stops.

    `Hubs.start` and `Hubs.close` stay with the owner of the hubs; closing twice does no harm.
    """
    timing = timing or Timing()
    for name in hubs.all:
        ROUTES[name].add_to(site, _handler(site, hubs, _only(name), timing))
    ONE_STREAM.add_to(site, _handler(site, hubs, _chosen, timing))
    site.add_pattern(PREFIX + ".*", UNKNOWN, for_reading(site, _refuse_path))
    site.endings.append(hubs.close)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for. `numbered`: the one stream, whose messages have names and ids."""

    streams: Sequence[str]
    numbered: bool = False
    last_id: str | None = None
    patched: bool = False


def _only(name: str) -> Callable[[web.BaseRequest], _Wanted]:
    wanted = _Wanted((name,))
    return lambda _: wanted


def _chosen(request: web.BaseRequest) -> _Wanted:
    """Return the streams that the query names, or all, and the id with which the client returns.

    :raises InvalidInput: a stream does not exist, or the id has another form
    """
    named = request.query.getall("streams", [])
    streams = dict.fromkeys(name for text in named for name in text.split(","))
    unknown = [name for name in streams if name not in ROUTES]
    if unknown:
        allowed = ", ".join(ROUTES)
        raise InvalidInput(Issue(("streams",), f"{unknown[0][:40]!r} is not a stream; there are {allowed}"))
    last_id = request.headers.get(hdrs.LAST_EVENT_ID) or request.query.get("lastEventId") or None
    if last_id is not None and ID_PATTERN.fullmatch(last_id) is None:
        raise InvalidInput(
            Issue(("lastEventId",), f"{last_id[:40]!r} is not the id of a message, such as 5f0c77d1-42; leave it out")
        )
    patches = request.query.get("patches", "false")
    if patches not in {"true", "false"}:
        raise InvalidInput(Issue(("patches",), f"patches is true or false, not {patches[:40]!r}"))
    return _Wanted(tuple(streams or ROUTES), True, last_id, patches == "true")


def _handler(site: Site, hubs: Hubs, choose: Callable[[web.BaseRequest], _Wanted], timing: Timing) -> Handler:
    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        try:
            wanted = choose(request)
        except InvalidInput as error:
            return refusal(400, "; ".join(issue.message for issue in error.issues))
        followed = [hubs.all[name] for name in wanted.streams]
        states = [hub.name for hub in followed if isinstance(hub, StateBroadcaster)]
        subscriber = Subscriber(MessageForm(wanted.numbered, accepts_gzip(request), wanted.patched))
        try:
            for hub in followed:
                hub.add(subscriber, wanted.last_id)
            # Nothing is sent before the first states are loaded, so a failure can still be answered by its status.
            while not subscriber.has(states) and not subscriber.ended and is_connected(request):
                await subscriber.wait(timing.watch_s)
            if not subscriber.has(states) or subscriber.ended:
                if subscriber.error is not None:
                    names = ", ".join(wanted.streams)
                    log.warning("stream %s refused: %s (request %s)", names, subscriber.error, request.get(REQUEST_ID))
                return _refusal(subscriber.error or Unavailable("The stream has ended"))
            log.info("stream %s opened (request %s)", ", ".join(wanted.streams), request.get(REQUEST_ID))
            return await _serve(site, request, followed, subscriber, timing)
        except Unavailable as error:
            return _refusal(error)
        finally:
            for hub in followed:
                hub.unsubscribe(subscriber)

    return stream


async def _serve(
    site: Site, request: web.BaseRequest, followed: Sequence[Broadcaster], subscriber: Subscriber, timing: Timing
) -> web.StreamResponse:
    """Write to one client until it disconnects, cannot keep up, or the stream ends."""
    form = subscriber.form
    response = web.StreamResponse(headers=HEADERS)
    if form.compressed:
        response.headers[hdrs.CONTENT_ENCODING] = GZIP
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        await site.finish_head(request, response)
        payload = await response.prepare(request)
        assert payload is not None
        tune(request)
        writer = StreamWriter(request, response, payload, subscriber, timing.write_s)
        ping_at = loop.time() + timing.ping_s
        retry = b"retry: %d\n\n" % timing.retry_ms if form.numbered else b""
        alive = await writer.begin((GZIP_HEADER if form.compressed else b"") + subscriber.take(before=retry))
        while alive and not subscriber.ended and is_connected(request):
            await subscriber.wait(max(0.0, min(ping_at - loop.time(), timing.watch_s)))
            if not (alive := await writer.caught_up()):
                break
            is_ping_due = (now := loop.time()) >= ping_at
            writer.put(subscriber.take(after=PING if is_ping_due else b""))  # newest states: those of after the wait
            if is_ping_due:
                ping_at += timing.ping_s
                if ping_at <= now:  # pings missed during a wait are not made up for
                    ping_at = now + timing.ping_s
        if not alive and not subscriber.ended:
            for hub in followed:
                hub.drop(subscriber)
        await writer.finish()
    return response


def _refusal(error: BaseException) -> web.Response:
    """Return the response before any stream header: 503, or 500 without the cause."""
    if isinstance(error, Unavailable):
        return refusal(503, str(error), {hdrs.RETRY_AFTER: str(error.retry_after_s)})
    return refusal(500, "Internal server error")


async def _refuse_path(_: web.BaseRequest) -> web.Response:
    return refusal(404, "Not Found")
