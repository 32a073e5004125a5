import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from pytest_aiohttp.plugin import AiohttpClient
from support.served import AppClient, make_health_app
from support.service_parts import NAMES, START, ServiceParts
from support.waiting import becomes, until

from trader.agents.domain.invocations import Failing
from trader.agents.domain.shares import Budget
from trader.api import health
from trader.api.schemas.common import ENCODER
from trader.api.subscriber import Subscriber
from trader.core.errors import DatabaseUnavailable, InternalError, NotFound, Unavailable
from trader.database import pool
from trader.database.pool import Database, StatementFailure, connect_alone
from trader.exchange.service_level import FAILURES_LEAST, ServiceLevel
from trader.operations.alarms import Alarms
from trader.operations.domain.alarms import STARTS_MAX, Alarm, AlarmCause

PATHS = ("/health", "/api/health", "/health/schedulers", "/api/health/schedulers")


@asynccontextmanager
async def serving(service_parts: ServiceParts) -> AsyncIterator[AppClient]:
    async with TestClient(TestServer(make_health_app(service_parts))) as client:
        await service_parts.schedulers.start()
        await service_parts.clock.advance(timedelta(seconds=1))
        try:
            yield client
        finally:
            await service_parts.schedulers.close()


async def get(client: AppClient, path: str) -> tuple[int, Any]:
    async with client.get(path) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["Cache-Control"] == "no-store"
        return response.status, await response.json()


@pytest.mark.parametrize("path", ["/health", "/api/health"])
async def test_healthy(path: str) -> None:
    async with serving(ServiceParts()) as client:
        assert await get(client, path) == (
            200,
            {"status": "healthy", "timestamp": "2025-01-01T12:00:01.000Z", "schedulers": dict.fromkeys(NAMES, True)},
        )


async def test_an_unavailable_database_is_unhealthy_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_CACHE_S", 0)
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.database.error = DatabaseUnavailable("not reachable")
        status, report = await get(client, "/health")
        assert (status, report["status"], report["schedulers"]) == (503, "unhealthy", dict.fromkeys(NAMES, True))
        status, report = await get(client, "/health/schedulers")
        assert (status, report["database"]) == (200, {"ok": False, "latencyMs": None})
        service_parts.database.error = None
        assert (await get(client, "/health"))[0] == 200


async def test_books_contradicted_by_the_venue_are_unhealthy_with_the_reason() -> None:
    service_parts = ServiceParts()
    service_parts.troubles = {"apex": "ETH: the venue holds a position that the books do not know"}
    async with serving(service_parts) as client:
        status, report = await get(client, "/health")
        assert (status, report["status"], report["reconciliation"]) == (503, "unhealthy", service_parts.troubles)
        service_parts.troubles = {}
        status, report = await get(client, "/health")
        assert (status, "reconciliation" in report) == (200, False)


async def test_a_hanging_database_is_soon_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_S", 0.02)
    service_parts = ServiceParts()
    service_parts.database.hangs = True
    async with serving(service_parts) as client:
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["The database cannot be used now: not answering."])


async def test_a_flood_of_requests_is_one_query() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        began_s = time.monotonic()
        answers = await asyncio.gather(*(get(client, PATHS[n % 4]) for n in range(100)))
        assert {status for status, _ in answers} == {200}
        assert service_parts.database.pings <= 1 + (time.monotonic() - began_s) / health.PROBE_CACHE_S


async def test_a_stalled_scheduler_is_unhealthy() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.clock.set_by(timedelta(seconds=31))  # time that no scheduler observed
        status, report = await get(client, "/health")
        assert (status, report["status"]) == (503, "unhealthy")
        assert report["schedulers"] == dict.fromkeys(NAMES, False)


async def test_a_failing_scheduler_still_runs_and_reports_its_error() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.error = Unavailable("the database is away")
        await service_parts.clock.advance(timedelta(seconds=9))
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
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.broadcaster.add(Subscriber())
        service_parts.agents.started = {"apex": START - timedelta(milliseconds=1500)}
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
        service_parts.agents.queued = {"ada": START}
        assert (await get(client, path))[1]["modelsWaiting"] == [{"modelId": "ada", "waitingForSeconds": 1.0}]
        service_parts.agents.spent = {"ada": Budget(Decimal(2), Decimal("1.8"), True, "manage", Decimal("0.1"))}
        assert (await get(client, path))[1]["budgets"] == {
            "ada": {"usdPerDay": 2.0, "spentTodayUsd": 1.8, "reservedUsd": 0.1, "isEstimated": True, "state": "manage"}
        }
        service_parts.agents.failures = {"ada": Failing(3, "no answer")}
        service_parts.agents.rests = {"nim key 2": "is out of credit (402)"}
        report = (await get(client, path))[1]
        assert report["modelsFailing"] == [{"modelId": "ada", "failures": 3, "reason": "no answer"}]
        assert report["providersResting"] == {"nim key 2": "is out of credit (402)"}
        assert not any("no answer" in reason for reason in (await get(client, "/health"))[1].get("reasons", []))
        service_parts.market.last_update_at = START
        market = (await get(client, path))[1]["market"]
        assert market == {"source": "synthetic", "lastUpdateAt": "2025-01-01T12:00:00.000Z", "stale": False}


async def test_both_reports_have_the_same_alarms_including_the_leaders() -> None:
    service_parts = ServiceParts()
    own, leaders = (
        Alarm(AlarmCause("provider", "nim"), "key 1 is out of credit (402)"),
        Alarm(AlarmCause("model", "ada"), "ada failed 23 times in a row: no"),
    )
    async with serving(service_parts) as client:
        service_parts.alarms.sources = [lambda: [own]]
        leader = Alarms([])
        leader.sources = [lambda: [own, leaders]]
        service_parts.relay.alarms = ENCODER.encode(health.present_alarms(leader)).decode()
        status, report = await get(client, "/health")
        assert (status, report["status"]) == (200, "healthy"), "it does its work"
        assert [(each["cause"], each["state"]) for each in report["alarms"]] == [("provider", "firing")]
        assert (await get(client, "/health/schedulers"))[1]["alarms"] == report["alarms"]
        service_parts.relay.lag = 0.5
        _, report = await get(client, "/health")
        assert [(each["cause"], each["state"]) for each in report["alarms"]] == [
            ("provider", "firing"),
            ("model", "pending"),
        ]
        assert report["alarms"][1]["message"] == leaders.text
        assert (await get(client, "/health/schedulers"))[1]["alarms"] == report["alarms"]


async def test_before_the_schedulers_start_the_service_is_unhealthy(aiohttp_client: AiohttpClient) -> None:
    client = await aiohttp_client(make_health_app(ServiceParts()))
    status, report = await get(client, "/health")
    assert (status, report["schedulers"]) == (503, dict.fromkeys(NAMES, False))
    _, report = await get(client, "/health/schedulers")
    assert report["schedulers"]["priceTracker"]["lastStartedAt"] is None


@pytest.mark.parametrize("path", PATHS)
async def test_the_health_report_is_read_only(path: str) -> None:
    async with serving(ServiceParts()) as client:
        for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
            async with client.request(method, path) as response:
                assert response.status == 405
                assert response.headers["Allow"] == "GET, HEAD"
                assert await response.json() == {"error": "Method Not Allowed"}
        async with client.head(path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_bookings_that_cannot_be_written_are_unhealthy_until_one_can() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.database.trouble = "disk full"
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["The database cannot be used now: disk full."])
        service_parts.database.trouble = None
        assert (await get(client, "/health"))[0] == 200


async def test_a_market_that_is_silent_for_over_a_minute_is_unhealthy_unless_its_recording_has_ended() -> None:
    service_parts = ServiceParts()
    service_parts.market.last_update_at = START
    async with serving(service_parts) as client:
        await service_parts.clock.advance(timedelta(seconds=59))
        assert (await get(client, "/health"))[0] == 200
        await service_parts.clock.advance(timedelta(seconds=1))
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["no update of the market for 61 s"])
        service_parts.market.has_ended = True
        assert (await get(client, "/health"))[0] == 200
        service_parts.market.has_ended = False
        service_parts.market.last_update_at = service_parts.clock.now()
        assert (await get(client, "/health"))[0] == 200


async def test_a_market_without_any_price_is_unhealthy_after_half_a_minute_and_no_price_is_tracked() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        await service_parts.clock.advance(timedelta(seconds=29))
        assert (await get(client, "/health"))[0] == 200
        await service_parts.clock.advance(timedelta(seconds=1))
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["no price in the 31 s since the start"])
        assert report["schedulers"] == {**dict.fromkeys(NAMES, True), "priceTracker": False}
        jobs = (await get(client, "/health/schedulers"))[1]["schedulers"]
        assert {name: job["running"] for name, job in jobs.items()} == report["schedulers"]
        service_parts.market.last_update_at = service_parts.clock.now()
        status, report = await get(client, "/health")
        assert (status, report["schedulers"]) == (200, dict.fromkeys(NAMES, True))


async def test_a_scheduler_that_fails_three_times_in_a_row_is_unhealthy_until_it_succeeds() -> None:
    service_parts = ServiceParts()
    async with serving(service_parts) as client:
        service_parts.error = Unavailable("no room")
        for expected in (200, 200, 503):
            await service_parts.clock.advance(timedelta(seconds=10))
            service_parts.market.last_update_at = service_parts.clock.now()
            status, report = await get(client, "/health")
            assert status == expected
        assert report["reasons"] == [f"the scheduler {name} failed 3 times: Unavailable: no room" for name in NAMES]
        service_parts.error = None
        await service_parts.clock.advance(timedelta(seconds=10))
        assert (await get(client, "/health"))[0] == 200


async def test_the_process_is_alive_regardless_of_other_problems() -> None:
    service_parts = ServiceParts()
    service_parts.database.error = DatabaseUnavailable("not reachable")
    async with serving(service_parts) as client:
        assert (await get(client, "/health"))[0] == 503
        assert await get(client, "/health/live") == (200, {"status": "alive", "timestamp": "2025-01-01T12:00:01.000Z"})


async def test_problems_are_logged_when_they_begin_and_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(health, "LOG_AFTER_S", 0.02)
    caplog.set_level("INFO", "trader.api.health")
    service_parts = ServiceParts()
    service_parts.database.trouble = "disk full"
    async with serving(service_parts):
        async with asyncio.timeout(10):
            await until(lambda: caplog.messages)
            service_parts.database.trouble = None
            await until(lambda: len(caplog.messages) >= 2)
    assert caplog.messages[0].startswith("unhealthy: The database cannot be used now: disk full.")
    assert caplog.messages[1:] == ["healthy again"]


async def test_slow_postings_are_unhealthy() -> None:
    service_parts = ServiceParts()
    now_s = 0.0
    service_parts.service_level = ServiceLevel(timer=lambda: now_s)
    async with serving(service_parts) as client:
        for took_s in (4, 4.5, 0.1, 4):
            with service_parts.service_level.posting():
                now_s += took_s
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["The database is slow: postings typically take 4.0 s."])
        now_s += 70
        assert (await get(client, "/health"))[0] == 200


async def test_a_database_failure_between_two_checks_raises_an_alarm_with_its_impact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "WATCH_EVERY_S", 0.01)
    service_parts = ServiceParts()
    began = datetime.now(UTC) - timedelta(seconds=3)
    async with serving(service_parts), asyncio.timeout(10):
        for number in range(STARTS_MAX):
            with suppress(Unavailable), service_parts.service_level.order():
                raise DatabaseUnavailable("locked")
            service_parts.database.last_failure = StatementFailure("locked", began, time.monotonic())
            await becomes(lambda: service_parts.alarms.counts["database"], number + 1)
            await asyncio.sleep(0.05)  # looks without a failure
        (condition,) = service_parts.alarms.firing()
    assert condition.alarm.text == "The database cannot be used now: locked."
    assert condition.alarm.impact == "3 orders were refused"
    assert condition.since == began


async def test_requests_that_fail_for_an_unknown_reason_are_unhealthy_until_they_succeed() -> None:
    service_parts = ServiceParts()
    orders = service_parts.service_level
    async with serving(service_parts) as client:
        for number in range(1, FAILURES_LEAST + 1):
            assert (await get(client, "/health"))[0] == 200
            with suppress(InternalError), orders.order():
                raise InternalError("see the log") from ValueError(f"disk sector {number}")
        status, report = await get(client, "/health")
        assert (status, report["reasons"]) == (503, ["3 of the last 3 orders failed: ValueError: disk sector 3"])
        for refusal in (NotFound("unknown"), DatabaseUnavailable("locked")):  # said elsewhere, and no success either
            with suppress(NotFound, Unavailable), orders.order():
                raise refusal
        assert (await get(client, "/health"))[0] == 503
        for _ in range(FAILURES_LEAST):
            with orders.order():
                pass
        assert (await get(client, "/health"))[0] == 200


@pytest.fixture
def probed_at_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> ServiceParts:
    """A service on a real database whose locks are noticed at once."""
    monkeypatch.setattr(pool, "PROBE_LOCK_S", 0.05)
    monkeypatch.setattr(health, "PROBE_CACHE_S", 0)
    service_parts = ServiceParts()
    service_parts.database = database
    return service_parts


async def test_what_only_reports_need_degrades_and_a_locked_row_is_named(
    database: Database, dsn: str, probed_at_once: ServiceParts
) -> None:
    service_parts = probed_at_once
    other = await connect_alone(dsn, application_name="psql")
    pid = other.get_server_pid()
    async with serving(service_parts) as client:
        async with other.transaction():
            await other.execute("LOCK TABLE candles")
            with pytest.raises(DatabaseUnavailable, match="locked"):
                await database.probe(["fills", "candles"], writes=False)
            status, report = await get(client, "/health")
            alarms = [(each["cause"], each["subject"], each["message"]) for each in report["alarms"]]
            text = f"degraded: candles. Table candles is locked by pid {pid} (psql)."
            assert (status, alarms) == (200, [("degraded", "candles", text)])
        await database.probe(["fills", "candles"], writes=True)
        assert database.trouble is None
        await other.execute("INSERT INTO accounts (id, created_at, changed_at) VALUES ('a', now(), now())")
        async with other.transaction():
            await other.execute("SELECT FROM accounts FOR UPDATE")

            async def wait_for_the_row() -> None:
                async with database.transaction() as conn:
                    await conn.execute("UPDATE accounts SET changed_at = now()")

            waiting = asyncio.create_task(wait_for_the_row())
            database.write_trouble = "locked"
            row = f"A row of table accounts is locked by pid {pid} (psql)."

            async def is_named() -> bool:
                return row in (await get(client, "/health"))[1].get("reasons", [""])[0]

            await becomes(is_named, True)
        await waiting
    await other.close()


async def test_a_locked_database_names_the_table_and_the_session_that_holds_it(
    database: Database, dsn: str, probed_at_once: ServiceParts
) -> None:
    service_parts = probed_at_once
    other = await connect_alone(dsn, application_name="psql")
    async with serving(service_parts) as client, other.transaction():
        await other.execute("LOCK TABLE fills")
        with pytest.raises(DatabaseUnavailable, match="locked"):
            await database.probe(["orders", "fills"], writes=False)
        status, report = await get(client, "/health")
    assert status == 503
    holder = f"Table fills is locked by pid {other.get_server_pid()} (psql)."
    assert report["reasons"] == [f"The database cannot be used now: locked. {holder}"]
    await other.close()
