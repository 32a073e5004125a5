"""Alarms of the service: collects them, and sends notices to every sink in separate tasks.

Raising an alarm never blocks: each sink has a bounded queue, and a stuck sink delays neither the service nor other
sinks.
"""

import asyncio
import logging
import math
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Final, get_args

from trader.core import tasks
from trader.core.clock import JumpWatch, SystemClock
from trader.core.errors import SinkUnavailable, Unavailable
from trader.core.events import ApprovalWanted, Event, LeadershipChanged, PostingRefused, VenueDiffers
from trader.core.logs import lost_lines
from trader.database.leadership import is_led
from trader.database.pool import Connection, Database, place
from trader.exchange.domain.orders import Cause
from trader.exchange.events import HaltsChanged, TradesChanged, describe_trade
from trader.operations.domain import alarms as rules
from trader.operations.domain.alarms import Alarm, AlarmCause, AlarmState, Condition, Notice, NoticeKind
from trader.operations.notifications import Heartbeat, NotificationSink
from trader.operations.sql.status import (
    MaintenanceRun,
    insert_alarm,
    select_database_bytes,
    select_last_states,
    select_maintenance,
)

log = logging.getLogger("trader.operations")

QUEUE_MAX: Final = 1000
"""How many notices may wait for one sink; beyond that, the oldest are dropped and counted."""

RETRY_AFTER_S: Final = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Real seconds before each further attempt at an unavailable sink; the last value repeats."""

GIVE_UP_S: Final = 600.0
"""Real seconds after which a notice that its sink did not accept counts as failed."""

SHUTDOWN_FLUSH_S: Final = 2.0
"""How long shutdown waits for the sinks."""

CLOCK_STEADY_S: Final = 45.0
"""How long the system clock must be steady before a clock jump counts as over; it is resolved once that has settled."""

HEARTBEAT_EVERY_S: Final = 60.0
"""Real seconds between pings of a dead man's switch service."""

DATABASE_EVERY_S: Final = 10.0
"""Real seconds between looks at the results of maintenance, and at what earlier leaders reported."""

MISSING_S: Final = 26 * 3600.0
"""The age at which the result of a nightly task is missing: a day, and what its timer may be late by."""

_REAL_TIME: Final = SystemClock()


class Outlet:
    """One sink's queue, and the task that empties it in order. `timer` is a monotonic clock in seconds."""

    def __init__(self, sink: NotificationSink, timer: Callable[[], float], retry_after_s: Sequence[float]) -> None:
        self.name = sink.name
        self.outcomes: Counter[str] = Counter(sent=0, failed=0, dropped=0, superseded=0)
        self._sink = sink
        self._timer = timer
        self._retry_after_s = retry_after_s
        self._waiting: deque[tuple[Notice, float]] = deque()
        """Each notice, and since when it is waiting, in monotonic seconds."""

        self._changed = asyncio.Event()
        self._consecutive_failures = 0
        self.trouble: str | None = None
        """Why the last notice was not delivered; None if it was."""

        self._task = tasks.keep(self._run, f"notifications {self.name}")

    def __len__(self) -> int:
        """Return how many notices are waiting, including the one being sent."""
        return len(self._waiting)

    def put(self, notice: Notice) -> None:
        """Queue a notice. The end of an alarm replaces any of its notices that are still waiting."""
        if notice.state == "resolved":
            left = [each for each in self._waiting if each[0].cause != notice.cause]
            self.outcomes["superseded"] += len(self._waiting) - len(left)
            self._waiting = deque(left)
        if len(self._waiting) >= QUEUE_MAX:
            del self._waiting[1]  # the first is being sent
            self.outcomes["dropped"] += 1
        self._waiting.append((notice, self._timer()))
        self._changed.set()

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            queued = self._waiting[0]
            if await self._is_done_with(*queued):
                if queued in self._waiting:
                    self._waiting.remove(queued)
                self._changed.set()
            else:
                self._changed.set()
                await asyncio.sleep(self._retry_after_s[min(self._consecutive_failures, len(self._retry_after_s)) - 1])

    async def _is_done_with(self, notice: Notice, since_s: float) -> bool:
        """Make one attempt. Return whether the notice was sent or will not be retried."""
        try:
            await self._sink.send(notice)
        except SinkUnavailable as error:
            if self._consecutive_failures == 0:  # logged once, not with every notice
                log.warning("notices do not reach the sink %s of NOTIFY_URL: %s", self.name, error)
            self._consecutive_failures += 1
            self.trouble = str(error)
            if error.is_temporary and self._timer() - since_s < GIVE_UP_S:
                return False
            self.outcomes["failed"] += 1
            return True
        except Exception:  # the next notice must not wait behind one that a bug keeps back
            log.exception("a notice was not sent to the sink %s of NOTIFY_URL", self.name)
            self.trouble = "an internal error; see the log"
            self.outcomes["failed"] += 1
            return True
        if self._consecutive_failures > 0:
            log.info("notices reach the sink %s of NOTIFY_URL again", self.name)
        self._consecutive_failures, self.trouble = 0, None
        self.outcomes["sent"] += 1
        return True

    async def close(self, wait_s: float) -> None:
        """Wait at most this long for the queue to empty, and not for a sink that fails, then end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._waiting and self._consecutive_failures == 0:
                    self._changed.clear()
                    await self._changed.wait()
        await tasks.end(self._task)
        await self._sink.close()


class HistorySink:
    """Records notices in the database, for `trader status --since`."""

    name = "history"

    def __init__(self, database: Database, sender: str) -> None:
        self._database = database
        self._sender = sender

    async def send(self, notice: Notice) -> None:
        try:
            async with self._database.connection() as conn:
                await insert_alarm(conn, notice, self._sender)
        except Unavailable as error:
            raise SinkUnavailable(str(error)) from error

    async def close(self) -> None:
        """Do nothing: the database is closed elsewhere."""


class Maintenance:
    """The last recorded backup, audit and verification. `timer` is a monotonic clock in seconds."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self.runs: Sequence[MaintenanceRun] = ()
        self._timer = timer
        self._read_s = 0.0

    async def read(self, conn: Connection) -> None:
        self.runs = await select_maintenance(conn)
        self._read_s = self._timer()

    def success_age_s(self, run: MaintenanceRun) -> float | None:
        """Return the present age of a run's last success; None without one."""
        return None if run.success_age_s is None else run.success_age_s + self._timer() - self._read_s

    def problems(self) -> Iterable[Alarm]:
        """Yield the tasks that found problems, or that have run before and are missing for a day."""
        for run in self.runs:
            age_s = self.success_age_s(run)
            if run.problems:
                text = f"the last {run.task} found {run.problems} problems; its output is in the log of the timer"
                yield Alarm(AlarmCause("maintenance", run.task), text)
            elif age_s is not None and age_s > MISSING_S:
                yield Alarm(AlarmCause("maintenance", run.task), f"the last {run.task} is {age_s / 3600:.0f} hours old")


class Alarms:
    """Every alarm of this process. `timer` is a monotonic clock in seconds; `now` gives the dates of notices.

    Each of `sources` returns the current conditions of one part of the service. Only the leader sends notices of halts
    and maintenance, also those of before it led that nobody reported. The disk of `folder` is nearly full when fewer
    than `disk_least` bytes are left.
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
        self.counts: Counter[NoticeKind] = Counter(dict.fromkeys(get_args(NoticeKind), 0))
        self.is_healthy = False
        self.maintenance = Maintenance(timer)
        self.sources: list[Callable[[], Iterable[Alarm]]] = [
            self._disk_problems,
            self._log_problems,
            self._sink_problems,
            self._leader_problems,
            self.maintenance.problems,
        ]
        self.is_leader: Callable[[], bool] = lambda: True
        self._folder = folder
        self._disk_least = disk_least
        self._retry_after_s = retry_after_s
        self._timer = timer
        self._now = now
        self._state = AlarmState()
        self._lost_lines, self._lost_at_s = 0, -math.inf
        self._problems: Sequence[Alarm] = ()
        self.database_bytes = 0
        self._led: Sequence[str] = ()
        self._halts: Sequence[Alarm] = ()
        self._unsent: dict[AlarmCause, Notice] = {}  # the latest that were for another leader, if there was one

    def keep_history(self, database: Database, sender: str) -> None:
        """Also record every notice from now on in the database, which may be written."""
        self.outlets.append(Outlet(HistorySink(database, sender), self._timer, self._retry_after_s))

    def firing(self) -> list[Condition]:
        """Return the conditions that were reported and are not resolved, oldest first."""
        return self._state.firing()

    def began(self, cause: AlarmCause) -> datetime | None:
        """Return when the condition with this cause began, if it holds or may begin again soon."""
        condition = self._state.conditions.get(cause)
        return None if condition is None else condition.since

    def present(self) -> list[Condition]:
        """Return the present alarms, oldest first (`AlarmState.present`)."""
        self._look()
        return self._state.present()

    def add(self, alarm: Alarm) -> None:
        """Raise an event: its notice is queued now, or within an hour after the last one with its cause."""
        self.counts[alarm.cause.kind] += 1
        self._state = rules.add_event(self._state, alarm, self._now(), self._timer())
        self._look()

    def watch(self, problems: Sequence[Alarm]) -> None:
        """Accept the problems that health finds every second, and report which ones have begun or ended."""
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
            if notice.cause.kind in ("halt", "loss limit", "maintenance") and not self.is_leader():
                self._unsent[notice.cause] = notice
            else:
                self._unsent.pop(notice.cause, None)
                self._send(notice)

    async def watch_database(self, database: Database) -> None:
        """Read the results of maintenance and who leads, and send what nobody reported before this process led.

        It goes on until canceled.
        """
        while True:
            led = await asyncio.gather(*map(is_led, database.hosts))
            self._led = [place(dsn) for dsn, is_so in zip(database.hosts, led, strict=True) if is_so]
            with suppress(Unavailable):  # the last figures grow older until the database answers
                async with database.connection() as conn:
                    await self.maintenance.read(conn)
                    self.database_bytes = await select_database_bytes(conn)
                    if self._unsent and self.is_leader():
                        reported = await select_last_states(conn)
                        unsent, self._unsent = self._unsent, {}
                        for cause, notice in unsent.items():
                            if notice.state != reported.get(cause, "resolved"):
                                self._send(notice)
            await asyncio.sleep(DATABASE_EVERY_S)

    def _send(self, notice: Notice) -> None:
        for outlet in self.outlets:
            outlet.put(notice)

    def _disk_problems(self) -> Iterable[Alarm]:
        """Yield the nearly full disks: of the working folder, of temporary files, and of the log if it is a file."""
        folders = {"the working folder": self._folder, "temporary files": Path(tempfile.gettempdir())}
        log_file = Path("/dev/stderr").resolve()
        if log_file.is_file():
            folders["the log"] = log_file.parent
        disks = {folder.stat().st_dev: (name, folder) for name, folder in reversed(folders.items())}
        for name, folder in disks.values():
            if (free := shutil.disk_usage(folder).free) < self._disk_least:
                subject = "" if folder is self._folder else str(folder)
                yield Alarm(AlarmCause("disk", subject), f"the disk of {name} has {free / 1e6:.0f} MB left")

    def _log_problems(self) -> Iterable[Alarm]:
        """Yield the loss of lines of the log, until none was lost for a while."""
        if (lost := lost_lines()) > self._lost_lines:
            self._lost_lines, self._lost_at_s = lost, self._timer()
        if self._timer() - self._lost_at_s < CLOCK_STEADY_S:
            yield Alarm(AlarmCause("disk", "log"), f"{lost} lines of the log could not be written since the start")

    def _leader_problems(self) -> Iterable[Alarm]:
        """Yield that leaders write on several hosts of the database's address, which are primaries of their own."""
        if len(self._led) > 1:
            text = f"two leaders trade, each on its own primary: {' and '.join(self._led)}; fence one of them"
            yield Alarm(AlarmCause("takeover", "two primaries"), text)

    def _sink_problems(self) -> Iterable[Alarm]:
        """Yield the sinks that the last notice did not reach, for the other sinks."""
        for outlet in self.outlets:
            if outlet.trouble is not None and outlet.name != HistorySink.name:  # the database has alarms of its own
                yield Alarm(AlarmCause("notices", outlet.name), f"notices do not reach {outlet.name}: {outlet.trouble}")

    def on_event(self, event: Event) -> None:
        """Raise the alarms that an event of the service calls for."""
        match event:
            case HaltsChanged(halts=halts):
                self._halts = [rules.alarm_of_halt(halt) for halt in halts]
                self._look()
            case TradesChanged(account_ids=account_ids, trades=trades):
                for trade in trades:
                    if trade.close_reason is Cause.LIQUIDATION:
                        text = describe_trade(trade)
                        self.add(Alarm(AlarmCause("liquidation", account_ids[0]), text))
            case VenueDiffers(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("reconciliation", account_id), text))
            case ApprovalWanted(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("approval", account_id), text))
            case LeadershipChanged(text=text):
                self.add(Alarm(AlarmCause("takeover"), text))
            case PostingRefused(account_id=account_id, text=text):
                self.add(Alarm(AlarmCause("books", account_id), text))
            case _:
                pass

    async def close(self) -> None:
        """Send the pending events, give the sinks a moment to send their queues, then stop."""
        for notice in rules.flush(self._state):
            self._send(notice)
        await asyncio.gather(*(outlet.close(SHUTDOWN_FLUSH_S) for outlet in self.outlets))


class ClockWatch:
    """Reports when the system clock is set, which shifts everything dated by it."""

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
    """Ping a dead man's switch service while this service is healthy, until canceled."""
    trouble: str | None = None
    while True:
        if is_due := is_healthy():
            before = trouble
            try:
                await heartbeat.ping()
                trouble = None
            except SinkUnavailable as error:
                trouble = str(error)
            if trouble != before:  # logged once, not with every ping
                log.warning("pings of HEARTBEAT_URL: %s", trouble or "answered again")
        await asyncio.sleep(every_s if is_due else min(every_s, 1.0))  # a service that starts pings at once
