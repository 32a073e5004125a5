"""A lockstep clock that the test moves."""

from datetime import datetime, timedelta

from trader.core.clock import LockstepClock, cut_to_ms


class ManualClock(LockstepClock):
    """Time that only the test advances."""

    origin = "test"

    def __init__(self, start: datetime) -> None:
        super().__init__(start)
        self._set_by = timedelta(0)

    def now(self) -> datetime:
        return cut_to_ms(super().now())

    async def advance(self, span: timedelta) -> None:
        """Advance by `span`, and wake all sleepers due on the way, including those due at the end."""
        await self.advance_to(self.now() + span + timedelta(microseconds=1))

    def set_by(self, span: timedelta) -> None:
        """Set the clock forward or back, like an operator of a machine, without waking sleepers."""
        self._now += span
        self._set_by += span

    def steady_s(self) -> float:
        return super().steady_s() - self._set_by.total_seconds()
