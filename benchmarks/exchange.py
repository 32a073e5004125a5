"""Speed of the paper exchange as a service, each figure beside its reference in the same run.

    scripts/benchmark exchange

Durable orders: market orders through HTTP from 16 accounts at once, beside pgbench with 16 clients that insert one row
per transaction on the same server (embedded, fsync on). Restart: 10,000 open positions rebuilt from their rows, beside
reading the same rows. Refresh: one update of every market for 1,000 accounts of 3 positions, with the longest time for
which the event loop was held, beside a plain loop over the same figures. The pure core is `exchange_core`.
"""

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson
from support.process import ServiceProcess
from support.scripted import START, ScriptedSource, make_settings, make_tick

from benchmarks import exchange_core
from trader.clock import ManualClock
from trader.domain.account import equity, maintenance
from trader.domain.market import MARKETS, Tick
from trader.domain.orders import ExitPlan, Order, OrderSide
from trader.services.events import EventBus
from trader.services.exchange import Exchange
from trader.services.market import MarketData
from trader.store.embedded import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.store.pool import Database, apply_schema

CLIENTS, SECONDS = 16, 8
POSITIONS, REFRESHED_ACCOUNTS, UPDATES = 10_000, 1_000, 50
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
SIZES = {"BTC": "0.001", "ETH": "0.01", "SOL": "0.5"}

PGBENCH_SCRIPT = "INSERT INTO bench (client, quantity, price, at) VALUES (:client_id, 0.01, 94000.1, now());\n"


async def orders_per_second(service: ServiceProcess, seconds: float) -> float:
    """Acknowledged market orders per second of 16 accounts, each waiting for its answer before the next order."""
    deadline_s = time.monotonic() + seconds
    count = 0

    async def client(number: int) -> None:
        """Speaks HTTP by itself: a client library costs as much per order as the service does."""
        nonlocal count
        address = urlsplit(service.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        requests = [_request(address.netloc, f"bench-{number}", side) for side in ("buy", "sell")]
        turn = 0
        while time.monotonic() < deadline_s:
            writer.write(requests[turn % 2])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            answer = await reader.readexactly(length)
            assert b'"status":"filled"' in answer or b'"status":"partial"' in answer, answer
            turn += 1
            count += 1
        writer.close()

    await asyncio.gather(*(client(n) for n in range(CLIENTS)))
    return count / seconds


def _request(host: str, account_id: str, side: str) -> bytes:
    body = orjson.dumps({"accountId": account_id, "symbol": "BTC", "side": side, "quantity": 0.001})
    head = f"POST /api/rpc/simulator.placeOrder HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _first_cycle_over(service: ServiceProcess) -> None:
    """Wait for the demo's agents, whose first cycle draws weeks of the synthetic market."""
    async with asyncio.timeout(60):
        while (await service.get("/health/schedulers"))[1]["modelsRunning"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.5)


def inserts_per_second(dsn: str, folder: Path, seconds: int) -> float:
    """What pgbench reaches with as many clients and one insert per transaction."""
    script = folder / "insert.sql"
    script.write_text(PGBENCH_SCRIPT)
    subprocess.run(
        ["psql", "-q", dsn, "-c", "CREATE TABLE bench (client int, quantity numeric, price numeric, at timestamptz)"],
        check=True,
    )
    result = subprocess.run(
        ["pgbench", "-n", "-M", "prepared", "-c", str(CLIENTS), "-j", "1", "-T", str(seconds), "-f", str(script), dsn],
        check=True,
        capture_output=True,
        text=True,
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("tps"))
    return float(line.split()[2])


async def measure_orders(folder: Path) -> None:
    if shutil.which("pgbench") is None or shutil.which("psql") is None:
        print("durable orders          skipped: pgbench and psql are not installed (Debian: postgresql-contrib)")
        return
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as http:
        service = await ServiceProcess.start(folder, http, SIM_LATENCY_MS="0")
        try:
            await orders_per_second(service, 2)
            await _first_cycle_over(service)
            ours = await orders_per_second(service, SECONDS)
            async with EmbeddedPostgres.attached(folder / EMBEDDED_FOLDER) as server:
                dsn = server.dsn((await server.databases())[0])
                reference = await asyncio.to_thread(inserts_per_second, dsn, folder, SECONDS)
        finally:
            await service.stop()
    print(
        f"durable orders          {ours:8.0f} /s   pgbench {reference:8.0f} /s   "
        f"ratio {ours / reference:.2f} (goal ≥ 0.50)"
    )


@asynccontextmanager
async def trading(database: Database, clock: ManualClock) -> AsyncIterator[tuple[Exchange, MarketData]]:
    market = MarketData(ScriptedSource(), clock)
    settings = make_settings(SIM_MAX_ACCOUNTS="10000")
    exchange = Exchange(database, market, clock, EventBus(), settings)
    await exchange.lead()
    try:
        yield exchange, market
    finally:
        await exchange.resign()


async def open_positions(exchange: Exchange, accounts: int) -> None:
    """Three positions with exit plans that do not fire for each account."""

    async def one(number: int) -> None:
        for symbol, size in SIZES.items():
            plan = ExitPlan(stop=Decimal(QUIET[symbol]) / 2, target=Decimal(QUIET[symbol]) * 2)
            await exchange.place_order(
                Order(
                    account_id=f"model-{number}",
                    symbol=symbol,
                    side=OrderSide.BUY,
                    quantity=Decimal(size),
                    leverage=Decimal(3),
                    exit_plan=plan,
                )
            )

    for start in range(0, accounts, 100):
        await asyncio.gather(*(one(n) for n in range(start, min(start + 100, accounts))))


async def longest_hold_ms(until: asyncio.Event) -> float:
    """The longest time for which the loop let nobody else have a turn."""
    longest, before = 0.0, time.perf_counter()
    while not until.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest * 1000


async def measure_refresh(exchange: Exchange, market: MarketData) -> None:
    ticks = [make_tick(START + timedelta(seconds=n), QUIET) for n in range(10, 10 + UPDATES)]
    done = asyncio.Event()
    watch = asyncio.create_task(longest_hold_ms(done))
    await asyncio.sleep(0)
    took = []
    for tick in ticks:
        started_s = time.perf_counter()
        await market._take(tick, exchange.on_tick)
        took.append((time.perf_counter() - started_s) * 1000)
    done.set()
    hold_ms = await watch
    reference_ms = plain_refresh_ms(exchange, ticks[-1])
    took.sort()
    print(
        f"refresh of {len(exchange.accounts)} × 3      {took[len(took) // 2]:8.1f} ms   "
        f"plain loop {reference_ms:5.1f} ms   (goal < 50 ms), "
        f"p99 {took[-1]:.1f} ms, longest hold {hold_ms:.1f} ms (goal < 20 ms)"
    )


def plain_refresh_ms(exchange: Exchange, tick: Tick) -> float:
    """The figures without which no refresh can decide: equity and maintenance of every account."""
    marks = {symbol: quote.mark for symbol, quote in tick.quotes.items()}
    started_s = time.perf_counter()
    for account in exchange.accounts.values():
        equity(account, marks)
        maintenance(account, marks, MARKETS)
    return (time.perf_counter() - started_s) * 1000


async def measure_restart(database: Database, clock: ManualClock) -> None:
    async with database.connection() as conn:
        started_s = time.perf_counter()
        rows = await conn.fetch("SELECT * FROM orders WHERE status = 'OPEN'")
        reference_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    async with trading(database, clock):
        took_s = time.perf_counter() - started_s
    print(f"restart of {len(rows)} positions {took_s:5.2f} s    plain read {reference_s:6.2f} s    (goal < 2 s)")


async def measure_books(folder: Path) -> None:
    async with EmbeddedPostgres(folder / "books", durable=False) as server:
        database = await Database.connect(await server.ensure_database("trader_benchmark"))
        try:
            await apply_schema(database)
            clock = ManualClock(START)
            async with trading(database, clock) as (exchange, market):
                await clock.advance(timedelta(seconds=1))
                await market._take(make_tick(clock.now(), QUIET), exchange.on_tick)
                await open_positions(exchange, REFRESHED_ACCOUNTS)
                await measure_refresh(exchange, market)
                await open_positions(exchange, POSITIONS // 3 + 1)
            await measure_restart(database, clock)
        finally:
            await database.close()


async def measure(folder: Path) -> None:
    await measure_orders(folder)
    await measure_books(folder)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="trader-benchmark-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # as root the server runs as nobody, who must get in
        asyncio.run(measure(folder))
    exchange_core.main()


if __name__ == "__main__":
    main()
