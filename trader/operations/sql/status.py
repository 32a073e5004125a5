"""SQL for the command `status`: the service and its database at one moment."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple

from trader.database.pool import Connection
from trader.database.schema import used_tables


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
