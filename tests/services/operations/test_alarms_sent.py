"""Alarms through real HTTP sinks: one that works, beside those that hang, fail and close; and the dead-man ping."""

import asyncio
import html
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import orjson
import pytest
from support.sinks import NTFY, SLACK, TELEGRAM, Sinks, sinks

from trader.domain.exchange.account import Position
from trader.domain.exchange.halts import Halt, HaltCause
from trader.domain.exchange.ledger import ClosedTrade
from trader.domain.exchange.orders import Cause, Side
from trader.domain.operations.alarms import EVERY_S, Alarm, AlarmCause
from trader.gateways.operations.notifications import Heartbeat, HttpSink
from trader.services.events import Event, HaltsChanged, LeadershipChanged, PostingRefused, TradesChanged, VenueDiffers
from trader.services.operations import alarms as service
from trader.services.operations.alarms import QUEUE_MAX, Alarms, send_heartbeats
from trader.setting_forms import Secret

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
TOKEN = "s3cret-t0ken"
HALT = Alarm(AlarmCause("halt"), "account apex: operator: strange prices")


@asynccontextmanager
async def alarms_to(
    *urls: str, timer: Callable[[], float] = lambda: 0.0, timeout_s: float = 5.0, disk_least: int = 0
) -> AsyncIterator[Alarms]:
    receivers = [HttpSink(n, Secret(url), "here:1", timeout_s=timeout_s) for n, url in enumerate(urls, 1)]
    alarms = Alarms(
        receivers, timer=timer, now=lambda: AT, retry_after_s=(0.0, 0.0), disk_least=disk_least, folder=Path("/")
    )
    try:
        yield alarms
    finally:
        await alarms.close()


def services(here: Sinks) -> tuple[str, ...]:
    return f"ntfy+{here.url}{NTFY}", f"slack+{here.url}{SLACK}", f"telegram+{here.url}{TELEGRAM}?chat_id=-100"


async def heard(here: Sinks, path: str, count: int = 1) -> list[dict[str, object]]:
    async with asyncio.timeout(10):
        return [orjson.loads(one.body) for one in await here.wait_for(path, count)]


async def settled(alarms: Alarms) -> None:
    """Wait until nothing waits for a sink."""
    async with asyncio.timeout(10):
        while any(len(outlet) for outlet in alarms.outlets):
            await asyncio.sleep(0.01)


async def test_each_kind_of_receiver_gets_the_body_that_it_takes() -> None:
    async with sinks() as here:
        async with alarms_to(f"{here.url}/json", *services(here)) as alarms:
            alarms.add(HALT)
            await settled(alarms)
        text = "here:1: halt: account apex: operator: strange prices"
        (generic,) = await heard(here, "/json")
        assert generic == {
            "text": text, "sender": "here:1", "cause": "halt", "subject": "", "message": HALT.text, "count": 1,
            "since": "2026-01-01T12:00:00.000Z", "at": "2026-01-01T12:00:00.000Z",
        }  # fmt: skip
        (ntfy,) = here.of(NTFY)
        assert (ntfy.body.decode(), ntfy.headers["Title"], ntfy.headers["Priority"]) == (text, "trader: halt", "high")
        assert await heard(here, SLACK) == [{"text": text}]
        assert await heard(here, TELEGRAM) == [{"chat_id": "-100", "text": text}]
        assert [outlet.outcomes["sent"] for outlet in alarms.outlets] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["<!channel> & <https://evil.example|here> &lt;", "\N{POLICE CARS REVOLVING LIGHT}" * 2000]
)
async def test_the_services_take_any_text_as_it_is(text: str) -> None:
    async with sinks() as here:
        async with alarms_to(*services(here)) as alarms:
            alarms.add(HALT._replace(text=text))
            await settled(alarms)
        assert [outlet.outcomes["sent"] for outlet in alarms.outlets] == [1, 1, 1]
        shown = f"here:1: halt: {text}"[:1000]
        assert here.of(NTFY)[0].body.decode() == shown
        assert (await heard(here, TELEGRAM))[0]["text"] == shown
        assert html.unescape(str((await heard(here, SLACK))[0]["text"])) == shown


async def test_sinks_that_hang_fail_and_close_delay_nothing_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with sinks() as here:
        urls = [f"{here.url}/{path}?key={TOKEN}" for path in ("hangs", "fails", "closes", "works")]
        async with alarms_to(*urls, f"http://127.0.0.1:9/{TOKEN}", timeout_s=0.2) as alarms:
            alarms.add(HALT)
            assert len(await heard(here, "/works")) == 1
            await settled(alarms)
            outcomes = {outlet.name: (outlet.outcomes["sent"], outlet.outcomes["failed"]) for outlet in alarms.outlets}
        assert outcomes == {"json 1": (0, 1), "json 2": (0, 1), "json 3": (0, 1), "json 4": (1, 0), "json 5": (0, 1)}
        assert [len(here.of(path)) for path in ("/hangs", "/fails", "/closes")] == [3, 3, 3]
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "notices do not reach the sink json 2 of NOTIFY_URL: the answer was HTTP 500" in said
        assert len(said) == 4
        assert TOKEN not in caplog.text
        assert here.url not in caplog.text


async def test_a_sink_that_hangs_for_ever_holds_up_neither_alarms_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LAST_WORDS_S", 0.05)
    async with sinks() as here:
        async with alarms_to(f"{here.url}/hangs", timeout_s=3600) as alarms:
            for number in range(QUEUE_MAX + 20):
                alarms.add(Alarm(AlarmCause("provider", str(number)), "away"))
            await heard_once(here)
            (outlet,) = alarms.outlets
            assert len(outlet) == QUEUE_MAX, "the queue has a bound"
            assert outlet.outcomes["dropped"] == 20
        assert len(here.of("/hangs")) == 1


async def heard_once(here: Sinks) -> None:
    async with asyncio.timeout(10):
        await here.wait_for("/hangs")


async def test_an_hour_of_one_cause_is_one_notice_with_a_count() -> None:
    now_s = 0.0
    async with sinks() as here, alarms_to(f"{here.url}/works", timer=lambda: now_s) as alarms:
        for _ in range(5):
            alarms.add(HALT)
        now_s = EVERY_S - 1
        alarms.watch([])
        assert [one["count"] for one in await heard(here, "/works")] == [1]
        now_s = EVERY_S
        alarms.watch([])
        (_, later) = await heard(here, "/works", 2)
        assert later["count"] == 4
        assert str(later["text"]).endswith("(4 times since 2026-01-01T12:00:00.000Z; this was the last)")
        assert alarms.counts[HALT.cause] == 5


def liquidated(cause: Cause) -> ClosedTrade:
    part = Position(
        id=uuid4(), symbol="BTC", side=Side.LONG, quantity=Decimal("0.5"), entry_notional=Decimal(50_000),
        margin=Decimal(5000), opened_at=AT, funded_until=AT, fees=Decimal(50),
    )  # fmt: skip
    return ClosedTrade(
        part=part, run_id=uuid4(), parent_id=None, exit_notional=Decimal(45_000), gross_pnl=Decimal(-5000),
        liquidation_fees=Decimal(0), close_reason=cause, closed_at=AT,
    )  # fmt: skip


async def test_events_of_the_service_become_alarms() -> None:
    halt = Halt(account_id=None, cause=HaltCause.DRAWDOWN, reason="20 %", by="limit", at=AT)
    events: list[Event] = [
        HaltsChanged(AT, (halt,)),
        HaltsChanged(AT, (halt,)),  # still in force
        TradesChanged(AT, ("apex",), (liquidated(Cause.STOP), liquidated(Cause.LIQUIDATION))),
        VenueDiffers(AT, "apex", "position", "the venue holds 1 BTC more"),
        LeadershipChanged("this process has taken over, term 3"),
        PostingRefused("apex", "cash_matches"),
    ]
    async with sinks() as here, alarms_to(f"{here.url}/works") as alarms:
        for event in events:
            alarms.on_event(event)
        bodies = await heard(here, "/works", 5)
        assert [(one["cause"], one["message"]) for one in bodies] == [
            ("loss limit", "all accounts: drawdown: 20 %"),
            ("liquidation", "apex: LONG 0.5 BTC at 90000, net -5050"),
            ("reconciliation", "apex: the venue holds 1 BTC more"),
            ("takeover", "this process has taken over, term 3"),
            ("books", "apex: cash_matches"),
        ]
        alarms.is_leader = lambda: False
        alarms.on_event(HaltsChanged(AT, ()))
        alarms.on_event(HaltsChanged(AT, (halt,)))
        assert alarms.counts[AlarmCause("loss limit", "all accounts")] == 1, "a standby leaves halts to the leader"


async def test_conditions_become_alarms_when_they_begin() -> None:
    stale = Alarm(AlarmCause("market"), "no update of the market for 61 s")
    async with sinks() as here, alarms_to(f"{here.url}/works", disk_least=10**18) as alarms:
        alarms.providers = lambda: {"nim": "key 1 is out of use"}
        for _ in range(3):
            alarms.watch([stale])
        bodies = await heard(here, "/works", 3)
        assert [(one["cause"], one["subject"], one["count"]) for one in bodies] == [
            ("market", "", 1),
            ("provider", "nim", 1),
            ("disk", "", 1),
        ]
        assert not alarms.is_healthy
        alarms.watch([])
        assert alarms.is_healthy


async def test_a_failing_model_is_one_alarm_and_its_end_another() -> None:
    async with sinks() as here, alarms_to(f"{here.url}/works") as alarms:
        alarms.models = lambda: {"ada": "fake answered 400"}
        alarms.providers = lambda: {"nim key 2": "is out of credit (402)"}
        for _ in range(3):
            alarms.watch([])
        assert alarms.is_healthy, "the service does its work"
        alarms.models = alarms.providers = dict
        for _ in range(2):
            alarms.watch([])
        bodies = await heard(here, "/works", 4)
        assert [(one["cause"], one["subject"], one["message"]) for one in bodies] == [
            ("provider", "nim key 2", "is out of credit (402)"),
            ("model", "ada", "ada fails: fake answered 400"),
            ("model recovered", "ada", "model ada works again"),
            ("provider recovered", "nim key 2", "provider nim key 2 works again"),
        ]


async def test_the_dead_man_is_pinged_while_the_service_is_healthy_only() -> None:
    healthy = asyncio.Event()
    async with sinks() as here:
        heartbeat = Heartbeat(Secret(f"{here.url}/ping?id={TOKEN}"))
        beats = asyncio.create_task(send_heartbeats(heartbeat, 0.01, healthy.is_set))
        other = Heartbeat(Secret(f"{here.url}/other"))
        for _ in range(5):
            await other.ping()
        assert here.of("/ping") == []
        healthy.set()
        async with asyncio.timeout(10):
            first, *_ = await here.wait_for("/ping", 3)
        assert (first.method, first.target) == ("GET", f"/ping?id={TOKEN}")
        beats.cancel()
        await asyncio.wait([beats])
        await heartbeat.close()
        await other.close()


@pytest.mark.parametrize("path", ["hangs", "fails"])
async def test_a_dead_man_service_that_is_away_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with sinks() as here:
        heartbeat = Heartbeat(Secret(f"{here.url}/{path}?id={TOKEN}"), timeout_s=0.05)
        beats = asyncio.create_task(send_heartbeats(heartbeat, 0.0, lambda: True))
        async with asyncio.timeout(10):
            await here.wait_for(f"/{path}", 4)
        beats.cancel()
        await asyncio.wait([beats])
        await heartbeat.close()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "trader.operations"]
    assert said.startswith("pings of HEARTBEAT_URL: ")
    assert TOKEN not in caplog.text
