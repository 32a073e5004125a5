"""Schedulers: jobs that run at intervals, each in its own long-lived task.

A job runs once at the start, and then at multiples of its interval since the epoch: a one-minute job runs
on the full minute. Runs of one job never overlap: times that pass during a run are skipped and counted. A failed run is
logged and counted, and the schedule continues.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from trader.core import tasks
from trader.core.clock import Clock, LockstepClock, floor_time
from trader.core.errors import TraderError

log = logging.getLogger(__name__)

RUN_INTERVALS_MAX = 10
"""A run that takes this many of its intervals in real time is canceled."""

ALIVE_INTERVALS = 3
"""A job counts as running if it started or finished a run within this many of its intervals."""

CLOSE_S = 2.0
"""How long `close` waits for canceled runs to clean up."""

JobFunction = Callable[[datetime], Awaitable[object]]
"""Takes the time at which its run starts."""


@dataclass(frozen=True, slots=True)
class Job:
    """A function to run at an interval."""

    name: str
    every: timedelta
    run: JobFunction


@dataclass(slots=True)
class JobStatus:
    """Status of a job. Times come from the service's clock; the duration is in real time."""

    interval_ms: int
    running: bool = False
    runs: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    skipped: int = 0
    last_started_at: datetime | None = None
    last_finished_at: datetime | None = None
    last_duration_ms: int | None = None
    last_error: str | None = None
    last_lag_ms: int | None = None
    next_due_at: datetime | None = None


def next_due(due: datetime, now: datetime, every: timedelta) -> tuple[datetime, int]:
    """Return the next scheduled time after `now`, and how many scheduled times after `due` were missed.

    If the clock is set back by less than an interval, no run repeats; if it is set back further, the schedule follows.
    """
    last = floor_time(due if due - every < now < due else now, every)
    return last + every, max(0, (last - floor_time(due, every)) // every)


async def run_forever(job: Job, clock: Clock, status: JobStatus, due: datetime) -> None:
    """Run `job` at `due` and then at every scheduled time, until canceled."""
    async with clock.busy():
        while True:
            status.next_due_at = due
            await clock.sleep_until(due)
            status.last_lag_ms = max(timedelta(0), clock.now() - due) // timedelta(milliseconds=1)
            await _run(job, clock, status)
            due, missed = next_due(due, clock.now(), job.every)
            status.skipped += missed


async def _run(job: Job, clock: Clock, status: JobStatus) -> None:
    started_s = time.monotonic()
    status.last_started_at = clock.now()
    error = await _run_once(job, clock, status.last_started_at)
    status.runs += 1
    status.last_finished_at = clock.now()
    status.last_duration_ms = round((time.monotonic() - started_s) * 1000)
    status.last_error = None if error is None else describe_error(error)
    status.failures_in_a_row = 0 if error is None else status.failures_in_a_row + 1
    if error is not None:
        status.failures += 1
        if isinstance(error, TraderError):
            log.error("scheduler %s: run failed: %s", job.name, error)
        else:
            log.error("scheduler %s: run failed: %s", job.name, status.last_error, exc_info=error)


async def _run_once(job: Job, clock: Clock, now: datetime) -> BaseException | None:
    """Run the job once and return its error, so that the schedule continues."""
    # A lockstep clock pauses until the work is done, so real time does not bound it.
    timeout_s = None if isinstance(clock, LockstepClock) else (RUN_INTERVALS_MAX * job.every).total_seconds()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await job.run(now)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error  # something that the run awaited was canceled, not this task
    except Exception as error:  # noqa: BLE001 - a scheduler's loop outlives any error of a single run
        return TimeoutError(f"the run took longer than {timeout_s:g} s") if limit.expired() else error
    return None


_SECRETS = re.compile(r"(?<=//)[^/\s@]+@|(?i:bearer|basic)\s+\S+|[A-Za-z0-9_\-+/=.]{24,}")


def describe_error(error: BaseException) -> str:
    """Return the class and the first line of an error, without secrets.

    The service's own errors contain none. In other errors, anything that may be a credential is replaced: the user and
    password of a URL, authorization values, and any run of 24 or more characters without a space.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = str(error).partition("\n")[0][:300]
    if not isinstance(error, TraderError):
        message = _SECRETS.sub("…", message)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class Schedulers:
    """Runs the jobs, each in its own task."""

    def __init__(self, jobs: Sequence[Job], clock: Clock) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._status = {job.name: JobStatus(interval_ms=job.every // timedelta(milliseconds=1)) for job in jobs}

    async def start(self) -> None:
        """Start every job. When this returns, all jobs participate in the clock, so time waits for them."""
        now = self._clock.now()
        for number, job in enumerate(self._jobs.values()):
            # A millisecond apart, so that a lockstep clock also wakes their first runs in sequence.
            due = now + timedelta(milliseconds=number)
            run = partial(run_forever, job, self._clock, self._status[job.name], due)
            self._tasks[job.name] = tasks.keep(run, f"scheduler {job.name}")
        await asyncio.sleep(0)  # lets each new task take its first step

    async def close(self) -> None:
        """Cancel the jobs and wait for them to end."""
        for task in self._tasks.values():
            task.cancel()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks.values(), timeout=CLOSE_S)
        for task in late:
            log.error("%s did not end within %g s", task.get_name(), CLOSE_S)

    def status(self) -> dict[str, JobStatus]:
        """Return a copy of the status of every job, with `running` as of now."""
        return {name: replace(status, running=self._is_running(name)) for name, status in self._status.items()}

    def _is_running(self, name: str) -> bool:
        task, status = self._tasks.get(name), self._status[name]
        if task is None or task.done() or status.last_started_at is None:
            return False
        now, span = self._clock.now(), ALIVE_INTERVALS * self._jobs[name].every
        # Check both: after the clock is set back, a run in progress started now, but the last one ended later than now.
        known = (at for at in (status.last_started_at, status.last_finished_at) if at is not None)
        return any(abs(now - at) <= span for at in known)
