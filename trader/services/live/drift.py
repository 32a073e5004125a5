"""Every fill of the venue, simulated on the book of the moment its order was sent, and recorded."""

import logging
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from trader.domain.exchange.orders import Fill
from trader.domain.live.drift import Drift, simulate
from trader.domain.market.markets import Quote
from trader.domain.money import ZERO
from trader.errors import Unavailable
from trader.store.database.pool import Database
from trader.store.live.drift import insert_drift

log = logging.getLogger("trader.drift")

_WAITING_MAX: Final = 10_000


class DriftRecorder:
    """Records how far paper is from the venue. It never fails a booking: what cannot be written waits for the next."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[tuple[str, Drift]] = deque(maxlen=_WAITING_MAX)

    async def record(
        self,
        account_id: str,
        fills: Sequence[Fill],
        quote: Quote | None,
        *,
        filled_before: Decimal = ZERO,
        limit_price: Decimal | None = None,
    ) -> None:
        """Simulate fills of one order, after they were booked.

        :param quote: of the moment the order was sent; None when there was none
        :param filled_before: what of the order was filled before these
        :param limit_price: the order's limit, if it has one
        """
        drifts = simulate(fills, quote, filled_before=filled_before, limit=limit_price)
        self._waiting.extend((account_id, drift) for drift in drifts)
        rows = list(self._waiting)
        if not rows:
            return
        try:
            async with self._database.connection() as conn:
                await insert_drift(conn, rows)
        except Unavailable as error:
            log.warning("the drift of %d fills is not recorded yet: %s", len(rows), error)
            return
        for row in rows:  # others may have come meanwhile
            if self._waiting and self._waiting[0] is row:
                self._waiting.popleft()
