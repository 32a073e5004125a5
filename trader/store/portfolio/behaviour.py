"""SQL of behaviour: the positions of runs with the prices while they were open, and the changes of exit plans."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from trader.domain.portfolio.behaviour import PlanChange, PositionPart
from trader.store.database.pool import Connection

# The extremes are those of the minutes within a trade while these are kept, then those of hours.
SELECT_POSITION_PARTS = """
SELECT o.run_id, o.symbol, o.side = 'LONG', o.quantity::float8, o.entry_notional::float8, o.exit_notional::float8,
       o.gross_pnl::float8, o.fees::float8, o.net_pnl::float8, o.close_reason, o.stop::float8, o.target::float8,
       o.opened_at, o.closed_at, coalesce(m.lowest, h.lowest), coalesce(m.highest, h.highest)
FROM orders o
CROSS JOIN LATERAL (
    SELECT min(low) AS lowest, max(high) AS highest FROM candles
    WHERE minutes = 1 AND symbol = o.symbol AND open_time >= o.opened_at
      AND open_time < date_trunc('minute', o.closed_at, 'UTC')
) m
CROSS JOIN LATERAL (
    SELECT min(low) AS lowest, max(high) AS highest FROM candles
    WHERE m.lowest IS NULL AND minutes = 60 AND symbol = o.symbol AND open_time >= o.opened_at
      AND open_time < date_trunc('hour', o.closed_at, 'UTC')
) h
WHERE o.run_id = ANY($1::uuid[])
ORDER BY o.run_id, o.opened_at, o.symbol, o.closed_at, o.id
"""


async def select_position_parts(conn: Connection, run_ids: Sequence[UUID]) -> dict[UUID, list[PositionPart]]:
    """Return the positions of runs and the parts of them that were closed, each run's by opening.

    The extremes are of completed ones.
    """
    parts: dict[UUID, list[PositionPart]] = {}
    for run_id, *row in await conn.fetch(SELECT_POSITION_PARTS, run_ids):
        parts.setdefault(run_id, []).append(PositionPart(*row))
    return parts


SELECT_PLAN_CHANGES = """
SELECT i.model_id, t.metadata->'decisions'->0->>'symbol', t.created_at
FROM invocations i JOIN tool_calls t ON t.invocation_id = i.id
WHERE i.model_id = ANY($1::text[]) AND i.started_at >= $2 AND t.type = 'UPDATE_EXIT_PLAN' AND t.status = 'ok'
ORDER BY i.model_id, t.created_at, t.id
"""


async def select_plan_changes(
    conn: Connection, model_ids: Sequence[str], since: datetime
) -> dict[str, list[PlanChange]]:
    """Return the exit plans that models changed in invocations since a time, each model's ascending."""
    changes: dict[str, list[PlanChange]] = {}
    for model_id, *row in await conn.fetch(SELECT_PLAN_CHANGES, model_ids, since):
        changes.setdefault(model_id, []).append(PlanChange(*row))
    return changes


SELECT_HOURLY_CLOSES = """
SELECT symbol, open_time, close FROM candles
WHERE minutes = 60 AND symbol = ANY($1::text[]) AND open_time >= $2 AND open_time < $3
ORDER BY symbol, open_time
"""


async def select_hourly_closes(
    conn: Connection, symbols: Sequence[str], start: datetime, end: datetime
) -> dict[str, dict[datetime, float]]:
    """Return the closes of the hours of markets that open within [start, end), by market and hour."""
    closes: dict[str, dict[datetime, float]] = {}
    for symbol, hour, close in await conn.fetch(SELECT_HOURLY_CLOSES, symbols, start, end):
        closes.setdefault(symbol, {})[hour] = close
    return closes
