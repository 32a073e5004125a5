"""Durable orders per second over HTTP, compared with pgbench and a bare aiohttp handler on the same server.

    scripts/benchmark durable_orders

Concurrent market orders from 16 accounts, each of which waits for its answer before its next order, on the demo with
its embedded server (fsync on). Two references insert one row per transaction into the same server from as many clients:
pgbench, and a bare aiohttp handler with asyncpg, the minimum that any service on this basis does for a request. The
service, its server and the clients share the machine.
"""

import asyncio
import shutil
import statistics
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import orjson
import uvloop
from aiohttp import web
from benchmarks.figures import Figures, temporary_folder
from support.process import ServiceProcess

from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres

CLIENTS, WARM_UP_S, TURN_S, TURNS = 16, 2.0, 4, 3
PGBENCH_SHARE_MIN = 0.5
PATH = "/api/rpc/simulator.placeOrder"
CREATE_BENCH = "CREATE TABLE bench (client int, quantity numeric, price numeric, at timestamptz)"
PGBENCH_SCRIPT = "INSERT INTO bench (client, quantity, price, at) VALUES (:client_id, 0.01, 94000.1, now());\n"
INSERT_BENCH = "INSERT INTO bench (client, quantity, price, at) VALUES ($1, $2, $3, now())"
BARE_ANSWER = b'{"order":{"status":"filled"}}'.ljust(410)


class Client(asyncio.Protocol):
    """One account with its own HTTP code: a client library costs as much per order as the service."""

    def __init__(self, requests: tuple[bytes, bytes], until_s: float) -> None:
        self._requests = requests
        self._until_s = until_s
        self._received = b""
        self.answered = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._transport.write(self._requests[0])

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, complete, body = self._received.partition(b"\r\n\r\n")
        length = head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
        if not complete or len(body) < int(length):
            return
        if b'"status":"filled"' not in body and b'"status":"partial"' not in body:
            self._end(AssertionError(body))
            return
        self._received = b""
        self.answered += 1
        if time.monotonic() < self._until_s:
            self._transport.write(self._requests[self.answered % 2])
        else:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the service closed the connection"))

    def _end(self, error: Exception | None = None) -> None:
        self._transport.close()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def orders_per_second(url: str, seconds: float) -> float:
    """Return the acknowledged market orders per second: buys and sells of 16 accounts in turn."""
    address = urlsplit(url)
    started_s = time.monotonic()

    async def connect(number: int) -> Client:
        requests = (_request(address.netloc, number, "buy"), _request(address.netloc, number, "sell"))
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: Client(requests, started_s + seconds), str(address.hostname), address.port or 80
        )
        return client

    clients = [await connect(number) for number in range(CLIENTS)]
    async with asyncio.timeout(seconds + 30):
        await asyncio.gather(*(client.ended for client in clients))
    return sum(client.answered for client in clients) / (time.monotonic() - started_s)


def _request(host: str, number: int, side: str) -> bytes:
    body = orjson.dumps({"accountId": f"bench-{number}", "symbol": "BTC", "side": side, "quantity": 0.001})
    return f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def inserts_per_second(dsn: str, folder: Path, seconds: int) -> float:
    """Return the transactions per second of pgbench with as many clients and one insert each."""
    script = folder / "insert.sql"
    script.write_text(PGBENCH_SCRIPT)
    result = subprocess.run(
        ["pgbench", "-n", "-M", "prepared", "-c", str(CLIENTS), "-j", "1", "-T", str(seconds), "-f", str(script), dsn],
        check=True,
        capture_output=True,
        text=True,
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("tps"))
    return float(line.split()[2])


async def serve_bare(dsn: str) -> None:
    """Serve the bare handler until this process ends. Prints its address."""
    async with asyncpg.create_pool(dsn, min_size=CLIENTS, max_size=CLIENTS) as pool:

        async def place_order(request: web.Request) -> web.Response:
            order = orjson.loads(await request.read())
            async with pool.acquire() as conn:
                await conn.execute(INSERT_BENCH, 0, Decimal(str(order["quantity"])), Decimal("94000.1"))
            return web.Response(body=BARE_ANSWER, content_type="application/json")

        app = web.Application()
        app.router.add_post(PATH, place_order)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


async def measure(figures: Figures, folder: Path) -> None:
    if shutil.which("pgbench") is None:
        print("skipped: pgbench is not installed (Debian: postgresql-contrib)")
        return
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(folder, http, SIM_LATENCY_MS="0")
        try:
            await _measure_in_turns(figures, service, folder)
        finally:
            await service.stop()


async def _measure_in_turns(figures: Figures, service: ServiceProcess, folder: Path) -> None:
    """Measure the service and its references in turns, since the speed of a machine drifts."""
    async with EmbeddedPostgres(folder / EMBEDDED_FOLDER).attach() as server:
        dsn = server.dsn((await server.databases())[0])
        conn = await asyncpg.connect(dsn)
        await conn.execute(CREATE_BENCH)
        await conn.close()
        bare = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", __spec__.name, dsn, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert bare.stdout is not None
            bare_url = (await bare.stdout.readline()).decode().strip()
            await _first_cycle_ended(service)
            rates: dict[str, list[float]] = {"ours": [], "pgbench": [], "bare": []}
            for url in (service.url, bare_url):
                await orders_per_second(url, WARM_UP_S)
            for _ in range(TURNS):
                rates["ours"].append(await orders_per_second(service.url, TURN_S))
                rates["pgbench"].append(await asyncio.to_thread(inserts_per_second, dsn, folder, TURN_S))
                rates["bare"].append(await orders_per_second(bare_url, TURN_S))
        finally:
            bare.kill()
            await bare.wait()
    ours, pgbench, least = (statistics.median(each) for each in rates.values())
    figures.show("durable orders", ours, "/s", reference=("pgbench", pgbench), at_least=PGBENCH_SHARE_MIN * pgbench)
    figures.show("durable orders", ours, "/s", reference=("aiohttp, asyncpg and one insert", least))


async def _first_cycle_ended(service: ServiceProcess) -> None:
    """Wait for the demo's agents, whose first cycle computes weeks of the synthetic market."""
    async with asyncio.timeout(60):
        while (await service.get("/health/schedulers"))[1]["modelsRunning"]:
            await asyncio.sleep(0.5)


def main() -> int:
    figures = Figures()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if len(sys.argv) > 1:
            runner.run(serve_bare(sys.argv[1]))
        else:
            with temporary_folder() as folder:
                runner.run(measure(figures, folder))
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
