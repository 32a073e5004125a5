"""Where books and venue differ there is a rule, and following the rules brings them together or stops the account."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trader.domain.exchange.venue_orders import VenueOrderType
from trader.domain.live.reconciliation import (
    RULES,
    Action,
    Books,
    Difference,
    Kind,
    Leg,
    VenueReport,
    is_stopped,
    reconcile,
)

D = Decimal
STOP = Leg("BTC", VenueOrderType.STOP, D(93000))
TARGET = Leg("BTC", VenueOrderType.TARGET, D(99000))
BOOKS = Books(
    positions={"BTC": D("0.5"), "ETH": D(-2)},
    legs={1: STOP, 2: TARGET},
    resting=frozenset({9}),
    unsettled=frozenset(),
    balance=D("10000.00"),
)
VENUE = VenueReport(
    positions=dict(BOOKS.positions), legs=dict(BOOKS.legs), others=frozenset({9}), balance=D("10000.00")
)


def found(books: Books = BOOKS, venue: VenueReport = VENUE) -> list[Difference]:
    return reconcile(books, venue, balance_tolerance=D("0.01"))


def kinds(books: Books = BOOKS, venue: VenueReport = VENUE) -> list[tuple[Kind, str | None]]:
    return [(one.kind, one.symbol) for one in found(books, venue)]


def held(**quantities: str) -> VenueReport:
    return replace(VENUE, positions={symbol: D(quantity) for symbol, quantity in quantities.items()})


def test_every_kind_has_a_rule() -> None:
    assert set(RULES) == set(Kind)


def test_nothing_differs_from_itself() -> None:
    assert found() == []
    assert found(venue=replace(VENUE, balance=D("10000.01"))) == []


@pytest.mark.parametrize(
    ("quantity", "kind", "action"),
    [
        ("0", Kind.GONE, Action.BOOK),
        ("0.2", Kind.SMALLER, Action.BOOK),
        ("0.6", Kind.LARGER, Action.STOP),
        ("-0.5", Kind.FLIPPED, Action.STOP),
    ],
)
def test_a_position_that_differs(quantity: str, kind: Kind, action: Action) -> None:
    difference = found(venue=held(BTC=quantity, ETH="-2"))[0]
    assert (difference.kind, difference.symbol, difference.action) == (kind, "BTC", action)
    assert is_stopped([difference]) is (action is Action.STOP)


def test_a_position_opened_by_hand_stops_the_account() -> None:
    differences = found(venue=held(BTC="0.5", ETH="-2", SOL="1"))
    assert [str(one) for one in differences] == [
        "SOL: the venue holds a position that the books do not know (books 0, venue 1): "
        "open nothing more for the account"
    ]
    assert is_stopped(differences)


def test_both_legs_go_with_their_position() -> None:
    differences = found(venue=held(ETH="-2"))
    assert [(one.kind, one.client_index, one.action) for one in differences] == [
        (Kind.GONE, None, Action.BOOK),
        (Kind.LEG_WITHOUT_POSITION, 1, Action.CANCEL),
        (Kind.LEG_WITHOUT_POSITION, 2, Action.CANCEL),
    ]


def test_legs_that_are_missing_or_elsewhere_are_brought_to_where_they_belong() -> None:
    assert kinds(venue=replace(VENUE, legs={2: TARGET})) == [(Kind.LEG_MISSING, "BTC")]
    moved = replace(STOP, trigger=D(92000))
    assert kinds(venue=replace(VENUE, legs={1: moved, 2: TARGET})) == [(Kind.LEG_ELSEWHERE, "BTC")]


def test_orders_that_are_none_of_ours_stop_the_account() -> None:
    for venue in (replace(VENUE, others=frozenset({9, 10})), replace(VENUE, legs={**VENUE.legs, 3: STOP})):
        differences = found(venue=venue)
        assert [one.kind for one in differences] == [Kind.FOREIGN_ORDER]
        assert is_stopped(differences)


def test_a_resting_order_that_the_venue_does_not_show_is_looked_up_and_booked() -> None:
    (difference,) = found(venue=replace(VENUE, others=frozenset()))
    assert (difference.kind, difference.client_index, difference.action) == (Kind.RESTING_GONE, 9, Action.BOOK)


def test_a_market_with_an_order_under_way_is_left_alone() -> None:
    books = replace(BOOKS, unsettled=frozenset({"BTC"}))
    assert kinds(books, held(BTC="-7", ETH="-2")) == [(Kind.UNDER_WAY, "BTC")]
    assert not is_stopped(found(books, held(BTC="-7", ETH="-2")))


def test_the_balance_is_compared_when_nothing_else_differs() -> None:
    poor = replace(VENUE, balance=D("9990.00"))
    assert kinds(venue=poor) == [(Kind.BALANCE, None)]
    assert kinds(venue=replace(poor, others=frozenset())) == [(Kind.RESTING_GONE, None)]
    assert Kind.BALANCE not in [kind for kind, _ in kinds(venue=replace(poor, positions={"ETH": D(-2)}))]


quantities = st.dictionaries(
    st.sampled_from(("BTC", "ETH", "SOL")), st.sampled_from([D(n) / 2 for n in range(-3, 4)]), max_size=3
)
legs = st.dictionaries(
    st.integers(1, 4),
    st.builds(
        Leg,
        st.sampled_from(("BTC", "ETH")),
        st.sampled_from((VenueOrderType.STOP, VenueOrderType.TARGET)),
        st.sampled_from((D(1), D(2))),
    ),
    max_size=3,
)
marked = st.frozensets(st.integers(10, 13), max_size=3)
books_of = st.builds(
    Books,
    positions=quantities,
    legs=legs,
    resting=marked,
    unsettled=st.frozensets(st.sampled_from(("BTC", "SOL")), max_size=1),
    balance=st.just(D(0)),
)
statements = st.builds(VenueReport, positions=quantities, legs=legs, others=marked, balance=st.just(D(0)))


@given(books_of, statements)
def test_following_the_rules_ends_in_agreement_or_in_a_stop(books: Books, venue: VenueReport) -> None:
    for _ in range(4):
        differences = found(books, venue)
        if not differences or is_stopped(differences):
            return
        books, venue = follow(books, venue, differences)
    assert found(books, venue) == []


def follow(books: Books, venue: VenueReport, differences: list[Difference]) -> tuple[Books, VenueReport]:
    """Do what the rules say, as if the venue did what it is asked and orders under way became final."""
    positions, ours, theirs = dict(books.positions), dict(books.legs), dict(venue.legs)
    gone = {one.client_index for one in differences if one.kind is Kind.RESTING_GONE}
    for one in differences:
        if one.action is Action.BOOK and one.symbol is not None:
            positions[one.symbol] = venue.positions.get(one.symbol, D(0))
        elif one.action is Action.CANCEL and one.client_index is not None:
            theirs.pop(one.client_index, None)
        elif one.action is Action.PLACE and one.client_index is not None:
            theirs[one.client_index] = ours[one.client_index]
    ours = {index: leg for index, leg in ours.items() if positions.get(leg.symbol)}
    settled = replace(books, positions=positions, legs=ours, unsettled=frozenset(), resting=books.resting - gone)
    return settled, replace(venue, legs=theirs)
