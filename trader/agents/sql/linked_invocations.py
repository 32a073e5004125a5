"""SQL of invocations in the record's chain: closing them, and reading them for verification."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg

from trader.agents.domain.invocations import Invocation
from trader.agents.sql.invocations import UPDATE_INVOCATION, invocation_values
from trader.database.pool import SCAN_TIMEOUT_S, Connection
from trader.record.domain.chain import PayloadDigests

UPDATE_INVOCATION_CLOSED = (
    f"WITH closed AS ({UPDATE_INVOCATION} RETURNING id) "  # noqa: S608 - a constant of this package
    "INSERT INTO chain_links (invocation_id, view_digest, answers_digest, record_digest) "
    "SELECT id, $14, $15, $16 FROM closed CROSS JOIN LATERAL set_config('synchronous_commit', 'off', true)"
)


async def update_invocation_closed(
    conn: Connection, invocation: Invocation, digests: PayloadDigests, record_digest: bytes
) -> bool:
    """Close a running invocation and append it to the chain. Return False if it is already closed.

    The append lock is held until the transaction ends, so the commit is asynchronous: a server crash may lose the last
    closed invocations, which the next start closes as interrupted, but leaves no gap in the chain.
    """
    values = *invocation_values(invocation), digests.view_digest, digests.answers_digest, record_digest
    done: str = await conn.execute(UPDATE_INVOCATION_CLOSED, *values)
    return done == "INSERT 0 1"


SELECT_CHAIN_MODELS = """
SELECT DISTINCT i.model_id FROM chain_links c JOIN invocations i ON i.id = c.invocation_id
WHERE c.position > $1 AND c.position <= $2
ORDER BY i.model_id
"""


async def select_chain_models(conn: Connection, after: int, until: int) -> list[str]:
    """Return the model ids of the invocations at the positions (after, until]."""
    return [record["model_id"] for record in await conn.fetch(SELECT_CHAIN_MODELS, after, until)]


SELECT_UNLINKED = """
SELECT i.id, i.model_id, i.finished_at
FROM invocations i
WHERE i.status <> 'running' AND NOT EXISTS (SELECT FROM chain_links WHERE invocation_id = i.id)
  AND i.finished_at >= (
      SELECT f.finished_at FROM chain_links c JOIN invocations f ON f.id = c.invocation_id ORDER BY c.position LIMIT 1
  )
ORDER BY i.finished_at, i.id
LIMIT $1
"""


async def select_unlinked(conn: Connection, limit: int) -> list[tuple[UUID, str, datetime]]:
    """Return the invocations missing from the chain that ended after its first link: id, model and end."""
    rows = await conn.fetch(SELECT_UNLINKED, limit, timeout=SCAN_TIMEOUT_S)
    return [(row["id"], row["model_id"], row["finished_at"]) for row in rows]


SELECT_FINISHED_COUNT = "SELECT count(*) FROM invocations WHERE status <> 'running'"


async def select_finished_count(conn: Connection) -> int:
    """Return the number of finished invocations."""
    count: int = await conn.fetchval(SELECT_FINISHED_COUNT, timeout=SCAN_TIMEOUT_S)
    return count


SELECT_WRONG_COUNTS = """
WITH counted AS (
    SELECT i.model_id, r.number AS run_number, coalesce(i.entrant, 0) AS entrant, count(*) AS finished,
           count(*) FILTER (WHERE i.status IN ('failed', 'timeout')) AS failed,
           count(*) FILTER (WHERE i.status = 'completed' AND i.failed_tool_calls > 0) AS tool_failed,
           sum(i.input_tokens) AS input_tokens, sum(i.output_tokens) AS output_tokens, sum(i.cost_usd) AS cost_usd
    FROM invocations i
    CROSS JOIN LATERAL (
        SELECT coalesce(max(number), 0) AS number FROM runs
        WHERE account_id = i.model_id AND started_at <= i.started_at
    ) r
    WHERE i.status <> 'running'
    GROUP BY i.model_id, r.number, coalesce(i.entrant, 0)
)
SELECT model_id, run_number, entrant, d.figure, d.stored, d.counted
FROM (
    SELECT model_id, run_number, entrant, sum(finished) AS finished, sum(failed) AS failed,
           sum(tool_failed) AS tool_failed, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
           sum(cost_usd) AS cost_usd
    FROM invocation_counts GROUP BY model_id, run_number, entrant
) c
FULL JOIN counted n USING (model_id, run_number, entrant)
CROSS JOIN LATERAL (VALUES
    ('finished', c.finished, n.finished::numeric),
    ('failed', c.failed, n.failed),
    ('tool_failed', c.tool_failed, n.tool_failed),
    ('input_tokens', c.input_tokens, n.input_tokens),
    ('output_tokens', c.output_tokens, n.output_tokens),
    ('cost_usd', c.cost_usd, n.cost_usd)
) d (figure, stored, counted)
WHERE coalesce(d.stored, 0) <> coalesce(d.counted, 0)
ORDER BY model_id, run_number, entrant, d.figure
"""


async def select_wrong_counts(conn: Connection) -> list[asyncpg.Record]:
    """Return the entrants' counters that differ from their invocations."""
    return await conn.fetch(SELECT_WRONG_COUNTS, timeout=SCAN_TIMEOUT_S)


SELECT_REQUEST_IDS = """
SELECT q.id, q.account_id, q.client_order_id
FROM unnest($1::text[], $2::text[]) AS w (account_id, client_order_id)
JOIN order_requests q ON q.account_id = w.account_id AND q.client_order_id = w.client_order_id
ORDER BY q.client_order_id
"""


async def select_request_ids(conn: Connection, calls: Sequence[tuple[str, str]]) -> dict[tuple[str, str], UUID]:
    """Return the ids of the orders with these (account id, client order id) pairs, by pair."""
    rows = await conn.fetch(SELECT_REQUEST_IDS, [call[0] for call in calls], [call[1] for call in calls])
    return {(row["account_id"], row["client_order_id"]): row["id"] for row in rows}
