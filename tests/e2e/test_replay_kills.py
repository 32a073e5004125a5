"""kill -9 of a paced replay: it and its recording continue as if the process had never been killed.

REPLAY_KILL_ROUNDS sets the number of kills (3), and REPLAY_KILL_SEED the trades and times of the kills (random).
"""

import asyncio
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import aiohttp
import pytest
from support.kills import ACCOUNTS, SIZES, Act, acts_of_rows, repeat, rows, settle, write_candles
from support.process import ServiceProcess
from support.run_profile import is_nightly
from support.waiting import becomes

from trader.agents.domain.models import Model
from trader.agents.sql.models import upsert_model
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import Recorder
from trader.market.sources.replay import ReplaySource
from trader.portfolio.audit import audit


def order_at_random(rng: Random, prices: dict[str, float]) -> dict[str, Any]:
    """Return mostly limit orders so near the price that a book of the next minutes fills them, or a recent one did."""
    symbol, side = rng.choice(list(SIZES)), rng.choice(["buy", "sell"])
    order: dict[str, Any] = {
        "symbol": symbol, "side": side, "quantity": SIZES[symbol] * rng.choice([0.2, 1, 3]), "leverage": 10,
        "reduceOnly": rng.random() < 0.15,
    }  # fmt: skip
    sign = 1 if side == "buy" else -1
    if rng.random() < 0.7:
        order |= {"type": "limit", "limitPrice": prices[symbol] * (1 - sign * rng.uniform(-0.0001, 0.0015))}
    elif rng.random() < 0.7:
        away = prices[symbol] * rng.uniform(0.0005, 0.003)
        order["exitPlan"] = {"stop": prices[symbol] - sign * away, "target": prices[symbol] + sign * away}
    return order


@dataclass
class Storm:
    """The requests and observations of clients, across all lives of the service."""

    acts: list[Act] = field(default_factory=list)
    resting: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Account and id of the orders that were left resting, by the number of the act."""
    seen_until: str = ""
    """The latest market time seen by any observer."""
    lived_twice: list[tuple[str, str]] = field(default_factory=list)
    """Times of the market at a start that were not later than what had been seen before."""


async def _watch(service: ServiceProcess, storm: Storm) -> None:
    while True:
        _, report = await service.get("/health/schedulers")
        storm.seen_until = max(storm.seen_until, report["market"]["lastUpdateAt"] or "")


async def _trade(service: ServiceProcess, storm: Storm, account_id: str, rng: Random) -> None:
    while True:
        prices = {
            price["symbol"]: price["price"] for price in (await service.call("trading.getCryptoPrices"))["prices"]
        }
        number = len(storm.acts)
        resting = [entry for entry, (owner, _) in storm.resting.items() if owner == account_id]
        if resting and rng.random() < 0.1:
            cancelled = rng.choice(resting[-5:])
            storm.acts.append(Act(account_id, number, {}, cancelled))
            order_id = storm.resting[cancelled][1]
            await service.try_call("simulator.cancelOrder", accountId=account_id, orderId=order_id)
            continue
        order = order_at_random(rng, prices)
        storm.acts.append(Act(account_id, number, order))
        status, body = await service.try_call(
            "simulator.placeOrder", accountId=account_id, clientOrderId=str(number), **order
        )
        if status == 503:  # the database has not yet noticed that the killed process is gone, so this one stands by
            await asyncio.sleep(0.05)
            continue
        assert status == 200, (status, body)
        if body["order"]["status"] == "resting":
            storm.resting[number] = account_id, body["order"]["id"]


async def without_models(database: Database, now: datetime) -> None:
    """Make a demo invoke no models: it creates models only if there are none."""
    async with database.connection() as conn:
        await upsert_model(
            conn,
            Model(
                id="nobody", name="Nobody", variant=VariantId.APEX, provider="rules", router_model_name="rules/apex",
                active=False, created_at=now,
            ),
        )  # fmt: skip


async def carry_on(service: ServiceProcess, storm: Storm, rng: Random, life_s: float) -> None:
    """Trade with every account until the service is killed, after `life_s` seconds."""
    _, report = await service.get("/health/schedulers")
    began = report["market"]["lastUpdateAt"] or ""
    if began and began < storm.seen_until:
        storm.lived_twice.append((storm.seen_until, began))
    clients = [asyncio.create_task(_trade(service, storm, account_id, Random(rng.random()))) for account_id in ACCOUNTS]
    clients.append(asyncio.create_task(_watch(service, storm)))
    await asyncio.sleep(life_s)  # the moment of the kill is random
    await service.kill()
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if not isinstance(outcome, aiohttp.ClientError | OSError):
            raise AssertionError(outcome)


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

    async def has_traded(self) -> bool:
        """Return whether kills can have met trades."""
        async with self.database.connection() as conn:
            return bool(await conn.fetchval("SELECT count(*) > 3 FROM fills"))

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
        assert until > BEGIN + timedelta(seconds=10)


@pytest.mark.parametrize("latency_ms", [0, 200] if is_nightly() else [200])
async def test_a_killed_replay_leaves_the_rows_of_an_unkilled_one(
    tmp_path: Path, dsn: str, database: Database, latency_ms: int
) -> None:
    bench = Bench(tmp_path, dsn, database, latency_ms)
    await bench.prepare()
    async with aiohttp.ClientSession() as http:
        rounds = 0
        while rounds < ROUNDS or not await bench.has_traded():  # a busy machine fills few orders in a life
            await bench.trade(await bench.start(http))
            rounds += 1
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
        rounds = 0
        while rounds < max(1, ROUNDS // 3) or not await bench.has_traded():
            rounds += 1
            standby = await bench.start(http)
            assert await standby.role() == "standby"
            await bench.trade(leader)
            await becomes(standby.role, "leader")
            leader = standby
        await bench.trade(leader)
        assert not leader.traceback()
    await bench.verify()
