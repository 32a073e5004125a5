"""Alarms of the service: collects them, and sends notices to every sink in tasks of their own.

Whoever raises an alarm never waits: each sink has a queue with a bound, and a sink that hangs delays neither the
service nor another sink.
"""

import asyncio
import logging
import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, get_args

from trader.clock import JumpWatch, SystemClock
from trader.domain.exchange.orders import Cause
from trader.domain.operations import alarms as rules
from trader.domain.operations.alarms import Alarm, AlarmCause, AlarmState, Condition, Kind, Notice
from trader.errors import SinkUnavailable
from trader.gateways.operations.notifications import Heartbeat, NotificationSink
from trader.services.events import (
    Event,
    HaltsChanged,
    LeadershipChanged,
    PostingRefused,
    TradesChanged,
    VenueDiffers,
    describe_trade,
)

log = logging.getLogger("trader.operations")

QUEUE_MAX: Final = 1000
"""Notices that may wait for one sink; the oldest are dropped and counted."""

RETRY_AFTER_S: Final = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Real seconds before each further attempt of a sink that is away; the last one is repeated."""

GIVE_UP_S: Final = 600.0
"""Real seconds after which a notice that its sink did not take counts as failed."""

LAST_WORDS_S: Final = 2.0
"""How long shutdown waits for the sinks."""

CLOCK_STEADY_S: Final = 45.0
"""How long the machine's clock must be steady before a jump of it is away; it is resolved when that has settled."""

_REAL_TIME: Final = SystemClock()


class Queued(NamedTuple):
    """A notice that waits for a sink, since when in monotonic seconds."""

    notice: Notice
    since_s: float


class Outlet:
    """The queue of one sink, and the task that empties it, in order. `timer` is a monotonic clock in seconds."""

    def __init__(self, sink: NotificationSink, timer: Callable[[], float], retry_after_s: Sequence[float]) -> None:
        self.name = sink.name
        self.outcomes: Counter[str] = Counter(sent=0, failed=0, dropped=0, superseded=0)
        self._sink = sink
        self._timer = timer
        self._retry_after_s = retry_after_s
        self._waiting: deque[Queued] = deque()
        self._changed = asyncio.Event()
        self._attempts_in_vain = 0
        self._task = asyncio.create_task(self._run(), name=f"notifications {self.name}")

    def __len__(self) -> int:
        """Return how many notices wait, the one that is being sent included."""
        return len(self._waiting)

    def put(self, notice: Notice) -> None:
        """Queue a notice. The end of an alarm takes the place of its notices that still wait."""
        if notice.state == "resolved":
            left = [each for each in self._waiting if each.notice.cause != notice.cause]
            self.outcomes["superseded"] += len(self._waiting) - len(left)
            self._waiting = deque(left)
        if len(self._waiting) >= QUEUE_MAX:
            del self._waiting[1]  # the first is being sent
            self.outcomes["dropped"] += 1
        self._waiting.append(Queued(notice, self._timer()))
        self._changed.set()

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            queued = self._waiting[0]
            if await self._is_done_with(queued):
                if queued in self._waiting:
                    self._waiting.remove(queued)
                self._changed.set()
            else:
                await asyncio.sleep(self._retry_after_s[min(self._attempts_in_vain, len(self._retry_after_s)) - 1])

    async def _is_done_with(self, queued: Queued) -> bool:
        """Make one attempt. Return whether the notice was sent, or will not be tried again."""
        try:
            await self._sink.send(queued.notice)
        except SinkUnavailable as error:
            if self._attempts_in_vain == 0:  # said once, not with every notice
                log.warning("notices do not reach the sink %s of NOTIFY_URL: %s", self.name, error)
            self._attempts_in_vain += 1
            if error.is_temporary and self._timer() - queued.since_s < GIVE_UP_S:
                return False
            self.outcomes["failed"] += 1
            return True
        if self._attempts_in_vain > 0:
            log.info("notices reach the sink %s of NOTIFY_URL again", self.name)
        self._attempts_in_vain = 0
        self.outcomes["sent"] += 1
        return True

    async def close(self, wait_s: float) -> None:
        """Wait for the queue to be empty, but not longer than this, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._waiting:
                    self._changed.clear()
                    await self._changed.wait()
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._sink.close()


class Alarms:
    """Every alarm of this process. `timer` is a monotonic clock in seconds, `now` gives the dates of notices.

    Each of `sources` returns the conditions of one part of the service that hold now. Of halts only the leader sends
    notices. The disk of `folder` is nearly full with less than `disk_least` bytes left.
    """

    def __init__(
        self,
        sinks: Sequence[NotificationSink],
        *,
        folder: Path = Path(),
        disk_least: int = 0,
        timer: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _REAL_TIME.now,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
    ) -> None:
        self.outlets = [Outlet(sink, timer, retry_after_s) for sink in sinks]
        self.counts: Counter[Kind] = Counter(dict.fromkeys(get_args(Kind), 0))
        self.is_healthy = False
        self.sources: list[Callable[[], Iterable[Alarm]]] = [self._disk_problems]
        self.is_leader: Callable[[], bool] = lambda: True
        self._folder = folder
        self._disk_least = disk_least
        self._timer = timer
        self._now = now
        self._state = AlarmState()
        self._problems: Sequence[Alarm] = ()
        self._halts: Sequence[Alarm] = ()

    def firing(self) -> list[Condition]:
        """Return the conditions that were reported and are not resolved, the oldest first."""
        return self._state.firing()

    def add(self, alarm: Alarm) -> None:
        """Raise an event: its notice is queued now, or within the hour after the last one of its cause."""
        self.counts[alarm.cause.kind] += 1
        self._state = rules.add_event(self._state, alarm, self._now(), self._timer())
        self._look()

    def watch(self, problems: Sequence[Alarm]) -> None:
        """Take the problems that health finds every few seconds, and report what has begun and what is over."""
        self.is_healthy = not problems
        self._problems = problems
        self._look()

    def _look(self) -> None:
        before = self._state.conditions
        found = chain.from_iterable(source() for source in self.sources)
        present = [*self._problems, *found, *self._halts]
        self._state, due = rules.look(self._state, present, self._now(), self._timer())
        for cause, condition in self._state.conditions.items():
            known = before.get(cause)
            self.counts[cause.kind] += condition.count - (0 if known is None else known.count)
        for notice in due:
            if notice.cause.kind not in ("halt", "loss limit") or self.is_leader():
                for outlet in self.outlets:
                    outlet.put(notice)

    def _disk_problems(self) -> Iterable[Alarm]:
        free = shutil.disk_usage(self._folder).free
        if free < self._disk_least:
            yield Alarm(AlarmCause("disk"), f"the disk of the working folder has {free / 1e6:.0f} MB left")

    def on_event(self, event: Event) -> None:
        """Raise the alarms of an event of the service."""
        match event:
            case HaltsChanged(halts=halts):
                self._halts = [rules.alarm_of_halt(halt) for halt in halts]
                self._look()
            case TradesChanged(account_ids=account_ids, trades=trades):
                for trade in trades:
                    if trade.close_reason is Cause.LIQUIDATION:
                        text = describe_trade(account_ids[0], trade)
                        self.add(Alarm(AlarmCause("liquidation", account_ids[0]), text))
            case VenueDiffers(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("reconciliation", account_id), text))
            case LeadershipChanged(text=text):
                self.add(Alarm(AlarmCause("takeover"), text))
            case PostingRefused(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("books", account_id), text))
            case _:
                pass

    async def close(self) -> None:
        """Give the sinks a moment to send the queued notices, then stop."""
        await asyncio.gather(*(outlet.close(LAST_WORDS_S) for outlet in self.outlets))


class ClockWatch:
    """Tells when the machine's clock is set, which shifts whatever is dated by it."""

    def __init__(
        self, now: Callable[[], datetime] = _REAL_TIME.now, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._jumps = JumpWatch(now, timer)
        self._timer = timer
        self._jumped_s = -math.inf
        self._text = ""

    def problems(self) -> Iterable[Alarm]:
        """Yield the last jump until the clock has been steady for `CLOCK_STEADY_S`."""
        if (jump := self._jumps.jump()) is not None:
            way = "back" if jump < timedelta(0) else "forward"
            self._text = f"the machine's clock was set {way} by {abs(jump.total_seconds()):.1f} s, or the machine slept"
            self._jumped_s = self._timer()
            log.warning(self._text)
        if self._timer() - self._jumped_s < CLOCK_STEADY_S:
            yield Alarm(AlarmCause("clock"), self._text)


async def send_heartbeats(heartbeat: Heartbeat, every_s: float, is_healthy: Callable[[], bool]) -> None:
    """Ping a dead-man service while this service is healthy, until cancelled."""
    trouble: str | None = None
    while True:
        if is_healthy():
            before = trouble
            try:
                await heartbeat.ping()
                trouble = None
            except SinkUnavailable as error:
                trouble = str(error)
            if trouble != before:  # said once, not with every ping
                log.warning("pings of HEARTBEAT_URL: %s", trouble or "answered again")
        await asyncio.sleep(every_s)
