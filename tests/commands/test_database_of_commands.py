"""The commands use the same database as the service: a DATABASE_URL in .env names it."""

import asyncio
import re
from datetime import timedelta
from pathlib import Path

import pytest
from support.calls import Call
from support.waiting import until

from trader.__main__ import main
from trader.commands import operate
from trader.commands.command import moment
from trader.database.leadership import LeaderLock, update_term
from trader.database.pool import Database, place
from trader.exchange.domain.halts import CommandOutcome
from trader.exchange.sql.accounts import DatabaseIdentity, upsert_service_state
from trader.exchange.sql.halts import select_open_commands, update_command_finished, update_command_taken

NO_RUN = "0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10"


@pytest.fixture(autouse=True)
def _without_settings(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """No DATABASE_URL in the environment of the commands."""
    monkeypatch.delenv("DATABASE_URL")


@pytest.mark.parametrize(
    ("command", "arguments", "code", "printed"),
    [
        ("audit", [], 0, "{place}, the service is not running\n0 runs, 0 positions"),
        ("report", [], 1, "{place} has no model with a snapshot"),
        ("drift", [], 1, "{place} has no simulated venue fill"),
        ("reproduce", [NO_RUN], 2, f"there is no invocation {NO_RUN}"),
    ],
)
async def test_the_database_of_the_env_file_is_read(
    call: Call, dsn: str, tmp_path: Path, command: str, arguments: list[str], code: int, printed: str
) -> None:
    (tmp_path / ".env").write_text(f"DATABASE_URL={dsn}\n", encoding="utf-8")
    ended = await call(command, *arguments)
    assert ended.code == code, ended.err
    assert printed.format(place=place(dsn)) in ended.err + ended.out


@pytest.mark.parametrize(
    ("command", "arguments"), [("audit", []), ("report", []), ("drift", []), ("reproduce", [NO_RUN])]
)
async def test_a_database_of_another_schema_version_is_reported(
    call: Call, database: Database, dsn: str, command: str, arguments: list[str]
) -> None:
    async with database.connection() as conn:
        await conn.execute("UPDATE schema_version SET version = version + 1")
    ended = await call(command, "--database-url", dsn, *arguments)
    assert ended.code == (2 if command in {"audit", "reproduce"} else 1)
    assert f"The database at {place(dsn)} has schema version 2, made by a newer version of trader" in ended.err


async def test_a_halt_with_an_unresponsive_service_is_recorded_but_not_yet_executed(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operate, "SILENT_S", 0.2)
    leader, shown = LeaderLock(dsn), ""
    assert await leader.try_acquire()
    async with database.connection() as conn:
        await upsert_service_state(conn, DatabaseIdentity("synthetic", "simulated"))
        term = await update_term(conn)
    halting = asyncio.create_task(asyncio.to_thread(main, ["halt", "--database-url", dsn]))

    def has_shown(text: str) -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return text in shown

    await until(lambda: has_shown("does not respond"))
    recorded = re.search(r"recorded at ([\d-]+ [\d:]+ UTC), but not yet executed: the service does not respond", shown)
    async with database.connection() as conn:
        ((command, _),) = await select_open_commands(conn, timedelta(minutes=1), 2)
        assert recorded is not None
        assert recorded[1] == moment(await conn.fetchval("SELECT asked_at FROM commands"))
        assert await update_command_taken(conn, command.id, "begun", term)
        shown = shown.partition("does not respond")[2]
        await until(lambda: has_shown("executed at"))
        await update_command_finished(conn, command.id, CommandOutcome(), term)
    assert await halting == 0
    await leader.release()


@pytest.mark.parametrize("command", ["audit", "report", "drift"])
async def test_a_wrong_address_is_reported_without_its_password(call: Call, tmp_path: Path, command: str) -> None:
    (tmp_path / ".env").write_text("DATABASE_URL=mysql://root:hunter2@localhost/x\n", encoding="utf-8")
    ended = await call(command)
    assert ended.code == 2
    assert "DATABASE_URL: expected postgresql://" in ended.err
    assert "hunter2" not in ended.err
