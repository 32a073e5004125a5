"""The stops and targets of one account at the venue: what the exit plans in the books ask for, and nothing else.

A new leg is accepted before the old one goes, so a position is never without its stop because it is being changed.
"""

import logging
from datetime import datetime, timedelta
from typing import Final

from trader.clock import comes_up
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting
from trader.domain.exchange.order_validation import refusal_of_plan
from trader.domain.exchange.orders import ExitPlan
from trader.domain.exchange.rules import Moment
from trader.domain.exchange.venue_orders import SentOrder, SentStatus, VenueOrder
from trader.domain.live.protective_orders import (
    CAUSES,
    CLOSING_SLIPPAGE,
    ProtectiveTerms,
    all_wanted,
    terms_of,
    wanted_legs,
    worst_price,
)
from trader.services.live.outbox import Concluded, Floor, Outbox

log = logging.getLogger("trader.live")

_ASK_AGAIN_AFTER: Final = timedelta(seconds=60)
"""A leg that the venue refused is asked for again after this; until then its trigger is watched here."""


class ProtectiveOrders:
    """Of one account. Only under its desk's lock."""

    def __init__(self, floor: Floor, outbox: Outbox) -> None:
        self._floor = floor
        self._outbox = outbox
        self._refused: dict[ProtectiveTerms, datetime] = {}

    def wanted(self) -> list[ProtectiveTerms]:
        """What the books ask for, but of markets in which something is not decided."""
        return all_wanted(self._outbox.account, self._floor.rules.markets, self._outbox.unsettled)

    def standing(self) -> dict[ProtectiveTerms, SentOrder]:
        return {terms_of(sent): sent for sent in self._outbox.legs()}

    async def sync(self) -> None:
        """Place what is missing, then end what is not asked for. Raises as `Outbox.refresh` does."""
        now = self._floor.clock.now()
        self._refused = {leg: at for leg, at in self._refused.items() if not comes_up(at, _ASK_AGAIN_AFTER, now)}
        for leg in self.wanted():
            if leg not in self.standing() and leg not in self._refused and leg.symbol not in self._outbox.unsettled:
                await self._place(leg)
        wanted, account = set(self.wanted()), self._outbox.account
        for leg, sent in self.standing().items():
            position = account.positions.get(leg.symbol)
            is_closing = position is not None and position.closing is not None
            # A leg that is still to be replaced stays until its successor stands.
            waits = any(other.symbol == leg.symbol and other.type is leg.type for other in self._refused)
            if leg in wanted or leg.symbol in self._outbox.unsettled or is_closing or (waits and position is not None):
                continue
            await self._outbox.cancel(sent, "its position is gone or its plan has changed")

    async def set_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the plan of a position. None when it is done, else why not: then venue and books keep the old one.

        :raises Unavailable: the database did not confirm the change
        :raises MarketDataError: the venue cannot be asked
        """
        outbox, floor = self._outbox, self._floor
        position = outbox.account.positions.get(symbol)
        if position is None:
            return f"there is no {symbol} position"
        if symbol in outbox.unsettled:
            return f"an order of {symbol} is not decided yet; its exit plan cannot be changed until it is"
        now = floor.clock.now()
        refusal = refusal_of_plan(plan, position.side, floor.marks[symbol], now)
        if refusal is not None:
            return refusal
        placed: list[SentOrder] = []
        for leg in wanted_legs(position, plan, floor.rules.markets[symbol]):
            if leg in self.standing():
                continue
            sent = (await self._place(leg)).sent
            if sent.status is SentStatus.STANDING:
                placed.append(sent)
                continue
            for one in placed:
                await outbox.cancel(one, "the rest of its plan was refused")
            if sent.status is SentStatus.REFUSED:
                return f"the venue refused the {leg.type}: {sent.reason}"
            return f"whether the venue took the {leg.type} is not known yet; the plan stays as it was"
        refusal = await self._note_plan(symbol, plan, now)
        await self.sync()
        return refusal

    async def _note_plan(self, symbol: str, plan: ExitPlan, now: datetime) -> str | None:
        refusal: str | None = None
        floor = self._floor

        def decide(account: Account) -> Posting | None:
            nonlocal refusal
            moment = Moment(now, floor.market.quotes(), floor.marks)
            result = rules_of_exchange.set_exit_plan(account, symbol, plan, moment, floor.rules)
            if isinstance(result, str):
                refusal = result
                return None
            return result

        await self._outbox.commit(decide)
        return refusal

    async def _place(self, leg: ProtectiveTerms) -> Concluded:
        market = self._floor.rules.markets[leg.symbol]
        order = VenueOrder(
            client_index=0,
            symbol=leg.symbol,
            side=leg.side,
            type=leg.type,
            quantity=leg.quantity,
            price=worst_price(leg.side, leg.trigger, CLOSING_SLIPPAGE, market),
            trigger=leg.trigger,
            reduce_only=True,
        )
        concluded = await self._outbox.send(order, CAUSES[leg.type])
        if concluded.sent.status is SentStatus.REFUSED:
            self._refused[leg] = self._floor.clock.now() + _ASK_AGAIN_AFTER
            log.warning("%s: the venue refused a %s of %s: %s", self._outbox.account_id, leg.type, leg.symbol,
                        concluded.sent.reason)  # fmt: skip
        return concluded
