"""A PostgreSQL of our own, for a start without a database server: made, started and stopped with this process.

The server listens on a Unix socket only. It is told to stop cleanly when this process ends in whatever way, a kill
included (`PR_SET_PDEATHSIG`; where the system has none, the next start stops what was left behind). As root, which
PostgreSQL refuses to run as, it runs as `nobody`.
"""

import asyncio
import fcntl
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self
from urllib.parse import quote

import asyncpg

from trader.embedded.binaries import Binaries, choose_binaries
from trader.embedded.processes import STOP_TIMEOUT_S, bind_to_parent, end, is_ready, leftover_pid, tail, until
from trader.embedded.shared_folders import is_open_to_all, name_of, shared_place
from trader.errors import StartError

log = logging.getLogger(__name__)

EMBEDDED_FOLDER = Path(".trader/postgres")  # in the working folder
READY_TIMEOUT_S = 60.0
SOCKET_PATH_BYTES_MAX = 107
SERVER_LOG = "postgres.log"
LOCK_NAME = "launcher.lock"
SOCKET_NAME = ".s.PGSQL.5432"


class _Account(NamedTuple):
    """Whom the server runs as when this process is root."""

    uid: int
    gid: int


class EmbeddedPostgres:
    """The server of one folder, as an async context manager.

    `durable=False` trades safety for speed, for tests: a crash of the machine may lose everything.
    """

    def __init__(self, folder: Path, *, durable: bool = True, binaries: Binaries | None = None) -> None:
        self._asked_folder = folder.absolute()
        self._durable = durable
        self._binaries = binaries
        self._account = _server_account()
        self._folder = self._asked_folder
        self._sockets: Path | None = None
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def version(self) -> str:
        """Of the server, such as `18.6`."""
        assert self._binaries is not None, "known once started"
        return self._binaries.version

    @property
    def data(self) -> Path:
        """The data folder, which is not always in the folder asked for."""
        return self._folder / "data"

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the server; else a service at work has."""
        return self._process is not None

    def dsn(self, database: str) -> str:
        """The connection string of a database of this server."""
        assert self._sockets is not None, "known once started"
        return f"postgresql://postgres@/{quote(database, safe='')}?host={quote(str(self._sockets), safe='')}"

    async def ensure_database(self, name: str) -> str:
        """Make the database when it is missing; its connection string."""
        conn = await asyncpg.connect(self.dsn("postgres"))
        try:
            if not await conn.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name):
                quoted = name.replace('"', '""')
                await conn.execute(f'CREATE DATABASE "{quoted}"')
        finally:
            await conn.close()
        return self.dsn(name)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server, and make its data folder at the first time.

        :raises StartError: another process uses the folder, no binaries fit, or the server does not come up
        """
        if threading.current_thread() is not threading.main_thread():
            # The death signal belongs to the thread that forks, and the main thread is the one that lives longest.
            raise RuntimeError("The embedded PostgreSQL must be started from the main thread.")
        self._folder = _place_for(self._asked_folder, self._account)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            try:
                self._lock = _lock_folder(self._folder)
                await self._stop_leftover()
                self._binaries = choose_binaries(self.data) if self._binaries is None else self._binaries
                self._binaries = self._binaries.readable_copy() if self._account else self._binaries
                await self._make_data()
                self._sockets = _socket_folder(self._folder, self._account)
                await self._launch()
            except OSError as error:
                why = error.strerror or error
                raise StartError(f"The database folder {self._folder} cannot be used: {why}.") from error
            undo.pop_all()

    async def stop(self) -> None:
        """Stop the server and wait for its end. Transactions under way are rolled back."""
        if self._process is not None:
            process, self._process = self._process, None
            await end(process)
        if self._sockets is not None:
            with suppress(OSError):  # not empty after a kill; the next start uses it again
                self._sockets.rmdir()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @classmethod
    @asynccontextmanager
    async def attached(cls, folder: Path) -> AsyncIterator["EmbeddedPostgres"]:
        """The server of a folder for a tool: the one that a service at work has started, else one of its own.

        :raises StartError: the folder has no data, or the server does not come up
        """
        server = cls(folder)
        # A service that is not root has its data in the folder itself, also where root would put its own elsewhere.
        try:
            places = (server._asked_folder, _place_for(server._asked_folder, server._account))
            is_served = any(server._joins(place) for place in places)
            has_data = server.data.exists()
        except PermissionError:
            raise StartError(
                f"The embedded database in {folder} belongs to another user; call this as that one."
            ) from None
        if is_served:
            yield server
            return
        if not has_data:
            raise StartError(f"There is no embedded database in {folder}. Set DATABASE_URL, or run in another folder.")
        async with server:
            yield server

    def _joins(self, place: Path) -> bool:
        """Take the server that a service at work runs in this place; False when there is none."""
        self._folder = place
        pid = leftover_pid(self.data / "postmaster.pid", self.data)
        if pid is None or not is_ready(self.data, pid):
            return False
        self._sockets = Path((self.data / "postmaster.pid").read_text().split("\n")[4])
        return True

    async def databases(self) -> list[str]:
        """The names of the databases made with `ensure_database`."""
        conn = await asyncpg.connect(self.dsn("postgres"))
        try:
            names = await conn.fetch("SELECT datname FROM pg_database WHERE datname LIKE 'trader_%' ORDER BY datname")
        finally:
            await conn.close()
        return [record["datname"] for record in names]

    async def ended(self) -> str:
        """Wait until the server ends without having been told to; its last words."""
        while self._process is not None and self._process.poll() is None:  # noqa: ASYNC110 - a process, not a task
            await asyncio.sleep(1)
        return tail(self._folder / SERVER_LOG)

    async def _make_data(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        assert self._binaries is not None
        unfinished = self._folder / "data.unfinished"  # renamed when done: a kill meanwhile leaves no half-made data
        if unfinished.exists():
            shutil.rmtree(unfinished)
        _make_private(unfinished, self._account)
        command = [
            self._binaries.program("initdb"), "-D", str(unfinished), "-U", "postgres", "--auth=trust", "--locale=C",
            "-E", "UTF8", "--no-instructions", *([] if self._durable else ["--no-sync"]),
        ]  # fmt: skip
        output = self._folder / "initdb.log"
        process = self._spawn(command, output, signal.SIGKILL)
        try:
            await until(lambda: process.poll() is not None, READY_TIMEOUT_S, "initdb did not end")
        finally:
            await end(process)
        if process.returncode != 0:
            raise StartError(f"PostgreSQL could not make its data folder {self.data}: {tail(output)}")
        unfinished.rename(self.data)

    async def _launch(self) -> None:
        assert self._binaries is not None
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self._sockets}"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "max_connections": "100",
            "logging_collector": "off",
            "timezone": "UTC",
        }
        if not self._durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
            settings |= {"min_wal_size": "32MB", "max_wal_size": "64MB"}
        command = [self._binaries.program("postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        output = self._folder / SERVER_LOG
        self._process = process = self._spawn(command, output, signal.SIGINT)
        await until(
            lambda: process.poll() is not None or is_ready(self.data, process.pid),
            READY_TIMEOUT_S,
            f"PostgreSQL in {self._folder} did not become ready",
        )
        if process.returncode is not None:
            raise StartError(f"PostgreSQL in {self._folder} did not start: {tail(output)}")

    def _spawn(self, command: Sequence[str], output: Path, death_signal: signal.Signals) -> subprocess.Popen[bytes]:
        """Start a program of the server: in a session of its own, so that Ctrl+C reaches it through us only."""
        before_exec = bind_to_parent(death_signal)
        with output.open("wb") as file:
            return subprocess.Popen(  # noqa: S603 - our own binaries and arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
                # Nothing of the caller's environment: neither its locale nor its PG* may change the server.
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", "HOME": str(self._folder)},
                start_new_session=True,
                user=self._account.uid if self._account else None,
                group=self._account.gid if self._account else None,
                extra_groups=[] if self._account else None,
                preexec_fn=before_exec,  # noqa: PLW1509 - one system call, prepared before the fork
            )

    async def _stop_leftover(self) -> None:
        """End a server that outlived its parent, and clear the traces of one that did not end well."""
        pid_file = self.data / "postmaster.pid"
        pid = leftover_pid(pid_file, self.data)
        if pid is None:
            pid_file.unlink(missing_ok=True)
            return
        log.warning("PostgreSQL (process %d) still runs in %s without its launcher; stopping it", pid, self._folder)
        try:
            os.kill(pid, signal.SIGINT)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise StartError(f"The PostgreSQL in {self._folder} (process {pid}) belongs to another user.") from error
        await until(
            lambda: leftover_pid(pid_file, self.data) is None,
            STOP_TIMEOUT_S,
            f"the PostgreSQL left behind in {self._folder} (process {pid}) does not stop",
        )
        pid_file.unlink(missing_ok=True)


# -- places ----------------------------------------------------------------------------------------------------------


def _server_account() -> _Account | None:
    """`nobody` when this process is root, else nothing: the server runs as we do."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise StartError(
            "PostgreSQL does not run as root, and this system has no user `nobody`. "
            "Start as another user, or set DATABASE_URL."
        ) from None
    return _Account(entry.pw_uid, entry.pw_gid)


def _place_for(folder: Path, account: _Account | None) -> Path:
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"The database folder {folder} cannot be made: {error.strerror}.") from error
    if account is None or is_open_to_all(folder):
        return folder
    place = shared_place(folder.resolve())
    log.warning("PostgreSQL runs as `nobody`, who cannot reach %s; the database is in %s", folder, place)
    return place


def _make_private(folder: Path, account: _Account | None) -> None:
    folder.mkdir(mode=0o700)
    if account is not None:
        os.chown(folder, account.uid, account.gid)


def _socket_folder(folder: Path, account: _Account | None) -> Path:
    """Where the socket goes: beside the data, unless that path is too long, or means something in a list of hosts."""
    sockets = folder / "socket"
    path = str(sockets / SOCKET_NAME)
    if len(path) > SOCKET_PATH_BYTES_MAX or not re.fullmatch(r"[A-Za-z0-9/._-]+", path):
        sockets = Path(f"/tmp/trader-{name_of(folder)}")  # noqa: S108 - its owner is checked
    try:
        _make_private(sockets, account)
    except FileExistsError:
        facts = sockets.lstat()
        owner = account.uid if account else os.geteuid()
        if facts.st_uid != owner or facts.st_mode & 0o077 or sockets.is_symlink():
            raise StartError(f"The folder {sockets} is not ours. Remove it and start again.") from None
    return sockets


def _lock_folder(folder: Path) -> IO[str]:
    """Hold the folder for this process. The lock ends with the process, however that ends."""
    file = (folder / LOCK_NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise StartError(
            f"The database folder {folder} is in use by another trader (process {owner}). "
            "Stop that one, start in another folder, or set DATABASE_URL."
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
