"""SQL of the command `status`: the service and its database at one moment."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple

from trader.store.database.pool import Connection


class ServiceFacts(NamedTuple):
    """Facts about a database and its service; None in a new database.

    `heartbeat_at` is real time, all other times are the market's.
    """

    schema_version: int
    size_bytes: int
    now: datetime
    market_identity: str | None
    trading_mode: str | None
    heartbeat_at: datetime | None
    schedulers: Mapping[str, bool] | None
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
SELECT (SELECT version FROM schema_version), pg_database_size(current_database()), now(),
       s.market_identity, s.trading_mode, s.heartbeat_at, s.schedulers, s.processed_until,
       (SELECT count(*) FROM models), (SELECT count(*) FROM models WHERE active), (SELECT count(*) FROM accounts),
       (SELECT count(*) FROM orders WHERE status = 'OPEN'),
       (SELECT count(*) FROM limit_orders WHERE status = 'RESTING'),
       (SELECT count(*) FROM orders WHERE status = 'CLOSED'),
       (SELECT coalesce(sum(finished), 0)::bigint FROM invocation_counts),
       (SELECT max(started_at) FROM invocations),
       (SELECT max(closed_at) FROM orders WHERE status = 'CLOSED'),
       (SELECT max(last_at) FROM portfolio_hourly WHERE hour = (SELECT max(hour) FROM portfolio_hourly)),
       (SELECT sum(cost_usd) FROM invocation_counts),
       (SELECT count(*) FROM commands WHERE finished_at IS NULL)
FROM (SELECT 1) one LEFT JOIN service_state s ON true
"""


async def select_service_facts(conn: Connection) -> ServiceFacts:
    """Return the facts; those of an empty database too."""
    row = await conn.fetchrow(SELECT_SERVICE_FACTS)
    assert row is not None
    return ServiceFacts(*row)


SELECT_TABLE_COUNT = """
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
"""


async def select_table_count(conn: Connection) -> int:
    """Return how many tables and views the database has beside PostgreSQL's own."""
    count: int = await conn.fetchval(SELECT_TABLE_COUNT)
    return count


ANALYZE = "ANALYZE"
ANALYZE_TIMEOUT_S: Final = 600.0


async def analyze(conn: Connection) -> None:
    """Collect the statistics of the planner, which no dump contains."""
    await conn.execute(ANALYZE, timeout=ANALYZE_TIMEOUT_S)
