"""A clock of the machine that an operator sets."""

from datetime import datetime, timedelta

from trader.clock import SystemClock


class SettableClock(SystemClock):
    """Real time, moved by the test."""

    shift = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.shift
