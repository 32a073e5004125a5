"""How the orders and postings of the last minutes fared, in real time, for the reports of health and alarms."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from statistics import median
from typing import Final

from trader.core.clock import SystemClock
from trader.core.errors import Unavailable

WINDOW_S: Final = 60.0
"""The span over which slowness is judged: a single slow posting does not count."""

POSTINGS_LEAST: Final = 3
SLOW_S: Final = 2.0
"""Postings are slow when half of at least `POSTINGS_LEAST` within `WINDOW_S` took longer than this."""

KEPT_MAX: Final = 10_000

_REAL_TIME: Final = SystemClock()


class ServiceLevel:
    """Orders without an answer, and how long postings took. `timer` is a monotonic clock in seconds."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self._refused: deque[datetime] = deque(maxlen=KEPT_MAX)
        self._postings: deque[tuple[float, float]] = deque(maxlen=KEPT_MAX)

    @contextmanager
    def order(self) -> Iterator[None]:
        """Record the start of an order that ends without an answer."""
        began = _REAL_TIME.now()
        try:
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
