"""SQL of seasons: their append-only records."""

from datetime import datetime
from itertools import groupby
from typing import Final

import msgspec

from trader.database.pool import Connection
from trader.portfolio.domain.seasons import Season, SeasonRecord
from trader.record.sql.chain import SEASON_COLUMNS, insert_rows_record, lock_chain

_DECODER: Final = msgspec.json.Decoder(SeasonRecord)


async def lock_seasons(conn: Connection) -> datetime:
    """Prevent others from adding records until the transaction ends, and return the database's time.

    The lock is the chain's: nothing of a season enters the record before its rules.
    """
    await lock_chain(conn)
    now: datetime = await conn.fetchval("SELECT clock_timestamp()")
    return now


INSERT_SEASON_RECORD = f"""
INSERT INTO season_records (season, number, record, digest) VALUES ($1, $2, $3, sha256(convert_to($3, 'UTF8')))
RETURNING {SEASON_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def insert_season_record(conn: Connection, record: SeasonRecord) -> None:
    """Add a record to its season, and to the chain, in the caller's transaction."""
    rows = await conn.fetch(INSERT_SEASON_RECORD, record.season, record.number, record.canonical)
    await insert_rows_record(conn, "season_records", rows)


SELECT_SEASONS = "SELECT season, record, digest FROM season_records ORDER BY season, number"


async def select_seasons(conn: Connection) -> list[Season]:
    """Return every season, oldest first."""
    rows = await conn.fetch(SELECT_SEASONS)
    return [
        Season(*zip(*((_DECODER.decode(row["record"]), row["digest"]) for row in records), strict=True))
        for _, records in groupby(rows, key=lambda row: row["season"])
    ]


SELECT_LATEST_SEASON = """
SELECT record, digest FROM season_records
WHERE season = (SELECT max(season) FROM season_records)
ORDER BY number
"""


async def select_latest_season(conn: Connection) -> Season | None:
    """Return the latest season; None before the first."""
    rows = await conn.fetch(SELECT_LATEST_SEASON)
    if not rows:
        return None
    return Season([_DECODER.decode(row["record"]) for row in rows], [row["digest"] for row in rows])
