"""The schema as a whole: applied again, by two at once, and by an older program."""

from trader.store.pool import Database, apply_schema


async def test_applying_again_changes_nothing(database: Database) -> None:
    async with database.connection() as conn:
        before = await conn.fetch("SELECT oid, relname, relnatts FROM pg_class ORDER BY oid")
    await apply_schema(database)
    async with database.connection() as conn:
        assert await conn.fetch("SELECT oid, relname, relnatts FROM pg_class ORDER BY oid") == before
