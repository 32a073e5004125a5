"""SQL for the relay: records through which the leader passes market data and events to standbys and readers."""

from typing import Final, NamedTuple

from trader.database.pool import Connection

SLOTS: Final = 128
"""How many records are kept: two minutes' worth."""


class RelayRow(NamedTuple):
    """A record as text, its number, and how many seconds ago it was written, by the clock of this database."""

    number: int
    age_s: float
    record: str


# The commit does not wait for the disk: the next second replaces what a crash loses.
UPSERT_RELAY = """
INSERT INTO relay AS r (slot, number, written_at, record)
SELECT $1::bigint % 128, $1, clock_timestamp(), $2
FROM service_state CROSS JOIN LATERAL set_config('synchronous_commit', 'off', true)
WHERE term = $3
ON CONFLICT (slot) DO UPDATE
SET number = excluded.number, written_at = excluded.written_at, record = excluded.record
"""


async def upsert_relay(conn: Connection, number: int, record: str, term: int) -> None:
    """Write a record into its slot of the ring of `SLOTS` records; only in this term."""
    await conn.execute(UPSERT_RELAY, number, record, term)


SELECT_RELAY_NUMBER = "SELECT coalesce(max(number), 0) FROM relay"


async def select_relay_number(conn: Connection) -> int:
    """Return the number of the newest record; 0 if there is none."""
    number: int = await conn.fetchval(SELECT_RELAY_NUMBER)
    return number


SELECT_NEWEST_RELAY = """
SELECT number, extract(epoch FROM clock_timestamp() - written_at)::float8 AS age_s, record
FROM relay ORDER BY number DESC LIMIT 1
"""


async def select_newest_relay(conn: Connection) -> RelayRow | None:
    """Return the newest record; None if there is none."""
    row = await conn.fetchrow(SELECT_NEWEST_RELAY)
    return None if row is None else RelayRow(**row)


SELECT_RELAY = """
SELECT number, extract(epoch FROM clock_timestamp() - written_at)::float8 AS age_s, record
FROM relay WHERE number > $1 ORDER BY number
"""


async def select_relay(conn: Connection, after: int) -> list[RelayRow]:
    """Return the records after a number, ascending."""
    return [RelayRow(**row) for row in await conn.fetch(SELECT_RELAY, after)]
