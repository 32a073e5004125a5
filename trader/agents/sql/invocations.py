"""SQL of invocations: their steps, tool calls, costs and payloads."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from operator import attrgetter
from typing import Final, Literal, NamedTuple
from uuid import UUID

import msgspec
from msgspec.structs import astuple

from trader.agents.domain.invocations import Failing, Invocation, Step, ToolCall
from trader.core.statistics import grouped
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Page, part_of_row
from trader.exchange.domain.orders import Fill, OrderAnswer
from trader.record.sql.chain import LOCK_CHAIN

INSERT_INVOCATION = """
INSERT INTO invocations (id, model_id, status, started_at, entrant, reserved_usd)
VALUES ($1, $2, 'running', $3, $4, $5)
ON CONFLICT (id) DO NOTHING
"""


async def insert_invocation(conn: Connection, invocation: Invocation) -> bool:
    """Insert an invocation. Return False if the model already has one with this start time."""
    started = invocation.id, invocation.model_id, invocation.started_at, invocation.entrant, invocation.reserved_usd
    done: str = await conn.execute(INSERT_INVOCATION, *started)
    return done == "INSERT 0 1"


INVOCATION_COLUMNS = """
    id, model_id, status, failure_reason, response, step_count, input_tokens, output_tokens, cost_usd, started_at,
    finished_at, entrant, unmetered_attempts, unpriced_steps, ended_by
"""

UPDATE_INVOCATION = """
UPDATE invocations
SET status = $2, failure_reason = $3, response = $4, step_count = $5, input_tokens = $6, output_tokens = $7,
    cost_usd = $8, finished_at = $9, entrant = $10, unmetered_attempts = $11, unpriced_steps = $12,
    ended_by = $13
WHERE id = $1 AND status = 'running'
"""

invocation_values = attrgetter(
    "id", "status", "failure_reason", "response", "step_count", "input_tokens", "output_tokens", "cost_usd",
    "finished_at", "entrant", "unmetered_attempts", "unpriced_steps", "ended_by",
)  # fmt: skip
"""Returns the parameters of UPDATE_INVOCATION in order."""

_invocation_of = attrgetter("invocation_id")


async def update_invocation(conn: Connection, invocation: Invocation) -> bool:
    """Update a running invocation. Return False for a closed one, which never changes."""
    return await conn.execute(UPDATE_INVOCATION, *invocation_values(invocation)) == "UPDATE 1"


class DayCost(NamedTuple):
    """Cost of invocations: the known part in USD, and the tokens of invocations with an unpriced part.

    `unpriced_attempts` may have cost more tokens. `is_estimated`: part of the cost was not reported.
    """

    usd: Decimal = Decimal(0)
    is_estimated: bool = False
    unpriced_input: int = 0
    unpriced_output: int = 0
    unpriced_attempts: int = 0

    def plus(self, invocation: Invocation) -> "DayCost":
        """Return this cost plus the cost of another invocation."""
        is_unpriced = invocation.unpriced_steps > 0
        return DayCost(
            self.usd + (invocation.cost_usd or 0),
            self.is_estimated or is_unpriced or invocation.unmetered_attempts > 0,
            self.unpriced_input + is_unpriced * invocation.input_tokens,
            self.unpriced_output + is_unpriced * invocation.output_tokens,
            self.unpriced_attempts + is_unpriced * invocation.unmetered_attempts,
        )


SELECT_COSTS_SINCE = """
SELECT model_id, coalesce(sum(cost_usd), 0) AS usd,
       coalesce(bool_or(unmetered_attempts > 0 OR unpriced_steps > 0), false) AS is_estimated,
       coalesce(sum(input_tokens) FILTER (WHERE unpriced_steps > 0), 0)::bigint AS unpriced_input,
       coalesce(sum(output_tokens) FILTER (WHERE unpriced_steps > 0), 0)::bigint AS unpriced_output,
       coalesce(sum(unmetered_attempts) FILTER (WHERE unpriced_steps > 0), 0)::bigint AS unpriced_attempts
FROM invocations
WHERE started_at >= $1 AND model_id NOT IN (SELECT id FROM models WHERE provider = 'external')
GROUP BY model_id
ORDER BY model_id
"""


async def select_costs_since(conn: Connection, since: datetime) -> dict[str, DayCost]:
    """Return the cost of each model's invocations since `since`, without what external agents declare."""
    rows = await conn.fetch(SELECT_COSTS_SINCE, since)
    return {row["model_id"]: part_of_row(row, DayCost) for row in rows}


SELECT_COSTS_BETWEEN = """
SELECT model_id, sum(cost_usd) AS usd
FROM invocations
WHERE model_id = ANY($1::text[]) AND started_at >= $2 AND started_at < $3
GROUP BY model_id
"""


async def select_costs_between(
    conn: Connection, model_ids: Sequence[str], since: datetime, until: datetime
) -> dict[str, Decimal | None]:
    """Return the USD that the invocations of these models cost (None: no provider reported a cost)."""
    rows = await conn.fetch(SELECT_COSTS_BETWEEN, model_ids, since, until)
    return {row["model_id"]: row["usd"] for row in rows}


UPDATE_INTERRUPTED = f"""
WITH closed AS (
    UPDATE invocations
    SET status = 'failed', ended_by = 'interruption', failure_reason = $1, finished_at = greatest(started_at, $2),
        cost_usd = greatest(cost_usd, reserved_usd),
        unmetered_attempts = unmetered_attempts + (reserved_usd IS NOT NULL)::integer
    WHERE status = 'running' AND NOT EXISTS (SELECT FROM open_views v WHERE v.invocation_id = invocations.id)
    RETURNING id, model_id, started_at
)
SELECT id, model_id
FROM closed, ({LOCK_CHAIN} FROM (SELECT count(*) FROM closed) AS every) AS chain
ORDER BY started_at, id
"""  # noqa: S608 - a constant of this package
"""Locks the chain after the rows and before the counters, whose triggers run at the end of the statement. A statement
that closes an invocation uses the same order: a leader whose term is over may still close one of the same model."""


async def update_interrupted(conn: Connection, reason: str, at: datetime) -> list[tuple[UUID, str]]:
    """Close, as failed for `reason`, every invocation that a process left open, except those of open views.

    Return the ids of the invocations and their models. The cost of a pending request is unknown, so the full
    reservation counts as the cost.
    """
    rows = await conn.fetch(UPDATE_INTERRUPTED, reason, at)
    return [(row["id"], row["model_id"]) for row in rows]


SELECT_FAILING = """
SELECT m.id, f.in_a_row, f.reason
FROM models m
CROSS JOIN LATERAL (
    SELECT count(*) AS in_a_row, (array_agg(coalesce(failure_reason, status) ORDER BY started_at DESC))[1] AS reason
    FROM invocations i
    WHERE i.model_id = m.id AND i.status IN ('failed', 'timeout') AND i.failure_reason IS DISTINCT FROM $1
      AND i.started_at > coalesce(
          (SELECT max(started_at) FROM invocations WHERE model_id = m.id AND status = 'completed'), '-infinity'
      )
) f
WHERE m.active AND m.provider <> 'external' AND f.in_a_row > 0
ORDER BY m.id
"""


async def select_failing(conn: Connection, interrupted: str) -> dict[str, Failing]:
    """Return the consecutive failures of the active models since their last success; `interrupted` is not a failure."""
    rows = await conn.fetch(SELECT_FAILING, interrupted)
    return {row["id"]: part_of_row(row, Failing) for row in rows}


class UnrecordedCall(msgspec.Struct, frozen=True):
    """A tool call of an invocation that is not recorded, by the answers to its orders."""

    number: int
    answers: list[OrderAnswer]
    opened: bool
    at: datetime


SELECT_UNRECORDED_CALLS = """
SELECT q.number, jsonb_agg(q.answer ORDER BY q.client_order_id) AS answers, min(q.created_at) AS at,
       bool_or(EXISTS (
           SELECT FROM fills f JOIN orders o ON o.id = f.order_id
           WHERE f.request_id = q.id AND (f.side = 'buy') = (o.side = 'LONG')
       )) AS opened
FROM (
    SELECT *, split_part(client_order_id, ':', 2)::integer AS number
    FROM order_requests
    WHERE account_id = $2 AND starts_with(client_order_id, $1::text || ':')
) q
WHERE NOT EXISTS (SELECT FROM tool_calls c WHERE c.invocation_id = $1::text::uuid AND c.number = q.number)
GROUP BY q.number
ORDER BY q.number
"""


async def select_unrecorded_calls(conn: Connection, invocation_id: UUID, account_id: str) -> list[UnrecordedCall]:
    """Return the calls that an invocation placed orders by before its process died without recording them."""
    rows = await conn.fetch(SELECT_UNRECORDED_CALLS, str(invocation_id), account_id)
    return [msgspec.convert(dict(row), UnrecordedCall) for row in rows]


STEP_COLUMNS: Final = ", ".join(Step.__struct_fields__)
CALL_COLUMNS: Final = ", ".join(ToolCall.__struct_fields__)

INSERT_STEP = f"""
INSERT INTO invocation_steps ({STEP_COLUMNS})
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
ON CONFLICT DO NOTHING
"""  # noqa: S608 - a constant of this module


async def insert_step(conn: Connection, step: Step) -> None:
    """Insert a step; leave an existing one unchanged."""
    await conn.execute(INSERT_STEP, *astuple(step))


INSERT_TOOL_CALL = f"""
INSERT INTO tool_calls ({CALL_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING
"""  # noqa: S608 - a constant of this module


async def insert_tool_call(conn: Connection, call: ToolCall) -> None:
    """Insert a tool call; leave an existing one unchanged."""
    await conn.execute(INSERT_TOOL_CALL, *astuple(call))


UPSERT_NOTE = """
INSERT INTO notes (model_id, text, written_at)
VALUES ($1, $2, $3)
ON CONFLICT (model_id) DO UPDATE SET text = excluded.text, written_at = excluded.written_at
"""


async def upsert_note(conn: Connection, model_id: str, text: str, at: datetime) -> None:
    """Replace the note that a model keeps to itself."""
    await conn.execute(UPSERT_NOTE, model_id, text, at)


INSERT_PAYLOAD = """
INSERT INTO invocation_payloads (invocation_id, payload, created_at)
VALUES ($1, $2, $3)
ON CONFLICT DO NOTHING
"""


async def insert_payload(conn: Connection, invocation_id: UUID, payload: bytes, at: datetime) -> None:
    """Insert the compressed payload of an invocation. The partition of `at` must exist."""
    await conn.execute(INSERT_PAYLOAD, invocation_id, payload, at)


SELECT_PAYLOADS = """
SELECT p.invocation_id, p.payload
FROM unnest($1::uuid[], $2::timestamptz[]) AS w (id, at)
JOIN invocation_payloads p ON p.invocation_id = w.id AND p.created_at = w.at
"""


async def select_payloads(conn: Connection, invocations: Sequence[Invocation]) -> dict[UUID, bytes]:
    """Return the compressed payloads of these invocations; expired ones are omitted."""
    ids, times = [invocation.id for invocation in invocations], [invocation.started_at for invocation in invocations]
    rows = await conn.fetch(SELECT_PAYLOADS, ids, times)
    return {row["invocation_id"]: row["payload"] for row in rows}


SELECT_INVOCATIONS_WITH_IDS = f"""
SELECT {INVOCATION_COLUMNS} FROM invocations WHERE id = ANY($1::uuid[]) ORDER BY id
"""  # noqa: S608 - a constant of this module


async def select_invocations_with_ids(conn: Connection, ids: Sequence[UUID]) -> dict[UUID, Invocation]:
    """Return the invocations with these ids, by id; omit missing ones."""
    return {row["id"]: Invocation(**row) for row in await conn.fetch(SELECT_INVOCATIONS_WITH_IDS, ids)}


async def select_invocation(conn: Connection, invocation_id: UUID) -> Invocation | None:
    """Return the invocation with this id, or None."""
    return (await select_invocations_with_ids(conn, [invocation_id])).get(invocation_id)


TurnOutcome = Literal["acted", "refused", "failed"]

HAS_OUTCOME = """
    ($1::text IS NULL
     OR $1 = 'acted' AND EXISTS (
         SELECT FROM tool_calls t
         WHERE t.invocation_id = invocations.id AND t.type IN ('CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN'))
     OR $1 = 'refused' AND (status <> 'completed' OR EXISTS (
         SELECT FROM tool_calls t WHERE t.invocation_id = invocations.id AND t.status <> 'ok'))
     OR $1 = 'failed' AND (status <> 'completed' OR failed_tool_calls > 0))
"""
"""Which `invocations` tried to change their account, failed or had a call not done, or failed or had one fail."""

SELECT_INVOCATIONS = f"""
SELECT {INVOCATION_COLUMNS} FROM invocations
WHERE status <> 'running' AND started_at < coalesce($3::timestamptz, 'infinity') AND {HAS_OUTCOME}
ORDER BY started_at DESC, model_id
LIMIT $2 OFFSET $4
"""  # noqa: S608 - a constant of this module


async def select_invocations(conn: Connection, page: Page, outcome: TurnOutcome | None = None) -> list[Invocation]:
    """Return finished invocations of all models, latest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_INVOCATIONS, outcome, *page)]


# Take the latest of each model, then the latest overall: models without recent invocations cause no long scan.
SELECT_CHOSEN_INVOCATIONS = f"""
SELECT i.*
FROM models m
CROSS JOIN LATERAL (
    SELECT {INVOCATION_COLUMNS} FROM invocations
    WHERE model_id = m.id AND status <> 'running' AND started_at < coalesce($5::timestamptz, 'infinity')
      AND {HAS_OUTCOME}
    ORDER BY started_at DESC
    LIMIT $4::bigint + $6::bigint
) i
WHERE ($2::text IS NULL OR m.id = $2) AND ($3::text IS NULL OR m.variant = $3)
ORDER BY i.started_at DESC, i.model_id
LIMIT $4 OFFSET $6
"""  # noqa: S608 - a constant of this module


async def select_chosen_invocations(
    conn: Connection,
    model_id: str | None,
    variant: VariantId | None,
    page: Page,
    outcome: TurnOutcome | None = None,
) -> list[Invocation]:
    """Return finished invocations of one model or of a variant's models, latest first."""
    rows = await conn.fetch(SELECT_CHOSEN_INVOCATIONS, outcome, model_id, variant, *page)
    return [Invocation(**row) for row in rows]


SELECT_TOOL_CALLS = f"""
SELECT {CALL_COLUMNS} FROM tool_calls WHERE invocation_id = ANY($1::uuid[]) ORDER BY invocation_id, number
"""  # noqa: S608 - a constant of this module


async def select_tool_calls(conn: Connection, invocation_ids: Sequence[UUID]) -> dict[UUID, list[ToolCall]]:
    """Return the tool calls per invocation, in order. Invocations without calls are absent."""
    return grouped([ToolCall(**row) for row in await conn.fetch(SELECT_TOOL_CALLS, invocation_ids)], _invocation_of)


SELECT_STEPS = f"""
SELECT {STEP_COLUMNS} FROM invocation_steps WHERE invocation_id = ANY($1::uuid[]) ORDER BY invocation_id, number
"""  # noqa: S608 - a constant of this module


async def select_steps(conn: Connection, invocation_ids: Sequence[UUID]) -> dict[UUID, list[Step]]:
    """Return the steps per invocation, in order. Invocations without steps are absent."""
    return grouped([Step(**row) for row in await conn.fetch(SELECT_STEPS, invocation_ids)], _invocation_of)


SELECT_FILLS = """
SELECT sequence, order_id, request_id, symbol, side, quantity, price, fee, liquidation_fee, maker, cause,
       created_at AS at
FROM fills
WHERE account_id = $1 AND sequence = ANY($2::bigint[])
ORDER BY sequence
"""


async def select_fills(conn: Connection, account_id: str, sequences: Sequence[int]) -> list[Fill]:
    """Return the fills of an account with these sequence numbers."""
    return [msgspec.convert({**row}, Fill) for row in await conn.fetch(SELECT_FILLS, account_id, sequences)]


SELECT_INVOCATIONS_WITHIN = f"""
SELECT {INVOCATION_COLUMNS} FROM invocations
WHERE model_id = $1 AND started_at >= $2 AND started_at <= $3 AND status <> 'running'
ORDER BY started_at
"""  # noqa: S608 - a constant of this module


async def select_invocations_within(
    conn: Connection, model_id: str, start: datetime, end: datetime
) -> list[Invocation]:
    """Return the finished invocations of a model that started in [start, end], earliest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_INVOCATIONS_WITHIN, model_id, start, end)]
