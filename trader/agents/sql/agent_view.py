"""SQL of an agent's own history for its view: trades, statistics, last fills per market, and equity."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from uuid import UUID

from trader.agents.domain.memory import CYCLES_REMEMBERED, DECISION_TYPES, LINE_MAX, PastCall, PastCycle
from trader.agents.domain.observation import LastFill, TradingRecord, observe_trade
from trader.agents.domain.view import ObservedFill
from trader.database.pool import Connection, part_of_row
from trader.exchange.domain.account import Trade
from trader.exchange.domain.orders import Cause, OrderSide, Side
from trader.exchange.sql.trades import trade_of_row

# One statement instead of four: every view runs it, and each statement takes a round trip. Trades are in the order of
# `latest_first`.
SELECT_RUN_PAST = """
SELECT ARRAY(SELECT hour FROM portfolio_hourly WHERE account_id = $1 AND run_id = $2 ORDER BY hour) AS hours,
       ARRAY(SELECT last FROM portfolio_hourly WHERE account_id = $1 AND run_id = $2 ORDER BY hour) AS equities,
       ARRAY(
           SELECT o
           FROM orders o
           WHERE account_id = $1 AND run_id = $2 AND status = 'CLOSED'
           ORDER BY closed_at DESC, symbol COLLATE "C", opened_at, quantity, net_pnl
           LIMIT $3
       ) AS trades,
       ARRAY(
           SELECT jsonb_build_object('symbol', f.symbol, 'side', o.side, 'fill_side', f.side, 'at', f.created_at)
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
       count(*) AS trade_count,
       count(*) FILTER (WHERE net_pnl > 0) AS wins,
       count(*) FILTER (WHERE net_pnl < 0) AS losses,
       coalesce(sum(net_pnl) FILTER (WHERE net_pnl > 0), 0) AS won,
       coalesce(-sum(net_pnl) FILTER (WHERE net_pnl < 0), 0) AS lost
FROM orders
WHERE run_id = $2 AND status = 'CLOSED'
"""


async def select_run_past(
    conn: Connection, account_id: str, run_id: UUID, trades_max: int, symbols: Sequence[str]
) -> tuple[list[tuple[datetime, Decimal]], TradingRecord]:
    """Return the hours of a run with their last equity, ascending, and the trading record of its agent."""
    row = await conn.fetchrow(SELECT_RUN_PAST, account_id, run_id, trades_max, symbols)
    assert row is not None  # an aggregate without GROUP BY returns one row
    record = TradingRecord(
        trades=tuple(observe_trade(trade_of_row(trade, Trade)) for trade in row["trades"]),
        last_fills={fill["symbol"]: _last_fill(**fill) for fill in row["fills"]},
        **{name: row[name] for name in ("trade_count", "wins", "losses", "won", "lost")},
    )
    return list(zip(row["hours"], row["equities"], strict=True)), record


def _last_fill(*, symbol: str, side: str, fill_side: str, at: str) -> LastFill:
    return LastFill(Side(side), OrderSide(fill_side).opens is not Side(side), datetime.fromisoformat(at))


SELECT_LAST_FILLS = """
SELECT sequence, created_at AS at, symbol, side, quantity, price, fee + liquidation_fee AS fee, maker, cause,
       request_id AS order_id
FROM fills
WHERE account_id = $1 AND run_id = $2
ORDER BY sequence DESC
LIMIT $3
"""


async def select_last_fills(conn: Connection, account_id: str, run_id: UUID, count: int) -> tuple[ObservedFill, ...]:
    """Return the last fills of a run, oldest first."""
    rows = await conn.fetch(SELECT_LAST_FILLS, account_id, run_id, count)
    return tuple(
        ObservedFill(**{**row, "side": OrderSide(row["side"]), "cause": Cause(row["cause"])}) for row in reversed(rows)
    )


# Every row repeats the note and the time of the last cycle, so that one round trip reads all.
SELECT_MEMORY = """
SELECT n.text AS note, n.last_at, i.started_at, left(i.response, $4) AS response, c.type, c.status,
       c.metadata -> 'decisions' AS decisions, c.metadata -> 'results' AS results
FROM (
    SELECT max(text) AS text,
           (SELECT max(started_at) FROM invocations
            WHERE model_id = $1 AND started_at >= $2 AND status <> 'running') AS last_at
    FROM notes
    WHERE model_id = $1 AND written_at >= $2
) n
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


async def select_memory(
    conn: Connection, model_id: str, since: datetime
) -> tuple[str | None, list[PastCycle], datetime | None]:
    """Return the note that a model wrote to itself since `since`, its finished, answered invocations, newest first, and
    the time of its last finished invocation, answered or not."""
    rows = await conn.fetch(SELECT_MEMORY, model_id, since, CYCLES_REMEMBERED, LINE_MAX + 1, sorted(DECISION_TYPES))
    cycles: list[PastCycle] = []
    for (at, response), calls in groupby(rows, key=lambda row: (row["started_at"], row["response"])):
        if at is not None:
            cycles.append(PastCycle(at, response, [part_of_row(row, PastCall) for row in calls if row["type"]]))
    return rows[0]["note"], cycles, rows[0]["last_at"]


SELECT_LOWEST_EQUITY = """
SELECT min(net_portfolio) FROM portfolio_snapshots WHERE account_id = $1 AND run_id = $2 AND created_at >= $3
"""


async def select_lowest_equity(conn: Connection, account_id: str, run_id: UUID, since: datetime) -> Decimal | None:
    """Return the lowest recorded equity of a run since `since`; None without a record."""
    lowest: Decimal | None = await conn.fetchval(SELECT_LOWEST_EQUITY, account_id, run_id, since)
    return lowest
