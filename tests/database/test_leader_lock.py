"""The leader's lock, seen by its holder."""

import asyncio
import time

from support.waiting import until

from trader.database.leadership import LeaderLock


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
