"""SQL of the ladder: what entrants have shown, and what is open."""

from datetime import datetime
from decimal import Decimal

import msgspec

from trader.database.pool import Connection, part_of_row
from trader.exchange.domain.orders import OrderSide
from trader.live.domain.ladder import DAY, Commitment, LadderFigures

SELECT_SHOWN = """
WITH begin AS (
    SELECT greatest($2, (SELECT max(started_at) FROM runs WHERE account_id = $1),
                    (SELECT max(lifted_at) FROM halts WHERE account_id = $1 AND cause = 'ladder')) AS since
), equity AS (
    SELECT last_at AS at, last AS value FROM portfolio_hourly, begin WHERE account_id = $1 AND last_at >= since
    UNION ALL
    SELECT created_at, net_portfolio FROM portfolio_snapshots, begin WHERE account_id = $1 AND created_at >= since
    UNION ALL
    SELECT 'infinity', $3::numeric WHERE $3::numeric IS NOT NULL
), peaks AS (
    SELECT value, max(value) OVER (ORDER BY at) AS peak FROM equity
), errors AS (
    SELECT drift_bps FROM fill_drift, begin WHERE account_id = $1 AND filled_at >= since
    UNION ALL
    SELECT drift_bps FROM shadow_drift, begin WHERE account_id = $1 AND sent_at >= since
)
SELECT
    (SELECT count(DISTINCT (hour AT TIME ZONE 'UTC')::date) FROM portfolio_hourly, begin
     WHERE account_id = $1 AND last_at >= since)::integer AS days,
    (SELECT count(*) FROM fills, begin WHERE account_id = $1 AND created_at >= since)::integer AS fills,
    coalesce((SELECT max(100 * (peak - value) / peak) FROM peaks WHERE peak > 0), 0) AS drawdown_percent,
    (SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY abs(drift_bps)) FROM errors) AS drift_p95_bps
"""


async def select_shown(
    conn: Connection, account_id: str, since: datetime | None = None, equity: Decimal | None = None
) -> LadderFigures:
    """Return what an account has shown in its run, since `since` and its last step down, up to its present equity."""
    (row,) = await conn.fetch(SELECT_SHOWN, account_id, since, equity)
    return msgspec.convert(dict(row), LadderFigures)


# A trade leaves the day once both clocks say so: neither, set forward, frees the cap.
SELECT_COMMITMENTS = """
SELECT account_id, symbol, CASE side WHEN 'LONG' THEN 'buy' ELSE 'sell' END AS side, quantity,
       entry_notional / quantity AS price, 'held' AS state
FROM orders WHERE status = 'OPEN'
UNION ALL
SELECT account_id, symbol, side, quantity - filled, price, 'open'
FROM venue_orders
WHERE status IN ('SENT', 'STANDING') AND NOT reduce_only AND filled < quantity
    AND (account_id, client_index) IS DISTINCT FROM ($3::text, $4::bigint)
UNION ALL
SELECT t.account_id, t.symbol, t.side, t.quantity, t.price, 'traded'
FROM venue_trades t JOIN venue_orders o USING (account_id, client_index)
WHERE NOT o.reduce_only AND t.traded_at > least(now(), $1) - $2::interval
ORDER BY account_id, symbol, side, price
"""


async def select_commitments(
    conn: Connection, now: datetime, without: tuple[str, int] | None = None
) -> list[Commitment]:
    """Return what is held, open or was traded within a day, `without` one order, by account and client index."""
    rows = await conn.fetch(SELECT_COMMITMENTS, now, DAY, *(without or (None, None)))
    return [part_of_row(row, Commitment)._replace(side=OrderSide(row["side"])) for row in rows]
