"""What a snapshot costs in a season, beside an empty database. Part of `benchmarks.season`."""

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from trader.domain.portfolio.snapshots import Snapshot
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Connection, Database
from trader.store.database.schema import apply_schema
from trader.store.exchange.accounts import select_accounts, select_processed_until
from trader.store.portfolio.snapshots import insert_snapshots

STATEMENT_S: Final = 600.0
BATCH: Final = 60
"""Snapshots of an hour, whose first begins the rows that the others add to."""
WARMING_BATCHES: Final = 4
"""Not counted: a service writes for months over connections that have met the pages of the database before."""
BATCHES: Final = 15
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


class Cost(NamedTuple):
    """Of one snapshot, in milliseconds: what the writer waited, and what the server's process worked for it."""

    wall: float
    server_cpu: float


def _worked_ms(server_pid: int) -> float:
    """What a process has worked so far; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{server_pid}/schedstat").read_text().split()[0]) / 1e6
    except OSError:
        return 0.0


async def _cost(conn: Connection, rows: Sequence[Snapshot]) -> Cost:
    server_pid = conn.get_server_pid()
    before = _worked_ms(server_pid)
    wall = await timed(lambda: insert_snapshots(conn, rows))
    return Cost(wall, _worked_ms(server_pid) - before)


async def write_turns(databases: Sequence[Database], accounts: list[Any], start: datetime) -> list[tuple[Cost, ...]]:
    """What the writing of one snapshot of every account costs in each, turn by turn, committed as the service does.

    `start` is an hour after all others; its rows, and those after it, are taken out again.
    """
    turns = []
    for database in databases:
        async with database.connection() as conn:
            await ensure_partitions(conn, start)
    try:
        for number in range((WARMING_BATCHES + BATCHES) * BATCH):
            rows = [_snapshot(account, start + number * timedelta(minutes=1)) for account in accounts]
            took = {}
            for database in databases if number % 2 else databases[::-1]:
                async with database.connection() as conn:
                    took[database] = await _cost(conn, rows)
            turns.append(tuple(took[database] for database in databases))
    finally:
        for database in databases:
            async with database.transaction() as conn:
                for statement in DELETE_WRITTEN:
                    await conn.execute(statement, start)
    return turns[WARMING_BATCHES * BATCH :]


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
    return _told(len(accounts), turns)


def _told(accounts: int, turns: Sequence[tuple[Cost, ...]]) -> bool:
    """The medians of all turns; their ratio in the median of the batches, which differ by what else the machine did."""
    here, there = zip(*turns, strict=True)
    ratios = {
        name: [
            median(getattr(cost, name) for cost in here[first : first + BATCH])
            / (median(getattr(cost, name) for cost in there[first : first + BATCH]) or 1)
            for first in range(0, len(turns), BATCH)
        ]
        for name in Cost._fields
    }
    ratio = median(ratios["wall"])
    met = bool(ratio <= WRITE_RATIO_MAX)
    print(
        f"a snapshot of {accounts} accounts: {median(cost.wall for cost in here):.2f} ms, in an empty database "
        f"{median(cost.wall for cost in there):.2f} ms: {ratio:.2f} x in the median of {len(ratios['wall'])} batches "
        f"({min(ratios['wall']):.2f} to {max(ratios['wall']):.2f}), server's CPU {median(ratios['server_cpu']):.2f} x"
        f"{'' if met else ' MISSED'}"
    )
    return met
