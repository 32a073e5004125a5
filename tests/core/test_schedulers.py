import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.settable_clock import SettableClock
from support.waiting import turns

from trader.core import schedulers
from trader.core.clock import EPOCH, Clock, ScaledClock, SystemClock
from trader.core.errors import Unavailable
from trader.core.schedulers import Job, JobStatus, Schedulers, describe_error, next_due

START = datetime(2025, 1, 1, 12, 0, 17, 300_000, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def at(hour: int, minute: int, second: int = 0) -> datetime:
    return datetime(2025, 1, 1, hour, minute, second, tzinfo=UTC)


@pytest.mark.parametrize(
    ("due", "now", "expected"),
    [
        (START, START, (at(12, 1), 0)),
        (at(12, 1), at(12, 1), (at(12, 2), 0)),
        (at(12, 1), at(12, 1, 59), (at(12, 2), 0)),
        (at(12, 1), at(12, 2), (at(12, 3), 1)),
        (at(12, 1), at(12, 4, 30), (at(12, 5), 3)),
        (at(12, 1), at(12, 0, 59), (at(12, 2), 0)),  # set back a little: the tick does not repeat
        (at(12, 1), at(11, 0), (at(11, 1), 0)),  # set back an hour: the schedule follows the clock
    ],
)
def test_next_due_keeps_to_the_full_minutes(due: datetime, now: datetime, expected: tuple[datetime, int]) -> None:
    assert next_due(due, now, MINUTE) == expected


moments = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds


@given(moments, st.integers(0, 10**9), st.integers(1, 86_400_000))
def test_next_due_is_the_first_grid_time_after_now(due: datetime, late_ms: int, every_ms: int) -> None:
    every, now = timedelta(milliseconds=every_ms), due + timedelta(milliseconds=late_ms)
    following, missed = next_due(due, now, every)
    assert (following - EPOCH) % every == timedelta(0)
    assert timedelta(0) < following - now <= every
    grid = (following - EPOCH) // every - 1 - (due - EPOCH) // every
    assert missed == grid >= 0


class Recorder:
    """Records when it ran, and does what the test says."""

    def __init__(self, clock: Clock, work: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.clock = clock
        self.work = work
        self.started: list[datetime] = []
        self.active = 0
        self.active_max = 0

    async def __call__(self, now: datetime) -> None:
        self.started.append(now)
        self.active += 1
        self.active_max = max(self.active, self.active_max)
        try:
            if self.work:
                await self.work(len(self.started))
        finally:
            self.active -= 1


async def run_for(span: timedelta, clock: ManualClock, *rows: Job) -> dict[str, JobStatus]:
    owner = Schedulers(rows, clock)
    await owner.start()
    await clock.advance(span)
    try:
        return owner.status()
    finally:
        await owner.close()


async def test_runs_at_once_and_then_on_the_grid() -> None:
    clock = ManualClock(START)
    run = Recorder(clock)
    status = await run_for(timedelta(minutes=3), clock, Job("a", MINUTE, run))
    assert run.started == [START, at(12, 1), at(12, 2), at(12, 3)]
    assert status["a"] == JobStatus(
        interval_ms=60_000,
        running=True,
        runs=4,
        last_started_at=at(12, 3),
        last_finished_at=at(12, 3),
        last_duration_ms=status["a"].last_duration_ms,
        last_lag_ms=0,
        next_due_at=at(12, 4),
    )


async def test_a_long_run_skips_its_ticks_and_never_overlaps() -> None:
    clock = ManualClock(START)

    async def work(number: int) -> None:
        if number == 2:
            await clock.sleep_until(clock.now() + timedelta(seconds=150))

    run = Recorder(clock, work)
    status = await run_for(timedelta(minutes=6), clock, Job("a", MINUTE, run))
    assert run.started == [START, at(12, 1), at(12, 4), at(12, 5), at(12, 6)]
    assert run.active_max == 1
    assert (status["a"].runs, status["a"].skipped, status["a"].failures) == (5, 2, 0)


async def test_a_failure_is_logged_and_counted_and_the_schedule_continues(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(START)
    errors: dict[int, BaseException] = {1: Unavailable("the database is away"), 2: KeyError("BTC")}

    async def work(number: int) -> None:
        if number in errors:
            raise errors[number]

    run = Recorder(clock, work)
    owner = Schedulers([Job("a", MINUTE, run)], clock)
    await owner.start()
    with caplog.at_level(logging.ERROR):
        await clock.advance(timedelta(seconds=1))
        assert owner.status()["a"].last_error == "Unavailable: the database is away"
        await clock.advance(MINUTE)
        assert owner.status()["a"].last_error == "KeyError: 'BTC'"
    await clock.advance(MINUTE)
    status = owner.status()["a"]
    await owner.close()
    assert (status.runs, status.failures, status.failures_in_a_row, status.last_error) == (3, 2, 0, None)
    assert "scheduler a: run failed: the database is away" in caplog.text
    assert "scheduler a: run failed: KeyError: 'BTC'" in caplog.text
    assert [record.exc_info is not None for record in caplog.records] == [False, True]


async def test_a_canceled_part_of_a_run_does_not_end_the_schedule() -> None:
    clock = ManualClock(START)

    async def work(number: int) -> None:
        if number == 1:
            part = asyncio.create_task(asyncio.sleep(60))
            part.cancel()
            await part

    run = Recorder(clock, work)
    status = await run_for(MINUTE, clock, Job("a", MINUTE, run))
    assert (status["a"].runs, status["a"].failures) == (2, 1)


async def test_close_cancels_a_run_and_waits_for_it() -> None:
    ended = asyncio.Event()

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns(1)
            ended.set()

    clock = SystemClock()
    run = Recorder(clock, work)
    owner = Schedulers([Job("a", MINUTE, run)], clock)
    await owner.start()
    await turns(10)
    assert run.active == 1
    assert owner.status()["a"].running
    await owner.close()
    assert ended.is_set()
    assert not owner.status()["a"].running


async def test_a_hanging_run_is_canceled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "RUN_INTERVALS_MAX", 0.5)
    clock = SystemClock()
    second = asyncio.Event()

    async def work(number: int) -> None:
        if number > 1:
            second.set()
        await asyncio.Event().wait()

    owner = Schedulers([Job("a", timedelta(milliseconds=40), Recorder(clock, work))], clock)
    await owner.start()
    async with asyncio.timeout(5):
        await second.wait()
    status = owner.status()["a"]
    await owner.close()
    assert status.failures >= 1
    assert status.last_error == "TimeoutError: the run took longer than 0.02 s"


async def test_a_job_that_stops_starting_runs_counts_as_not_running() -> None:
    clock = ManualClock(START)

    async def work(number: int) -> None:
        if number == 2:
            await clock.sleep_until(START + timedelta(minutes=10))
        await turns(1)

    owner = Schedulers([Job("a", MINUTE, Recorder(clock, work))], clock)
    assert not owner.status()["a"].running  # not started
    await owner.start()
    await clock.advance(MINUTE)
    assert owner.status()["a"].running
    await clock.advance(timedelta(minutes=2, seconds=40))  # within three intervals of the start at 12:01
    assert owner.status()["a"].running
    await clock.advance(timedelta(seconds=10))
    assert not owner.status()["a"].running
    await clock.advance(timedelta(minutes=7))
    assert owner.status()["a"].running
    await owner.close()


async def test_scaled_time_paces_the_schedule() -> None:
    clock = ScaledClock(START, speed=6000)
    clock.release()
    done = asyncio.Event()

    async def work(number: int) -> None:
        if number == 4:
            done.set()

    run = Recorder(clock, work)
    owner = Schedulers([Job("a", MINUTE, run)], clock)
    await owner.start()
    async with asyncio.timeout(5):
        await done.wait()
    await owner.close()
    assert all(later - earlier > timedelta(0) for earlier, later in pairwise(run.started))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unavailable("db.example:5432 cannot be reached"), "Unavailable: db.example:5432 cannot be reached"),
        (ValueError(), "ValueError"),
        (OSError("postgresql://me:hunter2@db/x refused"), "OSError: postgresql://…db/x refused"),
        (RuntimeError("Authorization: Bearer abc123 is wrong"), "RuntimeError: Authorization: … is wrong"),
        (RuntimeError("key sk-or-v1-0123456789abcdef0123456789 died\nmore"), "RuntimeError: key … died"),
    ],
)
def test_errors_are_described_without_secrets(error: Exception, text: str) -> None:
    assert describe_error(error) == text


async def test_a_clock_set_back_an_hour_delays_no_run() -> None:
    clock = SettableClock()
    ran = asyncio.Event()

    async def run(number: int) -> None:
        ran.set()

    recorder = Recorder(clock, run)
    owner = Schedulers([Job("a", timedelta(milliseconds=100), recorder)], clock)
    await owner.start()
    try:
        await asyncio.wait_for(ran.wait(), 5)
        clock.shift = -timedelta(hours=1)
        assert not owner.status()["a"].running, "its last run lies in the future"
        for _ in range(2):  # the second run too: it is due on the grid of the new time
            ran.clear()
            await asyncio.wait_for(ran.wait(), 5)
        assert owner.status()["a"].running
    finally:
        await owner.close()
    assert recorder.started[-1] < recorder.started[0]
