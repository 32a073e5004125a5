"""Another connection can see whether a process leads, which tells a command whether a service is running."""

from trader.database.leadership import LeaderLock
from trader.database.pool import Database
from trader.exchange.sql.halts import select_has_leader


async def test_a_leader_is_visible_while_it_holds_its_lock(database: Database, dsn: str) -> None:
    lock = LeaderLock(dsn)
    async with database.connection() as conn:
        assert not await select_has_leader(conn)
        assert await lock.try_acquire()
        assert await select_has_leader(conn)
        await lock.release()
        assert not await select_has_leader(conn)
