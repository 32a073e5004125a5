"""Two processes on one database: a leader that trades, and a standby that serves reads and takes over."""

import asyncio
import signal
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.process import serving
from support.waiting import becomes, until

from trader.database.pool import Database
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
