"""Outbox of one live account: orders are recorded before they are sent, tracked until final, and booked as filled.

An order is a row before it is a transaction, so if this process dies, the next one knows what may have been sent.
The venue's fills, the order's new status and the answer to the caller are one posting.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import msgspec

from trader.core.errors import MarketDataError
from trader.core.money import ZERO
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import Cause, Order, OrderAnswer
from trader.exchange.domain.venue_orders import (
    OrderEvent,
    SentOrder,
    SentStatus,
    VenueFill,
    VenueOrder,
    VenueOrderType,
    advance,
)
from trader.live.domain.ledger import refuse_sent, settle
from trader.live.domain.orders import Placed, Refused, SendOutcome, Unknown, VenueOrderState
from trader.live.domain.reconciliation import VenueReport
from trader.live.ledger import AccountLedger, LiveContext
from trader.live.venue import AccountRecords, VenueAccount
from trader.market.domain.markets import Quote

log = logging.getLogger("trader.live")

_READS_MAX: Final = 10
"""Maximum reads of an order until it is final and all its trades are shown."""

_EXPIRY_MARGIN: Final = timedelta(seconds=60)
_PLACING_MAX: Final = timedelta(minutes=5)
"""An upper bound of the time that repeated requests for one order take until its first answer counts as lost."""


@dataclass(frozen=True)
class OrderResult:
    """An order after it was sent or looked up. `answer` is set once the caller's request is booked."""

    sent: SentOrder
    answer: OrderAnswer | None = None


class Outbox:
    """The orders of one account at its venue. Used only under the lock of its live account; `refresh` comes first."""

    def __init__(self, context: LiveContext, ledger: AccountLedger, account_index: int) -> None:
        self._context = context
        self._ledger = ledger
        self._account_index = account_index
        self._venue: VenueAccount | None = None
        self._lagging: set[int] = set()
        self._quotes: dict[int, Quote | None] = {}

    @property
    def unsettled(self) -> frozenset[str]:
        """The markets with an undecided order: nothing else is sent there until it is decided."""
        orders = self._ledger.open_orders.items()
        return frozenset(
            sent.symbol for index, sent in orders if sent.status is SentStatus.SENT or index in self._lagging
        )

    @property
    def records(self) -> AccountRecords:
        """The venue's records of the account."""
        return self._account.records

    def protective_orders(self) -> list[SentOrder]:
        """Return the stops and targets that wait at the venue."""
        orders = self._ledger.open_orders.values()
        return [sent for sent in orders if sent.is_protective and sent.status is SentStatus.STANDING]

    async def refresh(self) -> None:
        """Make sure that memory matches the rows and that the venue is reachable.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        :raises MarketDataError: the venue does not answer
        """
        await self._ledger.refresh()
        account = await self._context.venue.account(self._account_index)
        self._ledger.require_term()  # an account halted at the end of the term has just been reopened
        self._venue = account

    async def report(self) -> VenueReport:
        """Return everything that the venue holds for the account. Raise `MarketDataError`."""
        return await self.records.report()

    # One order

    async def send(self, order: VenueOrder, cause: Cause, request: Order | None = None) -> OrderResult:
        """Draw a client index for an order, record it, send it, and book its outcome.

        :raises Unavailable: the database cannot answer now; an order already sent is looked up later
        """
        sent = await self._ledger.record(order, cause, request, self._transaction_lasts + _PLACING_MAX)
        if not sent.is_protective:
            self._quotes[sent.client_index] = self._context.market.quote(sent.symbol)
        return await self._book_outcome(sent, await self._account.orders.place(sent.order))

    async def resolve(self) -> None:
        """Find out the outcome of orders whose answer was lost."""
        for sent in [order for order in self._ledger.open_orders.values() if order.status is SentStatus.SENT]:
            outcome = await self._account.orders.resolve(sent.order, sent.nonce, sent.expires_at)
            status = (await self._book_outcome(sent, outcome)).sent.status
            log.info("%s: order %d of %s is %s", sent.account_id, sent.client_index, sent.symbol, status)

    async def poll(self) -> None:
        """Book changes to the orders that are open at the venue. Raise as `refresh` does."""
        orders = self._ledger.open_orders
        standing = {index: sent for index, sent in orders.items() if sent.status is SentStatus.STANDING}
        if not standing:
            return
        states = await self._account.orders.find_all(standing)
        for index, state in sorted(states.items(), key=lambda item: item[1].venue_index):
            if state.is_final or state.filled > standing[index].filled:
                await self._book(orders[index], state)

    async def cancel(self, sent: SentOrder, reason: str) -> bool:
        """Cancel an order and book its fills so far. Return whether it is certainly no longer open.

        :raises MarketDataError: the venue does not answer
        """
        state = await self._account.orders.find(sent.client_index)
        if state is None:
            if sent.status is not SentStatus.STANDING:
                return False  # the venue may still have accepted it
            return await self.write_off(msgspec.structs.replace(sent, reason=reason))
        if not state.is_final:
            outcome = await self._account.orders.cancel(state)
            if isinstance(outcome, Unknown):
                return False
            state = outcome.state if isinstance(outcome, Placed) else state
        if not state.is_final:
            return False
        return await self._ends(msgspec.structs.replace(sent, reason=reason), state)

    async def cancel_foreign(self, client_index: int) -> None:
        """Cancel an order at the venue that is not in the ledger. Raise `MarketDataError`."""
        state = await self._account.orders.find(client_index)
        if state is not None and not state.is_final:
            await self._account.orders.cancel(state)

    async def write_off(self, sent: SentOrder) -> bool:
        """Write off an order that the venue no longer knows. Return whether that is certain.

        Cancel it first, so that an order that the venue merely does not show can fill nothing more. Book its trades. If
        the ledger then holds a different position than the venue, some trades are missing and it is not certain, except
        for a stop or target, whose successor can only reduce.

        :raises MarketDataError: the venue does not answer
        """
        match await self._account.orders.cancel_unlisted(sent.order):
            case Placed(state):
                return await self._ends(sent, state)
            case Unknown():
                return False
        assert sent.venue_index is not None
        unbooked = await self._ledger.unbooked(await self.records.fills_of(sent.venue_index))
        quantity = sum((fill.quantity for fill in unbooked), ZERO)
        held = self._ledger.account.positions.get(sent.symbol)
        ours = sent.order.side.direction * quantity + (ZERO if held is None else held.side.direction * held.quantity)
        theirs = await self.records.position(sent.symbol)
        if not sent.is_protective and ours != theirs:
            return False
        log.error("%s: the venue no longer knows order %d", sent.account_id, sent.client_index)
        reason = sent.reason or "the venue showed it once and no longer knows it"
        state = VenueOrderState(
            client_index=sent.client_index,
            venue_index=sent.venue_index,
            symbol=sent.symbol,
            filled=sent.filled + quantity,
            is_final=True,
            status="unknown",
            is_shown=False,
        )
        return await self._ends(msgspec.structs.replace(sent, reason=reason), state)

    # Booking

    @property
    def _account(self) -> VenueAccount:
        assert self._venue is not None, "refresh comes first"
        return self._venue

    @property
    def _transaction_lasts(self) -> timedelta:
        return timedelta(seconds=self._account.expires_s)

    async def _ends(self, sent: SentOrder, state: VenueOrderState) -> bool:
        return (await self._book(sent, state)).sent.status is SentStatus.DONE

    async def _book_outcome(self, sent: SentOrder, outcome: SendOutcome) -> OrderResult:
        match outcome:
            case Placed(state):
                return await self._book(sent, state)
            case Refused(reason):
                self._quotes.pop(sent.client_index, None)
                posting = await self._ledger.commit(
                    lambda account: refuse_sent(account, sent, reason, self._context.clock.now())
                )
                assert posting is not None
                return OrderResult(posting.sent[0], *posting.answers)
            case Unknown(reason, nonce):
                return await self._leave_unknown(sent, reason, nonce)

    async def _leave_unknown(self, sent: SentOrder, reason: str, nonce: int | None) -> OrderResult:
        log.warning(
            "%s: the state of order %d is not known, nothing else trades %s until it is: %s",
            sent.account_id, sent.client_index, sent.symbol, reason,
        )  # fmt: skip
        if nonce is not None and sent.nonce is None:
            expires_at = self._context.clock.now() + self._transaction_lasts + _EXPIRY_MARGIN
            sent = advance(sent, OrderEvent.UNKNOWN, nonce=nonce, expires_at=expires_at)
            await self._ledger.record_nonce(sent)
        return OrderResult(sent)

    async def _book(self, sent: SentOrder, state: VenueOrderState) -> OrderResult:
        """Book the venue's state of an order. Leave its row unchanged until the venue shows all its trades."""
        index, context = sent.client_index, self._context
        try:
            update = await self._with_trades(sent, state)
            if update is not None and (fills := update[1]):
                at = min(context.clock.now(), fills[-1].at)
                await self._ledger.book_funding_before(self.records, sent.symbol, at)
        except MarketDataError as error:
            log.warning("%s: order %d is read again: %s", sent.account_id, index, error)
            update = None
        if update is None:
            if sent.status is SentStatus.STANDING:
                self._lagging.add(index)
            return OrderResult(sent)
        self._lagging.discard(index)
        state, fills = update
        if sent.status is SentStatus.STANDING and not fills and not state.is_final:
            return OrderResult(sent)
        posting = await self._ledger.commit(
            lambda account: settle(
                account, sent, state, fills, context.market.marks, context.rules, context.clock.now()
            )
        )
        assert posting is not None
        await self._record_drift(sent, posting)
        return OrderResult(posting.sent[0], *posting.answers)

    async def _with_trades(
        self, sent: SentOrder, state: VenueOrderState
    ) -> tuple[VenueOrderState, list[VenueFill]] | None:
        """Return the order's state and new trades, or None until the venue shows both consistently."""
        for read in range(_READS_MAX):
            if read:
                await self._account.orders.pause()
                state = await self._account.orders.find(sent.client_index) or state
            if not state.is_final and sent.order.type is VenueOrderType.MARKET:
                continue
            fills = await self.records.fills_of(state.venue_index) if state.filled else []
            unbooked = await self._ledger.unbooked(fills)
            new = [msgspec.structs.replace(fill, client_index=sent.client_index) for fill in unbooked]
            traded = sent.filled + sum((fill.quantity for fill in new), ZERO)
            if traded == state.filled or (traded > state.filled and not state.is_final):
                return state, new
        return None

    async def _record_drift(self, sent: SentOrder, posting: Posting) -> None:
        """Compare the fills with paper, on the book at sending; for a stop or target, on the present one."""
        quote = self._quotes.get(sent.client_index, self._context.market.quote(sent.symbol))
        if sent.client_index not in self._ledger.open_orders:
            self._quotes.pop(sent.client_index, None)
        if posting.fills:
            limit = sent.order.price if sent.order.type is VenueOrderType.LIMIT else None
            await self._context.drift.record(
                sent.account_id, posting.fills, quote, filled_before=sent.filled, limit_price=limit
            )
