"""Counts of invocations are updated as they happen, and equal the counted rows."""

from datetime import timedelta
from uuid import UUID

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records import (
    HOUR,
    MINUTE,
    START,
    add_invocation,
    add_model,
    add_run,
    add_tool_call,
    id_of,
    make_model,
    make_run,
)

from trader.agents.domain.invocations import InvocationStatus, ToolCallStatus
from trader.agents.sql import invocations as agents_store
from trader.agents.sql.models import upsert_model
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Database, Page
from trader.database.schema import apply_schema
from trader.portfolio.sql import analytics as store

MODELS = ("one", "two", "homeless")

statuses = st.sampled_from(["running", "completed", "failed", "timeout"])
calls = st.lists(st.sampled_from(["ok", "rejected", "failed"]), max_size=3).map(tuple)
invocations = st.lists(
    st.tuples(st.sampled_from(MODELS), st.integers(-30, 200), statuses, calls, calls),
    max_size=20,
    unique_by=lambda each: each[:2],
)

PLAIN_COUNTS = """
SELECT i.model_id, r.number, count(*), count(*) FILTER (WHERE i.status <> 'completed'),
       count(*) FILTER (WHERE i.status = 'completed' AND EXISTS (
           SELECT FROM tool_calls t WHERE t.invocation_id = i.id AND t.status = 'failed'))
FROM invocations i
CROSS JOIN LATERAL (
    SELECT coalesce(max(number), 0) AS number FROM runs WHERE account_id = i.model_id AND started_at <= i.started_at
) r
WHERE i.status <> 'running'
GROUP BY i.model_id, r.number
ORDER BY i.model_id, r.number
"""
KEPT_COUNTS = """
SELECT model_id, run_number, finished, failed, tool_failed FROM invocation_counts
WHERE finished > 0 ORDER BY model_id, run_number
"""
PLAIN_FAILURES = """
SELECT i.id FROM invocations i
WHERE i.status IN ('failed', 'timeout') OR (i.status = 'completed' AND EXISTS (
    SELECT FROM tool_calls t WHERE t.invocation_id = i.id AND t.status = 'failed'))
ORDER BY i.started_at DESC, i.id
"""


async def _add_models(conn: Connection) -> None:
    for model_id in MODELS[:2]:
        await add_model(conn, model_id, VariantId.SOVEREIGN)
        await add_run(conn, model_id, make_run(model_id, 2, at=START + HOUR))
    await upsert_model(conn, make_model("homeless"))


async def _record(
    conn: Connection,
    model_id: str,
    minute: int,
    status: InvocationStatus,
    during: tuple[ToolCallStatus, ...],
    afterwards: tuple[ToolCallStatus, ...],
) -> None:
    at = START + minute * MINUTE
    invocation_id = await add_invocation(conn, model_id, at, status, calls=during)
    for number, call_status in enumerate(afterwards, start=len(during) + 1):
        await add_tool_call(conn, invocation_id, number, call_status, at)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(recorded=invocations, limit=st.integers(1, 8), interrupt=st.booleans())
async def test_stored_counts_and_failures_equal_the_counted_rows(
    database: Database,
    recorded: list[tuple[str, int, InvocationStatus, tuple[ToolCallStatus, ...], tuple[ToolCallStatus, ...]]],
    limit: int,
    interrupt: bool,
) -> None:
    async with database.connection() as conn:
        rolled_back = conn.transaction()
        await rolled_back.start()
        try:
            await _add_models(conn)
            for each in recorded:
                await _record(conn, *each)
            if interrupt:
                await agents_store.update_interrupted(conn, "interrupted", START + 300 * MINUTE)
            kept = [tuple(row) for row in await conn.fetch(KEPT_COUNTS)]
            plain = [tuple(row) for row in await conn.fetch(PLAIN_COUNTS)]
            failed_ids = [row["id"] for row in await conn.fetch(PLAIN_FAILURES)]
            latest = await store.select_failures(conn, Page(limit))
            of_two = await store.select_model_failures(conn, ["one", "homeless"], Page(limit))
            current = await store.select_current_runs(conn)
        finally:
            await rolled_back.rollback()
    assert kept == plain
    assert [entry.id for entry in latest] == failed_ids[:limit]
    ours = {id_of("invocation", name, START + minute * MINUTE) for name, minute, *_ in recorded if name != "two"}
    assert [trade.id for trade in of_two] == [each for each in failed_ids if each in ours][:limit]
    counts: dict[tuple[str, int], list[int]] = {(name, number): rest for name, number, *rest in plain}
    assert {
        name: [run.totals.finished, run.totals.failed, run.totals.tool_failed] for name, run in current.items()
    } == {name: counts.get((name, 2), [0, 0, 0]) for name in MODELS[:2]}


async def test_copied_rows_count_too(database: Database) -> None:
    columns = ("id", "model_id", "status", "failure_reason", "started_at", "finished_at")
    rows: list[tuple[UUID, str, str, str | None, object, object]] = [
        (id_of(number), "one", "failed" if number % 3 == 0 else "completed", "no" if number % 3 == 0 else None,
         START + number * MINUTE, START + number * MINUTE)
        for number in range(3_000)
    ]  # fmt: skip
    async with database.connection() as conn:
        await _add_models(conn)
        await conn.copy_records_to_table("invocations", records=rows, columns=columns)
        kept = [tuple(row) for row in await conn.fetch(KEPT_COUNTS)]
    assert kept == [("one", 1, 60, 20, 0), ("one", 2, 2940, 980, 0)]


async def test_an_invocation_stays_in_the_run_in_which_it_started(database: Database) -> None:
    """An invocation belongs to the run in which it started, regardless of later events."""
    async with database.connection() as conn:
        await add_model(conn, "one")
        at = START + 59 * MINUTE
        invocation_id = await add_invocation(conn, "one", at, "running")
        await add_run(conn, "one", make_run("one", 2, at=START + HOUR))
        await conn.execute(
            "UPDATE invocations SET status = 'completed', finished_at = $2 WHERE id = $1",
            invocation_id,
            at + timedelta(minutes=5),
        )
        assert [tuple(row) for row in await conn.fetch(KEPT_COUNTS)] == [("one", 1, 1, 0, 0)]


async def test_applying_the_schema_again_counts_nothing_twice(database: Database) -> None:
    await apply_schema(database)
    async with database.connection() as conn:
        await add_model(conn, "one")
        await add_invocation(conn, "one", START, "failed", calls=("failed",))
        assert [tuple(row) for row in await conn.fetch(KEPT_COUNTS)] == [("one", 1, 1, 1, 0)]
