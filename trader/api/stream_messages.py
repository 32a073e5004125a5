"""Messages of the event streams, and their compression.

A compressed stream is one gzip header and a sequence of deflate blocks; it ends only with its connection, and therefore
has no gzip trailer. Whole states and long messages are compressed once for all subscribers, to blocks without
references to earlier ones. Patches and events are short and similar, so each connection compresses them in the context
of its earlier messages: names, keys and ids that were already sent cost almost nothing.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from trader.api.compression import LEVEL, THREAD_BYTES_MIN

SHARED_BYTES_MIN: Final = 32 * 1024
"""Longer messages are compressed once for all: they fill a connection's window, and would block the loop."""

CONTEXT_BYTES_MIN: Final = 64
"""Shorter texts, such as pings, do not start a context, which takes 256 KiB of memory."""

GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class MessageForm(NamedTuple):
    """The form in which a subscriber reads its messages.

    `numbered`: all have the name of their stream or event, and an id. `patched`: states are keyed, and patches follow
    the first one.
    """

    numbered: bool = False
    compressed: bool = False
    patched: bool = False


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


def _context() -> Callable[[bytes], bytes]:
    """Return a compressor of texts into blocks that may refer to earlier texts."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return lambda text: packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)


class Packer:
    """Compressor of one connection: deflate blocks in sending order."""

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context: Callable[[bytes], bytes] | None = None

    def pack(self, text: bytes) -> bytes:
        """Return the block of the next text, which may refer to earlier texts."""
        if self._context is None:
            if len(text) <= CONTEXT_BYTES_MIN:
                return deflated(text)
            self._context = _context()
        return self._context(text)

    def insert(self, block: bytes) -> bytes:
        """Pass on a block that all connections share. Later blocks cannot refer to texts before it."""
        self._context = None
        return block


class Message:
    """Text for subscribers. For a slow subscriber only the newest message of each `state` is kept.

    `numbered` comes from the subscriber's form.
    """

    __slots__ = ("_blocks", "_texts", "state")

    def __init__(self, state: str | None) -> None:
        self.state = state
        self._texts: dict[bool, bytes] = {}
        self._blocks: dict[bool, bytes] = {}

    def text(self, numbered: bool) -> bytes:
        """Return the text, encoded once."""
        if numbered not in self._texts:
            self._texts[numbered] = self._make_text(numbered)
        return self._texts[numbered]

    def block(self, numbered: bool) -> bytes | None:
        """Return the block shared by all compressed subscribers, computed once; None if each computes its own."""
        if not self._is_shared(numbered):
            return None
        if numbered not in self._blocks:
            self._blocks[numbered] = self._make_block(numbered)
        return self._blocks[numbered]

    def _is_shared(self, numbered: bool) -> bool:
        return len(self.text(numbered)) >= SHARED_BYTES_MIN

    def _make_text(self, numbered: bool) -> bytes:
        raise NotImplementedError

    def _make_block(self, numbered: bool) -> bytes:
        return deflated(self.text(numbered))


class StateMessage(Message):
    """The state of a stream, or a patch of the previous state. `event_id` is set when it is sent.

    `keyed` is the state for subscribers of patches. `version` identifies one that all of them get, and `patch` derives
    it from the previous version.
    """

    __slots__ = ("_data", "_data_block", "_is_patch", "_name", "event_id", "keyed", "patch", "version")

    def __init__(self, stream: str, data: bytes, *, is_patch: bool = False) -> None:
        super().__init__(stream)
        self.event_id = ""
        self.version: int | None = None
        self.keyed: StateMessage | None = None
        self.patch: StateMessage | None = None
        self._is_patch = is_patch
        self._name = f"{stream}:patch" if is_patch else stream
        self._data = frame(data)
        self._data_block: bytes | None = None

    async def compress(self) -> None:
        """Compress the data, in a thread if it is long; each connection compresses short patches itself."""
        if self._data_block is None and self._is_shared(numbered=False):
            is_long = len(self._data) >= THREAD_BYTES_MIN
            self._data_block = await asyncio.to_thread(deflated, self._data) if is_long else deflated(self._data)

    def _is_shared(self, numbered: bool) -> bool:
        return not self._is_patch or len(self._data) >= SHARED_BYTES_MIN

    def _make_text(self, numbered: bool) -> bytes:
        return self._head(numbered) + self._data

    def _make_block(self, numbered: bool) -> bytes:
        if self._data_block is None:
            self._data_block = deflated(self._data)
        return (deflated(self._head(numbered)) if numbered else b"") + self._data_block

    def _head(self, numbered: bool) -> bytes:
        return f"id: {self.event_id}\nevent: {self._name}\n".encode() if numbered else b""


class NumberedEvent(NamedTuple):
    """A named event as JSON text, and the id with which a returning client has seen it."""

    name: str
    data: bytes
    event_id: str


class EventsMessage(Message):
    """Events that are sent together, in order."""

    __slots__ = ("_events",)

    def __init__(self, events: Sequence[NumberedEvent]) -> None:
        super().__init__(None)
        self._events = events

    def _make_text(self, numbered: bool) -> bytes:
        shown = ((event.data, event.name, event.event_id if numbered else None) for event in self._events)
        return b"".join(frame(*each) for each in shown)
