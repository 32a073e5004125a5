"""The clock of a replay at a factor of real time."""

from datetime import datetime, timedelta

from trader.clock import ScaledClock

_AHEAD_MAX = timedelta(seconds=1)


class PacedClock(ScaledClock):
    """Scaled time that waits for the feed: a speed the service cannot follow is only slower, and no price grows stale
    because of it. Before the first tick it waits too."""

    def __init__(self, start: datetime, speed: float) -> None:
        super().__init__(start, speed)
        self._bound: datetime | None = start + _AHEAD_MAX
        self._held = timedelta(0)

    def now(self) -> datetime:
        moment = super().now() - self._held
        if self._bound is not None and moment > self._bound:
            self._held += moment - self._bound
            return self._bound
        return moment

    async def lead(self, moment: datetime) -> None:
        self._bound = max(self.now(), moment + _AHEAD_MAX)
        await self.sleep_until(moment)

    def release(self) -> None:
        """Let time go on without the feed: it has ended."""
        self.now()
        self._bound = None
