"""SQL of the drift between paper and venue: each venue fill with its simulated price, and error statistics."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from trader.database.pool import Connection
from trader.live.domain.drift import Drift, ShadowDrift

INSERT_DRIFT = """
INSERT INTO fill_drift
SELECT d.* FROM json_populate_recordset(NULL::fill_drift, $1) d
JOIN fills f ON f.account_id = d.account_id AND f.sequence = d.sequence
ON CONFLICT DO NOTHING
"""


async def insert_drift(conn: Connection, drifts: Sequence[Drift]) -> None:
    """Record the drift of fills. Skip fills that are already recorded or not in the ledger."""
    await conn.execute(INSERT_DRIFT, msgspec.json.encode(drifts).decode())


INSERT_SHADOW_DRIFT = """
INSERT INTO shadow_drift (account_id, symbol, side, quantity, paper_price, drift_bps, later_bps, signed, sent_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
"""


async def insert_shadow_drift(conn: Connection, drift: ShadowDrift) -> None:
    """Record an order that was signed and not sent."""
    await conn.execute(INSERT_SHADOW_DRIFT, *drift)


class DriftFigures(NamedTuple):
    """Error statistics, in basis points, of the fills of one market, side and size, or (None) of all fills.

    `size` is 0 for a notional below 1,000, 1 below 10,000, 2 below 100,000, and 3 above. `p95` is of the absolute
    errors, by nearest rank; `worst` is the error largest in magnitude; `low` and `high` span the middle 90 %.
    """

    symbol: str | None
    side: str | None
    size: int | None
    fills: int
    mean: float
    median: float
    p95: float
    worst: float
    low: float
    high: float


SELECT_DRIFT_FIGURES = """
SELECT symbol, side, size, count(*) AS fills, avg(bps) AS mean,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY bps) AS median,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY abs(bps)) AS p95,
       (array_agg(bps ORDER BY abs(bps) DESC, bps))[1] AS worst,
       percentile_disc(0.05) WITHIN GROUP (ORDER BY bps) AS low,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY bps) AS high
FROM (
    SELECT symbol, side, drift_bps::float8 AS bps,
           width_bucket(quantity * venue_price, ARRAY[1000, 10000, 100000]::numeric[]) AS size
    FROM fill_drift WHERE filled_at >= $1 AND drift_bps IS NOT NULL
) fill
GROUP BY GROUPING SETS ((symbol, side, size), ())
HAVING count(*) > 0
ORDER BY symbol NULLS LAST, side, size
"""


async def select_drift_figures(conn: Connection, since: datetime) -> list[DriftFigures]:
    """Return the statistics since `since` by market, side and size, then for all fills; empty without fills."""
    return [DriftFigures(**row) for row in await conn.fetch(SELECT_DRIFT_FIGURES, since)]


class Uncompared(NamedTuple):
    """Counts of fills without a paper price: larger than the visible book, or never simulated."""

    too_large: int
    unsimulated: int


SELECT_UNCOMPARED = """
SELECT count(d.sequence) AS too_large, count(*) - count(d.sequence) AS unsimulated
FROM fills f LEFT JOIN fill_drift d ON d.account_id = f.account_id AND d.sequence = f.sequence
WHERE f.created_at >= $1 AND d.drift_bps IS NULL
"""


async def select_uncompared(conn: Connection, since: datetime) -> Uncompared:
    """Return how many fills since `since` were not compared; in paper trading, no fill is simulated."""
    (row,) = await conn.fetch(SELECT_UNCOMPARED, since)
    return Uncompared(**row)
