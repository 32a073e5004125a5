"""SQL for completed trades (the rows of `orders` with status CLOSED), and for single trades with their fills."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Page, columns_of, part_of_row
from trader.exchange.domain.account import Position, Trade
from trader.exchange.domain.orders import Cause, ExitPlan, Fill, PlanTarget, Side

T = TypeVar("T", bound=Position)


class ModelTrade(Trade, frozen=True, kw_only=True):
    """A completed trade and the names of its model, which are None for an account that belongs to no model."""

    model_name: str | None
    model_variant: VariantId | None
    model_router_name: str | None


def trade_of_row(row: asyncpg.Record, kind: type[T]) -> T:
    """Return the trade or position of a row of `orders`."""
    return msgspec.convert({**row, "exit_plan": plan_of_row(row)}, kind)


def plan_of_row(row: asyncpg.Record) -> ExitPlan:
    """Return the exit plan of a row of `orders` or `limit_orders`."""
    targets = msgspec.json.decode(row["targets"], type=tuple[PlanTarget, ...])
    return msgspec.structs.replace(part_of_row(row, ExitPlan), targets=targets)


class TradeFilter(NamedTuple):
    """Which completed trades are meant: of a market, on a side, with or without a profit, closed for a reason."""

    symbol: str | None = None
    side: Side | None = None
    has_won: bool | None = None
    close_reason: Cause | None = None


ALL_TRADES = TradeFilter()

FITS_FILTER = """
    ($1::text IS NULL OR symbol = $1) AND ($2::text IS NULL OR side = $2)
    AND ($3::boolean IS NULL OR (net_pnl > 0) = $3) AND ($4::text IS NULL OR close_reason = $4)
"""
"""Which `orders` fit a TradeFilter; its fields are the first parameters of a statement."""

SELECT_TRADES = f"""
SELECT o.*, m.name AS model_name, m.variant AS model_variant, m.router_model_name AS model_router_name
FROM orders o LEFT JOIN models m ON m.id = o.account_id
WHERE o.status = 'CLOSED' AND o.closed_at < coalesce($6::timestamptz, 'infinity') AND {FITS_FILTER}
ORDER BY o.closed_at DESC, o.id
LIMIT $5 OFFSET $7
"""  # noqa: S608 - a constant of this module


async def select_trades(conn: Connection, page: Page, chosen: TradeFilter = ALL_TRADES) -> list[ModelTrade]:
    """Return the latest trades of all accounts and runs that fit the filter, newest first."""
    return [trade_of_row(row, ModelTrade) for row in await conn.fetch(SELECT_TRADES, *chosen, *page)]


# The latest trades of each account, then the latest of these: an account that last traded long ago needs no long scan.
SELECT_ACCOUNT_TRADES = f"""
SELECT o.*, m.name AS model_name, m.variant AS model_variant, m.router_model_name AS model_router_name
FROM (SELECT DISTINCT id FROM unnest($5::text[]) AS id) a
CROSS JOIN LATERAL (
    SELECT * FROM orders
    WHERE account_id = a.id AND status = 'CLOSED' AND closed_at < coalesce($7::timestamptz, 'infinity')
      AND {FITS_FILTER}
    ORDER BY closed_at DESC, id
    LIMIT $6::bigint + $8::bigint
) o
LEFT JOIN models m ON m.id = o.account_id
ORDER BY o.closed_at DESC, o.id
LIMIT $6 OFFSET $8
"""  # noqa: S608 - a constant of this module


async def select_account_trades(
    conn: Connection, account_ids: Sequence[str], page: Page, chosen: TradeFilter = ALL_TRADES
) -> list[ModelTrade]:
    """Return the latest trades of these accounts in all their runs that fit the filter, newest first."""
    rows = await conn.fetch(SELECT_ACCOUNT_TRADES, *chosen, account_ids, *page)
    return [trade_of_row(row, ModelTrade) for row in rows]


class WholeTrade(NamedTuple):
    """A position or a completed trade with its account and its fills, ascending.

    `previous_id` and `next_id` are the account's trades completed before and after it; a position is after all.
    """

    account_id: str
    trade: Position | Trade
    fills: Sequence[Fill]
    previous_id: UUID | None
    next_id: UUID | None


SELECT_TRADE = """
SELECT * FROM orders
WHERE id = coalesce((SELECT order_id FROM fills WHERE request_id = $1 ORDER BY sequence LIMIT 1), $1)
"""

# A closed part has its own exits, and the entries of the position to which it belonged.
SELECT_TRADE_FILLS = """
SELECT *, created_at AS at FROM fills
WHERE account_id = $1 AND created_at >= $4 AND created_at <= coalesce($5::timestamptz, 'infinity')
  AND (order_id = $2 OR order_id = $3 AND side = $6)
ORDER BY sequence
"""


SELECT_NEXT_TRADES = """
WITH closed AS (SELECT coalesce($2::timestamptz, 'infinity') AS at)
SELECT (SELECT o.id FROM orders o
        WHERE o.account_id = $1 AND o.status = 'CLOSED' AND (o.closed_at, o.id) < (closed.at, $3)
        ORDER BY o.closed_at DESC, o.id DESC LIMIT 1) AS previous_id,
       (SELECT o.id FROM orders o
        WHERE o.account_id = $1 AND o.status = 'CLOSED' AND (o.closed_at, o.id) > (closed.at, $3)
        ORDER BY o.closed_at, o.id LIMIT 1) AS next_id
FROM closed
"""


async def select_trade(conn: Connection, trade_id: UUID) -> WholeTrade | None:
    """Return the position or trade with this ID, or the one to which this order's first fill belongs.

    The connection must be in a transaction with a single snapshot.
    """
    row = await conn.fetchrow(SELECT_TRADE, trade_id)
    if row is None:
        return None
    entry = "buy" if row["side"] == "LONG" else "sell"
    fills = await conn.fetch(
        SELECT_TRADE_FILLS, row["account_id"], row["id"], row["parent_id"], row["opened_at"], row["closed_at"], entry
    )
    (neighbors,) = await conn.fetch(SELECT_NEXT_TRADES, row["account_id"], row["closed_at"], row["id"])
    return WholeTrade(
        account_id=row["account_id"],
        trade=trade_of_row(row, Trade if row["status"] == "CLOSED" else Position),
        fills=[msgspec.convert({**fill}, Fill) for fill in fills],
        **neighbors,
    )


class RunTrade(msgspec.Struct, frozen=True, gc=False):
    """The columns of a trade that a run's statistics need.

    `id` is its UUID as a number: the garbage collector would traverse two hundred thousand UUIDs of a season.
    """

    id: int
    net_pnl: Decimal
    entry_notional: Decimal
    is_long: bool
    confidence: Decimal | None
    opened_at: datetime
    closed_at: datetime
    close_reason: Cause
    fees: Decimal

    @classmethod
    def of(cls, trade: Trade) -> "RunTrade":
        return cls(**{name: getattr(trade, name) for name in cls.__struct_fields__} | {"id": trade.id.int})


# OFFSET 0 makes the planner use one index scan per run; as a plain join it would read every trade.
SELECT_RUN_TRADES = """
SELECT o.account_id, o.id, o.net_pnl, o.entry_notional, o.side = 'LONG' AS is_long, o.confidence, o.opened_at,
       o.closed_at, o.close_reason, o.fees
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
    """Return the trades of (account, run, earliest closing) triples with their account, by closing per account."""
    rows = await conn.fetch(SELECT_RUN_TRADES, *columns_of(since, 3))
    return [(row["account_id"], msgspec.convert({**row, "id": row["id"].int}, RunTrade)) for row in rows]


SELECT_OPEN_POSITIONS = """
SELECT account_id, entry_notional, opened_at FROM orders WHERE status = 'OPEN' ORDER BY account_id, symbol
"""


async def select_open_positions(conn: Connection) -> list[tuple[str, Decimal, datetime]]:
    """Return the account, the entry notional and the opening of every open position."""
    return [
        (row["account_id"], row["entry_notional"], row["opened_at"]) for row in await conn.fetch(SELECT_OPEN_POSITIONS)
    ]
