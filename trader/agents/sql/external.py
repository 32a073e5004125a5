"""SQL of external agents: their open, undecided views, and the webhooks that receive views."""

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from trader.agents.domain.invocations import Invocation
from trader.agents.sql.invocations import INVOCATION_COLUMNS
from trader.database.leadership import HOLD_TERM
from trader.database.pool import Connection


class OpenView(NamedTuple):
    """An open view. `shown` is the JSON of its messages, `pending` the last order sent.

    `inputs` holds, as JSON, the data by which each call was judged.
    """

    invocation: Invocation
    deadline: datetime
    shown: str
    pending: dict[str, Any] | None
    inputs: list[str]


class Webhook(NamedTuple):
    """An agent's webhook address, and the secret that signs its calls."""

    url: str
    secret: str


INSERT_DECISION = f"""
WITH held AS ({HOLD_TERM}), opened AS (
    INSERT INTO invocations (id, model_id, status, started_at, entrant)
    SELECT $2, $3, 'running', $4, $5 FROM held
    ON CONFLICT (id) DO NOTHING
    RETURNING id
), shown AS (
    INSERT INTO open_views (invocation_id, deadline, shown) SELECT id, $6, $7 FROM opened
)
SELECT EXISTS (SELECT FROM held) AS is_leading, EXISTS (SELECT FROM opened) AS is_new
"""  # noqa: S608 - a constant of this package


async def insert_decision(
    conn: Connection, term: int | None, invocation: Invocation, deadline: datetime, shown: str
) -> tuple[bool, bool]:
    """Insert an invocation with its view. Return whether the term is current (otherwise nothing is inserted), and
    whether the invocation is new."""
    opened = invocation.id, invocation.model_id, invocation.started_at, invocation.entrant
    row = await conn.fetchrow(INSERT_DECISION, term, *opened, deadline, shown)
    assert row is not None, "it has no source of rows"
    return row["is_leading"], row["is_new"]


UPDATE_PENDING_ORDER = "UPDATE open_views SET pending = $2 WHERE invocation_id = $1"


async def update_pending_order(conn: Connection, invocation_id: UUID, pending: dict[str, Any]) -> None:
    """Record the order about to be sent."""
    await conn.execute(UPDATE_PENDING_ORDER, invocation_id, pending)


UPDATE_VIEW_INPUTS = "UPDATE open_views SET inputs = inputs || $2::text[] WHERE invocation_id = $1"


async def update_view_inputs(conn: Connection, invocation_id: UUID, inputs: list[str]) -> None:
    """Append, as JSON, the data by which further calls were judged."""
    await conn.execute(UPDATE_VIEW_INPUTS, invocation_id, inputs)


DELETE_OPEN_VIEWS = """
DELETE FROM open_views v USING invocations i WHERE i.id = v.invocation_id AND i.status <> 'running'
"""


async def delete_decided_views(conn: Connection) -> None:
    """Delete the views of finished decisions."""
    await conn.execute(DELETE_OPEN_VIEWS)


SELECT_OPEN_VIEWS = f"""
SELECT {INVOCATION_COLUMNS}, deadline, shown, pending, inputs
FROM open_views JOIN invocations ON id = invocation_id
WHERE status = 'running'
ORDER BY started_at
"""  # noqa: S608 - a constant of this package


async def select_open_views(conn: Connection) -> list[OpenView]:
    """Return the open views, oldest first."""
    views = []
    for row in await conn.fetch(SELECT_OPEN_VIEWS):
        fields = dict(row)
        own = {name: fields.pop(name) for name in OpenView._fields[1:]}
        views.append(OpenView(Invocation(**fields), **own))
    return views


SELECT_WEBHOOKS = "SELECT model_id, url, secret FROM webhooks ORDER BY model_id"


async def select_webhooks(conn: Connection) -> dict[str, Webhook]:
    """Return the webhooks by agent id."""
    return {row["model_id"]: Webhook(row["url"], row["secret"]) for row in await conn.fetch(SELECT_WEBHOOKS)}


UPSERT_WEBHOOK = """
INSERT INTO webhooks (model_id, url, secret) VALUES ($1, $2, $3)
ON CONFLICT (model_id) DO UPDATE SET url = excluded.url, secret = excluded.secret
"""


async def upsert_webhook(conn: Connection, model_id: str, webhook: Webhook) -> None:
    await conn.execute(UPSERT_WEBHOOK, model_id, webhook.url, webhook.secret)


DELETE_WEBHOOKS = "DELETE FROM webhooks WHERE model_id = coalesce($1, model_id)"


async def delete_webhooks(conn: Connection, model_id: str | None = None) -> None:
    """Delete the webhook of an agent, if it has one, or those of all agents (None)."""
    await conn.execute(DELETE_WEBHOOKS, model_id)
