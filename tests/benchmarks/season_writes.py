"""Cost of writing a snapshot in a season, compared with an empty database; part of the benchmark `season`."""

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.figures import Figures

from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.database.schema import apply_schema
from trader.exchange.sql.accounts import select_accounts, select_processed_until
from trader.portfolio.domain.histories import Snapshot
from trader.portfolio.sql.snapshots import insert_snapshots

STATEMENT_S: Final = 600.0
BATCH: Final = 60
"""Snapshots of an hour, whose first begins the rows that the others add to."""
WARMING_BATCHES: Final = 4
"""Not counted, because a service writes for months over connections with warm caches."""
BATCHES: Final = 15
WRITE_RATIO_MAX: Final = 1.10


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds."""
    began_s = time.perf_counter()
    await work()
    return (time.perf_counter() - began_s) * 1000


async def end_of_season(conn: Connection) -> datetime:
    """Return the time up to which the models traded."""
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
    """Cost of one snapshot in milliseconds: the writer's wait, and the processor time of its server process."""

    wall: float
    server_cpu: float


def _worked_ms(server_pid: int) -> float:
    """Return the processor time of a process so far; 0 if the system does not report it."""
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
    """Write snapshots of every account to the databases in turn, committed as by the service. Return the costs.

    `start` is an hour after all others; its rows, and those after it, are deleted again.
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
    """Compare the cost of a snapshot in the season and in an empty database. Return whether the goal is met."""
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
    return _show(len(accounts), turns)


def _show(accounts: int, turns: Sequence[tuple[Cost, ...]]) -> bool:
    """Show the medians of all turns, and of the ratios per batch, since the load of the machine changes."""
    here, there = zip(*turns, strict=True)
    ratios = {
        name: [
            median(getattr(cost, name) for cost in here[first : first + BATCH])
            / (median(getattr(cost, name) for cost in there[first : first + BATCH]) or 1)
            for first in range(0, len(turns), BATCH)
        ]
        for name in Cost._fields
    }
    figures = Figures()
    wall, empty = (median(cost.wall for cost in costs) for costs in (here, there))
    figures.show(f"a snapshot of {accounts} accounts", wall, "ms", reference=("empty database", empty))
    what = f"ratio, median of {len(ratios['wall'])} batches ({min(ratios['wall']):.2f} to {max(ratios['wall']):.2f})"
    figures.show(what, median(ratios["wall"]), "", at_most=WRITE_RATIO_MAX)
    figures.show("ratio of the server's processor time", median(ratios["server_cpu"]), "")
    return figures.are_met
