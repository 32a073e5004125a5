"""The pool on a real server: codecs, translated failures, limits, and the reasons for refusing a start."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from urllib.parse import quote

import asyncpg
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.proxy import FaultyProxy
from support.waiting import until

from trader.core.errors import DatabaseUnavailable, StartError, Unavailable
from trader.database import pool
from trader.database.pool import Connection, Database, place
from trader.database.schema import used_tables

Borrow = Callable[[Database], AbstractAsyncContextManager[Connection]]


class Note(msgspec.Struct):
    text: str
    amount: Decimal


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 2.5, None, "ü"]}, {"a": [1, 2.5, None, "ü"]}),
        (Note("x", Decimal("1.10")), {"text": "x", "amount": "1.10"}),
        ([Note('quoted "text"', Decimal(0))], [{"text": 'quoted "text"', "amount": "0"}]),
        ("text", "text"),
    ],
)
async def test_jsonb_accepts_structs_and_returns_builtins(database: Database, value: object, read: object) -> None:
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT $1::jsonb", value) == read


async def test_null_stays_null_in_jsonb(database: Database) -> None:
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT $1::jsonb IS NULL", None)


async def test_transaction_commits_at_the_end_of_its_block(database: Database) -> None:
    async with database.transaction() as conn:
        await conn.execute("CREATE TABLE kept (number int)")
        await conn.execute("INSERT INTO kept VALUES (1)")
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT number FROM kept") == 1


async def test_a_statement_canceled_before_execution_leaves_nothing_to_the_next_caller(dsn: str) -> None:
    database = await Database.connect(dsn, size=1)
    prepared = asyncio.Event()

    async def prepare() -> None:  # what a statement with arguments does first; the server then waits for the rest
        async with database.connection() as conn:
            await conn.prepare("SELECT count(*) FROM accounts WHERE id = $1")
            prepared.set()
            await asyncio.Event().wait()

    statement = asyncio.create_task(prepare())
    await prepared.wait()
    statement.cancel()
    await asyncio.wait([statement])
    async with database.reading() as conn:
        assert await conn.fetchval("SELECT count(*) FROM accounts") == 0
    await database.close()


async def test_a_statement_with_a_wrong_argument_leaves_nothing_to_the_next_caller(dsn: str) -> None:
    database = await Database.connect(dsn, size=1)
    with pytest.raises(asyncpg.DataError):
        async with database.connection() as conn:
            await conn.fetchval("SELECT count(*) FROM accounts WHERE sequence = $1", 1 << 80)
    async with database.reading() as conn:
        assert await conn.fetchval("SELECT count(*) FROM accounts") == 0
    await database.close()


async def test_transaction_rolls_back_on_any_exception(database: Database) -> None:
    with pytest.raises(KeyError):
        async with database.transaction() as conn:
            await conn.execute("CREATE TABLE lost (number int)")
            raise KeyError
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT to_regclass('lost')") is None


async def test_canceled_transaction_leaves_nothing_open(dsn: str) -> None:
    database = await Database.connect(dsn, size=1)
    inside = asyncio.Event()

    async def work() -> None:
        async with database.transaction() as conn:
            await conn.execute("CREATE TABLE lost (number int)")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with database.connection() as conn:  # the only connection, returned outside of any transaction
        assert not conn.is_in_transaction()
        assert await conn.fetchval("SELECT to_regclass('lost')") is None
    await database.close()


async def _cut(victim: Connection, dsn: str) -> None:
    killer = await asyncpg.connect(dsn)
    assert await killer.fetchval("SELECT pg_terminate_backend($1, 5000)", victim.get_server_pid())
    await killer.close()


@pytest.mark.parametrize("borrow", [Database.connection, Database.transaction])
async def test_cut_connection_is_unavailable_and_the_next_one_works(
    database: Database, dsn: str, borrow: Borrow
) -> None:
    with pytest.raises(Unavailable):
        async with borrow(database) as conn:
            await _cut(conn, dsn)
            await conn.fetchval("SELECT 1")
    assert await database.ping() > 0


@pytest.mark.parametrize("borrow", [Database.connection, Database.transaction])
async def test_a_hanging_server_is_unavailable_even_if_it_cannot_cancel_the_statement(
    dsn: str, monkeypatch: pytest.MonkeyPatch, borrow: Borrow
) -> None:
    proxy = FaultyProxy(dsn)
    database = await Database.connect(await proxy.start(), size=1, command_timeout_s=0.6)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "CANCEL_TIMEOUT_S", 0.2)  # shorter than a statement may take, as in the service
        # Lost: the driver abandons the connection when the cancellation times out before the rollback does.
        with pytest.raises(Unavailable, match=r"not answering|not reachable"):
            async with borrow(database) as conn:
                proxy.stall()
                await conn.fetchval("SELECT 1")
    proxy.pass_on()
    assert await database.ping() > 0, "the slot in the pool is free again"
    await database.close()
    await proxy.close()


async def test_an_abandoned_query_ends_soon(dsn: str) -> None:
    proxy = FaultyProxy(dsn)
    database = await Database.connect(await proxy.start(), size=2)
    await database.ping()
    proxy.stall()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await database.ping()
    assert time.monotonic() - began_s < 3, "and not only when a connection should have been free"
    proxy.pass_on()
    assert await database.ping() > 0
    await database.close()
    await proxy.close()


async def test_connection_cut_between_two_statements_is_unavailable(database: Database, dsn: str) -> None:
    with pytest.raises(Unavailable):
        async with database.transaction() as conn:
            await _cut(conn, dsn)
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):
                await conn.fetchval("SELECT 1")
            # Whatever the driver raised there, it raises InterfaceError here and at the end of the block.
            await conn.fetchval("SELECT 1")
    assert await database.ping() > 0


async def test_a_faulty_statement_is_not_called_unavailable(database: Database) -> None:
    with pytest.raises(asyncpg.UniqueViolationError):
        async with database.connection() as conn:
            await conn.execute("INSERT INTO schema_version (version) VALUES (1)")
    with pytest.raises(asyncpg.UndefinedTableError):
        async with database.transaction() as conn:
            await conn.execute("SELECT * FROM nowhere")


async def test_wrong_arguments_are_not_called_unavailable(database: Database) -> None:
    with pytest.raises(asyncpg.InterfaceError, match="expects 1 argument"):
        async with database.connection() as conn:
            await conn.fetchval("SELECT $1::int")
    with pytest.raises(asyncpg.DataError):
        async with database.connection() as conn:
            await conn.fetchval("SELECT $1::int", "text")


async def test_deadlock_makes_one_of_the_two_unavailable(database: Database) -> None:
    async with database.connection() as conn:
        await conn.execute("CREATE TABLE pair (id int PRIMARY KEY, n int); INSERT INTO pair VALUES (1, 0), (2, 0)")
    barrier = asyncio.Barrier(2)

    async def update(first: int, second: int) -> None:
        async with database.transaction() as conn:
            await conn.execute("SET LOCAL deadlock_timeout = '10ms'")
            await conn.execute("UPDATE pair SET n = n + 1 WHERE id = $1", first)
            await barrier.wait()
            await conn.execute("UPDATE pair SET n = n + 1 WHERE id = $1", second)

    outcomes = await asyncio.gather(update(1, 2), update(2, 1), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["DatabaseUnavailable", "NoneType"]


async def test_waiting_for_a_connection_is_bounded(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ACQUIRE_TIMEOUT_S", 0.05)
    database = await Database.connect(dsn, size=1)
    async with database.connection():
        with pytest.raises(Unavailable, match="all connections in use"):
            async with database.connection():
                pass
    assert await database.ping() > 0
    await database.close()


async def test_patient_work_waits_longer_and_leaves_half_of_the_connections(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ACQUIRE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    database, release = await Database.connect(dsn, size=2), asyncio.Event()
    holding = []

    async def hold() -> None:
        with pool.patiently():
            async with database.connection():
                holding.append(1)
                await release.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(3)]
    await until(lambda: holding)
    async with database.connection():
        assert len(holding) == 1
    with pytest.raises(Unavailable, match="all connections in use"), pool.patiently():
        async with database.connection():
            pass
    release.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "NoneType",
        "DatabaseUnavailable",
        "DatabaseUnavailable",
    ]
    async with database.connection():
        assert database.use()[0] <= 2
    await database.close()


async def test_slow_statement_times_out(dsn: str) -> None:
    database = await Database.connect(dsn, size=1, command_timeout_s=0.5)
    with pytest.raises(Unavailable, match="not answering"):
        async with database.connection() as conn:
            await conn.execute("SELECT pg_sleep(30)")
    await database.close()


async def test_closing_does_not_wait_forever(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "COMMAND_TIMEOUT_S", 0.05)
    database = await Database.connect(dsn, size=1)
    with pytest.raises(Unavailable):
        async with database.connection() as conn:
            await asyncio.wait_for(database.close(), timeout=5)
            await conn.fetchval("SELECT 1")


async def test_closed_pool_is_unavailable(dsn: str) -> None:
    database = await Database.connect(dsn, size=1)
    await database.close()
    with pytest.raises(Unavailable):
        await database.ping()


# -- refused starts --------------------------------------------------------------------------------------------------

SECRET = "s3cr3t-word"


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _parameter(name: str, value: str) -> bytes:
    return _message(b"S", f"{name}\0{value}\0".encode())


def _error(sqlstate: str, text: str) -> bytes:
    return _message(b"E", f"SFATAL\0VFATAL\0C{sqlstate}\0M{text}\0\0".encode())


OLD_SERVER = (
    _message(b"R", struct.pack("!i", 0))
    + _parameter("server_version", "14.11 (Debian 14.11-1)")
    + _parameter("client_encoding", "UTF8")
    + _message(b"K", struct.pack("!ii", 1, 2))
    + _message(b"Z", b"I")
)


@asynccontextmanager
async def server_that_answers(answer: bytes) -> AsyncIterator[int]:
    """A server that answers the startup message of PostgreSQL's protocol and nothing more; returns its port."""

    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.append(task)
        while True:
            (length,) = struct.unpack("!i", await reader.readexactly(4))
            if (await reader.readexactly(length - 4))[:4] != struct.pack("!i", 80877103):
                break
            writer.write(b"N")  # no TLS
        writer.write(answer)
        with suppress(ConnectionError):
            await reader.read(1)  # the client says goodbye, or leaves silently
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*served)


async def test_older_server_is_refused_by_its_version() -> None:
    async with server_that_answers(OLD_SERVER) as port:
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port}/trader is PostgreSQL 14\.11; version 15") as caught:
            await Database.connect(f"postgresql://user:{SECRET}@127.0.0.1:{port}/trader")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("sqlstate", "said"),
    [
        ("28P01", "refuses the user or the password"),
        ("28000", "refuses the user"),
        ("57P03", "not reachable: the database system is starting up"),
        ("53300", "too many connections"),
    ],
)
async def test_refused_start_gives_the_reason(sqlstate: str, said: str) -> None:
    async with server_that_answers(_error(sqlstate, "the database system is starting up")) as port:
        with pytest.raises(StartError, match=said) as caught:
            await Database.connect(f"postgresql://user:{SECRET}@127.0.0.1:{port}/trader")
    assert f"127.0.0.1:{port}/trader" in str(caught.value)
    assert SECRET not in str(caught.value)


async def test_unreachable_server_is_named_without_its_password() -> None:
    with socket.socket() as closed:  # bound but not listening: nobody else can answer there
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}/trader cannot be used now: not reachable") as caught:
            await Database.connect(f"postgresql://user:{SECRET}@127.0.0.1:{port}/trader")
    assert SECRET not in str(caught.value)


async def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CONNECT_TIMEOUT_S", 0.05)
    async with server_that_answers(b"") as port:
        with pytest.raises(StartError, match=r"not answering within 0\.05 s"):
            await Database.connect(f"postgresql://127.0.0.1:{port}/trader")


async def test_missing_database_is_named(dsn: str) -> None:
    with pytest.raises(StartError, match=r"no such database.*nowhere"):
        await Database.connect(dsn.replace(asyncpg_name(dsn), "nowhere"))


def asyncpg_name(dsn: str) -> str:
    return place(dsn).rpartition("/")[2]


@pytest.mark.parametrize("text", ["mysql://x/y", "postgresql://[/x", "postgresql://h:port/x"])
async def test_unusable_connection_string_is_a_start_error(text: str) -> None:
    with pytest.raises(StartError, match="DATABASE_URL"):
        await Database.connect(text)


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12), st.booleans())
def test_place_never_shows_a_password(rest: str, is_encoded: bool) -> None:
    password = SECRET + rest
    written = quote(password, safe="") if is_encoded else password
    shown = place(f"postgresql://user:{written}@db.example.org:6432/trader?sslmode=require")
    assert SECRET not in shown
    if is_encoded:
        assert shown == "db.example.org:6432/trader"


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:p@db/trader", "db:5432/trader"),
        ("postgresql:///trader?host=/run/pg", "/run/pg/trader"),
        ("postgresql://u@/?host=db&port=6000&dbname=trader&password=p", "db:6000/trader"),
        ("postgresql://u:p@a:1,b:2/trader", "a:1,b:2/trader"),
        ("postgresql:///trader", "localhost:5432/trader"),
    ],
)
def test_place_names_the_server(dsn: str, shown: str) -> None:
    assert place(dsn) == shown


async def test_a_failed_write_has_a_cause_is_counted_and_ends_only_after_a_clean_probe(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    full = (
        "DO $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
    )
    for attempt in (database.writing, database.transaction):
        with pytest.raises(DatabaseUnavailable, match=r"^The database cannot be used now: disk full\.$"):
            async with attempt() as conn:
                await conn.execute(full)
    assert (
        caplog.messages
        == ["The database cannot be used now: disk full. (could not extend file: No space left on device)"] * 2
    )
    assert (database.trouble, database.write_failures) == ("disk full", 2)
    async with database.writing() as conn:
        await conn.execute("SELECT 1")
    assert database.trouble == "disk full", "a small write may succeed on a full disk"
    await database.probe(used_tables(), writes=True)
    assert database.trouble is None


async def connect_impatient(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Connect a database whose statements wait for a lock far more briefly than for an answer."""
    monkeypatch.setattr(pool, "LOCK_TIMEOUT_SHARE", 0.1)
    return await Database.connect(dsn, command_timeout_s=3)


async def test_a_fault_lasts_from_the_first_failed_statement_to_a_clean_probe(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, other = await connect_impatient(dsn, monkeypatch), await asyncpg.connect(dsn)
    try:
        began = datetime.now(UTC)
        async with other.transaction():
            await other.execute("LOCK TABLE runs")
            for _ in range(2):
                with pytest.raises(DatabaseUnavailable):
                    async with database.transaction() as conn:
                        await conn.execute("DELETE FROM runs")
        since = database.failing_since
        assert since is not None
        early = timedelta(milliseconds=1)  # the service's times have this precision
        assert -early < since - began < timedelta(seconds=0.2), "not when the statement gave up"
        await database.ping()
        assert database.failing_since == since, "a read does not show that writes succeed"
        await database.probe(used_tables(), writes=True)
        assert database.failing_since is None
        assert database.last_failure is not None
        assert (database.last_failure.cause, database.last_failure.began > since) == ("locked", True)
    finally:
        await other.close()
        await database.close()


async def test_a_failed_read_takes_precedence_over_a_failed_write(database: Database) -> None:
    for attempt, code in ((database.writing, "57P01"), (database.connection, "28P01")):
        with pytest.raises(DatabaseUnavailable):
            async with attempt() as conn:
                await conn.execute(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$")
    assert database.trouble == "access refused"
    await database.ping()
    assert database.trouble == "not reachable", "writes wait for their own probe"


async def test_postings_and_the_probe_call_locked_tables_locked(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database, other = await connect_impatient(dsn, monkeypatch), await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute("LOCK TABLE fills, orders, runs")
            with pytest.raises(DatabaseUnavailable, match="locked"):
                async with database.transaction() as conn:
                    await conn.execute("DELETE FROM runs")
            with pytest.raises(DatabaseUnavailable, match="locked"):
                await database.probe(used_tables(), writes=True)
        await database.probe(used_tables(), writes=True)
        assert (database.trouble, database.write_failures) == (None, 2)
    finally:
        await other.close()
        await database.close()


@pytest.mark.parametrize(
    ("code", "cause"),
    [("25006", "read-only"), ("53300", "too many connections"), ("40P01", "locked"), ("57P01", "not reachable")],
)
async def test_a_cause_has_one_name(database: Database, code: str, cause: str) -> None:
    with pytest.raises(DatabaseUnavailable) as raised:
        async with database.connection() as conn:
            await conn.execute(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$")
    assert raised.value.cause == database.trouble == cause
    await database.ping()
    assert database.trouble is None, "a read-only statement leaves nothing to probe"


async def test_a_reader_cannot_write(dsn: str) -> None:
    database = await Database.connect(dsn, size=1, read_only=True)
    try:
        assert not await database.is_replica()
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM models") == 0
        with pytest.raises(Unavailable):
            async with database.connection() as conn:
                await conn.execute("INSERT INTO schema_version VALUES (false, 1)")
    finally:
        await database.close()
