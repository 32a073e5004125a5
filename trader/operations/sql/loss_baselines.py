"""SQL for the baselines against which losses are measured."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from trader.database.pool import Connection, columns_of
from trader.operations.domain.loss_limits import LossBaseline, RecordedEquity

# Only the last day of raw snapshots is read; the hourly rollup has the rest.
SELECT_RECORDED_EQUITY = """
SELECT r.account_id, r.id AS run_id, r.initial_capital, m.run_id AS baseline_run_id, m.day, m.day_start, m.peak, m.last,
       greatest(
           (SELECT max(h.last) FROM portfolio_hourly h
            WHERE h.account_id = r.account_id AND h.run_id = r.id
                AND (m.run_id IS DISTINCT FROM r.id OR h.last_at > m.updated_at)),
           (SELECT max(s.net_portfolio) FROM portfolio_snapshots s
            WHERE s.account_id = r.account_id AND s.run_id = r.id AND s.created_at >= $1
                AND (m.run_id IS DISTINCT FROM r.id OR s.created_at > m.updated_at))
       ) AS peak_since,
       (SELECT s.net_portfolio FROM portfolio_snapshots s
        WHERE s.account_id = r.account_id AND s.run_id = r.id AND s.created_at >= $1
        ORDER BY s.created_at LIMIT 1) AS first_today
FROM runs r
LEFT JOIN equity_marks m ON m.account_id = r.account_id
WHERE r.ended_at IS NULL
ORDER BY r.account_id
"""


async def select_recorded_equity(conn: Connection, midnight: datetime) -> dict[str, RecordedEquity]:
    """Return the recorded equity of every account in its current run."""
    recorded = {}
    for row in await conn.fetch(SELECT_RECORDED_EQUITY, midnight):
        known = {**row, "run_id": row["baseline_run_id"]}
        baseline = None if known["run_id"] is None else msgspec.convert(known, LossBaseline)
        since = {name: row[name] for name in ("run_id", "initial_capital", "peak_since", "first_today")}
        recorded[row["account_id"]] = RecordedEquity(**since, baseline=baseline)
    return recorded


SELECT_TOTAL_BASELINE = "SELECT day, day_start, peak, last FROM equity_marks WHERE account_id IS NULL"


async def select_total_baseline(conn: Connection) -> LossBaseline | None:
    """Return the baseline of all accounts together."""
    row = await conn.fetchrow(SELECT_TOTAL_BASELINE)
    return None if row is None else LossBaseline(run_id=None, **row)


UPSERT_BASELINES = """
INSERT INTO equity_marks (account_id, run_id, day, day_start, peak, last, updated_at)
SELECT b.account_id, b.run_id, b.day, b.day_start, b.peak, b.last, $7
FROM unnest($1::text[], $2::uuid[], $3::date[], $4::numeric[], $5::numeric[], $6::numeric[])
    AS b (account_id, run_id, day, day_start, peak, last)
WHERE (SELECT term FROM service_state) = $8 AND (b.account_id IS NULL OR b.account_id IN (SELECT id FROM accounts))
ON CONFLICT (account_id) DO UPDATE
SET run_id = excluded.run_id, day = excluded.day, day_start = excluded.day_start, peak = excluded.peak,
    last = excluded.last, updated_at = excluded.updated_at
"""


async def upsert_baselines(
    conn: Connection, baselines: Sequence[tuple[str | None, LossBaseline]], at: datetime, term: int
) -> None:
    """Record baselines, by account or (None) of all together, as of a moment of service time; only in this term."""
    await conn.execute(
        UPSERT_BASELINES, *columns_of([(key, *msgspec.structs.astuple(each)) for key, each in baselines], 6), at, term
    )


UPDATE_BASELINES_RESET = """
UPDATE equity_marks SET day_start = NULL, peak = NULL WHERE account_id IS NOT DISTINCT FROM $1
"""


async def update_baselines_reset(conn: Connection, account_id: str | None) -> None:
    """Reset the baseline of an account, or of all together (None): losses count from the next recorded equity."""
    await conn.execute(UPDATE_BASELINES_RESET, account_id)
