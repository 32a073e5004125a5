"""SQL for the chain: appends, its links, and their anchors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import asyncpg

from trader.database.pool import Connection
from trader.record.domain.chain import Anchor, ChainLink, PayloadDigests
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


INSERT_LINK = """
INSERT INTO chain_links (invocation_id, view_digest, answers_digest, record_digest) VALUES ($1, $2, $3, $4)
"""


async def insert_link(conn: Connection, invocation_id: UUID, digests: PayloadDigests, record_digest: bytes) -> None:
    """Append a finished invocation to the chain; a lock held until the transaction ends makes other appends wait."""
    view, answers = digests.view_digest, digests.answers_digest
    await conn.execute(INSERT_LINK, invocation_id, view, answers, record_digest)


LINK_COLUMNS: Final = ", ".join(ChainLink._fields)

SELECT_LINKS = f"""
SELECT {LINK_COLUMNS} FROM chain_links WHERE position > $1 ORDER BY position LIMIT $2
"""  # noqa: S608 - a constant of this module


async def select_links(conn: Connection, after: int, limit: int) -> list[ChainLink]:
    """Return the next links after a position, ascending."""
    return [ChainLink(**row) for row in await conn.fetch(SELECT_LINKS, after, limit)]


SELECT_LAST_LINK = f"""
SELECT {LINK_COLUMNS} FROM chain_links ORDER BY position DESC LIMIT 1
"""  # noqa: S608 - a constant of this module


async def select_last_link(conn: Connection) -> ChainLink | None:
    """Return the last link; None before the first."""
    row = await conn.fetchrow(SELECT_LAST_LINK)
    return None if row is None else ChainLink(**row)


# Anchors

INSERT_ANCHOR = """
INSERT INTO anchors (position, digest)
SELECT position, digest FROM chain_links
WHERE $1 = 0 OR NOT EXISTS (SELECT FROM anchors WHERE anchored_at > now() - make_interval(secs => $1))
ORDER BY position DESC
LIMIT 1
ON CONFLICT DO NOTHING
"""


async def insert_anchor(conn: Connection, interval_s: float = 0.0) -> None:
    """Record the head of the chain, unless it is unchanged or one was recorded within the interval (0: none)."""
    await conn.execute(INSERT_ANCHOR, interval_s)


SELECT_ANCHORS = "SELECT position, digest, anchored_at FROM anchors ORDER BY position"


async def select_anchors(conn: Connection) -> list[Anchor]:
    """Return every anchor in chain order."""
    return [Anchor(**row) for row in await conn.fetch(SELECT_ANCHORS)]


SELECT_UNSENT_ANCHORS = """
SELECT position, digest, anchored_at FROM anchors WHERE sent_at IS NULL ORDER BY position LIMIT $1
"""


async def select_unsent_anchors(conn: Connection, limit: int) -> list[Anchor]:
    """Return the oldest anchors that no external sink has confirmed."""
    return [Anchor(**row) for row in await conn.fetch(SELECT_UNSENT_ANCHORS, limit)]


UPDATE_ANCHOR_SENT = "UPDATE anchors SET sent_at = now() WHERE position = $1"


async def update_anchor_sent(conn: Connection, position: int) -> None:
    """Record that the external sink confirmed an anchor."""
    await conn.execute(UPDATE_ANCHOR_SENT, position)
