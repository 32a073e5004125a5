"""SQL of behavior: the positions of runs with the prices while they were open, and the changes of exit plans."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from trader.database.pool import Connection, part_of_row
from trader.portfolio.domain.behaviour import PlanChange, PositionPart
from trader.record.sql.results import JOIN_EXTREMES

SELECT_POSITION_PARTS = f"""
SELECT o.run_id, o.symbol, o.side = 'LONG' AS is_long, o.quantity::float8, o.entry_notional::float8,
       o.exit_notional::float8, o.gross_pnl::float8 AS gross, o.fees::float8, o.net_pnl::float8 AS net,
       o.close_reason AS reason, o.stop::float8, o.target::float8, o.opened_at, o.closed_at,
       coalesce(m.lowest, h.lowest) AS lowest, coalesce(m.highest, h.highest) AS highest
FROM orders o
{JOIN_EXTREMES}
WHERE o.run_id = ANY($1::uuid[])
ORDER BY o.run_id, o.opened_at, o.symbol, o.closed_at, o.id
"""  # noqa: S608 - a constant of this package


async def select_position_parts(conn: Connection, run_ids: Sequence[UUID]) -> dict[UUID, list[PositionPart]]:
    """Return the positions of runs and their closed parts, sorted by opening within each run.

    Only completed ones have extremes.
    """
    parts: dict[UUID, list[PositionPart]] = {}
    for row in await conn.fetch(SELECT_POSITION_PARTS, run_ids):
        parts.setdefault(row["run_id"], []).append(part_of_row(row, PositionPart))
    return parts


SELECT_PLAN_CHANGES = """
SELECT i.model_id, t.metadata->'decisions'->0->>'symbol' AS symbol, t.created_at AS at
FROM invocations i JOIN tool_calls t ON t.invocation_id = i.id
WHERE i.model_id = ANY($1::text[]) AND i.started_at >= $2 AND t.type = 'UPDATE_EXIT_PLAN' AND t.status = 'ok'
ORDER BY i.model_id, t.created_at, t.id
"""


async def select_plan_changes(
    conn: Connection, model_ids: Sequence[str], since: datetime
) -> dict[str, list[PlanChange]]:
    """Return the exit plan changes in the models' invocations since a time, ascending per model."""
    changes: dict[str, list[PlanChange]] = {}
    for row in await conn.fetch(SELECT_PLAN_CHANGES, model_ids, since):
        changes.setdefault(row["model_id"], []).append(part_of_row(row, PlanChange))
    return changes


SELECT_HOURLY_CLOSES = """
SELECT symbol, open_time, close FROM candles
WHERE minutes = 60 AND symbol = ANY($1::text[]) AND open_time >= $2 AND open_time < $3
ORDER BY symbol, open_time
"""


async def select_hourly_closes(
    conn: Connection, symbols: Sequence[str], start: datetime, end: datetime
) -> dict[str, dict[datetime, float]]:
    """Return the closes of the markets' hours that open within [start, end), by market and hour."""
    closes: dict[str, dict[datetime, float]] = {}
    for row in await conn.fetch(SELECT_HOURLY_CLOSES, symbols, start, end):
        closes.setdefault(row["symbol"], {})[row["open_time"]] = row["close"]
    return closes
