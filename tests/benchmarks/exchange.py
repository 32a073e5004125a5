"""Speed of the paper exchange as a service, each figure beside its reference in the same run.

    scripts/benchmark exchange

Restart: 10,000 open positions rebuilt from their rows, beside reading the same rows. Refresh: one update of every
market for 1,000 accounts of 3 positions, with the longest time for which the event loop was held, beside a plain loop
over the same figures. Durable orders are `durable_orders`, the pure core is `exchange_core`.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from benchmarks import durable_orders, exchange_core
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.venue import make_exchange

from trader.domain.exchange.account import equity, maintenance
from trader.domain.exchange.orders import ExitPlan, Order, OrderSide, OrderStatus
from trader.domain.market.markets import MARKETS, Tick
from trader.embedded.server import EmbeddedPostgres
from trader.services.exchange.paper import PaperExchange
from trader.services.market.feed import MarketFeed
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema

POSITIONS, REFRESHED_ACCOUNTS, UPDATES = 10_000, 1_000, 50
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
SIZES = {"BTC": "0.001", "ETH": "0.01", "SOL": "0.5"}


@asynccontextmanager
async def trading(database: Database, clock: ManualClock) -> AsyncIterator[tuple[PaperExchange, MarketFeed]]:
    market = MarketFeed(ScriptedSource(), clock)
    settings = make_settings(SIM_MAX_ACCOUNTS="10000")
    exchange = make_exchange(database, market, clock, settings)
    await exchange.lead()
    try:
        yield exchange, market
    finally:
        await exchange.resign()


async def open_positions(exchange: PaperExchange, accounts: int) -> None:
    """Three positions with exit plans that do not fire for each account."""

    async def one(number: int) -> None:
        for symbol, size in SIZES.items():
            plan = ExitPlan(stop=Decimal(QUIET[symbol]) / 2, target=Decimal(QUIET[symbol]) * 2)
            answer = await exchange.place_order(
                Order(
                    account_id=f"model-{number}",
                    symbol=symbol,
                    side=OrderSide.BUY,
                    quantity=Decimal(size),
                    leverage=Decimal(3),
                    exit_plan=plan,
                )
            )
            assert answer.status is OrderStatus.FILLED, answer

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


async def measure_refresh(exchange: PaperExchange, market: MarketFeed) -> None:
    ticks = [make_tick(START + timedelta(seconds=n), QUIET) for n in range(10, 10 + UPDATES)]
    done = asyncio.Event()
    watch = asyncio.create_task(longest_hold_ms(done))
    await asyncio.sleep(0)
    took = []
    for tick in ticks:
        started_s = time.perf_counter()
        await market.take(tick, exchange.on_tick)
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


def plain_refresh_ms(exchange: PaperExchange, tick: Tick) -> float:
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
                await market.take(make_tick(clock.now(), QUIET), exchange.on_tick)
                await open_positions(exchange, REFRESHED_ACCOUNTS)
                await measure_refresh(exchange, market)
                await clock.advance(timedelta(seconds=10 + UPDATES))  # else these prices are of a time to come
                await open_positions(exchange, POSITIONS // 3 + 1)
            await measure_restart(database, clock)
        finally:
            await database.close()


def main() -> None:
    durable_orders.main()
    with tempfile.TemporaryDirectory(prefix="trader-benchmark-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # as root the server runs as nobody, who must get in
        asyncio.run(measure_books(folder))
    exchange_core.main()


if __name__ == "__main__":
    main()
