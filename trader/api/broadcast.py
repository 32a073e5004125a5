"""Broadcasters, one per stream: the base class with its subscribers, and the broadcaster of workflow events.

A state stream sends the current state: only the newest one waits for a subscriber, so a slow subscriber gets fewer
states at no extra cost. The workflow stream sends events: they wait in a bounded backlog, and a subscriber with a full
backlog is dropped. A message is encoded once for any number of subscribers. One subscriber may follow several streams.
"""

import asyncio
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from trader.api.stream_messages import EventsMessage, Message, MessageForm, NumberedEvent
from trader.api.subscriber import Subscriber
from trader.core.errors import Unavailable

CAPACITY = 50
EVENTS_AT_ONCE_MAX = 256
RETRY_AFTER_S = 5

GATHERING_S = 0.1
"""Events within this time of each other are sent together."""


EVENTS_MAX: Final = 2000

ID_PATTERN: Final = re.compile(r"[0-9a-f]{8}-(0|[1-9][0-9]{0,14})")
"""An id: its sequence of events, and the number of the last event before its message."""


class Broadcaster:
    """The subscribers of one stream, at most `capacity`; the addresses of anonymous callers share the slots."""

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
        """Drop the oldest subscriber of the address with the most slots, if it then still has at least as many.

        Callers with a key or token are never dropped, and displace all others.

        :raises Unavailable: no subscriber may be dropped
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
        """Send a message to the subscribers whose form `to` accepts, and drop subscribers that cannot keep up."""
        chosen = [subscriber for subscriber in self._subscribers if to(subscriber.form)]
        for subscriber in chosen:
            if not subscriber.offer(message):
                self.drop(subscriber)

    def drop(self, subscriber: Subscriber) -> None:
        """End a subscriber that cannot keep up."""
        self.dropped += 1
        subscriber.end()

    async def start(self) -> None:
        """Start loading states, if the stream has any."""

    async def close(self) -> None:
        """End every subscriber and accept no more."""
        self._closed = True
        for subscriber in list(self._subscribers):
            subscriber.end()


Greeting = Callable[[str], bytes]


class EventRing:
    """The latest events of one sequence, which begins with the process or its lead; earlier sequences are lost.

    `greeting` returns the data of the events `connected` and `reset`, which have no numbers.
    """

    def __init__(self, greeting: Greeting, *, events_max: int = EVENTS_MAX) -> None:
        self._greeting = greeting
        self._sequence = secrets.token_hex(4)
        self._number = 0
        self._events: deque[NumberedEvent] = deque(maxlen=events_max)

    def restart(self) -> NumberedEvent:
        """Start a new sequence, and return the event `reset` that announces it."""
        self._sequence, self._number = secrets.token_hex(4), 0
        self._events.clear()
        return self._greet("reset", 0)

    def last_id(self) -> str:
        """Return the id of a message that comes after every event so far."""
        return self._id(self._number)

    def append(self, name: str, data: bytes) -> NumberedEvent:
        """Keep an event, and return it with its id."""
        self._number += 1
        event = NumberedEvent(name, data, self._id(self._number))
        self._events.append(event)
        return event

    def first_events(self, last_id: str | None) -> list[NumberedEvent]:
        """Return a subscriber's first events: `connected`, and the events since `last_id`.

        If some of these are lost, `reset` comes first, followed by every event still available.
        """
        if last_id is None:
            return [self._greet("connected", self._number)]
        sequence, _, number = last_id.partition("-")
        kept_from = self._number - len(self._events)
        seen = int(number) if sequence == self._sequence else -1
        if kept_from <= seen <= self._number:
            return [self._greet("connected", seen), *islice(self._events, seen - kept_from, None)]
        greetings = [self._greet(name, kept_from) for name in ("reset", "connected")]
        return [*greetings, *self._events]

    def _greet(self, name: str, number: int) -> NumberedEvent:
        return NumberedEvent(name, self._greeting(name), self._id(number))

    def _id(self, number: int) -> str:
        return f"{self._sequence}-{number}"


class EventBroadcaster(Broadcaster):
    """Broadcaster of events, which are numbered and kept in a ring for clients that return.

    They are sent at most every `GATHERING_S` seconds: sending many together costs less than sending each alone.
    """

    def __init__(self, name: str, ring: EventRing) -> None:
        super().__init__(name)
        self._ring = ring
        self._waiting: list[tuple[str, bytes]] = []
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        """Add a subscriber, whose first message is a greeting and the events missed since `last_id`."""
        self.flush()  # earlier events are not for the newcomer
        super().add(subscriber)
        subscriber.offer(EventsMessage(self._ring.first_events(last_id)))

    def post(self, name: str, data: bytes) -> None:
        """Queue an event until its interval is over: at the earliest for the next turn of the event loop, so that
        sockets do not hold up the publisher."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._due_s, self.flush)
        self._waiting.append((name, data))
        if len(self._waiting) >= EVENTS_AT_ONCE_MAX:
            self.flush()

    def flush(self) -> None:
        """Send the queued events now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.send(EventsMessage([self._ring.append(name, data) for name, data in waiting]))
            self._due_s = asyncio.get_running_loop().time() + GATHERING_S

    def restart(self) -> None:
        """Start a new sequence of events, because some were lost, and send `reset` to those who know its numbers."""
        self.flush()
        self.send(EventsMessage([self._ring.restart()]), to=lambda form: form.numbered)

    async def close(self) -> None:
        self.flush()
        await super().close()
