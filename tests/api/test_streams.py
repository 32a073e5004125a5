import asyncio
import json
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, get_args

import msgspec
import pytest
from aiohttp import web
from support.manual_clock import ManualClock
from support.served import make_stream_app
from support.sse import RUN, workflow_step
from support.waiting import turns, until

from trader.agents.domain.invocations import EndedBy
from trader.api.schemas.models import FinishedStatus
from trader.api.stream_messages import EventsMessage, Message, NumberedEvent, StateMessage
from trader.api.streams import PING, Broadcasters, Timing
from trader.core.events import (
    ConversationsChanged,
    EventBus,
    MarketChecked,
    PositionsChanged,
    PricesChanged,
    WorkflowProgress,
)
from trader.exchange.events import TradesChanged

START = datetime(2025, 1, 1, 12, tzinfo=UTC)
STATES = ("positions", "trades", "conversations", "portfolio", "candles")
STREAMS = (*STATES, "workflow")
PATIENCE_S = 60.0


class Source:
    """The state of one stream."""

    def __init__(self) -> None:
        self.state: Any = [0]
        self.loads = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        """Nothing is loaded before it is set."""

        self.gate.set()

    async def __call__(self) -> bytes:
        self.loads += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return json.dumps(self.state).encode()


class Service:
    """The streams behind a real server on a real port."""

    def __init__(self, timing: Timing) -> None:
        self.events = EventBus()
        self.sources = {name: Source() for name in STATES}
        self.broadcasters = Broadcasters(self.sources, self.events, ManualClock(START))
        self.port = 0
        self.runner = web.AppRunner(make_stream_app(self.broadcasters, timing), shutdown_timeout=20)

    @property
    def connections(self) -> list[web.RequestHandler]:
        assert self.runner.server is not None
        return self.runner.server.connections

    async def emptied(self) -> None:
        """Wait until no subscriber is left."""
        await until(lambda: not any(len(broadcaster) for broadcaster in self.broadcasters.all.values()))


@asynccontextmanager
async def serving(**timing: float) -> AsyncIterator[Service]:
    service = Service(Timing(**{"watch_s": 0.05, **timing}))
    await service.runner.setup()
    await web.TCPSite(service.runner, "127.0.0.1", 0).start()  # without the limits of the service's own connections
    service.port = service.runner.addresses[0][1]
    try:
        yield service
    finally:
        await service.runner.cleanup()


class Client:
    """A raw connection, so that a test sees the exact bytes and may stop reading or vanish."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    @classmethod
    async def get(cls, service: Service, path: str, method: str = "GET", buffer_bytes: int | None = None) -> "Client":
        sock = socket.socket()
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", service.port))
        client = cls(*await asyncio.open_connection(sock=sock, limit=2**12))
        client.writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return client

    async def head(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}

    async def chunk(self) -> bytes:
        """One chunk of the body; empty at its end."""
        async with asyncio.timeout(PATIENCE_S):
            size = int(await self.reader.readline(), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def event(self) -> tuple[str | None, Any]:
        """The next server-sent event: name and data."""
        while b"\n\n" not in self.body:
            chunk = await self.chunk()
            if not chunk:
                raise EOFError
            self.body += chunk
        text, _, self.body = self.body.partition(b"\n\n")
        match = re.fullmatch(rb"(?:event: ([a-z:]+)\n)?data:(?: (.+))?", text)
        assert match, text
        name, data = match.groups()
        return (name.decode() if name else None, json.loads(data) if data else None)

    async def drain(self) -> None:
        """Read until the stream ends, which raises."""
        while True:
            await self.event()

    async def json(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.reader.readexactly(int(self.headers["content-length"])))

    def vanish(self, *, reset: bool) -> None:
        if reset:
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.close()


@asynccontextmanager
async def streaming(service: Service, name: str, **options: Any) -> AsyncIterator[Client]:
    client = await Client.get(service, f"/api/events/{name}", **options)
    try:
        await client.head()
        yield client
    finally:
        client.writer.close()


@pytest.mark.parametrize("name", STREAMS)
async def test_headers(name: str) -> None:
    async with serving() as service, streaming(service, name) as client:
        assert client.status == 200
        assert client.headers["content-type"] == "text/event-stream"
        assert client.headers["cache-control"] == "no-cache, no-transform"
        assert client.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("name", STATES)
async def test_the_first_message_is_the_current_state(name: str) -> None:
    async with serving() as service:
        service.sources[name].state = [{"modelId": "apex"}]
        async with streaming(service, name) as client:
            assert await client.chunk() == b'data: [{"modelId": "apex"}]\n\n'


@pytest.mark.parametrize("name", ["trades", "conversations", "candles"])
async def test_an_empty_list_is_announced_only_to_new_subscribers(name: str) -> None:
    async with serving() as service:
        service.sources[name].state = []
        async with streaming(service, name) as client:
            kind, data = await client.event()
            assert (kind, data["stream"]) == ("empty", name)
            assert data["message"].endswith(" yet.")
            assert await client.event() == (None, [])
            service.broadcasters.states[name].changed()
            assert await client.event() == (None, [])


async def test_the_workflow_stream_greets_with_connected() -> None:
    async with serving() as service, streaming(service, "workflow") as client:
        assert await client.chunk() == (
            b'event: connected\ndata: {"type":"connected","timestamp":"2025-01-01T12:00:00.000Z"}\n\n'
        )


async def test_each_event_reaches_its_streams() -> None:
    async with serving() as service:
        clients = {}
        for name in STREAMS:
            clients[name] = await Client.get(service, f"/api/events/{name}")
            await clients[name].head()
            await clients[name].event()

        async def updates(*names: str) -> None:
            for name in names:
                service.sources[name].state = service.sources[name].loads
            await turns(1)
            for name in names:
                assert await clients[name].event() == (None, service.sources[name].state)

        service.events.publish(MarketChecked(at=START))
        await updates("positions", "portfolio")
        service.events.publish(PricesChanged(at=START))
        await updates("candles")
        service.events.publish(PositionsChanged(at=START, account_ids=("apex", "default")))
        await updates("positions")
        service.events.publish(TradesChanged(at=START, account_ids=("apex",)))
        await updates("trades")
        service.events.publish(ConversationsChanged(at=START, model_id="apex"))
        await updates("positions", "conversations")
        step = workflow_step(START, 2)
        service.events.publish(step)
        at = "2025-01-01T12:00:00.000Z"
        for kind, details in (
            ("positions:changed", {"accountIds": ["apex", "default"]}),
            ("trades:changed", {"accountIds": ["apex"]}),
            ("conversations:changed", {"modelId": "apex"}),
            (step.type, step.details),
        ):
            assert await clients["workflow"].event() == (kind, {"type": kind, "timestamp": at, **details})
        assert [service.sources[name].loads for name in STATES] == [4, 2, 2, 2, 2]
        for client in clients.values():
            client.vanish(reset=False)
        await service.emptied()


@pytest.mark.parametrize("is_relayed", [False, True])
async def test_an_agents_steps_and_reasons_are_sent_as_they_come(is_relayed: bool) -> None:
    """On the stream of the conversations, without loading them; a note to itself is not such a part."""
    parts = [{"kind": "step", "title": "plan", "text": "look at ETH"}, {"text": "it trends"}]
    async with serving() as service, streaming(service, "conversations") as client:
        await client.event()
        loads = service.sources["conversations"].loads
        for decision in ({"text": "mind the gap"}, {"parts": parts}):
            details = {**RUN, "number": 1, "callType": "NOTE", "status": "ok", "decisions": [decision], "results": []}
            if is_relayed:  # as a follower reads them
                details = msgspec.json.decode(msgspec.json.encode(details), type=dict[str, msgspec.Raw])
            service.events.publish(WorkflowProgress("workflow:call", START, details))
        name, data = await client.event()
        assert (name, data) == ("note", {**RUN, "parts": parts})
        assert service.sources["conversations"].loads == loads


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": object()},
        {"step": Decimal("NaN")},
        {"step": "1"},
        {"modelVariant": "Nobody"},
        {"inputTokens": 1.5},
        {"toolNames": [1]},
        {"text": "\ud800"},
    ],
)
async def test_an_event_that_does_not_match_its_schema_is_logged_and_not_sent(
    caplog: pytest.LogCaptureFixture, wrong: dict[str, object]
) -> None:
    async with serving() as service, streaming(service, "workflow") as client:
        await client.event()
        service.events.publish(workflow_step(START, 1, **wrong))
        service.events.publish(workflow_step(START, 2))
        _, data = await client.event()
        assert data["step"] == 2
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None


async def test_a_run_may_end_in_every_way_that_the_service_knows() -> None:
    ends = [("workflow:complete", {"status": "completed", "endedBy": end}) for end in get_args(EndedBy)]
    ends += [
        ("workflow:failed", {"status": status, "endedBy": "error", "failureReason": "why"})
        for status in get_args(FinishedStatus)
        if status != "completed"
    ]
    async with serving() as service, streaming(service, "workflow") as client:
        await client.event()
        for kind, details in ends:
            service.events.publish(WorkflowProgress(kind, START, {**RUN, "steps": 1, "toolCalls": 1, **details}))  # type: ignore[arg-type]
            name, data = await client.event()
            assert (name, details.items() - data.items()) == (kind, set())


@pytest.mark.parametrize("name", ["positions", "workflow"])
async def test_pings_are_on_time_no_matter_how_much_is_sent(name: str) -> None:
    async with serving(ping_s=0.1) as service, streaming(service, name) as client:
        await client.event()
        began = time.monotonic()
        late_s: list[float] = []

        async def busy() -> None:
            while True:
                service.broadcasters.states["positions"].send(StateMessage("positions", b"[]"))
                service.broadcasters.workflow.post("workflow:step", b"{}")
                await asyncio.sleep(0.005)  # two hundred times a second

        sender = asyncio.create_task(busy())
        others = 0
        while len(late_s) < 20:
            event, data = await client.event()
            if event == "ping":
                assert data is None
                late_s.append(time.monotonic() - began - 0.1 * (len(late_s) + 1))
            else:
                others += 1
        sender.cancel()
        assert others > 100
        assert min(late_s) > -0.05
        assert min(late_s[10:]) < 0.1  # no drift; single ones may be late on a busy machine
        assert max(late_s) < 1


async def test_the_51st_is_refused_and_a_freed_slot_is_reused() -> None:
    async with serving() as service:
        clients = [await Client.get(service, "/api/events/positions") for _ in range(50)]
        for client in clients:
            await client.head()
            assert await client.event() == (None, [0])
        async with streaming(service, "positions") as refused:
            assert refused.status == 503
            assert refused.headers["content-type"] == "application/json"
            assert int(refused.headers["retry-after"]) >= 1
            assert "50" in (await refused.json())["error"]
        async with streaming(service, "trades") as other:
            assert other.status == 200
        service.broadcasters.states["positions"].send(StateMessage("positions", b"[1]"))
        for client in clients:
            assert await client.event() == (None, [1])
        clients[0].vanish(reset=True)
        await until(lambda: len(service.broadcasters.states["positions"]) != 50)
        async with streaming(service, "positions") as again:
            assert await again.event() == (None, [0])
        for client in clients[1:]:
            client.vanish(reset=False)
        await service.emptied()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_client_that_vanishes_is_removed_at_once(name: str, reset: bool) -> None:
    async with serving(ping_s=3600) as service, streaming(service, name) as client:
        await client.event()
        assert len(service.broadcasters.all[name]) == 1
        client.vanish(reset=reset)
        await service.emptied()


async def test_a_client_that_vanishes_before_the_first_state_is_removed() -> None:
    async with serving() as service:
        gate = service.sources["trades"].gate
        gate.clear()
        client = await Client.get(service, "/api/events/trades")
        await until(lambda: len(service.broadcasters.states["trades"]))
        client.vanish(reset=True)
        await service.emptied()
        gate.set()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such bound")
async def test_the_kernel_gives_up_on_a_client_that_vanished_silently() -> None:
    async with serving() as service, streaming(service, "positions") as client:
        await client.event()
        [handler] = service.connections
        assert handler.transport is not None
        sock = handler.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_a_half_closed_client_is_removed() -> None:
    async with serving() as service, streaming(service, "positions") as client:
        await client.event()
        client.writer.write_eof()
        await service.emptied()


class WatchedState(StateMessage):
    """A state to which a test may hold a weak reference."""


class WatchedEvents(EventsMessage):
    """Events to which a test may hold a weak reference."""


def kept_bytes(service: Service, sent: Iterable[Message]) -> int:
    """Bytes that the process holds for its readers: in transports, and in `sent` messages that still exist."""
    transports = [handler.transport for handler in service.connections]
    waiting = sum(len(message.text(numbered=False)) for message in sent)
    return waiting + sum(t.get_write_buffer_size() for t in transports if t is not None)


@pytest.mark.parametrize(("name", "kept_max"), [("positions", 120_000), ("workflow", 600_000)])
async def test_a_stalled_reader_is_disconnected_and_slows_no_one(name: str, kept_max: int) -> None:
    async with serving(write_s=0.2) as service:
        stalled = await Client.get(service, f"/api/events/{name}", buffer_bytes=4096)
        await stalled.head()
        async with streaming(service, name) as client:
            await client.event()
            broadcaster = service.broadcasters.all[name]
            assert len(broadcaster) == 2
            began = time.monotonic()
            number = 0
            sent = weakref.WeakSet[Message]()
            while len(broadcaster) == 2:
                assert time.monotonic() - began < PATIENCE_S
                assert kept_bytes(service, sent) < kept_max  # two messages of 50 kB, or twice the backlog and a message
                number += 1
                long = b"[%d, %b]" % (number, b",".join([b"123456789"] * 5000))
                if name == "positions":
                    message: Message = WatchedState(name, long)
                else:
                    message = WatchedEvents([NumberedEvent("workflow:step", long, "1")])
                sent.add(message)
                broadcaster.send(message)
                del message
                _, data = await client.event()
                assert data[0] == number
            assert not client.reader.at_eof()
            assert broadcaster.dropped == 1
            await until(lambda: len(service.connections) <= 1)
        stalled.writer.close()
        await service.emptied()


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH"])
async def test_streams_accept_only_get(method: str) -> None:
    async with serving() as service:
        client = await Client.get(service, "/api/events/positions", method=method)
        await client.head()
        assert (client.status, client.headers["allow"]) == (405, "GET")
        assert client.headers["content-type"] == "application/json"
        if method != "HEAD":
            assert await client.json() == {"error": "Method Not Allowed"}
        client.writer.close()


async def test_a_client_of_http_1_0_gets_plain_bytes_until_the_end() -> None:
    """Proxies such as nginx use it for their upstreams by default."""
    async with serving(ping_s=0.05) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"GET /api/events/positions HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"chunked" not in head
        assert await reader.readexactly(11 + len(PING)) == b"data: [0]\n\n" + PING
        service.events.publish(MarketChecked(at=START))
        assert b"data: [0]\n\n" in await reader.readuntil(b"data: [0]\n\n")
        await service.broadcasters.close()
        assert (await reader.read()).replace(PING, b"") == b""
        writer.close()


async def test_an_unknown_stream() -> None:
    async with serving() as service, streaming(service, "nothing") as client:
        assert client.status == 404
        assert await client.json() == {"error": f"There is no such stream; the streams are {', '.join(STREAMS)}"}


@pytest.mark.parametrize("messages", [1, 20])
async def test_shutdown_ends_all_streams_including_stalled_ones(messages: int) -> None:
    async with serving(watch_s=1) as service:
        clients = []
        for name in STREAMS:
            client = await Client.get(service, f"/api/events/{name}", buffer_bytes=4096)
            await client.head()
            await client.event()
            clients.append(client)
        stalled = await Client.get(service, "/api/events/positions", buffer_bytes=4096)
        await stalled.head()
        await stalled.event()
        for _ in range(messages):
            service.broadcasters.states["positions"].send(
                StateMessage("positions", b"[%b]" % b",".join([b"123456789"] * 500_000))
            )
            await asyncio.sleep(0.001)  # so that each is written, not only the newest
        began = time.monotonic()
        await service.runner.cleanup()
        assert time.monotonic() - began < 3
        assert not any(len(broadcaster) for broadcaster in service.broadcasters.all.values())
        for client in clients[1:]:
            with pytest.raises(EOFError):
                await client.event()
        for client in (*clients, stalled):
            client.writer.close()
