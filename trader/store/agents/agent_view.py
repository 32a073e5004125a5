"""SQL of an agent's own history for its view: trades, statistics, last fills per market, and equity."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from trader.domain.agents.memory import CYCLES_REMEMBERED, DECISION_TYPES, LINE_MAX, PastCall, PastCycle
from trader.domain.agents.observation import LastFill, observe_record
from trader.domain.agents.view import ObservedStats, ObservedTrade
from trader.domain.exchange.orders import OrderSide, Side
from trader.domain.money import divide
from trader.store.database.pool import Connection


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


class RunPast(NamedTuple):
    """The past of a run: its last equity of each hour, its last trades, newest first, all its trades in figures, and
    the last fill in each market, exits by the exchange included; a market not traded in the run is absent."""

    curve: list[HourlyEquity]
    trades: tuple[ObservedTrade, ...]
    stats: ObservedStats
    actions: dict[str, LastFill]


# One statement and not four: it is made for every view and each takes a round trip. Records have no domains: casts.
SELECT_RUN_PAST = """
SELECT ARRAY(
           SELECT (hour, last::numeric) FROM portfolio_hourly WHERE account_id = $1 AND run_id = $2 ORDER BY hour
       ) AS curve,
       ARRAY(
           SELECT (symbol, side, quantity::numeric, entry_notional::numeric, exit_notional::numeric, net_pnl::numeric,
                   fees::numeric, funding::numeric, close_reason, confidence::numeric, opened_at, closed_at)
           FROM orders
           WHERE account_id = $1 AND run_id = $2 AND status = 'CLOSED'
           ORDER BY closed_at DESC, id
           LIMIT $3
       ) AS trades,
       ARRAY(
           SELECT (f.symbol, f.side, o.side, f.created_at)
           FROM unnest($4::text[]) AS market (symbol)
           CROSS JOIN LATERAL (
               SELECT symbol, side, order_id, created_at
               FROM fills
               WHERE account_id = $1 AND run_id = $2 AND symbol = market.symbol
               ORDER BY sequence DESC
               LIMIT 1
           ) f
           JOIN orders o ON o.id = f.order_id
           ORDER BY f.symbol
       ) AS fills,
       count(*) AS count,
       count(*) FILTER (WHERE net_pnl > 0) AS wins,
       count(*) FILTER (WHERE net_pnl < 0) AS losses,
       coalesce(sum(net_pnl) FILTER (WHERE net_pnl > 0), 0) AS won,
       coalesce(-sum(net_pnl) FILTER (WHERE net_pnl < 0), 0) AS lost
FROM orders
WHERE run_id = $2 AND status = 'CLOSED'
"""


async def select_run_past(
    conn: Connection, account_id: str, run_id: UUID, trades_max: int, symbols: Sequence[str]
) -> RunPast:
    """Return the past of a run; its statistics lack the ratios that need the equity curve."""
    row = await conn.fetchrow(SELECT_RUN_PAST, account_id, run_id, trades_max, symbols)
    assert row is not None  # an aggregate without GROUP BY has one row
    return RunPast(
        [HourlyEquity(*mark) for mark in row["curve"]],
        tuple(_trade(*trade) for trade in row["trades"]),
        observe_record(trades=row["count"], wins=row["wins"], losses=row["losses"], won=row["won"], lost=row["lost"]),
        {
            symbol: LastFill(Side(side), OrderSide(fill_side).opens is not Side(side), at)
            for symbol, fill_side, side, at in row["fills"]
        },
    )


def _trade(
    symbol: str, side: str, quantity: Decimal, entry_notional: Decimal, exit_notional: Decimal, *rest: Any
) -> ObservedTrade:
    prices = divide(entry_notional, quantity), divide(exit_notional, quantity)
    fields = symbol, Side(side), quantity, *prices, *rest
    return ObservedTrade(**dict(zip(ObservedTrade.__struct_fields__, fields, strict=True)))


# The note in every row, so that both are read in one round trip.
SELECT_MEMORY = """
SELECT n.text AS note, i.started_at, left(i.response, $4) AS response, c.type, c.status,
       c.metadata -> 'decisions' -> 0 AS decision, c.metadata -> 'results' -> 0 AS result
FROM (SELECT max(text) AS text FROM notes WHERE model_id = $1 AND written_at >= $2) n
LEFT JOIN (
    SELECT id, started_at, response
    FROM invocations
    WHERE model_id = $1 AND started_at >= $2 AND status <> 'running' AND step_count > 0
    ORDER BY started_at DESC
    LIMIT $3
) i ON true
LEFT JOIN tool_calls c ON c.invocation_id = i.id AND (c.status <> 'ok' OR c.type = ANY ($5))
ORDER BY i.started_at DESC, c.number
"""


async def select_memory(conn: Connection, model_id: str, since: datetime) -> tuple[str | None, list[PastCycle]]:
    """Return the note that a model has written to itself since a moment, and its finished invocations that were
    answered, newest first."""
    rows = await conn.fetch(SELECT_MEMORY, model_id, since, CYCLES_REMEMBERED, LINE_MAX, sorted(DECISION_TYPES))
    cycles: list[PastCycle] = []
    for (at, response), calls in groupby(rows, key=lambda row: (row["started_at"], row["response"])):
        if at is not None:
            cycles.append(PastCycle(at, response, [PastCall(*list(row.values())[3:]) for row in calls if row["type"]]))
    return rows[0]["note"], cycles


SELECT_LOWEST_EQUITY = """
SELECT min(net_portfolio) FROM portfolio_snapshots WHERE account_id = $1 AND run_id = $2 AND created_at >= $3
"""


async def select_lowest_equity(conn: Connection, account_id: str, run_id: UUID, since: datetime) -> Decimal | None:
    """Return the lowest equity of a run recorded since a moment; None without a record."""
    lowest: Decimal | None = await conn.fetchval(SELECT_LOWEST_EQUITY, account_id, run_id, since)
    return lowest
