"""SQL for the history of alarms and for the last recorded backup, audit and verification."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from trader.database.pool import Connection
from trader.operations.domain.alarms import Notice

MaintenanceTask = Literal["backup", "audit", "verify"]


class PastAlarm(NamedTuple):
    """A notice of the past, and the process that reported it."""

    at: datetime
    since: datetime
    sender: str
    state: str
    cause: str
    subject: str
    message: str
    impact: str


INSERT_ALARM = """
WITH outdated AS (DELETE FROM alarm_history WHERE at < now() - interval '90 days')
INSERT INTO alarm_history (at, since, sender, state, cause, subject, message, impact)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
"""


async def insert_alarm(conn: Connection, notice: Notice, sender: str) -> None:
    """Add a notice to the history, and drop those that are older than 90 days."""
    values = (notice.at, notice.since, sender, notice.state, *notice.cause, notice.text, notice.impact)
    await conn.execute(INSERT_ALARM, *values)


SELECT_ALARMS = """
SELECT at, since, sender, state, cause, subject, message, impact FROM alarm_history WHERE at >= $1 ORDER BY at, id
"""


async def select_alarms(conn: Connection, since: datetime) -> list[PastAlarm]:
    """Return the notices since a time, oldest first."""
    return [PastAlarm(**row) for row in await conn.fetch(SELECT_ALARMS, since)]


SELECT_LAST_STATES = """
SELECT DISTINCT ON (cause, subject) cause, subject, state FROM alarm_history ORDER BY cause, subject, id DESC
"""


async def select_last_states(conn: Connection) -> dict[tuple[str, str], str]:
    """Return the state in the last notice of each cause and subject."""
    return {(row["cause"], row["subject"]): row["state"] for row in await conn.fetch(SELECT_LAST_STATES)}


UPSERT_MAINTENANCE = """
INSERT INTO maintenance AS m (task, succeeded_at, problems)
VALUES ($1, CASE WHEN $2::integer = 0 THEN now() END, $2::integer)
ON CONFLICT (task) DO UPDATE
SET ran_at = now(), succeeded_at = coalesce(excluded.succeeded_at, m.succeeded_at), problems = excluded.problems
"""


async def upsert_maintenance(conn: Connection, task: MaintenanceTask, problems: int) -> None:
    """Record that a task has run now, and how many problems it found; without any, it has succeeded."""
    await conn.execute(UPSERT_MAINTENANCE, task, problems)


class MaintenanceRun(NamedTuple):
    """The last recorded run of a task. `success_age_s` is the age of the last success; None without one."""

    task: MaintenanceTask
    success_age_s: float | None
    problems: int


SELECT_MAINTENANCE = """
SELECT task, extract(epoch FROM now() - succeeded_at)::float8 AS success_age_s, problems FROM maintenance ORDER BY task
"""


async def select_maintenance(conn: Connection) -> Sequence[MaintenanceRun]:
    """Return the last recorded run of each task."""
    return [MaintenanceRun(**row) for row in await conn.fetch(SELECT_MAINTENANCE)]
