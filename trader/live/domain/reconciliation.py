"""Reconciliation: how the ledger of an account and its venue differ, and the rule for each kind of difference.

The venue is right about fills; the ledger is right about intentions. `RULES` has the rule for each kind
of difference. Where the rule is to stop, the account may open nothing until a person has reviewed it; reducing its
positions stays allowed.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from trader.core.money import ZERO, format_decimal
from trader.exchange.domain.venue_orders import VenueOrderType

_ROUNDED: Final = Decimal("0.001")
"""By what share of it the venue may have rounded a trigger, if its tick has changed."""


class Action(StrEnum):
    """The response to a difference."""

    WAIT = "wait"
    BOOK = "book the venue's fills"
    CANCEL = "cancel the order at the venue"
    PLACE = "place the order at the venue again"
    STOP = "open nothing more for the account"


class DifferenceKind(StrEnum):
    """How the ledger and the venue can differ."""

    UNDECIDED = "an order of this market is not final yet"
    GONE = "the venue holds nothing where the books hold a position"
    SMALLER = "the venue holds less than the books"
    LARGER = "the venue holds more than the books"
    FOREIGN = "the venue holds a position that the books do not know"
    FLIPPED = "the venue holds the other side"
    PROTECTION_WITHOUT_POSITION = "a stop or target waits at the venue for a position that is gone"
    PROTECTION_MISSING = "the exit plan's order is not at the venue"
    PROTECTION_MISPLACED = "the exit plan's order waits at the venue for another price or quantity"
    RESTING_GONE = "an order that rests in the books is not open at the venue"
    PROTECTION_DOUBLED = "an entry's stop or target waits at the venue beside the exit plan's"
    FOREIGN_ORDER = "an order at the venue is not ours"
    BALANCE = "the venue's balance differs from the books"


RULES: Final[Mapping[DifferenceKind, Action]] = MappingProxyType(
    {
        DifferenceKind.UNDECIDED: Action.WAIT,
        DifferenceKind.GONE: Action.BOOK,
        DifferenceKind.SMALLER: Action.BOOK,
        DifferenceKind.LARGER: Action.BOOK,
        DifferenceKind.FOREIGN: Action.BOOK,
        DifferenceKind.FLIPPED: Action.BOOK,
        DifferenceKind.PROTECTION_WITHOUT_POSITION: Action.CANCEL,
        DifferenceKind.PROTECTION_MISSING: Action.PLACE,
        DifferenceKind.PROTECTION_MISPLACED: Action.CANCEL,  # it is then placed as missing
        DifferenceKind.PROTECTION_DOUBLED: Action.CANCEL,
        DifferenceKind.RESTING_GONE: Action.BOOK,
        DifferenceKind.FOREIGN_ORDER: Action.STOP,
        DifferenceKind.BALANCE: Action.STOP,
    }
)


class ProtectiveOrder(msgspec.Struct, frozen=True):
    """A stop or target of the position in a market. A `quantity` of zero stands for the whole position.

    `is_child`: it was sent with an entry.
    """

    symbol: str
    type: VenueOrderType
    trigger: Decimal
    quantity: Decimal = ZERO
    is_child: bool = False

    def __str__(self) -> str:
        size = f" for {format_decimal(self.quantity)}" if self.quantity else ""
        return f"{self.type} at {format_decimal(self.trigger)}{size}"


class LedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """An account according to the ledger. Positions are signed; `unsettled` holds the markets with undecided orders.

    `balance` is money with positions at cost: cash − Σ quantity × entry. It therefore does not depend on which part of
    a position counts as closed if someone else traded in between.
    """

    positions: Mapping[str, Decimal]
    protective_orders: Mapping[int, ProtectiveOrder]
    resting: frozenset[int]
    unsettled: frozenset[str]
    balance: Decimal


class VenueReport(msgspec.Struct, frozen=True, kw_only=True):
    """An account according to the venue. Orders are named by client index; `others` are not protective.

    `rounding` is by how much the balance may be off because the venue rounds entry prices.
    """

    positions: Mapping[str, Decimal]
    protective_orders: Mapping[int, ProtectiveOrder]
    others: frozenset[int]
    balance: Decimal
    rounding: Decimal = ZERO


class VenueDifference(msgspec.Struct, frozen=True):
    """One difference. `client_index` names the order concerned, if any."""

    kind: DifferenceKind
    symbol: str | None
    ours: str
    theirs: str
    client_index: int | None = None

    @property
    def action(self) -> Action:
        return RULES[self.kind]

    def __str__(self) -> str:
        where = "" if self.symbol is None else f"{self.symbol}: "
        return f"{where}{self.kind} (books {self.ours}, venue {self.theirs}): {self.action}"


def reconcile(ledger: LedgerReport, venue: VenueReport, *, balance_tolerance: Decimal) -> list[VenueDifference]:
    """Return every difference, positions first.

    A market with an undecided order is left alone. The balance is compared only when nothing else differs, since every
    other difference moves it.
    """
    differences = [
        *_of_positions(ledger, venue),
        *_of_missing_protection(ledger, venue),
        *_of_orders_at_venue(ledger, venue),
    ]
    gap = abs(ledger.balance - venue.balance)
    if not differences and gap > balance_tolerance:
        ours, theirs = format_decimal(ledger.balance), format_decimal(venue.balance)
        differences.append(VenueDifference(DifferenceKind.BALANCE, None, ours, theirs))
    return differences


def _of_positions(ledger: LedgerReport, venue: VenueReport) -> Iterator[VenueDifference]:
    for symbol in sorted(ledger.positions.keys() | venue.positions.keys() | ledger.unsettled):
        ours, theirs = ledger.positions.get(symbol, ZERO), venue.positions.get(symbol, ZERO)
        kind = DifferenceKind.UNDECIDED if symbol in ledger.unsettled else _kind_of_position(ours, theirs)
        if kind is not None:
            yield VenueDifference(kind, symbol, format_decimal(ours), format_decimal(theirs))


def _kind_of_position(ours: Decimal, theirs: Decimal) -> DifferenceKind | None:
    if ours == theirs:
        return None
    if not ours:
        return DifferenceKind.FOREIGN
    if not theirs:
        return DifferenceKind.GONE
    if (ours > 0) is not (theirs > 0):
        return DifferenceKind.FLIPPED
    return DifferenceKind.SMALLER if abs(theirs) < abs(ours) else DifferenceKind.LARGER


def _of_missing_protection(ledger: LedgerReport, venue: VenueReport) -> Iterator[VenueDifference]:
    for index, wanted in sorted(ledger.protective_orders.items()):
        # When a position is gone at the venue, its protective orders go too; do not place them again.
        if wanted.symbol in ledger.unsettled or not venue.positions.get(wanted.symbol):
            continue
        standing = venue.protective_orders.get(index)
        if standing is None:
            yield VenueDifference(DifferenceKind.PROTECTION_MISSING, wanted.symbol, str(wanted), "nothing", index)
        elif (
            (standing.symbol, standing.type) != (wanted.symbol, wanted.type)
            or abs(standing.trigger - wanted.trigger) > wanted.trigger * _ROUNDED
            or 0 < standing.quantity < wanted.quantity
        ):
            shown = f"{standing} of {standing.symbol}"
            yield VenueDifference(DifferenceKind.PROTECTION_MISPLACED, wanted.symbol, str(wanted), shown, index)


def _of_orders_at_venue(ledger: LedgerReport, venue: VenueReport) -> Iterator[VenueDifference]:
    ours = [order for index, order in venue.protective_orders.items() if index in ledger.protective_orders]
    covered = {(order.symbol, order.type) for order in ours}
    for index, standing in sorted(venue.protective_orders.items()):
        if standing.symbol in ledger.unsettled:
            continue
        if not venue.positions.get(standing.symbol) and not ledger.positions.get(standing.symbol):
            yield VenueDifference(
                DifferenceKind.PROTECTION_WITHOUT_POSITION, standing.symbol, "nothing", str(standing), index
            )
        elif index not in ledger.protective_orders:
            is_double = standing.is_child and (standing.symbol, standing.type) in covered
            kind = DifferenceKind.PROTECTION_DOUBLED if is_double else DifferenceKind.FOREIGN_ORDER
            yield VenueDifference(kind, standing.symbol, "nothing", str(standing), index)
    for index in sorted(ledger.resting - venue.others):
        yield VenueDifference(DifferenceKind.RESTING_GONE, None, f"order {index}", "nothing", index)
    for index in sorted(venue.others - ledger.resting):
        yield VenueDifference(DifferenceKind.FOREIGN_ORDER, None, "nothing", f"order {index}", index)
