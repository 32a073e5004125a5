"""SQL of live trading: bindings of accounts to venue accounts, and the orders sent to the venue."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from trader.database.pool import Connection, part_of_row
from trader.exchange.domain.venue_orders import SentOrder
from trader.exchange.sql.ledger import venue_order_row


class Binding(NamedTuple):
    """The venue account bound to one of our accounts, and when the two last agreed."""

    account_index: str
    agreed_at: datetime


INSERT_VENUE_ACCOUNT = """
INSERT INTO venue_accounts (account_id, account_index, agreed_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
"""


async def insert_venue_account(conn: Connection, account_id: str, binding: Binding) -> None:
    """Bind one of our accounts to a venue account; do nothing when either is already bound."""
    await conn.execute(INSERT_VENUE_ACCOUNT, account_id, binding.account_index, binding.agreed_at)


SELECT_VENUE_ACCOUNTS = "SELECT account_id, account_index, agreed_at FROM venue_accounts ORDER BY account_id"


async def select_venue_accounts(conn: Connection) -> dict[str, Binding]:
    """Return the binding of each account that has one."""
    return {row["account_id"]: part_of_row(row, Binding) for row in await conn.fetch(SELECT_VENUE_ACCOUNTS)}


UPDATE_AGREED_AT = "UPDATE venue_accounts SET agreed_at = $2 WHERE account_id = $1"


async def update_agreed_at(conn: Connection, account_id: str, at: datetime) -> None:
    """Record the time of the last successful reconciliation of the account with the venue."""
    await conn.execute(UPDATE_AGREED_AT, account_id, at)


# The term is held until the commit, so that the next leader reads the order: accounts are locked only for postings.
INSERT_VENUE_ORDERS = """
INSERT INTO venue_orders
SELECT r.* FROM json_populate_recordset(NULL::venue_orders, $1) r
WHERE EXISTS (SELECT FROM service_state WHERE term = $2 FOR SHARE)
RETURNING client_index
"""


async def insert_venue_orders(conn: Connection, orders: Iterable[SentOrder], term: int) -> bool:
    """Record orders before they are sent together. Return False and record nothing when `term` is over.

    :raises asyncpg.UniqueViolationError: an order with this client index exists, or an undecided one that may open
    """
    rows = msgspec.json.encode([venue_order_row(sent) for sent in orders]).decode()
    return await conn.fetchval(INSERT_VENUE_ORDERS, rows, term) is not None


UPDATE_VENUE_ORDERS_ATTEMPT = """
UPDATE venue_orders SET attempt = $3, expires_at = $4
WHERE account_id = $1 AND client_index = ANY($2::bigint[])
    AND EXISTS (SELECT FROM service_state WHERE term = $5 FOR SHARE)
RETURNING client_index
"""


async def update_venue_orders_attempt(conn: Connection, orders: Sequence[SentOrder], term: int) -> bool:
    """Record the transaction that carries orders, and how long the venue may accept it. Return False as above."""
    first = orders[0]
    indexes = [sent.client_index for sent in orders]
    row = await conn.fetchval(
        UPDATE_VENUE_ORDERS_ATTEMPT, first.account_id, indexes, first.attempt, first.expires_at, term
    )
    return row is not None


SELECT_OPEN_VENUE_ORDERS = """
SELECT * FROM venue_orders WHERE account_id = $1 AND status IN ('SENT', 'STANDING') ORDER BY created_at, client_index
"""


async def select_open_venue_orders(conn: Connection, account_id: str) -> list[SentOrder]:
    """Return the orders that are not final or not fully booked, in the order they were sent."""
    return [_sent(record) for record in await conn.fetch(SELECT_OPEN_VENUE_ORDERS, account_id)]


SELECT_VENUE_INDEXES = """
SELECT client_index FROM venue_orders WHERE account_id = $1 AND client_index = ANY($2::bigint[])
"""


async def select_venue_indexes(conn: Connection, account_id: str, indexes: Iterable[int]) -> set[int]:
    """Return the client indexes that belong to our orders."""
    return {record["client_index"] for record in await conn.fetch(SELECT_VENUE_INDEXES, account_id, list(indexes))}


SELECT_VENUE_TRADES = "SELECT trade_id FROM venue_trades WHERE account_id = $1 AND trade_id = ANY($2::bigint[])"


async def select_venue_trades(conn: Connection, account_id: str, trade_ids: Iterable[int]) -> set[int]:
    """Return the venue trades that are already booked."""
    return {record["trade_id"] for record in await conn.fetch(SELECT_VENUE_TRADES, account_id, list(trade_ids))}


SELECT_FUNDED_HOURS = "SELECT symbol, boundary FROM funding_payments WHERE run_id = $1 AND boundary >= $2"


async def select_funded_hours(conn: Connection, run_id: UUID, since: datetime) -> set[tuple[str, datetime]]:
    """Return the markets and whole hours since `since` with booked funding."""
    return {(r["symbol"], r["boundary"]) for r in await conn.fetch(SELECT_FUNDED_HOURS, run_id, since)}


def _sent(record: Any) -> SentOrder:
    row = dict(record)
    return msgspec.convert(row | {"order": row | {"trigger": row["trigger_price"]}}, SentOrder)
