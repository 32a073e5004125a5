"""Orders of one account at Lighter: each is sent once, and a lost answer never counts as a failure.

A transaction carries a nonce that the venue uses up once, in order. That makes a lost answer decidable: when the venue
shows no such order, the nonce is used up with a harmless transaction; after that the lost one can never be executed.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.errors import MarketDataError
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder
from trader.live.domain.orders import Placed, Refused, SendOutcome, Unknown, VenueOrderState
from trader.live.lighter.api import LighterApi, Listing
from trader.live.lighter.signer import OrderTerms, Signer
from trader.live.lighter.transactions import INACTIVE, INDEX_EXISTS, INVALID_NONCE, Transactions

logger = logging.getLogger("trader.exchange")

_PAUSE_S: Final = 0.35
"""The venue executes an accepted transaction within about 350 ms."""

_TRIES_MAX: Final = 10
_RESENDS_MAX: Final = 3
_NOT_FINAL: Final = ("in-progress", "pending", "open")


class _OrderState(msgspec.Struct):
    order_index: int
    client_order_index: int
    market_index: int
    filled_base_amount: Decimal
    status: str


class _OrderStates(msgspec.Struct):
    orders: list[_OrderState] | None = None
    code: int = 200


_ORDER_STATES: Final = msgspec.json.Decoder(_OrderStates)


class LighterOrders:
    """The orders of the signer's account. One transaction is sent at a time, so that nonces arrive in order."""

    def __init__(
        self,
        api: LighterApi,
        signer: Signer,
        transactions: Transactions,
        listings: Mapping[str, Listing],
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._api = api
        self._signer = signer
        self._transactions = transactions
        self._listings = listings
        self._symbols = {listing.market_id: symbol for symbol, listing in listings.items()}
        self._pause_s = pause_s
        self._sending = asyncio.Lock()

    async def pause(self) -> None:
        """Wait as long as the venue takes to execute a transaction."""
        await asyncio.sleep(self._pause_s)

    async def place(self, order: VenueOrder) -> SendOutcome:
        """Send an order and find out its outcome. The same client index is never executed twice.

        Return `Unknown` only when the venue could not be queried either; `resolve` finds out later, also for an order
        that an earlier process may have sent.
        """
        try:
            terms = self._terms(order)
        except ValueError as error:
            return Refused(f"the venue does not accept this order: {error}")
        async with self._sending:
            try:
                # An earlier process may have sent it and ended before the answer arrived.
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                return await self._place(order, terms)
            except MarketDataError as error:
                return Refused(str(error))  # nothing was sent

    async def resolve(self, order: VenueOrder, nonce: int | None, expires_at: datetime) -> SendOutcome:
        """Find out the outcome of an order whose answer was lost, without sending it again.

        `nonce` comes from `Unknown`. If it is None, use up a nonce first: no earlier transaction has a later one. While
        the venue uses up no nonce, the order stays `Unknown` until `expires_at` by the venue's clock.
        """
        async with self._sending:
            outcome = await self._resolve(order, nonce)
            now = self._api.answered_at
            if isinstance(outcome, Unknown) and now is not None and now > expires_at:
                with suppress(MarketDataError):
                    return await self._find_expired(order)
            return outcome

    async def cancel_unlisted(self, order: VenueOrder) -> SendOutcome:
        """Cancel an order that the venue no longer lists. `Refused`: it does not rest; its final state is unknown."""
        market_id = self._listings[order.symbol].market_id
        async with self._sending:
            try:
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                for _ in range(_RESENDS_MAX):
                    nonce = await self._transactions.next_nonce()
                    answer = await self._transactions.cancel(market_id, order.client_index, nonce=nonce)
                    if answer.is_accepted:
                        return await self._find_until(order, nonce, "it is no longer shown", is_lost=True)
                    if answer.code in INACTIVE:
                        return await self._find_expired(order)
            except MarketDataError as error:
                return Unknown(str(error))
        return Unknown(f"the venue does not cancel it: {answer.reason}")

    async def cancel(self, order: VenueOrderState) -> SendOutcome:
        """Cancel an order that rests or waits for its trigger. `Placed` has its final state, which may be filled."""
        market_id = self._listings[order.symbol].market_id
        async with self._sending:
            try:
                for _ in range(_RESENDS_MAX):
                    nonce = await self._transactions.next_nonce()
                    await self._transactions.cancel(market_id, order.venue_index, nonce=nonce)
                    for _ in range(_TRIES_MAX):
                        state = await self.find(order.client_index)
                        if state is None or state.is_final:
                            return Refused("the venue knows no such order") if state is None else Placed(state)
                        await self.pause()
            except MarketDataError as error:
                return Unknown(str(error))
        return Unknown("the venue did not cancel the order")

    async def find(self, client_index: int) -> VenueOrderState | None:
        """Return the venue's state of one of our orders, or None if unknown there. Raise `MarketDataError`."""
        return (await self.find_all([client_index])).get(client_index)

    async def find_all(self, client_indexes: Collection[int]) -> dict[int, VenueOrderState]:
        """Return the venue's states of the orders that it knows. Raise `MarketDataError`."""
        parameters: dict[str, str | int] = {
            "account_index": self._signer.account_index,
            "client_order_indexes": ",".join(map(str, client_indexes)),
        }
        token = self._signer.authorization()
        answer = await self._api.get("/api/v1/accountOrders", parameters, _ORDER_STATES, authorization=token)
        return {
            order.client_order_index: self._state(order)
            for order in answer.orders or ()
            if order.client_order_index in client_indexes
        }

    async def _place(self, order: VenueOrder, terms: OrderTerms) -> SendOutcome:
        """Send the order. Raise `MarketDataError` when the venue does not return a nonce."""
        for _ in range(_RESENDS_MAX):
            nonce = await self._transactions.next_nonce()
            answer = await self._transactions.send(self._signer.create_order(terms, nonce=nonce))
            if answer.is_known and not answer.is_accepted:
                if answer.code == INVALID_NONCE:
                    continue  # another transaction used up this nonce; the venue did not consider our order
                if answer.code != INDEX_EXISTS:
                    return Refused(answer.reason)
            reason = "" if answer.is_accepted else answer.reason
            return await self._find_until(order, nonce, reason, is_lost=not answer.is_known)
        return Refused("the venue rejected every nonce that it reported")

    async def _resolve(self, order: VenueOrder, nonce: int | None) -> SendOutcome:
        try:
            if (state := await self.find(order.client_index)) is not None:
                return Placed(state)
            last = await self._use_up_nonce(order) if nonce is None else nonce
        except MarketDataError as error:
            return Unknown(str(error), nonce)
        if last is None:
            return Unknown("the venue accepts no transaction that would use up the order's nonce")
        return await self._find_until(order, last, "its answer was lost, and the venue never took it", is_lost=True)

    async def _find_expired(self, order: VenueOrder) -> SendOutcome:
        """Look up, twice, an order that the venue no longer accepts: it rests there now, or it never will.

        :raises MarketDataError: the venue does not answer
        """
        for _ in range(2):
            if (state := await self.find(order.client_index)) is not None:
                return Placed(state)
            await self.pause()
        return Refused("its answer was lost, and the venue did not take it before it expired")

    async def _find_until(self, order: VenueOrder, nonce: int, reason: str, *, is_lost: bool) -> SendOutcome:
        """Poll until the venue shows the order or its nonce is used up; use up a lost order's nonce deliberately."""
        market_id = self._listings[order.symbol].market_id
        was_used = False
        for _ in range(_TRIES_MAX):
            try:
                is_used = await self._transactions.next_nonce() > nonce
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                if is_used and was_used:  # checked twice after it could last appear: reads may lag
                    return Refused(reason or "the venue executed the transaction without creating an order")
                was_used = is_used
                if is_lost and not is_used:
                    await self._transactions.cancel(market_id, order.client_index, nonce=nonce)
            except MarketDataError as error:
                logger.warning("order %d will be looked up again: %s", order.client_index, error)
            await self.pause()
        return Unknown(reason or "the venue accepted the order but does not show it", nonce)

    async def _use_up_nonce(self, order: VenueOrder) -> int | None:
        """Return a nonce that is certainly used up (the reported next one may be stale), or None."""
        market_id = self._listings[order.symbol].market_id
        for _ in range(_RESENDS_MAX):
            nonce = await self._transactions.next_nonce()
            answer = await self._transactions.cancel(market_id, order.client_index, nonce=nonce)
            if answer.is_accepted:
                return nonce
            if answer.code != INVALID_NONCE:
                break
        return None

    def _terms(self, order: VenueOrder) -> OrderTerms:
        listing = self._listings.get(order.symbol)
        if listing is None:
            raise ValueError(f"it does not list {order.symbol}")
        market = listing.market
        return OrderTerms(
            market_id=listing.market_id,
            client_index=order.client_index,
            lots=_whole(order.quantity, market.lot),
            price_ticks=_whole(order.price, market.tick),
            is_ask=order.side is OrderSide.SELL,
            type=order.type.value,
            reduce_only=order.reduce_only,
            trigger_ticks=0 if order.trigger is None else _whole(order.trigger, market.tick),
        )

    def _state(self, order: _OrderState) -> VenueOrderState:
        return VenueOrderState(
            client_index=order.client_order_index,
            venue_index=order.order_index,
            symbol=self._symbols.get(order.market_index, f"market {order.market_index}"),
            filled=order.filled_base_amount,
            is_final=order.status not in _NOT_FINAL,
            status=order.status,
        )


def _whole(amount: Decimal, unit: Decimal) -> int:
    """Return an amount as a number of units. Raise `ValueError` when it is not a whole number."""
    count = amount / unit
    if count != int(count) or count <= 0:
        raise ValueError(f"{amount} is not a whole number of {unit}")
    return int(count)
