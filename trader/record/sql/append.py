"""SQL that appends records without an invocation to the chain."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import asyncpg

from trader.database.pool import Connection
from trader.record.domain.results import encode_record, plain_row

# The columns of each table that enter the record; the tables' own statements return them.
MODEL_COLUMNS: Final = (
    "id, name, variant, provider, router_model_name, configuration->>'owner' AS owner, "
    "configuration->>'replicate_of' AS replicate_of, configuration->>'training_cutoff' AS training_cutoff, created_at"
)
ENTRANT_COLUMNS: Final = (
    "model_id, number, fingerprint, encode(sha256(convert_to(configuration, 'UTF8')), 'hex') AS configuration_digest, "
    "answered_by, declared_in(configuration)::text AS declared, began_at"
)
MISSED_COLUMNS: Final = "model_id, run_number, entrant, season, missed, missed_at"
HALT_COLUMNS: Final = "id, account_id, cause, reason, halted_by, halted_at, lifted_by, lifted_at"
SEASON_COLUMNS: Final = "season, number, record, encode(digest, 'hex') AS digest"

LOCK_CHAIN = "SELECT pg_advisory_xact_lock(x'636861696e'::bigint)"


async def lock_chain(conn: Connection) -> None:
    """Make other appends wait until the transaction ends, as an append does.

    The end of an invocation appends first and then counts, so a caller that counts first must lock beforehand.
    """
    await conn.execute(LOCK_CHAIN)


INSERT_RECORD = """
INSERT INTO chain_links (kind, record, record_digest) VALUES ($1, $2, sha256(convert_to($2, 'UTF8')))
"""


async def insert_record(conn: Connection, kind: str, content: Mapping[str, Any]) -> None:
    """Append a record of this kind to the chain, in the caller's transaction; other appends wait until it ends.

    `content` is a JSON value without fractions. Its `rows` may have rows of tables, by table name.
    """
    await conn.execute(INSERT_RECORD, kind, encode_record(kind, content))


async def insert_rows_record(conn: Connection, table: str, rows: Sequence[asyncpg.Record]) -> None:
    """Append rows of one table to the chain in their new state; do nothing without rows."""
    if rows:
        await insert_record(conn, table, {"rows": {table: plain_rows(rows)}})


def plain_rows(rows: Iterable[asyncpg.Record]) -> list[Mapping[str, Any]]:
    """Return rows of a statement in the form used by the chain's records."""
    return [plain_row(row.items()) for row in rows]
