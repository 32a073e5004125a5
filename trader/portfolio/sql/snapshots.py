"""SQL of portfolio snapshots: writing them with their hourly rollups, reading histories from both, and baselines."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec
from msgspec.structs import astuple

from trader.core.clock import EPOCH, ceil_time
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, columns_of
from trader.exchange.sql.audit import AuditedRun
from trader.market.sql.candles import select_last_minutes
from trader.portfolio.domain.baselines import Baseline, BaselineState
from trader.portfolio.domain.equity_audit import HourlyCandles
from trader.portfolio.domain.histories import HourlyValue, Snapshot
from trader.portfolio.sql.analytics import CurrentRun

# The rollups grow by the inserted rows, not by the given ones: an existing snapshot counts once.
# The current hours are found by one lookup in the index of hours, and updated; a lookup per account through the index
# of a whole season, as ON CONFLICT does, is only for new rows. IS NOT DISTINCT FROM keeps the planner from joining by
# the hour, which is the same for all accounts. Two writers lock the rows in the same order, the index's, so they wait
# for each other, but never in a cycle.
# The hours are not a parameter: in a season, a specific value would look so much cheaper than a generic one that the
# statement would be planned at every call, which takes half as long as its execution.
INSERT_SNAPSHOTS = """
WITH added AS (
    INSERT INTO portfolio_snapshots (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at, leverage,
                                     sequence)
    SELECT g.account_id, g.run_id, g.net_portfolio, g.cash, g.unrealized_pnl,
           CASE WHEN g.created_at < m.hour + interval '1 hour'
                THEN m.hour + interval '1 hour' + (g.created_at - date_trunc('hour', g.created_at, 'UTC'))
                ELSE g.created_at END,
           g.leverage, g.sequence
    FROM unnest($1::text[], $2::uuid[], $3::numeric[], $4::numeric[], $5::numeric[], $6::timestamptz[], $7::float8[],
                $8::bigint[])
        AS g (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at, leverage, sequence)
    LEFT JOIN chain_marks m ON m.account_id = g.account_id
    WHERE $9::bigint IS NULL OR coalesce((SELECT term FROM service_state), 0) = $9
    ON CONFLICT DO NOTHING
    RETURNING account_id, date_trunc('hour', created_at, 'UTC') AS hour, run_id, net_portfolio, created_at, leverage,
              sequence
), sums AS MATERIALIZED (
    SELECT account_id, hour, (array_agg(run_id ORDER BY created_at DESC))[1] AS run_id, sum(net_portfolio) AS total,
           count(*) AS count, (array_agg(net_portfolio ORDER BY created_at DESC))[1] AS last,
           max(created_at) AS last_at, max(leverage) AS leverage,
           (array_agg(sequence ORDER BY created_at DESC))[1] AS sequence
    FROM added
    GROUP BY account_id, hour
), running AS (
    UPDATE portfolio_hourly h
    SET run_id = CASE WHEN s.last_at > h.last_at THEN s.run_id ELSE h.run_id END,
        total = h.total + s.total,
        count = h.count + s.count,
        last = CASE WHEN s.last_at > h.last_at THEN s.last ELSE h.last END,
        sequence = CASE WHEN s.last_at > h.last_at THEN s.sequence ELSE h.sequence END,
        last_at = greatest(h.last_at, s.last_at),
        leverage = greatest(h.leverage, s.leverage)
    FROM sums s
    WHERE h.hour = ANY(ARRAY(SELECT DISTINCT hour FROM sums))
      AND h.account_id = s.account_id AND h.hour IS NOT DISTINCT FROM s.hour
    RETURNING h.account_id, h.hour
), begun AS (
    INSERT INTO portfolio_hourly AS h (account_id, hour, run_id, total, count, last, last_at, leverage, sequence)
    SELECT account_id, hour, run_id, total, count, last, last_at, leverage, sequence
    FROM sums s
    WHERE NOT EXISTS (SELECT FROM running r WHERE r.account_id = s.account_id AND r.hour = s.hour)
    ORDER BY account_id, hour
    ON CONFLICT (account_id, hour) DO UPDATE
    SET run_id = CASE WHEN excluded.last_at > h.last_at THEN excluded.run_id ELSE h.run_id END,
        total = h.total + excluded.total,
        count = h.count + excluded.count,
        last = CASE WHEN excluded.last_at > h.last_at THEN excluded.last ELSE h.last END,
        sequence = CASE WHEN excluded.last_at > h.last_at THEN excluded.sequence ELSE h.sequence END,
        last_at = greatest(h.last_at, excluded.last_at),
        leverage = greatest(h.leverage, excluded.leverage)
), variants AS (
    INSERT INTO variant_hourly AS v (hour, variant, total, count)
    SELECT s.hour, m.variant, sum(s.total), sum(s.count)
    FROM sums s JOIN models m ON m.id = s.account_id
    GROUP BY s.hour, m.variant
    ORDER BY s.hour, m.variant
    ON CONFLICT (hour, variant) DO UPDATE SET total = v.total + excluded.total, count = v.count + excluded.count
)
SELECT count(*) FROM added
"""


async def insert_snapshots(conn: Connection, snapshots: Sequence[Snapshot], term: int | None = None) -> int:
    """Add snapshots to the raw rows and to both rollups in one statement. Return how many were new.

    A snapshot of an hour that is in the chain already, since the clock was set back, goes to the next hour that is not.
    The partitions of their times must exist. With a `term` nothing is added once that is over.
    """
    return int(await conn.fetchval(INSERT_SNAPSHOTS, *columns_of(map(astuple, snapshots), 8), term))


class LastSnapshot(NamedTuple):
    """The run and the time of an account's last snapshot."""

    run_id: UUID
    created_at: datetime


SELECT_NEWEST = "SELECT max(last_at) FROM portfolio_hourly WHERE hour = (SELECT max(hour) FROM portfolio_hourly)"


async def select_newest(conn: Connection) -> datetime | None:
    """Return the time of the newest snapshot; None if there is none."""
    newest: datetime | None = await conn.fetchval(SELECT_NEWEST)
    return newest


SELECT_LAST_SNAPSHOTS = """
SELECT a.id, h.run_id, h.last_at
FROM accounts a
CROSS JOIN LATERAL (
    SELECT run_id, last_at FROM portfolio_hourly WHERE account_id = a.id ORDER BY hour DESC LIMIT 1
) h
ORDER BY a.id
"""


async def select_last_snapshots(conn: Connection) -> dict[str, LastSnapshot]:
    """Return the last snapshot of every account that has one."""
    return {row["id"]: LastSnapshot(row["run_id"], row["last_at"]) for row in await conn.fetch(SELECT_LAST_SNAPSHOTS)}


# The hour that the window cuts comes from the raw rows, account by account (OFFSET 0): the index of times knows its
# ranges of pages only after a vacuum.
SELECT_VARIANT_HOURS = """
SELECT variant, hour, trim_scale(round(total / count, 8)) AS value
FROM (
    SELECT variant, hour, total, count FROM variant_hourly WHERE hour >= $1 AND count > 0
    UNION ALL
    SELECT m.variant, date_trunc('hour', $1::timestamptz, 'UTC'), sum(s.net_portfolio), count(*)
    FROM models m
    CROSS JOIN LATERAL (
        SELECT net_portfolio FROM portfolio_snapshots
        WHERE account_id = m.id AND created_at >= $1 AND created_at < $2
        OFFSET 0
    ) s
    GROUP BY m.variant
) h
ORDER BY h.hour, h.variant
"""


async def select_variant_hours(conn: Connection, since: datetime) -> list[tuple[VariantId, datetime, Decimal]]:
    """Return each variant's hours and their average of the snapshots since then, to 8 decimals, the oldest first."""
    rows = await conn.fetch(SELECT_VARIANT_HOURS, since, ceil_time(since, timedelta(hours=1)))
    return [(VariantId(row["variant"]), row["hour"], row["value"]) for row in rows]


# The text is built here so that the service handles a few long texts instead of a hundred thousand records. Its format
# is `HistoryEntry` in api/schemas/portfolio.py, against which it is validated before it is sent; ids need no escapes.
# Buckets below an hour take one index lookup each, since only their last row is needed. Longer ones come from the
# rollup, except for the hour cut by the end of the range; OFFSET 0 keeps the planner to one index lookup per account,
# since by the hours alone it would read the rows of all accounts.
SELECT_HISTORY = """
WITH chosen AS MATERIALIZED (
    SELECT id, row_number() OVER (ORDER BY variant COLLATE "C", id COLLATE "C") AS place,
           '{"name":' || to_json(name) || ',"variant":"' || variant
               || '","openRouterModelName":' || to_json(router_model_name) || '}' AS model
    FROM models
    WHERE ($1::text IS NULL OR id = $1) AND ($2::text IS NULL OR variant = $2)
), shown AS (
    SELECT c.id, c.place, c.model, s.net_portfolio AS value, s.created_at AS at
    FROM chosen c
    CROSS JOIN generate_series(date_bin($5::interval, $3::timestamptz, '2000-01-01T00:00:00Z'), $4, $5) AS b (start)
    CROSS JOIN LATERAL (
        SELECT net_portfolio, created_at FROM portfolio_snapshots
        WHERE account_id = c.id AND created_at >= greatest(b.start, $3) AND created_at < b.start + $5
          AND created_at <= $4
        ORDER BY created_at DESC
        LIMIT 1
    ) s
    WHERE $5 < '1 hour'
    UNION ALL
    (
        SELECT DISTINCT ON (c.place, date_bin($5, v.at, '2000-01-01T00:00:00Z')) c.id, c.place, c.model, v.value, v.at
        FROM chosen c
        CROSS JOIN LATERAL (
            SELECT last AS value, last_at AS at FROM (
                SELECT * FROM portfolio_hourly
                WHERE account_id = c.id AND hour >= date_trunc('hour', $3, 'UTC') AND last_at >= $3
                  AND hour < date_trunc('hour', $4::timestamptz, 'UTC')
                OFFSET 0
            ) h
            UNION ALL
            SELECT net_portfolio, created_at FROM portfolio_snapshots
            WHERE account_id = c.id AND created_at >= greatest($3, date_trunc('hour', $4, 'UTC')) AND created_at <= $4
        ) v
        WHERE $5 >= '1 hour'
        ORDER BY c.place, date_bin($5, v.at, '2000-01-01T00:00:00Z'), v.at DESC
    )
), written AS (
    SELECT *, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS time FROM shown
)
SELECT convert_to(string_agg(
    '{"id":"' || id || '@' || time || '","modelId":"' || id || '","netPortfolio":' || trim_scale(value)
        || ',"createdAt":"' || time || '","updatedAt":"' || time || '","model":' || model || '}',
    ',' ORDER BY at, place
), 'UTF8') AS records
FROM written
GROUP BY date_bin($6::interval, at, '2000-01-01T00:00:00Z')
ORDER BY date_bin($6, at, '2000-01-01T00:00:00Z')
"""


async def select_history(
    conn: Connection,
    model_id: str | None,
    variant: VariantId | None,
    start: datetime,
    end: datetime,
    bucket: timedelta,
    slice_width: timedelta,
) -> list[bytes]:
    """Return the last snapshot of each bucket as JSON records, joined by commas, in one text per slice of time.

    They are those of one model or variant (None: all) within [start, end].

    They are ordered by time and, within a moment, by model. Buckets of whole hours come from the
    rollup, which goes further back than the raw rows.
    """
    rows = await conn.fetch(SELECT_HISTORY, model_id, variant, start, end, bucket, slice_width)
    return [row["records"] for row in rows]


# The format is `EquityCurve` in api/schemas/portfolio.py. As in a history, buckets below an hour take one lookup each
# in the raw rows, longer ones one in the rollup, and the hour cut by the end of the range one in both.
SELECT_EQUITY_CURVES = """
SELECT convert_to('{"id":"' || m.id || '","name":' || to_json(m.name) || ',"variant":'
    || coalesce('"' || m.variant || '"', 'null') || m.mark || ',"values":[' || c.values || ']}', 'UTF8') AS curve
FROM (
    SELECT id, name, variant, '' AS mark FROM models
    WHERE ($1::text IS NULL OR id = $1) AND ($2::text IS NULL OR variant = $2)
    UNION ALL
    SELECT id, name, variant, ',"baseline":true' FROM baselines
    WHERE $8::boolean AND ($2 IS NULL OR variant IS NULL OR variant = $2)
) m
CROSS JOIN LATERAL (
    SELECT string_agg(coalesce(trim_scale(round(v.value, 2))::text, 'null'), ',' ORDER BY b.start) AS values
    FROM generate_series($3::timestamptz, $4::timestamptz, $5::interval) AS b (start)
    LEFT JOIN LATERAL (
        SELECT value FROM (
            (
                SELECT net_portfolio AS value, created_at AS at FROM portfolio_snapshots
                WHERE ($5 < '1 hour' OR b.start + $5 > date_trunc('hour', $6::timestamptz, 'UTC'))
                  AND account_id = m.id AND created_at >= b.start - $7::interval AND created_at < b.start + $5
                  AND created_at <= $6
                ORDER BY created_at DESC
                LIMIT 1
            )
            UNION ALL
            (
                SELECT last, last_at FROM portfolio_hourly
                WHERE $5 >= '1 hour' AND account_id = m.id AND hour >= date_trunc('hour', b.start - $7, 'UTC')
                  AND hour < b.start + $5 AND last_at >= b.start - $7 AND last_at <= $6
                ORDER BY hour DESC
                LIMIT 1
            )
        ) found
        ORDER BY at DESC
        LIMIT 1
    ) v ON true
) c
ORDER BY m.mark COLLATE "C", m.variant COLLATE "C", m.id COLLATE "C"
"""


async def select_equity_curves(
    conn: Connection,
    model_id: str | None,
    variant: VariantId | None,
    first: datetime,
    last: datetime,
    bucket: timedelta,
    end: datetime,
    held: timedelta,
    *,
    baselines: bool = False,
) -> list[bytes]:
    """Return a JSON record per model with its last known value at the end of each bucket, in cents, or null.

    The buckets are those from `first` to `last`, up to `end`. A value holds for `held`, since an idle account has a
    snapshot an hour. The variant's `baselines`, or all, follow the models.
    """
    asked = model_id, variant, first, last, bucket, end, held, baselines
    return [row["curve"] for row in await conn.fetch(SELECT_EQUITY_CURVES, *asked)]


SELECT_HOUR_VALUES = "SELECT account_id, run_id, last FROM portfolio_hourly WHERE hour = $1 ORDER BY account_id"


async def select_hour_values(conn: Connection, hour: datetime) -> list[tuple[str, UUID, Decimal]]:
    """Return the last equity of each account in an hour, with its run."""
    return [(row["account_id"], row["run_id"], row["last"]) for row in await conn.fetch(SELECT_HOUR_VALUES, hour)]


# OFFSET 0 keeps the planner to one look into the index per run; joined as a whole it would read every hour there is.
SELECT_RUN_HOURS = """
SELECT h.account_id, h.hour, h.last, h.last_at, h.leverage, h.sequence
FROM (
    SELECT * FROM unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS w (account_id, run_id, since) ORDER BY account_id
) w
CROSS JOIN LATERAL (
    SELECT * FROM portfolio_hourly
    WHERE account_id = w.account_id AND hour >= w.since AND run_id = w.run_id
    OFFSET 0
) h
ORDER BY w.account_id, h.hour
"""


async def select_run_hours(conn: Connection, since: Sequence[tuple[str, UUID, datetime]]) -> list[HourlyValue]:
    """Return the hourly values of (account, run, first hour) triples, each account's ascending."""
    return [HourlyValue(**row) for row in await conn.fetch(SELECT_RUN_HOURS, *columns_of(since, 3))]


# --- baselines, whose values are in the snapshots under their ids ----------------------------------------------------

SELECT_BASELINES = "SELECT id AS model_id, run_id, initial_capital, started_at FROM baselines ORDER BY id"


async def select_baselines(conn: Connection) -> list[CurrentRun]:
    """Return the current run of every baseline."""
    return [CurrentRun(**row) for row in await conn.fetch(SELECT_BASELINES)]


class SavedBaseline(NamedTuple):
    """A saved baseline that includes every tick until `seen_until`."""

    baseline: Baseline
    state: BaselineState
    seen_until: datetime


SELECT_BASELINE_STATES = "SELECT id, name, variant, state, seen_until FROM baselines ORDER BY id"


async def select_baseline_states(conn: Connection) -> list[SavedBaseline]:
    """Return every baseline as it was saved."""
    rows = await conn.fetch(SELECT_BASELINE_STATES)
    saved = [((row["id"], row["name"], row["variant"]), row["state"], row["seen_until"]) for row in rows]
    return msgspec.convert(saved, list[SavedBaseline])


UPSERT_BASELINES = """
INSERT INTO baselines AS b (id, name, variant, run_id, initial_capital, started_at, state, seen_until)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::numeric[], $6::timestamptz[],
                     $7::jsonb[], $8::timestamptz[])
ON CONFLICT (id) DO UPDATE
SET name = excluded.name, run_id = excluded.run_id, initial_capital = excluded.initial_capital,
    started_at = excluded.started_at, state = excluded.state, seen_until = excluded.seen_until
"""


async def upsert_baselines(conn: Connection, baselines: Sequence[SavedBaseline]) -> None:
    """Save the states of baselines."""
    rows = []
    for baseline, state, seen_until in baselines:
        run = state.account.run
        began = run.id, run.initial_capital, run.started_at
        rows.append((*baseline[:3], *began, msgspec.to_builtins(state), seen_until))
    await conn.execute(UPSERT_BASELINES, *columns_of(rows, 8))


UPDATE_BASELINES_SEEN = "UPDATE baselines SET seen_until = $1 WHERE seen_until <> $1"


async def update_baselines_seen(conn: Connection, until: datetime) -> None:
    """Record that every baseline includes every tick until a time."""
    await conn.execute(UPDATE_BASELINES_SEEN, until)


# --- for the audit of equity ------------------------------------------------------------------------------------------

SELECT_BASELINE_RUNS = """
SELECT run_id AS id, id AS account_id, 0 AS number, initial_capital FROM baselines ORDER BY account_id
"""


async def select_baseline_runs(conn: Connection) -> list[AuditedRun]:
    """Return the current run of every baseline."""
    return [AuditedRun(**row) for row in await conn.fetch(SELECT_BASELINE_RUNS)]


SELECT_HOURS = "SELECT symbol, open_time, low, high FROM candles WHERE minutes = 60 ORDER BY symbol, open_time"


async def select_hours(conn: Connection) -> HourlyCandles:
    """Return the prices of every hour, known until the end of the last recorded minute, or else the last hour."""
    rows = await conn.fetch(SELECT_HOURS)
    minutes = await select_last_minutes(conn, list({row["symbol"] for row in rows}))
    ends = [minute + timedelta(minutes=1) for minute in minutes.values()]
    known_until = max([*ends, *(row["open_time"] for row in rows)], default=EPOCH)
    return HourlyCandles(((row["symbol"], row["open_time"], row["low"], row["high"]) for row in rows), known_until)
