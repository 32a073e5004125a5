"""Budget of requests to one address of a venue, shared by its prices and all accounts there.

Each request is counted before it is sent, so that the venue has no reason to refuse it. More urgent ones go first, and
each priority may use only its share of what the venue allows in a rolling minute: the rest is a reserve for more urgent
ones, and the last part of it only for closing.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from itertools import count
from math import inf
from time import monotonic
from typing import Final, NamedTuple

from trader.core.errors import MarketDataError
from trader.exchange.domain.venue_orders import VenueOrder


class Priority(IntEnum):
    """What a request is for, the most urgent first."""

    CLOSE = 0
    CANCEL = 1
    PROTECT = 2
    OPEN = 3
    READ = 4


_SHARES: Final = {
    Priority.CLOSE: 1.0,
    Priority.CANCEL: 0.8,
    Priority.PROTECT: 0.8,
    Priority.OPEN: 0.7,
    Priority.READ: 0.6,
}
_ALLOWANCE_LEAST: Final = {Priority.OPEN: 20, Priority.PROTECT: 5}
"""How much of an account's allowance each of these leaves to more urgent ones."""

PATIENCE_S: Final = 3.0
"""How long a request waits for its turn by default: its caller holds an account meanwhile."""

_MARGIN: Final = 62 / 60
"""The window is longer than the venue's minute, because requests may arrive there in other intervals."""

_PULSE_S: Final = 0.02

_SPENDING: Final[ContextVar[tuple[Priority, float]]] = ContextVar("spending", default=(Priority.READ, PATIENCE_S))


@contextmanager
def spending_as(priority: Priority, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Give the requests of the block a priority, and the time that each may wait for its turn."""
    token = _SPENDING.set((priority, patience_s))
    try:
        yield
    finally:
        _SPENDING.reset(token)


def priority_of(order: VenueOrder) -> Priority:
    """Return the priority of the transaction that carries an order."""
    if not order.reduce_only:
        return Priority.OPEN
    return Priority.CLOSE if order.trigger is None else Priority.PROTECT


class OrderLimits(NamedTuple):
    """How many orders may stand at the venue, and how many of them may wait for a trigger."""

    per_account: int
    per_market: int
    waiting: int
    waiting_per_market: int


class RequestBudget:
    """What one address may ask of the venue within a minute of `minute_s` seconds.

    `per_minute` limits the requests, or their weights if `is_weighted`; `per_kind` the transactions of each kind;
    `orders` the standing orders of each account, if they are limited.
    """

    orders: OrderLimits | None = None

    def __init__(
        self, per_minute: int, *, per_kind: int, minute_s: float = 60.0, now_s: Callable[[], float] = monotonic
    ) -> None:
        self.per_minute, self.is_weighted = per_minute, False
        self._now_s = now_s
        self._per_kind = per_kind
        self._minute_s = minute_s
        self._requests: deque[tuple[float, int, int | None]] = deque()
        self._waiting: list[tuple[Priority, int]] = []
        self._numbers = count()
        self._allowances: dict[str, tuple[int, float]] = {}

    @property
    def used_share(self) -> float:
        """The share of the present minute's allowance that is used."""
        return self._used() / self.per_minute

    async def take(self, weight: int, *, kind: int | None = None) -> None:
        """Wait for the turn of a request, and count it. `kind` is the kind of a transaction.

        :raises MarketDataError: it would have to wait too long, and must not be sent
        """
        priority, patience_s = _SPENDING.get()
        ticket, until_s = (priority, next(self._numbers)), monotonic() + patience_s
        insort(self._waiting, ticket)
        try:
            while self._waiting[0] != ticket or not self._fits(priority, weight, kind):
                if monotonic() >= until_s:
                    raise MarketDataError(
                        f"the venue's limit of {self.per_minute} {'weights' if self.is_weighted else 'requests'} a "
                        f"minute leaves nothing for this now (priority: {priority.name.lower()})"
                    )
                await asyncio.sleep(_PULSE_S)
        finally:
            self._waiting.remove(ticket)
        self._requests.append((self._now_s(), weight, kind))

    def allow(self, account: str, left: int, for_s: float = inf) -> None:
        """Note how many transactions the venue still allows an account beyond the limits of a minute, for so long."""
        self._allowances[account] = left, self._now_s() + for_s

    def spend(self, account: str, transactions: int) -> None:
        """Count transactions of an account against what the venue allows it.

        :raises MarketDataError: the rest is kept for more urgent ones
        """
        left, until_s = self._allowances.get(account, (0, -inf))
        if self._now_s() >= until_s:
            return
        least = _ALLOWANCE_LEAST.get(_SPENDING.get()[0])
        if least is not None and left - transactions < least:
            raise MarketDataError(f"the venue allows {left} more transactions, which are kept for closing")
        self._allowances[account] = left - transactions, until_s

    def _fits(self, priority: Priority, weight: int, kind: int | None) -> bool:
        share, used = _SHARES[priority], self._used() + (weight if self.is_weighted else 1)
        of_kind = 0 if kind is None else sum(other == kind for *_, other in self._requests) + 1
        return used <= share * self.per_minute and of_kind <= share * self._per_kind

    def _used(self) -> int:
        since_s, spent = self._now_s() - self._minute_s * _MARGIN, self._requests
        while spent and spent[0][0] <= since_s:
            spent.popleft()
        return sum(weight for _, weight, _ in spent) if self.is_weighted else len(spent)
