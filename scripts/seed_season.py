"""A season in bulk: months of many models in minutes, traded on the synthetic market by the rules of the exchange.

Each process lives through the season of its models, day after day, and hands the rows to COPY; what it wrote counts
only when the last row is in (one transaction per process). Unlike `seed_history`, which runs the service itself,
markets are looked at on the full minutes and the models' decisions are made up; the books are as exact.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

import asyncpg
from season_market import SeasonMarket
from season_trader import Trader

from trader.clock import iso
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Rules
from trader.domain.market.markets import MARKETS
from trader.domain.models import Model
from trader.errors import StartError
from trader.gateways.market.synthetic import SyntheticSource
from trader.settings import Settings
from trader.store.agents.invocations import select_models
from trader.store.database.leadership import update_term
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.exchange import bulk
from trader.store.exchange.accounts import (
    DatabaseIdentity,
    select_accounts,
    select_processed_until,
    update_processed_until,
    upsert_service_state,
)

DAY_MINUTES: Final = 24 * 60
MODELS_PER_PROCESS_MIN: Final = 4
_COLUMNS: Final = {"portfolio_snapshots": bulk.SNAPSHOT_COLUMNS, "invocations": bulk.INVOCATION_COLUMNS}


class Plan(NamedTuple):
    """What one process does: all of it can be sent to another one."""

    dsn: str
    seed: int
    symbols: tuple[str, ...]
    taker_rate: Decimal
    maker_rate: Decimal
    start: datetime
    end: datetime
    cycle: int
    payload_from: int
    accounts: tuple[tuple[Model, Account], ...]


Progress = Callable[[datetime, int], None]


async def write_season(
    database: Database, dsn: str, settings: Settings, start: datetime, end: datetime, cycle: int, progress: Progress
) -> str:
    """Write the past of all models whose accounts are fresh. `progress` gets (moment reached, accounts).

    Nobody else may be at work on the database, and `refuse_season` must have let it pass.
    """
    async with database.connection() as conn:
        found = await _fresh_accounts(conn)
        await ensure_partitions(conn, start, end)
    plans = _plans(found, dsn, settings, start, end, cycle)
    await _carry_out(plans, start, end, len(found), progress)
    print("All rows are there; now they are summed up, vacuumed and analyzed.", file=sys.stderr)
    await _finish(database, settings, start, end)
    return f"The season from {iso(start)} to {iso(end)} is written."


async def refuse_season(conn: Any, start: datetime) -> None:
    """See whether the accounts can have a past from `start`.

    :raises StartError: the database has a past already, or an account was opened later
    """
    if await select_processed_until(conn) is not None:
        raise StartError("This database has a past already; a season in bulk needs a new database.")
    late = [one.id for one in (await select_accounts(conn)).values() if one.run.started_at > start]
    if late:
        raise StartError(f"These accounts were opened after the history begins: {', '.join(late[:10])}.")


async def _fresh_accounts(conn: Any) -> list[tuple[Model, Account]]:
    accounts = await select_accounts(conn)
    return [
        (model, accounts[model.id])
        for model in await select_models(conn)
        if model.id in accounts and accounts[model.id].sequence == 1
    ]


def _plans(
    accounts: Sequence[tuple[Model, Account]], dsn: str, settings: Settings, start: datetime, end: datetime, cycle: int
) -> list[Plan]:
    count = max(1, min(os.cpu_count() or 1, len(accounts) // MODELS_PER_PROCESS_MIN))
    kept_since = end - timedelta(days=settings.snapshot_retention_days)
    return [
        Plan(
            dsn=dsn,
            seed=settings.seed,
            symbols=settings.market_symbols,
            taker_rate=settings.taker_fee_bps / 10_000,
            maker_rate=settings.maker_fee_bps / 10_000,
            start=start,
            end=end,
            cycle=cycle,
            payload_from=int(kept_since.timestamp()),
            accounts=tuple(accounts[number::count]),
        )
        for number in range(count)
    ]


async def _carry_out(plans: Sequence[Plan], start: datetime, end: datetime, accounts: int, progress: Progress) -> None:
    """Let each plan be carried out by a process of its own; a single one by this process."""
    if len(plans) == 1:
        await _live(plans[0], lambda moment: progress(moment, accounts))
        return
    spawned = multiprocessing.get_context("spawn")
    days = spawned.Value("q", 0)
    total = len(plans) * max(1, (end - start) // timedelta(days=1))
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(len(plans), spawned, _count_in, (days,)) as pool:
        pending = {loop.run_in_executor(pool, _live_alone, plan) for plan in plans}
        while pending:
            done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
            progress(start + (end - start) * min(1.0, days.value / total), accounts)


_days: Any = None
"""In a process of the pool: the counter of the days that all processes have written."""


def _count_in(days: Any) -> None:
    global _days  # noqa: PLW0603 - a pool hands shared memory to its processes at their start only
    _days = days


def _count_day(_: datetime) -> None:
    with _days.get_lock():
        _days.value += 1


def _live_alone(plan: Plan) -> None:
    asyncio.run(_live(plan, _count_day))


async def _live(plan: Plan, day_is_over: Callable[[datetime], None]) -> None:
    """Live through the season of some models and write it, all or nothing."""
    market = SeasonMarket(plan.seed, plan.symbols, plan.start, plan.end)
    rules = Rules({symbol: MARKETS[symbol] for symbol in plan.symbols}, plan.taker_rate, plan.maker_rate)
    traders = [Trader(model, account, market, rules, plan.cycle, plan.payload_from) for model, account in plan.accounts]
    conn = await asyncpg.connect(plan.dsn)
    try:
        async with conn.transaction():
            for first in range(0, market.minutes, DAY_MINUTES):
                last = min(market.minutes, first + DAY_MINUTES)
                await _live_day(conn, traders, first, last)
                day_is_over(market.times[last - 1])
            await _write_ledgers(conn, traders)
    finally:
        await conn.close()


async def _live_day(conn: Any, traders: Sequence[Trader], first: int, last: int) -> None:
    lines: list[list[str]] = [[] for _ in range(first, last)]
    for trader in traders:
        trader.follow(first, last, lines)
        if last == len(trader.times):
            trader.rows.close_hour()
    days = [trader.rows.take_day() for trader in traders]
    await bulk.copy_lines(
        conn, "portfolio_snapshots", (one for minute in lines for one in minute), bulk.SNAPSHOT_COLUMNS
    )
    for table in days[0]:
        await bulk.copy_lines(conn, table, (one for day in days for one in day[table]), _COLUMNS.get(table))


async def _write_ledgers(conn: Any, traders: Sequence[Trader]) -> None:
    ledgers = [trader.rows.take_ledger() for trader in traders]
    for table in ledgers[0]:
        await bulk.copy_lines(conn, table, (one for ledger in ledgers for one in ledger[table]))
    for trader in traders:
        account = trader.account
        fresh = await bulk.update_fresh_account(
            conn, account.id, account.sequence, account.changed_at, account.last_order_at
        )
        if not fresh:
            raise StartError(f"{account.id} was traded meanwhile; nothing of its past is written.")


async def _finish(database: Database, settings: Settings, start: datetime, end: datetime) -> None:
    """Sum up the variants, and let the service go on from the end."""
    source = SyntheticSource(settings.seed, settings.market_symbols)
    marks = {symbol: quote.mark for symbol, quote in source.tick(int(end.timestamp())).quotes.items()}
    async with database.transaction() as conn:
        await bulk.upsert_all_variant_hours(conn)
        await upsert_service_state(conn, DatabaseIdentity(source.identity, "simulated"))
        await update_processed_until(conn, await update_term(conn), end, marks)
    async with database.connection() as conn:  # else autovacuum does it, beside the first hours of whoever reads
        await conn.execute("VACUUM (ANALYZE)", timeout=bulk.BULK_TIMEOUT_S)
