"""Processes on streaming replicas: a reader that never leads, and a standby that leads once its replica is promoted."""

import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import asyncpg
import pytest
from support.process import ServiceProcess, serving
from support.replication import replicated
from support.sse import streaming
from support.waiting import becomes, until

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
LEADER = "http://leader.example:8081"


async def prices(service: ServiceProcess) -> dict[tuple[str, str], float]:
    """The price of each market, by symbol and time."""
    shown_prices = (await service.call("trading.getCryptoPrices"))["prices"]
    return {(entry["symbol"], entry["timestamp"]): entry["price"] for entry in shown_prices}


async def check_prices(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """Check that a reader's prices equal the leader's, a second or two later."""
    there, here = dict[tuple[str, str], float](), dict[tuple[str, str], float]()

    async def has_common() -> bool:
        there.update(await prices(leader))
        here.update(await prices(reader))
        return len(there.keys() & here.keys()) >= 6

    await until(has_common)
    assert [there[key] for key in there.keys() & here.keys()] == [here[key] for key in there.keys() & here.keys()]


async def kept(service: ServiceProcess) -> float:
    """The number of answers served from the cache."""
    async with service.http.get(f"{service.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith('trader_kept_answers_total{result="hit"}'))


async def order(service: ServiceProcess, side: str = "buy", **changes: Any) -> Any:
    request = {"accountId": "me", "symbol": "BTC", "side": side, "quantity": 0.01, **changes}
    answer = await service.call("simulator.placeOrder", **request)
    assert answer["order"]["status"] == "filled", answer
    return answer


async def check_reads(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """Check that a reader gives the leader's answers, cached ones included, and makes no changes."""
    await order(leader)
    await order(leader, "sell")
    await order(leader)

    await until(lambda: _trades(reader))
    for name, asked in READS:

        async def is_same(name: str = name, asked: dict[str, Any] = asked) -> bool:
            return bool(await leader.call(name, **asked) == await reader.call(name, **asked))

        await until(is_same)
    for name, asked in AT_MARKS:

        async def has_as_many(name: str = name, asked: dict[str, Any] = asked) -> bool:
            return len(await reader.call(name, **asked)) == len(await leader.call(name, **asked))

        await until(has_as_many)
    await check_prices(leader, reader)
    before = await kept(reader)
    known = [await _trades(reader) for _ in range(5)][-1]
    assert await kept(reader) >= before + 3
    await order(leader, "sell")

    await until(lambda: _has_other_trades(reader, known))
    status, refusal = await reader.try_call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.01)
    assert (status, refusal["code"]) == (503, "SERVICE_UNAVAILABLE")
    assert LEADER in refusal["error"]
    for path in ("/", "/api/docs", "/api/openapi.json", "/metrics"):
        async with reader.http.get(reader.url + path) as response:
            assert response.status == 200, path


async def check_streams(leader: ServiceProcess, reader: ServiceProcess) -> None:
    """Check that every stream of a reader has its state, and follows the leader."""
    for name in STREAMS:
        async with streaming(reader.http, reader.url, name) as stream:
            assert (await stream.next()).json() is not None
    async with streaming(reader.http, reader.url, "workflow") as stream:
        await stream.until(lambda message: message.event == "connected")
        await order(leader)
        changed = await stream.until(lambda message: message.event == "positions:changed")
        assert changed.json()["accountIds"] == ["me"]


async def lags(reader: ServiceProcess) -> bool:
    async with reader.http.get(f"{reader.url}/api/nothing") as response:
        return float(response.headers["X-Lag-Seconds"]) > 3


def both_hosts(first: str, second: str) -> str:
    """The address of a database on two hosts, of which the first is preferred."""
    hosts = [dict(parse_qsl(urlsplit(dsn).query))["host"] for dsn in (first, second)]
    return urlsplit(first)._replace(query=urlencode({"host": ",".join(hosts)})).geturl()


async def tells_of_two_leaders(service: ServiceProcess) -> bool:
    report = (await service.get("/health/schedulers"))[1]
    return any("two leaders trade, each on its own primary" in alarm["message"] for alarm in report.get("alarms", ()))


async def test_readers_serve_the_leaders_trades_and_a_promoted_replica_leads(tmp_path: Path, open_folder: Path) -> None:
    common = {"SIM_LATENCY_MS": "0", "LEADER_URL": LEADER}
    async with (
        replicated(open_folder) as cluster,
        serving(tmp_path, **common, DATABASE_URL=cluster.dsn) as leader,
    ):
        first, second = await cluster.add_replica(), await cluster.add_replica()
        async with (
            serving(tmp_path, **common, DATABASE_URL=first.dsn, ROLE="reader") as reader,
            serving(tmp_path, **common, DATABASE_URL=both_hosts(second.dsn, cluster.dsn)) as standby,
        ):
            roles = [await process.role() for process in (leader, reader, standby)]
            assert roles == ["leader", "reader", "standby"]
            await check_reads(leader, reader)
            await check_streams(leader, reader)
            await becomes(reader.status, 200)  # once the leader has reported its schedulers
            await first.pause(paused=True)
            await becomes(lambda: lags(reader), True)
            await first.pause(paused=False)
            await becomes(lambda: lags(reader), False)

            placed = await order(leader, clientOrderId="before the end")
            await until(lambda: _has_order(second.dsn, "before the end"))
            await second.promote()
            await becomes(standby.role, "leader")
            await until(lambda: tells_of_two_leaders(standby))  # nobody fenced the old primary
            cluster.kill_primary()
            assert await order(standby, clientOrderId="before the end") == placed
            await order(standby, "sell")
            assert await reader.role() == "reader"
            assert not standby.traceback()
            assert not reader.traceback()


async def test_a_replica_that_falls_behind_for_a_moment_catches_up(open_folder: Path) -> None:
    """Each new replica makes the primary remove old WAL files, which an earlier replica may still need."""
    async with replicated(open_folder) as cluster:
        first = await cluster.add_replica()
        primary, copy = await asyncpg.connect(cluster.dsn), await asyncpg.connect(first.dsn)
        receiver = await until(lambda: copy.fetchval("SELECT pid FROM pg_stat_wal_receiver"))
        os.kill(receiver, signal.SIGSTOP)
        await primary.execute("CREATE TABLE long AS SELECT repeat('x', 2000) FROM generate_series(1, 2000)")
        await cluster.add_replica()
        os.kill(receiver, signal.SIGCONT)
        await primary.execute("CREATE TABLE arrived ()")
        await until(lambda: copy.fetchval("SELECT to_regclass('arrived') IS NOT NULL"))
        await primary.close()
        await copy.close()


async def _trades(service: ServiceProcess) -> list[Any]:
    return list((await service.call("trading.getTrades"))["trades"])


async def _has_other_trades(service: ServiceProcess, known: list[Any]) -> bool:
    return await _trades(service) != known


async def _has_order(dsn: str, client_order_id: str) -> bool:
    conn = await asyncpg.connect(dsn)
    try:
        return bool(
            await conn.fetchval("SELECT count(*) FROM order_requests WHERE client_order_id = $1", client_order_id)
        )
    finally:
        await conn.close()
