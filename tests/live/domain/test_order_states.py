"""The states of a sent order: every transition of the table, and no others."""

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from support.scripted import START

from trader.core.money import ONE
from trader.exchange.domain import venue_orders
from trader.exchange.domain.orders import Cause, OrderSide
from trader.exchange.domain.venue_orders import (
    TRANSITIONS,
    ImpossibleTransition,
    OrderEvent,
    SentOrder,
    SentStatus,
    VenueOrder,
    VenueOrderType,
    advance,
)
from trader.live.domain.orders import VenueOrderState

EXPECTED = {
    ("SENT", "REJECTED"): "REFUSED",
    ("SENT", "SHOWN"): "STANDING",
    ("SENT", "ENDED"): "DONE",
    ("STANDING", "SHOWN"): "STANDING",
    ("STANDING", "ENDED"): "DONE",
    ("STANDING", "WRITTEN_OFF"): "DONE",
}


def sent(status: SentStatus = SentStatus.SENT) -> SentOrder:
    order = VenueOrder(
        client_index=5, symbol="BTC", side=OrderSide.BUY, type=VenueOrderType.LIMIT, quantity=ONE, price=ONE
    )
    return SentOrder(
        account_id="a", run_id=UUID(int=1), order=order, cause=Cause.ORDER, status=status, expires_at=START,
        created_at=START, changed_at=START,
    )  # fmt: skip


@pytest.mark.parametrize("status", SentStatus)
@pytest.mark.parametrize("event", OrderEvent)
def test_each_pair_of_status_and_event_has_its_status_or_is_impossible(status: SentStatus, event: OrderEvent) -> None:
    expected = EXPECTED.get((status.name, event.name))
    if expected is None:
        with pytest.raises(ImpossibleTransition, match=re.escape(f"order 5 of a is {status}: {event}")):
            advance(sent(status), event)
        return
    after = advance(sent(status), event, reason="why")
    assert asdict(after) == asdict(sent(status)) | {"status": SentStatus[expected], "reason": "why"}


@given(st.lists(st.sampled_from(OrderEvent), max_size=8))
def test_no_sequence_of_events_leaves_the_table_or_a_final_status(events: list[OrderEvent]) -> None:
    order = sent()
    for event in events:
        before = order.status
        try:
            order = advance(order, event)
        except ImpossibleTransition:
            assert (before, event) not in TRANSITIONS
            assert order.status is before
        else:
            assert EXPECTED[before.name, event.name] == order.status.name
            assert not before.is_final


def test_every_status_is_reachable_and_every_open_status_can_end() -> None:
    assert {status for status in SentStatus if status.is_final} == {SentStatus.DONE, SentStatus.REFUSED}
    assert {status for status, _ in TRANSITIONS} == {status for status in SentStatus if not status.is_final}
    assert {SentStatus.SENT, *TRANSITIONS.values()} == set(SentStatus)


def test_the_diagram_names_every_status_and_event() -> None:
    drawing = (venue_orders.__doc__ or "").partition("::")[2]
    assert set(re.findall(r"[A-Z_]{4,}", drawing)) == {*SentStatus.__members__, *OrderEvent.__members__}


@pytest.mark.parametrize(
    ("is_shown", "is_final", "event"),
    [
        (True, False, OrderEvent.SHOWN),
        (True, True, OrderEvent.ENDED),
        (False, True, OrderEvent.WRITTEN_OFF),
    ],
)
def test_the_state_reported_by_a_venue_is_an_event(is_shown: bool, is_final: bool, event: OrderEvent) -> None:
    state = VenueOrderState(
        client_index=5, venue_index=9, symbol="BTC", filled=ONE, is_final=is_final, status="any", is_shown=is_shown
    )
    assert state.event is event
