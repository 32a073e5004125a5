"""Commands on a streaming replica: they see the service on its primary, make a backup, and change nothing."""

import asyncio
import re
from pathlib import Path

import pytest
from support.records import add_model
from support.replication import replicated

from trader.__main__ import main
from trader.database.embedded import dumps
from trader.database.leadership import LeaderLock
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.exchange.sql.halts import select_halts

LEADER = "https://leader.example"
CHANGES = (
    ("halt",),
    ("resume",),
    ("flatten",),
    ("accounts", "reset", "ada"),
    ("accounts", "remove", "ada"),
    ("models", "pause", "ada"),
    ("models", "resume", "ada"),
)
MODELS_FILE = """
[[models]]
id = "new"
variant = "Contrarian"
provider = "rules"
router_model = "rules/contrarian"
"""


@pytest.mark.processes
async def test_a_replica_reports_the_service_on_its_primary_and_stays_unchanged(
    open_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", "0")  # so that no service on this machine is asked
    async with replicated(open_folder) as cluster:
        database = await Database.connect(cluster.dsn, size=1)
        await apply_schema(database)
        async with database.connection() as conn:
            await add_model(conn, "ada")
            await conn.execute(
                "INSERT INTO service_state (market_identity, trading_mode, heartbeat_at, schedulers)"
                " VALUES ('synthetic:0', 'simulated', now(), $1)",
                {"tradeExecutor": True},
            )
        await database.close()
        replica = await cluster.add_replica()
        assert await asyncio.to_thread(main, ["status", "--database-url", replica.dsn]) == 0
        assert "(a replica, read-only), the service is running" in capsys.readouterr().err
        lock = LeaderLock(replica.dsn)
        assert not await lock.try_acquire()
        await lock.release()
        await dumps.dump(dumps.libpq_address(replica.dsn), 15, open_folder / "a.dump")
        rows = await dumps.read_rows(open_folder / "a.dump", "models")
        assert [model["id"] for model in rows["models"]] == ["ada"]
        monkeypatch.setenv("LEADER_URL", LEADER)
        file = open_folder / "models.toml"
        file.write_text(MODELS_FILE, encoding="utf-8")
        for words in (*CHANGES, ("models", "add", str(file))):
            assert await asyncio.to_thread(main, [*words, "--database-url", replica.dsn]) == 1
            said = capsys.readouterr()
            assert "is a read-only replica: nothing was changed." in said.err, words
            assert LEADER in said.err
            assert not said.out


@pytest.mark.parametrize("words", CHANGES)
async def test_a_reader_changes_its_leaders_database_only_if_it_is_named(
    words: tuple[str, ...],
    database: Database,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with database.connection() as conn:
        await add_model(conn, "ada")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"ROLE=reader\nDATABASE_URL={dsn}\nLEADER_URL={LEADER}\n", encoding="utf-8")
    assert await asyncio.to_thread(main, words) == 1
    said = capsys.readouterr().err
    assert (
        f"ROLE=reader only reads: nothing was changed. Run this command on the machine of the leader, {LEADER}" in said
    )
    async with database.connection() as conn:
        assert not await select_halts(conn)
    if words[0] == "models":
        assert await asyncio.to_thread(main, [*words, "--database-url", dsn]) == 0


async def test_a_read_only_database_user_gets_a_clear_error(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with database.connection() as conn:
        name = f"only_reads_{await conn.fetchval('SELECT oid FROM pg_database WHERE datname = current_database()')}"
        await conn.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'p' IN ROLE pg_read_all_data")
    try:
        url = re.sub(r"//[^/@]*@", f"//{name}:p@", dsn)
        assert await asyncio.to_thread(main, ["halt", "--database-url", url]) == 1
        wanted = (
            "trader: The database user lacks the privileges that this command needs: permission denied for table halts."
        )
        assert capsys.readouterr().err.splitlines()[-1] == wanted
    finally:
        async with database.connection() as conn:
            await conn.execute(f"DROP ROLE {name}")
