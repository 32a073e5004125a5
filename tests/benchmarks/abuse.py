"""Delays of a normal caller next to hostile ones, compared with the same caller on a bare application.

  scripts/benchmark abuse [--seconds 10]    of each abuse

The service runs on the first core, together with a plain `web.Application` that is not attacked: the normal caller's
delay there is the cost of this machine. The hostile callers (a separate process, from another address) and the normal
one share the last core. Every ten milliseconds the normal caller requests variants.getVariants from both in turn, on
persistent connections. Each hostile connection sends its next request shortly after the answer to the previous one.
Exit code 1: the longest delay at the service exceeds the one at the bare application by more than 50 ms.
"""

import argparse
import asyncio
import gzip
import itertools
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import orjson
from aiohttp import ClientSession, web
from benchmarks.figures import Figures, temporary_folder
from support.process import serving

COST_MS: Final = 50.0
EVERY_S: Final = 0.01
HOSTILE: Final = "127.0.0.2"
TOKEN: Final = "the-token-of-the-operator-of-this-benchmark"
NUMBERS: Final = itertools.count()


def post(path: str, body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    """Return a request whose connection ends with its answer."""
    lines = [b"POST /api/rpc/%b HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Type: application/json"]
    lines += [b"Connection: close", b"Content-Length: %d" % (len(body) if length is None else length), *headers]
    return b"\r\n".join([*lines, b"", body])


async def ask(port: int, *parts: bytes, pause_s: float = 0.0) -> None:
    """Send the parts with a pause after each, and read the answer to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(HOSTILE, 0))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


def symbols(count: int) -> bytes:
    return orjson.dumps({"symbols": [f"S{number}" for number in range(count)]})


async def invent_account(port: int) -> None:
    order = {"accountId": f"invented-{next(NUMBERS)}", "symbol": "BTC", "side": "buy", "quantity": 1e6}
    await ask(port, post("simulator.placeOrder", orjson.dumps(order), b"Authorization: Bearer " + TOKEN.encode()))


async def leave_a_stream_unread(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(HOSTILE, 0), limit=1)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        await asyncio.sleep(60)
    finally:
        writer.close()


class Abuse(NamedTuple):
    """An action that `connections` hostile callers repeat, with a pause in between."""

    connections: int
    act: Callable[[int], Awaitable[None]]
    rest_s: float = 0.1


def sending(*parts: bytes, pause_s: float = 0.0) -> Callable[[int], Awaitable[None]]:
    return lambda port: ask(port, *parts, pause_s=pause_s)


PRICES: Final = "trading.getCryptoPrices"
ABUSES: Final = {
    "nobody": Abuse(0, sending()),
    "250,000 symbols": Abuse(20, sending(post(PRICES, symbols(250_000)))),
    "lists that fill a body": Abuse(20, sending(post(PRICES, symbols(9_000)))),
    "60,000 open brackets": Abuse(20, sending(post(PRICES, b'{"symbols":' + b"[" * 60_000))),
    "500 unknown fields": Abuse(20, sending(post(PRICES, orjson.dumps({f"field{n}": n for n in range(500)})))),
    "unfinished bodies": Abuse(400, sending(post(PRICES, b" " * 65_000, length=65_536)), rest_s=1.0),
    "packed bodies": Abuse(20, sending(post(PRICES, gzip.compress(b" " * 60_000_000), b"Content-Encoding: gzip"))),
    "heads byte by byte": Abuse(400, sending(*([b"G"] * 30), pause_s=0.5)),
    "invented accounts": Abuse(20, invent_account),
    "streams that nobody reads": Abuse(50, leave_a_stream_unread),
    "wrong tokens": Abuse(20, sending(post("models.getModels", b"{}", b"Authorization: Bearer wrong"))),
    "bytes that are not text": Abuse(20, sending(b"GET /\x1b]0;\xff HTTP/1.1\r\nHost: a\r\nExpect: \xff\r\n\r\n")),
    "origins that are not text": Abuse(20, sending(post(PRICES, b"{}", b"Origin: http://\xff"))),
    "two lengths": Abuse(20, sending(post(PRICES, b"{}", b"Transfer-Encoding: chunked"))),
    "statistics of every model": Abuse(20, sending(post("analytics.getModelStats", b'{"mode":"advanced"}'))),
}


async def repeat(abuse: Abuse, port: int) -> None:
    while True:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(20):
                await abuse.act(port)
        await asyncio.sleep(abuse.rest_s)


async def attack(name: str, port: int) -> None:
    """Abuse the service until standard input ends. Runs as a separate process."""
    abuse = ABUSES[name]
    tasks = [asyncio.create_task(repeat(abuse, port)) for _ in range(abuse.connections)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise RuntimeError(f"a hostile caller of {name!r} ended early") from outcome


async def serve_bare(body: bytes) -> None:
    """Serve these bytes on the only route of a plain application until standard input ends; print its port."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Process]:
    """Run a part of this benchmark as a separate process, which ends with its standard input."""
    command = [sys.executable, "-m", "benchmarks.abuse", *arguments]
    running = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield running
    finally:
        assert running.stdin is not None
        running.stdin.close()
        await running.wait()
    assert running.returncode == 0, arguments


async def waits_ms(http: ClientSession, urls: Sequence[str], seconds: float) -> list[list[float]]:
    """Request all addresses in turn. Return the duration of each answer, by address."""
    waits: list[list[float]] = [[] for _ in urls]
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        for url, taken in zip(urls, waits, strict=True):
            began_s = time.perf_counter()
            async with http.post(url, data=b"{}") as response:
                await response.read()
                assert response.status == 200, (url, response.status)
            taken.append((time.perf_counter() - began_s) * 1000)
        await asyncio.sleep(EVERY_S)
    return [sorted(taken) for taken in waits]


async def measure(folder: Path, seconds: float) -> Figures:
    figures, cores = Figures(), sorted(os.sched_getaffinity(0))
    settings = {"API_TOKEN": TOKEN, "SIM_LATENCY_MS": "0"}
    async with serving(folder, **settings) as service, ClientSession() as http:
        os.sched_setaffinity(service.process.pid, cores[:1])
        os.sched_setaffinity(0, cores[-1:])
        url = f"{service.url}/api/rpc/variants.getVariants"
        async with http.post(url, data=b"{}") as response:
            body = await response.read()
        async with process("--bare", body.decode()) as plain:
            assert plain.stdout is not None
            reference = f"http://127.0.0.1:{int(await plain.stdout.readline())}/"
            os.sched_setaffinity(plain.pid, cores[:1])
            for name in ABUSES:
                async with process("--attack", name, service.url.rpartition(":")[2]):
                    await asyncio.sleep(2)  # until it has begun
                    ours, others = await waits_ms(http, (url, reference), seconds)
                for what, place in (("p99", len(ours) * 99 // 100), ("longest", -1)):
                    goal = others[-1] + COST_MS if what == "longest" else None
                    figures.show(f"{name}: {what}", ours[place], "ms", reference=("bare", others[place]), at_most=goal)
        assert service.traceback() == "", service.traceback()
    return figures


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["--attack", name, port]:
            asyncio.run(attack(name, int(port)))
            return 0
        case ["--bare", body]:
            asyncio.run(serve_bare(body.encode()))
            return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each abuse; default: 10")
    options = parser.parse_args(arguments)
    with temporary_folder() as folder:
        return asyncio.run(measure(folder, options.seconds)).exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
