"""Outbox of one live account: orders are recorded before they are sent, tracked until final, and booked as filled.

An order is a row before it is a transaction, so if this process dies, the next one knows what may have been sent.
The venue's fills, the order's new status and the answer to the caller are one posting.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Final

import msgspec

from trader.core.clock import interval_elapsed
from trader.core.errors import MarketDataError, Unavailable
from trader.core.events import VenueDiffers
from trader.core.money import ZERO, format_decimal
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import Cause, Order, OrderAnswer, OrderSide
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder, VenueOrderType
from trader.live.domain.ledger import refuse_sent, settle
from trader.live.domain.orders import (
    Busy,
    Placed,
    Refused,
    SendOutcome,
    Unknown,
    VenueOrderState,
    client_index_of,
)
from trader.live.domain.protective_orders import CAUSES, reachable_price
from trader.live.ledger import AccountLedger, LiveContext, run_each
from trader.live.venue import AccountRecords, VenueAccount
from trader.market.domain.markets import Quote

log = logging.getLogger("trader.live")

_READS_MAX: Final = 10
"""Maximum reads of an order until it is final and all its trades are shown."""

LAG_MAX: Final = timedelta(seconds=12)
"""How old what the venue shows may be. Nothing that it then lacks or holds is canceled for that."""

_EXPIRY_MARGIN: Final = timedelta(seconds=60)
_PLACING_MAX: Final = timedelta(minutes=5)
"""How long a closing order that the venue was too busy to take is sent again."""


@dataclass(frozen=True)
class OrderResult:
    """An order after it was sent or looked up. `answer` is set once the caller's request is booked."""

    sent: SentOrder
    answer: OrderAnswer | None = None


class Outbox:
    """The orders of one account at its venue. Used only under the lock of its live account; `refresh` comes first."""

    def __init__(
        self, context: LiveContext, ledger: AccountLedger, account_index: str, wake: Callable[[], None]
    ) -> None:
        self._context = context
        self._wake = wake
        self._ledger = ledger
        self._account_index = account_index
        self._venue: VenueAccount | None = None
        self._waiting: dict[int, str] = {}
        self._changed_at: dict[str, datetime] = {}
        self._quotes: dict[int, Quote | None] = {}
        self.lost: dict[int, bool] = {}
        """The standing orders that the venue does not show as they were sent, and whether it shows them at all."""

    @property
    def unsettled(self) -> frozenset[str]:
        """The markets with an undecided order, or with one whose trades are not shown yet."""
        return frozenset(sent.symbol for sent in self._undecided())

    @property
    def closing(self) -> frozenset[str]:
        """The markets with an undecided order that closes."""
        return frozenset(sent.symbol for sent in self._undecided() if _closes(sent))

    @property
    def protecting(self) -> frozenset[str]:
        """The markets with an undecided stop or target, other than one whose entry is open."""
        orders = self._ledger.open_orders
        return frozenset(
            sent.symbol for sent in self._undecided() if sent.is_of_plan and sent.parent_index not in orders
        )

    @property
    def trouble(self) -> str | None:
        """Which orders are unknown, and why: until they are known, the account opens nothing."""
        unknown = [sent for sent in self._undecided() if sent.client_index in self._waiting]
        texts = (f"order {sent.client_index} of {sent.symbol}: {self._waiting[sent.client_index]}" for sent in unknown)
        return "; ".join(texts) or None

    @property
    def following(self) -> int:
        """The number of the subscription by which the venue pushes each change; 0 while there is none."""
        return 0 if self._venue is None else self._venue.feed.following

    @property
    def records(self) -> AccountRecords:
        """The venue's records of the account."""
        return self._account.records

    def protective_orders(self) -> list[SentOrder]:
        """Return the stops and targets that wait at the venue, except those of an entry that is still open."""
        orders = self._ledger.open_orders
        return [
            sent
            for sent in orders.values()
            if sent.is_of_plan and sent.status is SentStatus.STANDING and sent.parent_index not in orders
        ]

    def is_young(self, symbol: str | None) -> bool:
        """Return whether a report of the venue may be older than the last change in the market, or in any."""
        changes = self._changed_at.values() if symbol is None else filter(None, [self._changed_at.get(symbol)])
        now = self._context.clock.now()
        return not all(interval_elapsed(changed_at + LAG_MAX, LAG_MAX, now) for changed_at in changes)

    async def refresh(self) -> None:
        """Make sure that memory matches the rows and that the venue is reachable.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        :raises MarketDataError: the venue does not answer
        """
        await self._ledger.refresh()
        account = await self._context.venue.account(self._account_index)
        self._ledger.require_term()  # an account halted at the end of the term has just been reopened
        self._venue = account
        account.feed.listener = self._wake

    def note_triggers(self) -> None:
        """Remember the book at which a stop or target is reached: its fills are compared with paper there."""
        for sent in self.protective_orders():
            quote, order = self._context.market.quote(sent.symbol), sent.order
            rises = (order.type is VenueOrderType.TARGET) == (order.side is OrderSide.SELL)
            if quote is None or order.trigger is None or sent.client_index in self._quotes:
                continue
            if quote.mark >= order.trigger if rises else quote.mark <= order.trigger:
                self._quotes[sent.client_index] = quote

    # One order

    async def send(
        self, order: VenueOrder, cause: Cause, request: Order | None = None, protection: Sequence[VenueOrder] = ()
    ) -> OrderResult:
        """Draw a client index for an order, record it, send it with its stop and target, and book its outcome.

        :raises Unavailable: the database cannot answer now; an order already sent is looked up later
        """
        orders = [(order, cause), *((child, CAUSES[child.type]) for child in protection)]
        return await self._place(await self._ledger.record(orders, request, self._transaction_lasts))

    async def close_unrecorded(self, symbol: str, held: Decimal) -> str | None:
        """Close a position that the books do not know, whose trades are then booked as it. Return why that failed."""
        context, account_id = self._context, self._ledger.account_id
        market, quote = context.rules.markets.get(symbol), context.market.quote(symbol)
        if market is None or quote is None:
            return "the service has no price for it"
        side = OrderSide.SELL if held > 0 else OrderSide.BUY
        order = VenueOrder(
            client_index=client_index_of(account_id, f"close\n{symbol}\n{context.clock.now().isoformat()}"),
            symbol=symbol,
            side=side,
            type=VenueOrderType.MARKET,
            quantity=abs(held),
            price=reachable_price(side, quote, closes=True, market=market),
            reduce_only=True,
        )

        async def remember(_: str) -> None:
            await self._ledger.hold_term()

        outcome = await self._account.orders.place([order], market, remember)
        return None if isinstance(outcome, Placed) else outcome.reason

    async def resolve(self) -> None:
        """Find out the outcome of orders whose answer was lost; an error of one stops no other."""
        orders = [order for order in self._ledger.open_orders.values() if order.status is SentStatus.SENT]
        await run_each(self._resolve(sent) for sent in sorted(orders, key=lambda sent: sent.parent_index is not None))

    async def poll(self) -> None:
        """Book changes to the orders that are open at the venue. Raise as `refresh` does; an error stops no other."""
        orders = self._ledger.open_orders
        standing = {index: sent for index, sent in orders.items() if sent.status is SentStatus.STANDING}
        if not standing:
            return
        states = await self._account.orders.find_all(standing)
        shown = sorted(states.items(), key=lambda item: item[1].venue_index)
        changed = [(standing[index], state) for index, state in shown if _is_of(standing[index], state)]
        booked = (self._book(*each) for each in changed if each[1].is_final or each[1].filled > each[0].filled)
        now, gone = self._context.clock.now(), [sent for index, sent in standing.items() if index not in states]
        gone = [each for each in gone if interval_elapsed(each.changed_at + LAG_MAX, LAG_MAX, now)]
        gone += [standing[index] for index, state in shown if not _is_of(standing[index], state)]
        self.lost = dict.fromkeys((each.client_index for each in gone), False)
        # A stop or target is canceled after its successor has been placed. An id is given again once ours has ended.
        end = {True: self._write_off, False: self.cancel}
        ended = (end[each.client_index in states](each) for each in gone if not each.is_protective)
        await run_each(chain(booked, ended))

    async def cancel(self, sent: SentOrder, reason: str | None = None) -> bool:
        """Cancel an order and book its fills so far. Return whether it is certainly no longer open."""
        sent = msgspec.structs.replace(sent, reason=reason)
        outcome = await self._account.orders.cancel(sent.symbol, sent.client_index)
        if isinstance(outcome, Placed) and _is_of(sent, outcome.state):
            return (await self._book(sent, outcome.state)).sent.status is SentStatus.DONE
        # One that was never shown may still have been accepted.
        is_gone = isinstance(outcome, Placed | Refused) and sent.status is SentStatus.STANDING
        return is_gone and await self._write_off(sent)

    async def cancel_foreign(self, symbol: str, client_index: int) -> None:
        """Cancel an order at the venue that is not in the ledger."""
        await self._account.orders.cancel(symbol, client_index)

    async def _write_off(self, sent: SentOrder) -> bool:
        """Write off a canceled order that the venue no longer knows. Return whether that is certain.

        Book its trades. If the ledger then holds a different position than the venue, some trades are missing and it is
        not certain, except for a stop or target, whose successor can only reduce.

        :raises MarketDataError: the venue does not answer
        """
        assert sent.venue_index is not None
        unbooked = await self._ledger.unbooked(await self.records.fills_of(sent.client_index, sent.venue_index))
        quantity = sum((fill.quantity for fill in unbooked), ZERO)
        ours = self._ledger.held.get(sent.symbol, ZERO) + sent.order.side.direction * quantity
        theirs = (await self.records.report()).positions.get(sent.symbol, ZERO)
        if not sent.is_protective and ours != theirs:
            return False
        log.error("%s: the venue no longer knows order %d", sent.account_id, sent.client_index)
        self._changed_at[sent.symbol] = self._context.clock.now()
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
        return (await self._book(msgspec.structs.replace(sent, reason=reason), state)).sent.status is SentStatus.DONE

    # Booking

    @property
    def _account(self) -> VenueAccount:
        assert self._venue is not None, "refresh comes first"
        return self._venue

    @property
    def _transaction_lasts(self) -> timedelta:
        return timedelta(seconds=self._account.expires_s) + _EXPIRY_MARGIN

    def _undecided(self) -> list[SentOrder]:
        orders = self._ledger.open_orders.items()
        return [sent for index, sent in orders if sent.status is SentStatus.SENT or index in self._waiting]

    async def _place(self, sent: Sequence[SentOrder]) -> OrderResult:
        first, ledger = sent[0], self._ledger
        if not first.is_protective:
            self._quotes[first.client_index] = self._context.market.quote(first.symbol)

        async def remember(attempt: str) -> None:
            await ledger.record_attempt(sent, attempt, self._transaction_lasts)

        market = self._context.rules.markets[first.symbol]
        self._changed_at[first.symbol] = self._context.clock.now()
        refusal, marks = None, self._context.market.marks
        if (ladder := self._context.ladder) is not None:
            refusal = await ladder.refusal(first.account_id, first.order, marks, first.client_index)
        if refusal is None:
            outcome = await self._account.orders.place([each.order for each in sent], market, remember)
        else:
            outcome = Refused(refusal)
        if isinstance(outcome, Busy):
            await ledger.record_attempt(sent, None, self._transaction_lasts)
            again = _closes(first)  # by `resolve`
            outcome = Unknown(outcome.reason) if again else Refused(outcome.reason)
        first, *children = [ledger.open_orders[each.client_index] for each in sent]
        try:
            await self._book_children(children, outcome)
        except (MarketDataError, Unavailable) as error:
            log.warning("%s: the stop of %s is looked up again: %s", first.account_id, first.symbol, error)
        return await self._book_outcome(first, outcome)

    async def _book_children(self, children: Sequence[SentOrder], outcome: SendOutcome) -> None:
        """Book the stop and target of an order by what became of their transaction."""
        states: Mapping[int, VenueOrderState] = {}
        if children and isinstance(outcome, Placed):
            states = await self._account.orders.find_all([child.client_index for child in children])
            outcome = Unknown("the venue does not show it yet")
        for child in children:
            state = states.get(child.client_index)
            await self._book_outcome(child, outcome if state is None else Placed(state))

    async def _resolve(self, sent: SentOrder) -> None:
        position = self._ledger.account.positions.get(sent.symbol)
        if sent.attempt is not None:
            outcome = await self._account.orders.resolve(sent.order, sent.attempt, sent.expires_at)
            sent = (await self._book_outcome(sent, outcome)).sent
        elif _closes(sent) and position is not None and self._context.clock.now() < sent.created_at + _PLACING_MAX:
            sent = (await self._place([sent])).sent
        else:
            sent = (await self._book_outcome(sent, Refused("it was never sent"))).sent
        log.info("%s: order %d of %s is %s", sent.account_id, sent.client_index, sent.symbol, sent.status)

    async def _book_outcome(self, sent: SentOrder, outcome: SendOutcome) -> OrderResult:
        match outcome:
            case Placed(state):
                return await self._book(sent, state)
            case Refused(reason):
                self._quotes.pop(sent.client_index, None)
                self._waiting.pop(sent.client_index, None)
                posting = await self._ledger.commit(
                    lambda account: refuse_sent(account, sent, reason, self._context.clock.now())
                )
                assert posting is not None
                return OrderResult(posting.sent[0], next(iter(posting.answers), None))
            case Unknown(reason) | Busy(reason):
                if sent.client_index not in self._waiting:
                    log.warning(
                        "%s: the state of order %d of %s is not known, nothing else opens until it is: %s",
                        sent.account_id, sent.client_index, sent.symbol, reason,
                    )  # fmt: skip
                self._waiting[sent.client_index] = reason
                return OrderResult(sent)

    async def _book(self, sent: SentOrder, state: VenueOrderState) -> OrderResult:
        """Book the venue's state of an order. Leave its row unchanged until the venue shows all its trades."""
        index, context = sent.client_index, self._context
        entry = self._ledger.open_orders.get(sent.parent_index or 0)
        if state.filled and entry is not None and entry.status is SentStatus.SENT:
            self._waiting[index] = "the fills of its entry come first"
            return OrderResult(sent)
        try:
            update = await self._with_trades(sent, state)
            if update is not None and (fills := update[1]):
                at = min(context.clock.now(), fills[-1].at)
                await self._ledger.book_funding_before(self.records, sent.symbol, at)
        except MarketDataError as error:
            log.warning("%s: order %d is read again: %s", sent.account_id, index, error)
            update = None
        if update is None:
            self._waiting[index] = "the venue does not show all its trades yet"
            return OrderResult(sent)
        self._waiting.pop(index, None)
        state, fills = update
        if sent.status is SentStatus.STANDING and not fills and not state.is_final:
            return OrderResult(sent)
        posting = await self._ledger.commit(
            lambda account: settle(
                account, sent, state, fills, context.market.marks, context.rules, context.clock.now()
            )
        )
        assert posting is not None
        self._changed_at[sent.symbol] = context.clock.now()
        self._report_unfilled(sent, state)
        await self._record_drift(sent, posting)
        return OrderResult(posting.sent[0], next(iter(posting.answers), None))

    def _report_unfilled(self, sent: SentOrder, state: VenueOrderState) -> None:
        """Raise the alarm for a stop or target that fired at the venue and left some of its position."""
        is_whole = state.filled >= sent.order.quantity or sent.symbol not in self._ledger.account.positions
        if is_whole or not (sent.is_protective and state.has_fired):
            return
        filled, wanted = format_decimal(state.filled), format_decimal(sent.order.quantity)
        kind = f"a {sent.order.type} fired at the venue and was not filled"
        text = f"{sent.symbol}: {kind}: it filled {filled} of {wanted} ({state.status}); the rest is closed at market"
        log.error("%s: %s", sent.account_id, text)
        self._context.events.publish(VenueDiffers(self._context.clock.now(), sent.account_id, kind, text))

    async def _with_trades(
        self, sent: SentOrder, state: VenueOrderState
    ) -> tuple[VenueOrderState, list[VenueFill]] | None:
        """Return the order's state and new trades, or None until the venue shows both consistently."""
        for read in range(_READS_MAX):
            if read:
                await self._account.orders.pause()
                states = await self._account.orders.find_all([sent.client_index])
                state = states.get(sent.client_index, state)
            if not state.is_final and sent.order.type is VenueOrderType.MARKET:
                continue
            fills = (
                await self.records.fills_of(sent.client_index, state.venue_index, state.filled) if state.filled else []
            )
            unbooked = await self._ledger.unbooked(fills)
            new = [msgspec.structs.replace(fill, client_index=sent.client_index) for fill in unbooked]
            traded = sent.filled + sum((fill.quantity for fill in new), ZERO)
            if traded == state.filled or (traded > state.filled and not state.is_final):
                return state, new
        return None

    async def _record_drift(self, sent: SentOrder, posting: Posting) -> None:
        """Compare the fills with paper, on the book at sending; for a stop or target, on the one at its trigger."""
        quote = self._quotes.get(sent.client_index, self._context.market.quote(sent.symbol))
        if sent.client_index not in self._ledger.open_orders:
            self._quotes.pop(sent.client_index, None)
        if posting.fills:
            limit = sent.order.price if sent.order.type is VenueOrderType.LIMIT else None
            await self._context.drift.record(
                sent.account_id, posting.fills, quote, filled_before=sent.filled, limit_price=limit
            )


def _closes(sent: SentOrder) -> bool:
    """Return whether an order closes at market: it can only reduce, so it may be sent again."""
    return sent.order.type is VenueOrderType.MARKET and sent.order.reduce_only


def _is_of(sent: SentOrder, state: VenueOrderState) -> bool:
    """Return whether a state is of the order that was sent, and not of another one that has its id now."""
    return sent.venue_index in (None, state.venue_index)
