"""SQL for restores: the tables of an empty database, in the order in which rows can be copied into them."""

from typing import Final

from trader.core.clock import EPOCH, INPUT_TIME_MAX
from trader.database.pool import Connection

# A table was created after the tables that its foreign keys reference.
SELECT_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::text::regnamespace AND relkind IN ('r', 'p') ORDER BY oid
"""


async def select_tables(conn: Connection) -> list[str]:
    """Return the names of the tables, each after the tables that it references."""
    return [row["relname"] for row in await conn.fetch(SELECT_TABLES)]


SELECT_SCHEMA_NAME = "SELECT current_schema()::text"


async def select_schema_name(conn: Connection) -> str:
    """Return the name of the schema that contains the tables."""
    return str(await conn.fetchval(SELECT_SCHEMA_NAME))


SELECT_SUPERUSER = "SELECT current_user::text WHERE current_setting('is_superuser')::boolean"


async def select_superuser(conn: Connection) -> str | None:
    """Return the name of the user if it is a superuser."""
    name: str | None = await conn.fetchval(SELECT_SUPERUSER)
    return name


SELECT_OBJECT_NAMES = """
WITH here AS (SELECT current_schema()::text::regnamespace AS oid)
SELECT relname::text AS name FROM pg_class JOIN here ON relnamespace = here.oid
UNION SELECT conname FROM pg_constraint JOIN here ON connamespace = here.oid
UNION SELECT proname FROM pg_proc JOIN here ON pronamespace = here.oid
UNION SELECT typname FROM pg_type JOIN here ON typnamespace = here.oid
UNION SELECT tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid JOIN here ON relnamespace = here.oid
ORDER BY name
"""


async def select_object_names(conn: Connection) -> set[str]:
    """Return the names of all tables, indexes, constraints, functions, types and triggers."""
    return {row["name"] for row in await conn.fetch(SELECT_OBJECT_NAMES)}


async def empty_tables(conn: Connection) -> None:
    """Delete the rows that the schema itself inserts, and disable the triggers that count and link new rows."""
    tables = await select_tables(conn)
    await conn.execute(f"TRUNCATE {', '.join(tables)}")
    for table in tables:
        await conn.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")


# The value after the greatest copied one.
SELECT_SEQUENCES = """
SELECT attrelid::regclass::text AS table_name, attname AS column_name FROM pg_attribute JOIN pg_class ON oid = attrelid
WHERE relnamespace = current_schema()::text::regnamespace AND relkind = 'r' AND attidentity <> '' AND NOT attisdropped
ORDER BY attrelid, attnum
"""


async def enable_tables(conn: Connection) -> None:
    """Enable the triggers again, and let generated IDs continue after the greatest copied one."""
    for table in await select_tables(conn):
        await conn.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
    for row in await conn.fetch(SELECT_SEQUENCES):
        table, column = row["table_name"], row["column_name"]
        greatest = f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), max({column})) FROM {table}"  # noqa: S608
        await conn.execute(greatest)


SELECT_TIME_COLUMNS = """
SELECT attrelid::regclass::text AS table_name, array_agg(attname::text) AS columns FROM pg_attribute
JOIN pg_class ON oid = attrelid
WHERE relnamespace = current_schema()::text::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
  AND atttypid = 'timestamptz'::regtype AND NOT attisdropped
GROUP BY attrelid ORDER BY attrelid
"""


async def select_table_with_wrong_time(conn: Connection) -> str | None:
    """Return a table with a time before 1970 or after 2200, which no service writes and some readers cannot read."""
    for row in await conn.fetch(SELECT_TIME_COLUMNS):
        table = str(row["table_name"])
        is_wrong = " OR ".join(f"{column} NOT BETWEEN $1 AND $2" for column in row["columns"])
        statement = f"SELECT EXISTS (SELECT FROM {table} WHERE {is_wrong})"  # noqa: S608
        if await conn.fetchval(statement, EPOCH, INPUT_TIME_MAX, timeout=COPY_TIMEOUT_S):
            return table
    return None


COPY_TIMEOUT_S: Final = 24 * 3600.0
"""The timeout of copying the rows of one table."""
