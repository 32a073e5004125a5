"""What a snapshot costs in a season, beside an empty database. Part of `benchmarks.season`."""

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import Any, Final

from trader.domain.records import Snapshot
from trader.store.partitions import ensure_partitions
from trader.store.pool import Connection, Database, apply_schema
from trader.store.portfolio import insert_snapshots
from trader.store.trading import select_accounts, select_processed_until

STATEMENT_S: Final = 600.0
WRITES: Final = 360
WRITE_RATIO_MAX: Final = 1.10


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds."""
    began_s = time.perf_counter()
    await work()
    return (time.perf_counter() - began_s) * 1000


async def end_of_season(conn: Connection) -> datetime:
    """Up to when the models traded."""
    end = await select_processed_until(conn)
    if end is None:
        raise SystemExit("there is no season in this database")
    return end


DELETE_WRITTEN: Final = (
    "DELETE FROM portfolio_snapshots WHERE created_at >= $1",
    "DELETE FROM portfolio_hourly WHERE hour >= $1",
    "DELETE FROM variant_hourly WHERE hour >= $1",
)


async def write_turns(databases: Sequence[Database], accounts: list[Any], start: datetime) -> list[tuple[float, ...]]:
    """What the writing of one snapshot of every account costs in each, turn by turn, committed as the service does.

    `start` is an hour after all others; its rows, and those after it, are taken out again.
    """
    turns = []
    for database in databases:
        async with database.connection() as conn:
            await ensure_partitions(conn, start)
    try:
        for number in range(WRITES):
            rows = [_snapshot(account, start + number * timedelta(minutes=1)) for account in accounts]
            took = {}
            for database in databases if number % 2 else databases[::-1]:
                async with database.connection() as conn:
                    took[database] = await timed(lambda conn=conn, rows=rows: insert_snapshots(conn, rows))  # type: ignore[misc]
            turns.append(tuple(took[database] for database in databases))
    finally:
        for database in databases:
            async with database.transaction() as conn:
                for statement in DELETE_WRITTEN:
                    await conn.execute(statement, start)
    return turns


def _snapshot(account: Any, at: datetime) -> Snapshot:
    return Snapshot(
        account_id=account.id, run_id=account.run.id, net_portfolio=account.cash, cash=account.cash,
        unrealized_pnl=account.cash - account.cash, created_at=at,
    )  # fmt: skip


COPY_MODELS: Final = """
INSERT INTO models SELECT * FROM json_populate_recordset(NULL::models, $1) ON CONFLICT DO NOTHING
"""


async def measure_writes(dsn: str, empty_dsn: str) -> bool:
    """The cost of a snapshot in the season beside that in a database that has the same models and nothing else."""
    season, empty = [await Database.connect(each, size=1, command_timeout_s=STATEMENT_S) for each in (dsn, empty_dsn)]
    await apply_schema(empty)
    async with season.connection() as conn, empty.transaction() as new:
        accounts, end = list((await select_accounts(conn)).values()), await end_of_season(conn)
        models = await conn.fetchval("SELECT json_agg(m) FROM models m")
        await new.execute(COPY_MODELS, models)
    start = end.replace(minute=0, second=0, microsecond=0) + timedelta(hours=2)
    turns = await write_turns((season, empty), accounts, start)
    await season.close()
    await empty.close()
    here, there = (median(times) for times in zip(*turns, strict=True))
    ratio = median(one / other for one, other in turns)
    met = ratio <= WRITE_RATIO_MAX
    print(
        f"a snapshot of {len(accounts)} accounts: {here:.2f} ms, in an empty database {there:.2f} ms "
        f"({ratio:.2f} x in the median of {len(turns)} turns) {'' if met else 'MISSED'}"
    )
    return met
