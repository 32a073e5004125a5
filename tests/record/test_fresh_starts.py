"""Fresh starts with writers at the same time: the verification finds nothing in a correct record.

`scripts/test` tries a few, `HYPOTHESIS_PROFILE=nightly scripts/test tests/record/test_fresh_starts.py` a thousand.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest
from msgspec.structs import replace
from support.run_profile import is_nightly
from support.trading_floor import Floor, calling, hold, opening

from trader.agents.entrants import Entrants
from trader.agents.sql.models import select_models
from trader.agents.verification import verify
from trader.exchange.domain.halts import Halt, HaltCause
from trader.exchange.sql.halts import insert_halt, update_halts_lifted
from trader.portfolio.domain.seasons import SeasonRecord
from trader.portfolio.sql.seasons import insert_season_record
from trader.record.results import record_results

STARTS = 1_000 if is_nightly() else 4
TURNS = 4
"""How often each writer writes."""


async def _record(floor: Floor) -> None:
    assert floor.exchange.term is not None
    await record_results(floor.database, floor.exchange.term, floor.clock.now())


async def _halt_and_resume(floor: Floor) -> None:
    halt = Halt(account_id="bob", cause=HaltCause.OPERATOR, reason="lunch", by="eve", at=floor.clock.now())
    async with floor.database.transaction() as conn:
        await insert_halt(conn, halt)
    async with floor.database.transaction() as conn:
        await update_halts_lifted(conn, "bob", "eve")


async def _miss_cycles(floor: Floor) -> None:
    async with floor.database.connection() as conn:
        models = await select_models(conn)
    await Entrants(floor.database, floor.settings).count_missed(models, floor.clock.now())


async def _reset(floor: Floor) -> None:
    await floor.exchange.reset_account("bob")


async def _amend(floor: Floor) -> None:
    async with floor.database.transaction() as conn:
        number = await conn.fetchval("SELECT count(*) FROM season_records")
        record = SeasonRecord(step="amended", season=1, number=number, at=floor.clock.now(), reason="rain")
        await insert_season_record(conn, record)


WRITERS: list[Callable[[Floor], Awaitable[None]]] = [_halt_and_resume, _miss_cycles, _reset, _amend, Floor.start_batch]


@pytest.mark.parametrize("start", range(STARTS))
async def test_a_fresh_start_with_writers_is_verified(floor: Floor, start: int) -> None:
    rng = Random(start)
    await floor.add("ada", "bob")
    named = replace(calling(opening()), model="lab/one")
    floor.provider.scripts = {"ada": [named, hold()], "bob": [hold()]}

    async def repeat(write: Callable[[Floor], Awaitable[None]]) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(rng.random() * 0.01)  # the writers overlap differently in every start
            await write(floor)

    await asyncio.gather(*map(repeat, [_record, *WRITERS]))
    await floor.idle()
    await _record(floor)
    report = await verify(floor.database, [])
    assert (list(report.findings), report.has_results, report.waiting) == ([], True, 0)
    assert report.links > 0, "models have decided meanwhile"
