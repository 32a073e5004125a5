"""Requests per second of the service over HTTP, each figure next to its reference from the same run.

  scripts/benchmark wire [--seconds 3]    on a season of 100 models and 9 days, which takes a minute to write
  scripts/benchmark wire --database-url URL    on an existing season

1. variants.getVariants compared with a bare aiohttp handler that returns the same bytes: at least half of its requests.
   Also compared with a handler that first reads its input, as every procedure must, to show the cost of that alone.
2. The equity history of all models, 19 MB on a season of a week or more, compared with a bare handler of the same
   bytes.
3. The five procedures that a dashboard polls, compared with the same service without its response cache: ten times as
   many.

The bare handler is the only route of a plain `web.Application`, run by `web.AppRunner` and `web.TCPSite` on uvloop
without an access log. It returns the bytes and omits everything else: reading and decoding the input, middlewares and
hooks, request ids, hosts and origins, limits of connections, latencies and the log.

The server runs on the first core and the load on another. The ratio compares requests per second of an undisturbed
core: they follow from the processor time per request, after subtracting the service's own work (a market, schedules).
Exit code 1: a floor is missed.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvloop
from aiohttp import web
from benchmarks.season import seeded

from trader.database.embedded.server import EmbeddedPostgres

ROOT: Final = Path(__file__).parents[1]
CONNECTIONS: Final = 32
TURNS: Final = 9
OWN_S: Final = 60.0
"""Every schedule of the service is due once in it."""
STATIC: Final = [("variants.getVariants", "{}")]
HISTORY: Final = [("trading.getPortfolioHistory", "{}")]
DASHBOARD: Final = [
    ("trading.getPositions", "{}"),
    ("trading.getTrades", "{}"),
    ("trading.getCryptoPrices", "{}"),
    ("variants.getVariantHistory", "{}"),
    ("analytics.getLeaderboard", "{}"),
]
STATIC_FLOOR: Final = 0.5
DASHBOARD_FLOOR: Final = 10.0


# -- the load: its own process


class Caller(asyncio.Protocol):
    """One connection: sends the next request once the previous answer is complete."""

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


async def load(port: int, seconds: float, calls: Sequence[Sequence[str]], connections: int) -> None:
    requests = [
        f"POST /api/rpc/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        for name, body in calls
    ]
    latencies: list[float] = []
    loop = asyncio.get_running_loop()

    def stay_awake() -> None:
        """Never let the loop sleep: the server would pay for waking it, and a slower server more often."""
        loop.call_soon(stay_awake)

    stay_awake()
    for turn in range(connections):
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
    """A server, and the share of its core that it uses without requests."""

    pid: int
    port: int
    own: float = 0.0


async def listen(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def serve_bare(port: int, path: str, file: str, *, reads: bool) -> None:
    """Serve the bytes of a file at the path of a procedure."""
    body = Path(file).read_bytes()

    async def answer(request: web.Request) -> web.Response:
        if reads:
            await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post(f"/api/rpc/{path}", answer)
    await listen(app, port)


def serve_uncached() -> int:
    """Run the service with a cache that stores nothing."""
    from trader import __main__  # noqa: PLC0415 - the load needs none of it
    from trader.api import response_cache, rpc  # noqa: PLC0415

    class Uncached(response_cache.ResponseCache):
        def find(self, key: object, token: object) -> None:
            pass

        async def make(self, key: object, token: object, answer: Any) -> Any:
            return await answer()

    untyped: Any = rpc
    untyped.ResponseCache = Uncached
    return __main__.main([])


@contextmanager
def running(command: Sequence[str], port: int, folder: str, **environment: str) -> Iterator[int]:
    """Run a server on the first core, and yield its process id after its first answer."""
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
    """Return the processor time of a process, which excludes other processes on its core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_share(pid: int) -> float:
    """Return the share of its core that a server uses without any requests."""
    began_s = cpu_seconds(pid)
    time.sleep(OWN_S)
    return (cpu_seconds(pid) - began_s) / OWN_S


def measure(server: Running, seconds: float, calls: Sequence[Sequence[str]], connections: int) -> dict[str, float]:
    last_core = max(os.sched_getaffinity(0))
    began_s, started_s = cpu_seconds(server.pid), time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.wire",
            "--load",
            str(server.port),
            str(seconds),
            json.dumps(calls),
            str(connections),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {last_core}),
    )
    result: dict[str, float] = json.loads(done.stdout)
    spent_s = cpu_seconds(server.pid) - began_s - server.own * (time.monotonic() - started_s)
    result["cpu_rate"] = (1 - server.own) * result["count"] / spent_s
    return result


def address_of(port: int, name: str) -> str:
    return f"http://127.0.0.1:{port}/api/rpc/{name}"


def show(name: str, turns: Sequence[dict[str, float]]) -> float:
    """Print the medians of the turns. Return the requests per second of the core."""
    core, rate, p50, p99 = (
        statistics.median(turn[key] for turn in turns) for key in ("cpu_rate", "rate", "p50", "p99")
    )
    print(
        f"  {name:14} {core:8.0f} requests per second of the core   {rate:8.0f} requests/s   p50 {p50:7.2f} ms   "
        f"p99 {p99:7.2f} ms",
        flush=True,
    )
    return core


def judge(ratio: float, floor: float | None) -> bool:
    met = floor is None or ratio >= floor
    print(f"  ratio {ratio:.3f}" + ("" if floor is None else f", floor {floor:g}: {'met' if met else 'MISSED'}"))
    return met


def compare_bare(
    seconds: float, calls: Sequence[Sequence[str]], service: Running, folder: str, connections: int, floor: float | None
) -> bool:
    """Compare a procedure with a bare handler of the same bytes, in turns."""
    ((name, body),) = calls
    file = str(Path(folder, name))
    subprocess.run(["curl", "-sf", "-o", file, "-d", body, address_of(service.port, name)], check=True)
    print(f"{name}, {Path(file).stat().st_size:,} bytes")
    with (
        running(["benchmarks.wire", "--bare", "18601", name, file], 18601, folder) as pid,
        running(["benchmarks.wire", "--bare-reading", "18602", name, file], 18602, folder) as reading_pid,
    ):
        servers = service, Running(pid, 18601), Running(reading_pid, 18602)
        turns = [[measure(each, seconds, calls, connections) for each in servers] for _ in range(TURNS)]
    for label, measured in zip(("service", "bare aiohttp", "  which reads"), zip(*turns, strict=True), strict=True):
        show(label, measured)
    # Compare two consecutive turns, since the speed of a shared machine changes over time.
    to_bare, to_reading = (
        statistics.median(ours["cpu_rate"] / others[place]["cpu_rate"] for ours, *others in turns) for place in (0, 1)
    )
    print(f"  ratio {to_reading:.3f} to the one that reads its input")
    return judge(to_bare, floor)


def compare_all(seconds: float, dsn: str, folder: str) -> bool:
    settings = {
        "DATABASE_URL": dsn,
        "MARKET_SOURCE": "synthetic",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "SNAPSHOT_RETENTION_DAYS": "365",
        "PORT": "18600",
        "LOG_FORMAT": "json",
    }

    @contextmanager
    def started(*command: str) -> Iterator[Running]:
        with running(command, 18600, folder, **settings) as pid:
            for name, body in (*STATIC, *HISTORY, *DASHBOARD):
                retry = ["--retry", "20", "-m", "60"]  # a newly started service catches up first
                subprocess.run(
                    ["curl", "-sf", "-o", "/dev/null", *retry, "-d", body, address_of(18600, name)], check=True
                )
            yield Running(pid, 18600, own_share(pid))

    with started("trader") as service:
        print(f"the service takes {service.own:.1%} of its core by itself", flush=True)
        met = [
            compare_bare(seconds, STATIC, service, folder, CONNECTIONS, STATIC_FLOOR),
            compare_bare(seconds, HISTORY, service, folder, 1, None),
        ]
        kept = [measure(service, seconds, DASHBOARD, CONNECTIONS) for _ in range(TURNS)]
    with started("benchmarks.wire", "--uncached") as service:
        called = [measure(service, seconds, DASHBOARD, CONNECTIONS) for _ in range(TURNS)]
    print("five procedures of a dashboard")
    met.append(judge(show("service", kept) / show("without cache", called), DASHBOARD_FLOOR))
    return all(met)


async def with_season(seconds: float, folder: str) -> bool:
    async with EmbeddedPostgres(Path(folder, "postgres"), durable=False) as server:
        return await asyncio.to_thread(compare_all, seconds, await seeded(server, quick=True), folder)


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["--load", port, seconds, calls, connections]:
            run(load(int(port), float(seconds), json.loads(calls), int(connections)))
        case ["--bare", port, path, file]:
            run(serve_bare(int(port), path, file, reads=False))
        case ["--bare-reading", port, path, file]:
            run(serve_bare(int(port), path, file, reads=True))
        case ["--uncached"]:
            return serve_uncached()
        case _:
            parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--seconds", type=float, default=3.0, help="of each turn; default: 3")
            parser.add_argument("--database-url", help="of a season that is there")
            options = parser.parse_args(arguments)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder).chmod(0o755)
                if options.database_url:
                    return 0 if compare_all(options.seconds, options.database_url, folder) else 1
                return 0 if asyncio.run(with_season(options.seconds, folder)) else 1
    return 0


def run(coroutine: Any) -> None:
    """Run on the same event loop as the service."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
