"""Embedded PostgreSQL: a private server for a start without DATABASE_URL, started and stopped with this process.

The server listens on a Unix socket only. It shuts down cleanly however this process ends, even if killed
(`PR_SET_PDEATHSIG`; on systems without it, the next start stops the leftover server). PostgreSQL refuses to run as
root, so a root process runs it as a separate user. The service uses a role that is not a superuser and owns its
databases.
"""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

import asyncpg

from trader.core.errors import StartError
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.binaries import (
    STOP_TIMEOUT_S,
    Binaries,
    bind_to_parent,
    choose_binaries,
    has_processes,
    is_ready,
    leftover_pid,
    stop_process,
    tail,
    wait_until,
)
from trader.database.embedded.folders import (
    SERVICE_ROLE,
    SUPERUSER,
    data_place,
    hand_over,
    lock_folder,
    make_private,
    make_server_account,
    mark_as_made,
    refuse_programs,
    require_made_here,
    require_peer,
    server_account,
    socket_folder,
)
from trader.database.pool import connect_alone, place

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
ENDED_POLL_S = 0.1
SERVER_LOG = "postgres.log"
LOG_BYTES_MAX = 10_000_000
NAME_LENGTH_MAX = 63
"""PostgreSQL truncates longer names."""

CREATE_SERVICE_ROLE = """
DO $$ BEGIN
    IF to_regrole('trader') IS NULL THEN CREATE ROLE trader LOGIN; END IF;
END $$
"""


def place_of_data(database_url: str | None) -> str:
    """Return where a service with this DATABASE_URL, in this working folder, keeps its data, without secrets."""
    return str(EMBEDDED_FOLDER.resolve()) if database_url is None else place(database_url)


def database_name(market_identity: str, live_account: str | None = None) -> str:
    """Return the name of the embedded database for a market or, in live trading, for a venue account.

    A secret seed is not part of the name: it is stored in the database.
    """
    market_identity = re.sub(":sha256:[0-9a-f]+$", "", market_identity)
    identity = market_identity if live_account is None else f"{market_identity}:live:{live_account}"
    return ("trader_" + re.sub(r"[^a-z0-9]+", "_", identity.lower()).strip("_"))[:NAME_LENGTH_MAX]


def keep_log(path: Path) -> None:
    """Rotate the server's log: a log above the size limit replaces the previously rotated one."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".1"))


class EmbeddedPostgres:
    """The PostgreSQL server of one folder, as an async context manager.

    Its folder must be new, or made at this place by this user. `durable=False` trades safety for speed, for a folder
    that ends with its server: a machine crash may lose everything, and nothing is checked.
    """

    def __init__(self, folder: Path, *, durable: bool = True, binaries: Binaries | None = None) -> None:
        self._asked_folder = folder.absolute()
        self._durable = durable
        self._binaries = binaries
        self._account = server_account()
        self._folder = self._asked_folder
        self._sockets: Path | None = None
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def version(self) -> str:
        """The version of the server that this process started, such as `18.6`."""
        assert self._binaries is not None, "known once started"
        return self._binaries.version

    @property
    def data(self) -> Path:
        """The data folder. It may be outside the requested folder (see `data_place`)."""
        return self._folder / "data"

    @property
    def is_own(self) -> bool:
        """Whether this process started the server; otherwise a running service did."""
        return self._process is not None

    def dsn(self, database: str) -> str:
        """Return the connection string of one of the service's databases, independent of PG* variables."""
        return self._dsn_as(SERVICE_ROLE, database)

    def superuser_dsn(self, database: str = "postgres") -> str:
        """Return the connection string of a database for administration."""
        return self._dsn_as(SUPERUSER, database)

    def _dsn_as(self, role: str, database: str) -> str:
        assert self._sockets is not None, "known once started"
        where = f"host={quote(str(self._sockets), safe='')}&port=5432&sslmode=disable&target_session_attrs=any"
        return f"postgresql://{role}@/{quote(database, safe='')}?{where}"

    async def ensure_database(self, name: str) -> str:
        """Create the database if it is missing, and return its connection string."""
        if not await self.has_database(name):
            quoted = name.replace('"', '""')
            async with self._connected() as conn:
                await conn.execute(f'CREATE DATABASE "{quoted}" OWNER {SERVICE_ROLE}')
        return self.dsn(name)

    async def has_database(self, name: str) -> bool:
        async with self._connected() as conn:
            return bool(await conn.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection]:
        conn = await connect_alone(self.superuser_dsn("postgres"))
        try:
            yield conn
        finally:
            await conn.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server; the first start creates its data folder.

        :raises StartError: another process uses the folder, or somebody else made it; no binaries fit; the server does
            not start
        """
        if threading.current_thread() is not threading.main_thread():
            # The death signal belongs to the thread that forks, and the main thread lives longest.
            raise RuntimeError("The embedded PostgreSQL must be started from the main thread.")
        self._account = make_server_account()
        self._folder = data_place(self._asked_folder, self._account)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            try:
                if self._durable:
                    require_made_here(self._asked_folder)
                self._lock = lock_folder(self._folder)
                if self._durable:
                    mark_as_made(self._asked_folder)
                await self._stop_leftover()
                hand_over(self.data, self._account)
                self._binaries = choose_binaries(self.data) if self._binaries is None else self._binaries
                self._binaries = self._binaries.readable_copy() if self._account else self._binaries
                await self._make_data()
                self._sockets = socket_folder(self._folder, self._account)
                await self._launch()
                async with self._connected() as conn:
                    await conn.execute(CREATE_SERVICE_ROLE)
            except OSError as error:
                why = error.strerror or error
                raise StartError(f"The database folder {self._folder} cannot be used: {why}.") from error
            undo.pop_all()

    async def stop(self) -> None:
        """Stop the server and wait until it has ended. Open transactions are rolled back."""
        if self._process is not None:
            process, self._process = self._process, None
            await stop_process(process)
        if self._sockets is not None:
            with suppress(OSError):  # not empty after a kill; the next start reuses it
                self._sockets.rmdir()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @asynccontextmanager
    async def attach(self, *, creates: bool = False) -> AsyncIterator[Self]:
        """Use the server of a running service, as a tool does; start one if no service is running.

        :raises StartError: the folder has no data and `creates` is not set, or the server does not start
        """
        folder = self._asked_folder
        # A non-root service keeps its data in the folder itself, even where root would put its own data elsewhere.
        try:
            is_running = self._find_running(folder) or self._find_running(data_place(folder, self._account))
            has_data = self.data.exists()
        except PermissionError:
            raise StartError(
                f"The embedded database in {folder} belongs to another user; run this command as that user."
            ) from None
        if is_running:
            yield self
            return
        if not has_data and not creates:
            raise StartError(f"There is no embedded database in {folder}. Set DATABASE_URL, or run in another folder.")
        async with self:
            yield self

    def _find_running(self, place: Path) -> bool:
        """Use the server that a running service has started in this place; return False if there is none."""
        self._folder = place
        pid = leftover_pid(self.data / "postmaster.pid", self.data)
        if pid is None or not is_ready(self.data, pid):
            return False
        self._sockets = Path((self.data / "postmaster.pid").read_text().split("\n")[4])
        return True

    async def databases(self) -> list[str]:
        """Return the names of the service's databases on this server."""
        async with self._connected() as conn:
            names = await conn.fetch("SELECT datname FROM pg_database WHERE datname LIKE 'trader_%' ORDER BY datname")
        return [record["datname"] for record in names]

    async def ended(self) -> str:
        """Wait until the server exits without being stopped, and return the last lines of its log."""
        while self._process is not None and self._process.poll() is None:  # noqa: ASYNC110 - a process, not a task
            await asyncio.sleep(ENDED_POLL_S)
        return tail(self._folder / SERVER_LOG)

    async def _make_data(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        assert self._binaries is not None
        log.info("creating the database in %s, which takes seconds, or up to a minute on a slow disk", self._folder)
        unfinished = self._folder / "data.unfinished"  # renamed when complete, so a kill leaves no half-made data
        if unfinished.exists():
            shutil.rmtree(unfinished)
        make_private(unfinished, self._account)
        command = [
            self._binaries.program("initdb"), "-D", str(unfinished), "-U", SUPERUSER, "--auth=trust", "--locale=C",
            "-E", "UTF8", "--no-instructions", *([] if self._durable else ["--no-sync"]),
        ]  # fmt: skip
        output = self._folder / "initdb.log"
        process = self._spawn(command, output, signal.SIGKILL)
        try:
            await wait_until(lambda: process.poll() is not None, READY_TIMEOUT_S, "initdb did not end")
        finally:
            await stop_process(process)
        if process.returncode != 0:
            raise StartError(f"PostgreSQL could not create its data folder {self.data}: {tail(output)}")
        unfinished.rename(self.data)

    async def _launch(self) -> None:
        assert self._binaries is not None
        refuse_programs(self.data)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self._sockets}"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "max_connections": "100",
            "logging_collector": "off",
            "timezone": "UTC",
            **require_peer(self._folder),
        }
        if not self._durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
            settings |= {"min_wal_size": "32MB", "max_wal_size": "64MB"}
        command = [self._binaries.program("postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        output = self._folder / SERVER_LOG
        keep_log(output)
        self._process = process = self._spawn(command, output, signal.SIGINT)
        await wait_until(
            lambda: process.poll() is not None or is_ready(self.data, process.pid),
            READY_TIMEOUT_S,
            f"PostgreSQL in {self._folder} did not become ready",
        )
        if process.returncode is not None:
            raise StartError(f"PostgreSQL in {self._folder} did not start: {tail(output)}")

    def _spawn(self, command: Sequence[str], output: Path, death_signal: signal.Signals) -> subprocess.Popen[bytes]:
        """Start a program of the server in its own session, so that Ctrl+C does not reach it directly."""
        before_exec = bind_to_parent(death_signal)
        with output.open("ab") as file:
            return subprocess.Popen(  # noqa: S603 - our own binaries and arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
                # Pass nothing from the caller's environment: its locale and PG* variables must not affect the server.
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", "HOME": str(self._folder)},
                start_new_session=True,
                user=self._account.pw_uid if self._account else None,
                group=self._account.pw_gid if self._account else None,
                extra_groups=[] if self._account else None,
                preexec_fn=before_exec,  # noqa: PLW1509 - one system call, prepared before the fork
            )

    async def _stop_leftover(self) -> None:
        """Stop a server that outlived its parent, or remove the pid file of a crashed server.

        Without that file PostgreSQL would not notice processes that still write to the data, so these must have ended.
        """
        pid_file = self.data / "postmaster.pid"
        pid = leftover_pid(pid_file, self.data)
        if pid is None:
            problem = f"processes of a killed PostgreSQL in {self._folder} did not end"
            await wait_until(lambda: not has_processes(self.data), STOP_TIMEOUT_S, problem)
            pid_file.unlink(missing_ok=True)
            return
        log.warning("PostgreSQL (process %d) still runs in %s without its launcher; stopping it", pid, self._folder)
        try:
            os.kill(pid, signal.SIGINT)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise StartError(f"The PostgreSQL in {self._folder} (process {pid}) belongs to another user.") from error
        await wait_until(
            lambda: leftover_pid(pid_file, self.data) is None,
            STOP_TIMEOUT_S,
            f"the PostgreSQL left behind in {self._folder} (process {pid}) did not stop",
        )
        pid_file.unlink(missing_ok=True)
