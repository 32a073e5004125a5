"""The clocks: one form of time, and a lockstep in which the same work always happens in the same order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.settable_clock import SettableClock
from support.waiting import turns

from trader.core.clock import (
    Clock,
    ClockFuture,
    JumpWatch,
    LockstepClock,
    ScaledClock,
    SystemClock,
    cut_to_ms,
    interval_elapsed,
    iso,
)

START = datetime(2025, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2025, 1, 2, 3, 4, 5, 678_999, UTC), "2025-01-02T03:04:05.678Z"),
        (datetime(2025, 1, 2, tzinfo=UTC), "2025-01-02T00:00:00.000Z"),
        (datetime(2025, 1, 2, 1, tzinfo=timezone(timedelta(hours=2))), "2025-01-01T23:00:00.000Z"),
    ],
)
def test_iso_is_utc_with_milliseconds(moment: datetime, text: str) -> None:
    assert iso(moment) == text


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2999, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001 - bounds of the strategy are naive
def test_cut_to_ms_keeps_what_iso_writes(moment: datetime) -> None:
    cut = cut_to_ms(moment)
    assert timedelta(0) <= moment - cut < timedelta(milliseconds=1)
    assert datetime.fromisoformat(iso(moment)) == cut


async def test_system_clock_is_utc_cut_to_milliseconds() -> None:
    clock = SystemClock()
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    now = clock.now()
    assert before <= now <= datetime.now(UTC)
    assert now.utcoffset() == timedelta(0)
    assert now.microsecond % 1000 == 0
    await asyncio.wait_for(clock.sleep_until(now - SECOND), 1)
    moment = clock.now() + timedelta(milliseconds=5)
    await clock.advance_to(moment)
    assert clock.now() >= moment


async def test_scaled_clock_runs_ahead_of_real_time() -> None:
    clock = ScaledClock(START, speed=10_000)
    clock.release()
    assert clock.real_seconds(timedelta(seconds=20)) == 0.002
    moment = clock.now() + timedelta(minutes=1)
    await asyncio.wait_for(clock.sleep_until(moment), 1)
    assert clock.now() >= moment


async def test_scaled_clock_reaches_a_tick_when_the_feed_asks_for_the_next() -> None:
    clock = ScaledClock(START, speed=10_000)
    await clock.advance_to(START + SECOND)
    waiting = asyncio.create_task(clock.sleep_until(START + SECOND))
    await asyncio.sleep(0.01)  # a hundred seconds of the clock, if nothing held it
    assert clock.now() == START + timedelta(seconds=0.999)
    assert not waiting.done()
    await clock.advance_to(START + 2 * SECOND)
    await asyncio.wait_for(waiting, 1)
    assert START + SECOND <= clock.now() < START + 2 * SECOND


async def test_scaled_clock_stands_still_at_its_limit() -> None:
    clock = ScaledClock(START, speed=10_000)
    clock.release()
    clock.allow(START + SECOND)
    waiting = asyncio.create_task(clock.sleep_until(START + 2 * SECOND))
    await asyncio.sleep(0.01)  # a hundred seconds of the clock, if nothing held it
    assert clock.now() == START + SECOND
    assert not waiting.done()
    clock.allow(None)
    await asyncio.wait_for(waiting, 1)


async def test_scaled_clock_skips_only_ahead() -> None:
    clock = ScaledClock(START, speed=1)
    clock.skip_to(START + 60 * SECOND)
    clock.skip_to(START + 30 * SECOND)
    assert clock.now() == START + 60 * SECOND
    await asyncio.wait_for(clock.advance_to(START + 2 * SECOND), 1)
    assert clock.now() == START + 60 * SECOND, "a feed that lags catches up without moving time"


async def test_scaled_clock_keeps_to_real_time_while_a_model_thinks() -> None:
    clock = ScaledClock(START, speed=10_000)
    clock.release()
    with clock.thinking():
        began = clock.now()
        sleeping = asyncio.create_task(clock.sleep_until(began + 60 * SECOND))
        await asyncio.sleep(0.01)  # a hundred seconds of the clock, if nothing held it
        assert clock.now() - began < SECOND
    await asyncio.wait_for(sleeping, 1)


@asynccontextmanager
async def tasks_of(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Let the tasks start, and end those that are still waiting at the end."""
    await turns(1)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _log_sleep(clock: Clock, moment: datetime, name: int, log: list[tuple[int, datetime]]) -> None:
    async with clock.busy():
        await clock.sleep_until(moment)
        await turns(1)  # what follows takes a few turns of the loop
        log.append((name, clock.now()))


@given(st.lists(st.integers(1, 20), max_size=12), st.lists(st.integers(1, 25), min_size=1, max_size=6))
def test_sleepers_wake_at_their_own_time_and_in_order(dues: list[int], leads: list[int]) -> None:
    async def run() -> None:
        clock = LockstepClock(START)
        log: list[tuple[int, datetime]] = []
        tasks = [
            asyncio.create_task(_log_sleep(clock, START + due * SECOND, name, log)) for name, due in enumerate(dues)
        ]
        async with tasks_of(*tasks):
            reached = 0
            for lead in leads:
                await clock.advance_to(START + lead * SECOND)
                reached = max(reached, lead)
                assert clock.now() == START + reached * SECOND
        woken = sorted((due, name) for name, due in enumerate(dues) if due < reached)
        assert log == [(name, START + due * SECOND) for due, name in woken]

    asyncio.run(run())


async def test_time_stands_still_while_a_task_works() -> None:
    clock = LockstepClock(START)
    work = asyncio.Event()

    async def participant() -> None:
        async with clock.busy():
            await work.wait()  # real input or output, such as the database

    task = asyncio.create_task(participant())
    async with tasks_of(task):
        lead = asyncio.create_task(clock.advance_to(START + SECOND))
        await asyncio.wait([lead], timeout=0.02)
        assert not lead.done()
        assert clock.now() == START
        work.set()
        await lead
    assert clock.now() == START + SECOND


async def test_lockstep_waits_for_a_woken_task_before_waking_the_next() -> None:
    clock = LockstepClock(START)
    log: list[str] = []

    async def participant(name: str, due: int) -> None:
        async with clock.busy():
            await clock.sleep_until(START + due * SECOND)
            await turns(5)
            log.append(f"{name} at {(clock.now() - START) // SECOND}")
            await clock.sleep_until(START + 3 * SECOND)
            log.append(f"{name} again")

    async with tasks_of(asyncio.create_task(participant("b", 2)), asyncio.create_task(participant("a", 1))):
        await clock.advance_to(START + 4 * SECOND)
    assert log == ["a at 1", "b at 2", "a again", "b again"]


async def test_a_parked_task_counts_as_working_as_soon_as_its_value_is_set() -> None:
    clock = LockstepClock(START)
    future: ClockFuture[str] = clock.future()
    log: list[object] = []

    async def waiter() -> None:
        async with clock.busy():
            log.append(await future.wait())
            await turns(1)
            log.append(clock.now())

    async with tasks_of(asyncio.create_task(waiter())):
        await clock.advance_to(START + SECOND)  # a parked task does not hold time
        future.set("quote")
        future.set("too late")
        await clock.advance_to(START + 2 * SECOND)
    assert log == ["quote", START + SECOND]


async def test_a_value_that_is_already_set_is_returned_at_once() -> None:
    clock = LockstepClock(START)
    future: ClockFuture[int] = clock.future()
    future.set(1)
    async with clock.busy():
        assert await future.wait() == 1
    await asyncio.wait_for(clock.advance_to(START + SECOND), 1)


async def test_canceled_sleeper_does_not_hold_time() -> None:
    clock = LockstepClock(START)
    cleaned: list[datetime] = []

    async def participant() -> None:
        async with clock.busy():
            try:
                await clock.sleep_until(START + 10 * SECOND)
            finally:
                await turns(1)
                cleaned.append(clock.now())

    task = asyncio.create_task(participant())
    await turns(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(clock.advance_to(START + 20 * SECOND), 1)
    assert cleaned == [START]


async def test_task_canceled_while_being_woken_is_counted_once() -> None:
    clock = LockstepClock(START)
    future: ClockFuture[None] = clock.future()

    async def participant() -> None:
        async with clock.busy():
            await future.wait()

    task = asyncio.create_task(participant())
    await turns(1)
    future.set(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    blocker = asyncio.create_task(_log_sleep(clock, START + SECOND, 1, []))
    async with tasks_of(blocker):
        await asyncio.wait_for(clock.advance_to(START + 2 * SECOND), 1)
        await asyncio.wait_for(blocker, 1)


async def test_task_outside_the_lockstep_is_woken_but_not_waited_for() -> None:
    clock = LockstepClock(START)
    work = asyncio.Event()

    async def request() -> None:
        await clock.sleep_until(START + SECOND)
        await work.wait()

    task = asyncio.create_task(request())
    async with tasks_of(task):
        await asyncio.wait_for(clock.advance_to(START + 2 * SECOND), 1)
        assert not task.done()


async def test_child_task_does_not_inherit_participation() -> None:
    clock = LockstepClock(START)

    async def child() -> None:
        await clock.sleep_until(START + 5 * SECOND)  # would count its parent out if it participated

    async with clock.busy():
        task = asyncio.create_task(child())
        await turns(1)
        lead = asyncio.create_task(clock.advance_to(START + SECOND))
        await asyncio.wait([lead], timeout=0.02)
        assert not lead.done()
    await asyncio.wait_for(lead, 1)
    async with tasks_of(task):
        pass


async def test_nested_busy_blocks_count_once() -> None:
    clock = LockstepClock(START)
    async with clock.busy():
        async with clock.busy():
            pass
        lead = asyncio.create_task(clock.advance_to(START + SECOND))
        await asyncio.wait([lead], timeout=0.02)
        assert not lead.done()
    await asyncio.wait_for(lead, 1)


async def test_sleeping_until_a_past_moment_returns_at_once() -> None:
    clock = LockstepClock(START)
    async with clock.busy():
        await asyncio.wait_for(clock.sleep_until(START), 1)
        await asyncio.wait_for(clock.sleep_until(START - SECOND), 1)
    await clock.advance_to(START - SECOND)
    assert clock.now() == START, "time never goes back"


async def test_manual_clock_wakes_sleepers_due_at_the_last_moment() -> None:
    clock = ManualClock(START)
    log: list[tuple[int, datetime]] = []
    async with tasks_of(
        asyncio.create_task(_log_sleep(clock, START + SECOND, 1, log)),
        asyncio.create_task(_log_sleep(clock, START + SECOND + timedelta(milliseconds=1), 2, log)),
    ):
        await clock.advance(SECOND)
        assert log == [(1, START + SECOND)]
        assert clock.now() == START + SECOND


@pytest.mark.parametrize(
    ("late_s", "comes"), [(-1, False), (-10, False), (-10.001, True), (-3600, True), (0, True), (3600, True)]
)
def test_setting_the_clock_back_does_not_delay_due_work(late_s: float, comes: bool) -> None:
    assert interval_elapsed(START, 10 * SECOND, START + timedelta(seconds=late_s)) is comes


async def test_a_wait_lasts_no_longer_after_the_clock_is_set_back() -> None:
    clock = SettableClock()
    waiting = asyncio.create_task(clock.sleep_until(clock.now() + timedelta(milliseconds=50)))
    await turns(1)
    clock.shift = -timedelta(hours=1)
    await asyncio.wait_for(waiting, 5)


async def test_a_small_step_back_still_waits_until_the_moment() -> None:
    clock = SettableClock()
    moment = clock.now() + timedelta(milliseconds=50)
    waiting = asyncio.create_task(clock.sleep_until(moment))
    await turns(1)
    clock.shift = -timedelta(milliseconds=100)
    await asyncio.wait_for(waiting, 5)
    assert clock.now() >= moment


def test_a_clock_jump_is_noticed_once() -> None:
    at, timer_s = START, 0.0
    watch = JumpWatch(lambda: at, lambda: timer_s)
    for passed_s, set_s, expected in (
        (5.0, 0, None),
        (5.0, 0.9, None),
        (5.0, 60, 60),
        (5.0, 0, None),
        (7.5, -3600, -3600),
    ):
        at += timedelta(seconds=passed_s + set_s)
        timer_s += passed_s
        jump = watch.jump()
        assert (None if jump is None else jump.total_seconds()) == expected
