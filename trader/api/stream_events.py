"""Ring of workflow events: the latest ones with their ids, from which a returning client gets what it missed."""

import re
import secrets
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from trader.api.stream_messages import NumberedEvent

EVENTS_MAX: Final = 2000

ID_PATTERN: Final = re.compile(r"[0-9a-f]{8}-(0|[1-9][0-9]{0,14})")
"""An id: the sequence of events that it belongs to, and the number of the last one that its message comes after."""

Greeting = Callable[[str], bytes]


class EventRing:
    """The latest events of one sequence, which begins with the process or its lead: those of an earlier one are lost.

    `greeting` returns the data of the events `connected` and `reset`, which are not numbered themselves.
    """

    def __init__(self, greeting: Greeting, *, events_max: int = EVENTS_MAX) -> None:
        self._greeting = greeting
        self._sequence = secrets.token_hex(4)
        self._number = 0
        self._events: deque[NumberedEvent] = deque(maxlen=events_max)

    def restart(self) -> NumberedEvent:
        """Begin another sequence, and return the event `reset` that says so."""
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
        """Return what a subscriber gets first: `connected`, and the events since `last_id`.

        When some of those are lost, `reset` comes before, and every event that is kept follows.
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
