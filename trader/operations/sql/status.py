"""SQL of what operators look at: the service and its database now, past alarms, halts and maintenance, and models."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Final, Literal, NamedTuple

from trader.database.pool import Connection, shown_rows
from trader.database.schema import used_tables
from trader.operations.domain.alarms import Notice


class ServiceFacts(NamedTuple):
    """Facts about a database and its service; None for a new database.

    `heartbeat_at` is in real time; all other times are market time.
    """

    schema_version: int
    size_bytes: int
    now: datetime
    market_identity: str | None
    trading_mode: str | None
    heartbeat_at: datetime | None
    schedulers: Mapping[str, bool] | None
    key_names: Sequence[str] | None
    processed_until: datetime | None
    models: int
    models_active: int
    accounts: int
    positions: int
    resting_orders: int
    trades: int
    invocations: int
    last_invocation_at: datetime | None
    last_trade_at: datetime | None
    last_snapshot_at: datetime | None
    cost_usd: Decimal | None
    open_commands: int


SELECT_SERVICE_FACTS = """
SELECT (SELECT version FROM schema_version) AS schema_version, pg_database_size(current_database()) AS size_bytes,
       now() AS now, s.market_identity, s.trading_mode, s.heartbeat_at, s.schedulers, s.key_names,
       s.processed_until,
       (SELECT count(*) FROM models) AS models,
       (SELECT count(*) FROM models WHERE active) AS models_active,
       (SELECT count(*) FROM accounts) AS accounts,
       (SELECT count(*) FROM orders WHERE status = 'OPEN') AS positions,
       (SELECT count(*) FROM limit_orders WHERE status = 'RESTING') AS resting_orders,
       (SELECT count(*) FROM orders WHERE status = 'CLOSED') AS trades,
       (SELECT coalesce(sum(finished), 0)::bigint FROM invocation_counts) AS invocations,
       (SELECT max(started_at) FROM invocations) AS last_invocation_at,
       (SELECT max(closed_at) FROM orders WHERE status = 'CLOSED') AS last_trade_at,
       (SELECT max(last_at) FROM portfolio_hourly
        WHERE hour = (SELECT max(hour) FROM portfolio_hourly)) AS last_snapshot_at,
       (SELECT sum(cost_usd) FROM invocation_counts
        WHERE model_id NOT IN (SELECT id FROM models WHERE provider = 'external')) AS cost_usd,
       (SELECT count(*) FROM commands WHERE finished_at IS NULL) AS open_commands
FROM (SELECT 1) one LEFT JOIN service_state s ON true
"""


async def select_service_facts(conn: Connection) -> ServiceFacts:
    """Return the facts, even of an empty database."""
    row = await conn.fetchrow(SELECT_SERVICE_FACTS)
    assert row is not None
    return ServiceFacts(**row)


SET_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '2s'"
"""Keeps `trader status` from waiting for a lock as long as a posting does."""


class Obstacle(NamedTuple):
    """What keeps the service from a table: a session with a lock on it or on a row of it, or a missing privilege.

    `pid` is None for a privilege; `query` is None if the role may not see it.
    """

    table: str
    pid: int | None
    application: str | None
    query: str | None
    is_row: bool

    def __str__(self) -> str:
        if self.pid is None:
            return f"The user of DATABASE_URL may not read and write table {self.table}"
        query = "" if self.query is None else f": {self.query}"
        what = f"A row of table {self.table}" if self.is_row else f"Table {self.table}"
        return f"{what} is locked by pid {self.pid} ({self.application or 'unnamed'}{query})"


SELECT_OBSTACLES = """
WITH tables AS (
    SELECT oid, relname FROM pg_class
    WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace = 'public'::regnamespace
), holders AS (
    SELECT t.relname, l.pid, false AS is_row FROM pg_locks l JOIN tables t ON t.oid = l.relation
    WHERE l.granted AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
        AND l.locktype = 'relation' AND l.pid <> pg_backend_pid()
    UNION
    SELECT t.relname, blocking, true  -- whoever waits for a row holds, or waits for, its tuple
    FROM pg_locks l JOIN tables t ON t.oid = l.relation, unnest(pg_blocking_pids(l.pid)) AS blocking
    WHERE l.locktype = 'tuple'
)
SELECT DISTINCT ON (h.relname, a.pid) h.relname AS "table", a.pid, a.application_name AS application,
       left(nullif(a.query, '<insufficient privilege>'), 80) AS query, h.is_row
FROM holders h JOIN pg_stat_activity a ON a.pid = h.pid
UNION ALL
SELECT relname, NULL, NULL, NULL, false FROM tables
WHERE relname = ANY($1) AND NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT'))
    AND EXISTS (SELECT FROM tables WHERE has_table_privilege(oid, 'INSERT'))  -- not the user of a reader
ORDER BY 1, 2
"""


async def select_obstacles(conn: Connection) -> list[Obstacle]:
    """Return what keeps this service's user from the tables that the service uses."""
    return [Obstacle(**row) for row in await conn.fetch(SELECT_OBSTACLES, [*used_tables()])]


SELECT_DATABASE_BYTES = "SELECT pg_database_size(current_database())"


async def select_database_bytes(conn: Connection) -> int:
    """Return the size of the database on its disk."""
    size: int = await conn.fetchval(SELECT_DATABASE_BYTES)
    return size


SELECT_TABLE_COUNT = """
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
"""


async def select_table_count(conn: Connection) -> int:
    """Return how many tables and views the database has in addition to PostgreSQL's own."""
    return int(await conn.fetchval(SELECT_TABLE_COUNT))


ANALYZE = "ANALYZE"
ANALYZE_TIMEOUT_S: Final = 600.0


async def analyze(conn: Connection) -> None:
    """Collect the planner's statistics, which no dump contains."""
    await conn.execute(ANALYZE, timeout=ANALYZE_TIMEOUT_S)


MaintenanceTask = Literal["backup", "audit", "verify"]


class PastAlarm(NamedTuple):
    """A notice of the past, and the process that reported it."""

    at: datetime
    since: datetime
    sender: str
    state: str
    cause: str
    subject: str
    message: str
    impact: str


INSERT_ALARM = """
WITH outdated AS (DELETE FROM alarm_history WHERE at < now() - interval '90 days')
INSERT INTO alarm_history (at, since, sender, state, cause, subject, message, impact)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
"""


async def insert_alarm(conn: Connection, notice: Notice, sender: str) -> None:
    """Add a notice to the history, and drop those that are older than 90 days."""
    values = (notice.at, notice.since, sender, notice.state, *notice.cause, notice.text, notice.impact)
    await conn.execute(INSERT_ALARM, *values)


SELECT_ALARMS = """
SELECT at, since, sender, state, cause, subject, message, impact FROM alarm_history WHERE at >= $1 ORDER BY at, id
"""


async def select_alarms(conn: Connection, since: datetime) -> list[PastAlarm]:
    """Return the notices since a time, oldest first."""
    return [PastAlarm(**row) for row in await conn.fetch(SELECT_ALARMS, since)]


SELECT_LAST_STATES = """
SELECT DISTINCT ON (cause, subject) cause, subject, state FROM alarm_history ORDER BY cause, subject, id DESC
"""


async def select_last_states(conn: Connection) -> dict[tuple[str, str], str]:
    """Return the state in the last notice of each cause and subject."""
    return {(row["cause"], row["subject"]): row["state"] for row in await conn.fetch(SELECT_LAST_STATES)}


UPSERT_MAINTENANCE = """
INSERT INTO maintenance AS m (task, succeeded_at, problems)
VALUES ($1, CASE WHEN $2::integer = 0 THEN now() END, $2::integer)
ON CONFLICT (task) DO UPDATE
SET ran_at = now(), succeeded_at = coalesce(excluded.succeeded_at, m.succeeded_at), problems = excluded.problems
"""


async def upsert_maintenance(conn: Connection, task: MaintenanceTask, problems: int) -> None:
    """Record that a task has run now, and how many problems it found; without any, it has succeeded."""
    await conn.execute(UPSERT_MAINTENANCE, task, problems)


class MaintenanceRun(NamedTuple):
    """The last recorded run of a task. `success_age_s` is the age of the last success; None without one."""

    task: MaintenanceTask
    success_age_s: float | None
    problems: int


SELECT_MAINTENANCE = """
SELECT task, extract(epoch FROM now() - succeeded_at)::float8 AS success_age_s, problems FROM maintenance ORDER BY task
"""


async def select_maintenance(conn: Connection) -> Sequence[MaintenanceRun]:
    """Return the last recorded run of each task."""
    return [MaintenanceRun(**row) for row in await conn.fetch(SELECT_MAINTENANCE)]


SELECT_COSTS_BY_DAY = """
SELECT date_trunc('day', started_at, 'UTC') AS day, model_id, coalesce(sum(cost_usd), 0) AS usd,
       bool_or(unmetered_attempts > 0 OR unpriced_steps > 0) AS is_partial
FROM invocations
WHERE started_at >= $1
GROUP BY day, model_id
HAVING sum(cost_usd) > 0 OR bool_or(unmetered_attempts > 0 OR unpriced_steps > 0)
ORDER BY day, model_id
"""


async def select_costs_by_day(conn: Connection, since: datetime) -> list[SimpleNamespace]:
    """Return the known cost of each model's invocations by the day (UTC) on which they began, since a time."""
    return shown_rows(await conn.fetch(SELECT_COSTS_BY_DAY, since))


LATEST: Final = 1000
"""The invocations of a model whose durations are read: sorting a week of a hundred models would take seconds."""

SELECT_MODEL_ACTIVITY = """
SELECT c.*, d.median_s, d.slow_s, f.last_failure
FROM (
    SELECT model_id, count(*) AS invocations, count(failure_reason) AS failed
    FROM invocations
    WHERE started_at >= $1 AND finished_at IS NOT NULL
    GROUP BY model_id
) c
CROSS JOIN LATERAL (
    SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS median_s,
           percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) AS slow_s
    FROM (
        SELECT extract(epoch FROM finished_at - started_at) AS seconds
        FROM invocations
        WHERE model_id = c.model_id AND started_at >= $1 AND finished_at IS NOT NULL
        ORDER BY started_at DESC LIMIT $2
    ) latest
) d
LEFT JOIN LATERAL (
    SELECT failure_reason AS last_failure
    FROM invocations
    WHERE model_id = c.model_id AND started_at >= $1 AND status IN ('failed', 'timeout')
    ORDER BY started_at DESC LIMIT 1
) f ON true
ORDER BY c.failed DESC, c.model_id
"""


async def select_model_activity(conn: Connection, since: datetime) -> list[SimpleNamespace]:
    """Return the finished invocations of each model since a time, those with the most failures first."""
    return shown_rows(await conn.fetch(SELECT_MODEL_ACTIVITY, since, LATEST))


SELECT_REFUSALS = """
SELECT coalesce(t.metadata->'results'->0->>'rule', 'no rule') AS rule, count(*) AS calls,
       count(DISTINCT i.model_id) AS models
FROM tool_calls t JOIN invocations i ON i.id = t.invocation_id
WHERE t.status = 'rejected' AND t.created_at >= $1
GROUP BY rule
ORDER BY calls DESC, rule
"""


async def select_refusals(conn: Connection, since: datetime) -> list[SimpleNamespace]:
    """Return how often each rule refused a call since a time, and of how many models, the most frequent first."""
    return shown_rows(await conn.fetch(SELECT_REFUSALS, since))


SELECT_PAST_HALTS = """
SELECT account_id, cause, reason, halted_by, halted_at, lifted_by, lifted_at
FROM halts WHERE lifted_at IS NULL OR lifted_at >= $1
ORDER BY id DESC LIMIT $2
"""


async def select_past_halts(conn: Connection, since: datetime, limit: int) -> list[SimpleNamespace]:
    """Return the latest halts that were in force since a time, newest first."""
    return shown_rows(await conn.fetch(SELECT_PAST_HALTS, since, limit))
