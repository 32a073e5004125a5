"""Weekly partitions of raw snapshots and invocation payloads.

A partition is created before it is attached, and detached before it is dropped, so that neither blocks readers and
writers of the table. A week starts on Monday, 00:00 UTC; a partition is named for its first day.
"""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import asyncpg

from trader.database.pool import Connection

PARTITIONED_TABLES = ("portfolio_snapshots", "invocation_payloads")
WEEK = timedelta(days=7)

# "partitio" in ASCII: processes that create the same partition take turns.
PARTITION_LOCK = 0x706172746974696F
LOCK_PARTITIONS = "SELECT pg_advisory_xact_lock($1)"

# `inhdetachpending` is null for a partition that was detached but not dropped before its process ended.
SELECT_PARTITIONS = """
SELECT c.relname, i.inhdetachpending
FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass($1::text))
  AND c.relkind = 'r' AND c.relname ~ ('^' || $1 || '_[0-9]{8}$')
ORDER BY c.relname
"""


_DROPPED_ELSEWHERE = (
    asyncpg.UndefinedTableError, asyncpg.ObjectNotInPrerequisiteStateError, asyncpg.DeadlockDetectedError
)  # fmt: skip
"""Another process drops the partition right now; any leftover is dropped next time."""


def week_of(moment: datetime) -> datetime:
    """Return the start of the moment's week: Monday, 00:00 UTC."""
    day = moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day - timedelta(days=day.weekday())


def _name(table: str, week: datetime) -> str:
    return f"{table}_{week:%Y%m%d}"


def _week(table: str, partition: str) -> datetime:
    return datetime.strptime(partition.removeprefix(f"{table}_"), "%Y%m%d").replace(tzinfo=UTC)


async def ensure_partitions(conn: Connection, around: datetime, until: datetime | None = None) -> None:
    """Create the missing partitions of this week, the next one, and all weeks up to `until`.

    Safe to repeat, and safe for concurrent processes.
    """
    last = week_of(until or around) + WEEK
    weeks = [week_of(around)]
    while weeks[-1] < last:
        weeks.append(weeks[-1] + WEEK)
    for table in PARTITIONED_TABLES:
        if await _missing(conn, table, weeks):
            async with conn.transaction():
                await conn.execute(LOCK_PARTITIONS, PARTITION_LOCK)
                for week in await _missing(conn, table, weeks):
                    await _attach(conn, table, week)


def partitioned_table(partition: str) -> str | None:
    """Return the table to which a partition's name belongs; None if it is not the name of a partition."""
    table, _, day = partition.rpartition("_")
    if table not in PARTITIONED_TABLES or not re.fullmatch("[0-9]{8}", day):
        return None
    try:
        return table if week_of(_week(table, partition)) == _week(table, partition) else None
    except ValueError:
        return None


async def create_partition(conn: Connection, partition: str) -> None:
    """Create and attach the partition with this name, which must be valid."""
    table = partition.rpartition("_")[0]
    await _attach(conn, table, _week(table, partition))


async def _missing(conn: Connection, table: str, weeks: list[datetime]) -> list[datetime]:
    rows = await conn.fetch(SELECT_PARTITIONS, table)
    present = {row["relname"] for row in rows if row["inhdetachpending"] is not None}
    return [week for week in weeks if _name(table, week) not in present]


async def _attach(conn: Connection, table: str, week: datetime) -> None:
    # CREATE TABLE … PARTITION OF would lock the whole table for its readers; ATTACH does not.
    name = _name(table, week)
    bounds = f"FROM ('{week:%Y-%m-%dT%H:%MZ}') TO ('{week + WEEK:%Y-%m-%dT%H:%MZ}')"
    await conn.execute(f"CREATE TABLE IF NOT EXISTS {name} (LIKE {table} INCLUDING ALL)")
    await conn.execute(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES {bounds}")


async def drop_partitions_before(conn: Connection, cutoff: datetime, parts_max: int | None = None) -> list[str]:
    """Drop the partitions whose rows are all older than `cutoff`, the `parts_max` oldest of each table. Return them.

    `conn` must not be in a transaction. Drops that were interrupted earlier are completed.
    """
    dropped = []
    for table in PARTITIONED_TABLES:
        parts = [(row["relname"], row["inhdetachpending"]) for row in await conn.fetch(SELECT_PARTITIONS, table)]
        old = [part for part in parts if _week(table, part[0]) + WEEK <= cutoff]
        for name, is_pending in old[:parts_max]:
            with suppress(*_DROPPED_ELSEWHERE):
                if is_pending is not None:
                    how = "FINALIZE" if is_pending else "CONCURRENTLY"
                    await conn.execute(f"ALTER TABLE {table} DETACH PARTITION {name} {how}")
                await conn.execute(f"DROP TABLE {name}")
                dropped.append(name)
    return dropped
