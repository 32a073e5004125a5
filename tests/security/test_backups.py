"""A backup is data: whatever a file says, it runs nothing, and only rows that the schema allows come out of it."""

import shutil
import stat
import subprocess
from pathlib import Path

import asyncpg
import pytest
from support.records import HOUR, START, add_model, add_trade
from support.tables import digests

from trader.commands.backup import restore_file
from trader.embedded import dumps
from trader.embedded.binaries import wheel_binaries
from trader.errors import StartError
from trader.store.database.pool import Database
from trader.store.database.schema import SCHEMA_VERSION

RUNS = """
CREATE OR REPLACE FUNCTION {name}(number integer) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
    COPY (SELECT 1) TO PROGRAM 'touch {marker}';
    RETURN true;
END $$
"""


@pytest.fixture
async def source(database: Database) -> Database:
    async with database.connection() as conn:
        await add_model(conn, "ada")
        await add_trade(conn, "ada", START + HOUR)
    return database


@pytest.fixture
def marker(open_folder: Path) -> Path:
    """A file that every user of the machine could make, and that a program which should not run makes."""
    open_folder.chmod(0o777)
    return open_folder / "ran"


async def dumped(dsn: str, folder: Path) -> Path:
    await dumps.dump(dumps.libpq_address(dsn), 15, folder / "a.dump")
    return folder / "a.dump"


async def restored(file: Path, dsn: str) -> None:
    await restore_file(file, dsn, SCHEMA_VERSION)


async def test_a_function_of_the_file_is_refused_by_its_name(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, marker: Path
) -> None:
    async with source.connection() as conn:
        await conn.execute(RUNS.format(name="evil", marker=marker))
        await conn.execute("ALTER TABLE models ADD CHECK (evil(1)) NOT VALID")
    file = await dumped(dsn, tmp_path)
    with pytest.raises(StartError, match=r"the function evil\(integer\), which no database of trader has"):
        await restored(file, empty_dsn)
    assert not marker.exists()
    assert await digests(empty_dsn) == {}


async def test_nothing_of_a_file_is_run_even_under_a_known_name(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, marker: Path
) -> None:
    psql = f"'\n\\! touch {marker}\n\\.\nDROP TABLE models;\n'"
    async with source.connection() as conn:
        await conn.execute(RUNS.format(name="count_invocations", marker=marker))
        await conn.execute("ALTER TABLE models ADD CONSTRAINT models_pkey2 CHECK (count_invocations(1)) NOT VALID")
        await conn.execute("ALTER TABLE models DROP CONSTRAINT models_pkey CASCADE")
        await conn.execute("ALTER TABLE models RENAME CONSTRAINT models_pkey2 TO models_pkey")
        await conn.execute(f"ALTER TABLE models ALTER COLUMN logo SET DEFAULT {psql}")
        await conn.execute(f"COMMENT ON TABLE models IS {psql}")
    before = await digests(dsn)
    await restored(await dumped(dsn, tmp_path), empty_dsn)
    assert not marker.exists()
    assert await digests(empty_dsn) == before
    conn = await asyncpg.connect(empty_dsn)
    try:
        assert not await conn.fetchval("SELECT count(*) FROM pg_proc WHERE prosrc LIKE '%PROGRAM%'")
        assert await conn.fetchval("SELECT contype FROM pg_constraint WHERE conname = 'models_pkey'") == b"p"
    finally:
        await conn.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("SET session_replication_role = replica; DELETE FROM models; DELETE FROM accounts", "foreign key"),
        ("ALTER TABLE orders ADD COLUMN more text", 'column "more" of relation "orders" does not exist'),
        ("CREATE TABLE portfolio_snapshots_20250101 (id text)", "which no database of trader has"),
        ("CREATE TABLE portfolio_snapshots_99999999 (id text)", "which no database of trader has"),
        ("CREATE VIEW accounts_of_mine AS SELECT 1 AS one", "the view accounts_of_mine, which no database"),
        ("DROP TABLE fills CASCADE; CREATE VIEW fills AS SELECT 1 AS id", None),
    ],
)
async def test_only_rows_that_the_schema_allows_are_restored(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, change: str, reason: str | None
) -> None:
    async with source.connection() as conn:
        await conn.execute(change)
    file = await dumped(dsn, tmp_path)
    if reason is None:  # a view has no rows, and what it says is not executed
        await restored(file, empty_dsn)
        return
    with pytest.raises(StartError, match=reason):
        await restored(file, empty_dsn)
    assert await digests(empty_dsn) == {}


async def test_rows_that_are_statements_are_refused(source: Database, dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    binaries = wheel_binaries()
    assert binaries is not None
    command = [binaries.program("pg_dump"), "--format=custom", "--inserts", "--file", str(tmp_path / "a.dump"), dsn]
    subprocess.run(command, check=True)
    with pytest.raises(StartError, match="has no rows to copy of"):
        await restored(tmp_path / "a.dump", empty_dsn)
    assert await digests(empty_dsn) == {}


async def test_a_backup_is_readable_by_its_owner_only(source: Database, dsn: str, tmp_path: Path) -> None:
    file = await dumped(dsn, tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    dumps.add_checksum(file)
    assert dumps.has_checksum(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(shutil.which("age") is None, reason="needs the program age")
async def test_an_encrypted_backup_is_opened_with_its_key_alone(tmp_path: Path) -> None:
    subprocess.run(["age-keygen", "-o", tmp_path / "key"], capture_output=True, check=True)
    recipient = (tmp_path / "key").read_text().partition("public key: ")[2].split()[0]
    plain = tmp_path / "plain"
    plain.write_bytes(b"conversations")
    await dumps.encrypt(plain, recipient, tmp_path / "a.dump.age")
    assert stat.S_IMODE((tmp_path / "a.dump.age").stat().st_mode) == 0o600
    assert b"conversations" not in (tmp_path / "a.dump.age").read_bytes()
    opened = subprocess.run(
        ["age", "--decrypt", "-i", tmp_path / "key", tmp_path / "a.dump.age"], capture_output=True, check=True
    )
    assert opened.stdout == b"conversations"
    with pytest.raises(StartError, match="could not be encrypted: age"):
        await dumps.encrypt(plain, "age1nobody", tmp_path / "b.dump.age")
