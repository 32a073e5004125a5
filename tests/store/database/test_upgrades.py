"""A database outlives the program that made it: upgrades keep the rows, and backups bring them back."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import astuple
from support.extent import runs_all
from support.records import HOUR, START, add_invocation, add_run, add_trade, id_of, make_run, make_snapshot

from trader.commands.backup import restore_file
from trader.domain.models import VariantId
from trader.embedded import dumps
from trader.services.exchange.audit import audit
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.database.schema import MIGRATIONS, SCHEMA_VERSION, apply_schema, schema_text
from trader.store.portfolio.season import upsert_all_variant_hours
from trader.store.portfolio.snapshots import insert_snapshots

# Everything that a schema is made of, in words that do not depend on the order in which it was made.
PICTURES = {
    "columns": """
        SELECT relname, attname, atttypid::regtype::text, attnotnull, pg_get_expr(adbin, adrelid)
        FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relname !~ '_[0-9]{8}$' """,
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text !~ '_[0-9]{8}$' """,
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' AND indexname !~ '_[0-9]{8}'",
    "functions": "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
    "triggers": "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal",
    "types": "SELECT enumlabel FROM pg_enum ORDER BY enumsortorder",
}
TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY relname
"""

# The functions of the store write the columns of this version, which earlier ones do not have.
INSERT_MODEL = """
INSERT INTO models (id, name, variant, provider, router_model_name, created_at)
VALUES ($1, $1, $2::text::variant_id, 'rules', 'rules/x', $3)
"""
INSERT_INVOCATION = """
INSERT INTO invocations (id, model_id, status, failure_reason, started_at, finished_at)
VALUES ($1, $2, $3, $4, $5, $5)
"""

SPEND = "UPDATE invocations SET input_tokens = 1000, output_tokens = 50, cost_usd = 0.003 WHERE status = 'completed'"

INSERT_SNAPSHOT = """
INSERT INTO portfolio_snapshots (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at)
VALUES ($1, $2, $3, $4, $5, $6)
"""
INSERT_HOURS = """
INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
SELECT account_id, date_trunc('hour', created_at, 'UTC'), run_id, sum(net_portfolio), count(*),
       (array_agg(net_portfolio ORDER BY created_at DESC))[1], max(created_at)
FROM portfolio_snapshots GROUP BY 1, 2, 3
"""
"""As a service of before wrote them, without what later versions add."""

ENTRANTS_SINCE = 5
"""The version that names the entrant of each invocation; those of before become number 0."""

Rows = dict[str, list[dict[str, Any]]]


async def _picture(database: Database) -> dict[str, set[str]]:
    async with database.connection() as conn:
        return {name: {str(tuple(row)) for row in await conn.fetch(query)} for name, query in PICTURES.items()}


async def _rows(database: Database) -> Rows:
    async with database.connection() as conn:
        tables = [row["relname"] for row in await conn.fetch(TABLES)]
        return {
            table: [row[0] for row in await conn.fetch(f"SELECT to_jsonb(t) FROM {table} t ORDER BY t::text")]
            for table in tables
        }


async def _fill(database: Database) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + timedelta(days=20))
        for name, variant in (("one", VariantId.APEX), ("two", VariantId.SOVEREIGN)):
            await conn.execute(INSERT_MODEL, name, variant.value, START)
            await add_run(conn, name, make_run(name))
            for hour in range(30):
                await add_trade(conn, name, START + hour * HOUR, label=hour)
                at = START + hour * HOUR
                await _add_old_invocation(conn, name, at, reason="it broke" if hour % 7 == 0 else None)
            values = [make_snapshot(name, START + n * HOUR / 4, Decimal(10_000 + n)) for n in range(800)]
            await conn.executemany(INSERT_SNAPSHOT, [astuple(value)[:-1] for value in values])
        await conn.execute(INSERT_HOURS)
        await upsert_all_variant_hours(conn)
        await add_run(conn, "one", make_run("one", number=2, at=START + 40 * HOUR))
        await _add_old_invocation(conn, "one", START + 41 * HOUR)
        await conn.execute(SPEND)


async def _add_old_invocation(conn: Any, model_id: str, at: datetime, reason: str | None = None) -> None:
    status = "failed" if reason else "completed"
    await conn.execute(INSERT_INVOCATION, id_of("invocation", model_id, at), model_id, status, reason, at)


async def _make_old(database: Database, version: int) -> None:
    """Take the database back to an earlier version of the schema, empty."""
    async with database.connection() as conn:
        await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await conn.execute(schema_text(version))


def test_every_version_has_its_step_and_its_schema_on_record() -> None:
    assert sorted(MIGRATIONS) == list(range(2, SCHEMA_VERSION + 1))
    for version in range(1, SCHEMA_VERSION):  # before a change of the schema the one before is kept
        assert f"VALUES ({version})" in schema_text(version)


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
async def test_an_upgrade_keeps_every_row_and_makes_the_schema_of_this_version(
    database: Database, version: int
) -> None:
    fresh = await _picture(database)
    await _make_old(database, version)
    await _fill(database)
    before = await _rows(database)
    await apply_schema(database)
    assert await _picture(database) == fresh
    after = await _rows(database)
    assert after.pop("schema_version")[0]["version"] == SCHEMA_VERSION
    for table, rows in before.items():
        if table != "schema_version":
            kept = [{key: row[key] for key in rows[0]} for row in after[table]] if rows else after[table]
            assert kept == rows, table
    async with database.connection() as conn:
        if version < ENTRANTS_SINCE:
            unknown = await conn.fetch("SELECT model_id, number, fingerprint, began_at FROM entrants ORDER BY model_id")
            assert [tuple(row) for row in unknown] == [("one", 0, None, START), ("two", 0, None, START)]
            assert await conn.fetchval("SELECT array_agg(DISTINCT entrant) FROM invocations") == [0]
        assert await _same_costs(conn)
        await add_invocation(conn, "two", START + 50 * HOUR)
        await conn.execute("UPDATE invocations SET cost_usd = 1 WHERE started_at = $1", START + 50 * HOUR)
        assert await _same_costs(conn), "the triggers go on from there"


async def _same_costs(conn: Any) -> bool:
    """Whether the counters are what the invocations add up to."""
    counted = await conn.fetchrow("SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM invocation_counts")
    added = await conn.fetchrow("SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM invocations")
    assert added[2] > 0
    return bool(counted == added)


async def test_two_processes_upgrade_once(dsn: str, database: Database, caplog: pytest.LogCaptureFixture) -> None:
    await _make_old(database, 1)
    await _fill(database)
    others = [await Database.connect(dsn, size=1) for _ in range(3)]
    await asyncio.gather(*(apply_schema(other) for other in others))
    for other in others:
        await other.close()
    said = [record.getMessage() for record in caplog.records if record.name == "trader.store"]
    assert said == [f"the database was upgraded from schema version 1 to {SCHEMA_VERSION}"]
    async with database.connection() as conn:
        assert await _same_costs(conn)


async def test_an_upgrade_that_fails_leaves_the_database_as_it_was(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _make_old(database, 1)
    await _fill(database)
    before = await _rows(database), await _picture(database)
    monkeypatch.setitem(MIGRATIONS, 2, MIGRATIONS[2] + "; SELECT 1 / 0")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await apply_schema(database)
    assert (await _rows(database), await _picture(database)) == before


async def test_a_database_of_this_version_is_not_locked(database: Database) -> None:
    async with database.transaction() as conn:
        await conn.execute("LOCK TABLE orders, models, fills IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(5):
            await apply_schema(database)


@pytest.mark.parametrize("version", [1, *([5, SCHEMA_VERSION - 1] if runs_all() else []), SCHEMA_VERSION])
async def test_a_backup_brings_everything_back(dsn: str, database: Database, tmp_path: Path, version: int) -> None:
    if version < SCHEMA_VERSION:
        await _make_old(database, version)
    await _fill(database)
    await dumps.dump(dumps.libpq_address(dsn), 15, tmp_path / "trader.dump")
    await apply_schema(database)
    wanted = await _rows(database), await _picture(database)
    async with database.connection() as conn:
        await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await restore_file(tmp_path / "trader.dump", dsn, version)
    rows, picture = await _rows(database), await _picture(database)
    for each in (rows, wanted[0]):
        del each["schema_version"][0]["applied_at"]
    assert (rows, picture) == wanted
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + timedelta(days=40))
        assert await insert_snapshots(conn, [make_snapshot("one", START + timedelta(days=30), "1")]) == 1
        assert await _same_costs(conn)
    assert (await audit(database)).runs == 3
