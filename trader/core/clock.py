"""Clocks: the only source of the current time, passed to everything that needs it.

A clock's time is UTC in whole milliseconds, so that the same value is stored, compared and sent. Three clocks implement
the protocol: `SystemClock` (real time), `ScaledClock` (a replay at a multiple of real time) and `LockstepClock` (a
replay as fast as possible, yet in one reproducible order).
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar
from uuid import uuid4

T = TypeVar("T")

_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The monotonic clock that also counts while the machine sleeps."""

SET_BACK_LEAST: Final = timedelta(seconds=1)
"""If a clock is further behind than this at the end of a wait, an operator or a time server set it back."""

LAG_MAX: Final = timedelta(seconds=1)
"""How far a scaled clock may fall behind its speed and still catch up."""

_INSTANT: Final = timedelta(milliseconds=1)
_SECOND: Final = timedelta(seconds=1)

_REPLAYED: Final = "replay"
"""The origin of every replay's time: nobody sets it, and it differs from the database's."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

INPUT_TIME_MAX: Final = datetime(2200, 1, 1, tzinfo=UTC)
"""The latest time of any input; the earliest is `EPOCH`. Sums with any span of the service remain valid times."""


def interval_elapsed(due: datetime, every: timedelta, now: datetime) -> bool:
    """Return whether the interval `every` that ends at `due` is over.

    It is also over when `now` precedes its start: setting the clock back must not delay the work by that much.
    """
    return not due - every <= now < due


def cut_to_ms(moment: datetime) -> datetime:
    """Return the moment rounded down to whole milliseconds."""
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def input_time(moment: datetime) -> datetime:
    """Return an input's time in UTC, truncated to milliseconds; a time without a zone counts as UTC.

    :raises ValueError: the time is outside 1970-01-01 to 2200-01-01
    """
    try:
        utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:  # in UTC it is outside the range of `datetime`
        utc = datetime.max.replace(tzinfo=UTC)
    if not EPOCH <= utc <= INPUT_TIME_MAX:
        raise ValueError("expected a time from 1970-01-01 to 2200-01-01")
    return cut_to_ms(utc)


def iso(moment: datetime) -> str:
    """Format as ISO 8601 in UTC with milliseconds and `Z`, the only form of a timestamp on the wire."""
    utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return utc.isoformat(timespec="milliseconds")[:-6] + "Z"


def epoch_second(moment: datetime) -> int:
    """Return the whole seconds since 1970, rounded down."""
    return (moment - EPOCH) // _SECOND


def ceil_second(moment: datetime) -> int:
    """Return the whole seconds since 1970, rounded up."""
    return -((EPOCH - moment) // _SECOND)


def moment_of(second: int) -> datetime:
    """Return the moment that is `second` seconds after 1970."""
    return datetime.fromtimestamp(second, UTC)


def floor_time(moment: datetime, span: timedelta) -> datetime:
    """Return the latest multiple of `span` since 1970 that is not after `moment`."""
    return EPOCH + (moment - EPOCH) // span * span


def ceil_time(moment: datetime, span: timedelta) -> datetime:
    """Return the earliest multiple of `span` since 1970 that is not before `moment`."""
    return EPOCH - (EPOCH - moment) // span * span


class Clock(Protocol):
    """The time of the service: dates, which only label, and a steady time, which is never set."""

    @property
    def origin(self) -> str:
        """The name of the moment from which `steady_s` counts, which several processes may share."""
        ...

    def now(self) -> datetime: ...

    def steady_s(self) -> float:
        """Return the seconds of this clock's time since `origin`, however the clock is set."""
        ...

    async def sleep_until(self, moment: datetime) -> None:
        """Wait for `moment`, but no longer in real time than it is away now: if the clock is set back, return early."""
        ...

    async def advance_to(self, moment: datetime) -> None:
        """Wait for `moment` on behalf of the market feed; a clock that the market drives moves to it."""
        ...

    def future(self) -> "ClockFuture[T]":
        """Return a future to wait for another task's result without holding a lockstep clock."""
        return ClockFuture()

    def busy(self) -> AbstractAsyncContextManager[None]:
        """Hold the lockstep clock while the current task runs, except while it waits through the clock."""
        return nullcontext()

    def thinking(self) -> AbstractContextManager[None]:
        """Let time pass no faster than real time: a model's thinking takes real time."""
        return nullcontext()


@cache
def _boot() -> str:
    """Return the machine's boot, since which its steady time counts; without one, this process is its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return str(uuid4())


def dated_origin(clock: Clock) -> tuple[str, datetime]:
    """Return the clock's origin and its date, which differs once the clock is set."""
    return clock.origin, cut_to_ms(clock.now() - timedelta(seconds=clock.steady_s()))


class SystemClock(Clock):
    """Real time."""

    @property
    def origin(self) -> str:
        return _boot()

    def now(self) -> datetime:
        return cut_to_ms(datetime.now(UTC))

    def steady_s(self) -> float:
        return time.clock_gettime(_STEADY)

    def real_seconds(self, span: timedelta) -> float:
        """Return how long `span` of this clock's time takes in real time."""
        return span.total_seconds()

    async def sleep_until(self, moment: datetime) -> None:
        left = moment - self.now()
        while left > timedelta(0):
            await asyncio.sleep(left.total_seconds())
            left = moment - self.now()
            if left > SET_BACK_LEAST:  # a timer may end early, but not by this much
                return

    async def advance_to(self, moment: datetime) -> None:
        await self.sleep_until(moment)


class JumpWatch:
    """Detects that a clock was set: its time no longer agrees with its steady time.

    By a timer that stands still while the machine sleeps, sleep is a jump, too.
    """

    def __init__(self, now: Callable[[], datetime], timer: Callable[[], float]) -> None:
        self._now = now
        self._timer = timer
        self._at, self._at_s = now(), timer()

    def jump(self, dated: datetime | None = None) -> timedelta | None:
        """Return how far the clock jumped since the last call (negative: backward); None for less than a second.

        If `dated` is a date that the clock gave before it jumped, the next call returns the jump.
        """
        now, now_s = self._now(), self._timer()
        jump = now - self._at - timedelta(seconds=now_s - self._at_s)
        if abs(jump) > SET_BACK_LEAST and dated is not None and abs(dated - now) > abs(dated - (now - jump)):
            return None
        self._at, self._at_s = now, now_s
        return jump if abs(jump) > SET_BACK_LEAST else None


class ScaledClock(Clock):
    """Time that starts at `start` and passes `speed` times as fast as real time, but never ahead of its market feed.

    It reaches the moment of a tick only when that tick has been applied: `advance_to` returns when the tick is due, and
    `now` stays before it until the feed asks for the next one. Anything dated by this clock has therefore seen every
    tick up to its date and none after it. If the service falls behind by more than `LAG_MAX`, the clock slows down
    instead of catching up. `release` frees the clock from its feed.

    Time stops at a `limit`. Its owner records how far time may pass before allowing it, so that a killed process has
    never run past the recorded time.
    """

    origin: str = _REPLAYED

    def __init__(self, start: datetime, speed: float) -> None:
        self._speed = speed
        self._start = start
        self._start_s = time.monotonic()
        self._bound: datetime | None = start
        self._limit: datetime | None = None
        self._thinking = 0
        self._changed = asyncio.Event()

    @property
    def _pace(self) -> float:
        return min(self._speed, 1.0) if self._thinking else self._speed

    def now(self) -> datetime:
        moment = self._moment()
        return moment if self._bound is None else min(moment, self._bound)

    def steady_s(self) -> float:
        return (self.now() - EPOCH).total_seconds()  # nobody sets this clock

    def _moment(self) -> datetime:
        """Return the time, ignoring the tick that is due."""
        moment = self._start + timedelta(seconds=(time.monotonic() - self._start_s) * self._pace)
        ends = [end for end in (self._limit, None if self._bound is None else self._bound + LAG_MAX) if end is not None]
        if ends and moment > (end := min(ends)):
            self._set(end)
            return end
        return cut_to_ms(moment)

    def _set(self, moment: datetime) -> None:
        self._start, self._start_s = moment, time.monotonic()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def real_seconds(self, span: timedelta) -> float:
        """Return how long `span` of this clock's time takes in real time if nothing holds the clock back."""
        return span.total_seconds() / self._speed

    def span_of(self, real_s: float) -> timedelta:
        """Return how much of this clock's time passes in `real_s` seconds if nothing holds the clock back."""
        return timedelta(seconds=real_s * self._speed)

    async def sleep_until(self, moment: datetime) -> None:
        await self._wait(moment, self.now)

    async def advance_to(self, moment: datetime) -> None:
        self._bound = max(self.now(), moment - _INSTANT)
        self._notify()
        await self._wait(moment, self._moment)

    async def _wait(self, moment: datetime, now: Callable[[], datetime]) -> None:
        """Wait until `now` reaches the moment, which depends on the feed and the limit as well as on real time."""
        while (left := moment - now()) > timedelta(0):
            stops = (self._limit, self._bound if now == self.now else None)
            is_near = all(stop is None or moment <= stop for stop in stops)
            with suppress(TimeoutError):
                async with asyncio.timeout(left.total_seconds() / self._pace if is_near else None):
                    await self._changed.wait()

    @contextmanager
    def thinking(self) -> Iterator[None]:
        self._set(self._moment())
        self._thinking += 1
        self._notify()
        try:
            yield
        finally:
            self._set(self._moment())
            self._thinking -= 1
            self._notify()

    def skip_to(self, moment: datetime) -> None:
        """Move the clock forward to `moment`; never backward."""
        if self.now() < moment:
            self._set(moment)
            if self._bound is not None:
                self._bound = moment
            self._notify()

    def allow(self, limit: datetime | None) -> None:
        """Let time pass up to `limit`, or without a limit when it is None."""
        self._limit = limit
        self._notify()

    def release(self) -> None:
        """Let time pass without the feed, once it has ended."""
        self._set(self.now())
        self._bound = None
        self._notify()


_participant: ContextVar["asyncio.Task[object] | None"] = ContextVar("participant", default=None)


def _is_participant() -> bool:
    """Return whether the current task participates in its lockstep clock; tasks that it starts do not by themselves."""
    return _participant.get() is asyncio.current_task()


class LockstepClock(Clock):
    """Time that pauses until all work of the moment is done; the market feed advances it.

    A participating task (one inside `busy`) either works or waits in `sleep_until` or a `future` of this clock; waiting
    in any other way stops time. `advance_to` wakes due sleepers one at a time, each at its own due time and in the
    order in which they fell asleep, and continues only when all participants wait again. The same inputs therefore give
    the same order of events in every run. Other tasks, such as HTTP requests, may wait here too; the clock wakes them
    but does not wait for their work.
    """

    origin: str = _REPLAYED

    def __init__(self, start: datetime) -> None:
        self._now = start
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sleepers: list[tuple[datetime, int, ClockFuture[None]]] = []
        self._count = 0
        self._is_held = False

    def now(self) -> datetime:
        return self._now

    def steady_s(self) -> float:
        return (self._now - EPOCH).total_seconds()  # as above

    def hold(self) -> None:
        """Pause time until `go_on`, even if no participant is working."""
        if not self._is_held:
            self._is_held = True
            self.start_work()

    def go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self.end_work()

    def skip_to(self, moment: datetime) -> None:
        """Move the clock forward to `moment`; never backward."""
        self._now = max(self._now, moment)

    async def sleep_until(self, moment: datetime) -> None:
        if moment <= self._now:
            await asyncio.sleep(0)
            return
        wake: ClockFuture[None] = self.future()
        self._count += 1
        heapq.heappush(self._sleepers, (moment, self._count, wake))
        await wake.wait()

    async def advance_to(self, moment: datetime) -> None:
        await self._wait_until_idle()
        while self._sleepers and self._sleepers[0][0] < moment:
            due, _, wake = heapq.heappop(self._sleepers)
            self.skip_to(due)
            wake.set(None)
            await self._wait_until_idle()
        self.skip_to(moment)

    async def _wait_until_idle(self) -> None:
        while self._working:
            await self._idle.wait()

    def future(self) -> "ClockFuture[T]":
        return ClockFuture(self)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        if _is_participant():
            yield
            return
        token = _participant.set(asyncio.current_task())
        self.start_work()
        try:
            yield
        finally:
            self.end_work()
            _participant.reset(token)

    def start_work(self) -> None:
        """Count one more participant as working."""
        self._working += 1
        self._idle.clear()

    def end_work(self) -> None:
        """Count one fewer participant as working."""
        self._working -= 1
        if not self._working:
            self._idle.set()


class ClockFuture(Generic[T]):
    """A value that one task awaits and another sets once.

    A waiting participant of a lockstep clock counts as working as soon as the value is set, not when its task next
    runs: time could pass in between.
    """

    def __init__(self, clock: LockstepClock | None = None) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._holder: LockstepClock | None = None
        """The clock, while one of its participants waits here."""

    async def wait(self) -> T:
        """Wait for the value and return it."""
        if self._clock is None or self._future.done() or not _is_participant():
            return await self._future
        self._holder = self._clock
        self._clock.end_work()
        try:
            return await self._future
        finally:
            self._resume()  # cleans up after a cancellation; otherwise `set` has done it

    def set(self, value: T) -> None:
        """Set the value; does nothing if it is already set or the waiting task was canceled."""
        if not self._future.done():
            self._future.set_result(value)
            self._resume()

    def _resume(self) -> None:
        clock, self._holder = self._holder, None
        if clock is not None:
            clock.start_work()
