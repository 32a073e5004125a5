"""Connection pool of the database, and how its errors are reported to callers.

Connections return to the pool without a reset, which would cost a third of the throughput. So no statement may change
the state of its session (SET, LISTEN, session advisory locks); inside a transaction `SET LOCAL` and
`pg_advisory_xact_lock` are fine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

import asyncpg
import msgspec
import orjson

from trader.errors import StartError, Unavailable

if TYPE_CHECKING:
    from asyncpg.pool import Pool, PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection

log = logging.getLogger("trader.store")

OLDEST_VERSION = 15
ACQUIRE_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 1.0
"""How long the server may take to cancel an abandoned statement; its caller waits for that too."""

LOG_AGAIN_S = 60.0
"""How long the same problem is not logged again, whatever else is logged between."""

LOGGED_MAX = 32
"""How many problems are remembered as logged."""

# SQLSTATE classes that say something about the server or the connection, not about the statement: connection,
# authorization, missing database, deadlock, resources, operator intervention, system error; and a standby server.
TRANSIENT_CLASSES = ("08", "28", "3D", "40", "53", "57", "58")
READ_ONLY_TRANSACTION = "25006"

DISK_FULL = "53100"

SELECT_ALIVE = "SELECT 1"
SELECT_IS_REPLICA = "SELECT pg_is_in_recovery()"

CREATE_WRITE_PROBE = """
CREATE TEMPORARY TABLE write_probe ON COMMIT DROP AS SELECT repeat('x', 1900) AS filler FROM generate_series(1, 512)
"""


class Page(NamedTuple):
    """At most `limit` rows older than `until` (None: the newest), without the first `skip` of those."""

    limit: int
    until: datetime | None = None
    skip: int = 0


class PoolUse(NamedTuple):
    """Connections of the pool: open, idle, and their maximum."""

    size: int
    idle: int
    size_max: int


class Database:
    """A pool of connections to one PostgreSQL database."""

    def __init__(self, pool: "Pool[asyncpg.Record]") -> None:
        self._pool = pool
        self._logged_at_s: dict[str, float] = {}  # by cause
        self.write_trouble: str | None = None
        """Why the last write failed; None when it succeeded."""

        self.write_failures = 0

    @classmethod
    async def connect(
        cls, dsn: str, *, size: int = 20, command_timeout_s: float = COMMAND_TIMEOUT_S, read_only: bool = False
    ) -> "Database":
        """Connect to the database of `dsn`. With `read_only` the server refuses to write.

        :raises StartError: the server is unreachable, refuses the user, lacks the database, or is older than 15
        """
        session = {"application_name": "trader", "timezone": "UTC"}
        if read_only:
            session["default_transaction_read_only"] = "on"
        try:
            await _check_version(dsn)
            pool = await asyncpg.create_pool(
                dsn,
                min_size=min(2, size),
                max_size=size,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=command_timeout_s,
                init=_set_codecs,
                reset=_skip_reset,
                server_settings=session,
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, ValueError) as error:
            raise StartError(_start_problem(dsn, error)) from error
        return cls(pool)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection for a few statements, each a transaction of its own.

        :raises Unavailable: the server cannot be reached, or does not answer in time
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
            problem = _transient_problem(error, is_lost=_is_lost(conn))
            if problem is None:
                raise
            raise self._unavailable(problem, error) from error
        finally:
            await self._release(conn)

    def _unavailable(self, problem: str, error: Exception) -> Unavailable:
        """Return the error for the caller, without its cause; log the cause, a repeated one at most once a minute."""
        cause = (str(error) or type(error).__name__).split("\n", 1)[0]
        now_s = time.monotonic()
        if now_s - self._logged_at_s.get(cause, -LOG_AGAIN_S) >= LOG_AGAIN_S:
            if len(self._logged_at_s) >= LOGGED_MAX:
                self._logged_at_s.clear()
            self._logged_at_s[cause] = now_s
            log.warning("%s %s", problem, cause)
        return Unavailable(problem)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Connection]:
        """Borrow a connection for writes, and record in `write_trouble` whether the database accepts them.

        :raises Unavailable: the server cannot be reached, or does not answer in time
        """
        try:
            async with self.connection() as conn:
                yield conn
        except Unavailable as error:
            self.write_failures += 1
            self.write_trouble = str(error)
            raise
        self.write_trouble = None

    async def _release(self, conn: "PoolConnectionProxy[asyncpg.Record]") -> None:
        """Return a connection to the pool, which closes it when the server does not cancel its statement in time.

        The caller's statements have succeeded or failed by then, so a failure here is logged and not raised.
        """
        try:
            await self._pool.release(conn, timeout=CANCEL_TIMEOUT_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            log.warning("a connection to the database was closed: %s", str(error) or type(error).__name__)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Borrow a connection in a transaction: committed at the end of the block, rolled back by an exception.

        :raises Unavailable: the server cannot be reached, or does not answer in time
        """
        async with self.connection() as conn, conn.transaction():
            yield conn

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Borrow a connection whose statements all see the database as of one moment, and write nothing.

        For reads of several statements that must be consistent with each other.

        :raises Unavailable: the server cannot be reached, or does not answer in time
        """
        async with self.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            yield conn

    async def probe_write(self) -> None:
        """Write a megabyte and discard it, so that `write_trouble` is current even when nobody trades.

        A small write proves nothing: it may fit into an existing page although the disk is full.

        :raises Unavailable: it cannot be written
        """
        async with self.writing() as conn, conn.transaction():
            await conn.execute(CREATE_WRITE_PROBE)

    async def is_replica(self) -> bool:
        """Return whether this is a streaming replica, which cannot be written until it is promoted."""
        async with self.connection() as conn:
            return bool(await conn.fetchval(SELECT_IS_REPLICA))

    async def ping(self) -> float:
        """Return how long the server takes to answer, in milliseconds."""
        started_s = time.perf_counter()
        async with self.connection() as conn:
            await conn.fetchval(SELECT_ALIVE)
        return (time.perf_counter() - started_s) * 1000

    def use(self) -> PoolUse:
        """Return the present numbers of connections."""
        return PoolUse(self._pool.get_size(), self._pool.get_idle_size(), self._pool.get_max_size())

    async def close(self) -> None:
        """Close the connections; those still in use after the time limit of a command are cut."""
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._pool.close()
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            self._pool.terminate()


async def _set_codecs(conn: Connection) -> None:
    await conn.set_type_codec("jsonb", schema="pg_catalog", encoder=_encode_json, decoder=orjson.loads, format="text")


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


async def _skip_reset(conn: Connection) -> None:
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
    """Return `host:port/database` of a connection string for messages, without user, password and options."""
    unknown = "the address of DATABASE_URL"
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return unknown
    if "@" in parts.path + parts.query + parts.fragment:
        return unknown  # a password with an unencoded / or ? or #: its beginning would be taken for the host
    options = parse_qs(parts.query)
    hosts = options.get("host", [parts.netloc.rpartition("@")[2]])[0] or "localhost"
    if ":" not in hosts and not hosts.startswith("/"):
        hosts += ":" + options.get("port", ["5432"])[0]
    name = options.get("dbname", options.get("database", [parts.path.strip("/")]))[0]
    return f"{hosts}/{name}"


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
    except asyncpg.InterfaceError:  # the pool released it when it was lost
        return True


def _transient_problem(error: Exception, *, is_lost: bool) -> str | None:
    """Describe an error of the server or the connection for the caller; None for an error of the statement."""
    if isinstance(error, asyncpg.PostgresError):
        sqlstate = error.sqlstate or ""
        if sqlstate == DISK_FULL:
            return "The disk of the database is full."
        if sqlstate.startswith(TRANSIENT_CLASSES) or sqlstate == READ_ONLY_TRANSACTION:
            return "The database cannot answer now."
        return None
    if isinstance(error, asyncpg.InterfaceError):
        # asyncpg raises this for wrong arguments too: those are bugs, and the connection stays open.
        return "The connection to the database was lost." if is_lost else None
    if isinstance(error, TimeoutError):
        return "The database took too long to answer."
    return "The connection to the database was lost."
