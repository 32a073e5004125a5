"""The database a command uses: DATABASE_URL, or the embedded database of the working folder.

Commands read and write the database and, except for `status`, never call the service's port: they need no address and
no token, and work with or without a running service. If the embedded server is not running, the command starts it
temporarily.
"""

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

from trader.commands.command import Result, command, no_arguments, show
from trader.core.errors import DatabaseUnavailable, StartError
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.leadership import select_leader_schedulers
from trader.database.pool import DENIED, Database, place
from trader.database.schema import apply_schema, open_database, select_schema_version
from trader.exchange.sql.halts import select_has_leader
from trader.settings.dotenv import add_env_file_option
from trader.settings.settings import read_database_url, read_some


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
    is_replica: bool
    is_read_only: bool

    @property
    def service(self) -> str:
        """The state of the service: running, starting, not running, or not trading on a read-only database."""
        if self.is_served:
            return "running"
        if self.is_read_only:
            return "not trading: the database is read-only"
        return "starting" if self.is_embedded and not self.is_alone else "not running"

    @property
    def name(self) -> str:
        """The name of the database on its server."""
        return place(self.dsn).rpartition("/")[2]

    def __str__(self) -> str:
        return f"database: {self.place}, the service is {self.service}"


DatabaseRun = Callable[[argparse.Namespace, TargetDatabase], Awaitable[Result]]

CreateDatabase = Callable[[EmbeddedPostgres, argparse.Namespace, Sequence[str]], Awaitable[str]]
"""Creates the database of the settings if it is not among the existing ones, and returns its name."""


def database_command(
    name: str,
    *,
    example: str,
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments,
    changes: bool = False,
    of_any_version: bool = False,
    compares: bool = False,
) -> Callable[[DatabaseRun], DatabaseRun]:
    """Declare a command that works on the database: it gets the options that select the database.

    The keyword arguments are the same as for `command` and `run_in_database`.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        arguments(parser)
        add_database_options(parser)

    def declare(run: DatabaseRun) -> DatabaseRun:
        def run_command(options: argparse.Namespace) -> Coroutine[Any, Any, Result]:
            return run_in_database(run, options, changes=changes, of_any_version=of_any_version)

        run_command.__doc__ = run.__doc__
        command(name, example=example, arguments=add_arguments, compares=compares)(run_command)
        return run

    return declare


async def run_in_database(
    run: DatabaseRun,
    options: argparse.Namespace,
    *,
    changes: bool = False,
    of_any_version: bool = False,
    create: CreateDatabase | None = None,
) -> Result:
    """Open the database that the options select, print which one it is, and run a command on it.

    A command that `changes` something is refused on a read-only database. Only `of_any_version` allows the schema of an
    earlier or later version. `create` creates a missing database (see `find_database`).
    """
    try:
        async with find_database(options, of_any_version=of_any_version, create=create) as target:
            show(str(target), on_stderr=True)
            if changes:
                require_writable(options, target)
            result = await run(options, target)
    except DatabaseUnavailable as error:
        if error.cause != DENIED:
            raise
        raise StartError(
            f"The database user lacks the privileges that this command needs: {error.__cause__}."
        ) from error
    facts: dict[str, Any] = {"place": target.place, "service": target.service}
    return result._replace(value={"database": facts, **result.value})


def require_writable(options: argparse.Namespace, target: TargetDatabase) -> None:
    """Refuse to change a replica, or a reader's database unless --database-url names it.

    :raises StartError: changes are not allowed here; the message names the leader's address if it is known
    """
    is_reader = options.database_url is None and read_some(os.environ, options.env_file, "role") == ["reader"]
    if not (target.is_replica or is_reader):
        return
    what = f"{place(target.dsn)} is a read-only replica" if target.is_replica else "ROLE=reader only reads"
    (leader_url,) = read_some(os.environ, options.env_file, "leader_url")
    where = "the machine of the leader" if leader_url is None else f"the machine of the leader, {leader_url}"
    raise StartError(
        f"{what}: nothing was changed. Run this command on {where}, or with the --database-url of its database."
    )


def add_database_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find_database` needs."""
    parser.add_argument("--database-url", metavar="URL", help="default: DATABASE_URL, from the environment or .env")
    parser.add_argument("--database", metavar="NAME", help="database of the embedded PostgreSQL, if it has several")
    add_env_file_option(parser)


@asynccontextmanager
async def find_database(
    options: argparse.Namespace, *, of_any_version: bool = False, create: CreateDatabase | None = None
) -> AsyncIterator[TargetDatabase]:
    """Open the database of --database-url, of DATABASE_URL, or of the embedded PostgreSQL of this folder.

    Of several embedded databases, the running service's is used. With `create` and without a service, the database that
    it names is used, and it and its tables are created if missing.

    :raises StartError: the database cannot be opened, or the choice is ambiguous
    :raises SettingsError: DATABASE_URL is not a database address
    """
    async with AsyncExitStack() as stack:
        dsn: str = options.database_url or read_database_url(os.environ, options.env_file) or ""
        is_embedded, is_alone, where = not dsn, False, place(dsn)
        if is_embedded:
            server = EmbeddedPostgres(EMBEDDED_FOLDER).attach(creates=create is not None)
            running = await stack.enter_async_context(server)
            name = await _choose(running, options, create)
            dsn, is_alone, where = running.dsn(name), running.is_own, f"embedded in ./{EMBEDDED_FOLDER} ({name})"
        if create is not None:
            await _create_tables(dsn)
        database = await stack.enter_async_context(open_database(dsn, of_any_version=of_any_version))
        is_replica = await database.is_replica()
        is_served = not is_alone and await _has_leader(database)
        is_read_only = not is_replica and await database.is_read_only()
        where = f"{where} (a replica, read-only)" if is_replica else where
        yield TargetDatabase(database, dsn, where, is_embedded, is_served, is_alone, is_replica, is_read_only)


async def _choose(server: EmbeddedPostgres, options: argparse.Namespace, create: CreateDatabase | None) -> str:
    names, wanted = await server.databases(), options.database
    if wanted is not None and wanted not in names:
        raise StartError(f"There is no embedded database {wanted!r}. Existing databases: {', '.join(names) or 'none'}.")
    if wanted is not None:
        return str(wanted)
    served = [] if server.is_own else [name for name in names if await _is_served(server, name)]
    if len(served) == 1:
        return served[0]
    if len(names) == 1 and not (create is not None and server.is_own):
        return names[0]
    if create is not None and not served:
        return await create(server, options, names)
    raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")


async def _is_served(server: EmbeddedPostgres, name: str) -> bool:
    with suppress(StartError):  # of an earlier version, so not the running service's
        async with open_database(server.dsn(name)) as database:
            return await _has_leader(database)
    return False


async def _create_tables(dsn: str) -> None:
    """Create the tables in an empty, writable database."""
    database = await Database.connect(dsn, size=1)
    try:
        async with database.connection() as conn:
            is_empty = await select_schema_version(conn) is None
        if is_empty and not await database.is_replica():
            await apply_schema(database)
    finally:
        await database.close()


async def _has_leader(database: Database) -> bool:
    """Return whether a service leads: it holds the lock or, on a replica, which shows no locks, has a heartbeat."""
    is_replica = await database.is_replica()
    async with database.connection() as conn:
        if is_replica:
            return await select_leader_schedulers(conn) is not None
        return await select_has_leader(conn)
