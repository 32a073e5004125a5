"""Orders of one account at Lighter: each is sent once, and a lost answer never counts as a failure.

What became of an order that the venue does not show says the status of its transaction, found by its hash: an order
that was executed is never told as refused. A transaction carries a nonce that the venue uses up once, in order. If the
venue does not know the transaction, its nonce is used up with a harmless one; once that is executed, the lost one never
can be.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

from trader.core.errors import MarketDataError, StartError
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.budget import Priority, priority_of, spending_as
from trader.live.domain.orders import Busy, Placed, Refused, SendOutcome, Unknown, VenueOrderState
from trader.live.gateway import by_present_rules, present_listing, state_by_trades
from trader.live.lighter.api import LighterApi
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.records import LighterRecords
from trader.live.lighter.rows import ORDER_ROWS, OrderRow, Transaction
from trader.live.lighter.signer import OrderTerms
from trader.live.lighter.transactions import BUSY, INACTIVE, INDEX_EXISTS, INVALID_NONCE, SendAnswer, Transactions
from trader.live.market import Listing
from trader.live.venue import Remember
from trader.market.domain.markets import Market

logger = logging.getLogger("trader.exchange")

_PAUSE_S: Final = 0.35
"""The venue executes an accepted transaction within about 350 ms."""

_TRIES_MAX: Final = 10
_PUSHED_TRIES: Final = 5
_LOOK_PATIENCE_S: Final = 0.5
_RESENDS_MAX: Final = 3
_RESOLVE_TRIES: Final = 2
_ENDED_WAITING: Final = ("canceled", "canceled-reduce-only", "canceled-expired", "canceled-oco", "canceled-child",
                         "canceled-liquidation", "canceled-post-only")  # fmt: skip
"""How a stop or target ends that was not triggered."""

IDS_PER_READ: Final = 20
_SHOWN_WITHIN: Final = timedelta(seconds=30)
_ENDED_WITHIN: Final = timedelta(hours=1)
"""How long after its execution the venue may still not show an order that reduces, and one that opens: a read may lag
by seconds, and it is long before either that its trades are shown."""


class LighterOrders:
    """The orders of the signer's account. One transaction is sent at a time, so that nonces arrive in order."""

    def __init__(
        self, api: LighterApi, frames: AccountFrames, transactions: Transactions, records: LighterRecords,
        *, pause_s: float = _PAUSE_S,
    ) -> None:  # fmt: skip
        self._api = api
        self._frames = frames
        self._signer = frames.signer
        self._transactions = transactions
        self._records = records
        self._pause_s = pause_s
        self._sending = asyncio.Lock()

    async def pause(self) -> None:
        """Wait for news of the account, at most as long as the venue takes to execute a transaction."""
        await self._frames.change(self._pause_s)

    async def place(self, orders: Sequence[VenueOrder], market: Market, remember: Remember) -> SendOutcome:
        """Send an order and find out its outcome. The same client index is never executed twice.

        :raises Unavailable: `remember` failed, and nothing was sent
        """
        order = orders[0]
        async with self._sending:
            try:
                with spending_as(priority_of(order)):
                    listing = await present_listing(self._api, order)
                    terms = [order_terms(by_present_rules(each, listing, market), listing) for each in orders]
                    return await self._place(order, terms, remember)
            except ValueError as error:
                return Refused(f"the venue does not accept this order: {error}")
            except MarketDataError as error:
                return Busy(str(error))  # nothing was sent

    async def resolve(self, order: VenueOrder, attempt: str, expires_at: datetime) -> SendOutcome:
        """Find out the outcome of an order whose answer was lost, without sending it again."""
        async with self._sending:
            return await self._find_until(order, attempt, SendAnswer(None, reason="its answer was lost"), expires_at)

    async def cancel(self, symbol: str, client_index: int) -> SendOutcome:
        """Cancel an order. `Placed` has its final state, which may be filled; `Refused`: it rests no more, unshown."""
        async with self._sending:
            try:
                with spending_as(Priority.CANCEL):
                    return await self._cancel(symbol, client_index)
            except MarketDataError as error:
                return Unknown(str(error))

    async def _cancel(self, symbol: str, client_index: int) -> SendOutcome:
        for _ in range(_RESENDS_MAX):
            nonce = await self._transactions.next_nonce()
            attempt, answer = await self._transactions.cancel(
                self._api.listing(symbol).market_id, client_index, nonce=nonce
            )
            if answer.code in INACTIVE or (
                answer.is_taken is not False and await self._was_decided(attempt, client_index)
            ):
                return await self._final(client_index)
        return Unknown(f"the venue does not cancel it: {answer.reason}")

    async def _final(self, client_index: int) -> SendOutcome:
        """Return the outcome of an order that was canceled or has ended. Raise `MarketDataError`."""
        missed = False
        for _ in range(_TRIES_MAX):
            state = await self.find(client_index)
            if state is not None and state.is_final:
                return Placed(state)
            if state is None and missed:
                return Refused("it is no longer shown")
            missed = state is None
            await self.pause()
        return Unknown("the venue does not show yet that it is canceled")

    async def find(self, client_index: int) -> VenueOrderState | None:
        """Return the venue's state of one of our orders, or None if unknown there. Raise `MarketDataError`."""
        return (await self.find_all([client_index])).get(client_index)

    async def find_all(self, client_indexes: Collection[int]) -> dict[int, VenueOrderState]:
        """Return the venue's states of the orders that it knows; those that frames told are not requested.

        By their index the venue shows only the orders of the last day: older ones are sought among those that stand.

        :raises MarketDataError: the venue does not answer
        """
        found = {index: row for index in client_indexes if (row := self._frames.order(index)) is not None}
        texts = [str(index) for index in client_indexes if index not in found]
        for start in range(0, len(texts), IDS_PER_READ):
            some = ",".join(texts[start : start + IDS_PER_READ])
            found |= {row.client_order_index: row for row in await self._named(some)}
        if len(found) < len(client_indexes):
            found = {row.client_order_index: row for row in await self._records.active_orders()} | found
        return {index: self._state(found[index]) for index in client_indexes if index in found}

    async def opened_since(self, since: datetime) -> set[int]:
        """Return the client indexes of the orders that could open which were sent with this key since `since`."""
        return await self._transactions.opened_since(since)

    async def _named(self, client_indexes: str) -> list[OrderRow]:
        answer = await self._api.get(
            "/api/v1/accountOrders", ORDER_ROWS, signer=self._signer,
            account_index=self._signer.account_index, client_order_indexes=client_indexes,
        )  # fmt: skip
        return self._frames.learn(answer.orders or [])

    async def _place(self, order: VenueOrder, terms: Sequence[OrderTerms], remember: Remember) -> SendOutcome:
        """Send the order. Raise `MarketDataError` when the venue does not return a nonce."""
        for _ in range(_RESENDS_MAX):
            nonce = await self._transactions.next_nonce()
            try:
                signed = self._signer.create_orders(terms, nonce=nonce)
            except StartError as error:  # only here: later, a token may fail for an order that was sent
                return Refused(str(error))
            attempt = f"{nonce}:{signed.hash}"
            await remember(attempt)
            answer = await self._transactions.send(signed)
            if answer.is_taken is False and answer.code != INDEX_EXISTS:
                if answer.code == INVALID_NONCE:
                    continue  # another transaction used up this nonce; the venue did not consider our order
                return Busy(answer.reason) if answer.code in BUSY else Refused(answer.reason)
            with spending_as(priority_of(order), _LOOK_PATIENCE_S):
                return await self._find_until(order, attempt, answer)
        return Busy("the venue rejected every nonce that it reported")

    async def _find_until(
        self, order: VenueOrder, attempt: str, answer: SendAnswer, expires_at: datetime | None = None
    ) -> SendOutcome:
        """Poll until the venue shows the order or what became of its transaction; use up the nonce of a lost one.

        While the account is followed, frames are awaited before anything is requested.
        """
        is_lost = answer.is_taken is None
        pushed = _PUSHED_TRIES if self._frames.following and answer.is_taken else 0
        for tried in range(_TRIES_MAX if expires_at is None else _RESOLVE_TRIES):
            if tried < pushed and not (self._frames.order(order.client_index) or self._frames.transaction(attempt)):
                await self.pause()
                continue
            try:
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                sent = await self._transactions.find(attempt)
                if sent is not None and (outcome := await self._outcome(order, attempt, sent)) is not None:
                    return outcome
                if sent is None and expires_at is not None and (self._api.answered_at or expires_at) > expires_at:
                    return Refused("its answer was lost, and the venue did not take it before it expired")
                if sent is None and is_lost:
                    nonce, is_lost = int(attempt.partition(":")[0]), False
                    with spending_as(Priority.CANCEL):
                        market_id = self._api.listing(order.symbol).market_id
                        await self._transactions.cancel(market_id, order.client_index, nonce=nonce)
            except MarketDataError as error:
                logger.warning("order %d will be looked up again: %s", order.client_index, error)
            await self.pause()
        return Unknown("the venue took the order and does not show it yet" if answer.is_taken else answer.reason)

    async def _outcome(self, order: VenueOrder, attempt: str, sent: Transaction) -> SendOutcome | None:
        """Return the outcome of an order that the venue does not show, by its transaction; None while it may yet."""
        is_ours = sent.is_of(attempt, order=order.client_index)
        if sent.is_failed or not is_ours:
            why = "the venue took the transaction and did not execute it"
            return Refused(why if is_ours else "the venue never took it: another used its nonce")
        since = timedelta(0) if self._api.answered_at is None else self._api.answered_at - sent.at
        if not sent.is_executed or since < _SHOWN_WITHIN:
            return None
        if (state := await state_by_trades(self._records, order, sent.at - _ENDED_WITHIN)) is not None:
            return Placed(state)
        if not (order.reduce_only or since > _ENDED_WITHIN):
            return None
        if order.type is not VenueOrderType.MARKET:  # it might stand unshown
            return await self._cancel(order.symbol, order.client_index)
        return Refused("the venue executed the transaction without an order: there was nothing to do")

    async def _was_decided(self, attempt: str, client_index: int) -> bool:
        """Wait until the venue has executed or refused a cancellation. Raise `MarketDataError`."""
        for tried in range(_TRIES_MAX):
            is_pushed = self._frames.transaction(attempt) is not None
            if is_pushed or tried >= _PUSHED_TRIES or not self._frames.following:
                sent = await self._transactions.find(attempt)
                if sent is not None and (sent.is_executed or sent.is_failed):
                    return sent.is_of(attempt, cancels=client_index)
            await self.pause()
        return False

    def _state(self, order: OrderRow) -> VenueOrderState:
        return VenueOrderState(
            client_index=order.client_order_index,
            venue_index=order.order_index,
            symbol=self._api.symbol_of(order.market_index),
            filled=order.filled_base_amount,
            is_final=order.is_final,
            status=order.status,
            has_fired=order.is_final and order.status not in _ENDED_WAITING,
        )


def order_terms(order: VenueOrder, listing: Listing) -> OrderTerms:
    """Return an order in the venue's units."""
    tick, lot = listing.market.tick, listing.market.lot
    return OrderTerms(
        market_id=listing.market_id,
        client_index=order.client_index,
        lots=int(order.quantity / lot),
        price_ticks=int(order.price / tick),
        is_ask=order.side is OrderSide.SELL,
        type=order.type.value,
        reduce_only=order.reduce_only,
        trigger_ticks=0 if order.trigger is None else int(order.trigger / tick),
        post_only=order.post_only,
    )
