"""Time, passed in: the service never asks the operating system what time it is anywhere else.

Every clock gives UTC, cut to milliseconds, so that what is stored, what is compared and what is on the wire is one
value. Four clocks share the protocol: `SystemClock` (now), `ScaledClock` (a replay at N times real time),
`LockstepClock` (a replay as fast as it can, yet in one reproducible order) and `ManualClock` (tests).
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, Protocol, TypeVar

T = TypeVar("T")

SET_BACK_LEAST: Final = timedelta(seconds=1)
"""A clock that is further behind than this when a wait ends was set back, by an operator or a time server."""

AHEAD_OF_FEED_MAX: Final = timedelta(seconds=1)
"""How far a scaled clock may be ahead of the market feed that it is followed by."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def comes_up(due: datetime, every: timedelta, now: datetime) -> bool:
    """Whether what is due at `due`, `every` after the last time, is to be done now.

    It is too when the clock was set back since the last time: that must not put it off by as much.
    """
    return not due - every <= now < due


def cut_to_ms(moment: datetime) -> datetime:
    """The moment without its microseconds below a millisecond."""
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def iso(moment: datetime) -> str:
    """ISO 8601 in UTC with milliseconds and `Z`, the only form of a timestamp on the wire."""
    utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return utc.isoformat(timespec="milliseconds")[:-6] + "Z"


def epoch_second(moment: datetime) -> int:
    """Return the whole seconds since 1970, rounded down."""
    return (moment - EPOCH) // timedelta(seconds=1)


def moment_of(second: int) -> datetime:
    """Return the moment that is `second` seconds after 1970."""
    return datetime.fromtimestamp(second, UTC)


def floor_time(moment: datetime, span: timedelta) -> datetime:
    """Return the latest multiple of `span` since 1970 that is not after `moment`."""
    return EPOCH + (moment - EPOCH) // span * span


def ceil_time(moment: datetime, span: timedelta) -> datetime:
    """Return the earliest multiple of `span` since 1970 that is not before `moment`."""
    return EPOCH - (EPOCH - moment) // span * span


class Parking(Protocol[T]):
    """A place where one task waits for one value that another task brings."""

    async def wait(self) -> T: ...

    def open(self, value: T) -> None:
        """Bring the value. Without effect when it was brought already or nobody waits any more."""
        ...


class Clock(Protocol):
    """The time of the service."""

    def now(self) -> datetime: ...

    async def sleep_until(self, moment: datetime) -> None:
        """Wait for `moment`, in real time no longer than it was away: a clock set back meanwhile is still before it."""
        ...

    async def lead(self, moment: datetime) -> None:
        """The market feed's own wait. A clock that is driven by the market moves to `moment` here."""
        ...

    def parking(self) -> "Parking[T]": ...

    def busy(self) -> AbstractAsyncContextManager[None]:
        """Around the life of a task whose work must be done before time may go on."""
        ...


class _FutureParking(Generic[T]):
    def __init__(self) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def wait(self) -> T:
        return await self._future

    def open(self, value: T) -> None:
        if not self._future.done():
            self._future.set_result(value)


class _FreeClock:
    """What the clocks share whose time goes on by itself."""

    def now(self) -> datetime:
        raise NotImplementedError

    def real_seconds(self, span: timedelta) -> float:
        """How long `span` of this clock's time takes in reality."""
        return span.total_seconds()

    async def sleep_until(self, moment: datetime) -> None:
        left = moment - self.now()
        while left > timedelta(0):
            await asyncio.sleep(self.real_seconds(left))
            left = moment - self.now()
            if left > SET_BACK_LEAST:  # a timer may end early, but not by this much
                return

    async def lead(self, moment: datetime) -> None:
        await self.sleep_until(moment)

    def parking(self) -> Parking[T]:
        return _FutureParking()

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        yield


class SystemClock(_FreeClock):
    """Real time."""

    def now(self) -> datetime:
        return cut_to_ms(datetime.now(UTC))


class ScaledClock(_FreeClock):
    """Time that starts at `start` and passes `speed` times as fast as real time, but never far ahead of its feed.

    It stands still a second after the moment that `lead` was last called with: a speed that the service cannot follow
    is only slower, and no price grows stale because of it. `release` ends that.
    """

    def __init__(self, start: datetime, speed: float) -> None:
        self._start = start
        self._speed = speed
        self._origin_s = time.monotonic()
        self._bound: datetime | None = start + AHEAD_OF_FEED_MAX
        self._held = timedelta(0)

    def now(self) -> datetime:
        passed = timedelta(seconds=(time.monotonic() - self._origin_s) * self._speed)
        moment = cut_to_ms(self._start + passed) - self._held
        if self._bound is not None and moment > self._bound:
            self._held += moment - self._bound
            return self._bound
        return moment

    def real_seconds(self, span: timedelta) -> float:
        return span.total_seconds() / self._speed

    async def lead(self, moment: datetime) -> None:
        self._bound = max(self.now(), moment + AHEAD_OF_FEED_MAX)
        await self.sleep_until(moment)

    def release(self) -> None:
        """Let time go on without the feed, which has ended."""
        self.now()
        self._bound = None


_participant: ContextVar["asyncio.Task[object] | None"] = ContextVar("participant", default=None)


def _takes_part() -> bool:
    """Whether the current task itself is at work for the clock. Tasks it started inherit its context, not its part."""
    return _participant.get() is asyncio.current_task()


class LockstepClock:
    """Time that stands still until all work of the moment is done; the market feed moves it.

    Tasks that take part (`busy`) are either at work or waiting (`sleep_until`, `parking`); one that waited for another
    in any other way would hold time still. `lead` wakes the sleepers
    that are due one after the other, each at its own due time and in the order in which they lay down, and goes on
    only when all are waiting again. So the same inputs give the same order of events in every run. Tasks that take
    no part, such as HTTP requests, may wait here too; they are woken but not waited for.
    """

    def __init__(self, start: datetime) -> None:
        self._now = start
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sleepers: list[tuple[datetime, int, Parking[None]]] = []
        self._count = 0

    def now(self) -> datetime:
        return self._now

    async def sleep_until(self, moment: datetime) -> None:
        if moment <= self._now:
            await asyncio.sleep(0)
            return
        parking: Parking[None] = self.parking()
        self._count += 1
        heapq.heappush(self._sleepers, (moment, self._count, parking))
        await parking.wait()

    async def lead(self, moment: datetime) -> None:
        await self._settled()
        while self._sleepers and self._sleepers[0][0] < moment:
            due, _, parking = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            parking.open(None)
            await self._settled()
        self._now = max(self._now, moment)

    async def _settled(self) -> None:
        while self._at_work:
            await self._idle.wait()

    def parking(self) -> Parking[T]:
        return _LockstepParking(self)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        if _takes_part():
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
        self._at_work += 1
        self._idle.clear()

    def end_work(self) -> None:
        self._at_work -= 1
        if not self._at_work:
            self._idle.set()


class _LockstepParking(_FutureParking[T]):
    """Counts its waiter as at work again at the very moment the value is brought, not when its task next runs."""

    def __init__(self, clock: LockstepClock) -> None:
        super().__init__()
        self._clock = clock
        self._participant_waits = False

    async def wait(self) -> T:
        if not _takes_part() or self._future.done():
            return await self._future
        self._participant_waits = True
        self._clock.end_work()
        try:
            return await self._future
        finally:
            if self._participant_waits:  # cancelled while waiting: at work again, to clean up
                self._participant_waits = False
                self._clock.start_work()

    def open(self, value: T) -> None:
        if self._future.done():
            return
        super().open(value)
        if self._participant_waits:
            self._participant_waits = False
            self._clock.start_work()


class ManualClock(LockstepClock):
    """The lockstep clock in a test's hand."""

    async def advance(self, span: timedelta) -> None:
        """Move on by `span`, waking whoever is due on the way, the last moment included."""
        await self.lead(self._now + span + timedelta(microseconds=1))
        self._now = cut_to_ms(self._now)
