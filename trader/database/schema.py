"""Schema of the database: its version, the migrations from earlier versions, and how a start applies them.

schema.sql is the complete schema of this version. An upgrade runs the steps of `MIGRATIONS` and then schema.sql in one
transaction, so it happens completely or not at all. A step changes existing tables and their data; new tables,
functions and triggers come only from schema.sql. A step must tolerate that its change already exists.
"""

import logging
import re
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Final

import asyncpg

from trader.core.errors import StartError
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Database, place

log = logging.getLogger("trader.store")

MIGRATIONS: Final[dict[int, str]] = {}
"""The statements that upgrade to each version from the previous one. The first version needs none."""

EARLIER_SCHEMAS: Final = Path(__file__).parent / "earlier"
"""Folder with the complete schema of each earlier version, as `schema_<version>.sql`, for restoring older backups."""

UPGRADE_TIMEOUT_S: Final = 600.0

# "trader" in ASCII: processes that start at the same time apply the schema in turn.
SCHEMA_LOCK: Final = 0x747261646572

NO_LOCK_TIMEOUT = "SET LOCAL lock_timeout = 0"
LOCK_SCHEMA = "SELECT pg_advisory_xact_lock($1)"
UPDATE_SCHEMA_VERSION = """
UPDATE schema_version SET version = $1, applied_at = now(), backup = $2 WHERE version < $1
"""


UPSERT_VARIANTS = """
INSERT INTO variants AS v (id, place)
SELECT id, place FROM unnest($1::text[]) WITH ORDINALITY AS defined (id, place)
ON CONFLICT (id) DO UPDATE SET place = excluded.place WHERE v.place <> excluded.place
"""


def schema_version() -> int:
    """Return the version of this program's schema."""
    return max(MIGRATIONS, default=1)


def schema_path() -> Path:
    """Return the path of schema.sql: at the root of a checkout, or among the data files of an installed package."""
    checkout = Path(__file__).parents[2] / "schema.sql"
    installed = Path(sysconfig.get_path("data"), "share", "trader", "schema.sql")
    return checkout if checkout.exists() else installed


def schema_text(version: int) -> str:
    """Return the statements that create the tables of this version or of an earlier one in an empty database."""
    path = schema_path() if version == schema_version() else EARLIER_SCHEMAS / f"schema_{version}.sql"
    return path.read_text(encoding="utf-8")


@cache
def used_tables() -> Sequence[str]:
    """Return the tables that a running service writes: all of this version except the one that only a start reads."""
    tables = re.findall(r"^CREATE TABLE IF NOT EXISTS (\w+)", schema_text(schema_version()), re.MULTILINE)
    return [table for table in tables if table != "schema_version"]


SPARED: Final = frozenset(
    (
        "alarm_history", "anchors", "baselines", "candles", "chain_marks", "credentials", "fill_drift",
        "invocation_counts", "maintenance", "portfolio_hourly", "season_records", "variant_hourly", "webhooks",
    )
)  # fmt: skip
"""Tables without which orders are filled and models decide: those of history, reports, and the access of agents."""


async def apply_schema(database: Database, *, backup: str | None = None) -> None:
    """Create the tables of this version in an empty database, or upgrade the tables and data of an earlier version.

    `backup` is recorded as the file with the database before the upgrade. Safe to repeat and to run concurrently. In a
    database of this version, only missing variants are added; no table is locked.

    :raises StartError: the database has the schema of a newer version, or its user may not create tables
    """
    async with database.connection() as conn:
        if await select_schema_version(conn) == schema_version():
            await upsert_variants(conn)
            return
    async with database.transaction() as conn:
        await conn.execute(NO_LOCK_TIMEOUT)  # the time limit of the steps applies to their locks, too
        await conn.execute(LOCK_SCHEMA, SCHEMA_LOCK)
        version = await select_schema_version(conn)
        if version is not None and version > schema_version():
            raise await _refused(conn, "The database", version)
        try:
            await upgrade(conn, version, backup)
        except asyncpg.InsufficientPrivilegeError as error:
            raise StartError(f"The user of DATABASE_URL may not create the tables: {error}.") from error
    if version is None:
        log.info("the tables of schema version %d were created", schema_version())
    elif version < schema_version():
        log.warning("the database was upgraded from schema version %d to %d", version, schema_version())


async def upgrade(conn: Connection, version: int | None, backup: str | None = None) -> None:
    """Create the tables of this version, keeping the rows of an earlier version, in the caller's transaction."""
    steps = [] if version is None else [MIGRATIONS[step] for step in range(version + 1, schema_version() + 1)]
    for statements in [*steps, schema_text(schema_version())]:
        await conn.execute(statements, timeout=UPGRADE_TIMEOUT_S)
    await conn.execute(UPDATE_SCHEMA_VERSION, schema_version(), backup)
    await upsert_variants(conn)


async def upsert_variants(conn: Connection) -> None:
    """Add the variants of this program that the database lacks, since models and baselines reference them."""
    await conn.execute(UPSERT_VARIANTS, list(VariantId))


async def require_schema(database: Database, dsn: str) -> None:
    """Check that the database has the tables of this version.

    :raises StartError: they are missing or of another version; only a leader creates or upgrades them
    """
    async with database.connection() as conn:
        version = await select_schema_version(conn)
        if version != schema_version():
            raise await _refused(conn, f"The database at {place(dsn)}", version)


async def _refused(conn: Connection, name: str, version: int | None) -> StartError:
    """Return the error for a database whose schema is not of this version, which says what to do."""
    if version is None:
        return StartError(f"{name} is empty; the first start of the service creates its tables.")
    if version < schema_version():
        return StartError(
            f"{name} has schema version {version}, and this program needs {schema_version()}. `trader upgrade` makes a "
            "backup and upgrades it. First stop the running service of the earlier version, if there is one."
        )
    backup = await conn.fetchval(SELECT_BACKUP)
    before = "" if backup is None else f", or restore its backup from before the upgrade, {backup}, into an empty one"
    return StartError(
        f"{name} has schema version {version}, made by a newer version of trader; this one needs version "
        f"{schema_version()}. Start the newer version, use another database{before}."
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
SELECT_BACKUP = "SELECT backup FROM schema_version"


async def select_schema_version(conn: Connection) -> int | None:
    """Return the schema version of the tables; None in an empty database."""
    if not await conn.fetchval(SELECT_HAS_SCHEMA):
        return None
    version: int | None = await conn.fetchval(SELECT_SCHEMA_VERSION)
    return version
