"""What fills of the venue would have been on paper."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from trader.domain.live.drift import Drift
from trader.store.database.pool import Connection

INSERT_DRIFT = """
INSERT INTO fill_drift (account_id, sequence, symbol, side, quantity, maker, venue_price, paper_price, drift_bps,
                        quoted_at, filled_at)
SELECT d.*
FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::numeric[], $6::boolean[], $7::numeric[],
            $8::numeric[], $9::numeric[], $10::timestamptz[], $11::timestamptz[])
     AS d (account_id, sequence, symbol, side, quantity, maker, venue_price, paper_price, drift_bps, quoted_at, at)
JOIN fills f ON f.account_id = d.account_id AND f.sequence = d.sequence
ON CONFLICT DO NOTHING
"""


async def insert_drift(conn: Connection, rows: Sequence[tuple[str, Drift]]) -> None:
    """Record what fills of accounts would have been. Those recorded before or not in the books are left out."""
    await conn.execute(
        INSERT_DRIFT,
        [account_id for account_id, _ in rows],
        [drift.sequence for _, drift in rows],
        [drift.symbol for _, drift in rows],
        [drift.side for _, drift in rows],
        [drift.quantity for _, drift in rows],
        [drift.maker for _, drift in rows],
        [drift.venue_price for _, drift in rows],
        [drift.paper_price for _, drift in rows],
        [drift.bps for _, drift in rows],
        [drift.quoted_at for _, drift in rows],
        [drift.at for _, drift in rows],
    )


class FillError(NamedTuple):
    """One fill and its error in basis points; None where the book was too thin to say."""

    symbol: str
    side: str
    maker: bool
    notional: Decimal
    bps: float | None
    at: datetime


SELECT_FILL_ERRORS = """
SELECT symbol, side, maker, quantity * venue_price AS notional, drift_bps::float8 AS bps, filled_at
FROM fill_drift WHERE filled_at >= $1 ORDER BY filled_at, account_id, sequence
"""


async def select_fill_errors(conn: Connection, since: datetime) -> list[FillError]:
    """Every fill since a moment, with its error."""
    return [FillError(*row) for row in await conn.fetch(SELECT_FILL_ERRORS, since)]


SELECT_UNSIMULATED = """
SELECT count(*) FROM fills f
WHERE f.created_at >= $1 AND NOT EXISTS (
    SELECT FROM fill_drift d WHERE d.account_id = f.account_id AND d.sequence = f.sequence
)
"""


async def select_unsimulated(conn: Connection, since: datetime) -> int:
    """How many fills since a moment were never simulated; all of them where trading is on paper."""
    count: int = await conn.fetchval(SELECT_UNSIMULATED, since)
    return count
