"""Database of a command: that of DATABASE_URL, or the embedded one of the working folder.

Commands read and write the database and, but for `status`, never call the service's port: so they need no address and
no token, and work whether the service runs or not. An embedded server that does not run is started for the duration of
the command.
"""

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import asyncpg

from trader.commands.command import Result, command, no_arguments, print_result, run_to_end, show
from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError
from trader.settings import read_database_url, read_some
from trader.store.database.leadership import select_leader_schedulers
from trader.store.database.pool import Connection, Database, place
from trader.store.database.schema import open_database
from trader.store.operations.halts import select_has_leader


class TargetDatabase(NamedTuple):
    """The database that a command works on. `is_served`: a service leads on it.

    `is_alone`: this process started its server, so it is certain that no service runs.
    """

    database: Database
    dsn: str
    place: str
    is_embedded: bool
    is_served: bool
    is_alone: bool
    is_replica: bool = False
    is_read_only: bool = False

    @property
    def service(self) -> str:
        """The state of the service: running, starting, not running, or without a database that it can write."""
        if self.is_served:
            return "running"
        if self.is_read_only:
            return "not trading: the database is read-only"
        return "starting" if self.is_embedded and not self.is_alone else "not running"

    @property
    def name(self) -> str:
        """The name of the database on its server."""
        return place(self.dsn).rpartition("/")[2]

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Borrow a connection that reads the database as of one moment."""
        async with self.database.reading() as conn:
            yield conn

    def __str__(self) -> str:
        return f"database: {self.place}, the service is {self.service}"


DatabaseRun = Callable[[argparse.Namespace, TargetDatabase], Awaitable[Result]]


def database_command(
    name: str,
    *,
    example: str,
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments,
    changes: bool = False,
    of_any_version: bool = False,
) -> Callable[[DatabaseRun], DatabaseRun]:
    """Declare a command that works on the database: it gets `--json` and the options that choose the database.

    One that `changes` something is refused where a database may only be read. Only with `of_any_version` it may have
    the schema of an earlier or a later version.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        arguments(parser)
        add_database_options(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")

    def declare(run: DatabaseRun) -> DatabaseRun:
        def run_in_database(options: argparse.Namespace) -> int:
            return print_result(
                run_to_end(_run(run, options, changes=changes, of_any_version=of_any_version)), as_json=options.json
            )

        run_in_database.__doc__ = run.__doc__
        command(name, example=example, arguments=add_arguments)(run_in_database)
        return run

    return declare


async def _run(run: DatabaseRun, options: argparse.Namespace, *, changes: bool, of_any_version: bool) -> Result:
    try:
        async with find_database(options, of_any_version=of_any_version) as target:
            show(str(target), on_stderr=True)
            if changes:
                _require_writable(options, target)
            result = await run(options, target)
    except asyncpg.InsufficientPrivilegeError as error:
        raise StartError(f"The database's user may not do what this command needs: {error}.") from error
    facts: dict[str, Any] = {"place": target.place, "service": target.service}
    return result._replace(value={"database": facts, **result.value})


def _require_writable(options: argparse.Namespace, target: TargetDatabase) -> None:
    """Refuse to change a replica, or the database of a reader unless --database-url names it.

    :raises StartError: nothing may be changed here; the message names the leader's address if it is known
    """
    is_reader = options.database_url is None and read_some(os.environ, options.env_file, "role") == ["reader"]
    if not (target.is_replica or is_reader):
        return
    what = f"{place(target.dsn)} is a read-only replica" if target.is_replica else "ROLE=reader only reads"
    (leader_url,) = read_some(os.environ, options.env_file, "leader_url")
    where = "the machine of the leader" if leader_url is None else f"the machine of the leader, {leader_url}"
    raise StartError(
        f"{what}: nothing was changed. Give this command on {where}, or with the --database-url of its database."
    )


def add_database_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find_database` needs."""
    parser.add_argument("--database-url", metavar="URL", help="default: DATABASE_URL, from the environment or .env")
    parser.add_argument("--database", metavar="NAME", help="database of the embedded PostgreSQL, if it has several")
    add_env_file_option(parser)


@asynccontextmanager
async def find_database(options: argparse.Namespace, *, of_any_version: bool = False) -> AsyncIterator[TargetDatabase]:
    """Open the database: of --database-url, of DATABASE_URL, or of the embedded PostgreSQL of this folder.

    Of several embedded databases that of the running service is taken.

    :raises StartError: it cannot be opened, or there is a choice
    :raises SettingsError: DATABASE_URL is not the address of a database
    """
    async with AsyncExitStack() as stack:
        url = options.database_url or read_database_url(os.environ, options.env_file)
        if url:
            database = await stack.enter_async_context(open_database(url, of_any_version=of_any_version))
            is_replica = await database.is_replica()
            where = f"{place(url)} (a replica, read-only)" if is_replica else place(url)
            is_served = await _has_leader(database)
            is_read_only = not is_replica and await database.is_read_only()
            yield TargetDatabase(
                database,
                url,
                where,
                is_embedded=False,
                is_served=is_served,
                is_alone=False,
                is_replica=is_replica,
                is_read_only=is_read_only,
            )
            return
        server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
        name = await _choose(server, options.database)
        opening = open_database(server.dsn(name), of_any_version=of_any_version)
        database = await stack.enter_async_context(opening)
        where = f"embedded in ./{EMBEDDED_FOLDER} ({name})"
        is_served = not server.is_own and await _has_leader(database)
        yield TargetDatabase(database, server.dsn(name), where, True, is_served, server.is_own)


async def _choose(server: EmbeddedPostgres, wanted: str | None) -> str:
    names = await server.databases()
    if wanted is not None and wanted not in names:
        raise StartError(f"There is no embedded database {wanted!r}. There are: {', '.join(names) or 'none'}.")
    if wanted is not None or len(names) == 1:
        return wanted or names[0]
    for name in names:
        with suppress(StartError):  # one of an earlier version, so not that of the running service
            async with open_database(server.dsn(name)) as database:
                if await _has_leader(database):
                    return name
    raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")


async def _has_leader(database: Database) -> bool:
    """Return whether a service leads: it holds the lock or, for a replica, which sees no locks, has a heartbeat."""
    is_replica = await database.is_replica()
    async with database.connection() as conn:
        if is_replica:
            return await select_leader_schedulers(conn) is not None
        return await select_has_leader(conn)
