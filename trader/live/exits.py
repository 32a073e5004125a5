"""Exits of one live account that no venue order executes: watched here and sent as market orders."""

import logging
from datetime import datetime, timedelta
from typing import Final

from trader.core.clock import interval_elapsed
from trader.exchange.domain.account import Position
from trader.exchange.domain.orders import CLOSING_SIDE, Cause, Order
from trader.exchange.domain.tick_rules import fired_trigger
from trader.exchange.domain.venue_orders import SentStatus
from trader.exchange.idempotent_orders import refusal_of_price
from trader.live.domain.protective_orders import CAUSES, venue_order
from trader.live.ledger import AccountLedger, LiveContext, run_each
from trader.live.outbox import Outbox

log = logging.getLogger("trader.live")

_RETRY_AFTER: Final = timedelta(seconds=10)
"""Delay before an exit that the venue refused is sent again."""

_FIRES_WITHIN: Final = timedelta(seconds=10)
"""How long a stop or target may wait at the venue after its price was reached there by our marks."""


class Exits:
    """The exits of one account. Call `execute` only under the lock of its live account."""

    def __init__(self, context: LiveContext, ledger: AccountLedger, outbox: Outbox) -> None:
        self._context = context
        self._ledger = ledger
        self._outbox = outbox
        self._retry_at: dict[str, datetime] = {}
        self.fired_at: dict[str, datetime] = {}
        """Since when the exit plans of the open positions fire."""

    def are_due(self) -> bool:
        """Return whether an exit plan fires at the latest marks and was not just refused."""
        return any(self._due(position) is not None for position in self._ledger.account.positions.values())

    async def execute(self) -> None:
        """Close at market the positions whose exit plans fire; an error of one market stops no other.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        """
        positions = self._ledger.account.positions
        self.fired_at = {symbol: at for symbol, at in self.fired_at.items() if symbol in positions}
        await run_each(self._exit(position) for position in list(positions.values()))

    async def _exit(self, position: Position) -> None:
        context, outbox, symbol = self._context, self._outbox, position.symbol
        cause, now = self._due(position), context.clock.now()
        if cause is None or symbol in outbox.closing:
            return
        account_id = self._ledger.account_id
        if (refusal := refusal_of_price(context.market, symbol, now)) is not None:
            log.warning("%s: the exit (%s) from %s waits: %s", account_id, cause, symbol, refusal)
            return
        order = Order(
            account_id=account_id,
            symbol=symbol,
            side=CLOSING_SIDE[position.side],
            quantity=position.quantity,
            reduce_only=True,
        )
        quote, market = context.market.quotes()[symbol], context.rules.markets[symbol]
        sent = (await outbox.send(venue_order(self._ledger.account, order, market, quote), cause)).sent
        if sent.status is SentStatus.REFUSED:
            log.error("%s: the exit (%s) from %s was refused: %s", account_id, cause, symbol, sent.reason)
            self._retry_at[symbol] = now + _RETRY_AFTER

    def _due(self, position: Position) -> Cause | None:
        """Return the trigger that fires here, except one just refused or that just should have fired at the venue."""
        mark, now, symbol = self._context.market.marks.get(position.symbol), self._context.clock.now(), position.symbol
        cause = None if mark is None else fired_trigger(position, mark, now)
        if cause is None:
            self.fired_at.pop(symbol, None)
            return None
        fired_at, retry_at = self.fired_at.setdefault(symbol, now), self._retry_at.get(symbol)
        if retry_at is not None and not interval_elapsed(retry_at, _RETRY_AFTER, now):
            return None
        waits = position.closing is None and any(
            sent.symbol == symbol and sent.is_protective and CAUSES[sent.order.type] is cause
            for sent in self._outbox.protective_orders()
        )
        return None if waits and not interval_elapsed(fired_at + _FIRES_WITHIN, _FIRES_WITHIN, now) else cause
