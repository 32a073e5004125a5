"""SQL of completed trades: the rows of `orders` with status CLOSED; and of single ones with their fills."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Literal, NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from trader.domain.exchange.orders import Cause, ExitPlan, OrderSide, Side, Trade
from trader.domain.money import divide
from trader.store.database.pool import Connection, Page

SELECT_TRADES = """
SELECT o.*, m.name AS model_name, m.variant::text AS model_variant, m.router_model_name AS model_router_name
FROM orders o LEFT JOIN models m ON m.id = o.account_id
WHERE o.status = 'CLOSED' AND o.closed_at < coalesce($2::timestamptz, 'infinity')
  AND ($4::text IS NULL OR o.symbol = $4)
ORDER BY o.closed_at DESC, o.id
LIMIT $1 OFFSET $3
"""


async def select_trades(conn: Connection, page: Page, symbol: str | None = None) -> list[Trade]:
    """Return the latest trades of all accounts and runs, of one market if it is named, the newest first."""
    return [_trade(row) for row in await conn.fetch(SELECT_TRADES, *page, symbol)]


# The latest of each account, then the latest of those: an account that traded long ago needs no long scan.
SELECT_ACCOUNT_TRADES = """
SELECT o.*, m.name AS model_name, m.variant::text AS model_variant, m.router_model_name AS model_router_name
FROM (SELECT DISTINCT id FROM unnest($1::text[]) AS id) a
CROSS JOIN LATERAL (
    SELECT * FROM orders
    WHERE account_id = a.id AND status = 'CLOSED' AND closed_at < coalesce($3::timestamptz, 'infinity')
      AND ($5::text IS NULL OR symbol = $5)
    ORDER BY closed_at DESC, id
    LIMIT $2::bigint + $4::bigint
) o
LEFT JOIN models m ON m.id = o.account_id
ORDER BY o.closed_at DESC, o.id
LIMIT $2 OFFSET $4
"""


async def select_account_trades(
    conn: Connection, account_ids: Sequence[str], page: Page, symbol: str | None = None
) -> list[Trade]:
    """Return the latest trades of these accounts in all their runs, of one market if it is named, the newest first."""
    return [_trade(row) for row in await conn.fetch(SELECT_ACCOUNT_TRADES, account_ids, *page, symbol)]


def _trade(row: asyncpg.Record) -> Trade:
    quantity, entry_notional, exit_notional = row["quantity"], row["entry_notional"], row["exit_notional"]
    figures = {
        "entry_price": divide(entry_notional, quantity),
        "exit_price": divide(exit_notional, quantity),
        "leverage": divide(entry_notional, row["margin"]) if row["leveraged"] else None,
    }
    return msgspec.convert({**row, **figures}, Trade)


class TradeFill(msgspec.Struct, frozen=True):
    """A fill of a trade. `fee` includes that of a liquidation."""

    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    cause: Cause
    created_at: datetime


class TradeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A position or a completed trade with its last exit plan and its fills, ascending.

    What is known at the close alone is None for a position.
    """

    id: UUID
    account_id: str
    symbol: str
    side: Side
    status: Literal["OPEN", "CLOSED"]
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal | None
    leverage: Decimal | None
    margin: Decimal
    gross_pnl: Decimal | None
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal | None
    close_reason: str | None
    confidence: Decimal | None
    invocation_id: UUID | None
    opened_at: datetime
    closed_at: datetime | None
    exit_plan: ExitPlan
    fills: tuple[TradeFill, ...]


SELECT_TRADE = """
SELECT * FROM orders
WHERE id = coalesce((SELECT order_id FROM fills WHERE request_id = $1 ORDER BY sequence LIMIT 1), $1)
"""

# A part that was closed has its own exits, and the entries of the position that it was a part of.
SELECT_TRADE_FILLS = """
SELECT side, quantity, price, fee + liquidation_fee AS fee, maker, cause, created_at
FROM fills
WHERE account_id = $1 AND created_at >= $4 AND created_at <= coalesce($5::timestamptz, 'infinity')
  AND (order_id = $2 OR order_id = $3 AND side = $6)
ORDER BY sequence
"""


async def select_trade(conn: Connection, trade_id: UUID) -> TradeRecord | None:
    """Return the position or trade of this id, or the one that the first fill of this order belongs to.

    The connection must be in a transaction that sees one moment.
    """
    row = await conn.fetchrow(SELECT_TRADE, trade_id)
    if row is None:
        return None
    entry = "buy" if row["side"] == "LONG" else "sell"
    fills = await conn.fetch(
        SELECT_TRADE_FILLS, row["account_id"], row["id"], row["parent_id"], row["opened_at"], row["closed_at"], entry
    )
    exit_notional = row["exit_notional"]
    figures = {
        "entry_price": divide(row["entry_notional"], row["quantity"]),
        "exit_price": None if exit_notional is None else divide(exit_notional, row["quantity"]),
        "leverage": divide(row["entry_notional"], row["margin"]) if row["leveraged"] else None,
        "exit_plan": ExitPlan(**{name: row[name] for name in ExitPlan.__struct_fields__}),
        "fills": [dict(fill) for fill in fills],
    }
    return msgspec.convert({**row, **figures}, TradeRecord)


class RunTrade(msgspec.Struct, frozen=True, gc=False):
    """The columns of a trade that the statistics of a run need.

    `id` is its UUID as a number: the garbage collector would walk two hundred thousand UUIDs of a season.
    """

    id: int
    net_pnl: Decimal
    entry_notional: Decimal
    is_long: bool
    confidence: Decimal | None
    opened_at: datetime
    closed_at: datetime
    symbol: str


# OFFSET 0 makes the planner use one index scan per run; as a plain join it would read every trade.
SELECT_RUN_TRADES = """
SELECT o.account_id, o.id, o.net_pnl, o.entry_notional, o.side = 'LONG', o.confidence, o.opened_at, o.closed_at,
       o.symbol
FROM (
    SELECT * FROM unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS w (account_id, run_id, since) ORDER BY account_id
) w
CROSS JOIN LATERAL (
    SELECT * FROM orders
    WHERE account_id = w.account_id AND status = 'CLOSED' AND closed_at >= w.since AND run_id = w.run_id
    OFFSET 0
) o
ORDER BY w.account_id, o.closed_at, o.id
"""


async def select_run_trades(
    conn: Connection, since: Sequence[tuple[str, UUID, datetime]]
) -> list[tuple[str, RunTrade]]:
    """Return the trades of (account, run, earliest closing) triples with their account, each account's by closing."""
    columns = [list(column) for column in zip(*since, strict=True)] or [[], [], []]
    rows = await conn.fetch(SELECT_RUN_TRADES, *columns)
    return [(account_id, RunTrade(trade_id.int, *rest)) for account_id, trade_id, *rest in rows]


class OpenPosition(NamedTuple):
    """A position that is open, as far as the comparison of its account with luck needs it."""

    account_id: str
    symbol: str
    is_long: bool
    entry_notional: Decimal
    opened_at: datetime


SELECT_OPEN_POSITIONS = """
SELECT account_id, symbol, side = 'LONG', entry_notional, opened_at FROM orders WHERE status = 'OPEN'
ORDER BY account_id, symbol
"""


async def select_open_positions(conn: Connection) -> list[OpenPosition]:
    """Return the open positions of all accounts."""
    return [OpenPosition(*row) for row in await conn.fetch(SELECT_OPEN_POSITIONS)]
