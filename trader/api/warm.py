"""What dashboards ask for by default, made before anybody asks.

The first reading of a season takes seconds: what is kept from then on is made
before the service listens, and brought up to date after every writing of snapshots.
"""

import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from trader.api.procedures.portfolio import DEFAULT_RANGE
from trader.api.schemas.portfolio import GetPortfolioHistoryInput, records_of
from trader.api.schemas.variants import variant_history_of
from trader.services.portfolio.snapshots import Window

if TYPE_CHECKING:
    from trader.api.context import Context

EVERY_S: Final = 30.0
LONGEST: Final[Window] = "30d"
"""The window whose points are those of all others too."""


async def warm(context: "Context", now: datetime) -> None:
    """Bring up to date what answers are made of. Cheap when it was done a minute ago.

    :raises Unavailable: the database cannot answer now; the next answers take longer
    """
    await context.analytics.refresh()
    await context.portfolio.prepare(now)
    variant_history_of(await context.portfolio.variant_history(LONGEST, now))
    points_max = GetPortfolioHistoryInput().max_points
    await context.portfolio.encoded_history(records_of, start=now - DEFAULT_RANGE, end=now, points_max=points_max)


class Keeper:
    """Warms at most every `EVERY_S` seconds of real time: a replay lives through a day of snapshots in as long."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._warmed_s: float | None = None

    async def keep(self, now: datetime) -> None:
        """As `warm`, when it is time again."""
        if self._warmed_s is None or time.monotonic() - self._warmed_s >= EVERY_S:
            await warm(self._context, now)
            self._warmed_s = time.monotonic()
