"""Messages of the event streams, and their compression.

A compressed stream is one gzip header and a sequence of deflate blocks; it ends only with its connection, and therefore
has no gzip trailer. Every message is compressed once for all subscribers, to blocks without references to earlier ones.
"""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from trader.api.compression import LEVEL, THREAD_BYTES_MIN

GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class MessageForm(NamedTuple):
    """The form in which a subscriber reads its messages; `numbered`: all have a name and an id."""

    numbered: bool = False
    compressed: bool = False


PLAIN: Final = MessageForm()


def frame(data: bytes, event: str | None = None, event_id: str | None = None) -> bytes:
    """Return the server-sent event of one line of JSON; unnamed when `event` is None."""
    number = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    name = b"" if event is None else b"event: %b\n" % event.encode()
    return b"%b%bdata: %b\n\n" % (number, name, data)


def deflated(text: bytes) -> bytes:
    """Compress text into deflate blocks that do not refer to earlier blocks."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)


class Message:
    """Text for subscribers. For a slow subscriber only the newest message of each `state` is kept.

    `numbered` comes from the subscriber's form.
    """

    def __init__(self, state: str | None) -> None:
        self.state = state
        self._texts: dict[bool, bytes] = {}
        self._blocks: dict[bool, bytes] = {}

    def text(self, numbered: bool) -> bytes:
        """Return the text, encoded once."""
        if numbered not in self._texts:
            self._texts[numbered] = self._make_text(numbered)
        return self._texts[numbered]

    def block(self, numbered: bool) -> bytes:
        """Return the compressed text, computed once."""
        if numbered not in self._blocks:
            self._blocks[numbered] = self._make_block(numbered)
        return self._blocks[numbered]

    def _make_text(self, numbered: bool) -> bytes:
        raise NotImplementedError

    def _make_block(self, numbered: bool) -> bytes:
        return deflated(self.text(numbered))


class StateMessage(Message):
    """The state of a stream. `event_id` is set when it is sent."""

    def __init__(self, stream: str, data: bytes) -> None:
        super().__init__(stream)
        self.event_id = ""
        self._data = frame(data)
        self._data_block: bytes | None = None

    async def compress(self) -> None:
        """Compress the data, in a thread if it is long."""
        if self._data_block is None:
            is_long = len(self._data) >= THREAD_BYTES_MIN
            self._data_block = await asyncio.to_thread(deflated, self._data) if is_long else deflated(self._data)

    def _make_text(self, numbered: bool) -> bytes:
        return self._head(numbered) + self._data

    def _make_block(self, numbered: bool) -> bytes:
        if self._data_block is None:
            self._data_block = deflated(self._data)
        return (deflated(self._head(numbered)) if numbered else b"") + self._data_block

    def _head(self, numbered: bool) -> bytes:
        return f"id: {self.event_id}\nevent: {self.state}\n".encode() if numbered else b""


class NumberedEvent(NamedTuple):
    """A named event as JSON text, and the id with which a returning client has seen it."""

    name: str
    data: bytes
    event_id: str


class EventsMessage(Message):
    """Events that are sent together, in order."""

    def __init__(self, events: Sequence[NumberedEvent]) -> None:
        super().__init__(None)
        self._events = events

    def _make_text(self, numbered: bool) -> bytes:
        shown = ((event.data, event.name, event.event_id if numbered else None) for event in self._events)
        return b"".join(frame(*each) for each in shown)
