"""The connection pool, and what every connection of it has in common.

Connections go back to the pool as they are: the usual reset would cost a third of the throughput. So no statement may
change the state of its session (SET, LISTEN, session advisory locks); inside a transaction `SET LOCAL` and
`pg_advisory_xact_lock` are fine.
"""

import asyncio
import logging
import re
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

import asyncpg
import msgspec
import orjson

from trader.errors import StartError, Unavailable
from trader.store.database.migrations import MIGRATIONS

if TYPE_CHECKING:
    from asyncpg.pool import Pool, PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

log = logging.getLogger("trader.store")

OLDEST_VERSION = 15
SCHEMA_VERSION = 4
ACQUIRE_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 1.0
"""How long the server may take to end a statement that was given up; whoever gave it up waits for that too."""

UPGRADE_TIMEOUT_S = 600.0
SAY_AGAIN_S = 10.0

# "trader" in ASCII: two processes that start at once apply the schema one after the other.
SCHEMA_LOCK = 0x747261646572

# SQLSTATE classes that say something about the server or the connection, not about the statement: connection,
# authorization, missing database, deadlock, resources, operator intervention, system error; and a standby server.
TRANSIENT_CLASSES = ("08", "28", "3D", "40", "53", "57", "58")
READ_ONLY_TRANSACTION = "25006"


class PoolUse(NamedTuple):
    """Connections of the pool: open, open and free, and how many there may be."""

    size: int
    idle: int
    size_max: int


class Database:
    """A pool of connections to one PostgreSQL database."""

    def __init__(self, pool: "Pool[asyncpg.Record]") -> None:
        self._pool = pool
        self._said = ""
        self._said_at_s = 0.0

    @classmethod
    async def connect(cls, dsn: str, *, size: int = 20, command_timeout_s: float = COMMAND_TIMEOUT_S) -> "Database":
        """Connect to the server of `dsn`.

        :raises StartError: it cannot be reached, refuses the user, lacks the database, or is older than version 15
        """
        try:
            await _check_version(dsn)
            pool = await asyncpg.create_pool(
                dsn,
                min_size=min(2, size),
                max_size=size,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=command_timeout_s,
                init=_set_codecs,
                reset=_keep_as_it_is,
                server_settings={"application_name": "trader", "timezone": "UTC"},
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, ValueError) as error:
            raise StartError(_start_problem(dsn, error)) from error
        return cls(pool)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for a few statements, each of them its own transaction.

        :raises Unavailable: the server cannot be reached, or not in time
        """
        try:
            conn = await self._pool.acquire(timeout=ACQUIRE_TIMEOUT_S)
        except TimeoutError as error:
            raise Unavailable("The database is busy: no connection became free in time.") from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise self._unavailable("The database cannot be reached now.", error) from error
        try:
            yield conn
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            problem = _passing_problem(error, is_lost=_is_lost(conn))
            if problem is None:
                raise
            raise self._unavailable(problem, error) from error
        finally:
            await self._give_back(conn)

    def _unavailable(self, problem: str, error: Exception) -> Unavailable:
        """The error for the caller, who is not told why; the log is, and of the same cause every ten seconds."""
        words = (str(error) or type(error).__name__).split("\n", 1)[0]
        now_s = time.monotonic()
        if words != self._said or now_s - self._said_at_s > SAY_AGAIN_S:
            self._said, self._said_at_s = words, now_s
            log.warning("%s %s", problem, words)
        return Unavailable(problem)

    async def _give_back(self, conn: "PoolConnectionProxy[asyncpg.Record]") -> None:
        """Back to the pool. A connection whose server does not even cancel a statement in time is closed by the pool.

        What was done with it has succeeded or failed already; its end says nothing about that.
        """
        try:
            await self._pool.release(conn, timeout=CANCEL_TIMEOUT_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            log.warning("a connection to the database was given up: %s", str(error) or type(error).__name__)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection inside one transaction: committed at the end of the block, rolled back by an exception.

        :raises Unavailable: the server cannot be reached, or not in time
        """
        async with self.connection() as conn, conn.transaction():
            yield conn

    async def ping(self) -> float:
        """How long the server takes to answer, in milliseconds."""
        started_s = time.perf_counter()
        async with self.connection() as conn:
            await conn.fetchval("SELECT 1")
        return (time.perf_counter() - started_s) * 1000

    def use(self) -> PoolUse:
        """How much of the pool is in use now."""
        return PoolUse(self._pool.get_size(), self._pool.get_idle_size(), self._pool.get_max_size())

    async def close(self) -> None:
        """Close the connections, at once those that are still in use after the time of one command."""
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._pool.close()
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            self._pool.terminate()


async def _set_codecs(conn: Connection) -> None:
    await conn.set_type_codec("jsonb", schema="pg_catalog", encoder=_encode_json, decoder=orjson.loads, format="text")


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


async def _keep_as_it_is(conn: Connection) -> None:
    pass


async def _check_version(dsn: str) -> None:
    conn = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    try:
        major = conn.get_server_version().major
        version = str(conn.get_settings().server_version).split(" ", 1)[0]
    finally:
        await conn.close(timeout=CONNECT_TIMEOUT_S)
    if major < OLDEST_VERSION:
        raise StartError(
            f"The database at {place(dsn)} is PostgreSQL {version}; version {OLDEST_VERSION} or later is needed."
        )


def place(dsn: str) -> str:
    """`host:port/database` of a connection string, for messages: never its user, password or options."""
    unknown = "the address of DATABASE_URL"
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return unknown
    if "@" in parts.path + parts.query + parts.fragment:
        return unknown  # a password with a / or ? or # that was not percent-encoded: its beginning passes for the host
    options = parse_qs(parts.query)
    hosts = options.get("host", [parts.netloc.rpartition("@")[2]])[0] or "localhost"
    if ":" not in hosts and not hosts.startswith("/"):
        hosts += ":" + options.get("port", ["5432"])[0]
    name = options.get("dbname", options.get("database", [parts.path.strip("/")]))[0]
    return f"{hosts}/{name}"


def database_name(market_identity: str, live_account: int | None = None) -> str:
    """The name of the database of a market's books, or of a live account's, where the name is ours to choose."""
    whose = market_identity if live_account is None else f"{market_identity}:live:{live_account}"
    return "trader_" + re.sub(r"[^a-z0-9]+", "_", whose.lower()).strip("_")


def _start_problem(dsn: str, error: Exception) -> str:
    where = place(dsn)
    if isinstance(error, asyncpg.PostgresError):
        return {
            "3D000": f"The server has no such database: {where}. Create it first (createdb).",
            "28000": f"The database at {where} refuses the user of DATABASE_URL.",
            "28P01": f"The database at {where} refuses the user or the password of DATABASE_URL.",
            "42501": f"The user of DATABASE_URL may not connect to the database at {where}.",
        }.get(error.sqlstate or "", f"The database at {where} refuses connections now: {error}.")
    if isinstance(error, TimeoutError):
        return f"The database at {where} cannot be reached: no answer within {CONNECT_TIMEOUT_S:g} s."
    if isinstance(error, OSError):
        return f"The database at {where} cannot be reached: {error.strerror or 'connection failed'}."
    return f"The database at {where} cannot be used: DATABASE_URL is no usable connection string."


def _is_lost(conn: Connection) -> bool:
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:  # the pool took it back the moment it was lost
        return True


def _passing_problem(error: Exception, *, is_lost: bool) -> str | None:
    """What to tell the caller when the fault is the server's or the connection's; None when it is the statement's."""
    if isinstance(error, asyncpg.PostgresError):
        sqlstate = error.sqlstate or ""
        if sqlstate.startswith(TRANSIENT_CLASSES) or sqlstate == READ_ONLY_TRANSACTION:
            return "The database cannot answer now."
        return None
    if isinstance(error, asyncpg.InterfaceError):
        # The driver uses this class for wrong arguments too; those are faults of ours, and the connection lives on.
        return "The connection to the database was lost." if is_lost else None
    if isinstance(error, TimeoutError):
        return "The database took too long to answer."
    return "The connection to the database was lost."


# -- schema ----------------------------------------------------------------------------------------------------------

LOCK_SCHEMA = "SELECT pg_advisory_xact_lock($1)"
SELECT_HAS_SCHEMA = "SELECT to_regclass('schema_version') IS NOT NULL"
SELECT_SCHEMA_VERSION = "SELECT version FROM schema_version"
UPDATE_SCHEMA_VERSION = "UPDATE schema_version SET version = $1, applied_at = now() WHERE version < $1"


def schema_path() -> Path:
    """Where schema.sql is: at the root of the checkout, or where an installed package keeps its data."""
    checkout = Path(__file__).parents[3] / "schema.sql"
    installed = Path(sysconfig.get_path("data"), "share", "trader", "schema.sql")
    return checkout if checkout.exists() else installed


async def apply_schema(database: Database) -> None:
    """Make the tables of this version: in an empty database, or out of those of an earlier version, with their data.

    Safe to repeat, and for two processes at once. A database that is of this version already is left alone, without a
    lock on anything.

    :raises StartError: the database was made by a newer version of this program, or the user may not make tables
    """
    async with database.connection() as conn:
        if await select_schema_version(conn) == SCHEMA_VERSION:
            return
    async with database.transaction() as conn:
        await conn.execute(LOCK_SCHEMA, SCHEMA_LOCK)
        found = await select_schema_version(conn)
        if found is not None and found > SCHEMA_VERSION:
            raise StartError(
                f"The database has schema version {found}, made by a newer version of trader; "
                f"this one knows version {SCHEMA_VERSION}. Start the newer version, or use another database."
            )
        steps = [] if found is None else [MIGRATIONS[step] for step in range(found + 1, SCHEMA_VERSION + 1)]
        try:
            for statements in [*steps, schema_path().read_text(encoding="utf-8")]:
                await conn.execute(statements, timeout=UPGRADE_TIMEOUT_S)
        except asyncpg.InsufficientPrivilegeError as error:
            raise StartError(f"The user of DATABASE_URL may not create the tables: {error}.") from error
        await conn.execute(UPDATE_SCHEMA_VERSION, SCHEMA_VERSION)


@asynccontextmanager
async def attached(dsn: str) -> AsyncIterator[Database]:
    """The database of a service, for a tool: as it is.

    :raises StartError: it cannot be used, or its tables are not those of this version
    """
    database = await Database.connect(dsn, size=1)
    try:
        async with database.connection() as conn:
            found = await select_schema_version(conn)
        if found != SCHEMA_VERSION:
            made = "is empty" if found is None else f"has schema version {found}"
            raise StartError(
                f"The database at {place(dsn)} {made}; this program knows version {SCHEMA_VERSION}. "
                "Use the version of the service; a start of the service brings its database up to date."
            )
        yield database
    finally:
        await database.close()


async def select_schema_version(conn: Connection) -> int | None:
    """The version that the tables have; None in an empty database."""
    if not await conn.fetchval(SELECT_HAS_SCHEMA):
        return None
    found: int | None = await conn.fetchval(SELECT_SCHEMA_VERSION)
    return found
