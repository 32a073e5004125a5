"""The content of a database, for comparisons, and its pending locks."""

from hashlib import sha256

import asyncpg

TABLES = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname = 'public' ORDER BY c.relname
"""

SELECT_IS_WAITING = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)"
"""Whether a server process waits for a lock."""


async def digests(dsn: str) -> dict[str, tuple[int, str]]:
    """Return the number of rows and their digest for each table, partitions included."""
    conn = await asyncpg.connect(dsn)
    try:
        result = {}
        for (name,) in await conn.fetch(TABLES):
            rows = sorted(row[0] for row in await conn.fetch(f'SELECT t::text FROM "{name}" t'))
            result[name] = (len(rows), sha256("\n".join(rows).encode()).hexdigest())
        return result
    finally:
        await conn.close()
