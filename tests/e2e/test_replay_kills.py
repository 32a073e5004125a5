"""kill -9 of a paced replay: it and its recording continue as if the process had never been killed.

REPLAY_KILL_ROUNDS sets the number of kills (3), and REPLAY_KILL_SEED the trades and times of the kills (random).
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random, SystemRandom

import aiohttp
import pytest
from support.kills import SIZES, Storm, acts_of_rows, carry_on, repeat, rows, settle, without_models, write_candles
from support.process import ServiceProcess
from support.run_profile import is_nightly
from support.waiting import becomes

from trader.database.pool import Database
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import Recorder
from trader.market.sources.replay import ReplaySource
from trader.portfolio.audit import audit

pytestmark = pytest.mark.processes

ROUNDS = int(os.environ.get("REPLAY_KILL_ROUNDS", "3"))
SEED = int(os.environ.get("REPLAY_KILL_SEED") or SystemRandom().randrange(10**6))
BEGIN = datetime(2025, 6, 2, 23, tzinfo=UTC)


class Bench:
    """A recorded, paced replay of random candles, the actions of its clients, and its database."""

    def __init__(self, folder: Path, dsn: str, database: Database, latency_ms: int) -> None:
        print(f"REPLAY_KILL_SEED={SEED}")
        self.folder = folder
        self.database = database
        self.rng, self.storm = Random(SEED), Storm()
        self.environ = {
            "DATABASE_URL": dsn,
            "MARKET_SOURCE": f"replay:{folder / 'candles'}",
            "SIM_SEED": "0",
            "REPLAY_SPEED": str(self.rng.choice((20, 60, 200))),
            "SIM_LATENCY_MS": str(latency_ms),
            "RECORD": str(folder / "recording"),
        }

    async def prepare(self) -> None:
        await write_candles(self.folder / "candles", SEED, BEGIN, hours=24)
        await without_models(self.database, BEGIN)

    async def start(self, http: aiohttp.ClientSession) -> ServiceProcess:
        return await ServiceProcess.start(self.folder, http, **self.environ)

    async def trade(self, service: ServiceProcess) -> None:
        """Trade until the service is killed."""
        await carry_on(service, self.storm, self.rng, self.rng.uniform(0.3, 2.0))

    async def verify(self) -> None:
        """Repeat the orders in unkilled runs, of the candles and of the recording, and compare their rows."""
        storm, database = self.storm, self.database
        assert storm.lived_twice == []
        assert (await audit(database)).problems == []
        source = ReplaySource(self.folder / "candles", list(SIZES))
        await source.open()
        latency_ms = self.environ["SIM_LATENCY_MS"]
        recorder = Recorder(self.folder / "recording", source)
        until = await settle(source, database, recorder, SIM_LATENCY_MS=latency_ms)
        result, timed = await rows(database), await acts_of_rows(database, storm.acts)
        recorded = RecordedSource(self.folder / "recording", list(SIZES))
        await recorded.open()
        for again in (source, recorded):
            async with database.connection() as conn:
                await conn.execute("TRUNCATE accounts, order_requests, service_state, last_marks CASCADE")
            await repeat(again, database, timed, BEGIN, until, SIM_LATENCY_MS=latency_ms)
            expected = await rows(database)
            for table, each in expected.items():  # printed first, so that pytest shows it if they differ
                print(table, *sorted(set(result[table]) ^ set(each))[:6], sep="\n  ")
            assert result == expected
        assert len(result["fills"]) > 3, "kills that met no trade prove nothing"
        assert until > BEGIN + timedelta(seconds=10)


@pytest.mark.parametrize("latency_ms", [0, 200] if is_nightly() else [200])
async def test_a_killed_replay_leaves_the_rows_of_an_unkilled_one(
    tmp_path: Path, dsn: str, database: Database, latency_ms: int
) -> None:
    bench = Bench(tmp_path, dsn, database, latency_ms)
    await bench.prepare()
    async with aiohttp.ClientSession() as http:
        for _ in range(ROUNDS):
            await bench.trade(await bench.start(http))
        service = await bench.start(http)
        assert await service.stop() == 0
        assert not service.traceback()
    await bench.verify()


async def test_a_standby_continues_a_replay_where_its_leader_was_killed(
    tmp_path: Path, dsn: str, database: Database
) -> None:
    bench = Bench(tmp_path, dsn, database, latency_ms=200 if is_nightly() else 0)
    await bench.prepare()
    async with aiohttp.ClientSession() as http:
        leader = await bench.start(http)
        for _ in range(max(1, ROUNDS // 3)):
            standby = await bench.start(http)
            assert await standby.role() == "standby"
            await bench.trade(leader)
            await becomes(standby.role, "leader")
            leader = standby
        await bench.trade(leader)
        assert not leader.traceback()
    await bench.verify()
