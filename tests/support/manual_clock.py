"""A lockstep clock that the test moves."""

from datetime import datetime, timedelta

from trader.core.clock import LockstepClock, cut_to_ms


class ManualClock(LockstepClock):
    """Time that only the test advances."""

    def now(self) -> datetime:
        return cut_to_ms(super().now())

    async def advance(self, span: timedelta) -> None:
        """Advance by `span`, and wake all sleepers due on the way, including those due at the end."""
        await self.advance_to(self.now() + span + timedelta(microseconds=1))

    def set_by(self, span: timedelta) -> None:
        """Set the clock forward or back, like an operator of a machine, without waking sleepers."""
        self._now += span
