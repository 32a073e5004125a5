"""The leader's lock, seen by its holder."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.proxy import FaultyProxy
from support.waiting import until

from trader.core.errors import DatabaseUnavailable
from trader.database.leadership import LeaderLock, hold_term, update_term
from trader.database.pool import Connection, Database


async def test_a_busy_process_keeps_its_lock(dsn: str) -> None:
    """It reads an answer of the server, which came in time, only after the check has timed out."""
    lock, other = LeaderLock(dsn), LeaderLock(dsn)
    assert await lock.try_acquire()
    watch = asyncio.create_task(lock.lost())
    await asyncio.sleep(0)  # the first check is on its way
    time.sleep(2.1)  # noqa: ASYNC251 - keeps the loop from reading, for longer than a check may take
    assert not await other.try_acquire()
    await other.release()
    assert lock.trouble is None
    assert not watch.done()
    await lock.release()
    await until(watch.done)


async def test_a_standby_that_reaches_the_database_again_has_no_trouble(dsn: str) -> None:
    leader, proxy = LeaderLock(dsn), FaultyProxy(dsn)
    assert await leader.try_acquire()
    standby = LeaderLock(await proxy.start())
    proxy.stop()
    assert not await standby.try_acquire()
    assert standby.trouble is not None
    proxy.pass_on()
    assert not await standby.try_acquire()
    assert standby.trouble is None
    await standby.release()
    await leader.release()
    await proxy.close()


async def test_a_term_that_is_held_ends_after_the_transaction_that_holds_it(database: Database) -> None:
    async with database.connection() as conn:
        await conn.execute(
            "INSERT INTO service_state (market_identity, trading_mode) VALUES ('synthetic', 'simulated')"
        )
        term = await update_term(conn)

    async def begin_next_term() -> int:
        async with database.connection() as conn:
            return await update_term(conn)

    async with database.transaction() as conn:
        assert not await hold_term(conn, term + 1)
        assert await hold_term(conn, term)
        beginning = asyncio.create_task(begin_next_term())
        await until(lambda: conn.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))
        assert await hold_term(conn, term)
    assert await beginning == term + 1


@contextmanager
def frozen(dsn: str, *, is_leading: bool) -> Iterator[None]:
    """Hold the lock in another event loop, which is frozen while it begins to lead, or after it has begun."""
    held, thaws = threading.Event(), threading.Event()

    async def hold() -> None:
        lock = LeaderLock(dsn, 0.2)
        assert await lock.try_acquire()
        watch = asyncio.create_task(lock.lost()) if is_leading else None
        await asyncio.sleep(0.3 if is_leading else 0)
        await asyncio.sleep(0.1)  # the time in which the server learns how long a silence it allows
        held.set()
        thaws.wait()
        await lock.release()
        if watch is not None:
            await watch

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(asyncio.run, hold())
        assert held.wait(5)
        try:
            yield
        finally:
            thaws.set()
            holding.result()


@pytest.mark.parametrize("is_leading", [False, True])
async def test_a_leader_that_freezes_loses_its_lock_even_while_it_begins(dsn: str, is_leading: bool) -> None:
    lock = LeaderLock(dsn)
    with frozen(dsn, is_leading=is_leading):
        async with asyncio.timeout(5):
            await until(lock.try_acquire)
        await lock.release()


async def copy_slowly(conn: Connection, thaws: asyncio.Event) -> None:
    async def rows() -> AsyncIterator[bytes]:
        yield b"x\n"
        await thaws.wait()

    await conn.execute("CREATE TEMPORARY TABLE copied (line text)")
    await conn.copy_to_table("copied", source=rows())


async def prepare(conn: Connection, thaws: asyncio.Event) -> None:
    await conn.prepare("SELECT 'a statement whose execution is not yet requested'")
    await thaws.wait()


async def idle(_: Connection, thaws: asyncio.Event) -> None:
    await thaws.wait()


@pytest.mark.parametrize("state", [copy_slowly, prepare, idle])
@pytest.mark.parametrize("statement", ["LOCK TABLE accounts IN EXCLUSIVE MODE", "SELECT pg_advisory_xact_lock(7)"])
async def test_a_leader_frozen_within_a_transaction_does_not_block_its_successor(
    dsn: str,
    database: Database,
    state: Callable[[Connection, asyncio.Event], Awaitable[None]],
    statement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trader.database.leadership.FROZEN_S", 0.1)
    locked, thaws = asyncio.Event(), asyncio.Event()

    async def predecessor() -> None:
        async with database.transaction() as conn:
            await conn.execute(statement)
            locked.set()
            await state(conn, thaws)

    task, lock = asyncio.create_task(predecessor()), LeaderLock(dsn)
    await locked.wait()
    async with database.reading() as reader:  # which blocks no one, and is not ended
        await reader.fetchval("SELECT count(*) FROM accounts")
        await asyncio.sleep(0.2)
        assert await lock.try_acquire()
        async with asyncio.timeout(2), database.transaction() as conn:
            await conn.execute(statement)
        await reader.fetchval("SELECT 1")
    await lock.release()
    thaws.set()
    with pytest.raises(DatabaseUnavailable):
        await task
