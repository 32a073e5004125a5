"""SQL for the chain: its links and their anchors."""

from typing import Final
from uuid import UUID

from trader.database.pool import Connection
from trader.record.domain.chain import Anchor, ChainLink, PayloadDigests

SCAN_TIMEOUT_S: Final = 600.0
"""Timeout of statements that read every invocation."""

INSERT_LINK = """
INSERT INTO chain_links (invocation_id, view_digest, answers_digest, record_digest) VALUES ($1, $2, $3, $4)
"""


async def insert_link(conn: Connection, invocation_id: UUID, digests: PayloadDigests, record_digest: bytes) -> None:
    """Append a finished invocation to the chain; a lock held until the transaction ends makes other appends wait."""
    view, answers = digests.view_digest, digests.answers_digest
    await conn.execute(INSERT_LINK, invocation_id, view, answers, record_digest)


SELECT_LINKS = """
SELECT position, invocation_id, view_digest, answers_digest, record_digest, digest, kind, record
FROM chain_links
WHERE position > $1
ORDER BY position
LIMIT $2
"""


async def select_links(conn: Connection, after: int, limit: int) -> list[ChainLink]:
    """Return the next links after a position, ascending."""
    return [ChainLink(**row) for row in await conn.fetch(SELECT_LINKS, after, limit)]


SELECT_LAST_LINK = """
SELECT position, invocation_id, view_digest, answers_digest, record_digest, digest, kind, record
FROM chain_links
ORDER BY position DESC
LIMIT 1
"""


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
