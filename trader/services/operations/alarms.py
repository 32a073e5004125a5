"""Alarms of the service: collects them, and sends notices to every sink in tasks of their own.

Whoever raises an alarm never waits: each sink has a queue with a bound, and a sink that hangs delays neither the
service nor another sink.
"""

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from trader.clock import SystemClock
from trader.domain.exchange.halts import Halt
from trader.domain.exchange.orders import Cause
from trader.domain.operations import alarms as rules
from trader.domain.operations.alarms import Alarm, AlarmCause, AllHeld, Notice
from trader.errors import SinkUnavailable
from trader.gateways.operations.notifications import Heartbeat, NotificationSink
from trader.services.events import Event, HaltsChanged, LeadershipChanged, PostingRefused, TradesChanged, VenueDiffers
from trader.services.exchange.accounts import describe_trade

log = logging.getLogger("trader.operations")

QUEUE_MAX: Final = 100
"""Notices that may wait for one sink; the oldest are dropped and counted."""

RETRY_AFTER_S: Final = (2.0, 5.0)
"""Real seconds before each further attempt to send a notice; then it counts as failed."""

LAST_WORDS_S: Final = 2.0
"""How long shutdown waits for the sinks."""

_COUNTED_FROM_ZERO: Final = (AlarmCause("books"), AlarmCause("liquidation"))
"""Shown before the first alarm, since a counter that begins with 1 has no increase."""

_REAL_TIME: Final = SystemClock()


class Outlet:
    """The queue of one sink, and the task that empties it."""

    def __init__(self, sink: NotificationSink, retry_after_s: Sequence[float] = RETRY_AFTER_S) -> None:
        self.name = sink.name
        self.outcomes: Counter[str] = Counter(sent=0, failed=0, dropped=0)
        self._sink = sink
        self._retry_after_s = retry_after_s
        self._waiting: deque[Notice] = deque()
        self._changed = asyncio.Event()
        self._is_out = False
        self._task = asyncio.create_task(self._run(), name=f"notifications {self.name}")

    def __len__(self) -> int:
        """Return how many notices wait, the one that is being sent included."""
        return len(self._waiting)

    def put(self, notice: Notice) -> None:
        """Queue a notice."""
        if len(self._waiting) >= QUEUE_MAX:
            del self._waiting[1]  # the first is being sent
            self.outcomes["dropped"] += 1
        self._waiting.append(notice)
        self._changed.set()

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            await self._send(self._waiting[0])
            self._waiting.popleft()
            self._changed.set()

    async def _send(self, notice: Notice) -> None:
        for wait_s in (*self._retry_after_s, None):
            try:
                await self._sink.send(notice)
            except SinkUnavailable as error:
                if wait_s is not None:
                    await asyncio.sleep(wait_s)
                    continue
                self.outcomes["failed"] += 1
                if not self._is_out:  # said once, not with every notice
                    log.warning("notices do not reach the sink %s of NOTIFY_URL: %s", self.name, error)
                self._is_out = True
            else:
                self.outcomes["sent"] += 1
                if self._is_out:
                    log.info("notices reach the sink %s of NOTIFY_URL again", self.name)
                self._is_out = False
                return

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

    `providers` returns the AI providers and keys that cannot be used, `models` the failing models, with the reasons. Of
    halts only the leader raises an alarm. The disk of `folder` is nearly full with less than `disk_least` bytes left.
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
        self.outlets = [Outlet(sink, retry_after_s) for sink in sinks]
        self.counts: Counter[AlarmCause] = Counter(dict.fromkeys(_COUNTED_FROM_ZERO, 0))
        self.is_healthy = False
        self.providers: Callable[[], Mapping[str, str]] = dict
        self.models: Callable[[], Mapping[str, str]] = dict
        self.is_leader: Callable[[], bool] = lambda: True
        self._folder = folder
        self._disk_least = disk_least
        self._timer = timer
        self._now = now
        self._held: AllHeld = {}
        self._conditions: frozenset[AlarmCause] = frozenset()
        self._halts: frozenset[Halt] = frozenset()

    def add(self, alarm: Alarm) -> None:
        """Raise an alarm: its notice is queued now, or within the hour after the last one of its cause."""
        self.counts[alarm.cause] += 1
        self._held = rules.add(self._held, alarm, self._now())
        self._queue_due()

    def watch(self, problems: Sequence[Alarm]) -> None:
        """Take the problems that health finds every few seconds; raise those that have begun or last an hour."""
        self.is_healthy = not problems
        # Differences between books and venue are events, each with its own words.
        alarms = [alarm for alarm in problems if alarm.cause.kind != "reconciliation"]
        alarms += [Alarm(AlarmCause("provider", name), why) for name, why in self.providers().items()]
        alarms += [Alarm(AlarmCause("model", name), f"{name} fails: {why}") for name, why in self.models().items()]
        free = shutil.disk_usage(self._folder).free
        if free < self._disk_least:
            alarms.append(Alarm(AlarmCause("disk"), f"the disk of the working folder has {free / 1e6:.0f} MB left"))
        conditions = frozenset(alarm.cause for alarm in alarms)
        self.counts.update(conditions - self._conditions)
        self._held = rules.add_conditions(self._held, self._conditions, alarms, self._now(), self._timer())
        for alarm in rules.ended(self._conditions, conditions):
            self.add(alarm)
        self._conditions = conditions
        self._queue_due()

    def _queue_due(self) -> None:
        due, self._held = rules.take_due(self._held, self._timer())
        for notice in due:
            for outlet in self.outlets:
                outlet.put(notice)

    def on_event(self, event: Event) -> None:
        """Raise the alarms of an event of the service."""
        match event:
            case HaltsChanged(halts=halts):
                for halt in halts:
                    if halt not in self._halts and self.is_leader():  # what it found at its start is not new
                        self.add(rules.alarm_of_halt(halt))
                self._halts = frozenset(halts)
            case TradesChanged(account_ids=account_ids, trades=trades):
                for trade in trades:
                    if trade.close_reason is Cause.LIQUIDATION:
                        self.add(Alarm(AlarmCause("liquidation"), describe_trade(account_ids[0], trade)))
            case VenueDiffers(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("reconciliation"), f"{account_id}: {text}"))
            case LeadershipChanged(text=text):
                self.add(Alarm(AlarmCause("takeover"), text))
            case PostingRefused(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("books"), f"{account_id}: {text}"))
            case _:
                pass

    async def close(self) -> None:
        """Give the sinks a moment to send the queued notices, then stop."""
        await asyncio.gather(*(outlet.close(LAST_WORDS_S) for outlet in self.outlets))


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
