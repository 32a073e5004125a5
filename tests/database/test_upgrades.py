"""A database outlives the program that created it: upgrades keep its rows, and backups restore them."""

import asyncio
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import asdict
from support.next_version import use_next_version
from support.records import (
    HOUR,
    START,
    add_invocation,
    add_model,
    add_run,
    add_trade,
    make_model,
    make_run,
    make_snapshot,
)

from trader.agents.domain.models import Model
from trader.agents.sql import models as models_store
from trader.agents.sql.models import upsert_model
from trader.commands.backup import restore_file
from trader.core.variant_id import VariantId
from trader.database import schema
from trader.database.embedded import dumps
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.database.schema import MIGRATIONS, apply_schema, open_database, schema_text, schema_version
from trader.portfolio.audit import audit
from trader.portfolio.sql.snapshots import insert_snapshots

# Everything that makes up a schema, described independently of the order of its creation.
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

SPEND = "UPDATE invocations SET input_tokens = 1000, output_tokens = 50, cost_usd = 0.003 WHERE status = 'completed'"

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
            await add_model(conn, name, variant)
            for hour in range(8):
                await add_trade(conn, name, START + hour * HOUR, label=hour)
                await add_invocation(conn, name, START + hour * HOUR, "completed" if hour % 7 else "failed")
            assert await insert_snapshots(
                conn, [make_snapshot(name, START + n * HOUR * 2, Decimal(10_000 + n)) for n in range(100)]
            )
        await add_run(conn, "one", make_run("one", number=2, at=START + 40 * HOUR))
        await add_invocation(conn, "one", START + 41 * HOUR)
        await conn.execute(SPEND)


async def _new(dsn: str) -> dict[str, set[str]]:
    """Return what this version's schema consists of in an empty database."""
    database = await Database.connect(dsn, size=1)
    await apply_schema(database)
    try:
        return await _picture(database)
    finally:
        await database.close()


def test_every_version_has_its_step_and_the_preceding_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = use_next_version(tmp_path, monkeypatch)
    assert sorted(MIGRATIONS) == list(range(2, version + 1))
    for before in range(1, version):
        assert f"VALUES ({before})" in schema_text(before)


async def test_an_upgrade_keeps_every_row_and_produces_this_versions_schema(
    database: Database, empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _fill(database)
    before = await _rows(database)
    version = use_next_version(tmp_path, monkeypatch)
    await apply_schema(database, backup="before.dump")
    assert await _picture(database) == await _new(empty_dsn)
    after = await _rows(database)
    ((applied,), _) = after.pop("schema_version"), before.pop("schema_version")
    assert (applied["version"], applied["backup"]) == (version, "before.dump")
    assert after.pop("reviews") == []
    for row in after["invocation_counts"]:
        assert row.pop("total_tokens") == row["input_tokens"] + row["output_tokens"] > 0
    assert after == before
    async with database.connection() as conn:
        await add_invocation(conn, "two", START + 50 * HOUR)
        await conn.execute("UPDATE invocations SET cost_usd = 1 WHERE started_at = $1", START + 50 * HOUR)
        assert await _same_costs(conn), "the triggers continue from there"


async def _same_costs(conn: Any) -> bool:
    """Return whether the counters match the sums over the invocations."""
    counted = await conn.fetchrow("SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM invocation_counts")
    added = await conn.fetchrow("SELECT sum(input_tokens), sum(output_tokens), sum(cost_usd) FROM invocations")
    assert added[2] > 0
    return bool(counted == added)


async def test_two_processes_upgrade_only_once(
    dsn: str, database: Database, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = use_next_version(tmp_path, monkeypatch)
    others = [await Database.connect(dsn, size=1) for _ in range(3)]
    await asyncio.gather(*(apply_schema(other) for other in others))
    for other in others:
        await other.close()
    said = [record.getMessage() for record in caplog.records if record.name == "trader.store"]
    assert said == [f"the database was upgraded from schema version {version - 1} to {version}"]


async def test_a_failed_upgrade_leaves_the_database_unchanged(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _fill(database)
    before = await _rows(database), await _picture(database)
    version = use_next_version(tmp_path, monkeypatch)
    monkeypatch.setitem(MIGRATIONS, version, MIGRATIONS[version] + "; SELECT 1 / 0")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await apply_schema(database)
    assert (await _rows(database), await _picture(database)) == before


async def test_a_database_of_this_version_is_not_locked(database: Database) -> None:
    async with database.transaction() as conn:
        await conn.execute("LOCK TABLE orders, models, fills IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(5):
            await apply_schema(database)


@pytest.mark.parametrize("is_earlier", [False, True], ids=["of this version", "of the version before"])
async def test_a_backup_restores_everything(
    dsn: str, database: Database, empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_earlier: bool
) -> None:
    await _fill(database)
    version, file = schema_version(), tmp_path / "trader.dump"
    await dumps.dump(dumps.libpq_address(dsn), 15, file)
    if is_earlier:
        (tmp_path / "schemas").mkdir()
        use_next_version(tmp_path / "schemas", monkeypatch)
        await apply_schema(database)
    wanted = await _rows(database), await _picture(database)
    await restore_file(file, empty_dsn, version)
    async with open_database(empty_dsn) as restored:
        rows, picture = await _rows(restored), await _picture(restored)
        for each in (rows, wanted[0]):
            del each["schema_version"][0]["applied_at"]
        assert (rows, picture) == wanted
        async with restored.connection() as conn:
            await ensure_partitions(conn, START, START + timedelta(days=40))
            assert await insert_snapshots(conn, [make_snapshot("one", START + timedelta(days=30), "1")]) == 1
            assert await _same_costs(conn)
        assert (await audit(restored)).runs == 3


class MoreVariants(StrEnum):
    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    NOMAD = "Nomad"
    SOVEREIGN = "Sovereign"


async def test_a_start_adds_a_new_variant_without_a_migration(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    nomad = {**asdict(make_model("five")), "variant": MoreVariants.NOMAD}
    async with database.connection() as conn:
        with pytest.raises(asyncpg.ForeignKeyViolationError, match="models_variant_fkey"):
            await upsert_model(conn, Model(**nomad))
        monkeypatch.setattr(schema, "VariantId", MoreVariants)
        monkeypatch.setattr(models_store, "VariantId", MoreVariants)
        await apply_schema(database)
        await upsert_model(conn, Model(**nomad))
        assert [model.variant for model in await models_store.select_models(conn)] == ["Nomad"]
        places = await conn.fetch("SELECT id FROM variants ORDER BY place")
        assert [row["id"] for row in places] == list(MoreVariants)
