"""SQL that appends to the chain of the record what belongs to no invocation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import asyncpg

from trader.domain.agents.results import encode_record, plain_row
from trader.store.database.pool import Connection

LOCK_CHAIN = "SELECT pg_advisory_xact_lock(x'636861696e'::bigint)"


async def lock_chain(conn: Connection) -> None:
    """Keep other appends waiting until the transaction ends, as an append does.

    The end of an invocation appends first and counts then: who counts first must lock before.
    """
    await conn.execute(LOCK_CHAIN)


INSERT_RECORD = """
INSERT INTO chain_links (kind, record, record_digest) VALUES ($1, $2, sha256(convert_to($2, 'UTF8')))
"""


async def insert_record(conn: Connection, kind: str, content: Mapping[str, Any]) -> None:
    """Append a record of a kind to the chain, in the caller's transaction; other appends wait until that ends.

    `content` is a JSON value without fractions. Under `rows` it may have rows of tables, by the name of the table.
    """
    await conn.execute(INSERT_RECORD, kind, encode_record(kind, content))


async def insert_rows_record(conn: Connection, table: str, rows: Sequence[asyncpg.Record]) -> None:
    """Append rows of one table to the chain, as they are from now on; without any, nothing."""
    if rows:
        await insert_record(conn, table, {"rows": {table: plain_rows(rows)}})


def plain_rows(rows: Iterable[asyncpg.Record]) -> list[Mapping[str, Any]]:
    """Return rows of a statement as the records of the chain have them."""
    return [plain_row(row.items()) for row in rows]
