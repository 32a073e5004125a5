"""The whole schema: applied again, concurrently, by an older program; and what its constraints refuse."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from trader.core.errors import StartError
from trader.database.embedded.binaries import system_binaries
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Connection, Database
from trader.database.schema import apply_schema, schema_path, schema_version

SNAPSHOT = """
SELECT relname, relkind, attname, atttypid::regtype::text, attnotnull, pg_get_expr(adbin, adrelid)
FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0
LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE relnamespace = 'public'::regnamespace
ORDER BY relname, attnum
"""
CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2
"""


async def picture(database: Database) -> list[list[asyncpg.Record]]:
    async with database.connection() as conn:
        return [await conn.fetch(SNAPSHOT), await conn.fetch(CONSTRAINTS)]


async def test_applying_again_changes_nothing(database: Database) -> None:
    before = await picture(database)
    assert len(before[0]) > 100
    async with database.transaction() as conn:
        await conn.execute("INSERT INTO accounts VALUES ('kept', 7, now(), now())")
    await apply_schema(database)
    assert await picture(database) == before
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT sequence FROM accounts") == 7
        assert await conn.fetchval("SELECT version FROM schema_version") == schema_version()


async def test_two_processes_may_apply_it_at_once(dsn: str, database: Database) -> None:
    finished = await picture(database)
    async with database.connection() as conn:
        await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    others = [await Database.connect(dsn, size=1) for _ in range(4)]
    await asyncio.gather(*(apply_schema(other) for other in others))
    for other in others:
        await other.close()
    assert await picture(database) == finished


async def test_database_of_a_newer_version_is_refused_and_left_unchanged(database: Database) -> None:
    async with database.connection() as conn:
        await conn.execute("UPDATE schema_version SET version = $1", schema_version() + 1)
        await conn.execute("DROP TABLE fills CASCADE")
    with pytest.raises(StartError, match=f"schema version {schema_version() + 1}, made by a newer version"):
        await apply_schema(database)
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT to_regclass('fills')") is None


async def test_user_without_privileges_gets_a_clear_error(dsn: str, database: Database) -> None:
    async with database.connection() as conn:
        await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        name = f"reader_{await conn.fetchval('SELECT oid FROM pg_database WHERE datname = current_database()')}"
        await conn.execute(f"CREATE ROLE {name}; GRANT USAGE ON SCHEMA public TO {name}")
    try:
        reader = await Database.connect(f"{dsn}{'&' if '?' in dsn else '?'}role={name}", size=1)
        with pytest.raises(StartError, match="may not create the tables: permission denied"):
            await apply_schema(reader)
        await reader.close()
    finally:
        async with database.connection() as conn:
            await conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_version_of_the_program_matches_the_file() -> None:
    written = re.search(r"INSERT INTO schema_version \(version\) VALUES \((\d+)\)", schema_path().read_text())
    assert written
    assert int(written.group(1)) == schema_version()


RUN = "00000000-0000-0000-0000-000000000001"
POSITION = {
    "id": "'00000000-0000-0000-0000-00000000000a'", "account_id": "'one'", "run_id": f"'{RUN}'", "symbol": "'BTC'",
    "side": "'LONG'", "status": "'OPEN'", "quantity": "1", "entry_notional": "100", "margin": "10", "leveraged": "true",
    "fees": "1", "funding": "-2", "opened_at": "'2025-01-01Z'", "funded_until": "'2025-01-01Z'",
}  # fmt: skip
CLOSED = {
    "status": "'CLOSED'", "exit_notional": "110", "gross_pnl": "10", "net_pnl": "7", "close_reason": "'order'",
    "closed_at": "'2025-01-02Z'",
}  # fmt: skip


@pytest.fixture
async def books(database: Database) -> Database:
    """A database in which account `one` has its first run."""
    async with database.connection() as conn:
        await conn.execute(f"""
            INSERT INTO accounts (id, created_at, changed_at) VALUES ('one', now(), now()), ('two', now(), now());
            INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
            VALUES ('{RUN}', 'one', 1, 10000, 'USDT', '2025-01-01Z')""")
    return database


async def insert_order(conn: Connection, **columns: str) -> None:
    row = POSITION | columns
    await conn.execute(f"INSERT INTO orders ({', '.join(row)}) VALUES ({', '.join(row.values())})")


async def test_positions_and_closed_trades_fit(books: Database) -> None:
    async with books.connection() as conn:
        await insert_order(conn)
        await insert_order(conn, id="gen_random_uuid()", symbol="'ETH'")
        await insert_order(conn, id="gen_random_uuid()", parent_id=POSITION["id"], **CLOSED)
        short = CLOSED | {"side": "'SHORT'", "gross_pnl": "-10", "net_pnl": "-13"}
        await insert_order(conn, id="gen_random_uuid()", **short)
        assert await conn.fetchval("SELECT count(*) FROM orders") == 4


CONTRADICTORY = [
    {"quantity": "0"},
    {"quantity": "-1"},
    {"margin": "0"},
    {"side": "'BUY'"},
    {"status": "'DONE'"},
    {"symbol": "NULL"},
    {"confidence": "101"},
    {"stop": "0"},
    {"closing": "'order'"},
    {"account_id": "'two'"},
    {"run_id": "gen_random_uuid()"},
    {"parent_id": POSITION["id"]},
    {"closed_at": "'2025-01-02Z'"},
    {"net_pnl": "7"},
    CLOSED | {"closed_at": "'2024-12-31Z'"},
    CLOSED | {"close_reason": "NULL"},
    CLOSED | {"exit_notional": "NULL"},
    CLOSED | {"gross_pnl": "11", "net_pnl": "8"},
    CLOSED | {"net_pnl": "8"},
    CLOSED | {"side": "'SHORT'"},
    CLOSED | {"closing": "'stop'"},
    {"closing_at": "now()"},
]


async def test_contradictory_orders_are_refused(books: Database) -> None:
    accepted = []
    async with books.connection() as conn:
        for columns in CONTRADICTORY:
            with suppress(asyncpg.IntegrityConstraintViolationError):
                async with conn.transaction():
                    await insert_order(conn, **columns)
                    accepted.append(columns)
    assert accepted == []


UNIQUE = {
    "INSERT INTO runs VALUES (gen_random_uuid(), 'two', {}, 1, 'USDT', now())": "runs_one_current",
    f"INSERT INTO order_requests VALUES (gen_random_uuid(), 'one', '{RUN}', 'c', '{{{{}}}}', now())": (
        "order_requests_account_id_client_order_id_key"
    ),
    "INSERT INTO service_state VALUES (true, 'synthetic:{}', 'simulated')": "service_state_pkey",
}


async def test_unique_rows_cannot_repeat(books: Database) -> None:
    async with books.connection() as conn:
        for statement, constraint in UNIQUE.items():
            await conn.execute(statement.format(1))
            with pytest.raises(asyncpg.UniqueViolationError) as caught:
                await conn.execute(statement.format(2))
            assert caught.value.constraint_name == constraint
        await insert_order(conn)
        with pytest.raises(asyncpg.UniqueViolationError):
            await insert_order(conn, id="gen_random_uuid()", side="'SHORT'")


async def test_system_postgres_accepts_the_schema_too(open_folder: Path) -> None:
    """The oldest supported version is the one that most machines ship with."""
    binaries = list(system_binaries())
    if not binaries:
        pytest.skip("this machine has no PostgreSQL of its own")
    async with EmbeddedPostgres(open_folder, durable=False, binaries=binaries[-1]) as running:
        database = await Database.connect(await running.ensure_database("trader"), size=1)
        await apply_schema(database)
        await apply_schema(database)
        await database.close()
