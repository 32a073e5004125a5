"""The orders of one account at a venue: noted before they are sent, followed until they are final, booked as filled.

An order is a row before it is a transaction, so whatever happens to this process, the next one knows what may have been
sent. What the venue filled, what is known of the order and the answer to the caller are one booking.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

import msgspec

from trader.clock import Clock, floor_time
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules, row_id
from trader.domain.exchange.orders import Cause, Order, OrderAnswer
from trader.domain.exchange.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder, VenueOrderType
from trader.domain.live.ledger import book_fundings, refuse_sent, settle
from trader.domain.live.orders import Outcome, Placed, Refused, Unknown, VenueFunding, VenueOrderState, client_index_of
from trader.domain.market.markets import Quote
from trader.domain.money import ZERO
from trader.errors import MarketDataError, TraderError, Unavailable
from trader.gateways.lighter.account import LighterAccount, LighterAccounts
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.live.drift import DriftRecorder
from trader.services.market.feed import MarketFeed
from trader.store.database.pool import Database
from trader.store.live import venue_orders as store

log = logging.getLogger("trader.live")

_LOOKS_MAX: Final = 10
"""How often an order is looked at until it is final and all its trades are shown."""

_EXPIRY_MARGIN: Final = timedelta(seconds=60)
_PLACING_MAX: Final = timedelta(minutes=5)
"""Longer than one order may be sent again and again before the first answer is known to be lost."""

_SALTS_MAX: Final = 100
_FUNDING_SHOWN_WITHIN: Final = timedelta(minutes=10)
_HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Floor:
    """What the desks of all accounts share. `marks` are the latest of each market."""

    database: Database
    market: MarketFeed
    clock: Clock
    books: Accounts
    rules: Rules
    events: EventBus
    accounts: LighterAccounts
    halts: Halts
    drift: DriftRecorder
    marks: Mapping[str, Decimal]


@dataclass(frozen=True)
class Concluded:
    """What is known of an order after it was sent or looked for. `answer` is there once a request has its booking."""

    sent: SentOrder
    answer: OrderAnswer | None = None


class Outbox:
    """Of one account. Only under its desk's lock; `refresh` comes first."""

    def __init__(self, floor: Floor, account_id: str, account_index: int) -> None:
        self.account_id = account_id
        self.account_index = account_index
        self.rows: dict[int, SentOrder] = {}
        """What may stand at the venue, by client index."""

        self._floor = floor
        self._venue: LighterAccount | None = None
        self._lagging: set[int] = set()
        self._quotes: dict[int, Quote | None] = {}
        self._is_stale = True

    @property
    def account(self) -> Account:
        return self._floor.books.by_id[self.account_id]

    @property
    def venue(self) -> LighterAccount:
        assert self._venue is not None, "refresh comes first"
        return self._venue

    @property
    def unsettled(self) -> frozenset[str]:
        """The markets in which something is not decided: nothing else is sent there until it is."""
        rows = self.rows.items()
        return frozenset(one.symbol for at, one in rows if one.status is SentStatus.SENT or at in self._lagging)

    def legs(self) -> list[SentOrder]:
        """The stops and targets that wait at the venue."""
        return [sent for sent in self.rows.values() if sent.is_leg and sent.status is SentStatus.STANDING]

    def doubt(self) -> None:
        """Read again what the rows say before anything else is done."""
        self._is_stale = True

    async def refresh(self) -> None:
        """Make sure that what is known is what the rows say, and that the venue can be asked.

        :raises Unavailable: the database cannot answer now, or this process does not trade any more
        :raises MarketDataError: the venue cannot
        """
        self._current_term()
        if self._is_stale:
            await self._floor.books.change(self.account_id, lambda _: None)
            async with self._floor.database.connection() as conn:
                rows = await store.select_open_venue_orders(conn, self.account_id)
            self.rows = {sent.client_index: sent for sent in rows}
            self._is_stale = False
        venue = await self._floor.accounts.account(self.account_index)
        self._current_term()  # what was halted when the term ended has just been opened anew
        self._venue = venue

    def _current_term(self) -> int:
        """Raises `Unavailable` when it is over: then nothing is sent any more, neither orders nor their ends."""
        term = self._floor.books.term
        if term is None:
            raise _no_longer()
        return term

    # One order

    async def send(self, order: VenueOrder, cause: Cause, request: Order | None = None) -> Concluded:
        """Note an order, send it, and book what becomes of it. Its client index is drawn here.

        :raises Unavailable: the database cannot answer now; if the order was sent, it is looked for later
        """
        sent = await self._note(order, cause, request)
        if not sent.is_leg:
            self._quotes[sent.client_index] = self._floor.market.quote(sent.symbol)
        return await self._conclude(sent, await self.venue.orders.place(sent.order))

    async def resolve(self) -> None:
        """Find out what became of orders whose answer was lost."""
        now = self._floor.clock.now()
        for sent in [one for one in self.rows.values() if one.status is SentStatus.SENT]:
            orders = self.venue.orders
            if now > sent.expires_at:
                outcome = await orders.look_for_expired(sent.order)
            else:
                outcome = await orders.resolve(sent.order, sent.nonce)
            concluded = (await self._conclude(sent, outcome)).sent
            log.info("%s: order %d of %s is %s", self.account_id, sent.client_index, sent.symbol, concluded.status)

    async def poll(self) -> None:
        """Book what has become of the orders that stand at the venue. Raises as `refresh` does."""
        standing = {index: sent for index, sent in self.rows.items() if sent.status is SentStatus.STANDING}
        if not standing:
            return
        states = await self.venue.orders.find_all(standing)
        for index, state in sorted(states.items(), key=lambda item: item[1].venue_index):
            if state.is_final or state.filled > standing[index].filled:
                await self._book(self.rows[index], state)

    async def give_up(self, sent: SentOrder) -> bool:
        """Let go of an order that stood at the venue and that it knows no more. Whether it is certain.

        It is ended first, so that one which is only not shown can fill nothing more. What its trades show is booked. If
        with them the books do not hold what the venue does, there are some that it does not show: then it is not
        certain, but for a stop or target, whose successor can only reduce.

        :raises MarketDataError: the venue cannot be asked
        """
        venue, symbol = self.venue, sent.symbol
        match await venue.orders.end_unshown(sent.order):
            case Placed(state):
                return (await self._book(sent, state)).sent.status is SentStatus.DONE
            case Unknown():
                return False
        assert sent.venue_index is not None
        fills = await venue.history.fills_of(sent.venue_index)
        unbooked = sum((fill.quantity for fill in await self.unbooked(fills)), ZERO)
        held = self.account.positions.get(symbol)
        ours = sent.order.side.direction * unbooked + (ZERO if held is None else held.side.direction * held.quantity)
        theirs = {position.symbol: position.quantity for position in await venue.orders.positions()}
        if not sent.is_leg and ours != theirs.get(symbol, ZERO):
            return False
        log.error("%s: the venue knows nothing of order %d any more", self.account_id, sent.client_index)
        reason = sent.reason or "the venue showed it once and knows nothing of it any more"
        state = VenueOrderState(
            client_index=sent.client_index,
            venue_index=sent.venue_index,
            symbol=symbol,
            side=sent.order.side,
            filled=sent.filled + unbooked,
            filled_notional=sum((fill.quantity * fill.price for fill in fills), ZERO),
            is_final=True,
            status="unknown",
        )
        return (await self._book(msgspec.structs.replace(sent, reason=reason), state)).sent.status is SentStatus.DONE

    async def cancel(self, sent: SentOrder, reason: str) -> bool:
        """End an order that stands, and book what it filled until then. Whether it is certain that it stands no more.

        :raises MarketDataError: the venue cannot be asked
        """
        state = await self.venue.orders.find(sent.client_index)
        if state is None:
            return await self.give_up(msgspec.structs.replace(sent, reason=reason))
        if not state.is_final:
            outcome = await self.venue.orders.cancel(state)
            if isinstance(outcome, Unknown):
                return False
            state = outcome.state if isinstance(outcome, Placed) else state
        if not state.is_final:
            return False
        concluded = await self._book(msgspec.structs.replace(sent, reason=reason), state)
        return concluded.sent.status is SentStatus.DONE

    # Funding

    async def fund(self) -> None:
        """Book what the venue paid for the hours that have passed. Raises as `refresh` does."""
        now = self._floor.clock.now()
        hour = floor_time(now, _HOUR)
        behind = [one.funded_until for one in self.account.positions.values() if one.funded_until < hour]
        if not behind:
            return
        payments = await self.unbooked_fundings(min(behind))
        until = {symbol: hour for symbol in self.account.positions if now - hour > _FUNDING_SHOWN_WITHIN}
        for payment in payments:
            until[payment.symbol] = max(payment.boundary, until.get(payment.symbol, payment.boundary))
        await self._book_fundings(payments, until)

    async def unbooked_fundings(self, since: datetime) -> list[VenueFunding]:
        """What the venue paid from this moment on, and the books do not have. Raises as `refresh` does."""
        payments = await self.venue.history.fundings_since(since)
        return await self._without_booked(payments, since)

    async def _without_booked(self, payments: Sequence[VenueFunding], since: datetime) -> list[VenueFunding]:
        async with self._floor.database.connection() as conn:
            booked = await store.select_funded_hours(conn, self.account.run.id, since)
        return [payment for payment in payments if (payment.symbol, payment.boundary) not in booked]

    @property
    def is_funding_awaited(self) -> bool:
        """Whether an hour has passed for which the venue has not shown its payment yet."""
        hour = floor_time(self._floor.clock.now(), _HOUR)
        return any(position.funded_until < hour for position in self.account.positions.values())

    async def _fund_before(self, symbol: str, at: datetime) -> None:
        """Before a position changes, book what was due on it: what the venue shows, else by the formula."""
        hour = floor_time(at, _HOUR)
        position = self.account.positions.get(symbol)
        if position is None or position.funded_until >= hour:
            return
        await self.fund()
        position = self.account.positions[symbol]
        made, boundary = [], floor_time(position.funded_until, _HOUR) + _HOUR
        while boundary <= hour:
            rate = self._floor.market.funding_rate(symbol, boundary)
            amount = -position.side.direction * position.quantity * self._floor.marks[symbol] * rate
            made.append(VenueFunding(symbol, boundary, position.quantity, rate, amount))
            boundary += _HOUR
        await self._book_fundings(await self._without_booked(made, position.funded_until), {symbol: hour})

    async def _book_fundings(self, payments: Sequence[VenueFunding], until: dict[str, datetime]) -> None:
        floor = self._floor
        await self.commit(
            lambda account: book_fundings(account, payments, until, floor.marks, floor.rules, floor.clock.now())
        )

    # Booking

    async def commit(self, decide: Callable[[Account], Posting | None]) -> Posting | None:
        """Book a change of the account. Raises `Unavailable`: what is known is read again before the next."""
        try:
            posting = await self._floor.books.change(self.account_id, decide)
        except (TraderError, asyncio.CancelledError):
            self._is_stale = True  # a change that nobody waits for any more may still be made
            raise
        for sent in () if posting is None else posting.sent:
            if sent.status in (SentStatus.SENT, SentStatus.STANDING):
                self.rows[sent.client_index] = sent
            else:
                self.rows.pop(sent.client_index, None)
        return posting

    async def unbooked(self, fills: Sequence[VenueFill]) -> list[VenueFill]:
        """Those of the venue's trades that are not in the books."""
        if not fills:
            return []
        async with self._floor.database.connection() as conn:
            booked = await store.select_venue_trades(conn, self.account_id, [fill.trade_id for fill in fills])
        return [fill for fill in fills if fill.trade_id not in booked]

    async def _note(self, order: VenueOrder, cause: Cause, request: Order | None) -> SentOrder:
        """Write an order down before it is sent."""
        floor, account, now = self._floor, self.account, self._floor.clock.now()
        name = None if request is None else request.client_order_id
        key = f"{account.run.started_at.isoformat()}\n{name or now.isoformat()}\n{cause}\n{order.symbol}"
        term = self._current_term()
        sent = SentOrder(
            account_id=self.account_id,
            run_id=account.run.id,
            order=order,
            cause=cause,
            status=SentStatus.SENT,
            expires_at=now + timedelta(seconds=self.venue.expires_s) + _PLACING_MAX,
            created_at=now,
            changed_at=now,
            request=request,
        )
        try:
            async with floor.database.transaction() as conn:
                for salt in range(_SALTS_MAX):
                    index = client_index_of(self.account_id, f"{key}\n{salt}")
                    if not await store.select_venue_indexes(conn, self.account_id, [index]):
                        break
                sent = msgspec.structs.replace(
                    sent,
                    order=msgspec.structs.replace(order, client_index=index),
                    request_id=None if request is None else row_id(f"{self.account_id}:venue", index),
                )
                if not await store.insert_venue_order(conn, sent, term):
                    raise _no_longer()
        except (Unavailable, asyncio.CancelledError):
            self._is_stale = True
            raise
        self.rows[sent.client_index] = sent
        return sent

    async def _conclude(self, sent: SentOrder, outcome: Outcome) -> Concluded:
        match outcome:
            case Placed(state):
                return await self._book(sent, state)
            case Refused(reason):
                self._quotes.pop(sent.client_index, None)
                posting = await self.commit(lambda account: refuse_sent(account, sent, reason, self._floor.clock.now()))
                assert posting is not None
                return Concluded(posting.sent[0], posting.answer)
            case Unknown(reason, nonce):
                return await self._leave_unknown(sent, reason, nonce)

    async def _leave_unknown(self, sent: SentOrder, reason: str, nonce: int | None) -> Concluded:
        log.warning(
            "%s: what became of order %d is not known, nothing else trades %s until it is: %s",
            self.account_id, sent.client_index, sent.symbol, reason,
        )  # fmt: skip
        if nonce is not None and sent.nonce is None:
            expires_at = self._floor.clock.now() + timedelta(seconds=self.venue.expires_s) + _EXPIRY_MARGIN
            sent = msgspec.structs.replace(sent, nonce=nonce, expires_at=expires_at)
            self.rows[sent.client_index] = sent
            async with self._floor.database.connection() as conn:
                await store.update_venue_order_nonce(conn, sent)
        return Concluded(sent)

    async def _book(self, sent: SentOrder, state: VenueOrderState) -> Concluded:
        """Book what the venue shows of an order. Its row stays as it is when that is not whole yet."""
        try:
            found = await self._whole(sent, state)
            if found is not None and (fills := found[1]):
                await self._fund_before(sent.symbol, min(self._floor.clock.now(), fills[-1].at))
        except MarketDataError as error:
            log.warning("%s: order %d is looked at again: %s", self.account_id, sent.client_index, error)
            found = None
        if found is None:
            if sent.status is SentStatus.STANDING:
                self._lagging.add(sent.client_index)
            return Concluded(sent)
        self._lagging.discard(sent.client_index)
        state, fills = found
        if sent.status is SentStatus.STANDING and not fills and not state.is_final:
            return Concluded(sent)
        floor = self._floor
        posting = await self.commit(
            lambda account: settle(account, sent, state, fills, floor.marks, floor.rules, floor.clock.now())
        )
        assert posting is not None
        await self._record_drift(sent, posting)
        return Concluded(posting.sent[0], posting.answer)

    async def _record_drift(self, sent: SentOrder, posting: Posting) -> None:
        """Compare the fills with paper: on the book that the order was sent at, or of a leg on that of now."""
        floor = self._floor
        quote = self._quotes.get(sent.client_index, floor.market.quote(sent.symbol))
        if sent.client_index not in self.rows:
            self._quotes.pop(sent.client_index, None)
        if posting.fills:
            limit = sent.order.price if sent.order.type is VenueOrderType.LIMIT else None
            await floor.drift.record(
                self.account_id, posting.fills, quote, filled_before=sent.filled, limit_price=limit
            )

    async def _whole(self, sent: SentOrder, state: VenueOrderState) -> tuple[VenueOrderState, list[VenueFill]] | None:
        """The order's state with all the trades that it speaks of; None as long as the venue does not show both."""
        for look in range(_LOOKS_MAX):
            if look:
                await self.venue.orders.pause()
                state = await self.venue.orders.find(sent.client_index) or state
            if not state.is_final and sent.order.type is VenueOrderType.MARKET:
                continue
            fills = await self.venue.history.fills_of(state.venue_index) if state.filled else []
            new = [msgspec.structs.replace(fill, client_index=sent.client_index) for fill in await self.unbooked(fills)]
            traded = sent.filled + sum((fill.quantity for fill in new), ZERO)
            if traded == state.filled or (traded > state.filled and not state.is_final):
                return state, new
        return None


def _no_longer() -> Unavailable:
    return Unavailable("This process does not trade any more.", 5)
