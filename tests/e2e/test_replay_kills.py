"""kill -9 of a paced replay: it goes on where its books are, as if it had never been killed.

REPLAY_KILL_ROUNDS sets how often it is killed (3), REPLAY_KILL_SEED what is traded and when it is killed (drawn).
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random, SystemRandom

import aiohttp
import pytest
from support.kills import SIZES, Storm, acts_of_rows, carry_on, repeat, rows, settle, without_models, write_candles
from support.process import ServiceProcess

from trader.gateways.market.replay import ReplaySource
from trader.services.exchange.audit import audit
from trader.store.database.pool import Database

ROUNDS = int(os.environ.get("REPLAY_KILL_ROUNDS", "3"))
SEED = int(os.environ.get("REPLAY_KILL_SEED") or SystemRandom().randrange(10**6))
BEGIN = datetime(2025, 6, 2, 23, tzinfo=UTC)


@pytest.mark.parametrize("latency_ms", [0, 200])
async def test_a_killed_replay_leaves_the_rows_of_one_never_killed(
    tmp_path: Path, dsn: str, database: Database, latency_ms: int
) -> None:
    print(f"REPLAY_KILL_SEED={SEED}")
    rng, storm = Random(SEED), Storm()
    folder = tmp_path / "candles"
    await write_candles(folder, SEED, BEGIN, hours=24)
    await without_models(database, BEGIN)
    environ = {
        "DATABASE_URL": dsn,
        "MARKET_SOURCE": f"replay:{folder}",
        "REPLAY_SPEED": str(rng.choice((20, 60, 200))),
        "SIM_LATENCY_MS": str(latency_ms),
    }
    async with aiohttp.ClientSession() as http:
        for _ in range(ROUNDS):
            service = await ServiceProcess.start(tmp_path, http, **environ)
            await carry_on(service, storm, rng, rng.uniform(0.3, 2.0))
        service = await ServiceProcess.start(tmp_path, http, **environ)
        assert await service.stop() == 0
        assert not service.traceback()
    assert storm.lived_twice == []
    assert (await audit(database)).problems == []
    source = ReplaySource(folder, list(SIZES))
    await source.open()
    until = await settle(source, database)
    found, timed = await rows(database), await acts_of_rows(database, storm.acts)
    async with database.connection() as conn:
        await conn.execute("TRUNCATE accounts, order_requests, service_state, last_marks CASCADE")
    await repeat(source, database, timed, BEGIN, until)
    expected = await rows(database)
    for table, each in expected.items():  # printed first: pytest shows it when they differ
        print(table, *sorted(set(found[table]) ^ set(each))[:6], sep="\n  ")
    assert found == expected
    assert len(expected["fills"]) > 10 * ROUNDS
    assert until > BEGIN + timedelta(seconds=10)
