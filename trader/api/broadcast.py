"""Broadcasters: one per stream, with its subscribers and the messages that wait for each of them.

A state stream sends the current state: only the newest one waits for a subscriber, so a slow one gets fewer of them
and costs nothing more. The workflow stream sends events: they wait in a bounded backlog, and a subscriber whose backlog
is full is dropped. A message is encoded once, whatever the number of subscribers. One subscriber may follow several
streams.

A message goes straight to the socket of a subscriber that has read everything so far, without waking its task. That
is most of them most of the time, and it decides how soon the last of many sockets gets a message.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from trader.api.state_patches import encode_patch
from trader.api.stream_events import EventRing
from trader.api.stream_messages import PLAIN, EventsMessage, Form, Message, NumberedEvent, StateMessage
from trader.errors import TraderError, Unavailable

log = logging.getLogger(__name__)

CAPACITY = 50
BACKLOG_BYTES_MAX = 256 * 1024
EVENTS_AT_ONCE_MAX = 256
RETRY_AFTER_S = 5

LOAD_S = 10.0
"""A state that takes longer to load counts as unavailable."""

RETRY_S = 1.0
"""How long after a failed load the state is loaded again, if an event asked for it."""

SPACING_S = 0.1
"""Loads for everyone are at least this far apart, and events between them share the next one; a load for newcomers
alone is this far from any before. So clients that reconnect all the time do not delay what everyone gets."""

GATHERING_S = 0.25
"""Events that come within this time of others are sent together on the one stream."""

Load = Callable[[], Awaitable[bytes]]


class Subscriber:
    """The end of one open response: messages wait here until its writer takes them.

    Of states only the newest is kept, of each stream one; events wait in order, at most `backlog_bytes_max` of them.
    `ended` is set when nothing more will come; `error` is the failure that ended it, if one did. The writer sets `push`
    while a message may be written at once (it returns False when the reader is behind), and `cut`, which ends its wait
    for the reader, during such a wait.
    """

    __slots__ = (
        "_backlog_bytes",
        "_backlog_bytes_max",
        "_versions",
        "_waiting",
        "_woken",
        "cut",
        "ended",
        "error",
        "form",
        "push",
    )

    def __init__(self, form: Form = PLAIN, backlog_bytes_max: int = BACKLOG_BYTES_MAX) -> None:
        self.form = form
        self._backlog_bytes = 0
        self._backlog_bytes_max = backlog_bytes_max
        self._versions: dict[str, int | None] = {}
        self._waiting: dict[object, bytes] = {}
        self._woken = asyncio.Event()
        self.ended = False
        self.error: BaseException | None = None
        self.push: Callable[[bytes], bool] | None = None
        self.cut: Callable[[], None] | None = None

    @property
    def waiting_bytes(self) -> int:
        return sum(map(len, self._waiting.values()))

    def offer(self, message: Message) -> bool:
        """Write or keep a message. Return False when the backlog is full; an empty one has room for any message."""
        if self.ended:
            return True
        if self.form.patched and isinstance(message, StateMessage):
            message = self._patch_or_whole(message)
        text = message.encoded(self.form)
        # What waits goes first, so nothing is pushed past it.
        if not self._waiting and self.push is not None and self.push(text):
            return True
        if message.state is not None:
            self._waiting.pop(message.state, None)  # the ids of what waits must ascend, so it goes to the end
            self._waiting[message.state] = text
        elif self._backlog_bytes and self._backlog_bytes + len(text) > self._backlog_bytes_max:
            return False
        else:
            self._waiting[message] = text
            self._backlog_bytes += len(text)
        self._woken.set()
        return True

    def _patch_or_whole(self, message: StateMessage) -> StateMessage:
        """Return the patch when everything before it was written, else the whole state."""
        stream, version = message.state, message.version
        assert stream is not None
        known, self._versions[stream] = self._versions.get(stream), version
        if message.patch is None or version is None or known != version - 1 or stream in self._waiting:
            return message
        return message.patch

    def has(self, states: Iterable[str]) -> bool:
        """Return whether a message of each of these states waits."""
        return all(state in self._waiting for state in states)

    async def wait(self, timeout_s: float) -> None:
        """Wait for a message or the end, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self._woken.clear()

    def take(self) -> bytes:
        """Return all waiting messages as one; empty when there are none."""
        self._woken.clear()
        messages, self._waiting, self._backlog_bytes = self._waiting, {}, 0
        return b"".join(messages.values())

    def end(self, error: BaseException | None = None) -> None:
        """End the subscription, and the wait of its writer for the reader."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        self._waiting.clear()
        self._woken.set()
        if self.cut is not None:
            self.cut()


class Broadcaster:
    """The subscribers of one stream, at most `capacity`."""

    def __init__(self, name: str, *, capacity: int = CAPACITY) -> None:
        self.name = name
        self.capacity = capacity
        self.dropped = 0
        self._subscribers: dict[Subscriber, None] = {}  # in order of arrival
        self._closed = False

    def __len__(self) -> int:
        return len(self._subscribers)

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        """Add a subscriber, whose first message is the current state, or the events since `last_id`.

        :raises Unavailable: the stream is full, or the service is shutting down
        """
        if self._closed:
            raise Unavailable("The service is shutting down", RETRY_AFTER_S)
        if len(self) >= self.capacity:
            raise Unavailable(f"All {self.capacity} places of the stream {self.name} are taken", RETRY_AFTER_S)
        self._subscribers[subscriber] = None

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.pop(subscriber, None)

    def send(self, message: Message, *, to: Callable[[Form], bool] = lambda _: True) -> None:
        """Send a message to every subscriber, or to those with such a form; drop those that cannot keep up."""
        chosen = [subscriber for subscriber in self._subscribers if to(subscriber.form)]
        for subscriber in [one for one in chosen if not self._offer(one, message)]:
            self.drop(subscriber)

    def _offer(self, subscriber: Subscriber, message: Message) -> bool:
        """Offer a message to a subscriber. A bug in writing to it ends that one alone."""
        try:
            return subscriber.offer(message)
        except Exception as error:  # the stream outlives any failure of writing to one subscriber
            log.exception("stream %s: a bug ended a subscriber", self.name)
            subscriber.end(error)
            return True

    def drop(self, subscriber: Subscriber) -> None:
        """End a subscriber that cannot keep up."""
        self.dropped += 1
        subscriber.end()

    async def start(self) -> None:
        """Begin to load states, if the stream has any."""

    async def close(self) -> None:
        """End every subscriber and accept no more."""
        self._closed = True
        for subscriber in list(self._subscribers):
            subscriber.end()


class EventBroadcaster(Broadcaster):
    """Broadcaster of events, which are numbered and kept in a ring for clients that return.

    Events reach numbered subscribers, whose other messages are as far apart, at most every `GATHERING_S` seconds: many
    together are compressed to a quarter of what they are one by one.
    """

    def __init__(self, name: str, ring: EventRing, *, capacity: int = CAPACITY) -> None:
        super().__init__(name, capacity=capacity)
        self._ring = ring
        self._pending: list[tuple[str, bytes]] = []
        self._gathered: list[tuple[str, bytes]] = []
        self._gathered_due_s = 0.0
        self._gathering: asyncio.TimerHandle | None = None

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        """Add a subscriber, whose first message is a greeting and what it missed since the event `last_id`."""
        self.flush()  # events of before the greeting are not the newcomer's
        self._flush_gathered()
        super().add(subscriber)
        subscriber.offer(EventsMessage(self._ring.first_events(last_id)))

    def post(self, name: str, data: bytes) -> None:
        """Queue an event for the next turn of the event loop, so that sockets do not hold up the publisher."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append((name, data))
        if len(self._pending) >= EVENTS_AT_ONCE_MAX:
            self.flush()

    def flush(self) -> None:
        """Send the queued events, to numbered subscribers when it is time."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self.send(EventsMessage([NumberedEvent(name, data, "") for name, data in pending]), to=_is_plain)
        self._gathered += pending
        loop = asyncio.get_running_loop()
        if len(self._gathered) >= EVENTS_AT_ONCE_MAX or loop.time() >= self._gathered_due_s:
            self._flush_gathered()
        elif self._gathering is None:
            self._gathering = loop.call_at(self._gathered_due_s, self._flush_gathered)

    def _flush_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            events = EventsMessage([self._ring.append(name, data) for name, data in gathered])
            self.send(events, to=_is_numbered)
            self._gathered_due_s = asyncio.get_running_loop().time() + GATHERING_S

    async def close(self) -> None:
        self.flush()
        self._flush_gathered()
        await super().close()


def _is_numbered(form: Form) -> bool:
    return form.numbered


def _is_plain(form: Form) -> bool:
    return not form.numbered


class StateBroadcaster(Broadcaster):
    """Broadcaster of a state, which is loaded for newcomers and after every event that may have changed it.

    One long-lived task does all loading. Nothing is loaded without subscribers; requests that came before a load began
    share it. A load that fails is logged and ends the newcomers that waited for it. One that failed because something
    is unavailable is repeated soon, any other on the next event.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        last_id: Callable[[], str] = str,
        *,
        capacity: int = CAPACITY,
        spacing_s: float = SPACING_S,
    ) -> None:
        """Take the function that loads the state as JSON, and the one that returns the id of the last sent event."""
        super().__init__(name, capacity=capacity)
        self._load = load
        self._last_id = last_id
        self._spacing_s = spacing_s
        self._wanted = asyncio.Event()
        self._changed = False
        self._newcomers: dict[Subscriber, None] = {}
        self._everyone_due_s = self._newcomers_due_s = 0.0  # of the event loop's time: when each may be loaded for
        self._task: asyncio.Task[None] | None = None
        self._last_state: bytes | None = None  # what everyone got last
        self._version = 0
        self.loads = 0
        self.failures = 0

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        # Subscribed first, loaded for afterwards: no change falls between the two.
        super().add(subscriber)
        self._newcomers[subscriber] = None
        self._wanted.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self._newcomers.pop(subscriber, None)

    def changed(self) -> None:
        """Note that the state may have changed: it is loaded and sent soon, once for all events until then."""
        self._changed = True
        self._wanted.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._refresh_forever(), name=f"stream {self.name}")

    async def close(self) -> None:
        await super().close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def _refresh_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            everyone = await self._due()
            newcomers, self._newcomers = self._newcomers, {}
            if everyone:
                self._changed = False
            state = await self._loaded()
            await self._hand_out(state, newcomers, everyone)
            self._newcomers_due_s = loop.time() + self._spacing_s
            if everyone:
                self._everyone_due_s = self._newcomers_due_s
                if isinstance(state, TraderError):
                    self._everyone_due_s = self._newcomers_due_s = loop.time() + RETRY_S
                    self.changed()

    async def _due(self) -> bool:
        """Wait until a load is due. Return whether it is for everyone, not only for newcomers."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            self._changed = self._changed and bool(self._subscribers)
            everyone_s = self._everyone_due_s if self._changed else math.inf
            newcomers_s = self._newcomers_due_s if self._newcomers else math.inf
            due_s, now_s = min(everyone_s, newcomers_s), loop.time()
            if due_s <= now_s:
                return everyone_s <= now_s
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if due_s == math.inf else due_s):
                    await self._wanted.wait()

    async def _hand_out(self, state: bytes | BaseException, newcomers: dict[Subscriber, None], everyone: bool) -> None:
        if isinstance(state, BaseException):
            for subscriber in newcomers:
                subscriber.end(state)
            return
        message = await self._make_message(state, everyone)
        # Who subscribed after the load began waits for the next one: this state may be older than its subscription.
        for subscriber in self._subscribers if everyone else newcomers:
            if subscriber not in self._newcomers:
                self._offer(subscriber, message)

    async def _make_message(self, state: bytes, everyone: bool) -> StateMessage:
        """Return the message of a state, with what its subscribers need: compressed, and as a patch."""
        message, last_state = StateMessage(self.name, state), self._last_state
        if everyone:
            self._version += 1
            self._last_state = state
        if everyone or state == last_state:
            message.version = self._version
        if everyone and last_state is not None and any(one.form.patched for one in self._subscribers):
            patch = await asyncio.to_thread(encode_patch, last_state, state)
            message.patch = StateMessage(self.name, patch, name=f"{self.name}:patch")
        forms = {one.form for one in self._subscribers}
        if message.patch is not None and any(form.compressed and form.patched for form in forms):
            await message.patch.compress()
        if any(form.compressed and not (form.patched and message.patch is not None) for form in forms):
            await message.compress()
        message.event_id = self._last_id()  # only now: events may have been sent during the compression
        if message.patch is not None:
            message.patch.event_id = message.event_id
        return message

    async def _loaded(self) -> bytes | BaseException:
        """Return the encoded state, or the failure as a value: none may end the task that loads."""
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
