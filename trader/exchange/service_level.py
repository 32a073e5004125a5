"""How requests, orders and postings of the last minutes fared, in real time, for the reports of health and alarms."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Final

from trader.core.clock import SystemClock
from trader.core.errors import DatabaseUnavailable, MarketUnavailable, RequestError, Unavailable
from trader.core.schedulers import describe_error

WINDOW_S: Final = 60.0
"""The span over which slowness is judged: a single slow posting does not count."""

POSTINGS_LEAST: Final = 3
SLOW_S: Final = 2.0
"""Postings are slow when half of at least `POSTINGS_LEAST` within `WINDOW_S` took longer than this."""

KEPT_MAX: Final = 10_000

OUTCOMES_KEPT: Final = 10
FAILURES_LEAST: Final = 3
"""Requests of a kind are failing when so many of the last `OUTCOMES_KEPT` within `WINDOW_S` failed, and until as many
in a row have succeeded.
"""

_REAL_TIME: Final = SystemClock()


@dataclass
class FailingRequests:
    """A kind of requests: how the last ones ended and, since it fails, from when on, how often, and the last error."""

    ended: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=OUTCOMES_KEPT))
    since: datetime | None = None
    failures: int = 0
    text: str = ""

    def failed(self, now_s: float) -> int:
        return sum(not is_good and now_s - at_s <= WINDOW_S for at_s, is_good in self.ended)


class Outcomes:
    """How the last requests of each kind ended, whatever the reason. `timer` is a monotonic clock in seconds."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self._kinds: dict[str, FailingRequests] = {}

    @contextmanager
    def watch(self, kind: str, *, bugs_only: bool = False) -> Iterator[None]:
        """Record how a request of this kind ends. One that is refused as it should be counts neither way.

        With `bugs_only`, a request that may be tried again, such as an order at a standby, counts neither way as well.
        """
        try:
            yield
        except (MarketUnavailable, DatabaseUnavailable):  # conditions of health by themselves
            raise
        except Exception as error:
            if not isinstance(error, RequestError) or (isinstance(error, Unavailable) and not bugs_only):
                self._add(kind, error)
            raise
        self._add(kind, None)

    def _add(self, name: str, error: Exception | None) -> None:
        kind = self._kinds.setdefault(name, FailingRequests())
        now_s = self._timer()
        kind.ended.append((now_s, error is None))
        if error is not None:
            if (failed := kind.failed(now_s)) == 1:  # the first one, or the first since long ago
                kind.since, kind.failures = _REAL_TIME.now(), 0
            kind.failures += 1
            kind.text = (
                f"{failed} of the last {len(kind.ended)} {name} failed: {describe_error(error.__cause__ or error)}"
            )
        elif kind.failures and all(is_good for _, is_good in list(kind.ended)[-FAILURES_LEAST:]):
            self._kinds.pop(name)

    def failing(self) -> Iterator[FailingRequests]:
        """Return the kinds of requests that are failing now."""
        now_s = self._timer()
        return (kind for kind in self._kinds.values() if kind.failed(now_s) >= FAILURES_LEAST)


class ServiceLevel:
    """Orders without an answer, and how long postings took. `timer` is a monotonic clock in seconds."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self.outcomes = Outcomes(timer)
        self._refused: deque[datetime] = deque(maxlen=KEPT_MAX)
        self._postings: deque[tuple[float, float]] = deque(maxlen=KEPT_MAX)

    @contextmanager
    def order(self) -> Iterator[None]:
        """Record the start of an order that ends without an answer."""
        began = _REAL_TIME.now()
        try:
            with self.outcomes.watch("orders"):
                yield
        except Unavailable:
            self._refused.append(began)
            raise

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Record the duration of a posting, whether it succeeds or not."""
        began_s = self._timer()
        try:
            yield
        finally:
            self._postings.append((self._timer(), self._timer() - began_s))

    def refused_since(self, since: datetime) -> int:
        """Return how many orders that began at or after a time got no answer; at most the last `KEPT_MAX` are known."""
        return sum(began >= since for began in self._refused)

    def slow_s(self) -> float | None:
        """Return the median duration in seconds of the postings within `WINDOW_S` if they are slow, else None."""
        now_s = self._timer()
        took_s = [seconds for ended_s, seconds in self._postings if now_s - ended_s <= WINDOW_S]
        typical_s = median(took_s) if len(took_s) >= POSTINGS_LEAST else 0.0
        return typical_s if typical_s > SLOW_S else None
