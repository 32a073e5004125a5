"""Messages of the event streams: each is encoded at most once in every form in which subscribers read it.

A compressed stream is one gzip header and a sequence of deflate blocks. Each message is compressed by itself and
flushed, so its block refers to nothing before it and is the same for every subscriber, whenever that one has joined.
The stream has no end but that of its connection, and therefore no gzip trailer.
"""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from trader.api.compression import LEVEL, THREAD_BYTES_MIN

GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class Form(NamedTuple):
    """How a subscriber reads its messages.

    `numbered`: all have the name of their stream or event, and an id. `patched`: a state that the subscriber has is
    followed by patches of it.
    """

    numbered: bool = False
    compressed: bool = False
    patched: bool = False


PLAIN: Final = Form()


def frame(data: bytes, event: str | None = None, event_id: str | None = None) -> bytes:
    """Return the server-sent event of one line of JSON; unnamed when `event` is None."""
    number = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    name = b"" if event is None else b"event: %b\n" % event.encode()
    return b"%b%bdata: %b\n\n" % (number, name, data)


def deflated(text: bytes) -> bytes:
    """Return the text as deflate blocks that may follow any others."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)


def packed(text: bytes, form: Form) -> bytes:
    """Return the bytes of a text in the subscriber's form."""
    return deflated(text) if form.compressed and text else text


class Message:
    """Bytes for subscribers. Of messages with the same `state` only the newest is kept for one that is behind."""

    __slots__ = ("_encoded", "state")

    def __init__(self, state: str | None) -> None:
        self.state = state
        self._encoded: dict[Form, bytes] = {}

    def encoded(self, form: Form) -> bytes:
        found = self._encoded.get(form)
        if found is None:
            found = self._encoded[form] = self._make(form)
        return found

    def _make(self, form: Form) -> bytes:
        raise NotImplementedError


class StateMessage(Message):
    """The state of a stream, or a patch of the state before it. `event_id` is set when it is sent.

    `version` is that of a state that everyone gets, and `patch` makes it of the version before.
    """

    __slots__ = ("_block", "_name", "_text", "event_id", "patch", "version")

    def __init__(self, stream: str, data: bytes, *, name: str | None = None) -> None:
        super().__init__(stream)
        self.event_id = ""
        self.version: int | None = None
        self.patch: StateMessage | None = None
        self._name = name or stream
        self._text = frame(data)
        self._block: bytes | None = None

    async def compress(self) -> None:
        """Compress the data, a long one in a thread."""
        if self._block is None:
            is_long = len(self._text) >= THREAD_BYTES_MIN
            self._block = await asyncio.to_thread(deflated, self._text) if is_long else deflated(self._text)

    def _make(self, form: Form) -> bytes:
        head = f"id: {self.event_id}\nevent: {self._name}\n".encode() if form.numbered else b""
        if not form.compressed:
            return head + self._text
        if self._block is None:
            self._block = deflated(self._text)
        return packed(head, form) + self._block


class NumberedEvent(NamedTuple):
    """A named event as JSON text, and the id after which a returning client has seen it."""

    name: str
    data: bytes
    event_id: str


class EventsMessage(Message):
    """Events that are sent together, in their order."""

    __slots__ = ("_events",)

    def __init__(self, events: Sequence[NumberedEvent]) -> None:
        super().__init__(None)
        self._events = events

    def _make(self, form: Form) -> bytes:
        shown = ((event.data, event.name, event.event_id if form.numbered else None) for event in self._events)
        return packed(b"".join(frame(*each) for each in shown), form)
