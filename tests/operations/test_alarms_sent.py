"""Alarms through real HTTP sinks: one that works alongside others that hang, fail and close; and the heartbeat ping."""

import asyncio
import html
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import get_args
from uuid import uuid4

import orjson
import pytest
from support.sinks import NTFY, SLACK, TELEGRAM, Sinks, sinks
from support.waiting import becomes, until

from trader.core.clock import SystemClock
from trader.core.events import Event, LeadershipChanged, PostingRefused, VenueDiffers
from trader.database.pool import Database
from trader.exchange.domain.account import Trade
from trader.exchange.domain.halts import Halt, HaltCause
from trader.exchange.domain.orders import Cause, Side
from trader.exchange.events import HaltsChanged, TradesChanged
from trader.operations import alarms as service
from trader.operations.alarms import (
    CLOCK_STEADY_S,
    GIVE_UP_S,
    MISSING_S,
    QUEUE_MAX,
    Alarms,
    ClockWatch,
    send_heartbeats,
)
from trader.operations.domain.alarms import (
    EVERY_S,
    EXPLAIN_WAIT_S,
    HOLD_S,
    SETTLE_S,
    Alarm,
    AlarmCause,
    Notice,
    NoticeKind,
)
from trader.operations.notifications import RUNBOOKS, Heartbeat, make_sinks
from trader.operations.sql.status import upsert_maintenance
from trader.settings.forms import Secret

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
TOKEN = "s3cret-t0ken"
LIQUIDATION = Alarm(AlarmCause("liquidation", "apex"), "apex: LONG 1 BTC")


@asynccontextmanager
async def alarms_to(
    *urls: str,
    timer: Callable[[], float] = lambda: 0.0,
    timeout_s: float = 5.0,
    disk_least: int = 0,
    retry_after_s: tuple[float, ...] = (0.0,),
    now: Callable[[], datetime] = lambda: AT,
) -> AsyncIterator[Alarms]:
    receivers = make_sinks([Secret(url) for url in urls], "here:1", timeout_s=timeout_s)
    alarms = Alarms(
        receivers, timer=timer, now=now, retry_after_s=retry_after_s, disk_least=disk_least, folder=Path("/")
    )
    try:
        yield alarms
    finally:
        await alarms.close()


def services(here: Sinks) -> tuple[str, ...]:
    return f"ntfy+{here.url}{NTFY}", f"slack+{here.url}{SLACK}", f"telegram+{here.url}{TELEGRAM}?chat_id=-100"


async def heard(here: Sinks, path: str, count: int = 1) -> list[dict[str, object]]:
    async with asyncio.timeout(10):
        return [orjson.loads(request.body) for request in await here.wait_for(path, count)]


async def settled(alarms: Alarms) -> None:
    """Wait until nothing is waiting for a sink."""
    await until(lambda: not any(len(outlet) for outlet in alarms.outlets))


async def test_each_kind_of_receiver_gets_its_own_format() -> None:
    async with sinks() as here:
        async with alarms_to(f"{here.url}/json", *services(here)) as alarms:
            alarms.add(LIQUIDATION)
            await settled(alarms)
        section = "docs/operation.md#halt-resume-flatten"
        text = f"here:1: liquidation apex: apex: LONG 1 BTC; what to do: {section}"
        (generic,) = await heard(here, "/json")
        assert generic == {
            "text": text, "sender": "here:1", "state": "event", "cause": "liquidation", "subject": "apex",
            "message": LIQUIDATION.text, "impact": "", "consequences": [], "count": 1,
            "since": "2026-01-01T12:00:00.000Z", "at": "2026-01-01T12:00:00.000Z", "runbook": section,
        }  # fmt: skip
        (ntfy,) = here.of(NTFY)
        assert (ntfy.body.decode(), ntfy.headers["Title"], ntfy.headers["Priority"]) == (
            text,
            "trader: liquidation apex",
            "high",
        )
        assert await heard(here, SLACK) == [{"text": text}]
        assert await heard(here, TELEGRAM) == [{"chat_id": "-100", "text": text}]
        assert [outlet.outcomes["sent"] for outlet in alarms.outlets] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["<!channel> & <https://evil.example|here> &lt;", "\N{POLICE CARS REVOLVING LIGHT}" * 2000]
)
async def test_receivers_get_any_text_unchanged(text: str) -> None:
    async with sinks() as here:
        async with alarms_to(*services(here)) as alarms:
            alarms.add(LIQUIDATION._replace(text=text))
            await settled(alarms)
        assert [outlet.outcomes["sent"] for outlet in alarms.outlets] == [1, 1, 1]
        shown = f"here:1: liquidation apex: {text}; what to do: docs/operation.md#halt-resume-flatten"[:1000]
        assert here.of(NTFY)[0].body.decode() == shown
        assert (await heard(here, TELEGRAM))[0]["text"] == shown
        assert html.unescape(str((await heard(here, SLACK))[0]["text"])) == shown


async def test_sinks_that_hang_fail_and_close_delay_nothing_and_are_retried_for_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    async with sinks() as here:
        urls = [f"{here.url}/{path}?key={TOKEN}" for path in ("hangs", "fails", "closes", "works")]
        async with alarms_to(
            *urls, f"http://127.0.0.1:9/{TOKEN}", timer=lambda: now_s, timeout_s=0.1, retry_after_s=(0.01,)
        ) as alarms:
            alarms.add(LIQUIDATION)
            assert len(await heard(here, "/works")) == 1
            for path in ("/hangs", "/fails", "/closes"):
                await heard_times(here, path, 3)
            assert [outlet.outcomes["failed"] for outlet in alarms.outlets] == [0] * 5
            now_s = GIVE_UP_S
            await settled(alarms)
            outcomes = {outlet.name: (outlet.outcomes["sent"], outlet.outcomes["failed"]) for outlet in alarms.outlets}
        assert outcomes == {"json 1": (0, 1), "json 2": (0, 1), "json 3": (0, 1), "json 4": (1, 0), "json 5": (0, 1)}
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "notices do not reach the sink json 2 of NOTIFY_URL: the answer was HTTP 500" in said
        assert len(said) == 4
        assert TOKEN not in caplog.text
        assert here.url not in caplog.text


async def test_a_recovered_sink_gets_notices_in_order_and_only_the_end_of_ended_alarms() -> None:
    now_s = 0.0
    async with sinks() as here, alarms_to(f"{here.url}/away", timer=lambda: now_s, retry_after_s=(0.01,)) as alarms:
        here.away = True
        alarms.watch([Alarm(AlarmCause("database"), "the database does not answer")])
        now_s = HOLD_S
        alarms.watch([Alarm(AlarmCause("database"), "the database does not answer")])
        alarms.add(LIQUIDATION)
        now_s = HOLD_S + SETTLE_S
        alarms.watch([])
        await heard_times(here, "/away", 3)
        here.away = False
        await settled(alarms)
        taken = [(body["state"], body["cause"]) for body in await heard(here, "/away")][-2:]
        assert taken == [("event", "liquidation"), ("resolved", "database")]
        (outlet,) = alarms.outlets
        assert (outlet.outcomes["sent"], outlet.outcomes["superseded"]) == (2, 1)


async def test_the_end_of_an_alarm_drops_no_notice_of_another_subject() -> None:
    ada, bob = (Alarm(AlarmCause("loss limit", name), "drawdown: 20 %") for name in ("ada", "bob"))
    async with sinks() as here, alarms_to(f"{here.url}/away", retry_after_s=(0.01,)) as alarms:
        here.away = True
        present = [ada, bob]
        alarms.sources.append(lambda: present)
        alarms.watch([])
        present = [bob]
        alarms.watch([])
        await heard_times(here, "/away", 2)
        here.away = False
        await settled(alarms)
        taken = [(body["state"], body["subject"]) for body in await heard(here, "/away")][-2:]
        assert taken == [("firing", "bob"), ("resolved", "ada")]


async def test_a_sink_that_refuses_a_notice_is_not_retried() -> None:
    async with sinks() as here, alarms_to(f"telegram+{here.url}{TELEGRAM}?chat_id=nobody!") as alarms:
        alarms.add(LIQUIDATION)
        await settled(alarms)
        assert len(here.of(TELEGRAM)) == 1, "HTTP 400 will not resolve itself"
        assert alarms.outlets[0].outcomes["failed"] == 1


class SinkWithBug:
    """A sink that fails at the first notice."""

    name = "buggy"

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def send(self, notice: Notice) -> None:
        self.taken.append(notice.text)
        if len(self.taken) == 1:
            raise KeyError("no such field")

    async def close(self) -> None:
        """Do nothing."""


async def test_a_notice_that_a_bug_keeps_back_is_logged_and_the_next_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    sink = SinkWithBug()
    alarms = Alarms([sink], timer=lambda: 0.0, now=lambda: AT)
    alarms.add(LIQUIDATION)
    alarms.add(Alarm(AlarmCause("liquidation", "sov"), "sov: LONG 1 BTC"))
    await settled(alarms)
    await alarms.close()
    assert sink.taken == ["apex: LONG 1 BTC", "sov: LONG 1 BTC"]
    assert (alarms.outlets[0].outcomes["failed"], alarms.outlets[0].outcomes["sent"]) == (1, 1)
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


async def test_each_kind_of_receiver_learns_which_alarms_fire_and_which_have_ended() -> None:
    now_s = 0.0
    database = [Alarm(AlarmCause("database"), "the database does not answer", impact="7 orders were refused")]
    async with sinks() as here, alarms_to(f"{here.url}/json", *services(here), timer=lambda: now_s) as alarms:
        alarms.add(Alarm(AlarmCause("takeover"), "this process has lost the leading role"))
        alarms.watch(database)
        now_s = HOLD_S
        alarms.watch(database)
        lost = "takeover: this process has lost the leading role"
        assert [(str(each.alarm.cause), each.consequences) for each in alarms.firing()] == [("database", (lost,))]
        await settled(alarms)
        now_s = HOLD_S + SETTLE_S
        alarms.watch([])
        await settled(alarms)
        assert alarms.firing() == []
        text = f"database: the database does not answer; 7 orders were refused; with it: {lost}"
        at = "2026-01-01T12:00:00.000Z"
        advice = "what to do: docs/operation.md#a-lock-or-another-trouble-of-the-database"
        fires, over = f"here:1: firing: {text}; {advice}", f"here:1: resolved: {text} [lasted 0 s, from {at} to {at}]"
        assert [(body["state"], body["consequences"], body["text"]) for body in await heard(here, "/json")] == [
            ("firing", [lost], fires),
            ("resolved", [lost], over),
        ]
        assert [(each.headers["Title"], each.headers["Priority"]) for each in here.of(NTFY)] == [
            ("trader: database", "high"),
            ("trader: database resolved", "default"),
        ]
        assert [body["text"] for body in await heard(here, SLACK)] == [fires, over]
        assert [body["text"] for body in await heard(here, TELEGRAM)] == [fires, over]


async def test_a_sink_that_hangs_forever_blocks_neither_alarms_nor_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SHUTDOWN_FLUSH_S", 0.05)
    async with sinks() as here:
        async with alarms_to(f"{here.url}/hangs", timeout_s=3600) as alarms:
            for number in range(QUEUE_MAX + 20):
                alarms.add(Alarm(AlarmCause("liquidation", str(number)), "gone"))
            await heard_times(here, "/hangs", 1)
            (outlet,) = alarms.outlets
            assert len(outlet) == QUEUE_MAX, "the queue is bounded"
            assert outlet.outcomes["dropped"] == 20
        assert len(here.of("/hangs")) == 1


async def heard_times(here: Sinks, path: str, count: int) -> None:
    async with asyncio.timeout(10):
        await here.wait_for(path, count)


async def test_repeats_of_one_cause_within_an_hour_make_one_notice_with_a_count() -> None:
    now_s = 0.0
    async with sinks() as here, alarms_to(f"{here.url}/works", timer=lambda: now_s) as alarms:
        for _ in range(5):
            alarms.add(LIQUIDATION)
        now_s = EVERY_S - 1
        alarms.watch([])
        assert [alarm["count"] for alarm in await heard(here, "/works")] == [1]
        now_s = EVERY_S
        alarms.watch([])
        (_, later) = await heard(here, "/works", 2)
        assert later["count"] == 4
        assert str(later["text"]).count("(4 times since 2026-01-01T12:00:00.000Z)")
        assert alarms.counts["liquidation"] == 5


def liquidated(cause: Cause) -> Trade:
    return Trade(
        id=uuid4(), symbol="BTC", side=Side.LONG, quantity=Decimal("0.5"), entry_notional=Decimal(50_000),
        margin=Decimal(5000), opened_at=AT, funded_until=AT, fees=Decimal(50),
        account_id="apex", run_id=uuid4(), parent_id=None, exit_notional=Decimal(45_000), gross_pnl=Decimal(-5000),
        liquidation_fees=Decimal(0), close_reason=cause, closed_at=AT,
    )  # fmt: skip


async def test_events_of_the_service_become_alarms() -> None:
    now_s = 0.0
    halt = Halt(account_id="apex", cause=HaltCause.DRAWDOWN, reason="20 %", by="limit", at=AT)
    other = Halt(account_id="bob", cause=HaltCause.DRAWDOWN, reason="20 %", by="limit", at=AT)
    events: list[Event] = [
        HaltsChanged(AT, (halt,)),
        HaltsChanged(AT, (halt, other)),
        HaltsChanged(AT, (other,)),
        TradesChanged(AT, ("apex",), (liquidated(Cause.STOP), liquidated(Cause.LIQUIDATION))),
        PostingRefused("apex", "cash_matches"),
        VenueDiffers(AT, "apex", "position", "the venue holds 1 BTC more"),
        LeadershipChanged("this process has taken over, term 3"),
    ]
    async with sinks() as here, alarms_to(f"{here.url}/works", timer=lambda: now_s) as alarms:
        for event in events:
            alarms.on_event(event)
            await settled(alarms)
        assert len(await heard(here, "/works", 5)) == 5
        now_s = EXPLAIN_WAIT_S
        alarms.watch([])
        bodies = await heard(here, "/works", 7)
        assert [(body["state"], body["cause"], body["subject"], body["message"]) for body in bodies] == [
            ("firing", "loss limit", "apex", "account apex: drawdown: 20 %"),
            ("firing", "loss limit", "bob", "account bob: drawdown: 20 %"),
            ("resolved", "loss limit", "apex", "account apex: drawdown: 20 %"),
            ("event", "liquidation", "apex", "apex: LONG 0.5 BTC at 90000, net -5050"),
            ("event", "books", "apex", "cash_matches"),
            ("event", "reconciliation", "apex", "the venue holds 1 BTC more"),
            ("event", "takeover", "", "this process has taken over, term 3"),
        ]
        assert (alarms.counts["loss limit"], alarms.counts["books"], alarms.counts["halt"]) == (2, 1, 0)


async def test_a_halt_from_before_the_start_is_reported_when_it_is_over() -> None:
    halt = Halt(account_id=None, cause=HaltCause.OPERATOR, reason="asked", by="somebody", at=AT)
    async with sinks() as here, alarms_to(f"{here.url}/works") as alarms:
        alarms.is_leader = lambda: False
        alarms.on_event(HaltsChanged(AT, (halt,)))
        alarms.is_leader = lambda: True
        alarms.watch([])
        assert [str(each.alarm.cause) for each in alarms.firing()] == ["halt all accounts"]
        alarms.on_event(HaltsChanged(AT, ()))
        assert [(body["state"], body["cause"]) for body in await heard(here, "/works")] == [("resolved", "halt")]


async def test_what_began_or_ended_while_nobody_led_is_reported_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DATABASE_EVERY_S", 0.01)
    everyone, ada = (
        Halt(account_id=account_id, cause=HaltCause.OPERATOR, reason="asked", by="somebody", at=AT)
        for account_id in (None, "ada")
    )
    async with sinks() as here, alarms_to(f"{here.url}/works", now=SystemClock().now) as alarms:
        alarms.keep_history(database, "here:1")
        watching = asyncio.create_task(alarms.watch_database(database))
        for present, notices in (((everyone,), 1), ((everyone, ada), 2), ((ada,), 3), ((), 4)):
            alarms.is_leader = lambda: False
            alarms.on_event(HaltsChanged(AT, ()))  # as after a restart, which knows no halt
            alarms.on_event(HaltsChanged(AT, present))
            alarms.is_leader = lambda: True
            await heard(here, "/works", notices)
            await settled(alarms)
        assert [(body["state"], body["subject"]) for body in await heard(here, "/works", 4)] == [
            ("firing", "all accounts"), ("firing", "ada"), ("resolved", "all accounts"), ("resolved", "ada")
        ]  # fmt: skip
        watching.cancel()


@pytest.mark.parametrize("leads", ["before the end", "after the end"])
async def test_an_alarm_that_ended_is_not_reported_by_the_next_leader(
    database: Database, monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    monkeypatch.setattr(service, "DATABASE_EVERY_S", 0.01)
    halt = Halt(account_id=None, cause=HaltCause.OPERATOR, reason="asked", by="somebody", at=AT)
    now = SystemClock().now
    async with (
        sinks() as here,
        alarms_to(f"{here.url}/works", now=now) as leader,
        alarms_to(f"{here.url}/works", now=now) as standby,
    ):
        leader.keep_history(database, "here:1")
        standby.keep_history(database, "here:2")
        standby.is_leader = lambda: False
        for alarms in (leader, standby):
            alarms.on_event(HaltsChanged(AT, (halt,)))
        await settled(leader)
        if leads == "before the end":
            standby.is_leader = lambda: True
        else:
            leader.on_event(HaltsChanged(AT, ()))
            await settled(leader)
        standby.on_event(HaltsChanged(AT, ()))
        await settled(standby)
        standby.is_leader = lambda: True
        watching = asyncio.create_task(standby.watch_database(database))
        for _ in range(2):  # the second look begins after the first has ended
            standby.database_bytes = 0
            await until(lambda: standby.database_bytes)
        await settled(standby)
        assert [body["state"] for body in await heard(here, "/works", 2)] == ["firing", "resolved"]
        watching.cancel()


async def test_conditions_are_reported_when_they_start_and_when_they_are_over() -> None:
    now_s = 0.0
    stale = Alarm(AlarmCause("scheduler", "tradeExecutor"), "does not run")
    sick = [Alarm(AlarmCause("model", "ada"), "ada fails", under=AlarmCause("provider", "nim"))]
    async with (
        sinks() as here,
        alarms_to(f"{here.url}/works", timer=lambda: now_s, disk_least=10**18) as alarms,
    ):
        alarms.sources.append(lambda: sick)
        for _ in range(3):
            alarms.watch([stale])
            now_s += EXPLAIN_WAIT_S / 2
        bodies = await heard(here, "/works", 3)
        assert [(body["cause"], body["subject"], body["count"]) for body in bodies] == [
            ("scheduler", "tradeExecutor", 1),
            ("disk", "", 1),
            ("model", "ada", 1),
        ]
        assert not alarms.is_healthy
        sick.clear()
        alarms.watch([])
        assert alarms.is_healthy
        now_s += 2 * SETTLE_S
        alarms.watch([])
        ended = (await heard(here, "/works", 5))[3:]
        assert {(body["state"], body["cause"]) for body in ended} == {("resolved", "scheduler"), ("resolved", "model")}


async def test_a_clock_jump_is_reported_and_over_a_minute_after_the_last_one() -> None:
    now_s = ahead_s = 0.0
    async with sinks() as here, alarms_to(f"{here.url}/works", timer=lambda: now_s) as alarms:
        clock = ClockWatch(lambda: AT + timedelta(seconds=now_s + ahead_s), lambda: now_s)
        alarms.sources.append(clock.problems)
        for step_s, set_s in ((5.0, 0.5), (5.0, 3600.0), (30.0, -3600.0), (CLOCK_STEADY_S - 5.0, 0.0)):
            now_s, ahead_s = now_s + step_s, ahead_s + set_s
            alarms.watch([])
        assert [str(condition.alarm.cause) for condition in alarms.firing()] == ["clock"]
        await settled(alarms)
        for step_s in (5.0, SETTLE_S):
            now_s += step_s
            alarms.watch([])
        assert alarms.firing() == []
        await settled(alarms)
        told = [(body["state"], body["message"]) for body in await heard(here, "/works", 2)]
    assert told == [
        ("firing", "the machine's clock was set forward by 3600.0 s, or the machine slept"),
        ("resolved", "the machine's clock was set back by 3600.0 s, or the machine slept"),
    ]


async def test_the_heartbeat_is_sent_only_while_the_service_is_healthy() -> None:
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


async def test_the_first_heartbeat_follows_a_start_and_not_the_next_interval() -> None:
    looks = iter([False, False, True])
    async with sinks() as here, asyncio.timeout(10):
        heartbeat = Heartbeat(Secret(f"{here.url}/ping"))
        beats = asyncio.create_task(send_heartbeats(heartbeat, 3600.0, lambda: next(looks)))
        await here.wait_for("/ping")
        beats.cancel()
        await asyncio.wait([beats])
        await heartbeat.close()


@pytest.mark.parametrize("path", ["hangs", "fails"])
async def test_an_unavailable_heartbeat_service_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with sinks() as here:
        timeout_s = 0.05 if path == "hangs" else 10
        heartbeat = Heartbeat(Secret(f"{here.url}/{path}?id={TOKEN}"), timeout_s=timeout_s)
        beats = asyncio.create_task(send_heartbeats(heartbeat, 0.0, lambda: True))
        async with asyncio.timeout(10):
            await here.wait_for(f"/{path}", 4)
        beats.cancel()
        await asyncio.wait([beats])
        await heartbeat.close()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "trader.operations"]
    assert said.startswith("pings of HEARTBEAT_URL: ")
    assert TOKEN not in caplog.text


async def test_problems_that_maintenance_found_and_a_missing_result_are_alarms(database: Database) -> None:
    now_s = 0.0
    alarms = Alarms([], timer=lambda: now_s)
    async with database.connection() as conn:
        await upsert_maintenance(conn, "audit", 2)
        await upsert_maintenance(conn, "backup", 0)
    watching = asyncio.create_task(alarms.watch_database(database))
    await becomes(
        lambda: [each.alarm.text for each in alarms.present()],
        ["the last audit found 2 problems; its output is in the log of the timer"],
    )
    now_s = MISSING_S + 1
    assert [each.alarm.cause for each in alarms.present()] == [
        ("maintenance", "audit"),
        ("maintenance", "backup"),
    ]
    watching.cancel()


def test_every_kind_of_notice_has_a_runbook_that_the_document_has() -> None:
    text = (Path(__file__).parents[2] / "docs/operation.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(RUNBOOKS.values()) <= anchors
    assert set(get_args(NoticeKind)) - RUNBOOKS.keys() == {"start", "test"}


async def test_a_sink_that_fails_is_an_alarm_at_the_others() -> None:
    async with sinks() as here, alarms_to(f"{here.url}/works", f"{here.url}/fails", retry_after_s=(30.0,)) as alarms:
        alarms.add(LIQUIDATION)
        await here.wait_for("/fails")
        await until(lambda: alarms.outlets[1].trouble)
        alarms.watch([])
        _, told = await heard(here, "/works", 2)
        assert (told["cause"], told["subject"], told["state"]) == ("notices", "json 2", "firing")
        assert told["message"] == "notices do not reach json 2: the answer was HTTP 500"
