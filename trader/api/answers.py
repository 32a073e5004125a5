"""Answers that are kept as long as nothing has changed that they are made of.

A procedure that allows it declares its freshness: a function of the context that gives a token of everything its
answers depend on, cheap to read at every request. An answer is given again only while the token equals the one that
was read before the answer was made; so whoever reads after a write gets what the write left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from trader.api.schemas.common import Body

ENTRIES_MAX: Final = 512
BYTES_MAX: Final = 32 * 2**20
INPUT_BYTES_MAX: Final = 512
"""Longer inputs are seldom asked twice."""

WAITS_MAX: Final = 2
"""For how many makings of others that fail a caller waits, before it is its own turn."""


class Answer(NamedTuple):
    """What goes back for one call. `headers` are those beside the content type and the request id."""

    status: int
    body: Body
    headers: Mapping[str, str] = {}


Key = tuple[Hashable, bytes]
"""What was asked: the procedure with the style of its caller, and the input as it came."""


class _Entry:
    """The answer for a token; `ready` is set when it was made, or could not be."""

    __slots__ = ("answer", "ready", "token")

    def __init__(self, token: object) -> None:
        self.token = token
        self.answer: Answer | None = None
        self.ready = asyncio.Event()


class AnswerCache:
    """At most `ENTRIES_MAX` answers of at most `BYTES_MAX` bytes; the oldest go first."""

    def __init__(self, *, entries_max: int = ENTRIES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self.size = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, token: object) -> Answer | None:
        """The answer that was made for this token."""
        entry = self._entries.get(key)
        if entry is None or entry.answer is None or entry.token != token:
            return None
        self.hits += 1
        return entry.answer

    async def make(self, key: Key, token: object, answer: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make the answer and keep it if it is a success. Who asks for the same meanwhile waits for this one.

        Who has waited for failures makes its own and waits no more: a line of many would each fail after the other.
        """
        for _ in range(WAITS_MAX):
            entry = self._entries.get(key)
            if entry is None or entry.token != token:
                break
            await entry.ready.wait()
            if entry.answer is not None:
                return entry.answer
        else:
            self.misses += 1
            return await answer()
        self.misses += 1
        entry = _Entry(token)
        self._remove(key)
        self._entries[key] = entry
        try:
            made = await answer()
            if made.status == HTTPStatus.OK:
                entry.answer = made
        finally:
            entry.ready.set()
            if self._entries.get(key) is entry:
                self._settle(key, entry)
        return made

    def _settle(self, key: Key, entry: _Entry) -> None:
        if entry.answer is None or len(entry.answer.body) > self._bytes_max:
            del self._entries[key]
            return
        self.size += len(entry.answer.body)
        while len(self._entries) > self._entries_max or self.size > self._bytes_max:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.answer is not None:
            self.size -= len(entry.answer.body)
