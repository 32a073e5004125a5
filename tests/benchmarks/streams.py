"""Fan-out of the event streams: from the publication of an event to the arrival at the last of 250 sockets.

    python -m benchmarks.streams [rounds]

The service's five streams serve 50 subscribers each over real sockets; a second process reads them, and the kernel says
when a frame arrived (`benchmarks.arrivals`). Each round publishes events that concern every stream at once, the worst
moment there is. The reference, measured in turns with it in the same run, is the least that could be done: a bare
asyncio protocol without HTTP framework, loading or queues, that writes the same bytes to its 250 connections in one
loop. Both are read by the same process, so the difference is the cost of the service. Also told: the growth of the
server's memory over the run.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

from aiohttp import web
from benchmarks.arrivals import STREAMS, Arrivals, Readers, pin_server, resident_bytes

from trader.__main__ import loop_factory
from trader.api import streams
from trader.api.broadcast import frame
from trader.api.connections import WAITING_MAX, ConnectionLimits, HttpServer, bind
from trader.api.requests import REQUESTS, RequestLog
from trader.api.streams import HEADERS, Hubs, Timing
from trader.clock import SystemClock
from trader.services.events import ConversationsChanged, EventBus, MarketChecked, TradesChanged, WorkflowProgress

SUBSCRIBERS: Final = 50
STATE_BYTES: Final = 8_000
ROUND_S: Final = 0.15
P99_MAX_MS: Final = 20.0


def state(sent_ns: int) -> bytes:
    """A state of the size of a dashboard's, marked with when it was published."""
    return b'[{"sent":%d,"rest":"%b"}]' % (sent_ns, b"x" * STATE_BYTES)


class Service:
    """The real streams on the real connections; loading gives prepared bytes, so what is measured is theirs."""

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._sent_ns = 0
        self.requests = RequestLog()
        self.events = EventBus()
        self.hubs = Hubs(dict.fromkeys(STREAMS[:4], self._load), self.events, SystemClock())

    async def _load(self) -> bytes:
        return state(self._sent_ns)

    async def start(self) -> int:
        """The port that it listens on."""
        app = web.Application()
        app[REQUESTS] = self.requests
        streams.setup(app, self.hubs, self._timing)
        self._server = HttpServer(app, ConnectionLimits())
        sockets = bind("127.0.0.1", 0)
        await self._server.start(sockets)
        await self.hubs.start()
        return int(sockets[0].getsockname()[1])

    def publish(self) -> int:
        """Something happened on every stream; the time that marks it."""
        self._sent_ns = time.time_ns()
        now = datetime.now(UTC)
        self.events.publish(MarketChecked(at=now))
        self.events.publish(TradesChanged(at=now, account_ids=()))
        self.events.publish(ConversationsChanged(at=now, model_id="apex"))
        self.events.publish(WorkflowProgress("workflow:step", now, {"sent": self._sent_ns, "rest": "x" * 30}))
        return self._sent_ns

    def connected(self) -> int:
        return sum(map(len, self.hubs.all.values()))

    def present(self) -> int:
        """What is there of callers: subscribers and connections."""
        return self.connected() + len(self._server)

    async def stop(self) -> None:
        await self._server.stop()


class BareProtocol(asyncio.Protocol):
    def __init__(self, connected: "dict[BareProtocol, None]") -> None:
        self._connected = connected
        self.is_behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by name

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
    """The reference."""

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
    """So many well-behaved subscribers of every stream, all of whom have their first state."""
    readers = Readers(port, subscribers, ping_s)
    await readers.start()
    async with asyncio.timeout(30):
        while server.connected() < subscribers * len(STREAMS):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    return readers


async def measure(server: Service | Bare, rounds: int) -> Arrivals:
    readers = await followed(server, await server.start(), SUBSCRIBERS, Timing().ping_s)
    marks_ns = []
    for _ in range(rounds):
        marks_ns.append(server.publish())
        await asyncio.sleep(ROUND_S)
    arrivals = await readers.finish(marks_ns)
    await server.stop()
    return arrivals


def run(main: Coroutine[Any, Any, int]) -> int:
    """On the loop and on the core of a service that is measured."""
    pin_server()
    gc.collect()
    gc.freeze()  # as the service does when it has started
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


async def main(rounds: int) -> int:
    service, reference = Arrivals(), Arrivals()
    grown_from = 0
    for turn in range(4):
        service.add(await measure(Service(), rounds // 4))
        reference.add(await measure(Bare(), rounds // 4))
        if turn == 0:
            grown_from = resident_bytes()
    print(f"{len(STREAMS)} streams × {SUBSCRIBERS} subscribers, states of {STATE_BYTES} bytes, all published at once")
    print(service.told("service"))
    print(reference.told("reference"))
    p99_ms = service.last_ms_at(0.99)
    print(f"service / reference, p99: {p99_ms / reference.last_ms_at(0.99):.2f}")
    print(f"memory growth after warm-up {(resident_bytes() - grown_from) / 1e6:.1f} MB")
    print(f"rounds whose state was replaced by the next before it was sent everywhere: {service.superseded}")
    met = p99_ms < P99_MAX_MS
    print(f"target p99 < {P99_MAX_MS:g} ms: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)))
