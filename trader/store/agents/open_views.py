"""SQL of the views that external agents have opened and not decided yet."""

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from trader.domain.agents.invocations import Invocation
from trader.store.database.pool import Connection


class OpenView(NamedTuple):
    """A view that is open. `shown` is the JSON of its messages, `pending` the order that was sent last."""

    invocation: Invocation
    deadline: datetime
    shown: str
    pending: dict[str, Any] | None


INSERT_OPEN_VIEW = "INSERT INTO open_views (invocation_id, deadline, shown) VALUES ($1, $2, $3)"


async def insert_open_view(conn: Connection, invocation_id: UUID, deadline: datetime, shown: str) -> None:
    """Insert the view of an invocation."""
    await conn.execute(INSERT_OPEN_VIEW, invocation_id, deadline, shown)


UPDATE_PENDING_ORDER = "UPDATE open_views SET pending = $2 WHERE invocation_id = $1"


async def update_pending_order(conn: Connection, invocation_id: UUID, pending: dict[str, Any]) -> None:
    """Record the order that is sent next."""
    await conn.execute(UPDATE_PENDING_ORDER, invocation_id, pending)


DELETE_OPEN_VIEWS = """
DELETE FROM open_views v USING invocations i WHERE i.id = v.invocation_id AND i.status <> 'running'
"""


async def delete_decided_views(conn: Connection) -> None:
    """Delete the views whose decisions have ended."""
    await conn.execute(DELETE_OPEN_VIEWS)


SELECT_OPEN_VIEWS = """
SELECT v.deadline, v.shown, v.pending, i.id, i.model_id, i.status, i.failure_reason, i.response, i.step_count,
       i.input_tokens, i.output_tokens, i.cost_usd, i.started_at, i.finished_at, i.entrant, i.unmetered_attempts,
       i.unpriced_steps
FROM open_views v JOIN invocations i ON i.id = v.invocation_id
WHERE i.status = 'running'
ORDER BY i.started_at
"""


async def select_open_views(conn: Connection) -> list[OpenView]:
    """Return the views that are open, the oldest first."""
    views = []
    for row in await conn.fetch(SELECT_OPEN_VIEWS):
        fields = dict(row)
        deadline, shown, pending = fields.pop("deadline"), fields.pop("shown"), fields.pop("pending")
        views.append(OpenView(Invocation(**fields), deadline, shown, pending))
    return views
