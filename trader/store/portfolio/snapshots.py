"""Portfolio snapshots, their hourly rollups, and the histories read from them."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.domain.models import VariantId
from trader.domain.portfolio.snapshots import Snapshot
from trader.store.database.pool import Connection

# The rollups grow by what was inserted, not by what was given: a snapshot that is there already counts once.
# The hours that are running are found by one look into the index of hours, and updated; a look per account through the
# index of a whole season, as ON CONFLICT does, is for the rows that are new. IS NOT DISTINCT FROM keeps the planner
# from joining by the hour, in which all accounts are alike. Two writers meet the rows in the same order, that of the
# index, so they wait for each other, but not in a circle.
# The hours are no parameter: with the rows of a season to be found by it, its value would promise so much less work
# than any value that the statement would be planned at every call, which takes as long as half of what it does.
INSERT_SNAPSHOTS = """
WITH added AS (
    INSERT INTO portfolio_snapshots (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at)
    SELECT * FROM unnest($1::text[], $2::uuid[], $3::numeric[], $4::numeric[], $5::numeric[], $6::timestamptz[])
    ON CONFLICT DO NOTHING
    RETURNING account_id, date_trunc('hour', created_at, 'UTC') AS hour, run_id, net_portfolio, created_at
), sums AS MATERIALIZED (
    SELECT account_id, hour, (array_agg(run_id ORDER BY created_at DESC))[1] AS run_id, sum(net_portfolio) AS total,
           count(*) AS count, (array_agg(net_portfolio ORDER BY created_at DESC))[1] AS last, max(created_at) AS last_at
    FROM added
    GROUP BY account_id, hour
), running AS (
    UPDATE portfolio_hourly h
    SET run_id = CASE WHEN s.last_at > h.last_at THEN s.run_id ELSE h.run_id END,
        total = h.total + s.total,
        count = h.count + s.count,
        last = CASE WHEN s.last_at > h.last_at THEN s.last ELSE h.last END,
        last_at = greatest(h.last_at, s.last_at)
    FROM sums s
    WHERE h.hour = ANY(ARRAY(SELECT DISTINCT hour FROM sums))
      AND h.account_id = s.account_id AND h.hour IS NOT DISTINCT FROM s.hour
    RETURNING h.account_id, h.hour
), begun AS (
    INSERT INTO portfolio_hourly AS h (account_id, hour, run_id, total, count, last, last_at)
    SELECT account_id, hour, run_id, total, count, last, last_at
    FROM sums s
    WHERE NOT EXISTS (SELECT FROM running r WHERE r.account_id = s.account_id AND r.hour = s.hour)
    ORDER BY account_id, hour
    ON CONFLICT (account_id, hour) DO UPDATE
    SET run_id = CASE WHEN excluded.last_at > h.last_at THEN excluded.run_id ELSE h.run_id END,
        total = h.total + excluded.total,
        count = h.count + excluded.count,
        last = CASE WHEN excluded.last_at > h.last_at THEN excluded.last ELSE h.last END,
        last_at = greatest(h.last_at, excluded.last_at)
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


async def insert_snapshots(conn: Connection, snapshots: Sequence[Snapshot]) -> int:
    """Add snapshots to the raw rows and to both rollups, in one statement; how many were new.

    The partitions of their times must exist.
    """
    added: int = await conn.fetchval(
        INSERT_SNAPSHOTS,
        [snapshot.account_id for snapshot in snapshots],
        [snapshot.run_id for snapshot in snapshots],
        [snapshot.net_portfolio for snapshot in snapshots],
        [snapshot.cash for snapshot in snapshots],
        [snapshot.unrealized_pnl for snapshot in snapshots],
        [snapshot.created_at for snapshot in snapshots],
    )
    return added


class LastSnapshot(NamedTuple):
    """The run and the time of an account's last snapshot."""

    run_id: UUID
    created_at: datetime


SELECT_LAST_SNAPSHOTS = """
SELECT a.id, h.run_id, h.last_at
FROM accounts a
CROSS JOIN LATERAL (
    SELECT run_id, last_at FROM portfolio_hourly WHERE account_id = a.id ORDER BY hour DESC LIMIT 1
) h
"""


async def select_last_snapshots(conn: Connection) -> dict[str, LastSnapshot]:
    """The last snapshot of every account that has one."""
    rows = await conn.fetch(SELECT_LAST_SNAPSHOTS)
    return {account_id: LastSnapshot(run_id, last_at) for account_id, run_id, last_at in rows}


class VariantHour(NamedTuple):
    """The average netPortfolio of a variant's models in one hour, rounded to 8 decimals."""

    variant: VariantId
    hour: datetime
    value: Decimal


SELECT_VARIANT_HOURS = """
SELECT variant::text, hour, trim_scale(round(total / count, 8))
FROM variant_hourly
WHERE hour >= $1 AND count > 0
ORDER BY variant_hourly.hour, variant_hourly.variant
"""


async def select_variant_hours(conn: Connection, since: datetime) -> list[VariantHour]:
    """Σ netPortfolio / count of the snapshots of each whole hour from `since` on, per variant, the oldest first."""
    rows = await conn.fetch(SELECT_VARIANT_HOURS, since)
    return [VariantHour(VariantId(variant), hour, value) for variant, hour, value in rows]


class HourTail(NamedTuple):
    """The average netPortfolio of a variant's models from a snapshot of an hour on, to the end of that hour."""

    variant: VariantId
    since: datetime
    value: Decimal


# All averages that a window can ask of an hour, which it may cut at any moment: they change from snapshot to snapshot.
# Account by account (OFFSET 0), since the index of times knows its ranges of pages only after a vacuum.
SELECT_HOUR_TAILS = """
SELECT variant::text, created_at, trim_scale(round(sum(total) OVER tail / sum(count) OVER tail, 8))
FROM (
    SELECT m.variant, s.created_at, sum(s.net_portfolio) AS total, count(*) AS count
    FROM models m
    CROSS JOIN LATERAL (
        SELECT * FROM portfolio_snapshots
        WHERE account_id = m.id AND created_at >= $1 AND created_at < $2
        OFFSET 0
    ) s
    GROUP BY m.variant, s.created_at
) s
WINDOW tail AS (PARTITION BY variant ORDER BY created_at DESC)
ORDER BY s.variant, s.created_at
"""


async def select_hour_tails(conn: Connection, hour: datetime) -> list[HourTail]:
    """The averages over the tails of an hour, from the raw rows, per variant ascending by where they begin."""
    rows = await conn.fetch(SELECT_HOUR_TAILS, hour, hour + timedelta(hours=1))
    return [HourTail(VariantId(variant), since, value) for variant, since, value in rows]


class EquityValue(NamedTuple):
    """The netPortfolio of an account as its snapshot of this moment has it."""

    account_id: str
    net_portfolio: Decimal
    created_at: datetime


# A row is the last of its bucket when the row after it is in another one; reading in the order of the primary key
# needs no sort.
SELECT_RAW_HISTORY = """
SELECT account_id, trim_scale(net_portfolio), created_at
FROM (
    SELECT account_id, net_portfolio, created_at,
           lead(created_at) OVER (PARTITION BY account_id ORDER BY created_at) AS next_at
    FROM portfolio_snapshots
    WHERE account_id = ANY($1::text[]) AND created_at >= $2 AND created_at <= $3
) s
WHERE next_at IS NULL
   OR date_bin($4::interval, next_at, '2000-01-01T00:00:00Z') > date_bin($4, created_at, '2000-01-01T00:00:00Z')
ORDER BY created_at, array_position($1, account_id)
"""


async def select_raw_history(
    conn: Connection, account_ids: Sequence[str], start: datetime, end: datetime, bucket: timedelta
) -> list[EquityValue]:
    """The last snapshot of each bucket within [start, end], from the raw rows, the oldest first.

    Those of one moment have the order of the ids.
    """
    return [EquityValue(*row) for row in await conn.fetch(SELECT_RAW_HISTORY, account_ids, start, end, bucket)]


# The hour in which the range ends is usually cut by it, and comes from the raw rows. OFFSET 0 keeps the planner to one
# look into the index per account: by the hours alone it would read those of all accounts.
SELECT_HOURLY_HISTORY = """
SELECT account_id, trim_scale(value), at
FROM (
    SELECT DISTINCT ON (account_id, date_bin($4::interval, at, '2000-01-01T00:00:00Z')) account_id, value, at
    FROM (
        SELECT w.account_id, h.last AS value, h.last_at AS at
        FROM unnest($1::text[]) AS w (account_id)
        CROSS JOIN LATERAL (
            SELECT * FROM portfolio_hourly
            WHERE account_id = w.account_id AND hour >= date_trunc('hour', $2::timestamptz, 'UTC') AND last_at >= $2
              AND hour < date_trunc('hour', $3::timestamptz, 'UTC')
            OFFSET 0
        ) h
        UNION ALL
        SELECT account_id, net_portfolio, created_at
        FROM portfolio_snapshots
        WHERE account_id = ANY($1) AND created_at >= $2 AND created_at <= $3
          AND created_at >= date_trunc('hour', $3, 'UTC')
    ) s
    ORDER BY account_id, date_bin($4, at, '2000-01-01T00:00:00Z'), at DESC
) b
ORDER BY at, array_position($1, account_id)
"""


async def select_hourly_history(
    conn: Connection, account_ids: Sequence[str], start: datetime, end: datetime, bucket: timedelta
) -> list[EquityValue]:
    """The last snapshot of each bucket of whole hours within [start, end], from the rollup, the oldest first.

    Those of one moment have the order of the ids.
    """
    return [EquityValue(*row) for row in await conn.fetch(SELECT_HOURLY_HISTORY, account_ids, start, end, bucket)]


class HourlyValue(msgspec.Struct, frozen=True, gc=False):
    """The last netPortfolio of an account in one hour, and when it was taken."""

    account_id: str
    hour: datetime
    last: Decimal
    last_at: datetime


# OFFSET 0 keeps the planner to one look into the index per run; joined as a whole it would read every hour there is.
SELECT_RUN_HOURS = """
SELECT h.account_id, h.hour, h.last, h.last_at
FROM unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS w (account_id, run_id, since)
CROSS JOIN LATERAL (
    SELECT * FROM portfolio_hourly
    WHERE account_id = w.account_id AND hour >= w.since AND run_id = w.run_id
    ORDER BY hour
    OFFSET 0
) h
"""


async def select_run_hours(conn: Connection, since: Sequence[tuple[str, UUID, datetime]]) -> list[HourlyValue]:
    """The hourly values of (account, run, first hour) triples, each account's ascending."""
    columns = [list(column) for column in zip(*since, strict=True)] or [[], [], []]
    return [HourlyValue(*row) for row in await conn.fetch(SELECT_RUN_HOURS, *columns)]


def ceil_to_hour(moment: datetime) -> datetime:
    """The first full hour at or after `moment`."""
    hour = moment.replace(minute=0, second=0, microsecond=0)
    return hour if hour == moment else hour + timedelta(hours=1)
