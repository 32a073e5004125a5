"""SQL of the ladder: what entrants have shown, what is open, and orders that wait for a person."""

from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec

from trader.database.pool import Connection, part_of_row
from trader.exchange.domain.orders import Order, OrderSide
from trader.live.domain.ladder import DAY, Commitment, LadderFigures
from trader.record.domain.results import APPROVED
from trader.record.sql.chain import insert_record, plain_rows

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


INSERT_WAITING_ORDER = """
INSERT INTO waiting_orders (id, account_id, request) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING id
"""


async def insert_waiting_order(conn: Connection, order_id: UUID, order: Order) -> bool:
    """Let an order wait for a person. Return False if one of its account waits already."""
    return await conn.fetchval(INSERT_WAITING_ORDER, order_id, order.account_id, order) is not None


# Times are the database's own. One set back must not let an order wait longer, so a date in its future has lapsed, too.
SELECT_DECIDED_ORDERS = """
SELECT id, request, is_lapsed FROM (
    SELECT *, now() NOT BETWEEN asked_at AND asked_at + CASE WHEN approved_at IS NULL THEN $1::interval ELSE $2 END
           AS is_lapsed
    FROM waiting_orders WHERE closed_at IS NULL
) waiting
WHERE is_lapsed OR approved_at IS NOT NULL ORDER BY asked_at, id
"""


async def select_decided_orders(conn: Connection, wait: timedelta, latest: timedelta) -> list[tuple[UUID, Order, bool]]:
    """Return the orders to send or to refuse, oldest first, with whether each is approved.

    One lapses after `wait` without an approval, and after `latest` with one.
    """
    rows = await conn.fetch(SELECT_DECIDED_ORDERS, wait, latest)
    return [(row["id"], msgspec.convert(row["request"], Order, strict=False), not row["is_lapsed"]) for row in rows]


UPDATE_WAITING_ORDER_APPROVED = """
UPDATE waiting_orders SET approved_by = $2, approved_at = now()
WHERE id = $1 AND closed_at IS NULL AND approved_at IS NULL AND now() BETWEEN asked_at AND asked_at + $3::interval
RETURNING id AS order_id, account_id, approved_by, approved_at
"""


async def update_waiting_order_approved(conn: Connection, order_id: UUID, by: str, wait: timedelta) -> bool:
    """Approve an order. Return False if it does not wait, has lapsed, or was approved before.

    The connection must be in a transaction: the approval is recorded in the chain.
    """
    rows = plain_rows(await conn.fetch(UPDATE_WAITING_ORDER_APPROVED, order_id, by, wait))
    for row in rows:
        await insert_record(conn, APPROVED, row)
    return bool(rows)


UPDATE_WAITING_ORDER_CLOSED = "UPDATE waiting_orders SET closed_at = now() WHERE id = $1"


async def update_waiting_order_closed(conn: Connection, order_id: UUID) -> None:
    """Record that an order waits no more: its answer is booked, or it was sent."""
    await conn.execute(UPDATE_WAITING_ORDER_CLOSED, order_id)
