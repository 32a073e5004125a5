"""Booking of the venue's fills: the parts of an order, its fees, late and early funding, and foreign trades."""

from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import START

from trader.exchange.domain.account import Account, Run
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.domain.orders import Cause, Order, OrderSide, Side
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder, VenueOrderType
from trader.live.domain.ledger import book_foreign_trades, book_payments, settle
from trader.live.domain.orders import VenueFunding, VenueOrderState
from trader.market.domain.markets import MARKETS

D = Decimal
RULES = ExchangeRules(dict(MARKETS), D(0), D(0), D(0))
MARKS = {"BTC": D(100)}
HOUR = START.replace(minute=0, second=0) + timedelta(hours=1)


def account() -> Account:
    run = Run(id=UUID(int=1), number=1, initial_capital=D(10_000), quote_currency="USDT", started_at=START)
    return Account(id="a", run=run, sequence=3, changed_at=START)


def fill(number: int, quantity: str, price: str = "100", **more: object) -> VenueFill:
    fields: dict[str, object] = {
        "trade_id": number, "client_index": 5, "kind": "trade", "symbol": "BTC", "side": OrderSide.BUY,
        "quantity": D(quantity), "price": D(price), "fee_rate": D("0.0003"), "maker": False, "at": START, **more,
    }  # fmt: skip
    return VenueFill(**fields)  # type: ignore[arg-type]


def sent(**more: object) -> SentOrder:
    order = VenueOrder(
        client_index=5, symbol="BTC", side=OrderSide.BUY, type=VenueOrderType.MARKET, quantity=D(2), price=D(101)
    )
    request = Order(account_id="a", symbol="BTC", side=OrderSide.BUY, quantity=D(2), leverage=D(4))
    fields: dict[str, object] = {
        "account_id": "a", "run_id": UUID(int=1), "order": order, "cause": Cause.ORDER, "status": SentStatus.SENT,
        "expires_at": START, "created_at": START, "changed_at": START, "request_id": UUID(int=7), "request": request,
        **more,
    }  # fmt: skip
    return SentOrder(**fields)  # type: ignore[arg-type]


def state(filled: str, status: str = "filled", *, is_final: bool = True) -> VenueOrderState:
    return VenueOrderState(
        client_index=5, venue_index=900, symbol="BTC", filled=D(filled), is_final=is_final, status=status
    )  # fmt: skip


def settled(
    before: Account, order: SentOrder, shown: VenueOrderState, *fills: VenueFill, at: datetime = START
) -> Posting:
    return settle(before, order, shown, fills, MARKS, RULES, at)


def held_with_stop() -> tuple[Account, SentOrder]:
    order = VenueOrder(
        client_index=6, symbol="BTC", side=OrderSide.SELL, type=VenueOrderType.STOP, quantity=D(2), price=D(85),
        trigger=D(90), reduce_only=True,
    )  # fmt: skip
    stop = sent(order=order, cause=Cause.STOP, status=SentStatus.STANDING, request=None, request_id=None)
    return settled(account(), sent(), state("2"), fill(1, "2")).account, stop


def test_a_stop_seen_filling_that_ends_later_keeps_closing() -> None:
    held, stop = held_with_stop()
    seen = settled(held, stop, state("0.5", "open", is_final=False), fill(2, "0.5", "89", side=OrderSide.SELL))
    assert seen.account.positions["BTC"].closing is None
    ended = settled(seen.account, seen.sent[0], state("0.5", "canceled-too-much-slippage"))
    assert (ended.account.positions["BTC"].quantity, ended.account.positions["BTC"].closing) == (D("1.5"), "stop")
    assert [position.closing for position in ended.positions] == ["stop"]


@pytest.mark.parametrize("cause", [Cause.LIQUIDATION, Cause.MANUAL, Cause.ENDED])
def test_foreign_trades_are_booked_without_an_order(cause: Cause) -> None:
    held = settled(account(), sent(), state("2"), fill(1, "2")).account
    fills = [fill(2, "3", "90", side=OrderSide.SELL, kind=str(cause), cause=cause, client_index=99)]
    posting = book_foreign_trades(held, fills, [], MARKS, RULES, START)
    position = posting.account.positions["BTC"]
    assert (position.side, position.quantity, posting.trades[0].close_reason) == (Side.SHORT, D(1), cause)
    assert posting.account.realized == -20
    assert posting.fills[0].liquidation_fee == 0, "what the venue charged is the fee"
    assert posting.venue_fills[0].client_index is None


def test_a_manual_round_trip_is_booked_with_the_funding_in_between() -> None:
    fills = [fill(1, "1", at=START), fill(2, "1", "110", side=OrderSide.SELL, at=HOUR + timedelta(minutes=5))]
    payments = [VenueFunding("BTC", HOUR, D(1), D("0.001"), D("-0.1")), VenueFunding("ETH", HOUR, D(1), D(1), D(9))]
    posting = book_foreign_trades(account(), fills, payments, MARKS, RULES, HOUR + timedelta(minutes=6))
    after = posting.account
    assert (after.positions, after.realized, after.funding) == ({}, D(10), D("-0.1"))


def test_a_position_booked_late_is_funded_from_its_fill_on() -> None:
    late = account_changed(HOUR + timedelta(minutes=1))
    posting = settled(late, sent(), state("2"), fill(1, "2", at=START), at=HOUR + timedelta(minutes=2))
    payment = VenueFunding("BTC", HOUR, D(2), D("0.001"), D("-0.2"))
    funded = book_payments(posting.account, [payment], {"BTC": HOUR}, MARKS, RULES, HOUR + timedelta(minutes=3))
    assert funded is not None
    assert funded.account.funding == D("-0.2")
    again = book_payments(funded.account, [payment], {"BTC": HOUR}, MARKS, RULES, HOUR + timedelta(minutes=4))
    assert again is None


def account_changed(changed_at: datetime) -> Account:
    before = account()
    return Account(id=before.id, run=before.run, sequence=before.sequence, changed_at=changed_at)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(OrderSide)), st.integers(1, 400), st.integers(80, 120), st.integers(0, 500)),
        min_size=1,
        max_size=12,
    )
)
def test_in_any_order_of_trades_the_books_hold_their_sum_and_their_money(
    trades: list[tuple[OrderSide, int, int, int]],
) -> None:
    """Money plus positions at cost equals all payments and charges, whatever counts as closed."""
    now, quantity, paid = account(), D(0), D(0)
    for number, (side, size, price, ppm) in enumerate(trades):
        rate, amount = D(ppm) / 1_000_000, D(size) / 100
        part = fill(number, str(amount), str(price), side=side, fee_rate=rate)
        now = book_foreign_trades(now, [part], [], MARKS, RULES, START).account
        quantity += side.direction * amount
        paid += side.direction * amount * price + amount * price * rate
    held = now.positions.get("BTC")
    assert (held.side.direction * held.quantity if held is not None else D(0)) == quantity
    cost = D(0) if held is None else held.side.direction * held.entry_notional
    assert abs((now.cash - cost) - (10_000 - paid)) < D("1e-9")
