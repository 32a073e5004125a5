"""Broadcasters of states: each loads its state when something may have changed it, and sends it."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from trader.api.broadcast import Broadcaster
from trader.api.stream_messages import EventsMessage, NumberedEvent, StateMessage
from trader.api.subscriber import Subscriber
from trader.core import tasks
from trader.core.errors import TraderError, Unavailable

log = logging.getLogger(__name__)

LOAD_S = 10.0
"""A state that takes longer to load counts as unavailable."""

RETRY_S = 1.0
"""Delay after a failed load before an event triggers the next one."""

SPACING_S = 0.1
"""Minimum interval between loads for everyone; events in between share the next one. A load only for newcomers is this
far from any previous load, so constantly reconnecting clients do not delay everyone's messages."""

NUMBERED_BYTES_PER_S: Final = 7000
"""Pace of a state on the combined stream, before compression, which makes about a sixth of it: at most 5 MB an hour."""

NUMBERED_SPACING_MAX_S: Final = 30.0

Load = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How a state is sent.

    `spacing_s` is the minimum real time between two states. `empty` is the data of an event `empty` that newcomers
    receive before a state that is an empty list. `limit`: it is a list of at most so many records, of which the
    combined stream sends only the new ones after the first state, as an event `<stream>:new`.
    """

    spacing_s: float = SPACING_S
    empty: bytes = b""
    limit: int = 0


DEFAULTS: Final = StateOptions()


class StateBroadcaster(Broadcaster):
    """Broadcaster of a state, which is loaded for newcomers and after every event that may have changed it.

    One long-lived task does all loading. Nothing is loaded without subscribers; requests that arrive before a load
    begins share it. A failure to load or send a state is logged and disconnects the newcomers that waited for it. If
    something was unavailable, the load is repeated soon, otherwise on the next event. The combined stream is paced
    separately, by the length of what it sent last.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        last_id: Callable[[], str] = str,
        options: StateOptions = DEFAULTS,
    ) -> None:
        """Take a function that loads the state as JSON, and one that returns the id of the last sent event."""
        super().__init__(name)
        self._load = load
        self._last_id = last_id
        self._options = options
        self._wanted = asyncio.Event()
        # The keys say whether a subscriber is numbered.
        self._changed: set[bool] = set()  # the subscribers for which the state may have changed
        self._due_s = {False: 0.0, True: 0.0}  # times of the event loop from which a load for them is allowed
        self._newcomers: dict[Subscriber, None] = {}
        self._newcomers_due_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._records: list[bytes] = []  # of the last state, if it has a limit
        self.loads = 0
        self.failures = 0

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        # Subscribe first and load afterwards, so that no change is missed in between.
        super().add(subscriber)
        self._newcomers[subscriber] = None
        self._wanted.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self._newcomers.pop(subscriber, None)

    def changed(self) -> None:
        """Note that the state may have changed: it is loaded and sent soon, once for all events up to then."""
        self._changed = {False, True}
        self._wanted.set()

    def send_event(self, name: str, data: bytes) -> None:
        """Send a named event now, only to readers of this stream alone: the combined stream has the workflow's."""
        self.send(EventsMessage([NumberedEvent(name, data, "")]), to=lambda form: not form.numbered)

    async def start(self) -> None:
        self._task = tasks.keep(self._refresh_forever, f"stream {self.name}")

    async def close(self) -> None:
        await super().close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def _refresh_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = await self._due()
            newcomers, self._newcomers = self._newcomers, {}
            self._changed -= due
            state, sent_bytes = await self._loaded(), 0
            try:
                sent_bytes = await self._hand_out(state, newcomers, due)
            except Exception as error:
                self.failures += 1
                self._records = []  # some may not have been sent
                log.exception("stream %s: a state could not be sent", self.name)
                for subscriber in newcomers:
                    subscriber.end(error)
            now_s, retries = loop.time(), bool(due) and isinstance(state, TraderError)
            self._newcomers_due_s = now_s + (RETRY_S if retries else self._options.spacing_s)
            paced_s = min(NUMBERED_SPACING_MAX_S, sent_bytes / NUMBERED_BYTES_PER_S)
            for numbered in due:
                self._due_s[numbered] = max(self._newcomers_due_s, now_s + paced_s * numbered)
            if retries:
                self.changed()

    async def _due(self) -> set[bool]:
        """Wait until a load is due. Return which subscribers it is for; none if it is for newcomers only."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            self._changed &= {subscriber.form.numbered for subscriber in self._subscribers}
            due_s = {numbered: self._due_s[numbered] for numbered in self._changed}
            first_s, now_s = min([self._newcomers_due_s if self._newcomers else math.inf, *due_s.values()]), loop.time()
            if first_s <= now_s:
                return {numbered for numbered in due_s if due_s[numbered] <= now_s}
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if first_s == math.inf else first_s):
                    await self._wanted.wait()

    async def _hand_out(
        self, state: bytes | BaseException, newcomers: dict[Subscriber, None], due: Collection[bool]
    ) -> int:
        """Send a state, and return the length of what numbered subscribers got for which it was due."""
        if isinstance(state, BaseException):
            for subscriber in newcomers:
                subscriber.end(state)
            return 0
        new = None
        if self._options.limit and any(each.form.numbered for each in self._subscribers):
            new, due = self._encode_new(state), {True, *due}  # all must know the records of the last state

        def gets_whole(each: Subscriber) -> bool:
            return each in newcomers or (each.form.numbered in due and (new is None or not each.form.numbered))

        message = StateMessage(self.name, state)
        if any(each.form.compressed and gets_whole(each) for each in self._subscribers):
            await message.compress()
        message.event_id = self._last_id()  # read only now, since events may have been sent during the compression
        added = EventsMessage([NumberedEvent(f"{self.name}:new", new, message.event_id)]) if new else None
        if self._options.empty and state == b"[]":
            for subscriber in newcomers:
                subscriber.offer(EventsMessage([NumberedEvent("empty", self._options.empty, message.event_id)]))
        # Subscribers since the load began wait for the next one: this state may be older than their subscription.
        for subscriber in [each for each in self._subscribers if each not in self._newcomers]:
            if gets_whole(subscriber):
                subscriber.offer(message)
            elif added is not None and subscriber.form.numbered and not subscriber.offer(added):
                self.drop(subscriber)
        return len(state if new is None else new)

    def _encode_new(self, state: bytes) -> bytes | None:
        """Return the list of the records since the last state, or b"" without any; None if others have changed."""
        known, records = self._records, [bytes(each) for each in msgspec.json.decode(state, type=list[msgspec.Raw])]
        self._records = records
        new = new_records(known, records, self._options.limit)
        if new is None:
            return None
        return b"[%b]" % b",".join(new) if new else b""

    async def _loaded(self) -> bytes | BaseException:
        """Return the encoded state, or the failure as a value, since no failure may end the loading task."""
        self.loads += 1
        task = asyncio.ensure_future(self._load())
        try:
            await asyncio.wait({task}, timeout=LOAD_S)
        finally:
            late = not task.done()
            task.cancel()
        if late:
            await asyncio.wait({task}, timeout=1)
        if not late and not task.cancelled() and task.exception() is None:
            return task.result()
        self.failures += 1
        error = None if late or task.cancelled() else task.exception()
        if error is None or isinstance(error, TraderError):
            error = error or Unavailable("The state took too long to load")
            log.warning("stream %s: load failed: %s", self.name, error)
        else:
            log.error("stream %s: load failed: %r", self.name, error, exc_info=error)
        return error


def new_records(known: Sequence[bytes], records: Sequence[bytes], limit: int) -> list[bytes] | None:
    """Return the new records of a list; None unless the known ones are the others, or the last of these made room."""
    old = set(known)
    kept = [each for each in records if each in old]
    made_room = len(records) == limit and records[-1] in old
    if not known or kept != known[: len(kept)] or (len(kept) < len(known) and not made_room):
        return None
    return [each for each in records if each not in old]
