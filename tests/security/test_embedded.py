"""The embedded server accepts its own service and no other process, and starts only in a folder that its user made."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from support.replication import admit

from trader.__main__ import main
from trader.core.errors import StartError
from trader.core.ownership import EMBEDDED_FOLDER, mark_made_here
from trader.database.embedded.binaries import choose_binaries
from trader.database.embedded.folders import server_account
from trader.database.embedded.server import EmbeddedPostgres

pytestmark = pytest.mark.processes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_process_of_the_servers_user_is_not_its_superuser(open_folder: Path) -> None:
    async with EmbeddedPostgres(open_folder / "server", durable=False) as server:
        account = server_account()
        assert account is not None
        user = account.pw_name
        dsn = await server.ensure_database("trader_test")
        conn = await asyncpg.connect(dsn)
        assert await conn.fetchval("SELECT current_user") == "trader"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute("COPY (SELECT 1) TO PROGRAM 'cat'")  # injected SQL cannot run programs
        await conn.close()
        psql = choose_binaries(server.data).readable_copy().program("psql")

        async def run_as(user: str) -> subprocess.CompletedProcess[str]:
            command = [psql, "--no-psqlrc", "-c", "SELECT 1", dsn]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, user=user, cwd="/"
            )

        if user != "nobody":  # it belongs to no other program
            assert "Permission denied" in (await run_as("nobody")).stderr
        refused = await run_as(user)
        assert refused.returncode == 2
        assert 'Peer authentication failed for user "trader"' in refused.stderr
        await admit(server.superuser_dsn(), user)
        assert (await run_as(user)).returncode == 0, "it is that rule that refused it"


RUNS = "restore_command = 'touch {}'\n"


async def start(folder: Path) -> None:
    async with EmbeddedPostgres(folder):
        pass


async def test_a_folder_starts_only_where_it_was_made_until_it_is_adopted(open_folder: Path) -> None:
    made, copied = open_folder / "made", open_folder / "copied"
    for _ in range(2):
        await start(made)
    shutil.copytree(made, copied)
    before = sorted(path.name for path in copied.iterdir())
    with pytest.raises(StartError, match="was not made here by this user") as refused:
        await start(copied)
    assert sorted(path.name for path in copied.iterdir()) == before, "nothing is written, either"
    adopt = str(refused.value).partition("adopt it: ")[2]
    subprocess.run(["sh", "-c", adopt], check=True)
    await start(copied)
    shutil.rmtree(made)
    shutil.copytree(copied, made)
    await start(made)  # it is the same one, put back
    shutil.rmtree(made)
    await start(open_folder / "theirs")
    shutil.move(open_folder / "theirs", made)
    with pytest.raises(StartError, match="was not made here by this user"):
        await start(made)


def run_a_program(folder: Path, name: str, line: str) -> None:
    with (folder / "data" / name).open("a") as file:
        file.write(line)


CHANGES: dict[str, Callable[[Path], object]] = {
    "Restore_Command": lambda it: run_a_program(it, "postgresql.auto.conf", "Restore_Command = 'true'\n"),
    "archive_library": lambda it: run_a_program(it, "postgresql.conf", " archive_library 'x'\n"),
    "include_if_exists": lambda it: run_a_program(it, "postgresql.conf", "include_if_exists '/x'\n"),
    "standby.signal": lambda it: (it / "data" / "standby.signal").touch(),
    "link": lambda it: (it / "initdb.log").rename(it / "x").parent.joinpath("initdb.log").symlink_to("x"),
    "can be changed by other users": lambda it: it.chmod(0o777),
    "belongs to another user": lambda it: os.chown(it, 61_000, 61_000),
}
"""Changes of a server's folder by others, each with what names it."""


async def test_a_folder_that_others_could_have_changed_is_refused_by_name(open_folder: Path) -> None:
    await start(open_folder / "made")
    for number, (named, change) in enumerate(CHANGES.items()):
        folder = open_folder / f"pg-{number}"
        folder.mkdir()
        mark_made_here(folder)
        shutil.copytree(open_folder / "made" / "data", folder / "data")
        shutil.copy(open_folder / "made" / "initdb.log", folder)
        change(folder)
        with pytest.raises(StartError, match=named):
            await start(folder)


async def test_links_in_a_folder_without_data_are_not_written_to(open_folder: Path) -> None:
    folder, victim = open_folder / "pg", open_folder / "authorized_keys"
    folder.mkdir()
    for name in ("launcher.lock", "postgres.log", "initdb.log", "pg_hba.conf.unfinished"):
        (folder / name).symlink_to(victim)
    with pytest.raises(StartError, match="has a link instead of its own"):
        await start(folder)
    assert not victim.exists()


def test_no_command_starts_a_strangers_folder_or_obeys_its_settings(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setattr("trader.commands.serve.configure_logs", lambda *_, **_threaded: None)  # which outlive the test
    made, theirs = open_folder / "made", open_folder / "theirs"
    asyncio.run(start(made / EMBEDDED_FOLDER))
    ran = open_folder / "ran"
    run_a_program(made / EMBEDDED_FOLDER, "postgresql.auto.conf", RUNS.format(ran))
    (made / EMBEDDED_FOLDER / "data" / "recovery.signal").touch()
    shutil.copytree(made, theirs)
    monkeypatch.chdir(theirs)
    for command in ("check --demo", "audit", "status", "models list", "backup x.dump", "serve --demo"):
        Path(".env").unlink(missing_ok=True)
        assert main(command.split()) in {1, 2}
        assert "was not made here by this user" in capsys.readouterr().err
        for settings in (f"DATABASE_URL=postgresql://{theirs}/x", "NONSENSE"):
            Path(".env").write_text(settings)
            assert main(command.split()) == 2
            assert ".env is not read: .trader/postgres beside it was not made here" in capsys.readouterr().err
        assert not ran.exists(), command
