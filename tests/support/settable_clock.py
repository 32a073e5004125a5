"""A machine clock that an operator can set."""

from datetime import datetime, timedelta

from trader.core.clock import SystemClock


class SettableClock(SystemClock):
    """Real time with an offset set by the test."""

    shift = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.shift
