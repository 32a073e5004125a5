"""SQL of luck: comparisons of entrants with random traders."""

from typing import NamedTuple
from uuid import UUID

from trader.domain.portfolio.luck import Luck
from trader.store.database.pool import Connection


class StoredLuck(NamedTuple):
    """The comparison of an entrant in a run, of its last look."""

    run_id: UUID
    entrant: int
    luck: Luck


SELECT_LUCK = """
SELECT l.run_id, l.entrant, l.hours, l.looks, l.traders, l.trades, l.return_percent, l.quantile_percent, l.p_value,
       l.low_percent, l.median_percent, l.high_percent
FROM luck l JOIN runs r ON r.id = l.run_id AND r.ended_at IS NULL
ORDER BY l.run_id, l.entrant
"""


async def select_luck(conn: Connection) -> list[StoredLuck]:
    """Return the comparisons of the current runs."""
    return [StoredLuck(row[0], row[1], Luck(*row[2:])) for row in await conn.fetch(SELECT_LUCK)]


UPSERT_LUCK = """
INSERT INTO luck (run_id, entrant, hours, looks, traders, trades, return_percent, quantile_percent, p_value,
                  low_percent, median_percent, high_percent)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (run_id, entrant) DO UPDATE
SET hours = excluded.hours, looks = excluded.looks, traders = excluded.traders, trades = excluded.trades,
    return_percent = excluded.return_percent,
    quantile_percent = excluded.quantile_percent, p_value = excluded.p_value, low_percent = excluded.low_percent,
    median_percent = excluded.median_percent, high_percent = excluded.high_percent
"""


async def upsert_luck(conn: Connection, comparison: StoredLuck) -> None:
    """Save a comparison in place of the entrant's last one."""
    await conn.execute(UPSERT_LUCK, *comparison[:2], *comparison.luck)
