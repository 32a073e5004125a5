"""Connection pool of the database, and how its errors are reported to callers.

Connections return to the pool without a reset, which would cost a third of the throughput. No statement may therefore
change its session's state (SET, LISTEN, session advisory locks); inside a transaction, `SET LOCAL` and
`pg_advisory_xact_lock` are fine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import asyncpg
import msgspec
import orjson

from trader.core.clock import SystemClock
from trader.core.errors import DatabaseUnavailable, StartError

if TYPE_CHECKING:
    from asyncpg.pool import Pool, PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Connection: TypeAlias = asyncpg.Connection

T = TypeVar("T")

_IS_PATIENT: ContextVar[bool] = ContextVar("is_patient", default=False)

log = logging.getLogger("trader.store")

_REAL_TIME = SystemClock()

OLDEST_VERSION = 15
ACQUIRE_TIMEOUT_S = 5.0
PATIENCE_S = 600.0
"""How long work within `patiently` waits for a connection: as long as the invocation of a model may take."""

PATIENT_SHARE = 0.5
"""The share of the connections that all work within `patiently` uses together; further such work queues."""

COMMAND_TIMEOUT_S = 10.0
SCAN_TIMEOUT_S = 600.0
"""Timeout of statements that read a whole table."""

CONNECT_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 1.0
"""How long the server may take to cancel an abandoned statement; its caller waits for that as well."""

IDLE_IN_TRANSACTION_S = 30.0
"""How long a process of the service may leave a transaction idle: a frozen one must not lock out its successors."""

LOCK_TIMEOUT_SHARE = 0.9
"""The share of a statement's timeout that it may wait for locks, so that the server reports the cause of the wait."""

PINNED: Mapping[str, str] = {
    "application_name": "trader",
    "array_nulls": "on",
    "bytea_output": "hex",
    "datestyle": "ISO, MDY",
    "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed",
    "extra_float_digits": "1",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "intervalstyle": "postgres",
    "lock_timeout": "0",
    "row_security": "on",
    "search_path": '"$user", public',
    "standard_conforming_strings": "on",
    "statement_timeout": "0",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "transform_null_equals": "off",
}
"""The settings of every session, on which statements and promises rely, whatever a role, a database or a server says.

`default_transaction_read_only` is not among them: an administrator's freeze is obeyed, and reported as `read-only`.
"""

OF_ADDRESS = frozenset({"search_path", "statement_timeout", "synchronous_commit"})
"""Settings that DATABASE_URL may choose in its query."""

NOT_REACHABLE = "not reachable"
NOT_ANSWERING = "not answering"
LOCKED = "locked"
DENIED = "permission denied"
OF_TABLES = frozenset({LOCKED, DENIED})
"""Causes that concern some tables, and not the server."""

BUSY = "all connections in use"

# Errors about the server or the connection rather than the statement, by SQLSTATE or its class.
CAUSES = {
    "25006": "read-only",
    "25P03": "interrupted",
    "53100": "disk full",
    "53200": "out of memory",
    "53300": "too many connections",
    "55P03": LOCKED,
    "57014": "interrupted",
    "08": NOT_REACHABLE,
    "28": "access refused",
    "3D": "no such database",
    "40": LOCKED,
    "42501": DENIED,
    "53": "out of resources",
    "57": NOT_REACHABLE,
    "58": "input/output error",
    "XX": "damaged or failing",
}

SELECT_ALIVE = "SELECT 1"
SELECT_IS_READ_ONLY = "SELECT current_setting('transaction_read_only')::boolean"
SELECT_REPLICATION_ROLE = "SELECT current_setting('session_replication_role')"
SELECT_BACKEND = "SELECT pg_backend_pid()"
SELECT_IS_REPLICA = "SELECT pg_is_in_recovery()"

PROBE_LOCK_S = 3.0
"""How long the probe waits for a lock, if the session's statements do not give up earlier."""

SELECT_PROBE_TIMEOUT = """
SELECT set_config('lock_timeout', round(1000 * least($1::float8, own_s))::bigint::text, true)
FROM (SELECT extract(epoch FROM current_setting('lock_timeout')::interval)::float8 AS own_s) session
"""

CREATE_WRITE_PROBE = """
CREATE TEMPORARY TABLE write_probe ON COMMIT DROP AS SELECT repeat('x', 1900) AS filler FROM generate_series(1, 512)
"""


class Page(NamedTuple):
    """At most `limit` rows older than `until` (None: the newest), after skipping the first `skip` of them."""

    limit: int
    until: datetime | None = None
    skip: int = 0


def part_of_row(row: asyncpg.Record, kind: type[T]) -> T:
    """Return a struct or named tuple from the row's columns of the same names; the row may have others."""
    return kind(**{name: row[name] for name in kind.__annotations__})


def shown_rows(rows: Iterable[asyncpg.Record]) -> list[SimpleNamespace]:
    """Return rows that nothing but a wire struct reads, with their columns as attributes."""
    return [SimpleNamespace(**row) for row in rows]


def columns_of(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return the columns of rows, also of none, as the parameters of `unnest`."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


class StatementFailure(NamedTuple):
    """A statement that failed for a reason of the server or the connection: when it began, in real time, and ended.

    `ended_s` is in monotonic seconds.
    """

    cause: str
    began: datetime
    ended_s: float


@contextmanager
def patiently() -> Iterator[None]:
    """Let this block wait for connections as long as it takes, in a queue that leaves half of them to everything else.

    It is for work that must not fail because many others do the same, such as the invocations of models: their answers
    are paid for. Its tasks inherit it.
    """
    token = _IS_PATIENT.set(True)
    try:
        yield
    finally:
        _IS_PATIENT.reset(token)


class Database:
    """A pool of connections to one PostgreSQL database."""

    def __init__(self, pool: "Pool[asyncpg.Record]") -> None:
        self._pool = pool
        self._patient_places = asyncio.Semaphore(max(1, int(PATIENT_SHARE * pool.get_max_size())))
        self.read_trouble: str | None = None
        """Why the last statement failed; None if it succeeded."""

        self.write_trouble: str | None = None
        """Why a write failed. Reset to None by a write probe, or when another process starts writing."""

        self.write_failures = 0
        self.failing_since: datetime | None = None
        """When the first failed statement of the current failure began, in real time; None while all is well."""

        self.last_failure: StatementFailure | None = None
        self.hosts: Sequence[str] = ()
        """A connection string for each host, if the address has several."""

    @classmethod
    async def connect(
        cls,
        dsn: str,
        *,
        size: int = 20,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        read_only: bool = False,
        idle_in_transaction_s: float = 0,
    ) -> "Database":
        """Connect to the database of `dsn`. With `read_only`, the server refuses to write.

        :raises StartError: the server is unreachable, refuses the user, lacks the database, is older than 15, or
            checks no foreign keys for the user
        """
        own = {
            "lock_timeout": str(round(LOCK_TIMEOUT_SHARE * command_timeout_s * 1000)),
            "idle_in_transaction_session_timeout": str(round(idle_in_transaction_s * 1000)),
        }
        if read_only:
            own["default_transaction_read_only"] = "on"
        try:
            if await _check_server(dsn) >= 17:
                own["transaction_timeout"] = "0"
            pool = await asyncpg.create_pool(
                dsn,
                min_size=min(2, size),
                max_size=size,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=command_timeout_s,
                init=_set_codecs,
                reset=_skip_reset,
                server_settings=session_settings(dsn, own),
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, ValueError) as error:
            raise StartError(_start_problem(dsn, error)) from error
        database = cls(pool)
        database.hosts = each_host(dsn)
        return database

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection for a few statements, each in a separate transaction.

        :raises DatabaseUnavailable: the server is unreachable, or does not answer in time
        """
        if not _IS_PATIENT.get():
            async with self._borrowed(ACQUIRE_TIMEOUT_S) as conn:
                yield conn
            return
        began = _REAL_TIME.now()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._patient_places.acquire()
        except TimeoutError as error:
            raise self._unavailable(BUSY, error, began) from error
        try:
            async with self._borrowed(PATIENCE_S) as conn:
                yield conn
        finally:
            self._patient_places.release()

    @asynccontextmanager
    async def _borrowed(self, wait_s: float) -> AsyncIterator[Connection]:
        began = _REAL_TIME.now()
        try:
            conn = await self._pool.acquire(timeout=wait_s)
        except TimeoutError as error:
            is_full = self._pool.get_size() == self._pool.get_max_size()
            raise self._unavailable((self.trouble or BUSY) if is_full else NOT_ANSWERING, error, began) from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            raise self._unavailable(transient_cause(error, is_lost=True) or NOT_REACHABLE, error, began) from error
        try:
            yield conn
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            cause = transient_cause(error, is_lost=_is_lost(conn))
            if cause is None:
                await _end_statement(conn)
                raise
            raise self._unavailable(cause, error, began) from error
        except asyncpg.InternalClientError as error:  # the server was gone before the connection noticed
            conn.terminate()
            raise self._unavailable(NOT_REACHABLE, error, began) from error
        except asyncio.CancelledError:
            await _end_statement(conn)
            raise
        finally:
            await self._release(conn)
        self.read_trouble = None
        if self.write_trouble is None:
            self.failing_since = None

    def _unavailable(self, cause: str, error: Exception, began: datetime) -> DatabaseUnavailable:
        """Return the error for the caller, and log the server's message, which callers do not see."""
        self.read_trouble = cause
        self.failing_since = self.failing_since or began
        self.last_failure = StatementFailure(cause, began, time.monotonic())
        detail = (str(error) or type(error).__name__).split("\n", 1)[0]
        unavailable = DatabaseUnavailable(cause)
        log.warning("%s (%s)", unavailable, detail)
        return unavailable

    @property
    def trouble(self) -> str | None:
        """Why the database is unusable now, as far as this process has noticed.

        A failed read is more recent: the next successful read clears it, whereas writes wait for their probe.
        """
        return self.read_trouble or self.write_trouble

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Connection]:
        """Borrow a connection for writes, and record in `write_trouble` if the database does not accept them.

        :raises DatabaseUnavailable: the server is unreachable, or does not answer in time
        """
        try:
            async with self.connection() as conn:
                yield conn
        except DatabaseUnavailable as error:
            self.write_failures += 1
            self.write_trouble = error.cause
            raise

    async def _release(self, conn: "PoolConnectionProxy[asyncpg.Record]") -> None:
        """Return a connection to the pool, which closes it if the server does not cancel its statement in time.

        The caller's statements have succeeded or failed by then, so a failure here is logged but not raised.
        """
        try:
            await self._pool.release(conn, timeout=CANCEL_TIMEOUT_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            log.warning("a connection to the database was closed: %s", str(error) or type(error).__name__)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Borrow a connection for writes in a transaction, which is committed at the end of the block or rolled back.

        :raises DatabaseUnavailable: the server is unreachable, or does not answer in time
        """
        async with self.writing() as conn, conn.transaction():
            yield conn

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Borrow a connection whose statements all see one snapshot of the database and write nothing.

        Use it for reads of several statements that must be consistent with each other.

        :raises DatabaseUnavailable: the server is unreachable, or does not answer in time
        """
        async with self.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            yield conn

    async def probe(self, tables: Collection[str], *, writes: bool) -> None:
        """Lock tables as a write does, and release them; with `writes`, also write a megabyte and discard it.

        A lock that would block a write blocks the probe, too; the probe blocks no write. Success with `writes` clears
        `write_trouble`; a small write proves nothing, since it may fit into an existing page even if the disk is full.

        :raises DatabaseUnavailable: the database is not writable, or another transaction holds a lock on a table
        """
        async with self.transaction() as conn:
            await conn.fetchval(SELECT_PROBE_TIMEOUT, PROBE_LOCK_S)
            await conn.execute(f"LOCK TABLE {', '.join(tables)} IN ROW EXCLUSIVE MODE")
            if writes:
                await conn.execute(CREATE_WRITE_PROBE)
        if writes:
            self.write_trouble = self.failing_since = None

    async def is_replica(self) -> bool:
        """Return whether this is a streaming replica, which is not writable until it is promoted."""
        async with self.connection() as conn:
            return bool(await conn.fetchval(SELECT_IS_REPLICA))

    async def is_read_only(self) -> bool:
        """Return whether new transactions may not write: on a replica, or if the server or database is set so."""
        async with self.connection() as conn:
            return bool(await conn.fetchval(SELECT_IS_READ_ONLY))

    async def ping(self) -> float:
        """Return how long the server takes to answer, in milliseconds."""
        started_s = time.perf_counter()
        async with self.connection() as conn:
            await conn.fetchval(SELECT_ALIVE)
        return (time.perf_counter() - started_s) * 1000

    def use(self) -> tuple[int, int, int]:
        """Return how many connections are open, how many of them are idle, and how many there may be."""
        return self._pool.get_size(), self._pool.get_idle_size(), self._pool.get_max_size()

    async def close(self) -> None:
        """Close the connections; those still in use after the timeout of a command are cut."""
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


async def _end_statement(conn: Connection) -> None:
    """End the transaction that a prepared statement may leave open if it is canceled or has a wrong argument.

    asyncpg does not know about that transaction: the server opened it, and waits for the end of the protocol's message.
    """
    try:
        await conn.execute(SELECT_ALIVE, timeout=CANCEL_TIMEOUT_S)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError):
        if not _is_lost(conn):
            conn.terminate()


def session_settings(dsn: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session, its `own` ones among them. Every connection of the product begins with them."""
    query = urlsplit(dsn).query
    return {name: value for name, value in {**PINNED, **own}.items() if name not in OF_ADDRESS or name not in query}


async def connect_alone(
    dsn: str, *, command_timeout_s: float | None = None, **own: str
) -> "asyncpg.Connection[asyncpg.Record]":
    """Open a connection outside of a pool, with the session's settings and its `own` ones."""
    settings = session_settings(dsn, own)
    return await asyncpg.connect(
        dsn, timeout=CONNECT_TIMEOUT_S, command_timeout=command_timeout_s, server_settings=settings
    )


async def require_own_sessions(dsn: str) -> None:
    """Check that no pooler lends a session of the server to several connections: locks and settings are the session's.

    :raises StartError: two open connections have one session, or the server cannot be reached
    """
    try:
        async with AsyncExitStack() as stack:
            one, other = await connect_alone(dsn), await connect_alone(dsn)
            stack.push_async_callback(one.close, timeout=CONNECT_TIMEOUT_S)
            stack.push_async_callback(other.close, timeout=CONNECT_TIMEOUT_S)
            mine = await one.fetchval(SELECT_BACKEND)
            async with other.transaction():
                is_shared = mine == await other.fetchval(SELECT_BACKEND)
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        is_shared = True  # a statement was prepared in a session that is now another connection's
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, ValueError) as error:
        raise StartError(_start_problem(dsn, error)) from error
    if is_shared:
        raise StartError(
            f"The pooler at {place(dsn)} shares sessions of the database among connections (pool_mode = transaction or "
            "statement). The service needs its own: set pool_mode = session, or connect to PostgreSQL directly."
        )


async def _check_server(dsn: str) -> int:
    """Return the major version of a usable server."""
    conn = await connect_alone(dsn)
    try:
        major: int = conn.get_server_version().major
        if major < OLDEST_VERSION:
            version = str(conn.get_settings().server_version).split(" ", 1)[0]
            raise StartError(
                f"The database at {place(dsn)} is PostgreSQL {version}; version {OLDEST_VERSION} or later is needed."
            )
        role = await conn.fetchval(SELECT_REPLICATION_ROLE)
    finally:
        await conn.close(timeout=CONNECT_TIMEOUT_S)
    if role != "origin":  # only a superuser can set it, even back
        raise StartError(
            f"The database at {place(dsn)} sets session_replication_role to {role}, so foreign keys and triggers do "
            "not hold. Reset it with ALTER ROLE or ALTER DATABASE … RESET session_replication_role."
        )
    return major


def place(dsn: str) -> str:
    """Return `host:port/database` of a connection string for messages, without user, password and options."""
    unknown = "the address of DATABASE_URL"
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return unknown
    if "@" in parts.path + parts.query + parts.fragment:
        return unknown  # a password with an unencoded / or ? or #: its beginning would be mistaken for the host
    options = parse_qs(parts.query)
    hosts = options.get("host", [parts.netloc.rpartition("@")[2]])[0] or "localhost"
    if ":" not in hosts and not hosts.startswith("/"):
        hosts += ":" + options.get("port", ["5432"])[0]
    name = options.get("dbname", options.get("database", [parts.path.strip("/")]))[0]
    return f"{hosts}/{name}"


def each_host(dsn: str) -> list[str]:
    """Return a connection string for each host of one that has several; none for one with a single host."""
    parts = urlsplit(dsn)
    options, (userinfo, at, named) = dict(parse_qsl(parts.query)), parts.netloc.rpartition("@")
    hosts, ports = options.get("host", named).split(","), options.get("port", "").split(",")
    places: list[tuple[str | None, object]] = list(
        zip(hosts, ports if len(ports) > 1 else ports * len(hosts), strict=False)
    )
    if "host" not in options:
        own = [urlsplit(f"//{host}") for host in hosts]
        places = [(each.hostname, each.port or options.get("port", "")) for each in own]
    queries = [{**options, "host": host, **({"port": port} if port else {})} for host, port in places]
    uris = [parts._replace(netloc=f"{userinfo}{at}", query=urlencode(query)).geturl() for query in queries]
    return uris if len(uris) > 1 else []


def _start_problem(dsn: str, error: Exception) -> str:
    where = place(dsn)
    cause = transient_cause(error, is_lost=True)
    if isinstance(error, asyncpg.PostgresError):
        return {
            "3D000": f"The server has no such database: {where}. Create it first (createdb).",
            "28000": f"The database at {where} refuses the user of DATABASE_URL.",
            "28P01": f"The database at {where} refuses the user or the password of DATABASE_URL.",
            "08P01": f"The pooler at {where} refuses a setting of the session ({error}): list what it must ignore, as "
            "docs/operation.md says (PgBouncer), or connect to PostgreSQL directly.",
            "42501": f"The user of DATABASE_URL may not connect to the database at {where}.",
        }.get(error.sqlstate or "", f"The database at {where} cannot be used now: {cause or 'refused'}: {error}.")
    if isinstance(error, TimeoutError):
        return f"The database at {where} cannot be used now: {cause} within {CONNECT_TIMEOUT_S:g} s."
    if isinstance(error, OSError):
        return f"The database at {where} cannot be used now: {cause}: {error.strerror or 'connection failed'}."
    return f"The database at {where} cannot be used: DATABASE_URL is not a usable connection string."


def _is_lost(conn: Connection) -> bool:
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:  # the pool released it when it was lost
        return True


def transient_cause(error: Exception, *, is_lost: bool) -> str | None:
    """Describe a problem of the server or the connection in a few words; None for an error of the statement."""
    if isinstance(error, asyncpg.PostgresError):
        sqlstate = error.sqlstate or ""
        return CAUSES.get(sqlstate, CAUSES.get(sqlstate[:2]))
    if isinstance(error, asyncpg.InterfaceError):
        # asyncpg also raises this for wrong arguments: those are bugs, and the connection stays open.
        return NOT_REACHABLE if is_lost else None
    return NOT_ANSWERING if isinstance(error, TimeoutError) else NOT_REACHABLE
