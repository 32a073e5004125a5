"""Servers of the stream benchmark: the service's event streams, and a minimal server in their place.

The reference is a plain asyncio protocol without an HTTP framework, loading or queues, which writes the same bytes to
its connections in one loop.
"""

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from typing import Final, cast

from benchmarks.stream_readers import STREAMS, Readers
from support.served import make_stream_app
from support.sse import workflow_step

from trader.api.connections import WAITING_MAX, ConnectionLimits, HttpServer, bind
from trader.api.stream_messages import frame
from trader.api.streams import HEADERS, Broadcasters, Timing
from trader.core.clock import SystemClock
from trader.core.events import ConversationsChanged, EventBus, MarketChecked
from trader.exchange.events import TradesChanged

STATE_BYTES: Final = 8_000


def state(sent_ns: int) -> bytes:
    """Return a state of the size of a dashboard's, marked with the time of its publication."""
    return b'[{"sent":%d,"rest":"%b"}]' % (sent_ns, b"x" * STATE_BYTES)


class Service:
    """The real streams on real connections.

    Loading a state returns prepared bytes, so only the streams are measured.
    """

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._sent_ns = 0
        self.events = EventBus()
        self.broadcasters = Broadcasters(
            dict.fromkeys((*STREAMS[:4], "candles"), self._load), self.events, SystemClock()
        )

    async def _load(self) -> bytes:
        return state(self._sent_ns)

    async def start(self) -> int:
        """Listen. Return the port."""
        self.app = make_stream_app(self.broadcasters, self._timing)
        self._server = HttpServer(self.app, ConnectionLimits())
        sockets = bind("127.0.0.1", 0)
        await self._server.start(sockets)
        return int(sockets[0].getsockname()[1])

    def publish(self) -> int:
        """Publish an event to every stream. Return the time that marks it, in nanoseconds."""
        self._sent_ns = time.time_ns()
        now = datetime.now(UTC)
        self.events.publish(MarketChecked(at=now))
        self.events.publish(TradesChanged(at=now, account_ids=()))
        self.events.publish(ConversationsChanged(at=now, model_id="apex"))
        self.events.publish(workflow_step(now, 1, sent=self._sent_ns))
        return self._sent_ns

    def connected(self) -> int:
        return sum(map(len, self.broadcasters.all.values()))

    def present(self) -> int:
        """Return the number of subscribers and connections."""
        return self.connected() + len(self._server)

    async def stop(self) -> None:
        await self._server.stop()


class BareProtocol(asyncio.Protocol):
    def __init__(self, connected: "dict[BareProtocol, None]") -> None:
        self._connected = connected
        self.is_behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        self.transport.write(f"HTTP/1.1 200 OK\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        self.is_workflow = b"workflow" in data
        self._connected[self] = None

    def pause_writing(self) -> None:
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._connected.pop(self, None)


class Bare:
    """The reference server."""

    def __init__(self) -> None:
        self._connected: dict[BareProtocol, None] = {}

    async def start(self) -> int:
        loop = asyncio.get_running_loop()
        make = partial(BareProtocol, self._connected)
        self._server = await loop.create_server(make, "127.0.0.1", 0, backlog=WAITING_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    def publish(self) -> int:
        sent_ns = time.time_ns()
        large, small = frame(state(sent_ns)), frame(state(sent_ns)[:80] + b'"}]', "workflow:step")
        chunks = {False: b"%x\r\n%b\r\n" % (len(large), large), True: b"%x\r\n%b\r\n" % (len(small), small)}
        for protocol in self._connected:
            if not protocol.is_behind:
                protocol.transport.write(chunks[protocol.is_workflow])
        return sent_ns

    def connected(self) -> int:
        return len(self._connected)

    present = connected

    async def stop(self) -> None:
        for protocol in list(self._connected):
            protocol.transport.abort()
        self._server.close()


async def followed(server: Service | Bare, port: int, subscribers: int, ping_s: float) -> Readers:
    """Start `subscribers` well-behaved readers of every stream, and wait until all have their first state."""
    readers = Readers(port, subscribers, ping_s)
    await readers.start()
    async with asyncio.timeout(30):
        while server.connected() < subscribers * len(STREAMS):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    return readers
