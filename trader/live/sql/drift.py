"""SQL of the drift between paper and venue: each venue fill with its simulated price, and error statistics."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from trader.database.pool import Connection
from trader.live.domain.drift import LATENCIES, SIZES, Drift, ShadowDrift

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
    """Error statistics, in basis points, of the fills of one market, side, size and latency, or (None) of all fills.

    `size` and `latency` are places in SIZES and LATENCIES. `p95` is of the absolute errors, by nearest rank; `worst`
    is the error largest in magnitude; `low` and `high` span the middle 90 %.
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
    latency: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a row: market, side, size, latency, fills, and the mean, median, p95 and worst error."""
        size = "" if self.size is None else SIZES[self.size]
        latency = "" if self.latency is None else LATENCIES[self.latency]
        errors = (f"{self.mean:+.2f}", f"{self.median:+.2f}", f"{self.p95:.2f}", f"{self.worst:+.2f}")
        return self.symbol or "all", self.side or "", size, latency, f"{self.fills:,}", *errors


SELECT_DRIFT_FIGURES = """
SELECT symbol, side, size, latency, count(*) AS fills, avg(bps) AS mean,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY bps) AS median,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY abs(bps)) AS p95,
       (array_agg(bps ORDER BY abs(bps) DESC, bps))[1] AS worst,
       percentile_disc(0.05) WITHIN GROUP (ORDER BY bps) AS low,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY bps) AS high
FROM (
    SELECT symbol, side, drift_bps::float8 AS bps,
           width_bucket(quantity * price, ARRAY[1000, 10000, 100000]::numeric[]) AS size,
           width_bucket(extract(epoch FROM took), ARRAY[0.3, 1, 3]) AS latency
    FROM (
        SELECT symbol, side, drift_bps, quantity, venue_price AS price, filled_at - quoted_at AS took
        FROM fill_drift WHERE NOT $2 AND filled_at >= $1
        UNION ALL
        SELECT symbol, side, drift_bps, quantity, paper_price, interval '0.3 s'
        FROM shadow_drift WHERE $2 AND sent_at >= $1
    ) compared
    WHERE drift_bps IS NOT NULL
) fill
GROUP BY GROUPING SETS ((symbol, side, size, latency), ())
HAVING count(*) > 0
ORDER BY symbol NULLS LAST, side, size, latency
"""


async def select_drift_figures(conn: Connection, since: datetime, *, of_shadow: bool = False) -> list[DriftFigures]:
    """Return the statistics since `since` of the venue's fills or of shadow, by group, then of all; empty without."""
    return [DriftFigures(**row) for row in await conn.fetch(SELECT_DRIFT_FIGURES, since, of_shadow)]


class Uncompared(NamedTuple):
    """What the errors of fills do not show.

    Fills without a paper price are larger than the visible book, or never simulated. `unfilled` are orders that the
    venue ended before they filled; `fees_bps` and `funding` are what it charged (negative: paid).
    """

    too_large: int
    unsimulated: int
    unfilled: int = 0
    fees_bps: float | None = None
    funding: float = 0.0


SELECT_UNCOMPARED = """
SELECT count(d.sequence) AS too_large, count(*) - count(d.sequence) AS unsimulated,
       (SELECT 10000 * sum(fee) / sum(quantity * price) FROM fills WHERE created_at >= $1)::float8 AS fees_bps,
       (SELECT coalesce(-sum(amount), 0) FROM funding_payments WHERE created_at >= $1)::float8 AS funding,
       (SELECT count(*) FROM venue_orders
        WHERE status = 'DONE' AND filled < quantity AND request_id IS NOT NULL AND changed_at >= $1) AS unfilled
FROM fills f LEFT JOIN fill_drift d ON d.account_id = f.account_id AND d.sequence = f.sequence
WHERE f.created_at >= $1 AND d.drift_bps IS NULL
"""


async def select_uncompared(conn: Connection, since: datetime) -> Uncompared:
    """Return how many fills since `since` were not compared; in paper trading, no fill is simulated."""
    (row,) = await conn.fetch(SELECT_UNCOMPARED, since)
    return Uncompared(**row)
