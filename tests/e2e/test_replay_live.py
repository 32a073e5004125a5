"""Lockstep replay of an hour of real candles, at night a day, by the rule agents: clean books, equal rows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from support.candles import write_part
from support.lockstep import replay
from support.run_profile import is_nightly

from trader.core.clock import iso
from trader.database.pool import Database
from trader.portfolio.audit import audit

pytestmark = pytest.mark.processes

BEGIN, MINUTES, LEAST = (
    (datetime(2025, 1, 15, tzinfo=UTC), 24 * 60, 20)
    if is_nightly()
    else (datetime(2025, 1, 15, 12, 30, tzinfo=UTC), 70, 1)
)
"""Where it begins, how long it is, and how many rows at least each table has afterward.

The hour ends with the news of 13:30 UTC, whose moves reach stops and targets.
"""

END = BEGIN + timedelta(minutes=MINUTES)
CYCLES = MINUTES + 1
"""One a minute, the first and the last moment included."""

TABLES = {
    **dict.fromkeys(
        (
            "orders", "fills", "funding_payments", "limit_orders", "order_requests", "insurance_payments", "runs",
            "accounts", "models", "invocations", "tool_calls", "portfolio_snapshots", "portfolio_hourly",
            "variant_hourly", "invocation_counts", "last_marks", "invocation_payloads",
        ),
        "t.*",
    ),
    # Only the real duration of a step may differ.
    "invocation_steps": "t.invocation_id, t.number, t.provider, t.key_number, t.model, t.tool_names, t.input_tokens, "
    "t.output_tokens, t.cost_usd, t.created_at",
}  # fmt: skip
"""What of each table must be the same in every run."""


@asynccontextmanager
async def copied(dsn: str) -> AsyncIterator[str]:
    """A second fresh database, in addition to the fixture's."""
    address, _, rest = dsn.partition("?")
    server, _, name = address.rpartition("/")
    twin = f"{name}_twin"

    async def administer(command: str) -> None:
        conn = await asyncpg.connect(f"{server}/postgres?{rest}")
        try:
            await conn.execute(command)
        finally:
            await conn.close()

    await administer(f"CREATE DATABASE {twin} TEMPLATE {name}")
    try:
        yield f"{server}/{twin}?{rest}"
    finally:
        await administer(f"DROP DATABASE {twin} WITH (FORCE)")


async def rows(dsn: str) -> dict[str, list[str]]:
    """Every row of every table as text, sorted."""
    conn = await asyncpg.connect(dsn)
    try:
        return {
            table: [
                row[0] for row in await conn.fetch(f"SELECT x::text FROM (SELECT {what} FROM {table} t) x ORDER BY 1")
            ]
            for table, what in TABLES.items()
        }
    finally:
        await conn.close()


@pytest.fixture(scope="module")
def some_days(tmp_path_factory: pytest.TempPathFactory, candles: Path) -> Path:
    """Candles of the replayed period, and of the day before it for the indicators."""
    return write_part(tmp_path_factory.mktemp("some") / "days", candles, BEGIN - timedelta(days=1), END)


async def test_a_recorded_period_of_rule_agents_replays_to_the_same_rows(
    tmp_path: Path, dsn: str, some_days: Path
) -> None:
    """They decide again, on the recorded books, candles and rates."""
    begin, end = iso(datetime(2025, 1, 15, 13, 0 if is_nightly() else 25, tzinfo=UTC)), "2025-01-15T13:37:00.000Z"
    async with copied(dsn) as twin:
        await replay(tmp_path / "live", dsn, some_days, begin, end, RECORD=str(tmp_path / "recording"))
        # It begins and ends where the recording does.
        await replay(tmp_path / "again", twin, tmp_path / "recording", begin, end, REPLAY_START="", REPLAY_END="")
        live, again = await rows(dsn), await rows(twin)
    for table in TABLES:
        assert live[table] == again[table], table
    for table in ("fills", "tool_calls", "invocation_payloads"):
        assert live[table], table


async def test_two_replays_have_clean_books_and_the_same_rows(tmp_path: Path, dsn: str, some_days: Path) -> None:
    async with copied(dsn) as twin:
        await asyncio.gather(
            *(
                replay(tmp_path / name, each, some_days, iso(BEGIN), iso(END))
                for name, each in (("first", dsn), ("second", twin))
            )
        )
        first, second = await rows(dsn), await rows(twin)
        for table in TABLES:
            assert first[table] == second[table], table
        assert len(first["invocations"]) == 4 * CYCLES
        assert 4 * CYCLES < len(first["invocation_steps"]) <= 2 * 4 * CYCLES, (
            "orders and holding are steps of their own"
        )
        acted = ("orders", "fills", "funding_payments", "order_requests", "tool_calls", "invocation_payloads")
        for table in (*acted, "portfolio_hourly"):
            assert len(first[table]) > LEAST, table
        database = await Database.connect(dsn, size=1)
        try:
            report = await audit(database)
        finally:
            await database.close()
        assert report.problems == []
        assert (report.runs, report.orders) == (4, len(first["orders"]))
