"""SQL of results in the chain: which rows are not in it yet, and the rows of a record as the tables have them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import asyncpg

from trader.domain.agents.results import Span
from trader.store.agents.entrants import ENTRANT_COLUMNS, MISSED_COLUMNS
from trader.store.database.chain import plain_rows
from trader.store.database.pool import Connection
from trader.store.operations.halts import HALT_COLUMNS
from trader.store.portfolio.seasons import SEASON_COLUMNS

SCAN_TIMEOUT_S: Final = 600.0
"""Time limit of statements that read a whole table."""


class ChainMark(NamedTuple):
    """How far the results of an account are in the chain."""

    account_id: str
    sequence: int
    run_number: int
    hour: datetime | None


LOCK_MARKS = "LOCK TABLE chain_marks IN SHARE ROW EXCLUSIVE MODE"
SELECT_TERM = "SELECT term FROM service_state"


async def lock_marks(conn: Connection) -> int | None:
    """Wait for whoever appends results now, and keep others waiting. Return the present term."""
    await conn.execute(LOCK_MARKS)
    term: int | None = await conn.fetchval(SELECT_TERM)
    return term


SELECT_HAS_BEGUN = "SELECT EXISTS (SELECT FROM chain_links WHERE kind = 'begin')"


async def select_has_begun(conn: Connection) -> bool:
    """Return whether the chain has results."""
    has_begun: bool = await conn.fetchval(SELECT_HAS_BEGUN)
    return has_begun


SELECT_MARKS = "SELECT account_id, sequence, hour FROM chain_marks ORDER BY account_id"


async def select_marks(conn: Connection) -> list[Mapping[str, Any]]:
    """Return how far the results of each account are in the chain, as a record has it."""
    return plain_rows(await conn.fetch(SELECT_MARKS))


class PendingSpan(NamedTuple):
    """The next results of an account that are not in the chain."""

    account_id: str
    sequence_after: int
    sequence_until: int
    hour_after: datetime | None
    hour_until: datetime | None
    run_after: int


# The hours of an account are looked for in its index from the mark on, so this reads little however long the season is.
SELECT_PENDING = """
SELECT a.id, coalesce(m.sequence, 0), least(a.sequence, coalesce(m.sequence, 0) + $3), m.hour, h.hour,
       coalesce(m.run_number, 0)
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


async def select_pending(conn: Connection, before: datetime, accounts: int, rows: int) -> list[PendingSpan]:
    """Return the next results of so many accounts, of each so many sequences and hours; hours only `before` a time."""
    return [PendingSpan(*row) for row in await conn.fetch(SELECT_PENDING, before, accounts, rows)]


SELECT_PENDING_COUNT = """
SELECT count(*) FROM accounts a LEFT JOIN chain_marks m ON m.account_id = a.id
WHERE a.sequence > coalesce(m.sequence, 0)
"""


async def select_pending_count(conn: Connection) -> int:
    """Return how many accounts have a ledger that goes on since it was recorded."""
    count: int = await conn.fetchval(SELECT_PENDING_COUNT)
    return count


UPSERT_MARKS = """
INSERT INTO chain_marks (account_id, sequence, run_number, hour)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::integer[], $4::timestamptz[])
ON CONFLICT (account_id) DO UPDATE
SET sequence = excluded.sequence, run_number = excluded.run_number, hour = excluded.hour
"""


async def upsert_marks(conn: Connection, marks: Sequence[ChainMark]) -> None:
    """Record how far the results of accounts are in the chain."""
    await conn.execute(UPSERT_MARKS, *(list(column) for column in zip(*marks, strict=True)))


# The runs that an account has begun since, and the one before, which has ended then.
SELECT_NEW_RUNS = """
SELECT r.account_id, r.number, r.id, r.initial_capital, r.quote_currency, r.started_at, r.ended_at
FROM unnest($1::text[], $2::integer[]) AS s (account_id, run_after)
JOIN runs r ON r.account_id = s.account_id
    AND (r.number > s.run_after OR (r.number = s.run_after AND r.ended_at IS NOT NULL))
ORDER BY r.account_id, r.number
"""


async def select_new_runs(conn: Connection, spans: Sequence[PendingSpan]) -> list[asyncpg.Record]:
    """Return the runs of accounts that began or ended since they were recorded."""
    return await conn.fetch(SELECT_NEW_RUNS, [span.account_id for span in spans], [span.run_after for span in spans])


SELECT_BASELINES_OF = """
SELECT id, name, variant::text, run_id, initial_capital, started_at FROM baselines
WHERE id = ANY($1::text[])
ORDER BY id
"""


async def select_baselines_of(conn: Connection, ids: Sequence[str]) -> list[asyncpg.Record]:
    """Return the baselines with these ids."""
    return await conn.fetch(SELECT_BASELINES_OF, ids)


SELECT_SPAN_FILLS = """
SELECT f.account_id, f.sequence, f.run_id, f.order_id, f.request_id, f.symbol, f.side, f.quantity, f.price, f.fee,
       f.liquidation_fee, f.maker, f.cause, f.created_at
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s (account_id, after, until)
JOIN fills f ON f.account_id = s.account_id AND f.sequence > s.after AND f.sequence <= s.until
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
    """Return the rows of the ledger and of the hours in these spans, by table; tables without any are left out."""
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


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


SELECT_REMOVED = """
SELECT record::jsonb ->> 'account_id', max(position) FROM chain_links WHERE kind = 'removed' GROUP BY 1 ORDER BY 1
"""


async def select_removed(conn: Connection) -> dict[str, int]:
    """Return the accounts that were removed, with the last position in the chain at which they were."""
    rows = await conn.fetch(SELECT_REMOVED, timeout=SCAN_TIMEOUT_S)
    return dict(map(tuple, rows))


SELECT_RUN_STATES = """
SELECT account_id, number, id, initial_capital, quote_currency, started_at, ended_at FROM runs
ORDER BY account_id, number
"""

SELECT_BASELINE_STATES = """
SELECT id, name, variant::text, run_id, initial_capital, started_at FROM baselines ORDER BY id
"""

SELECT_ENTRANT_STATES = f"""
SELECT {ENTRANT_COLUMNS} FROM entrants ORDER BY model_id, number
"""  # noqa: S608 - a constant of this package

SELECT_HALT_STATES = f"""
SELECT {HALT_COLUMNS} FROM halts ORDER BY id
"""  # noqa: S608 - a constant of this package

SELECT_COUNT_STATES = f"""
SELECT {MISSED_COLUMNS} FROM invocation_counts ORDER BY model_id, run_number, entrant
"""  # noqa: S608 - a constant of this package

SELECT_SEASON_STATES = f"""
SELECT {SEASON_COLUMNS} FROM season_records ORDER BY season, number
"""  # noqa: S608 - a constant of this package

STATES: Final[Mapping[str, str]] = {
    "runs": SELECT_RUN_STATES,
    "baselines": SELECT_BASELINE_STATES,
    "entrants": SELECT_ENTRANT_STATES,
    "halts": SELECT_HALT_STATES,
    "invocation_counts": SELECT_COUNT_STATES,
    "season_records": SELECT_SEASON_STATES,
}


async def select_states(conn: Connection) -> dict[str, list[Mapping[str, Any]]]:
    """Return every row of the tables whose rows may go on, by table."""
    return {table: plain_rows(await conn.fetch(query, timeout=SCAN_TIMEOUT_S)) for table, query in STATES.items()}
