"""SQL of an agent's own history for its view: trades, statistics, last fills per market, and equity."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple
from uuid import UUID

from trader.domain.agents.memory import CYCLES_REMEMBERED, DECISION_TYPES, LINE_MAX, PastCall, PastCycle
from trader.domain.agents.observation import LastFill, observe_record
from trader.domain.agents.view import ObservedStats, ObservedTrade
from trader.domain.exchange.orders import OrderSide, Side
from trader.domain.money import divide
from trader.store.database.pool import Connection

SELECT_LATEST_TRADES = """
SELECT symbol, side, quantity, entry_notional, exit_notional, net_pnl, fees, funding, close_reason, confidence,
       opened_at, closed_at
FROM orders
WHERE account_id = $1 AND run_id = $2 AND status = 'CLOSED'
ORDER BY closed_at DESC, id
LIMIT $3
"""


async def select_latest_trades(
    conn: Connection, account_id: str, run_id: UUID, limit: int
) -> tuple[ObservedTrade, ...]:
    """Return the last completed trades of a run, newest first."""
    return tuple(
        ObservedTrade(
            symbol=row["symbol"],
            side=Side(row["side"]),
            quantity=row["quantity"],
            entry_price=divide(row["entry_notional"], row["quantity"]),
            exit_price=divide(row["exit_notional"], row["quantity"]),
            net_pnl=row["net_pnl"],
            fees=row["fees"],
            funding=row["funding"],
            close_reason=row["close_reason"],
            confidence=row["confidence"],
            opened_at=row["opened_at"],
            closed_at=row["closed_at"],
        )
        for row in await conn.fetch(SELECT_LATEST_TRADES, account_id, run_id, limit)
    )


SELECT_OWN_STATISTICS = """
SELECT count(*) AS trades,
       count(*) FILTER (WHERE net_pnl > 0) AS wins,
       count(*) FILTER (WHERE net_pnl < 0) AS losses,
       coalesce(sum(net_pnl) FILTER (WHERE net_pnl > 0), 0) AS won,
       coalesce(-sum(net_pnl) FILTER (WHERE net_pnl < 0), 0) AS lost
FROM orders
WHERE run_id = $1 AND status = 'CLOSED'
"""


async def select_own_statistics(conn: Connection, run_id: UUID) -> ObservedStats:
    """Return the trade statistics of a run, without the ratios that need the equity curve."""
    row = await conn.fetchrow(SELECT_OWN_STATISTICS, run_id)
    assert row is not None  # an aggregate without GROUP BY has one row
    return observe_record(**row)


SELECT_LAST_ACTIONS = """
SELECT f.symbol, f.side AS fill_side, o.side, f.created_at
FROM unnest($3::text[]) AS market (symbol)
CROSS JOIN LATERAL (
    SELECT symbol, side, order_id, created_at
    FROM fills
    WHERE account_id = $1 AND run_id = $2 AND symbol = market.symbol
    ORDER BY sequence DESC
    LIMIT 1
) f
JOIN orders o ON o.id = f.order_id
ORDER BY f.symbol
"""


async def select_last_actions(
    conn: Connection, account_id: str, run_id: UUID, symbols: Sequence[str]
) -> dict[str, LastFill]:
    """Return the last fill in each market, exits by the exchange included; one not traded in this run is absent."""
    rows = await conn.fetch(SELECT_LAST_ACTIONS, account_id, run_id, symbols)
    fills: dict[str, LastFill] = {}
    for row in rows:
        side = Side(row["side"])
        fills[row["symbol"]] = LastFill(side, OrderSide(row["fill_side"]).opens is not side, row["created_at"])
    return fills


SELECT_PAST_CYCLES = """
SELECT i.started_at, left(i.response, $4) AS response, c.type, c.status, c.metadata -> 'decisions' -> 0 AS decision,
       c.metadata -> 'results' -> 0 AS result
FROM (
    SELECT id, started_at, response
    FROM invocations
    WHERE model_id = $1 AND started_at >= $2 AND status <> 'running' AND step_count > 0
    ORDER BY started_at DESC
    LIMIT $3
) i
LEFT JOIN tool_calls c ON c.invocation_id = i.id AND (c.status <> 'ok' OR c.type = ANY ($5))
ORDER BY i.started_at DESC, c.number
"""


async def select_past_cycles(conn: Connection, model_id: str, since: datetime) -> list[PastCycle]:
    """Return a model's last finished invocations since a moment that were answered, newest first."""
    rows = await conn.fetch(SELECT_PAST_CYCLES, model_id, since, CYCLES_REMEMBERED, LINE_MAX, sorted(DECISION_TYPES))
    cycles: list[PastCycle] = []
    for (at, response), calls in groupby(rows, key=lambda row: (row["started_at"], row["response"])):
        cycles.append(PastCycle(at, response, [PastCall(*list(row.values())[2:]) for row in calls if row["type"]]))
    return cycles


SELECT_NOTE = "SELECT text FROM notes WHERE model_id = $1 AND written_at >= $2"


async def select_note(conn: Connection, model_id: str, since: datetime) -> str | None:
    """Return the note that a model has written to itself since a moment."""
    text: str | None = await conn.fetchval(SELECT_NOTE, model_id, since)
    return text


class HourlyEquity(NamedTuple):
    """The last equity recorded in an hour."""

    hour: datetime
    equity: Decimal


SELECT_EQUITY_CURVE = """
SELECT hour, last
FROM portfolio_hourly
WHERE account_id = $1 AND run_id = $2
ORDER BY hour
"""


async def select_equity_curve(conn: Connection, account_id: str, run_id: UUID) -> list[HourlyEquity]:
    """Return the last equity of every recorded hour of a run, ascending."""
    rows = await conn.fetch(SELECT_EQUITY_CURVE, account_id, run_id)
    return [HourlyEquity(row["hour"], row["last"]) for row in rows]


SELECT_LOWEST_EQUITY = """
SELECT min(net_portfolio) FROM portfolio_snapshots WHERE account_id = $1 AND run_id = $2 AND created_at >= $3
"""


async def select_lowest_equity(conn: Connection, account_id: str, run_id: UUID, since: datetime) -> Decimal | None:
    """Return the lowest equity of a run recorded since a moment; None without a record."""
    lowest: Decimal | None = await conn.fetchval(SELECT_LOWEST_EQUITY, account_id, run_id, since)
    return lowest
