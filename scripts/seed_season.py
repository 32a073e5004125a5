"""Simulated seasons: months of many models in minutes, traded on the synthetic market by the rules of the exchange.

Each process simulates some of the models, day after day, in one transaction. Unlike in `trader.history`, which runs the
service itself, markets are seen only at full minutes and decisions are random; the books are just as exact.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
from season_records import COLUMNS
from season_trader import SeasonMarket, Trader

from trader.clock import iso
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.models import Model
from trader.domain.money import ZERO
from trader.domain.portfolio.histories import Snapshot
from trader.errors import StartError
from trader.external import settle_seed
from trader.gateways.market.rows import preset_rows
from trader.gateways.market.synthetic import SyntheticSource
from trader.services.agents.entrants import Entrants
from trader.services.exchange.protocol import rules_of
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.leadership import update_term
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.exchange.accounts import (
    DatabaseIdentity,
    select_accounts,
    update_processed_until,
    upsert_service_state,
)
from trader.store.exchange.ledger import write_postings
from trader.store.exchange.ledger_rows import request_row
from trader.store.portfolio.season import SEASON_TIMEOUT_S, upsert_all_variant_hours

MODELS_PER_PROCESS_MIN: Final = 4

Progress = Callable[[datetime, int], None]


class Plan(NamedTuple):
    """The work of one process."""

    dsn: str
    term: int
    seed: int
    rules: Rules
    start: datetime
    end: datetime
    cycle: int
    payloads_from: datetime
    accounts: tuple[tuple[Model, Account], ...]


async def write_season(
    database: Database, dsn: str, settings: Settings, start: datetime, end: datetime, cycle: int, progress: Progress
) -> str:
    """Write a past from `start` to `end` for all models whose accounts never traded. Return a line for the operator.

    The database must have no past, and no service may use it. `progress` is called with the time reached and the number
    of accounts.
    """
    source = SyntheticSource(settings.seed, settings.markets, preset_rows(settings.venue_preset, None))
    await settle_seed(source, database, is_written=True)
    assert source.seed is not None
    seed = source.seed.value
    async with database.transaction() as conn:
        accounts = await select_accounts(conn)
        models = [model for model in await select_models(conn) if model.id in accounts]
        pairs = [(model, accounts[model.id]) for model in models if accounts[model.id].sequence == 1]
        await ensure_partitions(conn, start, end)
        await upsert_service_state(conn, DatabaseIdentity(source.identity, "simulated"))
        term = await update_term(conn)
    entrants = Entrants(database, settings)
    for model, _ in pairs:
        await entrants.answered(await entrants.enter(model, start), model.router_model_name, start)
    count = max(1, min(os.cpu_count() or 1, len(pairs) // MODELS_PER_PROCESS_MIN))
    rules = rules_of(settings, source.markets)
    payloads_from = end - timedelta(days=settings.snapshot_retention_days)
    plans = [
        Plan(dsn, term, seed, rules, start, end, cycle, payloads_from, tuple(pairs[number::count]))
        for number in range(count)
    ]
    await _run(plans, lambda share: progress(start + (end - start) * share, len(pairs)))
    print("All rows are written; now they are summed up, vacuumed and analyzed.", file=sys.stderr)
    marks = {symbol: quote.mark for symbol, quote in source.tick(int(end.timestamp())).quotes.items()}
    async with database.transaction() as conn:
        await upsert_all_variant_hours(conn)
        await update_processed_until(conn, term, end, marks)
    async with database.connection() as conn:  # else autovacuum does it later, beside the first readers
        await conn.execute("VACUUM (ANALYZE)", timeout=SEASON_TIMEOUT_S)
    return f"The season from {iso(start)} to {iso(end)} is written."


async def _run(plans: Sequence[Plan], progress: Callable[[float], None]) -> None:
    """Run each plan in a process of its own; a single plan in this process."""
    days = max(1.0, (plans[0].end - plans[0].start) / timedelta(days=1)) * len(plans)
    if len(plans) == 1:
        written = iter(range(1, 1_000))
        await _write(plans[0], lambda: progress(min(1.0, next(written) / days)))
        return
    spawned = multiprocessing.get_context("spawn")
    loop = asyncio.get_running_loop()
    with spawned.Manager() as manager, ProcessPoolExecutor(len(plans), spawned) as pool:
        written_days = manager.Queue()
        pending = {loop.run_in_executor(pool, _write_alone, plan, written_days) for plan in plans}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
                progress(min(1.0, written_days.qsize() / days))
        except BaseException:  # also an interrupt: the pool would wait for the processes until they are done
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _write_alone(plan: Plan, written_days: Any) -> None:
    asyncio.run(_write(plan, lambda: written_days.put(None)))


async def _write(plan: Plan, day_is_written: Callable[[], None]) -> None:
    """Simulate the season of some models and write it, all or nothing."""
    market = SeasonMarket(plan.seed, plan.rules.markets, plan.start, plan.end)
    traders = [
        Trader(model, account, market, plan.rules, plan.cycle, plan.payloads_from) for model, account in plan.accounts
    ]
    midnights = [minute for minute, at in enumerate(market.times) if minute and not at.hour and not at.minute]
    conn = await asyncpg.connect(plan.dsn)
    try:
        async with conn.transaction():
            for first, last in pairwise((0, *midnights, len(market.times))):
                for trader in traders:
                    trader.follow(first, last)
                await _write_day(conn, traders, plan.term)
                day_is_written()
    finally:
        await conn.close()


async def _write_day(conn: Any, traders: Sequence[Trader], term: int) -> None:
    """Write the traders' records since the last call."""
    snapshots = [trader.snapshots for trader in traders]
    hours = chain.from_iterable(map(_hours, snapshots))
    in_order = sorted(chain.from_iterable(snapshots), key=attrgetter("created_at"))  # as a service would write them
    await _copy(conn, "portfolio_snapshots", map(msgspec.structs.astuple, in_order))
    await _copy(conn, "portfolio_hourly", hours)
    for table, columns in COLUMNS.items():
        await _copy(conn, table, chain.from_iterable(trader.rows[table] for trader in traders), columns)
    await _copy(conn, "order_requests", chain.from_iterable(_request_rows(trader.postings) for trader in traders))
    merged = [_merge(trader.postings) for trader in traders if trader.postings]
    if len(await write_postings(conn, merged, term)) < len(merged):
        raise StartError("An account was traded meanwhile; nothing of its past is written.")
    for trader in traders:
        trader.snapshots, trader.postings = [], []
        trader.rows.clear()


async def _copy(conn: Any, table: str, rows: Iterable[Any], columns: Sequence[str] | None = None) -> None:
    await conn.copy_records_to_table(table, records=rows, columns=columns, timeout=SEASON_TIMEOUT_S)


def _hours(snapshots: Iterable[Snapshot]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `portfolio_hourly` of one account's snapshots, which are of whole hours and ascending."""
    for hour, group in groupby(snapshots, key=lambda snapshot: snapshot.created_at.replace(minute=0)):
        members = list(group)
        last, total = members[-1], sum((each.net_portfolio for each in members), ZERO)
        leverage = max(each.leverage or 0.0 for each in members)
        yield last.account_id, hour, last.run_id, total, len(members), last.net_portfolio, last.created_at, leverage


def _request_rows(postings: Iterable[Posting]) -> Iterator[tuple[Any, ...]]:
    for posting in postings:
        if posting.answer is not None:
            row = request_row(posting, posting.answer)
            yield tuple((row | {"answer": msgspec.json.encode(posting.answer).decode()}).values())


def _merge(postings: Sequence[Posting]) -> Posting:
    """Merge successive changes of one account into a single one, without the answers to its orders."""
    last = postings[-1]
    return msgspec.structs.replace(
        last,
        sequence_before=postings[0].sequence_before,
        positions=tuple(last.account.positions.values()),
        resting=tuple({change.order.id: change for posting in postings for change in posting.resting}.values()),
        answer=None,
        **{
            name: [entry for posting in postings for entry in getattr(posting, name)]
            for name in ("fills", "trades", "funding", "insurance")
        },
    )
