"""Speed of the paper exchange: fills, the refresh of all accounts, and a restart with open positions.

    scripts/benchmark exchange

Fills: market orders that walk three levels of a book, on one core; the reference does the same walk and the same sums
on local variables. Refresh: one tick of every market for 1,000 accounts of 3 positions; the reference computes only
the equity and the maintenance margin of each. Restart: 10,000 positions loaded from their rows; the reference reads the
same rows.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figures import Figures, temporary_folder
from support.books import RULES, make_quote, moment_of, open_account, plain_rate
from support.loop_lag import LoopLag
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.venue import make_exchange

from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.exchange.domain.account import equity, maintenance
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderStatus
from trader.exchange.domain.rules import place
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.paper import PaperExchange
from trader.market.domain.markets import MARKETS, Tick
from trader.market.feed import MarketFeed

ORDERS, LEVELS, ROUNDS = 1_000, 3, 25
POSITIONS, REFRESHED_ACCOUNTS, UPDATES = 10_000, 1_000, 50
FILLS_PER_S_MIN, REFRESH_MS_MAX, HOLD_MS_MAX, RESTART_S_MAX = 50_000, 50.0, 20.0, 2.0
MIDS = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
SIZES = {"BTC": "0.001", "ETH": "0.01", "SOL": "0.5"}


# Fills


def measure_fills(figures: Figures) -> None:
    moments = [_moment(number) for number in range(ORDERS)]
    fills = place_orders(moments)
    assert fills == plain_orders(moments) == ORDERS * LEVELS
    ours, plain = (fills / fastest_s(partial(work, moments)) for work in (place_orders, plain_orders))
    figures.show("fills per second", ours, "/s", reference=("plain loop", plain), at_least=FILLS_PER_S_MIN)


def _moment(number: int) -> Moment:
    mid, tick = Decimal("98000.5"), MARKETS["BTC"].tick
    bids, asks = ([(mid + sign * step * tick, "0.5") for step in range(1, 11)] for sign in (-1, 1))
    return moment_of(make_quote("BTC", bids, asks, at=START + timedelta(minutes=number)))


def place_orders(moments: list[Moment]) -> int:
    """Buy and sell in turn, each on a new book that has recovered. Return the number of fills."""
    account, fills = open_account(10_000_000, at=START), 0
    orders = [
        Order(account_id=account.id, symbol="BTC", side=side, quantity=Decimal("1.2"), leverage=Decimal(5))
        for side in (OrderSide.BUY, OrderSide.SELL)
    ]
    for number, moment in enumerate(moments):
        posting = place(account, orders[number % 2], moment, RULES, plain_rate)
        account = posting.account
        fills += len(posting.fills)
    return fills


def plain_orders(moments: list[Moment]) -> int:
    """Do the same walks, sums and fees without an account: the cost of the arithmetic alone."""
    cash = cost = held = Decimal(0)
    fills = 0
    for number, moment in enumerate(moments):
        book, left = moment.quotes["BTC"].book, Decimal("1.2")
        for level in book.bids if number % 2 else book.asks:
            quantity = min(left, level.quantity)
            notional = quantity * level.price
            cash -= notional * RULES.taker_rate
            cost += -notional if number % 2 else notional
            held += -quantity if number % 2 else quantity
            left -= quantity
            fills += 1
            if not left:
                break
    return fills


def fastest_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of the fastest of several rounds, which other processes disturb least."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        times.append(time.process_time() - began_s)
    return min(times)


# Refresh and restart


@asynccontextmanager
async def trading(database: Database, clock: ManualClock) -> AsyncIterator[tuple[PaperExchange, MarketFeed]]:
    market = MarketFeed(ScriptedSource(), clock)
    exchange = make_exchange(database, market, clock, make_settings(SIM_MAX_ACCOUNTS="10000"))
    await exchange.lead()
    try:
        yield exchange, market
    finally:
        await exchange.resign()


async def open_positions(exchange: PaperExchange, accounts: int) -> None:
    """Open three positions with distant exit plans for each account."""

    async def one(number: int) -> None:
        for symbol, size in SIZES.items():
            mid = Decimal(MIDS[symbol])
            order = Order(
                account_id=f"model-{number}", symbol=symbol, side=OrderSide.BUY, quantity=Decimal(size),
                leverage=Decimal(3), exit_plan=ExitPlan(stop=mid / 2, target=mid * 2),
            )  # fmt: skip
            (answer,) = await exchange.place_orders(order)
            assert answer.status is OrderStatus.FILLED, answer

    for start in range(0, accounts, 100):
        await asyncio.gather(*(one(n) for n in range(start, min(start + 100, accounts))))


async def measure_refresh(figures: Figures, exchange: PaperExchange, market: MarketFeed) -> None:
    ticks = [make_tick(START + timedelta(seconds=n), MIDS) for n in range(10, 10 + UPDATES)]
    took_ms = []
    async with LoopLag() as lag:
        for tick in ticks:
            began_s = time.perf_counter()
            await market.take(tick, exchange.on_tick)
            took_ms.append((time.perf_counter() - began_s) * 1000)
    what = f"refresh of {len(exchange.accounts):,} accounts of 3 positions"
    plain = ("plain loop", plain_refresh_ms(exchange, ticks[-1]))
    figures.show(f"{what}, p50", median(took_ms), "ms", reference=plain, at_most=REFRESH_MS_MAX)
    figures.show(f"{what}, longest", max(took_ms), "ms")
    figures.show("longest hold of the event loop meanwhile", max(lag.cpu_ms), "ms", at_most=HOLD_MS_MAX)


def plain_refresh_ms(exchange: PaperExchange, tick: Tick) -> float:
    """Compute the minimum of every refresh: equity and maintenance margin of every account."""
    marks = {symbol: quote.mark for symbol, quote in tick.quotes.items()}
    began_s = time.perf_counter()
    for account in exchange.accounts.values():
        equity(account, marks)
        maintenance(account, marks, MARKETS)
    return (time.perf_counter() - began_s) * 1000


async def measure_restart(figures: Figures, database: Database, clock: ManualClock) -> None:
    async with database.connection() as conn:
        began_s = time.perf_counter()
        rows = await conn.fetch("SELECT * FROM orders WHERE status = 'OPEN'")
        plain_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    async with trading(database, clock):
        took_s = time.perf_counter() - began_s
    what = f"restart with {len(rows):,} positions"
    figures.show(what, took_s, "s", reference=("plain read", plain_s), at_most=RESTART_S_MAX)


async def measure_service(figures: Figures, folder: Path) -> None:
    async with EmbeddedPostgres(folder / "postgres", durable=False) as server:
        database = await Database.connect(await server.ensure_database("trader_benchmark"))
        try:
            await apply_schema(database)
            clock = ManualClock(START)
            async with trading(database, clock) as (exchange, market):
                await clock.advance(timedelta(seconds=1))
                await market.take(make_tick(clock.now(), MIDS), exchange.on_tick)
                await open_positions(exchange, REFRESHED_ACCOUNTS)
                await measure_refresh(figures, exchange, market)
                await clock.advance(timedelta(seconds=10 + UPDATES))  # to the time of the last prices
                await open_positions(exchange, POSITIONS // 3 + 1)
            await measure_restart(figures, database, clock)
        finally:
            await database.close()


def main() -> int:
    figures = Figures()
    measure_fills(figures)
    with temporary_folder() as folder:
        asyncio.run(measure_service(figures, folder))
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
