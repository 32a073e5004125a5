"""A lockstep clock that the test moves."""

from datetime import datetime, timedelta

from trader.clock import LockstepClock, cut_to_ms


class ManualClock(LockstepClock):
    """Time that stands still until the test advances it."""

    def now(self) -> datetime:
        return cut_to_ms(super().now())

    async def advance(self, span: timedelta) -> None:
        """Move on by `span`, waking all sleepers due on the way, those of the last moment included."""
        await self.advance_to(self.now() + span + timedelta(microseconds=1))

    def set_by(self, span: timedelta) -> None:
        """Set the clock forward or back, as somebody does to a machine's: nobody is woken."""
        self._now += span
