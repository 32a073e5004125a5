"""Response cache: encoded responses kept until their data changes.

A procedure with cacheable responses names a token: a function of the context that reads, in microseconds, the version
of the underlying data. A response is reused only while the token equals the one read before the response was computed,
so a read after a write always sees that write; in a follower, once it has read the change. A token of None
disables caching for the moment.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Final

from trader.api.compression import compressed
from trader.api.context import Context
from trader.portfolio.domain.histories import minute_end

ENTRIES_MAX: Final = 512
BYTES_MAX: Final = 128 * 2**20
"""Room for a few equity histories of a hundred models, at 20 MB each."""

INPUT_BYTES_MAX: Final = 512
"""Longer inputs are rarely repeated."""

WAITS_MAX: Final = 2
"""How many failed computations of other callers a caller waits for before it computes its own response."""


@dataclass(slots=True)
class Answer:
    """The response to one call. `headers` are in addition to the content type and the request id."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    _compressed: bytes = field(default=b"", compare=False, repr=False)
    _compressing: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False, repr=False)

    async def compressed(self) -> bytes:
        """Return the body as gzip, computed once; for a short body, without yielding to other tasks."""
        async with self._compressing:
            self._compressed = self._compressed or await compressed(self.body)
        return self._compressed

    @property
    def size(self) -> int:
        """Bytes of the body, with its compressed form if there is one."""
        return len(self.body) + len(self._compressed)


CacheKey = tuple[Hashable, bytes]
"""The procedure with its caller's body style, and the raw input."""


class _Entry:
    """Cache entry for one token. `settled` is set once the response was computed or the computation failed."""

    def __init__(self, token: object) -> None:
        self.token = token
        self.answer: Answer | None = None
        self.settled = asyncio.Event()


class ResponseCache:
    """At most `ENTRIES_MAX` responses and `BYTES_MAX` bytes in total; the oldest are evicted first."""

    def __init__(self, *, entries_max: int = ENTRIES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._entries: dict[CacheKey, _Entry] = {}
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Total bytes in the cache."""
        return sum(entry.answer.size for entry in self._entries.values() if entry.answer is not None)

    def find(self, key: CacheKey, token: object) -> Answer | None:
        """Return the response cached for this token."""
        entry = self._entries.get(key)
        if entry is None or entry.answer is None or entry.token != token:
            return None
        self.hits += 1
        return entry.answer

    async def make(self, key: CacheKey, token: object, answer: Callable[[], Awaitable[Answer]]) -> Answer:
        """Compute the response and cache it on success. Callers with the same key and token wait for it.

        A caller that has waited for failures computes its own response and waits no more: in a long queue each would
        fail in turn.
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

    def _settle(self, key: CacheKey, entry: _Entry) -> None:
        if entry.answer is None or len(entry.answer.body) > self._bytes_max:
            del self._entries[key]
            return
        while len(self._entries) > self._entries_max or self.size > self._bytes_max:
            del self._entries[next(iter(self._entries))]


# Tokens. Accounts, models, invocations and snapshots count their changes; marks and quotes are compared by value.
# Windows end with the current minute, and so do responses based on rows that a script may write while the service runs,
# such as models.


def constant_token(_: Context) -> object:
    """Return the token of data that never changes while the service runs."""
    return ()


def prices_token(context: Context) -> object | None:
    """Return the token of prices; None while one is stale, because a stale price shows its age."""
    now, quotes = context.clock.now(), tuple(context.market.quotes().values())
    return None if any(quote.is_stale(now) for quote in quotes) else (quotes, context.market.troubles())


def positions_token(context: Context) -> object:
    """Return the token of the accounts, valued at the marks."""
    exchange = context.exchange
    return exchange.version, context.models.version, *exchange.marks().items()


def trades_token(context: Context) -> object:
    """Return the token of completed trades with the names of their models."""
    return context.exchange.version, context.models.version, _minute(context)


def histories_token(context: Context) -> object:
    """Return the token of portfolio snapshots, and of the latest reset, which begins an account anew."""
    runs = (account.run.started_at for account in context.exchange.accounts.values())
    versions = context.portfolio.version, context.models.version
    return context.exchange.term, versions, max(runs, default=None), _minute(context)


def rankings_token(context: Context) -> object:
    """Return the token of the evidence, and of the accounts valued at the marks."""
    return evidence_token(context), positions_token(context)


def evidence_token(context: Context) -> object:
    """Return the token of portfolio snapshots, trades, runs and invocations."""
    return histories_token(context), context.exchange.version, context.invocations.version


def _minute(context: Context) -> datetime:
    return minute_end(context.clock.now())
