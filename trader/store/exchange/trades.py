"""SQL of completed trades: the rows of `orders` with status CLOSED."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import asyncpg
import msgspec

from trader.domain.exchange.orders import Trade
from trader.domain.money import divide
from trader.store.database.pool import Connection, Page

SELECT_TRADES = """
SELECT o.*, m.name AS model_name, m.variant::text AS model_variant, m.router_model_name AS model_router_name
FROM orders o LEFT JOIN models m ON m.id = o.account_id
WHERE o.status = 'CLOSED' AND o.closed_at < coalesce($2::timestamptz, 'infinity')
  AND o.symbol = coalesce($4, o.symbol)
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
      AND symbol = coalesce($5, symbol)
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
