"""Every difference between ledger and venue has a rule; the rules lead to agreement or stop the account."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trader.exchange.domain.venue_orders import VenueOrderType
from trader.live.domain.reconciliation import (
    RULES,
    Action,
    DifferenceKind,
    LedgerReport,
    ProtectiveOrder,
    VenueDifference,
    VenueReport,
    reconcile,
)

D = Decimal
STOP = ProtectiveOrder("BTC", VenueOrderType.STOP, D(93000), D("0.5"))
TARGET = ProtectiveOrder("BTC", VenueOrderType.TARGET, D(99000), D("0.5"))
LEDGER = LedgerReport(
    positions={"BTC": D("0.5"), "ETH": D(-2)},
    protective_orders={1: STOP, 2: TARGET},
    resting=frozenset({9}),
    unsettled=frozenset(),
    balance=D("10000.00"),
)
VENUE = VenueReport(
    positions=dict(LEDGER.positions),
    protective_orders=dict(LEDGER.protective_orders),
    others=frozenset({9}),
    balance=D("10000.00"),
)


def found(ledger: LedgerReport = LEDGER, venue: VenueReport = VENUE) -> list[VenueDifference]:
    return reconcile(ledger, venue, balance_tolerance=D("0.01"))


def kinds(ledger: LedgerReport = LEDGER, venue: VenueReport = VENUE) -> list[tuple[DifferenceKind, str | None]]:
    return [(difference.kind, difference.symbol) for difference in found(ledger, venue)]


def stops(differences: list[VenueDifference]) -> bool:
    return any(difference.action is Action.STOP for difference in differences)


def held(**quantities: str) -> VenueReport:
    return replace(VENUE, positions={symbol: D(quantity) for symbol, quantity in quantities.items()})


def test_every_kind_has_a_rule() -> None:
    assert set(RULES) == set(DifferenceKind)


def test_equal_reports_have_no_differences() -> None:
    assert found() == []
    assert found(venue=replace(VENUE, balance=D("10000.01"))) == []


@pytest.mark.parametrize(
    ("quantity", "kind", "action"),
    [
        ("0", DifferenceKind.GONE, Action.BOOK),
        ("0.2", DifferenceKind.SMALLER, Action.BOOK),
        ("0.6", DifferenceKind.LARGER, Action.BOOK),
        ("-0.5", DifferenceKind.FLIPPED, Action.BOOK),
    ],
)
def test_a_different_position_is_a_difference(quantity: str, kind: DifferenceKind, action: Action) -> None:
    difference = found(venue=held(BTC=quantity, ETH="-2"))[0]
    assert (difference.kind, difference.symbol, difference.action) == (kind, "BTC", action)
    assert stops([difference]) is (action is Action.STOP)


def test_a_position_opened_by_hand_is_to_be_booked() -> None:
    differences = found(venue=held(BTC="0.5", ETH="-2", SOL="1"))
    assert [str(difference) for difference in differences] == [
        "SOL: the venue holds a position that the books do not know (books 0, venue 1): book the venue's fills"
    ]


def test_stop_and_target_are_removed_with_their_position_once_the_books_know() -> None:
    differences = found(venue=held(ETH="-2"))
    assert [(difference.kind, difference.action) for difference in differences] == [(DifferenceKind.GONE, Action.BOOK)]
    left = found(ledger=replace(LEDGER, positions={"ETH": D(-2)}, protective_orders={}), venue=held(ETH="-2"))
    assert [(difference.kind, difference.client_index, difference.action) for difference in left] == [
        (DifferenceKind.PROTECTION_WITHOUT_POSITION, 1, Action.CANCEL),
        (DifferenceKind.PROTECTION_WITHOUT_POSITION, 2, Action.CANCEL),
    ]


def test_missing_and_misplaced_protective_orders_are_placed_again() -> None:
    assert kinds(venue=replace(VENUE, protective_orders={2: TARGET})) == [(DifferenceKind.PROTECTION_MISSING, "BTC")]
    for changed, is_found in (
        ({"trigger": D(92000)}, True),
        ({"trigger": D(93001)}, False),
        ({"quantity": D("0.4")}, True),
        ({"quantity": D(0)}, False),
    ):
        standing = {1: replace(STOP, **changed), 2: TARGET}
        found_kinds = kinds(venue=replace(VENUE, protective_orders=standing))
        assert found_kinds == [(DifferenceKind.PROTECTION_MISPLACED, "BTC")] * is_found


def test_the_child_of_an_entry_without_our_id_is_canceled_once_ours_stands() -> None:
    child = replace(STOP, is_child=True)
    (difference,) = found(venue=replace(VENUE, protective_orders={**VENUE.protective_orders, 3: child}))
    assert (difference.kind, difference.client_index) == (DifferenceKind.PROTECTION_DOUBLED, 3)
    assert DifferenceKind.PROTECTION_DOUBLED not in [
        kind for kind, _ in kinds(venue=replace(VENUE, protective_orders={2: TARGET, 3: child}))
    ]


def test_foreign_orders_stop_the_account() -> None:
    for venue in (
        replace(VENUE, others=frozenset({9, 10})),
        replace(VENUE, protective_orders={**VENUE.protective_orders, 3: STOP}),
    ):
        differences = found(venue=venue)
        assert [difference.kind for difference in differences] == [DifferenceKind.FOREIGN_ORDER]
        assert stops(differences)


def test_a_resting_order_missing_at_the_venue_is_looked_up_and_booked() -> None:
    (difference,) = found(venue=replace(VENUE, others=frozenset()))
    assert (difference.kind, difference.client_index, difference.action) == (
        DifferenceKind.RESTING_GONE,
        9,
        Action.BOOK,
    )


def test_a_market_with_a_pending_order_is_left_alone() -> None:
    ledger = replace(LEDGER, unsettled=frozenset({"BTC"}))
    assert kinds(ledger, held(BTC="-7", ETH="-2")) == [(DifferenceKind.UNDECIDED, "BTC")]
    assert not stops(found(ledger, held(BTC="-7", ETH="-2")))


def test_the_balance_is_compared_when_nothing_else_differs() -> None:
    poor = replace(VENUE, balance=D("9990.00"))
    assert kinds(venue=poor) == [(DifferenceKind.BALANCE, None)]
    assert kinds(venue=replace(poor, others=frozenset())) == [(DifferenceKind.RESTING_GONE, None)]
    assert DifferenceKind.BALANCE not in [kind for kind, _ in kinds(venue=replace(poor, positions={"ETH": D(-2)}))]


quantities = st.dictionaries(
    st.sampled_from(("BTC", "ETH", "SOL")), st.sampled_from([D(n) / 2 for n in range(-3, 4)]), max_size=3
)
protective_orders = st.dictionaries(
    st.integers(1, 4),
    st.builds(
        ProtectiveOrder,
        st.sampled_from(("BTC", "ETH")),
        st.sampled_from((VenueOrderType.STOP, VenueOrderType.TARGET)),
        st.sampled_from((D(1), D(2))),
        st.sampled_from((D(0), D(1), D(2))),
        st.booleans(),
    ),
    max_size=3,
)
marked = st.frozensets(st.integers(10, 13), max_size=3)
ledgers = st.builds(
    LedgerReport,
    positions=quantities,
    protective_orders=protective_orders,
    resting=marked,
    unsettled=st.frozensets(st.sampled_from(("BTC", "SOL")), max_size=1),
    balance=st.just(D(0)),
)
venues = st.builds(
    VenueReport, positions=quantities, protective_orders=protective_orders, others=marked, balance=st.just(D(0))
)


@given(ledgers, venues)
def test_applying_the_rules_ends_in_agreement_or_blocked_openings(ledger: LedgerReport, venue: VenueReport) -> None:
    for _ in range(4):
        differences = found(ledger, venue)
        if not differences or stops(differences):
            return
        ledger, venue = follow(ledger, venue, differences)
    assert found(ledger, venue) == []


def follow(
    ledger: LedgerReport, venue: VenueReport, differences: list[VenueDifference]
) -> tuple[LedgerReport, VenueReport]:
    """Follow the rules, as if the venue complied and pending orders became final."""
    positions, ours, theirs = dict(ledger.positions), dict(ledger.protective_orders), dict(venue.protective_orders)
    gone = {difference.client_index for difference in differences if difference.kind is DifferenceKind.RESTING_GONE}
    for difference in differences:
        if difference.action is Action.BOOK and difference.symbol is not None:
            positions[difference.symbol] = venue.positions.get(difference.symbol, D(0))
        elif difference.action is Action.CANCEL and difference.client_index is not None:
            theirs.pop(difference.client_index, None)
        elif difference.action is Action.PLACE and difference.client_index is not None:
            theirs[difference.client_index] = ours[difference.client_index]
    ours = {index: entry for index, entry in ours.items() if positions.get(entry.symbol)}
    settled = replace(
        ledger, positions=positions, protective_orders=ours, unsettled=frozenset(), resting=ledger.resting - gone
    )
    return settled, replace(venue, protective_orders=theirs)
