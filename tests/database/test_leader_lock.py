"""The leader's lock, seen by its holder."""

import asyncio
import time

from support.waiting import until

from trader.database.leadership import LeaderLock, hold_term, update_term
from trader.database.pool import Database


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
