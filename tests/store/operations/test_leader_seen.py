"""Whether a process leads is seen from another connection, by which a command tells whether a service runs."""

from trader.store.database.leadership import LeaderLock
from trader.store.database.pool import Database
from trader.store.operations.halts import select_has_leader


async def test_a_leader_is_seen_while_it_holds_its_lock(database: Database, dsn: str) -> None:
    lock = LeaderLock(dsn)
    async with database.connection() as conn:
        assert not await select_has_leader(conn)
        assert await lock.try_acquire()
        assert await select_has_leader(conn)
        await lock.release()
        assert not await select_has_leader(conn)
