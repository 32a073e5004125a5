"""Reconciler of one live account: compares the ledger with the venue and applies the rule for each difference.

The venue's own trades fill the ledger's gaps if they explain the difference; an unexplained difference stops new
orders for the account until a later report agrees.
"""

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.core.clock import interval_elapsed
from trader.core.errors import TraderError
from trader.core.events import VenueDiffers
from trader.core.money import ZERO
from trader.exchange.domain.account import Account
from trader.exchange.domain.venue_orders import SentStatus, VenueOrderType
from trader.live.domain.ledger import book_foreign_trades
from trader.live.domain.protective_orders import ProtectiveTerms
from trader.live.domain.reconciliation import (
    Action,
    DifferenceKind,
    LedgerReport,
    ProtectiveOrder,
    VenueDifference,
    VenueReport,
    reconcile,
)
from trader.live.ledger import AccountLedger, LiveContext, run_each
from trader.live.outbox import Outbox
from trader.live.protective_orders import ProtectiveOrders
from trader.live.sql import venue_orders as store

log = logging.getLogger("trader.live")

TOLERANCE_LEAST: Final = Decimal("0.10")
TOLERANCE_SHARE: Final = Decimal("0.00001")
"""Balances agree if they differ by no more than this amount or this share of the balance: the venue rounds."""

_ROUNDED: Final = Decimal("0.005")
_GAP_TRIES_MAX: Final = 5
"""A balance gap above `_ROUNDED` has a cause: search the trades for one that is tolerated at most this many times."""

_FUNDING_MAX: Final = Decimal("0.005")  # of a position, in an hour
_LATE: Final = timedelta(hours=1)
"""Search trades from this long before the last agreement: the venue may show one late."""

_SKEW: Final = timedelta(seconds=2)
"""How far the venue's clock may lag behind ours."""

_RECORD_EVERY: Final = timedelta(minutes=1)


class Reconciler:
    """Reconciles one account. Used only under the lock of its live account.

    `trouble` is why the account may open nothing; None when ledger and venue agree. `agrees` is False also while a
    difference may still be only of an old report. `difference` is what the last comparison could not explain.
    """

    def __init__(
        self,
        context: LiveContext,
        ledger: AccountLedger,
        outbox: Outbox,
        protective_orders: ProtectiveOrders,
        agreed_at: datetime,
    ) -> None:
        self.trouble: str | None = "it has not been compared with the venue yet"
        self.agrees = False
        self.difference: str | None = None
        self._announced: set[str] = set()
        self._context = context
        self._ledger = ledger
        self._outbox = outbox
        self._protective_orders = protective_orders
        self._agreed_at = agreed_at
        self._recorded_at = agreed_at
        self._gap, self._gap_tries = ZERO, 0

    async def compare(self) -> None:
        """Compare, apply the rules, and compare again after any action. Raise as `Outbox.refresh` does."""
        report = await self._outbox.records.report()
        if differences := self._compared(report):
            # Fills since the last read of an order are not a difference.
            await self._outbox.poll()
            report = await self._outbox.records.report()
            differences = self._compared(report)
        self._announce(differences)
        try:
            acted = [await self._act(difference, report) for difference in self._settled(differences)]
            if await self._explain(differences, report) or any(acted):
                await self._protective_orders.sync()
                differences = self._compared(await self._outbox.records.report())
                self._announce(differences)
        except TraderError:  # it may have an explanation, so it is no `difference` yet, but stops new orders
            self.trouble = "; ".join(map(str, self._settled(_wrong(differences)))) or self.trouble
            raise
        wrong = _wrong(differences)
        if (stopping := self._settled(wrong)) or not wrong:  # what is young may still be the known trouble
            self.trouble = self.difference = "; ".join(map(str, stopping)) or None
        self.agrees = not differences
        if self.agrees:
            await self._record_agreement()

    # Comparison

    def _compared(self, report: VenueReport) -> list[VenueDifference]:
        share = abs(self._ledger.account.cash) * TOLERANCE_SHARE
        least = max(TOLERANCE_LEAST, share) + report.rounding
        if self._ledger.is_funding_awaited:
            least += _FUNDING_MAX * sum(each.entry_notional for each in self._ledger.account.positions.values())
        # An order whose answer was lost may or may not be open, as may the stop of an entry that still rests.
        orders = self._ledger.open_orders
        unknown = {
            index
            for index, sent in orders.items()
            if sent.status is SentStatus.SENT or (sent.is_protective and sent.parent_index in orders)
        }
        return [
            difference
            for difference in reconcile(self._ledger_report(), report, balance_tolerance=least)
            if difference.client_index not in unknown
        ]

    def _ledger_report(self) -> LedgerReport:
        account, held, standing = self._ledger.account, self._ledger.held, self._protective_orders.standing()
        triggered = {terms: sent for terms, sent in standing.items() if sent.is_protective}
        wanted = {sent.client_index: _protective_order(terms, held) for terms, sent in triggered.items()}
        missing = (
            terms
            for terms in self._protective_orders.wanted()
            if terms not in standing and terms.type is not VenueOrderType.LIMIT
        )
        wanted |= {-number: _protective_order(terms, held) for number, terms in enumerate(missing, start=1)}
        return LedgerReport(
            positions=held,
            protective_orders=wanted,
            resting=frozenset(
                index
                for index, sent in self._ledger.open_orders.items()
                if sent.status is SentStatus.STANDING and not sent.is_protective
            ),
            unsettled=self._outbox.unsettled,
            balance=_balance(account),
        )

    def _settled(self, differences: Iterable[VenueDifference]) -> list[VenueDifference]:
        """Return the differences that are not merely of a report older than the last change in the market."""
        return [difference for difference in differences if not self._outbox.is_young(difference.symbol)]

    def _announce(self, differences: Iterable[VenueDifference]) -> None:
        """Log and publish each difference that is new since the last comparison."""
        account_id, known = self._ledger.account_id, self._announced
        self._announced = set()
        for difference in self._settled(differences):
            self._announced.add(str(difference))
            if (text := str(difference)) not in known:
                log.warning("%s differs from the venue: %s", account_id, text)
                self._context.events.publish(VenueDiffers(self._context.clock.now(), account_id, difference.kind, text))

    # Actions

    async def _act(self, difference: VenueDifference, report: VenueReport) -> bool:
        """Cancel an order if that is the rule, one of ours after its successor. Return whether anything was done."""
        index, outbox = difference.client_index, self._outbox
        if difference.action is not Action.CANCEL or index is None or index not in report.protective_orders:
            return False
        if index in self._ledger.open_orders:
            outbox.lost[index] = True
        else:
            await outbox.cancel_foreign(report.protective_orders[index].symbol, index)
        return True

    async def _explain(self, differences: list[VenueDifference], report: VenueReport) -> bool:
        """Book the foreign trades that the ledger lacks."""
        is_bookable = any(difference.action is Action.BOOK for difference in differences)
        if not is_bookable and not self._has_new_gap(differences, report):
            return False
        symbols = {difference.symbol for difference in differences if difference.action is Action.BOOK}
        if {difference.kind for difference in differences} <= {DifferenceKind.BALANCE}:
            symbols = set(self._context.rules.markets)
        await run_each(
            self._book_foreign_trades(symbol, report)
            for symbol in self._context.rules.markets.keys() & symbols - self._outbox.unsettled
        )
        return True

    def _has_new_gap(self, differences: list[VenueDifference], report: VenueReport) -> bool:
        """Return whether only the balances differ, by more than is tolerated or by another amount than before."""
        gap = _balance(self._ledger.account) - report.balance
        if {difference.kind for difference in differences} - {
            DifferenceKind.BALANCE
        } or self._ledger.is_funding_awaited:
            return False
        if abs(gap - self._gap) > _ROUNDED:
            self._gap, self._gap_tries = gap, 0
        self._gap_tries += 1
        return abs(gap) > _ROUNDED and (bool(differences) or self._gap_tries <= _GAP_TRIES_MAX)

    async def _book_foreign_trades(self, symbol: str, report: VenueReport) -> None:
        """Book trades that none of our orders made, if the ledger then matches the venue's position."""
        ledger, records, context = self._ledger, self._outbox.records, self._context
        now = context.clock.now()
        behind = min((records.answered_at or now) - now, timedelta(0))  # dates in the ledger are of our clock
        self._agreed_at = min(self._agreed_at, now)  # the clock may have been ahead
        since = max(ledger.account.run.started_at - _SKEW, self._agreed_at - _LATE) + behind
        fills = [trade for trade in await records.fills_since(since) if trade.symbol == symbol]
        unbooked = await ledger.unbooked(fills)
        foreign = [fill for fill in unbooked if fill.client_index not in ledger.open_orders]
        held = ledger.held.get(symbol, ZERO)
        held += sum((fill.side.direction * fill.quantity for fill in foreign), ZERO)
        if not foreign or held != report.positions.get(symbol, ZERO):
            return
        payments = await ledger.unbooked_payments(await records.fundings_since(since), since)
        log.warning("%s: booked %d trades of %s that none of our orders made", ledger.account_id, len(foreign), symbol)
        marks, rules, clock = context.market.marks, context.rules, context.clock
        await ledger.commit(lambda account: book_foreign_trades(account, foreign, payments, marks, rules, clock.now()))

    async def _record_agreement(self) -> None:
        now = self._context.clock.now()
        self._agreed_at = now
        if interval_elapsed(self._recorded_at + _RECORD_EVERY, _RECORD_EVERY, now):
            async with self._context.database.writing() as conn:
                await store.update_agreed_at(conn, self._ledger.account_id, now)
            self._recorded_at = now


def _wrong(differences: Iterable[VenueDifference]) -> list[VenueDifference]:
    """Return the differences with which an account may open nothing."""
    return [each for each in differences if each.action in (Action.STOP, Action.BOOK)]


def _balance(account: Account) -> Decimal:
    """Return the cash plus positions at cost."""
    return account.cash - sum(
        (position.side.direction * position.entry_notional for position in account.positions.values()), ZERO
    )


def _protective_order(terms: ProtectiveTerms, held: Mapping[str, Decimal]) -> ProtectiveOrder:
    quantity = min(terms.quantity, abs(held.get(terms.symbol, ZERO)))
    return ProtectiveOrder(terms.symbol, terms.type, terms.trigger, quantity)
