"""Fan-out of the event streams: from the publication of an event to the arrival at the last of 250 sockets.

    python -m benchmarks.streams [rounds]

The service's five streams serve 50 subscribers each over real sockets; a second process reads them. A frame has arrived
when the kernel has put it into the subscriber's socket, which the kernel itself notes (SO_TIMESTAMPNS, Linux): how fast
one process then reads 250 sockets says nothing about the service. The server has the first core, the readers another.
Each round publishes events that concern every stream at once, the worst moment there is. The reference, measured in
turns with it in the same run, is the least that could be done: a bare asyncio protocol without HTTP framework, loading
or queues, that writes the same bytes to its 250 connections in one loop. Both are read by the same process, so the
difference is the cost of the service. Also told: the growth of the server's memory over the run.
"""

import asyncio
import json
import os
import resource
import selectors
import socket
import statistics
import struct
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from trader.api import streams
from trader.api.broadcast import frame
from trader.api.streams import HEADERS, Hubs
from trader.clock import SystemClock
from trader.services.events import ConversationsChanged, EventBus, MarketChecked, TradesChanged

STREAMS = ("positions", "trades", "conversations", "portfolio", "workflow")
SUBSCRIBERS = 50
STATE_BYTES = 8_000
ROUND_S = 0.15
P99_MAX_MS = 20.0
MARK = b'"sent":'
CORES = os.sched_getaffinity(0)

SO_TIMESTAMPNS = 35
"""Linux: every message is given with the time at which it arrived (CLOCK_REALTIME); Python does not name it."""


def state(sent_ns: int) -> bytes:
    """A state of the size of a dashboard's, marked with when it was published."""
    return b'[{"sent":%020d,"rest":"%b"}]' % (sent_ns, b"x" * STATE_BYTES)


class Service:
    """The real streams; loading gives prepared bytes, so what is measured is theirs."""

    def __init__(self) -> None:
        self.sent_ns = 0
        self.events = EventBus()
        self.hubs = Hubs(dict.fromkeys(STREAMS[:4], self.load), self.events, SystemClock())

    async def load(self) -> bytes:
        return state(self.sent_ns)

    async def start(self) -> int:
        app = web.Application()
        streams.setup(app, self.hubs)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        await self.hubs.start()
        return int(self.runner.addresses[0][1])

    def publish(self) -> None:
        self.sent_ns = time.time_ns()
        now = datetime.now(UTC)
        self.events.publish(MarketChecked(at=now))
        self.events.publish(TradesChanged(at=now, account_ids=()))
        self.events.publish(ConversationsChanged(at=now, model_id="apex"))
        self.hubs.workflow.send(frame(state(self.sent_ns)[:60] + b'"}]', "workflow:step"))

    def connected(self) -> int:
        return sum(map(len, self.hubs.all.values()))

    async def stop(self) -> None:
        await self.runner.cleanup()


class BareProtocol(asyncio.Protocol):
    def __init__(self, transports: list[tuple[asyncio.Transport, bool]]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        self._transport.write(f"HTTP/1.1 200 OK\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        self._transports.append((self._transport, b"workflow" in data))


class Bare:
    """The reference."""

    def __init__(self) -> None:
        self.transports: list[tuple[asyncio.Transport, bool]] = []

    async def start(self) -> int:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: BareProtocol(self.transports), "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    def publish(self) -> None:
        sent_ns = time.time_ns()
        large, small = frame(state(sent_ns)), frame(state(sent_ns)[:60] + b'"}]', "workflow:step")
        chunks = {False: b"%x\r\n%b\r\n" % (len(large), large), True: b"%x\r\n%b\r\n" % (len(small), small)}
        for transport, is_workflow in self.transports:
            transport.write(chunks[is_workflow])

    def connected(self) -> int:
        return len(self.transports)

    async def stop(self) -> None:
        for transport, _ in self.transports:
            transport.close()
        self.server.close()


class Follower:
    """One subscriber of the reading process: notes when each marked frame had arrived whole in its socket."""

    def __init__(self, name: str, port: int, arrivals: dict[int, list[int]]) -> None:
        self._arrivals = arrivals
        self._rest = b""
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.socket.sendall(f"GET /api/events/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def receive(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        data, ancillary, _, _ = self.socket.recvmsg(2**18, 64)
        if not data:
            return False
        for _, kind, content in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", content)
                self._note(data, seconds * 10**9 + nanoseconds)
        return True

    def _note(self, data: bytes, at_ns: int) -> None:
        self._rest += data
        while (end := self._rest.find(b"\n\n")) >= 0:
            if (mark := self._rest.find(MARK, 0, end)) >= 0:
                self._arrivals[int(self._rest[mark + len(MARK) :][:20])].append(at_ns)
            self._rest = self._rest[end + 2 :]


def read(port: int, core: int) -> None:
    """The reading process: prints how long each round took to arrive, in milliseconds, first and last socket."""
    os.sched_setaffinity(0, {core})
    arrivals: dict[int, list[int]] = defaultdict(list)
    with selectors.DefaultSelector() as selector:
        for name in STREAMS:
            for _ in range(SUBSCRIBERS):
                follower = Follower(name, port, arrivals)
                selector.register(follower.socket, selectors.EVENT_READ, follower)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.receive():
                    selector.unregister(key.fileobj)
    rounds = [
        {"first": (min(times) - sent_ns) / 1e6, "last": (max(times) - sent_ns) / 1e6}
        for sent_ns, times in sorted(arrivals.items())
        if sent_ns and len(times) == SUBSCRIBERS * len(STREAMS)
    ]
    print(json.dumps(rounds))


async def measure(server: Service | Bare, rounds: int) -> list[dict[str, float]]:
    port = await server.start()
    command = (sys.executable, "-m", "benchmarks.streams", "--read", str(port), str(max(CORES)))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1], limit=2**24
    )
    async with asyncio.timeout(30):
        while server.connected() < SUBSCRIBERS * len(STREAMS):  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # all have their first state
    for _ in range(rounds):
        server.publish()
        await asyncio.sleep(ROUND_S)
    await server.stop()
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    result: list[dict[str, float]] = json.loads(out)
    return result


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def told(name: str, rounds: list[dict[str, float]]) -> float:
    last = sorted(entry["last"] for entry in rounds)
    p99 = last[int(len(last) * 0.99) - 1]
    first = statistics.median(entry["first"] for entry in rounds)
    print(
        f"{name:10} {len(rounds):5} rounds   first socket p50 {first:6.2f} ms   "
        f"last socket p50 {statistics.median(last):6.2f}   p99 {p99:6.2f}   max {last[-1]:6.2f}"
    )
    return p99


async def main(rounds: int) -> int:
    os.sched_setaffinity(0, {min(CORES)})
    results: dict[str, list[dict[str, float]]] = {"service": [], "reference": []}
    grown_from = 0
    for turn in range(4):
        for name, make in (("service", Service), ("reference", Bare)):
            results[name] += await measure(make(), rounds // 4)
        if turn == 0:
            grown_from = resident_bytes()
    print(f"{len(STREAMS)} streams × {SUBSCRIBERS} subscribers, states of {STATE_BYTES} bytes, all published at once")
    p99 = told("service", results["service"])
    reference_p99 = told("reference", results["reference"])
    print(f"service / reference, p99: {p99 / reference_p99:.2f}")
    print(f"memory growth after warm-up {(resident_bytes() - grown_from) / 1e6:.1f} MB")
    lost = rounds // 4 * 4 - len(results["service"])
    print(f"rounds whose state was replaced by the next before it was sent everywhere: {lost}")
    met = p99 < P99_MAX_MS
    print(f"target p99 < {P99_MAX_MS:g} ms: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)))
