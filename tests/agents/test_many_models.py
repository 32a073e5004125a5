"""Twenty concurrent models on a slow provider, over real sockets, delay nothing else."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from msgspec.structs import replace
from support.loop_lag import LoopLag
from support.slow_provider import slow_provider
from support.trading_floor import Floor, open_floor

from trader.agents.providers.providers import make_providers
from trader.agents.schedule import InvocationScheduler
from trader.core.variant_id import VariantId
from trader.database.pool import Database, Page

MODELS = 20
HOLD_MS_MAX = 50


@asynccontextmanager
async def slow_floor(database: Database, step_s: float, **settings: str) -> AsyncIterator[Floor]:
    """A trading floor of twenty models of all variants, with a slow provider in another process."""
    async with (
        slow_provider(step_s) as url,
        open_floor(database, OPENAI_BASE_URL=url, MAX_PARALLEL_MODELS=str(MODELS), **settings) as floor,
    ):
        providers = make_providers(floor.settings)
        floor.agents = InvocationScheduler(replace(floor.services, providers=providers))
        for number in range(MODELS):
            await floor.add(f"m{number:02}", variant=list(VariantId)[number % 4], provider="openai")
        yield floor
        await providers.close()


async def test_the_loop_is_never_held_for_long(database: Database) -> None:
    async with slow_floor(database, 0.3) as floor:
        gc.collect()
        gc.freeze()  # as the service does once it has started
        began_s = monotonic()
        async with LoopLag() as lag:
            for _ in range(2):
                await floor.see()
                await floor.start_batch()
                await floor.idle()
        gc.unfreeze()
        assert monotonic() - began_s < 10, "they think at the same time, not one after the other"
        records = await floor.invocations.finished(page=Page(100))
        assert [record.invocation.status for record in records] == ["completed"] * 2 * MODELS
        assert {call.status for record in records for call in record.tool_calls} == {"ok"}
        assert len(floor.exchange.accounts) == MODELS
        async with database.connection() as conn:  # real time, though the market's clock stood still meanwhile
            assert await conn.fetchval("SELECT min(duration_ms) FROM invocation_steps") >= 300
    # Measured in the thread's own time, since the load of other processes says nothing about the service.
    assert max(lag.cpu_ms) < HOLD_MS_MAX


async def test_the_executor_keeps_its_interval_and_a_shutdown_is_prompt(database: Database) -> None:
    async with slow_floor(database, 30) as floor:
        await floor.see()
        for cycle in range(3):
            began_s = monotonic()
            await floor.start_batch()
            assert monotonic() - began_s < 2, "the executor does not wait for its models"
            assert len(floor.agents.running()) == MODELS
            assert floor.agents.skipped["running"] == cycle * MODELS
        await asyncio.sleep(0.5)  # their requests go out; it does not matter which ones did
        began_s = monotonic()
        await floor.agents.close()
        assert monotonic() - began_s < 2
        records = await floor.invocations.finished(page=Page(100))
        assert [record.invocation.failure_reason for record in records] == ["interrupted"] * MODELS
        assert not floor.agents.running()


@pytest.mark.parametrize("number", [7, 20])
async def test_a_failing_model_stops_no_other(database: Database, number: int) -> None:
    async with slow_floor(database, 0.05) as floor:
        async with database.connection() as conn:
            await conn.execute(
                "UPDATE models SET provider = 'nim' WHERE id < $1", f"m{number:02}"
            )  # not configured: every one of them fails
        await floor.see()
        await floor.start_batch()
        await floor.idle()
        records = await floor.invocations.finished(page=Page(100))
        statuses = sorted(record.invocation.status for record in records)
        assert statuses == ["completed"] * (MODELS - number) + ["failed"] * number
