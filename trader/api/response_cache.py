"""Response cache: encoded answers kept until their data changes.

A procedure whose answers may be kept names a token: a function of the context that reads, in microseconds, what its
answers are made of. An answer is given again only while the token equals the one that was read before the answer was
made, so whoever reads after a write sees that write; in a process that follows the leader, as soon as it has seen the
change itself. A token of None keeps nothing now.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Final

from trader.api.compression import compressed
from trader.api.context import Context
from trader.domain.portfolio.histories import minute_end

ENTRIES_MAX: Final = 512
BYTES_MAX: Final = 128 * 2**20
"""Room for a few equity histories of a hundred models, which have 20 MB each."""

INPUT_BYTES_MAX: Final = 512
"""Longer inputs are seldom sent twice."""

WAITS_MAX: Final = 2
"""Failed computations of other callers that a caller waits for before it computes its own answer."""


@dataclass(slots=True)
class Answer:
    """The response to one call. `headers` come beside the content type and the request id."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    _compressed: bytes = field(default=b"", compare=False, repr=False)
    _compressing: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False, repr=False)

    async def compressed(self) -> bytes:
        """Return the body as gzip, which is made once; that of a short one without letting other tasks run first."""
        async with self._compressing:
            self._compressed = self._compressed or await compressed(self.body)
        return self._compressed

    @property
    def size(self) -> int:
        """Bytes of the body, with its compressed form if there is one."""
        return len(self.body) + len(self._compressed)


Key = tuple[Hashable, bytes]
"""The procedure with the style of its caller, and the input as it came."""


class _Entry:
    """Cache entry for one token. `settled` is set once the answer was computed, or computing it failed."""

    __slots__ = ("answer", "settled", "token")

    def __init__(self, token: object) -> None:
        self.token = token
        self.answer: Answer | None = None
        self.settled = asyncio.Event()


class ResponseCache:
    """At most `ENTRIES_MAX` answers of at most `BYTES_MAX` bytes together; the oldest go first."""

    def __init__(self, *, entries_max: int = ENTRIES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(entry.answer.size for entry in self._entries.values() if entry.answer is not None)

    def find(self, key: Key, token: object) -> Answer | None:
        """Return the answer that was made for this token."""
        entry = self._entries.get(key)
        if entry is None or entry.answer is None or entry.token != token:
            return None
        self.hits += 1
        return entry.answer

    async def make(self, key: Key, token: object, answer: Callable[[], Awaitable[Answer]]) -> Answer:
        """Compute the answer and keep it on success. Callers with the same key and token wait for this one.

        A caller that has waited for failures makes its own answer and waits no more: in a line of many each would fail
        after the other.
        """
        for _ in range(WAITS_MAX):
            entry = self._entries.get(key)
            if entry is None or entry.token != token:
                break
            await entry.settled.wait()
            if entry.answer is not None:
                return entry.answer
        else:
            self.misses += 1
            return await answer()
        self.misses += 1
        entry = _Entry(token)
        self._entries.pop(key, None)
        self._entries[key] = entry
        try:
            made = await answer()
            if made.status == HTTPStatus.OK:
                entry.answer = made
        finally:
            entry.settled.set()
            if self._entries.get(key) is entry:
                self._settle(key, entry)
        return made

    def _settle(self, key: Key, entry: _Entry) -> None:
        if entry.answer is None or len(entry.answer.body) > self._bytes_max:
            del self._entries[key]
            return
        while len(self._entries) > self._entries_max or self.size > self._bytes_max:
            del self._entries[next(iter(self._entries))]


# Tokens. Accounts, models and snapshots count their changes; marks and quotes are compared themselves. Windows end with
# the running minute, and so do the answers made of rows that a script may write beside the service, such as models.


def constant_token(_: Context) -> object:
    """Return the token of data that is fixed while the service runs."""
    return ()


def prices_token(context: Context) -> object | None:
    """Return the token of prices; None while one is stale, since a stale one shows its age."""
    now, quotes = context.clock.now(), tuple(context.market.quotes().values())
    return None if any(quote.is_stale(now) for quote in quotes) else (quotes, context.market.troubles())


def positions_token(context: Context) -> object:
    """Return the token of the accounts, valued at the marks."""
    exchange = context.exchange
    return exchange.version, context.agents.version, *exchange.marks().items()


def trades_token(context: Context) -> object:
    """Return the token of completed trades with the names of their models."""
    return context.exchange.version, context.agents.version, _minute(context)


def histories_token(context: Context) -> object:
    """Return the token of portfolio snapshots."""
    return context.exchange.term, context.portfolio.version, context.agents.version, _minute(context)


def rankings_token(context: Context) -> object:
    """Return the token of portfolio snapshots, trades, and the accounts valued at the marks."""
    return histories_token(context), positions_token(context)


def evidence_token(context: Context) -> object:
    """Return the token of portfolio snapshots, trades and runs."""
    return histories_token(context), context.exchange.version


def _minute(context: Context) -> datetime:
    return minute_end(context.clock.now())
