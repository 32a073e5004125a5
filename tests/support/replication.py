"""A PostgreSQL primary with streaming replicas, created with `pg_basebackup`."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import asyncpg
from support.waiting import until

from trader.database.embedded.binaries import Binaries, bind_to_parent, choose_binaries, stop_process
from trader.database.embedded.folders import SERVICE_ROLE, SUPERUSER, make_private, server_account
from trader.database.embedded.server import EmbeddedPostgres

DATABASE: Final = "trader"
_READY_S: Final = 30.0
_CONNECTIONS_MAX: Final = 450
"""Connections for twenty readers, and for commands next to them."""


async def admit(dsn: str, user: str) -> None:
    """Let processes of another user on this machine connect to an embedded server, until it restarts."""
    conn = await asyncpg.connect(dsn)
    try:
        began_at = await conn.fetchval("SELECT clock_timestamp()")
        file = Path(await conn.fetchval("SHOW ident_file"))
        lines = "".join(f'service "{user}" {role}\n' for role in (SUPERUSER, SERVICE_ROLE))
        file.write_text(file.read_text() + lines)
        await conn.execute("SELECT pg_reload_conf()")
    finally:
        await conn.close()
    async with asyncio.timeout(_READY_S):
        while True:
            conn = await asyncpg.connect(dsn)
            try:
                if await conn.fetchval("SELECT pg_conf_load_time() > $1", began_at):
                    return
            finally:
                await conn.close()


class Replica:
    """A streaming replica in a separate folder, reached through its socket."""

    def __init__(self, folder: Path, binaries: Binaries) -> None:
        self._folder = folder
        self._account = server_account()
        self._binaries = binaries.readable_copy() if self._account else binaries
        self._user = None if self._account is None else self._account.pw_uid
        self._group = None if self._account is None else self._account.pw_gid
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self._folder), safe='')}"

    async def start(self, primary: EmbeddedPostgres) -> None:
        """Copy the primary, and follow it. A slot keeps the WAL that it has not received."""
        make_private(self._folder, self._account)
        data, source = str(self._folder / "data"), primary.superuser_dsn()
        if self._account is not None:
            await admit(source, self._account.pw_name)
        copying = ("pg_basebackup", "-D", data, "-d", source, "-R", "-C", "-S", self._folder.name, "-c", "fast")
        await asyncio.to_thread(self._run, *copying, "--no-sync")
        command: list[str] = [
            self._binaries.program("postgres"),
            "-D",
            data,
            "-c",
            "fsync=off",
            "-c",
            "listen_addresses=",
            "-c",
            f"max_connections={_CONNECTIONS_MAX}",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-c", f"unix_socket_directories={self._folder}"],
                stdout=log,
                stderr=log,
                preexec_fn=bind_to_parent(signal.SIGINT),  # noqa: PLW1509 - one system call, prepared before the fork
                user=self._user,
                group=self._group,
            )
        await until(self._answers)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._binaries.program(program), *arguments], check=True, cwd="/", user=self._user, group=self._group
        )

    async def _answers(self) -> bool:
        try:
            conn = await asyncpg.connect(self.dsn)
        except (OSError, asyncpg.PostgresError):
            return False
        await conn.close()
        return True

    async def promote(self) -> None:
        """Promote it to a primary, as an operator or a cluster manager does."""
        conn = await asyncpg.connect(self.dsn)
        assert await conn.fetchval("SELECT pg_promote()")
        await conn.close()

    async def pause(self, *, paused: bool) -> None:
        """Pause or resume applying the primary's changes."""
        conn = await asyncpg.connect(self.dsn)
        await conn.execute(f"SELECT pg_wal_replay_{'pause' if paused else 'resume'}()")
        await conn.close()

    async def stop(self) -> None:
        if self._process is not None:
            await stop_process(self._process)


class Cluster:
    """A primary and its replicas. `dsn` is the address of an empty database on the primary."""

    def __init__(self, folder: Path, primary: EmbeddedPostgres, dsn: str) -> None:
        self._folder = folder
        self._primary = primary
        self.dsn = dsn
        self.replicas: list[Replica] = []

    async def add_replica(self) -> Replica:
        """Create another replica from the primary's current state."""
        replica = Replica(self._folder / f"r{len(self.replicas)}", choose_binaries(self._primary.data))
        self.replicas.append(replica)
        await replica.start(self._primary)
        return replica

    def kill_primary(self) -> None:
        """End the primary as in a power cut."""
        os.kill(int((self._primary.data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)


@asynccontextmanager
async def replicated(folder: Path) -> AsyncIterator[Cluster]:
    """Run a primary in `folder`, which every user must be able to access, for the duration of the block."""
    async with AsyncExitStack() as stack:
        primary = await stack.enter_async_context(EmbeddedPostgres(folder / "p", durable=False))
        cluster = Cluster(folder, primary, await primary.ensure_database(DATABASE))

        async def stop() -> None:
            for replica in cluster.replicas:
                await replica.stop()

        stack.push_async_callback(stop)
        yield cluster
