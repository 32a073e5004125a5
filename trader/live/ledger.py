"""The ledger of one live account: its open venue orders, and the booking of venue fills and payments."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Final

import msgspec

from trader.core.clock import Clock, floor_time
from trader.core.errors import MarketDataError, TraderError, Unavailable
from trader.core.events import EventBus
from trader.core.money import ZERO
from trader.database.leadership import hold_term
from trader.database.pool import Connection, Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account, hours_crossed
from trader.exchange.domain.ledger import ExchangeRules, Posting, row_id
from trader.exchange.domain.orders import Cause, Order
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder
from trader.exchange.halts import Halts
from trader.exchange.protocol import rules_of
from trader.live.domain.ledger import book_payments
from trader.live.domain.orders import VenueFunding, client_index_of
from trader.live.drift import DriftRecorder
from trader.live.ladder import Ladder
from trader.live.sql import venue_orders as store
from trader.live.venue import AccountRecords, VenueAccounts
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

log = logging.getLogger("trader.live")

_SALTS_MAX: Final = 100
_FUNDING_SHOWN_WITHIN: Final = timedelta(minutes=10)
"""How long after the hour the venue may show a funding payment; after that, none was due."""

_HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True)
class LiveContext:
    """Dependencies shared by all live accounts."""

    database: Database
    market: MarketFeed
    clock: Clock
    settings: Settings
    accounts: Accounts
    events: EventBus
    venue: VenueAccounts
    halts: Halts
    drift: DriftRecorder
    ladder: Ladder | None = None

    @cached_property
    def rules(self) -> ExchangeRules:
        """The rules for orders. Their rates only estimate costs; the ledger books the venue's charges."""
        rules = rules_of(self.settings, self.market.markets)
        return msgspec.structs.replace(rules, liquidation_rate=ZERO, book_recovery=timedelta(0))


class AccountLedger:
    """The ledger of one account. Used only under the lock of its live account; `refresh` comes first."""

    def __init__(self, context: LiveContext, account_id: str) -> None:
        self.account_id = account_id
        self.open_orders: dict[int, SentOrder] = {}
        """The orders that may be open at the venue, by client index."""

        self._context = context
        self._is_stale = True

    @property
    def account(self) -> Account:
        return self._context.accounts.by_id[self.account_id]

    @property
    def held(self) -> dict[str, Decimal]:
        """The signed quantities of the positions by market."""
        return {symbol: each.side.direction * each.quantity for symbol, each in self.account.positions.items()}

    def require_term(self) -> int:
        """Return the term of this process. Raise `Unavailable` once it is over: nothing is sent after that."""
        term = self._context.accounts.term
        if term is None:
            raise _no_longer()
        return term

    async def hold_term(self) -> None:
        """Raise `Unavailable` if the term of this process is over, also if it does not know that yet."""
        async with self._context.database.connection() as conn:
            if not await hold_term(conn, self.require_term()):
                raise _no_longer()

    def invalidate(self) -> None:
        """Mark memory as stale: the next operation first reads the rows again."""
        self._is_stale = True

    async def refresh(self) -> None:
        """Read the rows again if memory may differ from them.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        """
        self.require_term()
        if self._is_stale:
            await self._context.accounts.change(self.account_id, lambda _: None)
            async with self._context.database.connection() as conn:
                rows = await store.select_open_venue_orders(conn, self.account_id)
            self.open_orders = {sent.client_index: sent for sent in rows}
            self._is_stale = False

    async def record(
        self, orders: Sequence[tuple[VenueOrder, Cause]], request: Order | None, lasts: timedelta
    ) -> list[SentOrder]:
        """Record orders before they are sent together. Return them with their newly drawn client indexes.

        The first one may have a caller's request; the others are the stop and target of its fills.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        """
        account, now, term = self.account, self._context.clock.now(), self.require_term()
        name = None if request is None else request.client_order_id
        sent: list[SentOrder] = []
        try:
            async with self._context.database.transaction() as conn:
                for order, cause in orders:
                    key = f"{account.run.started_at.isoformat()}\n{name or now.isoformat()}\n{cause}\n{order.symbol}"
                    index = await self._draw_index(conn, key)
                    sent.append(
                        SentOrder(
                            account_id=self.account_id,
                            run_id=account.run.id,
                            order=msgspec.structs.replace(order, client_index=index),
                            cause=cause,
                            status=SentStatus.SENT,
                            expires_at=now + lasts,
                            created_at=now,
                            changed_at=now,
                            request_id=None if request is None else row_id(f"{self.account_id}:venue", index),
                            request=request,
                            parent_index=sent[0].client_index if sent else None,
                        )
                    )
                    request = None
                if not await store.insert_venue_orders(conn, sent, term):
                    raise _no_longer()
        except (Unavailable, asyncio.CancelledError):
            self._is_stale = True
            raise
        self.open_orders |= {each.client_index: each for each in sent}
        return sent

    async def record_attempt(self, sent: Sequence[SentOrder], attempt: str | None, lasts: timedelta) -> None:
        """Record the transaction that is about to carry orders, or None if it certainly does not.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        """
        term, expires_at = self.require_term(), self._context.clock.now() + lasts
        known = [
            msgspec.structs.replace(self.open_orders[each.client_index], attempt=attempt, expires_at=expires_at)
            for each in sent
        ]
        self.open_orders |= {each.client_index: each for each in known}
        try:
            async with self._context.database.writing() as conn:
                if not await store.update_venue_orders_attempt(conn, known, term):
                    raise _no_longer()
        except (Unavailable, asyncio.CancelledError):
            self._is_stale = True
            raise

    async def commit(self, decide: Callable[[Account], Posting | None]) -> Posting | None:
        """Book a change of the account. After `Unavailable`, the next change first reads the rows again."""
        try:
            posting = await self._context.accounts.change(self.account_id, decide)
        except (TraderError, asyncio.CancelledError):
            self._is_stale = True  # the change may still commit after its caller has gone
            raise
        for sent in () if posting is None else posting.sent:
            if sent.status.is_final:
                self.open_orders.pop(sent.client_index, None)
            else:
                self.open_orders[sent.client_index] = sent
        return posting

    async def unbooked(self, fills: Sequence[VenueFill]) -> list[VenueFill]:
        """Return the venue trades that are not booked."""
        if not fills:
            return []
        async with self._context.database.connection() as conn:
            booked = await store.select_venue_trades(conn, self.account_id, [fill.trade_id for fill in fills])
        return [fill for fill in fills if fill.trade_id not in booked]

    async def _draw_index(self, conn: Connection, key: str) -> int:
        for salt in range(_SALTS_MAX):
            index = client_index_of(self.account_id, f"{key}\n{salt}")
            if not await store.select_venue_indexes(conn, self.account_id, [index]):
                break
        return index

    # Funding

    @property
    def is_funding_awaited(self) -> bool:
        """Whether the venue has not yet shown the payment for an hour that has passed."""
        hour = floor_time(self._context.clock.now(), _HOUR)
        return any(position.funded_until < hour for position in self.account.positions.values())

    async def book_funding(self, records: AccountRecords) -> None:
        """Book the venue's payments for the hours that have passed.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        :raises MarketDataError: the venue does not answer
        """
        if not self.is_funding_awaited:
            return
        positions = self.account.positions
        since = min(each.funded_until for each in positions.values())
        payments = await self.unbooked_payments(await records.fundings_since(since), since)
        now = self._context.clock.now()
        now = min(now, records.answered_at or now)  # ours may be ahead
        hour = floor_time(now, _HOUR)
        until = {symbol: hour for symbol in positions if now - hour > _FUNDING_SHOWN_WITHIN}
        for payment in payments:
            until[payment.symbol] = max(payment.boundary, until.get(payment.symbol, payment.boundary))
        await self._book_payments(payments, until)

    async def book_funding_before(self, records: AccountRecords, symbol: str, at: datetime) -> None:
        """Book the funding due on a position that changes at `at`: the venue's figure if shown, else the formula's."""
        hour = floor_time(at, _HOUR)
        position = self.account.positions.get(symbol)
        if position is None or position.funded_until >= hour:
            return
        with suppress(MarketDataError):  # what the venue does not show now is as what it does not show yet
            await self.book_funding(records)
        position = self.account.positions[symbol]
        market, payments = self._context.market, []
        for boundary in hours_crossed(position.funded_until, hour):
            rate = market.funding_rate(symbol, boundary)
            amount = -position.side.direction * position.quantity * market.marks[symbol] * rate
            payments.append(VenueFunding(symbol, boundary, position.quantity, rate, amount))
        await self._book_payments(await self.unbooked_payments(payments, position.funded_until), {symbol: hour})

    async def unbooked_payments(self, payments: Sequence[VenueFunding], since: datetime) -> list[VenueFunding]:
        """Return those of the payments since `since` that are not booked."""
        async with self._context.database.connection() as conn:
            booked = await store.select_funded_hours(conn, self.account.run.id, since)
        return [payment for payment in payments if (payment.symbol, payment.boundary) not in booked]

    async def _book_payments(self, payments: Sequence[VenueFunding], until: dict[str, datetime]) -> None:
        context = self._context
        await self.commit(
            lambda account: book_payments(
                account, payments, until, context.market.marks, context.rules, context.clock.now()
            )
        )


async def run_each(steps: Iterable[Awaitable[object]]) -> None:
    """Complete the steps one after another. An error of one, even a bug, stops no other; the first is raised then."""
    errors: list[Exception] = []
    for step in steps:
        try:
            await step
        except Exception as error:
            if errors:
                log.warning("another step failed, too: %s", error, exc_info=not isinstance(error, TraderError))
            errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, TraderError)), errors[0])


def _no_longer() -> Unavailable:
    return Unavailable("This process no longer trades.", 5)
