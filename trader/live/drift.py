"""Drift recorder: simulates each venue fill on the book at which its order was sent, and records the error."""

import logging
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from trader.core.errors import Unavailable
from trader.core.money import ZERO
from trader.database.pool import Database
from trader.exchange.domain.orders import Fill
from trader.live.domain.drift import Drift, simulate
from trader.live.sql.drift import insert_drift
from trader.market.domain.markets import Quote

log = logging.getLogger("trader.drift")

_WAITING_MAX: Final = 10_000


class DriftRecorder:
    """Records the drift of booked fills. Never fails a posting: rows that cannot be written wait for the next call."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[Drift] = deque(maxlen=_WAITING_MAX)

    async def record(
        self,
        account_id: str,
        fills: Sequence[Fill],
        quote: Quote | None,
        *,
        filled_before: Decimal = ZERO,
        limit_price: Decimal | None = None,
    ) -> None:
        """Record the drift of one order's fills after they are booked.

        The parameters are the same as for `simulate`.
        """
        self._waiting.extend(simulate(account_id, fills, quote, filled_before=filled_before, limit=limit_price))
        drifts = list(self._waiting)
        if not drifts:
            return
        try:
            async with self._database.writing() as conn:
                await insert_drift(conn, drifts)
        except Unavailable as error:
            log.warning("the drift of %d fills is not recorded yet: %s", len(drifts), error)
            return
        for drift in drifts:  # other calls may have added more in the meantime
            if self._waiting and self._waiting[0] is drift:
                self._waiting.popleft()
