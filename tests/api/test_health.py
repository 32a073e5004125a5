import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from pytest_aiohttp.plugin import AiohttpClient
from support.house import NAMES, START, House
from support.served import AppClient, make_health_app

from trader.api import health
from trader.api.subscriber import Subscriber
from trader.errors import DatabaseUnavailable, Unavailable
from trader.services.agents.budgets import Budget
from trader.services.agents.model_warnings import Failing

PATHS = ("/health", "/api/health", "/health/schedulers", "/api/health/schedulers")


@asynccontextmanager
async def serving(house: House) -> AsyncIterator[AppClient]:
    async with TestClient(TestServer(make_health_app(house))) as client:
        await house.schedulers.start()
        await house.clock.advance(timedelta(seconds=1))
        try:
            yield client
        finally:
            await house.schedulers.close()


async def get(client: AppClient, path: str) -> tuple[int, Any]:
    async with client.get(path) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["Cache-Control"] == "no-store"
        return response.status, await response.json()


@pytest.mark.parametrize("path", ["/health", "/api/health"])
async def test_healthy(path: str) -> None:
    async with serving(House()) as client:
        assert await get(client, path) == (
            200,
            {"status": "healthy", "timestamp": "2025-01-01T12:00:01.000Z", "schedulers": dict.fromkeys(NAMES, True)},
        )


async def test_a_database_that_is_away_is_unhealthy_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "GOOD_FOR_S", 0)
    house = House()
    async with serving(house) as client:
        house.database.error = DatabaseUnavailable("not reachable")
        status, report = await get(client, "/health")
        assert (status, report["status"], report["schedulers"]) == (503, "unhealthy", dict.fromkeys(NAMES, True))
        status, report = await get(client, "/health/schedulers")
        assert (status, report["database"]) == (200, {"ok": False, "latencyMs": None})
        house.database.error = None
        assert (await get(client, "/health"))[0] == 200


async def test_books_that_the_venue_contradicts_are_unhealthy_and_say_why() -> None:
    house = House()
    house.troubles = {"apex": "ETH: the venue holds a position that the books do not know"}
    async with serving(house) as client:
        status, report = await get(client, "/health")
        assert (status, report["status"], report["reconciliation"]) == (503, "unhealthy", house.troubles)
        house.troubles = {}
        status, report = await get(client, "/health")
        assert (status, "reconciliation" in report) == (200, False)


async def test_a_database_that_hangs_is_unhealthy_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_S", 0.02)
    house = House()
    house.database.hangs = True
    async with serving(house) as client:
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["The database cannot be used now: not answering."])


async def test_a_flood_is_one_question() -> None:
    house = House()
    async with serving(house) as client:
        answers = await asyncio.gather(*(get(client, PATHS[n % 4]) for n in range(100)))
        assert {status for status, _ in answers} == {200}
        assert house.database.pings <= 3  # 100 answers take less than three times 200 ms, however busy the machine


async def test_a_scheduler_that_stands_still_is_unhealthy() -> None:
    house = House()
    async with serving(house) as client:
        house.clock.set_by(timedelta(seconds=31))  # time that no scheduler saw
        status, report = await get(client, "/health")
        assert (status, report["status"]) == (503, "unhealthy")
        assert report["schedulers"] == dict.fromkeys(NAMES, False)


async def test_a_failing_scheduler_still_runs_and_tells_its_error() -> None:
    house = House()
    async with serving(house) as client:
        house.error = Unavailable("the database is away")
        await house.clock.advance(timedelta(seconds=9))
        assert (await get(client, "/health"))[0] == 200
        _, report = await get(client, "/health/schedulers")
        job = report["schedulers"]["tradeExecutor"]
        assert isinstance(job.pop("lastDurationMs"), int)
        assert job == {
            "running": True,
            "intervalMs": 10_000,
            "runs": 2,
            "failures": 1,
            "skipped": 0,
            "lastStartedAt": "2025-01-01T12:00:10.000Z",
            "lastFinishedAt": "2025-01-01T12:00:10.000Z",
            "lastError": "Unavailable: the database is away",
            "nextDueAt": "2025-01-01T12:00:20.000Z",
        }


@pytest.mark.parametrize("path", ["/health/schedulers", "/api/health/schedulers"])
async def test_the_detailed_report(path: str) -> None:
    house = House()
    async with serving(house) as client:
        house.hub.add(Subscriber())
        house.agents.started = {"apex": START - timedelta(milliseconds=1500)}
        status, report = await get(client, path)
        assert status == 200
        assert list(report) == ["timestamp", "startedAt", "uptimeSeconds", "tradingMode", "role", "database", "market",
                                "streams", "schedulers", "modelsRunning"]  # fmt: skip
        assert list(report.pop("schedulers")) == list(NAMES)
        assert report == {
            "timestamp": "2025-01-01T12:00:01.000Z",
            "startedAt": "2025-01-01T12:00:00.000Z",
            "uptimeSeconds": 1.0,
            "tradingMode": "simulated",
            "role": "leader",
            "database": {"ok": True, "latencyMs": 0.7},
            "market": {"source": "synthetic", "lastUpdateAt": None, "stale": True},
            "streams": {"positions": {"subscribers": 1, "capacity": 50}},
            "modelsRunning": [{"modelId": "apex", "runningForSeconds": 2.5}],
        }
        house.agents.queued = {"ada": START}
        assert (await get(client, path))[1]["modelsWaiting"] == [{"modelId": "ada", "waitingForSeconds": 1.0}]
        house.agents.spent = {"ada": Budget(Decimal(2), Decimal("1.8"), True, "manage", Decimal("0.1"))}
        assert (await get(client, path))[1]["budgets"] == {
            "ada": {"usdPerDay": 2.0, "spentTodayUsd": 1.8, "reservedUsd": 0.1, "isEstimated": True, "state": "manage"}
        }
        house.agents.failures = {"ada": Failing(3, "no answer")}
        house.agents.rests = {"nim key 2": "is out of credit (402)"}
        report = (await get(client, path))[1]
        assert report["modelsFailing"] == [{"modelId": "ada", "failures": 3, "reason": "no answer"}]
        assert report["providersResting"] == {"nim key 2": "is out of credit (402)"}
        assert not any("no answer" in reason for reason in (await get(client, "/health"))[1].get("reasons", []))
        house.market.last_update_at = START
        market = (await get(client, path))[1]["market"]
        assert market == {"source": "synthetic", "lastUpdateAt": "2025-01-01T12:00:00.000Z", "stale": False}


async def test_before_the_schedulers_start_the_service_is_unhealthy(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(make_health_app(House()))
    status, report = await get(client, "/health")
    assert (status, report["schedulers"]) == (503, dict.fromkeys(NAMES, False))
    _, report = await get(client, "/health/schedulers")
    assert report["schedulers"]["priceTracker"]["lastStartedAt"] is None


@pytest.mark.parametrize("path", PATHS)
async def test_only_reading(path: str) -> None:
    async with serving(House()) as client:
        for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
            async with client.request(method, path) as response:
                assert response.status == 405
                assert response.headers["Allow"] == "GET, HEAD"
                assert await response.json() == {"error": "Method Not Allowed"}
        async with client.head(path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_bookings_that_cannot_be_written_are_unhealthy_until_one_can() -> None:
    house = House()
    async with serving(house) as client:
        house.database.trouble = "disk full"
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["The database cannot be used now: disk full."])
        house.database.trouble = None
        assert (await get(client, "/health"))[0] == 200


async def test_a_market_that_is_silent_for_over_a_minute_is_unhealthy_unless_its_recording_has_ended() -> None:
    house = House()
    async with serving(house) as client:
        await house.clock.advance(timedelta(seconds=59))
        assert (await get(client, "/health"))[0] == 200
        await house.clock.advance(timedelta(seconds=1))
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["no update of the market for 61 s"])
        house.market.has_ended = True
        assert (await get(client, "/health"))[0] == 200
        house.market.has_ended = False
        house.market.last_update_at = house.clock.now()
        assert (await get(client, "/health"))[0] == 200


async def test_a_scheduler_that_fails_three_times_in_a_row_is_unhealthy_until_it_succeeds() -> None:
    house = House()
    async with serving(house) as client:
        house.error = Unavailable("no room")
        for expected in (200, 200, 503):
            await house.clock.advance(timedelta(seconds=10))
            house.market.last_update_at = house.clock.now()
            status, report = await get(client, "/health")
            assert status == expected
        assert report["reasons"] == [f"the scheduler {name} failed 3 times: Unavailable: no room" for name in NAMES]
        house.error = None
        await house.clock.advance(timedelta(seconds=10))
        assert (await get(client, "/health"))[0] == 200


async def test_the_process_is_alive_whatever_else_is_wrong() -> None:
    house = House()
    house.database.error = DatabaseUnavailable("not reachable")
    async with serving(house) as client:
        assert (await get(client, "/health"))[0] == 503
        assert await get(client, "/health/live") == (200, {"status": "alive", "timestamp": "2025-01-01T12:00:01.000Z"})


async def test_what_is_wrong_is_logged_when_it_begins_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "WATCH_EVERY_S", 0.01)
    caplog.set_level("INFO", "trader.api.health")
    house = House()
    house.database.trouble = "disk full"
    async with serving(house):
        async with asyncio.timeout(10):
            while not caplog.messages:
                await asyncio.sleep(0.01)
            house.database.trouble = None
            while len(caplog.messages) < 2:
                await asyncio.sleep(0.01)
    assert caplog.messages[0].startswith("unhealthy: The database cannot be used now: disk full.")
    assert caplog.messages[1:] == ["healthy again"]
