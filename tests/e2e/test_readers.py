"""Processes on streaming replicas: a reader that never leads, and a standby that leads once its replica is promoted."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.process import ServiceProcess, serving
from support.replication import replicated
from support.sse import streaming

pytestmark = pytest.mark.processes

READS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("trading.getTrades", {}),
    ("trading.getPortfolioHistory", {}),
    ("trading.getEquityCurves", {"baselines": True}),
    ("models.getModels", {}),
    ("models.getInvocations", {}),
    ("analytics.getEvidence", {}),
    ("analytics.getFailures", {}),
    ("analytics.getRunInfo", {}),
    ("variants.getVariants", {}),
    ("variants.getVariantHistory", {}),
    ("variants.getVariantStats", {}),
    ("simulator.getCompletedTradesFromDB", {}),
)
"""Procedures whose answers do not change with every price."""

AT_MARKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("trading.getPositions", {}),
    ("analytics.getModelStats", {"mode": "advanced"}),
    ("analytics.getLeaderboard", {}),
    ("simulator.getAccount", {"accountId": "me"}),
)
STREAMS = ("positions", "trades", "conversations", "portfolio")
HAS_ORDER = "SELECT EXISTS (SELECT FROM order_requests WHERE client_order_id = $1)"
LEADER = "http://leader.example:8081"


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Return the seconds until the condition holds."""
    started_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)
    return time.monotonic() - started_s


async def prices(service: ServiceProcess) -> dict[tuple[str, str], float]:
    """The price of each market, by its time."""
    shown_prices = (await service.call("trading.getCryptoPrices"))["prices"]
    return {(entry["symbol"], entry["timestamp"]): entry["price"] for entry in shown_prices}


async def check_prices(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """The prices of a reader are those of the leader, a second or two later."""
    there, here = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    async with asyncio.timeout(30):
        while len(there.keys() & here.keys()) < 6:
            there |= await prices(leader)
            here |= await prices(reader)
            await asyncio.sleep(0.1)
    assert [there[key] for key in there.keys() & here.keys()] == [here[key] for key in there.keys() & here.keys()]


async def kept(service: ServiceProcess) -> float:
    """How many answers were given again."""
    async with service.http.get(f"{service.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith('trader_kept_answers_total{result="hit"}'))


async def order(service: ServiceProcess, side: str = "buy", **changes: Any) -> Any:
    return await service.call("simulator.placeOrder", accountId="me", symbol="BTC", side=side, quantity=0.01, **changes)


async def check_reads(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """A reader gives the leader's answers, those that it keeps too, and makes no change."""
    await order(leader)
    await order(leader, "sell")
    await order(leader)

    async def has_traded() -> bool:
        return bool((await reader.call("trading.getTrades"))["trades"])

    await until(has_traded, 5)
    for name, asked in READS:

        async def is_same(name: str = name, asked: dict[str, Any] = asked) -> bool:
            return bool(await leader.call(name, **asked) == await reader.call(name, **asked))

        await until(is_same, 20)
    for name, asked in AT_MARKS:

        async def has_as_many(name: str = name, asked: dict[str, Any] = asked) -> bool:
            return len(await reader.call(name, **asked)) == len(await leader.call(name, **asked))

        await until(has_as_many, 20)
    await check_prices(leader, reader)
    before = await kept(reader)
    known = [await reader.call("trading.getTrades") for _ in range(5)][-1]
    assert await kept(reader) >= before + 3
    await order(leader, "sell")

    async def is_new() -> bool:
        return bool(await reader.call("trading.getTrades") != known)

    await until(is_new, 5)
    status, refusal = await reader.try_call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.01)
    assert (status, refusal["code"]) == (503, "SERVICE_UNAVAILABLE")
    assert LEADER in refusal["error"]
    for path in ("/", "/api/docs", "/api/openapi.json", "/metrics"):
        async with reader.http.get(reader.url + path) as response:
            assert response.status == 200, path


async def check_streams(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """Every stream of a reader has its state, and tells what the leader does."""
    for name in STREAMS:
        async with streaming(reader.http, reader.url, name) as stream:
            assert (await stream.next()).json() is not None
    async with streaming(reader.http, reader.url, "workflow") as stream:
        await stream.until(lambda message: message.event == "connected")
        await order(leader)
        changed = await stream.until(lambda message: message.event == "positions:changed", within_s=5)
        assert changed.json()["accountIds"] == ["me"]


async def lag_s(reader: ServiceProcess) -> float:
    async with reader.http.get(f"{reader.url}/api/nothing") as response:
        return float(response.headers["X-Lag-Seconds"])


async def test_readers_serve_what_the_leader_trades_and_a_promoted_replica_leads(
    tmp_path: Path, open_folder: Path
) -> None:
    common = {"SIM_LATENCY_MS": "0", "LEADER_URL": LEADER}
    async with (
        replicated(open_folder) as cluster,
        serving(tmp_path, **common, DATABASE_URL=cluster.dsn) as leader,
    ):
        first, second = await cluster.add_replica(), await cluster.add_replica()
        async with (
            serving(tmp_path, **common, DATABASE_URL=first.dsn, ROLE="reader") as reader,
            serving(tmp_path, **common, DATABASE_URL=second.dsn) as standby,
        ):
            roles = [(await process.get("/health/schedulers"))[1]["role"] for process in (leader, reader, standby)]
            assert roles == ["leader", "reader", "standby"]
            await check_reads(leader, reader)
            await check_streams(leader, reader)

            async def is_healthy() -> bool:
                return bool((await reader.get("/health"))[0] == 200)

            await until(is_healthy, 15)  # once the leader has reported its schedulers
            await first.pause(paused=True)
            await until(lambda: _is(lag_s(reader), lambda lag: lag > 3), 10)
            await first.pause(paused=False)
            await until(lambda: _is(lag_s(reader), lambda lag: lag < 3), 10)

            placed = await order(leader, clientOrderId="before the end")
            await until(lambda: _has_order(second.dsn, "before the end"), 5)
            cluster.kill_primary()
            await second.promote()

            async def leads() -> bool:
                return bool((await standby.get("/health/schedulers"))[1]["role"] == "leader")

            assert await until(leads, 10) < 10
            assert await order(standby, clientOrderId="before the end") == placed
            assert (await order(standby, "sell"))["order"]["status"] == "filled"
            assert (await reader.get("/health/schedulers"))[1]["role"] == "reader"
            assert not standby.traceback()
            assert not reader.traceback()


async def _is(value: Awaitable[float], condition: Callable[[float], bool]) -> bool:
    return condition(await value)


async def _has_order(dsn: str, client_order_id: str) -> bool:
    conn = await asyncpg.connect(dsn)
    try:
        return bool(
            await conn.fetchval("SELECT count(*) FROM order_requests WHERE client_order_id = $1", client_order_id)
        )
    finally:
        await conn.close()
