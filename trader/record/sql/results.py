"""SQL for results in the chain: which rows are not in it yet, and a record's rows as the tables have them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import asyncpg

from trader.database.pool import SCAN_TIMEOUT_S, Connection, columns_of
from trader.record.domain.results import STATE_TABLES, Span
from trader.record.sql.chain import (
    ENTRANT_COLUMNS,
    HALT_COLUMNS,
    MISSED_COLUMNS,
    MODEL_COLUMNS,
    SEASON_COLUMNS,
    plain_rows,
)

LOCK_MARKS = "LOCK TABLE chain_marks IN SHARE ROW EXCLUSIVE MODE"
SELECT_TERM = "SELECT term FROM service_state"


async def lock_marks(conn: Connection) -> int | None:
    """Wait for any append of results in progress, and make others wait. Return the current term."""
    await conn.execute(LOCK_MARKS)
    term: int | None = await conn.fetchval(SELECT_TERM)
    return term


SELECT_HAS_BEGUN = "SELECT EXISTS (SELECT FROM chain_links WHERE kind = 'begin')"


async def select_has_begun(conn: Connection) -> bool:
    """Return whether the chain has results."""
    return bool(await conn.fetchval(SELECT_HAS_BEGUN))


# An account's hours are searched in its index starting at the mark, so this reads little however long the season is.
SELECT_PENDING = """
SELECT a.id AS account_id, coalesce(m.sequence, 0) AS sequence_after,
       least(a.sequence, coalesce(m.sequence, 0) + $3) AS sequence_until, m.hour AS hour_after, h.hour AS hour_until,
       coalesce(m.run_number, 0) AS run_after
FROM (SELECT id, sequence FROM accounts UNION ALL SELECT id, 0 FROM baselines) a
LEFT JOIN chain_marks m ON m.account_id = a.id
CROSS JOIN LATERAL (
    SELECT max(hour) AS hour
    FROM (
        SELECT hour FROM portfolio_hourly
        WHERE account_id = a.id AND hour > coalesce(m.hour, '-infinity') AND hour < $1
        ORDER BY hour
        LIMIT $3
    ) next
) h
WHERE a.sequence > coalesce(m.sequence, 0) OR h.hour IS NOT NULL
ORDER BY a.id
LIMIT $2
"""


async def select_pending(conn: Connection, before: datetime, accounts: int, rows: int) -> list[asyncpg.Record]:
    """Return the next results of `accounts` accounts, `rows` sequences and hours each; hours only `before` a time."""
    return await conn.fetch(SELECT_PENDING, before, accounts, rows)


SELECT_PENDING_COUNT = """
SELECT count(*) FROM accounts a LEFT JOIN chain_marks m ON m.account_id = a.id
WHERE a.sequence > coalesce(m.sequence, 0)
"""


async def select_pending_count(conn: Connection) -> int:
    """Return how many accounts have a ledger that has grown since it was recorded."""
    return int(await conn.fetchval(SELECT_PENDING_COUNT))


UPSERT_MARKS = """
INSERT INTO chain_marks (account_id, sequence, run_number, hour)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::integer[], $4::timestamptz[])
ON CONFLICT (account_id) DO UPDATE
SET sequence = excluded.sequence, run_number = excluded.run_number, hour = excluded.hour
"""


async def upsert_marks(conn: Connection, marks: Sequence[tuple[str, int, int, datetime | None]]) -> None:
    """Record how far the results of accounts are in the chain: account, sequence, number of the run, and hour."""
    await conn.execute(UPSERT_MARKS, *columns_of(marks, 4))


RUN_COLUMNS: Final = "account_id, number, id, initial_capital, quote_currency, started_at, ended_at"

# The runs that an account has begun since then, and the ended one before them.
SELECT_NEW_RUNS = f"""
SELECT {RUN_COLUMNS}
FROM unnest($1::text[], $2::integer[]) AS s (of_account, run_after)
JOIN runs ON account_id = of_account AND (number > run_after OR (number = run_after AND ended_at IS NOT NULL))
ORDER BY account_id, number
"""  # noqa: S608 - a constant of this module


async def select_new_runs(conn: Connection, recorded: Mapping[str, int]) -> list[asyncpg.Record]:
    """Return the runs of accounts that began or ended since their last recorded run, given by account."""
    return await conn.fetch(SELECT_NEW_RUNS, [*recorded], [*recorded.values()])


BASELINE_COLUMNS: Final = "id, name, variant, run_id, initial_capital, started_at"
SELECT_BASELINES_OF = f"""
SELECT {BASELINE_COLUMNS} FROM baselines WHERE id = ANY($1::text[]) ORDER BY id
"""  # noqa: S608 - a constant of this module


async def select_baselines_of(conn: Connection, ids: Sequence[str]) -> list[asyncpg.Record]:
    """Return the baselines with these IDs."""
    return await conn.fetch(SELECT_BASELINES_OF, ids)


# A fill that closes a position, or a part of it, has the last planned prices of that position.
SELECT_SPAN_FILLS = """
SELECT f.account_id, f.sequence, f.run_id, f.order_id, f.request_id, f.symbol, f.side, f.quantity, f.price, f.fee,
       f.liquidation_fee, f.maker, f.cause, coalesce(q.answer @> '{"manual": true}', false) AS manual, o.stop,
       coalesce(o.target, (o.targets::json->0->>'price')::numeric) AS target, f.created_at
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s (account_id, after, until)
JOIN fills f ON f.account_id = s.account_id AND f.sequence > s.after AND f.sequence <= s.until
LEFT JOIN order_requests q ON q.id = f.request_id
LEFT JOIN orders o ON o.id = f.order_id AND o.status = 'CLOSED' AND (o.side = 'LONG') = (f.side = 'sell')
ORDER BY f.account_id, f.sequence
"""

SELECT_SPAN_FUNDING = """
SELECT f.account_id, f.sequence, f.run_id, f.order_id, f.symbol, f.boundary, f.quantity, f.mark, f.rate, f.amount,
       f.created_at
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s (account_id, after, until)
JOIN funding_payments f ON f.account_id = s.account_id AND f.sequence > s.after AND f.sequence <= s.until
ORDER BY f.account_id, f.sequence
"""

SELECT_SPAN_INSURANCE = """
SELECT i.account_id, i.sequence, i.run_id, i.order_id, i.amount, i.created_at
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s (account_id, after, until)
JOIN insurance_payments i ON i.account_id = s.account_id AND i.sequence > s.after AND i.sequence <= s.until
ORDER BY i.account_id, i.sequence
"""

SELECT_SPAN_HOURS = """
SELECT h.account_id, h.hour, h.run_id, h.total, h.count, h.last, h.last_at, h.leverage
FROM unnest($1::text[], $2::timestamptz[], $3::timestamptz[]) AS s (account_id, after, until)
JOIN portfolio_hourly h ON h.account_id = s.account_id AND h.hour > coalesce(s.after, '-infinity') AND h.hour <= s.until
ORDER BY h.account_id, h.hour
"""


async def select_span_rows(conn: Connection, spans: Sequence[Span]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of the ledger and of the hours in these spans, by table; tables without rows are left out."""
    ids = [span.account_id for span in spans]
    sequences = [span.sequence_after for span in spans], [span.sequence_until for span in spans]
    hours = [_moment(span.hour_after) for span in spans], [_moment(span.hour_until) for span in spans]
    rows = {
        "fills": await conn.fetch(SELECT_SPAN_FILLS, ids, *sequences),
        "funding_payments": await conn.fetch(SELECT_SPAN_FUNDING, ids, *sequences),
        "insurance_payments": await conn.fetch(SELECT_SPAN_INSURANCE, ids, *sequences),
        "portfolio_hourly": await conn.fetch(SELECT_SPAN_HOURS, ids, *hours),
    }
    return {table: plain_rows(found) for table, found in rows.items() if found}


# The extremes come from the minutes within a position as long as these are retained, then from its hours.
JOIN_EXTREMES = """
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
"""

SELECT_SPAN_EXTREMES = f"""
SELECT DISTINCT f.account_id, o.id AS order_id, coalesce(m.lowest, h.lowest) AS lowest,
       coalesce(m.highest, h.highest) AS highest
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s (account_id, after, until)
JOIN fills f ON f.account_id = s.account_id AND f.sequence > s.after AND f.sequence <= s.until
JOIN orders o ON o.id = f.order_id AND o.status = 'CLOSED' AND (o.side = 'LONG') = (f.side = 'sell')
{JOIN_EXTREMES}
WHERE m.lowest IS NOT NULL OR h.lowest IS NOT NULL
ORDER BY f.account_id, o.id
"""  # noqa: S608 - a constant of this module


async def select_span_extremes(conn: Connection, spans: Sequence[Span]) -> list[asyncpg.Record]:
    """Return the lowest and highest price while each position that these spans close was open, if it has candles."""
    ids = [span.account_id for span in spans]
    sequences = [span.sequence_after for span in spans], [span.sequence_until for span in spans]
    return await conn.fetch(SELECT_SPAN_EXTREMES, ids, *sequences)


CANDLE_COLUMNS: Final = "c.symbol, c.open_time, c.open, c.high, c.low, c.close"

# Minutes come in ascending order, so an hour is complete once the next one has begun.
SELECT_PENDING_CANDLES = f"""
WITH RECURSIVE symbols AS (
    (SELECT symbol FROM candles WHERE minutes = 60 ORDER BY symbol LIMIT 1)
    UNION ALL
    SELECT (SELECT symbol FROM candles WHERE minutes = 60 AND symbol > s.symbol ORDER BY symbol LIMIT 1)
    FROM symbols s WHERE s.symbol IS NOT NULL
)
SELECT {CANDLE_COLUMNS}
FROM symbols s
LEFT JOIN chain_marks m ON m.account_id = 'candles/' || s.symbol
CROSS JOIN LATERAL (
    SELECT * FROM candles
    WHERE minutes = 60 AND symbol = s.symbol AND open_time > coalesce(m.hour, '-infinity')
      AND open_time < (SELECT max(open_time) FROM candles WHERE minutes = 60 AND symbol = s.symbol)
    ORDER BY open_time
    LIMIT $1
) c
ORDER BY c.symbol, c.open_time
"""  # noqa: S608 - a constant of this module


async def select_pending_candles(conn: Connection, limit: int) -> list[asyncpg.Record]:
    """Return the next complete hours of each market that are not in the chain, at most `limit` of each."""
    return await conn.fetch(SELECT_PENDING_CANDLES, limit)


SELECT_RECORDED_CANDLES = f"""
SELECT {CANDLE_COLUMNS}
FROM unnest($1::text[], $2::timestamptz[]) AS r (symbol, open_time)
JOIN candles c ON c.minutes = 60 AND c.symbol = r.symbol AND c.open_time = r.open_time
ORDER BY c.symbol, c.open_time
"""  # noqa: S608 - a constant of this module


async def select_recorded_candles(
    conn: Connection, recorded: Sequence[Mapping[str, Any]]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return the present rows of recorded hours of markets, by table."""
    keys = [row["symbol"] for row in recorded], [_moment(row["open_time"]) for row in recorded]
    return {"candles": plain_rows(await conn.fetch(SELECT_RECORDED_CANDLES, *keys))}


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


SELECT_REMOVED = """
SELECT record::jsonb ->> 'account_id' AS account_id, max(position) AS position
FROM chain_links WHERE kind = 'removed' AND record::jsonb ? 'account_id'
GROUP BY 1 ORDER BY 1
"""


async def select_removed(conn: Connection) -> dict[str, int]:
    """Return the removed accounts, with the last position in the chain at which each was removed."""
    rows = await conn.fetch(SELECT_REMOVED, timeout=SCAN_TIMEOUT_S)
    return {row["account_id"]: row["position"] for row in rows}


STATES: Final[Mapping[str, str]] = {
    table: f"SELECT {columns} FROM {table} ORDER BY {', '.join(STATE_TABLES[table])}"  # noqa: S608 - constants of this package
    for table, columns in (
        ("models", MODEL_COLUMNS),
        ("runs", RUN_COLUMNS),
        ("baselines", BASELINE_COLUMNS),
        ("entrants", ENTRANT_COLUMNS),
        ("halts", HALT_COLUMNS),
        ("invocation_counts", MISSED_COLUMNS),
        ("season_records", SEASON_COLUMNS),
    )
}


async def select_states(conn: Connection) -> dict[str, list[Mapping[str, Any]]]:
    """Return every row of the tables whose rows may change, by table."""
    return {table: plain_rows(await conn.fetch(query, timeout=SCAN_TIMEOUT_S)) for table, query in STATES.items()}
