"""Partitions are created ahead of time and dropped whole, and the rollups outlive them."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from support.records import START, make_snapshot
from support.tables import SELECT_IS_WAITING

from trader.core.errors import Unavailable
from trader.database.partitions import (
    PARTITIONED_TABLES,
    WEEK,
    drop_partitions_before,
    ensure_partitions,
    week_of,
)
from trader.database.pool import Connection, Database
from trader.portfolio.sql import snapshots as store

SELECT_CHILDREN = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass($1) ORDER BY c.relname
"""
DETACH = "ALTER TABLE portfolio_snapshots DETACH PARTITION portfolio_snapshots_20260302 CONCURRENTLY"


async def _children(conn: Connection, table: str = "portfolio_snapshots") -> list[str]:
    return [row["relname"].removeprefix(f"{table}_") for row in await conn.fetch(SELECT_CHILDREN, table)]


def test_a_week_begins_on_monday_in_utc() -> None:
    assert week_of(datetime(2026, 3, 8, 23, 59, tzinfo=UTC)) == datetime(2026, 3, 2, tzinfo=UTC)
    assert week_of(datetime(2026, 3, 9, tzinfo=UTC)) == datetime(2026, 3, 9, tzinfo=UTC)


async def test_this_week_and_the_next_are_created_once(database: Database) -> None:
    async with database.connection() as conn:
        for _ in range(2):
            await ensure_partitions(conn, START)
        for table in PARTITIONED_TABLES:
            assert await _children(conn, table) == ["20260302", "20260309"]
        await ensure_partitions(conn, START + WEEK)
        assert await _children(conn) == ["20260302", "20260309", "20260316"]
        await ensure_partitions(conn, START - 3 * WEEK, START - 2 * WEEK)
        assert await _children(conn) == ["20260209", "20260216", "20260223", "20260302", "20260309", "20260316"]


async def test_concurrent_processes_create_partitions_once(database: Database) -> None:
    async def ensure() -> None:
        async with database.connection() as conn:
            await ensure_partitions(conn, START)

    await asyncio.gather(*(ensure() for _ in range(6)))
    async with database.connection() as conn:
        assert await _children(conn) == ["20260302", "20260309"]


async def test_readers_and_writers_continue_while_a_partition_is_created_or_dropped(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
    async with database.transaction() as busy, database.connection() as conn:
        await store.insert_snapshots(busy, [make_snapshot("one", START, "10")])
        async with asyncio.timeout(5):
            await ensure_partitions(conn, START + WEEK)
            await store.insert_snapshots(conn, [make_snapshot("two", START, "10")])
            assert await store.select_variant_hours(conn, START) == []


async def test_only_entirely_older_partitions_are_dropped(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + WEEK)
        assert await drop_partitions_before(conn, datetime(2026, 3, 8, 23, 59, tzinfo=UTC)) == []
        dropped = await drop_partitions_before(conn, datetime(2026, 3, 9, tzinfo=UTC))
        assert dropped == [f"{table}_20260302" for table in PARTITIONED_TABLES]
        assert await drop_partitions_before(conn, datetime(2026, 3, 9, tzinfo=UTC)) == []
        assert await _children(conn) == ["20260309", "20260316"]
        assert await conn.fetchval("SELECT to_regclass('portfolio_snapshots_20260302')") is None


async def test_a_detached_partition_is_dropped_later(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        await conn.execute(DETACH)
        assert "portfolio_snapshots_20260302" in await drop_partitions_before(conn, START + 2 * WEEK)
        assert await conn.fetchval("SELECT to_regclass('portfolio_snapshots_20260302')") is None


async def test_two_processes_may_drop_at_once(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + 8 * WEEK)

    async def drop() -> list[str]:
        async with database.connection() as conn:
            return await drop_partitions_before(conn, START + 7 * WEEK)

    await asyncio.gather(drop(), drop(), drop())
    async with database.connection() as conn:
        await drop_partitions_before(conn, START + 7 * WEEK)
        assert await _children(conn) == ["20260420", "20260427", "20260504"]


async def test_the_next_run_makes_up_for_a_deadlocked_drop(database: Database) -> None:
    async with database.connection() as conn, database.connection() as other:
        await ensure_partitions(conn, START)

        async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = asyncio.create_task(work)
            while not await other.fetchval(SELECT_IS_WAITING, conn.get_server_pid()):
                assert not task.done()
            return task

        with suppress(Unavailable):  # one of the two gets the deadlock: the drop, which has waited longer
            async with database.transaction() as reader:
                await reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                await reader.execute("SET LOCAL deadlock_timeout = '5s'")
                await reader.execute("LOCK TABLE ONLY portfolio_snapshots IN ACCESS SHARE MODE; SELECT 1")
                detaching = await begun(conn.execute(DETACH))
                await other.execute("SELECT pg_cancel_backend($1)", conn.get_server_pid())
                with pytest.raises(asyncpg.QueryCanceledError):
                    await detaching
                dropping = await begun(drop_partitions_before(conn, START + 2 * WEEK))
                await reader.execute("LOCK TABLE portfolio_snapshots_20260302")
        dropped = await dropping
        dropped += await drop_partitions_before(conn, START + 2 * WEEK)
        assert sorted(dropped) == sorted(
            f"{table}_{week}" for table in PARTITIONED_TABLES for week in ("20260302", "20260309")
        )
