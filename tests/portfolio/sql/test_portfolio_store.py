"""The rollups give the same answers as plain SQL and plain Python over the raw rows."""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records import HOUR, MINUTE, START, add_model, add_run, equity_values, make_model, make_run, make_snapshot

from trader.agents.sql.models import upsert_model
from trader.core.clock import floor_time
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.portfolio.domain.histories import Snapshot
from trader.portfolio.sql import snapshots as store

ACCOUNTS = ("one", "two", "three", "late", "manual")
SPAN_MINUTES = 30 * 60

on_a_database = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

snapshots_of_any = st.builds(
    lambda account, minute, millisecond, value, number, leverage: msgspec.structs.replace(
        make_snapshot(account, START + minute * MINUTE + timedelta(milliseconds=millisecond), value, number=number),
        leverage=leverage,
    ),
    account=st.sampled_from(ACCOUNTS),
    minute=st.integers(0, SPAN_MINUTES),
    millisecond=st.sampled_from([0, 1, 59_999]),
    value=st.decimals("0", "1000000", places=10),
    number=st.integers(1, 2),
    leverage=st.sampled_from([0.5, 1.0, 3.0]),
)


class Move(NamedTuple):
    """Assigns a variant to a model, and adds the model if it does not exist."""

    model_id: str
    variant: VariantId


steps = st.lists(
    st.lists(snapshots_of_any, min_size=1, max_size=40)
    | st.builds(Move, st.sampled_from(ACCOUNTS[:-1]), st.sampled_from(VariantId)),
    min_size=1,
    max_size=8,
)


async def _play(conn: Connection, played: Iterable[Sequence[Snapshot] | Move]) -> None:
    for model_id in ACCOUNTS[:3]:
        await add_model(conn, model_id, VariantId.SOVEREIGN if model_id == "three" else VariantId.APEX)
    for account_id in ACCOUNTS[3:]:
        await add_run(conn, account_id, make_run(account_id))
    for step in played:
        if isinstance(step, Move):
            await upsert_model(conn, make_model(step.model_id, step.variant))
        else:
            await store.insert_snapshots(conn, step)


PLAIN_HISTORY = """
SELECT m.variant, date_trunc('hour', s.created_at, 'UTC'), trim_scale(round(avg(s.net_portfolio), 8))
FROM portfolio_snapshots s JOIN models m ON m.id = s.account_id
WHERE s.created_at >= $1
GROUP BY m.variant, 2
ORDER BY 2, m.variant
"""

PLAIN_HOURLY = """
SELECT account_id, date_trunc('hour', created_at, 'UTC') AS hour,
       (array_agg(run_id ORDER BY created_at DESC))[1] AS run_id, sum(net_portfolio) AS total, count(*) AS count,
       (array_agg(net_portfolio ORDER BY created_at DESC))[1] AS last, max(created_at) AS last_at,
       max(leverage) AS leverage
FROM portfolio_snapshots
GROUP BY account_id, hour
ORDER BY account_id, hour
"""


@on_a_database
@given(played=steps, minutes_back=st.integers(0, SPAN_MINUTES))
async def test_variant_hours_equal_the_averages_over_raw_rows(
    database: Database, played: list[list[Snapshot] | Move], minutes_back: int
) -> None:
    since = START + (SPAN_MINUTES - minutes_back) * MINUTE
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        rolled_back = conn.transaction()
        await rolled_back.start()
        try:
            await _play(conn, played)
            hours = [tuple(row) for row in await store.select_variant_hours(conn, since)]
            expected = [tuple(row) for row in await conn.fetch(PLAIN_HISTORY, since)]
            hourly = await conn.fetch("SELECT * FROM portfolio_hourly ORDER BY account_id, hour")
            plain = await conn.fetch(PLAIN_HOURLY)
        finally:
            await rolled_back.rollback()
    assert hours == expected
    columns = ("account_id", "hour", "run_id", "total", "count", "last", "last_at", "leverage")
    assert [[row[name] for name in columns] for row in hourly] == [[row[name] for name in columns] for row in plain]


@on_a_database
@given(
    given_snapshots=st.lists(snapshots_of_any, min_size=1, max_size=150),
    start=st.integers(-60, SPAN_MINUTES),
    minutes=st.integers(0, SPAN_MINUTES),
    bucket=st.sampled_from([MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, 24 * HOUR]),
    chosen=st.sets(st.sampled_from(ACCOUNTS)),
    slice_buckets=st.integers(1, 9),
)
async def test_histories_have_the_last_snapshot_of_each_bucket(
    database: Database,
    given_snapshots: list[Snapshot],
    start: int,
    minutes: int,
    bucket: timedelta,
    chosen: set[str],
    slice_buckets: int,
) -> None:
    """Only models have histories, not manual accounts. Curves carry a value over the next buckets for a while."""
    held = 65 * MINUTE
    first, last = START + start * MINUTE, START + (start + minutes) * MINUTE
    kept = {(each.account_id, each.created_at): each for each in reversed(given_snapshots)}
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        rolled_back = conn.transaction()
        await rolled_back.start()
        try:
            for each in given_snapshots:
                await store.insert_snapshots(conn, [each])
            for name in chosen:
                await upsert_model(conn, make_model(name))
            chunks = await store.select_history(conn, None, None, first, last, bucket, slice_buckets * bucket)
            grid = [floor_time(first, bucket)]
            while grid[-1] + bucket <= last:
                grid.append(grid[-1] + bucket)
            curves = await store.select_equity_curves(conn, None, None, grid[0], grid[-1], bucket, last, held)
        finally:
            await rolled_back.rollback()
    assert equity_values(chunks) == _last_of_buckets(kept.values(), chosen, first, last, bucket)
    assert {curve["id"]: curve["values"] for curve in map(msgspec.json.decode, curves)} == {
        name: [
            _value_at([each for each in kept.values() if each.account_id == name], start - held, start + bucket, last)
            for start in grid
        ]
        for name in chosen
    }


def _value_at(snapshots: Iterable[Snapshot], since: datetime, until: datetime, last: datetime) -> float | None:
    expected = [each for each in snapshots if since <= each.created_at < until and each.created_at <= last]
    if not expected:
        return None
    newest = max(expected, key=lambda each: each.created_at)
    return float(newest.net_portfolio.quantize(Decimal("0.01"), ROUND_HALF_UP))


def _last_of_buckets(
    snapshots: Iterable[Snapshot], chosen: set[str], first: datetime, last: datetime, bucket: timedelta
) -> list[tuple[str, Decimal, datetime]]:
    result = {}
    for each in sorted(snapshots, key=lambda snapshot: snapshot.created_at):
        if each.account_id in chosen and first <= each.created_at <= last:
            number = int(each.created_at.timestamp() // bucket.total_seconds())
            result[each.account_id, number] = each.account_id, each.net_portfolio, each.created_at
    return sorted(result.values(), key=lambda value: (value[2], value[0]))


async def test_an_existing_snapshot_counts_once(database: Database) -> None:
    first = [make_snapshot("one", START, "10"), make_snapshot("two", START, "20")]
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        await add_model(conn, "one")
        await add_model(conn, "two")
        assert await store.insert_snapshots(conn, first) == 2
        again = [make_snapshot("one", START, "77"), make_snapshot("two", START + MINUTE, "40")]
        assert await store.insert_snapshots(conn, again) == 1
        assert await store.select_variant_hours(conn, START) == [(VariantId.APEX, START, Decimal("23.33333333"))]


async def test_last_snapshots_are_from_the_newest_hour(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        for account_id in ("one", "silent"):
            await add_run(conn, account_id, make_run(account_id))
        late = make_snapshot("one", START + 3 * HOUR + 5 * MINUTE, "12", number=2)
        await store.insert_snapshots(conn, [make_snapshot("one", START, "11"), late])
        snapshots = await store.select_last_snapshots(conn)
    assert snapshots == {"one": store.LastSnapshot(late.run_id, late.created_at)}


async def test_run_hours_start_at_the_requested_hour(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        rows = [
            make_snapshot("one", START, "1"),
            make_snapshot("one", START + HOUR, "2", number=2),
            make_snapshot("one", START + 2 * HOUR, "3", number=2),
            make_snapshot("two", START, "4"),
        ]
        await store.insert_snapshots(conn, rows)
        asked = [("one", rows[1].run_id, START), ("two", rows[3].run_id, START + HOUR)]
        hours = await store.select_run_hours(conn, asked)
        assert await store.select_run_hours(conn, []) == []
    assert [(value.account_id, value.hour, value.last) for value in hours] == [
        ("one", START + HOUR, Decimal(2)),
        ("one", START + 2 * HOUR, Decimal(3)),
    ]


async def test_a_snapshot_must_add_up(database: Database) -> None:
    wrong = msgspec.structs.replace(make_snapshot("one", START, "10"), cash=Decimal(5))
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        with pytest.raises(Exception, match=r"portfolio_snapshots.*check"):
            await store.insert_snapshots(conn, [wrong])
        assert await conn.fetchval("SELECT count(*) FROM portfolio_hourly") == 0


async def test_concurrent_changes_of_models_and_snapshots_leave_exact_sums(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        for name in ("one", "two"):
            await add_model(conn, name)

    async def write(name: str) -> None:
        for minute in range(40):
            async with database.connection() as conn:
                await store.insert_snapshots(conn, [make_snapshot(name, START + minute * MINUTE, str(minute))])

    async def move() -> None:
        for number in range(20):
            async with database.connection() as conn:
                await upsert_model(conn, make_model("one", list(VariantId)[number % 4]))
                await upsert_model(conn, make_model("new", list(VariantId)[number % 3]))

    await asyncio.gather(write("one"), write("two"), write("new"), move())
    async with database.connection() as conn:
        hours = [tuple(row) for row in await store.select_variant_hours(conn, START)]
        assert hours == [tuple(row) for row in await conn.fetch(PLAIN_HISTORY, START)]


async def test_two_writers_of_the_same_hours_do_not_deadlock(database: Database) -> None:
    """A leader's last snapshots and its successor's first ones."""
    names = [f"m{number}" for number in range(30)]
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        for name in names:
            await add_model(conn, name)

    async def write(order: list[str], second: int) -> None:
        for minute in range(50):
            at = START + minute * MINUTE + timedelta(seconds=second)
            async with database.connection() as conn:
                await store.insert_snapshots(conn, [make_snapshot(name, at, str(minute + second)) for name in order])

    await asyncio.gather(write(names, 0), write(names[::-1], 1), write(names[::2], 2))
    async with database.connection() as conn:
        hourly = await conn.fetch("SELECT * FROM portfolio_hourly ORDER BY account_id, hour")
        plain = await conn.fetch(PLAIN_HOURLY)
        columns = ("account_id", "hour", "run_id", "total", "count", "last", "last_at", "leverage")
        assert [[row[name] for name in columns] for row in hourly] == [[row[name] for name in columns] for row in plain]
        hours = [tuple(row) for row in await store.select_variant_hours(conn, START)]
        assert hours == [tuple(row) for row in await conn.fetch(PLAIN_HISTORY, START)]
