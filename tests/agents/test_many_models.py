"""Many concurrent models delay nothing else: twenty over real sockets, two hundred on a pool of two connections."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from time import monotonic

import pytest
from msgspec.structs import replace
from support.loop_lag import LoopLag
from support.trading_floor import Floor, calling, hold, open_floor, opening
from support.trading_provider import call, trading_provider
from support.trading_provider import opening as plan

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.providers.providers import make_providers
from trader.agents.schedule import InvocationScheduler
from trader.core.variant_id import VariantId
from trader.database import pool
from trader.database.pool import Database, Page

MODELS = 20
HOLD_MS_MAX = 50


@asynccontextmanager
async def slow_floor(database: Database, step_s: float, **settings: str) -> AsyncIterator[Floor]:
    """A trading floor of twenty models of all variants, with a slow provider in another thread."""
    with trading_provider() as provider:
        provider.delays_s = {f"lab/m{number:02}": step_s for number in range(MODELS)}
        provider.always = [
            call(1, "fetchIndicators", symbol="BTC", interval="1m"),
            call(2, "createPosition", **plan("SOL", 0.5)),
        ]
        place = {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "sk-any-0001", "MAX_PARALLEL_MODELS": str(MODELS)}
        async with open_floor(database, **place, **settings) as floor:
            providers = make_providers(floor.settings)
            floor.agents = InvocationScheduler(replace(floor.services, providers=providers))
            for number in range(MODELS):
                await floor.add(f"m{number:02}", variant=list(VariantId)[number % 4], provider="openai")
            yield floor
            await providers.close()


@pytest.mark.slow
async def test_the_loop_is_never_held_for_long(database: Database) -> None:
    async with slow_floor(database, 0.3) as floor:
        gc.collect()
        gc.freeze()  # as the service does once it has started
        began_s = monotonic()
        async with LoopLag() as lag:
            for _ in range(2):
                await floor.cycle()
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_two_hundred_models_wait_for_two_connections(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone else gives up after a twentieth of a second; every model gets a connection after all."""
    monkeypatch.setattr(pool, "ACQUIRE_TIMEOUT_S", 0.05)
    database, names = await Database.connect(dsn, size=2), [f"m{number:03}" for number in range(200)]
    async with open_floor(database, limit_s=120, MAX_PARALLEL_MODELS="200") as floor:
        await floor.add(*names)
        floor.provider.is_remote = False  # it reads no prompts, whose making takes most of an invocation's time
        floor.provider.scripts = {name: [calling(opening(quantity=0.01)), hold()] for name in names[::10]}
        records = await floor.cycle()
        assert await database.ping() > 0
    await database.close()
    assert [record.model.id for record in records] == names
    assert {record.invocation.failure_reason for record in records} == {None}
    calls = [call for record in records for call in record.tool_calls]
    assert {(call.type, call.status) for call in calls} == {("CREATE_POSITION", "ok"), ("HOLDING", "ok")}, calls


async def test_a_paid_answer_waits_for_a_connection(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ACQUIRE_TIMEOUT_S", 0.02)
    database, taken = await Database.connect(dsn, size=2), asyncio.Event()

    async def take() -> None:
        async with database.connection(), database.connection():
            taken.set()
            await asyncio.sleep(0.1)  # five times as long as anyone else would wait

    async def answer(_: Turn) -> ModelAnswer:
        tasks.append(asyncio.create_task(take(), context=Context()))
        await taken.wait()
        return calling(opening())

    tasks: list[asyncio.Task[None]] = []
    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [answer, hold()]
        (record,) = await floor.cycle()
        await asyncio.gather(*tasks)
        assert set(floor.exchange.account("ada").positions) == {"BTC"}
    await database.close()
    assert record.invocation.status == "completed", record.invocation.failure_reason
    assert [call.status for call in record.tool_calls] == ["ok", "ok"]
