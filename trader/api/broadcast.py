"""Broadcasters, one per stream: the base class with its subscribers, and that of workflow events.

A state stream sends the current state: only the newest one waits for a subscriber, so a slow one gets fewer of them
and costs nothing more. The workflow stream sends events: they wait in a bounded backlog, and a subscriber whose backlog
is full is dropped. A message is encoded once, whatever the number of subscribers. One subscriber may follow several
streams.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from trader.api.stream_events import EventRing
from trader.api.stream_messages import EventsMessage, Message, MessageForm, NumberedEvent
from trader.api.subscriber import Subscriber
from trader.errors import Unavailable

CAPACITY = 50
EVENTS_AT_ONCE_MAX = 256
RETRY_AFTER_S = 5

GATHERING_S = 0.25
"""Events that come within this time of others are sent together on the one stream."""


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
            self._make_room(subscriber)
        self._subscribers[subscriber] = None

    def _make_room(self, newcomer: Subscriber) -> None:
        """Drop the oldest subscriber of the address with the most places, if that has more than the newcomer's then.

        Callers with a key or token are dropped for nobody, and all others for them.

        :raises Unavailable: nobody is to be dropped
        """
        places = Counter(each.address for each in self._subscribers if not each.is_known)
        address, count = next(iter(places.most_common(1)), ("", 0))
        if not count or not (newcomer.is_known or count > places[newcomer.address] + 1):
            raise Unavailable(f"All {self.capacity} places of the stream {self.name} are taken", RETRY_AFTER_S)
        oldest = next(each for each in self._subscribers if each.address == address and not each.is_known)
        self.unsubscribe(oldest)
        self.drop(oldest)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.pop(subscriber, None)

    def send(self, message: Message, *, to: Callable[[MessageForm], bool] = lambda _: True) -> None:
        """Send a message to the subscribers whose form `to` accepts, and drop those that cannot keep up."""
        chosen = [subscriber for subscriber in self._subscribers if to(subscriber.form)]
        for subscriber in chosen:
            if not subscriber.offer(message):
                self.drop(subscriber)

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
    together cost less than one by one.
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

    def restart(self) -> None:
        """Begin another sequence of events, since some were lost: everyone is sent `reset`."""
        self.flush()
        self._flush_gathered()
        self.send(EventsMessage([self._ring.restart()]), to=_is_numbered)

    async def close(self) -> None:
        self.flush()
        self._flush_gathered()
        await super().close()


def _is_numbered(form: MessageForm) -> bool:
    return form.numbered


def _is_plain(form: MessageForm) -> bool:
    return not form.numbered
