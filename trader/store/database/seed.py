"""SQL of the seed that a service draws for its database."""

from trader.store.database.pool import Connection

# A database that is in use already, by a market of before or by another one, is left as it is.
INSERT_SEED = """
INSERT INTO market_seed (seed) SELECT $1 WHERE NOT EXISTS (SELECT FROM service_state) ON CONFLICT DO NOTHING
"""


async def insert_seed(conn: Connection, seed: int) -> None:
    """Store this seed in a new database; without effect in one that has a seed or is in use."""
    await conn.execute(INSERT_SEED, str(seed))


SELECT_SEED = "SELECT seed FROM market_seed"


async def select_seed(conn: Connection) -> int | None:
    """Return the seed that was drawn for this database; None when there is none."""
    text: str | None = await conn.fetchval(SELECT_SEED)
    return None if text is None else int(text)
