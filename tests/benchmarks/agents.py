"""Load of many slow models: event loop lag, punctuality of the executor, duration of a shutdown.

    scripts/benchmark agents [--models 20] [--step 30] [--seconds 150] [--markets 3]

Real invocations through the real workflow: the synthetic market in real time, a provider over HTTP in a separate
process that takes `--step` seconds for each of two steps, the executor every 60 s, and a durable embedded PostgreSQL.
The reference for the lag is an idle loop of the same process. During the shutdown every model waits for its provider.
Additional markets reuse the built-in rows under other names; an account holds a position in each market.
"""

import argparse
import asyncio
import gc
import sys
import time
from contextlib import AsyncExitStack
from datetime import datetime
from decimal import Decimal
from itertools import cycle
from pathlib import Path

import msgspec
from benchmarks.figures import Figures, temporary_folder
from support.loop_lag import LoopLag
from support.slow_provider import slow_provider
from support.venue import make_exchange

from trader.agents.domain.models import Model
from trader.agents.providers.providers import make_providers
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.models import upsert_model
from trader.composition.service import jobs
from trader.core.clock import SystemClock
from trader.core.events import EventBus
from trader.core.schedulers import Schedulers
from trader.core.variant_id import VariantId
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.exchange.domain.orders import Order, OrderSide, OrderStatus
from trader.exchange.paper import PaperExchange
from trader.market.domain.markets import SIMULATED_MARKETS, SimulatedMarket
from trader.market.feed import MarketFeed
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.snapshots import PortfolioService
from trader.settings.settings import Settings

IDLE_S = 5
HOLD_MS_MAX, SHUTDOWN_MS_MAX, BUSY_PERCENT_MAX = 50.0, 2_000.0, 50.0


def rows_of(count: int) -> dict[str, SimulatedMarket]:
    """Return the rows of this many markets: the built-in ones, and then the same rows under other names."""
    rows = {}
    for number, row in zip(range(count), cycle(SIMULATED_MARKETS.values()), strict=False):
        further = number // len(SIMULATED_MARKETS)
        symbol = f"{row.rules.symbol}{further or ''}"
        rows[symbol] = row._replace(rules=msgspec.structs.replace(row.rules, symbol=symbol))
    return rows


async def hold_all(exchange: PaperExchange, market: MarketFeed) -> None:
    """Open a position of 500 in every market, in one account."""
    while market.quotes().keys() != market.markets.keys():
        await asyncio.sleep(0.1)
    for symbol, quote in market.quotes().items():
        order = Order(
            account_id="holder", symbol=symbol, side=OrderSide.BUY, quantity=500 / quote.mark, leverage=Decimal(5)
        )
        (answer,) = await exchange.place_orders(order)
        assert answer.status == OrderStatus.FILLED, answer.reason


async def measure(folder: Path, models: int, step_s: float, seconds: float, markets: int) -> int:
    figures, rows = Figures(), rows_of(markets)
    async with LoopLag() as idle:
        await asyncio.sleep(IDLE_S)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(slow_provider(step_s))
        written = {"MARKETS": ",".join(rows), "OPENAI_BASE_URL": url, "MAX_PARALLEL_MODELS": str(models)}
        settings = Settings.load(written, None, demo=True)
        server = await stack.enter_async_context(EmbeddedPostgres(folder / "postgres"))
        database = await Database.connect(await server.ensure_database("trader_benchmark"))
        stack.push_async_callback(database.close)
        await apply_schema(database)
        await _add_models(database, models)
        clock, events, source = SystemClock(), EventBus(), SyntheticSource(0, tuple(rows), rows)
        await source.open()
        market = MarketFeed(source, clock)
        exchange = make_exchange(database, market, clock, settings, events)
        await exchange.lead()
        feed = asyncio.create_task(market.run(exchange.on_tick, clock.now()))
        await hold_all(exchange, market)
        providers = make_providers(settings)
        stack.push_async_callback(providers.close)
        shared = database, exchange, market, clock, events, settings, providers
        agents = InvocationScheduler(AgentServices(*shared, KnownModels(database)))
        await agents.start()
        started: list[datetime] = []

        async def execute(now: datetime) -> None:
            started.append(now)
            await agents.start_batch(now)

        portfolio = PortfolioService(database, exchange, clock, settings)
        schedulers = Schedulers(jobs(events, execute, portfolio.take_snapshots), clock)
        gc.collect()
        gc.freeze()  # as the service does once it has started
        async with LoopLag() as busy:
            await schedulers.start()
            await asyncio.sleep(seconds)
        what = f"lag of the event loop, {models} models with steps of {step_s:g} s, {markets} markets"
        figures.show(f"{what}, p99", busy.p99_ms(), "ms", reference=("idle loop", idle.p99_ms()))
        figures.show("longest lag", max(busy.real_ms), "ms", reference=("idle loop", max(idle.real_ms)))
        figures.show("longest work of this thread without a pause", max(busy.cpu_ms), "ms", at_most=HOLD_MS_MAX)
        late_ms = [at.second * 1000 + at.microsecond / 1000 for at in started[1:]]  # the first run is at startup
        figures.show(f"latest of {len(late_ms)} executor runs after its minute", max(late_ms, default=0.0), "ms")
        for name, status in schedulers.status().items():
            figures.show(f"{name}: runs that were skipped or failed", status.skipped + status.failures, "", at_most=0)
            share = 100 * (status.last_duration_ms or 0) / status.interval_ms
            figures.show(f"{name}: last run, part of its interval", share, "%", at_most=BUSY_PERCENT_MAX)
        assert market.last_update_at is not None
        figures.show("age of the last tick", (clock.now() - market.last_update_at).total_seconds(), "s", at_most=2.0)
        await _print_invocations(database, agents)
        began_s = time.perf_counter()
        await schedulers.close()
        await agents.close()
        figures.show("shutdown", (time.perf_counter() - began_s) * 1000, "ms", at_most=SHUTDOWN_MS_MAX)
        feed.cancel()
        await asyncio.wait([feed])
        await exchange.resign()
    return figures.exit_code


async def _add_models(database: Database, count: int) -> None:
    now, variants = SystemClock().now(), list(VariantId)
    async with database.connection() as conn:
        await ensure_partitions(conn, now)
        for number in range(count):
            model = Model(
                id=f"slow-{number:03}", name=f"Slow {number}", variant=variants[number % len(variants)],
                provider="openai", router_model_name="slow/one", created_at=now,
            )  # fmt: skip
            await upsert_model(conn, model)


async def _print_invocations(database: Database, agents: InvocationScheduler) -> None:
    async with database.connection() as conn:
        rows = await conn.fetch("SELECT status, count(*) FROM invocations GROUP BY status ORDER BY status")
    counts = ", ".join(f"{row['count']} {row['status']}" for row in rows)
    print(f"invocations: {counts}; {len(agents.running())} in progress, {agents.skipped} skipped as still running")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--step", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--markets", type=int, default=3)
    options = parser.parse_args()
    with temporary_folder() as folder:
        return asyncio.run(measure(folder, options.models, options.step, options.seconds, options.markets))


if __name__ == "__main__":
    sys.exit(main())
