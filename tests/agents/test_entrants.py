"""Entrants of the models: every invocation names its own, and any change of its configuration begins the next one."""

import asyncio
from datetime import timedelta
from decimal import Decimal

from msgspec.structs import replace
from support.trading_floor import Floor, hold, hold_after, open_floor
from support.waiting import until

from trader.agents.domain.entrants import Entrant
from trader.agents.domain.models import ModelConfiguration
from trader.agents.schedule import InvocationScheduler
from trader.agents.sql.entrants import select_entrants
from trader.core.errors import ProviderError
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.portfolio.sql.analytics import select_run_entrants


async def _entrants(database: Database) -> list[Entrant]:
    async with database.connection() as conn:
        return [*(await select_entrants(conn)).values()]


async def _numbers(floor: Floor) -> list[int | None]:
    """The entrants of one model's invocations, the first one first."""
    return [invocation.invocation.entrant for invocation in reversed(await floor.invocations.finished())]


async def test_the_same_configuration_stays_one_entrant_across_restarts(database: Database) -> None:
    for started_s in (0, 120):
        async with open_floor(database) as floor:
            await floor.clock.advance(timedelta(seconds=started_s))
            await floor.add("ada", variant=VariantId.SOVEREIGN)
            await floor.agents.start()
            await floor.cycle()
            await floor.cycle()
            numbers = await _numbers(floor)
    (entrant,) = await _entrants(database)
    assert numbers == [1, 1, 1, 1]
    assert (entrant.number, entrant.answered_by) == (1, "fake/one")


async def test_an_entrant_of_another_leader_goes_on_in_the_next_term(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("ada")
        await floor.cycle()
        await floor.agents.close()
        other = InvocationScheduler(floor.services)
        await other.start()
        for answer in (replace(hold(), model="another"), hold()):
            floor.provider.scripts["ada"] = [answer]
            await floor.see()
            await other.start_batch(floor.clock.now())
            await until(lambda: not other.running())
        await floor.agents.start()
        await floor.cycle()
        assert await _numbers(floor) == [1, 2, 3, 3]


async def test_a_changed_setting_or_variant_begins_the_next_entrant(database: Database) -> None:
    for number, (tokens, variant) in enumerate([("8192", "Apex"), ("4096", "Apex"), ("4096", "Contrarian")]):
        async with open_floor(database, ANSWER_TOKENS_MAX=tokens) as floor:
            await floor.clock.advance(timedelta(seconds=60 * number))
            await floor.add("ada", variant=VariantId(variant))
            await floor.agents.start()
            await floor.cycle()
            numbers = await _numbers(floor)
            last = floor.models.by_id["ada"]
    assert numbers == [1, 2, 3]
    entrants = await _entrants(database)
    assert [entrant.number for entrant in entrants] == [1, 2, 3]
    assert len({entrant.fingerprint for entrant in entrants}) == 3
    assert [entrant.began_at for entrant in entrants] == sorted({entrant.began_at for entrant in entrants})
    assert last.variant.value in (entrants[2].configuration or "")


async def test_another_answering_model_begins_the_next_entrant(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    floor.provider.scripts["ada"] = [replace(hold(), model="fake/one-2026")]
    await floor.cycle()
    await floor.cycle()
    assert await _numbers(floor) == [1, 2, 2]
    assert [entrant.answered_by for entrant in await _entrants(floor.database)] == ["fake/one", "fake/one-2026"]


async def test_failures_before_the_first_answer_belong_to_the_entrant_that_answers_later(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [ProviderError("out of credit")]
    await floor.cycle()
    (unanswered,) = await _entrants(floor.database)
    assert unanswered.answered_by is None
    floor.provider.scripts["ada"] = [hold()]
    await floor.cycle()
    (answered,) = await _entrants(floor.database)
    assert await _numbers(floor) == [1, 1]
    assert answered.answered_by == "fake/one"
    assert answered.fingerprint != unanswered.fingerprint


async def test_the_counts_are_kept_per_entrant(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    floor.provider.scripts["ada"] = [ProviderError("no answer")]
    await floor.cycle()
    floor.provider.scripts["ada"] = [replace(hold(), model="other")]
    await floor.cycle()
    async with floor.database.connection() as conn:
        rows = await conn.fetch("SELECT entrant, finished, failed FROM invocation_counts WHERE finished > 0 ORDER BY 1")
    assert [tuple(row) for row in rows] == [(1, 2, 1), (2, 1, 0)]


async def test_cycles_count_as_decided_or_missed_across_restarts(database: Database) -> None:
    thinking = asyncio.Event()

    for started_s in (0, 300):
        thinking.clear()
        async with open_floor(database) as floor:
            await floor.clock.advance(timedelta(seconds=started_s))
            await floor.add("ada")
            await floor.agents.start()
            await floor.cycle()
            floor.provider.scripts["ada"] = [hold_after(thinking)]
            await floor.see()
            await floor.start_batch()
            await floor.start_batch()  # it still runs
            thinking.set()
            await floor.idle()
            floor.provider.scripts["ada"] = [ProviderError("no answer")]
            await floor.cycle()
    async with database.connection() as conn:
        record = (await select_run_entrants(conn))[-1].record
    assert (record.number, record.cycles_decided, record.cycles_due) == (1, 4, 8)


async def test_a_cycle_is_due_by_the_cadence_even_when_the_budget_is_spent(floor: Floor) -> None:
    await floor.add("ada")
    async with floor.database.connection() as conn:
        await conn.execute(
            """UPDATE models SET configuration = '{"every": "5m", "budget_usd_per_day": 1, "when_spent": "pause"}'"""
        )
    floor.provider.scripts["ada"] = [replace(hold(), cost_usd=Decimal(1))]
    for _ in range(16):
        await floor.cycle(after_s=60)
    async with floor.database.connection() as conn:
        record = (await select_run_entrants(conn))[-1].record
    assert (record.cycles_decided, record.cycles_due) == (1, 3)


async def test_a_field_refused_by_the_provider_begins_the_next_entrant(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    floor.provider.refused_fields = {"ada": ["temperature"]}
    await floor.cycle()
    await floor.cycle()
    assert await _numbers(floor) == [1, 2, 2]


async def test_a_queued_model_dropped_by_a_shared_budget_has_missed_its_cycle(database: Database) -> None:
    settings = {"AI_BUDGET_USD_PER_DAY": "1", "MAX_PARALLEL_MODELS": "1"}
    async with open_floor(database, **settings) as floor:
        paused = ModelConfiguration(when_spent="pause")
        await floor.add("ada", "bob", router_model="lab/one", configuration=paused)
        await floor.agents.start()
        floor.provider.scripts["ada"] = [replace(hold(), cost_usd=Decimal(1))]
        for _ in range(2):
            await floor.cycle(after_s=60)
        assert [turn.model.id for turn in floor.provider.turns] == ["ada"]
        async with database.connection() as conn:
            entrants = await select_run_entrants(conn)
    cycles = {each.model_id: (each.record.cycles_decided, each.record.cycles_due) for each in entrants}
    assert cycles == {"ada": (1, 2), "bob": (0, 2)}
