"""Writing bookings: every row of one or many changes in one statement, and so in one transaction.

The rows travel as one JSON array per table, since a statement with a hundred array parameters could not be read.
"""

from collections.abc import Iterable, Sequence

import asyncpg
import msgspec

from trader.domain.booking import Booking
from trader.errors import BooksViolated
from trader.store.booking_rows import (
    account_change,
    fill_row,
    funding_row,
    insurance_row,
    limit_order_row,
    order_rows,
    request_row,
    run_rows,
    venue_order_row,
    venue_trade_row,
)
from trader.store.pool import Connection

# A booking whose account has moved on since it was decided, or whose process leads no more, updates no account row,
# and with it writes nothing. Of the rows in conflict CLOSED orders and ended runs come first, since the partial unique
# indexes look at each row in turn.
WRITE_BOOKINGS = """
WITH booked AS (
    UPDATE accounts SET sequence = c.sequence, changed_at = c.changed_at, last_order_at = c.last_order_at
    FROM json_to_recordset($1) AS c (id text, sequence_before bigint, sequence bigint,
                                     changed_at timestamptz, last_order_at timestamptz)
    WHERE accounts.id = c.id AND accounts.sequence = c.sequence_before
        AND (SELECT term FROM service_state) = $9
    RETURNING accounts.id
), written_runs AS (
    INSERT INTO runs
    SELECT r.* FROM json_populate_recordset(NULL::runs, $2) r JOIN booked ON booked.id = r.account_id
    ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at
), written_requests AS (
    INSERT INTO order_requests
    SELECT r.* FROM json_populate_recordset(NULL::order_requests, $3) r JOIN booked ON booked.id = r.account_id
), written_orders AS (
    INSERT INTO orders
    SELECT r.* FROM json_populate_recordset(NULL::orders, $4) r JOIN booked ON booked.id = r.account_id
    ON CONFLICT (id) DO UPDATE SET
        status = excluded.status, quantity = excluded.quantity, entry_notional = excluded.entry_notional,
        margin = excluded.margin, leveraged = excluded.leveraged, exit_notional = excluded.exit_notional,
        gross_pnl = excluded.gross_pnl, fees = excluded.fees, liquidation_fees = excluded.liquidation_fees,
        funding = excluded.funding, net_pnl = excluded.net_pnl, insurance = excluded.insurance,
        close_reason = excluded.close_reason, closing = excluded.closing, stop = excluded.stop,
        target = excluded.target, invalidation = excluded.invalidation,
        invalidation_price = excluded.invalidation_price, time_exit = excluded.time_exit,
        confidence = excluded.confidence, funded_until = excluded.funded_until, closed_at = excluded.closed_at
), written_limit_orders AS (
    INSERT INTO limit_orders
    SELECT r.* FROM json_populate_recordset(NULL::limit_orders, $5) r JOIN booked ON booked.id = r.account_id
    ON CONFLICT (id) DO UPDATE SET
        status = excluded.status, remaining = excluded.remaining, cancel_reason = excluded.cancel_reason,
        closed_at = excluded.closed_at
), written_fills AS (
    INSERT INTO fills
    SELECT r.* FROM json_populate_recordset(NULL::fills, $6) r JOIN booked ON booked.id = r.account_id
), written_funding AS (
    INSERT INTO funding_payments
    SELECT r.* FROM json_populate_recordset(NULL::funding_payments, $7) r JOIN booked ON booked.id = r.account_id
), written_insurance AS (
    INSERT INTO insurance_payments
    SELECT r.* FROM json_populate_recordset(NULL::insurance_payments, $8) r JOIN booked ON booked.id = r.account_id
), written_venue_orders AS (
    INSERT INTO venue_orders
    SELECT r.* FROM json_populate_recordset(NULL::venue_orders, $10) r JOIN booked ON booked.id = r.account_id
    ON CONFLICT (account_id, client_index) DO UPDATE SET
        status = excluded.status, nonce = excluded.nonce, venue_index = excluded.venue_index,
        filled = excluded.filled, reason = excluded.reason, changed_at = excluded.changed_at
), written_venue_trades AS (
    INSERT INTO venue_trades
    SELECT r.* FROM json_populate_recordset(NULL::venue_trades, $11) r JOIN booked ON booked.id = r.account_id
)
SELECT id FROM booked
"""


async def write_bookings(conn: Connection, bookings: Sequence[Booking], term: int) -> set[str]:
    """Write bookings of different accounts, all in one transaction. Gives the ids of the accounts that were booked.

    An account that is missing in the answer was changed by somebody else since, or `term` is over: nothing of its
    booking was written.

    :raises BooksViolated: a row broke a constraint; nothing of any booking was written
    """
    try:
        return await _write(conn, bookings, term)
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError) as error:
        raise BooksViolated(f"{type(error).__name__}: {error}") from error


async def _write(conn: Connection, bookings: Sequence[Booking], term: int) -> set[str]:
    records = await conn.fetch(
        WRITE_BOOKINGS,
        _json(account_change(b) for b in bookings),
        _json(row for b in bookings for row in run_rows(b)),
        _json(request_row(b, b.answer) for b in bookings if b.answer is not None),
        _json(row for b in bookings for row in order_rows(b)),
        _json(limit_order_row(b, change) for b in bookings for change in b.resting),
        _json(fill_row(b, fill) for b in bookings for fill in b.fills),
        _json(funding_row(b, payment) for b in bookings for payment in b.funding),
        _json(insurance_row(b, payment) for b in bookings for payment in b.insurance),
        term,
        _json(venue_order_row(sent) for b in bookings for sent in b.sent),
        _json(venue_trade_row(b, fill) for b in bookings for fill in b.venue_fills),
    )
    return {record["id"] for record in records}


def _json(rows: Iterable[msgspec.Struct]) -> str:
    return msgspec.json.encode(list(rows)).decode()
