"""Requests per second of the service beside its references: `python -m benchmarks.wire [seconds] [dsn of a season]`.

1. variants.getVariants beside a bare aiohttp handler that returns the same constant bytes.
2. The five procedures that a dashboard polls, on 50 models with a year of trades, beside the same procedures reading
   PostgreSQL on every request.

The server has the first core and the load another; turns alternate, so that what else the machine does meets both.
The ratio is that of requests per second of an undisturbed core: a request's share of the time that the server
computed, and what the service does by itself (a market, schedules) taken off the core first.
Exit code 1 when a target is missed.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from aiohttp import web
from benchmarks.year import write_season

from trader.embedded.server import EmbeddedPostgres

ROOT: Final = Path(__file__).parents[1]
CONNECTIONS: Final = 32
TURNS: Final = 3
OWN_S: Final = 60.0
"""Every schedule of the service is due once in it."""
STATIC: Final = [("variants.getVariants", "{}")]
DASHBOARD: Final = [
    ("trading.getPositions", "{}"),
    ("trading.getTrades", "{}"),
    ("trading.getCryptoPrices", "{}"),
    ("variants.getVariantHistory", "{}"),
    ("analytics.getLeaderboard", "{}"),
]
STATIC_TARGET: Final = 0.9
DASHBOARD_TARGET: Final = 3.0


# -- the load: its own process


class Caller(asyncio.Protocol):
    """One connection: sends the next request when the answer to the last is whole."""

    def __init__(self, requests: Sequence[bytes], turn: int, latencies: list[float]) -> None:
        self._requests = requests
        self._turn = turn
        self._latencies = latencies
        self._rest = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._requests[self._turn % len(self._requests)])
        self._turn += 1

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            data = self._rest + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return
            self._rest = b""
            assert data.startswith(b"HTTP/1.1 200"), data[:300]
            lowered = data[:end].lower()
            place = lowered.index(b"content-length: ") + 16
            size = int(lowered[place : lowered.find(b"\r", place) if b"\r" in lowered[place:] else end])
            self._missing = size - (len(data) - end - 4)
        if not self._missing:
            self._latencies.append(time.perf_counter() - self._sent_s)
            self._send()


async def load(port: int, seconds: float, calls: Sequence[Sequence[str]]) -> None:
    requests = [
        f"POST /api/rpc/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        for name, body in calls
    ]
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    for turn in range(CONNECTIONS):
        await loop.create_connection(lambda turn=turn: Caller(requests, turn, latencies), "127.0.0.1", port)  # type: ignore[misc]
    started_s = time.perf_counter()
    await asyncio.sleep(seconds)
    spent_s = time.perf_counter() - started_s
    latencies.sort()
    print(
        json.dumps(
            {
                "count": len(latencies),
                "rate": len(latencies) / spent_s,
                "p50": statistics.median(latencies) * 1000,
                "p99": latencies[int(len(latencies) * 0.99)] * 1000,
            }
        )
    )


# -- the servers: each its own process


class Running(NamedTuple):
    """A server, and how much of its core it takes by itself."""

    pid: int
    port: int
    own: float = 0.0


async def listen(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def serve_bare(port: int, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/api/rpc/variants.getVariants", answer)
    await listen(app, port)


async def serve_database(port: int, dsn: str) -> None:
    """The procedures of the service without anything kept between requests."""
    from benchmarks.uncached import make_app  # noqa: PLC0415 - the load needs none of it

    async with AsyncExitStack() as stack:
        await listen(await make_app(dsn, stack), port)


@contextmanager
def running(command: Sequence[str], port: int, folder: str, **environment: str) -> Iterator[int]:
    """A server on the first core, from its first answer on. Gives its process id."""
    with Path(folder, "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),  # noqa: PLW1509 - there are no threads yet
        )
        try:
            for _ in range(600):
                with_answer = subprocess.run(
                    ["curl", "-s", "-o", "/dev/null", f"http://127.0.0.1:{port}/"], check=False
                )
                if with_answer.returncode == 0:
                    break
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """The time that a process has computed: what others do on its core is not in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_share(pid: int) -> float:
    """How much of its core a server takes without being asked for anything."""
    began_s = cpu_seconds(pid)
    time.sleep(OWN_S)
    return (cpu_seconds(pid) - began_s) / OWN_S


def measure(server: Running, seconds: float, calls: Sequence[Sequence[str]]) -> dict[str, float]:
    last_core = max(os.sched_getaffinity(0))
    began_s, started_s = cpu_seconds(server.pid), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wire", "--load", str(server.port), str(seconds), json.dumps(calls)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {last_core}),
    )
    result: dict[str, float] = json.loads(done.stdout)
    spent_s = cpu_seconds(server.pid) - began_s - server.own * (time.monotonic() - started_s)
    result["cpu_rate"] = (1 - server.own) * result["count"] / spent_s
    return result


def warm(port: int, calls: Sequence[Sequence[str]]) -> None:
    """Call each procedure until it answers: a service that has just started reads a season first."""
    for name, body in calls:
        address = f"http://127.0.0.1:{port}/api/rpc/{name}"
        command = ["curl", "-sf", "-o", "/dev/null", "--retry", "20", "-m", "60", "-d", body, address]
        subprocess.run(command, check=True)


def compare(
    name: str, seconds: float, calls: Sequence[Sequence[str]], servers: dict[str, Running], target: float
) -> bool:
    results: dict[str, list[dict[str, float]]] = {who: [] for who in servers}
    for server in servers.values():
        warm(server.port, calls)
    for _ in range(TURNS):
        for who, server in servers.items():
            results[who].append(measure(server, seconds, calls))
    print(name)
    rates = {}
    for who, turns in results.items():
        rates[who] = statistics.median(turn["cpu_rate"] for turn in turns)
        rate, p50, p99 = (statistics.median(turn[key] for turn in turns) for key in ("rate", "p50", "p99"))
        print(
            f"  {who:10} {rates[who]:8.0f} requests per second of the core   "
            f"{rate:8.0f} requests/s   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms",
            flush=True,
        )
    service, reference = rates.values()
    met = service >= target * reference
    print(f"  ratio {service / reference:.2f}, target {target:g}: {'met' if met else 'MISSED'}")
    return met


def static_body() -> str:
    from trader.api.procedures.variants import get_variants  # noqa: PLC0415 - only here
    from trader.api.schemas.common import ENCODER, Empty  # noqa: PLC0415 - only here

    untyped: Any = None
    return ENCODER.encode(asyncio.run(get_variants(untyped, Empty()))).decode()


def compare_all(seconds: float, dsn: str, folder: str) -> bool:
    ports = {"service": 18600, "bare": 18601, "database": 18602}
    settings = {
        "DATABASE_URL": dsn,
        "MARKET_SOURCE": "synthetic",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "PORT": str(ports["service"]),
        "LOG_FORMAT": "json",
    }
    bare = ["benchmarks.wire", "--bare", str(ports["bare"]), static_body()]
    database = ["benchmarks.wire", "--database", str(ports["database"]), dsn]
    with running(["trader"], ports["service"], folder, **settings) as pid:
        warm(ports["service"], DASHBOARD)
        service = Running(pid, ports["service"], own_share(pid))
        print(f"the service takes {service.own:.1%} of its core by itself", flush=True)
        with running(bare, ports["bare"], folder) as other:
            chosen = {"service": service, "bare": Running(other, ports["bare"])}
            first = compare("variants.getVariants", seconds, STATIC, chosen, STATIC_TARGET)
        with running(database, ports["database"], folder) as other:
            chosen = {"service": service, "database": Running(other, ports["database"])}
            second = compare("five procedures of a dashboard", seconds, DASHBOARD, chosen, DASHBOARD_TARGET)
    return first and second


async def with_season(seconds: float, folder: str) -> bool:
    place = Path(folder, "postgres")
    async with EmbeddedPostgres(place, durable=False) as server:
        dsn = await server.ensure_database("season")
        await write_season(dsn)
        return await asyncio.to_thread(compare_all, seconds, dsn, folder)


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["--load", port, seconds, calls]:
            run(load(int(port), float(seconds), json.loads(calls)))
        case ["--bare", port, body]:
            run(serve_bare(int(port), body.encode()))
        case ["--database", port, dsn]:
            run(serve_database(int(port), dsn))
        case _:
            measured_s = float(arguments[0]) if arguments else 8.0
            with tempfile.TemporaryDirectory() as folder:
                Path(folder).chmod(0o755)
                if len(arguments) > 1:
                    return 0 if compare_all(measured_s, arguments[1], folder) else 1
                return 0 if asyncio.run(with_season(measured_s, folder)) else 1
    return 0


def run(coroutine: Any) -> None:
    """On the loop that the service takes too."""
    from trader.__main__ import loop_factory  # noqa: PLC0415 - only here

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(coroutine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
