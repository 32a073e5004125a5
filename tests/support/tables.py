"""The content of a database, by which two are compared, and what it waits for."""

from hashlib import sha256

import asyncpg

TABLES = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname = 'public' ORDER BY c.relname
"""

SELECT_IS_WAITING = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)"
"""Whether a server process waits for a lock."""


async def digests(dsn: str) -> dict[str, tuple[int, str]]:
    """Return for each table (partitions too) how many rows it has, and a digest of them."""
    conn = await asyncpg.connect(dsn)
    try:
        result = {}
        for (name,) in await conn.fetch(TABLES):
            rows = sorted(row[0] for row in await conn.fetch(f'SELECT t::text FROM "{name}" t'))
            result[name] = (len(rows), sha256("\n".join(rows).encode()).hexdigest())
        return result
    finally:
        await conn.close()
