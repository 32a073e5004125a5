"""Two processes on one database: a leader that trades, and a standby that serves reads and takes over."""

import asyncio
import signal
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.kills import write_candles
from support.process import serving
from support.sse import Stream
from support.waiting import becomes, until

from trader.database.pool import Connection, Database
from trader.portfolio.audit import audit

pytestmark = pytest.mark.processes


HEARTBEAT_WAITS = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock' AND query LIKE '%heartbeat_at = now()%')"
)


def order(**changes: Any) -> dict[str, Any]:
    return {"symbol": "BTC", "side": "buy", "quantity": 0.01, **changes}


async def test_a_standby_serves_reads_and_takes_over_within_five_seconds(tmp_path: Path, dsn: str) -> None:
    shared = {"DATABASE_URL": dsn, "SIM_LATENCY_MS": "0"}
    async with serving(tmp_path, **shared) as first, serving(tmp_path, **shared) as second:
        assert (await first.role(), await second.role()) == ("leader", "standby")
        placed = await first.call("simulator.placeOrder", **order(clientOrderId="one"))
        assert placed["order"]["status"] == "filled"
        await until(lambda: second.call("trading.getPositions", modelId="default"))
        status, refusal = await second.try_call("simulator.placeOrder", **order())
        assert (status, refusal["code"]) == (503, "SERVICE_UNAVAILABLE")
        await becomes(second.status, 200)  # as soon as the leader has reported its schedulers

        await first.kill()
        await becomes(second.role, "leader", within_s=5)
        again = await second.call("simulator.placeOrder", **order(clientOrderId="one"))
        assert again == placed
        assert (await second.call("simulator.placeOrder", **order()))["order"]["status"] == "filled"
        assert await second.stop() == 0


async def test_a_page_at_the_standby_receives_a_reset_and_then_the_new_leaders_events(tmp_path: Path, dsn: str) -> None:
    shared = {"DATABASE_URL": dsn, "SIM_LATENCY_MS": "0"}
    async with serving(tmp_path, **shared) as first, serving(tmp_path, **shared) as second:
        assert (await first.role(), await second.role()) == ("leader", "standby")
        async with second.http.get(f"{second.url}/api/events", params={"streams": "positions,trades,workflow"}) as page:
            stream = Stream(page)
            await first.call("simulator.placeOrder", **order())
            await stream.until(lambda message: message.event == "positions" and held(message.json()) == ["0.01"])

            await first.kill()
            await stream.until(lambda message: message.event == "reset")
            assert await second.role() == "leader"
            await second.call("simulator.placeOrder", **order())
            shown = await stream.until(lambda message: message.event == "positions" and "0.02" in held(message.json()))
            assert held(shown.json()) == ["0.02"]
            await second.call("simulator.placeOrder", **order(side="sell", quantity=0.02, reduceOnly=True))
            trades = await stream.until(lambda message: message.event == "trades" and len(message.json()) > 0)
            assert trades.json() == (await second.call("trading.getTrades", limit=100))["trades"]
            assert sum(message.event == "reset" for message in stream.seen) == 1


def held(entries: list[dict[str, Any]]) -> list[str]:
    """The quantities of the ordering account in a state of the positions stream."""
    return [
        position["quantity"] for entry in entries if entry["modelId"] == "default" for position in entry["positions"]
    ]


async def end_lead(database: Database) -> None:
    """End the connection that holds the leader lock."""
    async with database.connection() as conn:
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'trader leader' AND pid IN (SELECT pid FROM pg_locks WHERE granted "
            "AND locktype = 'advisory') AND datname = current_database()"
        )


async def until_lived(database: Database, minutes: int) -> None:
    """Wait until the models have snapshots of this many more minutes."""
    async with database.connection() as conn:
        wanted = minutes + len(await lived_minutes(conn))

        async def has_lived() -> bool:
            return len(await lived_minutes(conn)) >= wanted

        await until(has_lived)


async def lived_minutes(conn: Connection) -> list[datetime]:
    rows = await conn.fetch("SELECT DISTINCT date_trunc('minute', created_at) AS minute FROM portfolio_snapshots")
    return sorted(row["minute"] for row in rows)


async def test_a_replay_in_lockstep_stands_still_without_a_leader(tmp_path: Path, dsn: str, database: Database) -> None:
    await write_candles(tmp_path / "candles", 7, datetime(2025, 6, 1, tzinfo=UTC), hours=72)
    shared = {"DATABASE_URL": dsn, "MARKET_SOURCE": f"replay:{tmp_path / 'candles'}", "REPLAY_SPEED": "0"}
    async with serving(tmp_path, **shared) as first:
        await until_lived(database, 3)
        await end_lead(database)
        await until(lambda: b"term 2" in b"".join(first.log))
        await until_lived(database, 3)
        async with serving(tmp_path, **shared) as second:
            assert await second.role() == "standby"
            await until_lived(database, 3)
            await first.kill()
            await becomes(second.role, "leader", within_s=10)
            await until_lived(database, 3)
            assert await second.stop() == 0
    async with database.connection() as conn:
        minutes = await lived_minutes(conn)
        invoked = await conn.fetchval("SELECT count(DISTINCT date_trunc('minute', started_at)) FROM invocations")
    passed = (minutes[-1] - minutes[0]).total_seconds() / 60 + 1
    assert passed - len(minutes) <= 2  # at most the minute in which each lead ended
    assert len(minutes) - invoked <= 3  # the models of the last minute may not have been asked


async def test_a_leader_that_loses_its_lock_stops_trading(tmp_path: Path, dsn: str, database: Database) -> None:
    shared = {"DATABASE_URL": dsn, "SIM_LATENCY_MS": "0"}
    async with serving(tmp_path, **shared) as first, serving(tmp_path, **shared) as second:
        await end_lead(database)

        async def leads_again() -> bool:
            """Either may win the lock again; what must never be is two leaders."""
            before, other, after = await first.role(), await second.role(), await first.role()
            assert (before, other, after) != ("leader",) * 3
            return b"lost the leading role" in b"".join(first.log) and "leader" in (other, after)

        await until(leads_again)
        leader, standby = (first, second) if await first.role() == "leader" else (second, first)
        assert (await leader.call("simulator.placeOrder", **order()))["order"]["status"] == "filled"
        assert (await standby.try_call("simulator.placeOrder", **order()))[0] == 503


async def test_a_leader_with_a_hanging_notification_ends_as_soon_as_it_loses_its_lock(
    tmp_path: Path, dsn: str, database: Database
) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn) as service, asyncio.timeout(60):
        assert await service.role() == "leader"
        async with database.transaction() as holding, database.connection() as conn:
            await holding.execute("SELECT FROM service_state FOR UPDATE")
            await until(lambda: conn.fetchval(HEARTBEAT_WAITS))
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'trader leader' AND datname = current_database()"
            )
            await becomes(service.role, "standby", within_s=3)
        await becomes(service.role, "leader")


async def test_a_suspended_leader_is_replaced_within_ten_seconds_and_books_nothing_when_resumed(
    tmp_path: Path, dsn: str, database: Database
) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn) as first, serving(tmp_path, DATABASE_URL=dsn) as second:
        assert (await first.role(), await second.role()) == ("leader", "standby")
        placed = await first.call("simulator.placeOrder", **order(clientOrderId="before"))
        first.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(first.try_call("simulator.placeOrder", **order(clientOrderId="stopped")))
        await becomes(second.role, "leader", within_s=10)
        assert await second.call("simulator.placeOrder", **order(clientOrderId="before")) == placed
        await second.call("simulator.placeOrder", **order(clientOrderId="across"))
        first.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            status, answer = await waiting
            assert status == 503, answer
            await becomes(first.role, "standby")
        assert await second.role() == "leader"
        async with database.connection() as conn:
            held = await conn.fetchval("SELECT sum(quantity) FROM orders WHERE account_id = 'default'")
        assert held == Decimal("0.02"), "of two orders, and not of the one that the first would have booked"
    assert not (await audit(database)).problems
