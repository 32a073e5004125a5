"""What the books of an account and its venue say of the same thing, and what is done where they differ.

The venue is right about what it filled; the books are right about what was wanted. Each kind of difference has its rule
in `RULES`. Where the rule is to stop, nothing may be opened for the account until a person has looked; reducing what it
holds stays allowed.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from trader.domain.exchange.venue_orders import VenueOrderType
from trader.domain.money import ZERO, format_decimal


class Action(StrEnum):
    """What a rule says is to be done."""

    WAIT = "wait"
    BOOK = "book the venue's fills"
    CANCEL = "cancel the order at the venue"
    PLACE = "place the order at the venue again"
    STOP = "open nothing more for the account"


class Kind(StrEnum):
    """How the books and the venue can differ."""

    UNDER_WAY = "an order of this market is not final yet"
    GONE = "the venue holds nothing where the books hold a position"
    SMALLER = "the venue holds less than the books"
    LARGER = "the venue holds more than the books"
    FOREIGN = "the venue holds a position that the books do not know"
    FLIPPED = "the venue holds the other side"
    LEG_WITHOUT_POSITION = "a stop or target waits at the venue for a position that is gone"
    LEG_MISSING = "the exit plan's order is not at the venue"
    LEG_ELSEWHERE = "the exit plan's order waits at the venue for another price"
    RESTING_GONE = "an order that rests in the books does not stand at the venue"
    FOREIGN_ORDER = "an order at the venue is none of ours"
    BALANCE = "the venue's balance is not that of the books"


RULES: Final[Mapping[Kind, Action]] = MappingProxyType(
    {
        Kind.UNDER_WAY: Action.WAIT,
        Kind.GONE: Action.BOOK,
        Kind.SMALLER: Action.BOOK,
        Kind.LARGER: Action.STOP,
        Kind.FOREIGN: Action.STOP,
        Kind.FLIPPED: Action.STOP,
        Kind.LEG_WITHOUT_POSITION: Action.CANCEL,
        Kind.LEG_MISSING: Action.PLACE,
        Kind.LEG_ELSEWHERE: Action.CANCEL,  # it is missing at the next look, and placed where it belongs
        Kind.RESTING_GONE: Action.BOOK,
        Kind.FOREIGN_ORDER: Action.STOP,
        Kind.BALANCE: Action.STOP,
    }
)


class Leg(msgspec.Struct, frozen=True):
    """An order that waits for its trigger: the stop or target of the position in a market."""

    symbol: str
    type: VenueOrderType
    trigger: Decimal


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """What the books say. Positions are signed; `unsettled` are the markets with an order that is not final.

    `balance` is money with positions at what they cost: cash − Σ quantity × entry. So it does not depend on which part
    of a position counts as closed when somebody else traded in between.
    """

    positions: Mapping[str, Decimal]
    legs: Mapping[int, Leg]
    resting: frozenset[int]
    unsettled: frozenset[str]
    balance: Decimal


class VenueReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the venue says. Orders are named by their client index; `others` are standing orders that are no legs."""

    positions: Mapping[str, Decimal]
    legs: Mapping[int, Leg]
    others: frozenset[int]
    balance: Decimal


class Difference(msgspec.Struct, frozen=True):
    """One thing in which they differ. `client_index` names the order, where it is about one."""

    kind: Kind
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


def reconcile(books: Books, venue: VenueReport, *, balance_tolerance: Decimal) -> list[Difference]:
    """Every difference, positions first, each with its rule.

    A market in which an order is under way is left alone: what it will be is not decided. The balance is compared only
    when nothing else differs, since whatever differs moves it.
    """
    differences = [*_of_positions(books, venue), *_of_orders(books, venue)]
    gap = abs(books.balance - venue.balance)
    if not differences and gap > balance_tolerance:
        differences.append(Difference(Kind.BALANCE, None, format_decimal(books.balance), format_decimal(venue.balance)))
    return differences


def is_stopped(differences: Iterable[Difference]) -> bool:
    """Whether nothing may be opened any more."""
    return any(difference.action is Action.STOP for difference in differences)


def _of_positions(books: Books, venue: VenueReport) -> Iterable[Difference]:
    for symbol in sorted(books.positions.keys() | venue.positions.keys() | books.unsettled):
        ours, theirs = books.positions.get(symbol, ZERO), venue.positions.get(symbol, ZERO)
        kind = Kind.UNDER_WAY if symbol in books.unsettled else _kind_of_position(ours, theirs)
        if kind is not None:
            yield Difference(kind, symbol, format_decimal(ours), format_decimal(theirs))


def _kind_of_position(ours: Decimal, theirs: Decimal) -> Kind | None:
    if ours == theirs:
        return None
    if not ours:
        return Kind.FOREIGN
    if not theirs:
        return Kind.GONE
    if (ours > 0) is not (theirs > 0):
        return Kind.FLIPPED
    return Kind.SMALLER if abs(theirs) < abs(ours) else Kind.LARGER


def _of_orders(books: Books, venue: VenueReport) -> Iterable[Difference]:
    for index, leg in sorted(books.legs.items()):
        standing = venue.legs.get(index)
        # Of a position that is gone at the venue the legs go too, and are not to be placed again.
        if leg.symbol in books.unsettled or not venue.positions.get(leg.symbol):
            continue
        if standing is None:
            yield Difference(
                Kind.LEG_MISSING, leg.symbol, f"{leg.type} at {format_decimal(leg.trigger)}", "nothing", index
            )
        elif standing != leg:
            shown = f"{standing.type} of {standing.symbol} at {format_decimal(standing.trigger)}"
            yield Difference(
                Kind.LEG_ELSEWHERE, leg.symbol, f"{leg.type} at {format_decimal(leg.trigger)}", shown, index
            )
    for index, leg in sorted(venue.legs.items()):
        if leg.symbol in books.unsettled:
            continue
        shown = f"{leg.type} at {format_decimal(leg.trigger)}"
        if not venue.positions.get(leg.symbol):
            yield Difference(Kind.LEG_WITHOUT_POSITION, leg.symbol, "nothing", shown, index)
        elif index not in books.legs:
            yield Difference(Kind.FOREIGN_ORDER, leg.symbol, "nothing", shown, index)
    for index in sorted(books.resting - venue.others):
        yield Difference(Kind.RESTING_GONE, None, f"order {index}", "nothing", index)
    for index in sorted(venue.others - books.resting):
        yield Difference(Kind.FOREIGN_ORDER, None, "nothing", f"order {index}", index)
