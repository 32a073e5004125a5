"""Schema of the database: its version, the migrations from earlier versions, and how a start applies them.

schema.sql is the whole schema of this version. An upgrade runs the steps of `MIGRATIONS`, then schema.sql, all in one
transaction: it happens whole, or not at all. A step changes existing tables and their data; new tables, functions and
triggers come from schema.sql alone. A step must tolerate that its change is already there.
"""

import logging
import sysconfig
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg

from trader.errors import StartError
from trader.store.database.pool import Connection, Database, place

log = logging.getLogger("trader.store")

TO_VERSION_2: Final = """
ALTER TABLE invocation_counts
    ADD COLUMN IF NOT EXISTS input_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS output_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS cost_usd amount;
UPDATE invocation_counts c
SET input_tokens = s.input_tokens, output_tokens = s.output_tokens, cost_usd = s.cost_usd
FROM (
    SELECT i.model_id, r.number, sum(i.input_tokens) AS input_tokens, sum(i.output_tokens) AS output_tokens,
           sum(i.cost_usd) AS cost_usd
    FROM invocations i
    CROSS JOIN LATERAL (
        SELECT coalesce(max(number), 0) AS number FROM runs
        WHERE account_id = i.model_id AND started_at <= i.started_at
    ) r
    WHERE i.status <> 'running'
    GROUP BY i.model_id, r.number
) s
WHERE s.model_id = c.model_id AND s.number = c.run_number;
"""
"""Adds tokens and costs to the counters of each run."""

CLOSED_BY_OPERATOR: Final = """
ALTER TABLE orders DROP CONSTRAINT IF EXISTS orders_close_reason_check;
ALTER TABLE orders ADD CONSTRAINT orders_close_reason_check CHECK (
    close_reason IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time', 'liquidation', 'reset', 'operator')
);
ALTER TABLE fills DROP CONSTRAINT IF EXISTS fills_cause_check;
ALTER TABLE fills ADD CONSTRAINT fills_cause_check CHECK (
    cause IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time', 'liquidation', 'reset', 'operator')
);
"""
"""Allows `operator` as the cause of a close."""

VENUE_ACCOUNTS: Final = """
ALTER TABLE models ADD COLUMN IF NOT EXISTS venue_account_index bigint CHECK (venue_account_index >= 0);
ALTER TABLE service_state
    ADD COLUMN IF NOT EXISTS venue_url text,
    ADD COLUMN IF NOT EXISTS venue_account_index bigint CHECK (venue_account_index >= 0),
    DROP CONSTRAINT IF EXISTS live_has_a_venue,
    DROP CONSTRAINT IF EXISTS live_has_an_account,
    ADD CONSTRAINT live_has_a_venue CHECK ((trading_mode = 'live') = (venue_url IS NOT NULL)),
    ADD CONSTRAINT live_has_an_account CHECK ((trading_mode = 'live') = (venue_account_index IS NOT NULL));
"""
"""Records which account of a venue a model trades, and which venue and account a database belongs to."""

TO_VERSION_5: Final = """
ALTER TABLE models
    ADD COLUMN IF NOT EXISTS configuration jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(configuration) = 'object');
"""
"""Adds what the models file sets for a model beside its identity."""

UNMETERED_ATTEMPTS: Final = """
ALTER TABLE invocations
    ADD COLUMN IF NOT EXISTS unmetered_attempts integer NOT NULL DEFAULT 0 CHECK (unmetered_attempts >= 0);
ALTER TABLE invocation_counts ADD COLUMN IF NOT EXISTS unmetered_attempts bigint NOT NULL DEFAULT 0;
ALTER TABLE invocation_steps ALTER COLUMN input_tokens DROP NOT NULL, ALTER COLUMN output_tokens DROP NOT NULL;
"""
"""Distinguishes tokens that were not reported from none."""

COSTS: Final = """
ALTER TABLE invocations
    ADD COLUMN IF NOT EXISTS unpriced_steps integer NOT NULL DEFAULT 0 CHECK (unpriced_steps >= 0);
ALTER TABLE invocation_counts ADD COLUMN IF NOT EXISTS unpriced_steps bigint NOT NULL DEFAULT 0;
ALTER TABLE invocation_steps ADD COLUMN IF NOT EXISTS cached_tokens bigint CHECK (cached_tokens >= 0);
"""
"""Tells a cost that is only partly known from a whole one, and records tokens from the providers' caches."""

ENTRANTS: Final = """
CREATE TABLE IF NOT EXISTS entrants (
    model_id      text NOT NULL REFERENCES models,
    number        integer NOT NULL CHECK (number >= 0),
    fingerprint   text CHECK (fingerprint ~ '^[0-9a-f]{64}$'),
    configuration text,
    answered_by   text,
    began_at      timestamptz NOT NULL,
    PRIMARY KEY (model_id, number),
    CHECK ((number = 0) = (fingerprint IS NULL)),
    CHECK ((fingerprint IS NULL) = (configuration IS NULL)),
    CHECK (fingerprint IS NOT NULL OR answered_by IS NULL)
);
INSERT INTO entrants (model_id, number, began_at)
SELECT model_id, 0, min(started_at) FROM invocations GROUP BY model_id
ON CONFLICT DO NOTHING;
ALTER TABLE invocations
    ADD COLUMN IF NOT EXISTS entrant integer DEFAULT 0,
    DROP CONSTRAINT IF EXISTS invocations_model_id_entrant_fkey,
    ADD CONSTRAINT invocations_model_id_entrant_fkey
        FOREIGN KEY (model_id, entrant) REFERENCES entrants (model_id, number);
ALTER TABLE invocations ALTER COLUMN entrant DROP DEFAULT;
ALTER TABLE invocation_counts
    ADD COLUMN IF NOT EXISTS entrant integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS missed bigint NOT NULL DEFAULT 0,
    DROP CONSTRAINT IF EXISTS invocation_counts_pkey,
    ADD PRIMARY KEY (model_id, run_number, entrant);
"""
"""Names the entrant of each invocation: number 0 of those before. A default for a new column rewrites no row."""

LIQUIDATIONS: Final = """
ALTER TABLE accounts ADD COLUMN IF NOT EXISTS liquidating boolean NOT NULL DEFAULT false;
"""
"""Records which accounts are being liquidated, step by step."""

LIVED_UNTIL: Final = "ALTER TABLE service_state ADD COLUMN IF NOT EXISTS lived_until timestamptz;"
"""Records how far the time of a paced replay may have passed."""

RESET_BY_OPERATOR: Final = """
ALTER TABLE IF EXISTS commands
    DROP CONSTRAINT IF EXISTS commands_verb_check,
    ADD CONSTRAINT commands_verb_check CHECK (verb IN ('halt', 'resume', 'flatten', 'reset'));
"""
"""Allows the command `reset`."""

LUCK: Final = "SELECT 1;"
"""Changes nothing that exists: the table `luck` comes from schema.sql."""

MARKET_SEED: Final = "SELECT 1;"
"""Changes nothing that exists: the table `market_seed` comes from schema.sql. Older databases have a known seed."""

TOOLS_OF_AGENTS: Final = """
ALTER TABLE IF EXISTS tool_calls
    DROP CONSTRAINT IF EXISTS tool_calls_type_check,
    ADD CONSTRAINT tool_calls_type_check CHECK (type IN (
        'CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN', 'HOLDING', 'FETCH_INDICATORS', 'FETCH_ORDER_BOOK',
        'NOTE'
    ));
"""
"""Allows calls of the tools `note` and `fetchOrderBook`."""

LEVERAGES: Final = """
ALTER TABLE IF EXISTS portfolio_snapshots
    ADD COLUMN IF NOT EXISTS leverage double precision CHECK (leverage >= 0);
ALTER TABLE IF EXISTS portfolio_hourly
    ADD COLUMN IF NOT EXISTS leverage double precision CHECK (leverage >= 0);
"""
"""Records the leverage of accounts, from which it follows what they can lose in an hour."""

UPGRADE_BACKUP: Final = "ALTER TABLE schema_version ADD COLUMN IF NOT EXISTS backup text;"
"""Records the file of the backup that an upgrade made before."""

MOST_COSTS: Final = """
ALTER TABLE IF EXISTS invocations
    ADD COLUMN IF NOT EXISTS reserved_usd amount CHECK (reserved_usd >= 0);
ALTER TABLE IF EXISTS invocation_steps
    ADD COLUMN IF NOT EXISTS cache_write_tokens bigint CHECK (cache_write_tokens >= 0);
"""
"""Records the most that an invocation may cost, and the tokens that a provider has written to its cache."""

LUCK_OF_EQUITY: Final = "DROP TABLE IF EXISTS luck;"
"""Drops comparisons of completed trades with luck: those of equity are made again, in a table of schema.sql."""

QUEUES: Final = """
ALTER TABLE IF EXISTS limit_orders
    ADD COLUMN IF NOT EXISTS ahead amount NOT NULL DEFAULT 0 CHECK (ahead >= 0);
"""
"""Records what stands before a resting order at its price."""

REMOVED_BY_OPERATOR: Final = """
ALTER TABLE IF EXISTS commands
    DROP CONSTRAINT IF EXISTS commands_verb_check,
    ADD CONSTRAINT commands_verb_check CHECK (verb IN ('halt', 'resume', 'flatten', 'reset', 'remove'));
"""
"""Allows the command `remove`."""

TRIGGER_LATENCY: Final = """
ALTER TABLE IF EXISTS orders
    ADD COLUMN IF NOT EXISTS closing_at timestamptz,
    DROP CONSTRAINT IF EXISTS closing_at_of_a_trigger,
    ADD CONSTRAINT closing_at_of_a_trigger CHECK (closing_at IS NULL OR closing IS NOT NULL);
"""
"""Records when the order of a trigger that fired meets a book."""

CHAINED_RESULTS: Final = """
ALTER TABLE IF EXISTS chain_links
    ALTER COLUMN invocation_id DROP NOT NULL,
    ADD COLUMN IF NOT EXISTS kind text NOT NULL DEFAULT 'invocation',
    ADD COLUMN IF NOT EXISTS record text,
    DROP CONSTRAINT IF EXISTS invocation_or_record,
    ADD CONSTRAINT invocation_or_record CHECK ((invocation_id IS NULL) = (record IS NOT NULL));
CREATE TABLE IF NOT EXISTS chain_marks (
    account_id text PRIMARY KEY,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    run_number integer NOT NULL CHECK (run_number >= 0),
    hour       timestamptz
);
INSERT INTO chain_marks (account_id, sequence, run_number, hour)
SELECT coalesce(a.id, h.account_id), coalesce(a.sequence, 0),
       coalesce((SELECT max(number) FROM runs r WHERE r.account_id = a.id), 0), h.hour
FROM accounts a
FULL JOIN (SELECT account_id, max(hour) AS hour FROM portfolio_hourly GROUP BY account_id) h ON h.account_id = a.id
ON CONFLICT DO NOTHING;
"""
"""Lets the chain hold records of results. Those of before are marked: nobody can say whether they were changed."""

MIGRATIONS: Final[Mapping[int, str]] = {
    2: TO_VERSION_2,
    3: CLOSED_BY_OPERATOR,
    4: VENUE_ACCOUNTS,
    5: TO_VERSION_5 + UNMETERED_ATTEMPTS + COSTS + ENTRANTS + LIQUIDATIONS + LIVED_UNTIL,
    6: RESET_BY_OPERATOR,
    7: LUCK,
    8: MARKET_SEED,
    9: TOOLS_OF_AGENTS
    + LEVERAGES
    + UPGRADE_BACKUP
    + MOST_COSTS
    + LUCK_OF_EQUITY
    + QUEUES
    + REMOVED_BY_OPERATOR
    + TRIGGER_LATENCY
    + CHAINED_RESULTS,
}
"""Each step by the version that it leads to."""

SCHEMA_VERSION: Final = max(MIGRATIONS)
UPGRADE_TIMEOUT_S: Final = 600.0

# "trader" in ASCII: two processes that start at once apply the schema one after the other.
SCHEMA_LOCK: Final = 0x747261646572

NO_LOCK_TIMEOUT = "SET LOCAL lock_timeout = 0"
LOCK_SCHEMA = "SELECT pg_advisory_xact_lock($1)"
UPDATE_SCHEMA_VERSION = """
UPDATE schema_version SET version = $1, applied_at = now(), backup = $2 WHERE version < $1
"""


def schema_path() -> Path:
    """Return the path of schema.sql: at the root of a checkout, or among the data files of an installed package."""
    checkout = Path(__file__).parents[3] / "schema.sql"
    installed = Path(sysconfig.get_path("data"), "share", "trader", "schema.sql")
    return checkout if checkout.exists() else installed


def schema_text(version: int) -> str:
    """Return the statements that create the tables of this version or of an earlier one in an empty database."""
    earlier = Path(__file__).parent / "earlier" / f"schema_{version}.sql"
    return (schema_path() if version == SCHEMA_VERSION else earlier).read_text(encoding="utf-8")


async def apply_schema(database: Database, *, backup: str | None = None) -> None:
    """Create the tables of this version in an empty database, or upgrade those of an earlier version with their data.

    `backup` is recorded as the file that holds the database of before. Safe to repeat, and for two processes at once.
    A database of this version is left alone, without taking any lock.

    :raises StartError: the database has the schema of a newer version, or its user may not create tables
    """
    async with database.connection() as conn:
        if await select_schema_version(conn) == SCHEMA_VERSION:
            return
    async with database.transaction() as conn:
        await conn.execute(NO_LOCK_TIMEOUT)  # the time limit of the steps holds for their locks, too
        await conn.execute(LOCK_SCHEMA, SCHEMA_LOCK)
        version = await select_schema_version(conn)
        if version is not None and version > SCHEMA_VERSION:
            raise await _refused(conn, "The database", version)
        try:
            await upgrade(conn, version, backup)
        except asyncpg.InsufficientPrivilegeError as error:
            raise StartError(f"The user of DATABASE_URL may not create the tables: {error}.") from error
    if version is None:
        log.info("the tables of schema version %d were created", SCHEMA_VERSION)
    elif version < SCHEMA_VERSION:
        log.warning("the database was upgraded from schema version %d to %d", version, SCHEMA_VERSION)


async def upgrade(conn: Connection, version: int | None, backup: str | None = None) -> None:
    """Create the tables of this version, with the rows of those of an earlier version, in the caller's transaction."""
    steps = [] if version is None else [MIGRATIONS[step] for step in range(version + 1, SCHEMA_VERSION + 1)]
    for statements in [*steps, schema_text(SCHEMA_VERSION)]:
        await conn.execute(statements, timeout=UPGRADE_TIMEOUT_S)
    await conn.execute(UPDATE_SCHEMA_VERSION, SCHEMA_VERSION, backup)


async def require_schema(database: Database, dsn: str) -> None:
    """Check that the database has the tables of this version.

    :raises StartError: they are missing or of another version; only a leader creates or upgrades them
    """
    async with database.connection() as conn:
        version = await select_schema_version(conn)
        if version != SCHEMA_VERSION:
            raise await _refused(conn, f"The database at {place(dsn)}", version)


async def _refused(conn: Connection, name: str, version: int | None) -> StartError:
    """Return the error about a database whose schema is not of this version; it says what to do."""
    if version is None:
        return StartError(f"{name} is empty; the first start of the service creates its tables.")
    if version < SCHEMA_VERSION:
        return StartError(
            f"{name} has schema version {version}, and this program needs {SCHEMA_VERSION}. `trader upgrade` makes a "
            "backup and upgrades it; the running service, if there is one, is of an earlier version: stop it before."
        )
    backup = await conn.fetchval(SELECT_BACKUP)
    before = "" if backup is None else f", or restore the backup of before its upgrade, {backup}, into an empty one"
    return StartError(
        f"{name} has schema version {version}, made by a newer version of trader; this one needs version "
        f"{SCHEMA_VERSION}. Start the newer version, use another database{before}."
    )


@asynccontextmanager
async def open_database(dsn: str, *, of_any_version: bool = False) -> AsyncIterator[Database]:
    """Open the database of a service for a tool, without changing its schema.

    :raises StartError: the database cannot be used, or its schema is not of this version
    """
    database = await Database.connect(dsn, size=1)
    try:
        if not of_any_version:
            await require_schema(database, dsn)
        yield database
    finally:
        await database.close()


SELECT_HAS_SCHEMA = "SELECT to_regclass('schema_version') IS NOT NULL"
SELECT_SCHEMA_VERSION = "SELECT version FROM schema_version"
SELECT_BACKUP = "SELECT to_jsonb(s) ->> 'backup' FROM schema_version s"  # not every version has the column


async def select_schema_version(conn: Connection) -> int | None:
    """Return the schema version of the tables; None in an empty database."""
    if not await conn.fetchval(SELECT_HAS_SCHEMA):
        return None
    version: int | None = await conn.fetchval(SELECT_SCHEMA_VERSION)
    return version
