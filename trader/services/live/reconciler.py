"""Books and venue compared: every difference is told once and gets what its rule says.

What the books lack is booked from the venue's own trades, if these explain it; what nobody can explain stops new orders
for the account until a later statement agrees.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.domain.exchange.account import Account
from trader.domain.exchange.venue_orders import SentStatus, VenueFill
from trader.domain.live.ledger import book_strays
from trader.domain.live.protective_orders import ProtectiveTerms
from trader.domain.live.reconciliation import Action, Books, Difference, Kind, Leg, VenueReport, reconcile
from trader.domain.money import ZERO
from trader.services.events import VenueDiffers
from trader.services.live.outbox import Floor, Outbox
from trader.services.live.protective_orders import ProtectiveOrders
from trader.store.live import venue_orders as store

log = logging.getLogger("trader.live")

TOLERANCE_LEAST: Final = Decimal("0.10")
TOLERANCE_SHARE: Final = Decimal("0.00001")
"""The balances agree when they are no further apart than this amount or this share of the balance: the venue rounds."""

_ROUNDED: Final = Decimal("0.005")
_GAP_LOOKS_MAX: Final = 5
"""A gap beyond this is looked into so often, tolerated or not: somebody may have traded by hand."""

_ENDLESS: Final = Decimal("Infinity")
_LATE: Final = timedelta(hours=1)
"""Trades are looked for from this long before the last agreement on: the venue may show one late."""

_SKEW: Final = timedelta(seconds=2)
"""How far the venue's clock may be behind ours."""

_NOTE_EVERY: Final = timedelta(minutes=1)


class Reconciler:
    """Of one account. Only under its desk's lock. `trouble` is why nothing may be opened, None when all agrees."""

    def __init__(self, floor: Floor, outbox: Outbox, legs: ProtectiveOrders, agreed_at: datetime) -> None:
        self.trouble: str | None = "it has not been compared with the venue yet"
        self.differences: tuple[Difference, ...] = ()
        self._floor = floor
        self._outbox = outbox
        self._legs = legs
        self._agreed_at = agreed_at
        self._noted_at = agreed_at
        self._gap, self._gap_looks = ZERO, 0

    async def compare(self) -> None:
        """Compare, act by the rules, and compare again where something was done. Raises as `Outbox.refresh` does."""
        statement = await self._outbox.venue.orders.statement()
        if found := self._differences(statement):
            # What an order has filled since the last look at it is no difference.
            await self._outbox.poll()
            statement = await self._outbox.venue.orders.statement()
            found = self._differences(statement)
        self._tell(found)
        acted = [await self._act(difference, statement) for difference in found]
        if await self._explain(found, statement) or any(acted):
            found = self._differences(await self._outbox.venue.orders.statement())
            self._tell(found)
        self.differences = tuple(found)
        stopping = [one for one in found if one.action in (Action.STOP, Action.BOOK)]
        self.trouble = "; ".join(map(str, stopping)) or None
        if not found:
            await self._agree()

    # What differs

    def _differences(self, statement: VenueReport) -> list[Difference]:
        books, share = self._books(), abs(self._outbox.account.cash) * TOLERANCE_SHARE
        tolerance = _ENDLESS if self._outbox.is_funding_awaited else max(TOLERANCE_LEAST, share)
        # An order whose answer was lost may stand there or not: its market is left alone.
        unknown = {index for index, sent in self._outbox.rows.items() if sent.status is SentStatus.SENT}
        return [
            difference
            for difference in reconcile(books, statement, balance_tolerance=tolerance)
            if difference.client_index not in unknown
        ]

    def _books(self) -> Books:
        outbox, account = self._outbox, self._outbox.account
        standing = self._legs.standing()
        legs = {sent.client_index: _leg(terms) for terms, sent in standing.items()}
        missing = (terms for terms in self._legs.wanted() if terms not in standing)
        legs |= {-number: _leg(terms) for number, terms in enumerate(missing, start=1)}
        return Books(
            positions={
                symbol: position.side.direction * position.quantity for symbol, position in account.positions.items()
            },
            legs=legs,
            resting=frozenset(
                index for index, sent in outbox.rows.items() if sent.status is SentStatus.STANDING and not sent.is_leg
            ),
            unsettled=outbox.unsettled,
            balance=_balance(account),
        )

    def _tell(self, found: Iterable[Difference]) -> None:
        """A log line and an event for each difference that was not there at the last look."""
        known = set(map(str, self.differences))
        for difference in found:
            if (text := str(difference)) not in known:
                self.differences = (*self.differences, difference)
                log.warning("%s differs from the venue: %s", self._outbox.account_id, text)
                now, account_id = self._floor.clock.now(), self._outbox.account_id
                self._floor.events.publish(VenueDiffers(now, account_id, difference.kind, text))

    # What is done

    async def _act(self, difference: Difference, statement: VenueReport) -> bool:
        """What the rule says, as far as it is about one order. Whether something was done."""
        index = difference.client_index
        is_gone = difference.kind in (Kind.LEG_MISSING, Kind.RESTING_GONE)
        if is_gone and (lost := self._outbox.rows.get(index or 0)) is not None:
            if await self._outbox.give_up(lost):
                await self._legs.sync()
            return True
        if difference.action is not Action.CANCEL or index is None or index not in statement.legs:
            return False
        if (sent := self._outbox.rows.get(index)) is not None:
            return await self._outbox.cancel(sent, "its position is gone")
        state = await self._outbox.venue.orders.find(index)
        if state is not None and not state.is_final:
            await self._outbox.venue.orders.cancel(state)
        return True

    async def _explain(self, found: list[Difference], statement: VenueReport) -> bool:
        """Book what the books lack: first of our own orders, then trades that none of them made."""
        if not any(one.action is Action.BOOK for one in found) and not self._has_new_gap(found, statement):
            return False
        await self._outbox.poll()
        statement = await self._outbox.venue.orders.statement()
        left = self._differences(statement)
        symbols = {one.symbol for one in left if one.action is Action.BOOK and one.symbol is not None}
        if {one.kind for one in left} <= {Kind.BALANCE}:
            symbols = set(self._floor.rules.markets)
        if symbols and not self._outbox.unsettled & symbols:
            await self._book_strays(symbols, statement)
        await self._legs.sync()
        return True

    def _has_new_gap(self, found: list[Difference], statement: VenueReport) -> bool:
        """Whether nothing but the balances differ, and otherwise than at the last look."""
        gap = _balance(self._outbox.account) - statement.balance
        if {one.kind for one in found} - {Kind.BALANCE} or self._outbox.is_funding_awaited:
            return False
        if abs(gap - self._gap) > _ROUNDED:
            self._gap, self._gap_looks = gap, 0
        self._gap_looks += 1
        return abs(gap) > _ROUNDED and self._gap_looks <= _GAP_LOOKS_MAX

    async def _book_strays(self, symbols: set[str], statement: VenueReport) -> None:
        """Book the trades that no order of ours made, if with them the books hold what the venue does."""
        outbox, floor = self._outbox, self._floor
        since = max(outbox.account.run.started_at - _SKEW, self._agreed_at - _LATE)
        fills = [one for one in await outbox.venue.history.fills_since(since) if one.symbol in symbols]
        strays = await self._without_ours(await outbox.unbooked(fills))
        payments = await outbox.unbooked_fundings(since) if strays else []
        held = {
            symbol: position.side.direction * position.quantity for symbol, position in outbox.account.positions.items()
        }
        for fill in strays:
            held[fill.symbol] = held.get(fill.symbol, ZERO) + fill.side.direction * fill.quantity
        if not strays or any(held.get(one, ZERO) != statement.positions.get(one, ZERO) for one in symbols):
            return
        log.warning("%s: %d trades that no order of ours made are booked", outbox.account_id, len(strays))
        await outbox.commit(
            lambda account: book_strays(account, strays, payments, floor.marks, floor.rules, floor.clock.now())
        )

    async def _without_ours(self, fills: list[VenueFill]) -> list[VenueFill]:
        indexes = {fill.client_index for fill in fills if fill.client_index is not None}
        async with self._floor.database.connection() as conn:
            ours = await store.select_venue_indexes(conn, self._outbox.account_id, indexes)
        return [fill for fill in fills if fill.client_index not in ours]

    async def _agree(self) -> None:
        now = self._floor.clock.now()
        self._agreed_at = now
        if now - self._noted_at >= _NOTE_EVERY:
            async with self._floor.database.connection() as conn:
                await store.update_agreed_at(conn, self._outbox.account_id, now)
            self._noted_at = now


def _balance(account: Account) -> Decimal:
    """Cash, with positions at what they cost."""
    return account.cash - sum((one.side.direction * one.entry_notional for one in account.positions.values()), ZERO)


def _leg(terms: ProtectiveTerms) -> Leg:
    return Leg(terms.symbol, terms.type, terms.trigger)
