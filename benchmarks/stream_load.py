"""The event streams under load and abuse: `python -m benchmarks.stream_load [minutes of simulated time]`.

Five streams with 50 places each. On every stream 40 callers read as fast as they can, and 10 misbehave: they stall,
read slowly, close their half of the connection, or vanish and come again. Meanwhile a market is followed in fast time:
every 0.15 s is a second of a service at work. Exit code 1 when one of these does not hold:

- an update reaches the last well-behaved socket within 20 ms at p99 (only told when the machine is said to be shared)
- pings arrive within 1 s of their time
- memory grows by less than 5 MB after warm-up
- when all callers have left, nothing is left of them
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import web

from benchmarks.streams import MARK, STREAMS, Service, resident_bytes
from trader.api import streams
from trader.api.streams import Timing

GOOD: Final = 40
ROUND_S: Final = 0.15
PING_S: Final = 3.0
P99_MAX_MS: Final = 20.0
PING_LATE_MAX_S: Final = 1.0
GROWTH_MAX_BYTES: Final = 5_000_000
LEAVE_WAIT_S: Final = 10.0


# -- the callers: their own process


class Follower(asyncio.Protocol):
    """Reads everything at once, and notes when updates and pings arrive."""

    def __init__(self, name: str, arrivals: dict[int, list[int]], late_s: list[float]) -> None:
        self._name = name
        self._arrivals = arrivals
        self._late_s = late_s
        self._rest = b""
        self._ping_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(asking(self._name))

    def data_received(self, data: bytes) -> None:
        at_ns = time.time_ns()
        self._rest += data
        while (end := self._rest.find(b"\n\n")) >= 0:
            message, self._rest = self._rest[:end], self._rest[end + 2 :]
            if b"event: ping" in message:
                self._note_ping()
            elif (mark := message.find(MARK)) >= 0 and (sent_ns := int(message[mark + len(MARK) :][:20])):
                self._arrivals[sent_ns].append(at_ns)

    def _note_ping(self) -> None:
        now_s = time.monotonic()
        if self._ping_s:
            self._late_s.append(abs(now_s - self._ping_s - PING_S))
        self._ping_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def asking(name: str) -> bytes:
    return f"GET /api/events/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def stall(port: int, name: str, _: random.Random) -> None:
    """Never reads."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(asking(name))
    try:
        await asyncio.sleep(4)
    finally:
        writer.transport.abort()


async def read_slowly(port: int, name: str, _: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(asking(name))
    try:
        while await reader.read(512):  # noqa: ASYNC110 - to be slow is what is wanted
            await asyncio.sleep(0.05)
    finally:
        writer.transport.abort()


async def close_half(port: int, name: str, _: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(asking(name))
    try:
        await reader.read(512)
        writer.write_eof()
        while await reader.read(65536):
            pass
    finally:
        writer.transport.abort()


async def vanish(port: int, name: str, chance: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(asking(name))
    try:
        async with asyncio.timeout(chance.random()):
            while await reader.read(65536):
                pass
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()


Abuse = Callable[[int, str, random.Random], Coroutine[Any, Any, None]]
ABUSES: Final[tuple[Abuse, ...]] = (stall, stall, read_slowly, read_slowly, close_half, close_half, *[vanish] * 4)


async def again_and_again(abuse: Abuse, port: int, name: str, seed: int) -> None:
    chance = random.Random(f"{abuse.__name__}:{name}:{seed}")
    while True:
        with suppress(ConnectionError):
            await abuse(port, name, chance)
        await asyncio.sleep(0.05)


async def call(port: int) -> None:
    """The calling process: until standard input ends, then everybody leaves. Prints what arrived when."""
    arrivals: dict[int, list[int]] = defaultdict(list)
    late_s: list[float] = []
    loop = asyncio.get_running_loop()
    followers = [Follower(name, arrivals, late_s) for name in STREAMS for _ in range(GOOD)]
    transports = []
    for follower in followers:
        transport, _ = await loop.create_connection(lambda follower=follower: follower, "127.0.0.1", port)  # type: ignore[misc]
        transports.append(transport)
    abusers = [
        asyncio.create_task(again_and_again(abuse, port, name, seed))
        for name in STREAMS
        for seed, abuse in enumerate(ABUSES)
    ]
    await asyncio.to_thread(sys.stdin.read)
    lost = sum(follower.ended.done() for follower in followers)
    for task in abusers:
        task.cancel()
    await asyncio.wait(abusers)
    for transport in transports:
        transport.abort()
    last_ms = [(max(times) - sent_ns) / 1e6 for sent_ns, times in sorted(arrivals.items())]
    print(json.dumps({"last_ms": last_ms, "late_s": late_s, "lost": lost}))


# -- the server


class LoadedService(Service):
    """The service of the fan-out benchmark with pings that a short run sees."""

    async def start(self) -> int:
        app = web.Application()
        streams.setup(app, self.hubs, Timing(ping_s=PING_S, write_s=2.0))
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        await self.hubs.start()
        return int(self.runner.addresses[0][1])

    @property
    def connections(self) -> int:
        assert self.runner.server is not None
        return len(self.runner.server.connections)


async def measure(rounds: int) -> dict[str, Any]:
    service = LoadedService()
    port = await service.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.stream_load", "--call", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        limit=2**26,
    )
    loop = asyncio.get_running_loop()
    while service.connected() < GOOD * len(STREAMS):  # noqa: ASYNC110 - another process is watched
        await asyncio.sleep(0.05)
    warm_rounds = max(20, rounds // 6)
    grown_from = peak = 0
    due_s = loop.time()
    for number in range(warm_rounds + rounds):
        if number == warm_rounds:
            grown_from = resident_bytes()
        service.publish()
        due_s += ROUND_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        peak = max(peak, service.connected())
    grown = resident_bytes() - grown_from
    async with asyncio.timeout(60):
        out, _ = await process.communicate(b"")
    left_s = loop.time()
    while (service.connected() or service.connections) and loop.time() - left_s < LEAVE_WAIT_S:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    result: dict[str, Any] = json.loads(out)
    result |= {"grown": grown, "peak": peak, "left": service.connected() + service.connections}
    await service.stop()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="The event streams under load and abuse.")
    parser.add_argument("minutes", nargs="?", type=float, default=30, help="of simulated time; nearly 7 times as fast")
    parser.add_argument(
        "--shared", action="store_true", help="others use this machine: the time of updates is only told"
    )
    parser.add_argument("--call", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        asyncio.run(call(options.call))
        return 0
    result = asyncio.run(measure(round(options.minutes * 60)))
    last_ms = sorted(result["last_ms"])
    p99_ms = last_ms[int(len(last_ms) * 0.99)]
    late_s = max(result["late_s"], default=float("inf"))
    print(f"{len(last_ms)} updates, at most {result['peak']} subscribers, {result['lost']} well-behaved ones lost")
    print(f"last socket p50 {last_ms[len(last_ms) // 2]:.1f} ms   p99 {p99_ms:.1f} ms   max {last_ms[-1]:.1f} ms")
    print(f"{len(result['late_s'])} pings, at most {late_s:.2f} s beside their time")
    print(
        f"memory growth after warm-up {result['grown'] / 1e6:.1f} MB; {result['left']} subscribers and connections left"
    )
    met = {
        "updates in time": options.shared or p99_ms < P99_MAX_MS,
        "pings in time": late_s < PING_LATE_MAX_S,
        "memory flat": result["grown"] < GROWTH_MAX_BYTES,
        "nobody lost": not result["lost"],
        "nothing left": not result["left"],
    }
    print("; ".join(f"{name}: {'met' if holds else 'MISSED'}" for name, holds in met.items()))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
