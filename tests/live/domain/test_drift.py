"""Drift: fills of the venue, simulated on the book at which their order was sent."""

from decimal import Decimal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.books import make_quote
from support.records import FILL

from trader.exchange.domain.orders import Fill, OrderSide
from trader.live.domain.drift import error_bps, simulate

D = Decimal
QUOTE = make_quote("BTC", [(99, 1), (98, 2)], [(101, 1), (102, 2)])


def fill(side: OrderSide, quantity: str, price: str, *, sequence: int = 1, maker: bool = False) -> Fill:
    return msgspec.structs.replace(
        FILL, sequence=sequence, side=side, quantity=D(quantity), price=D(price), maker=maker
    )


def test_a_fill_walks_the_book_and_a_positive_error_is_more_expensive() -> None:
    (bought,) = simulate("a", [fill(OrderSide.BUY, "2", "102.515")], QUOTE)
    assert (bought.paper_price, bought.drift_bps) == (D("101.5"), D(100))
    (sold,) = simulate("a", [fill(OrderSide.SELL, "2", "97.515")], QUOTE)
    assert (sold.paper_price, sold.drift_bps) == (D("98.5"), D(100))
    (better,) = simulate("a", [fill(OrderSide.SELL, "1", "99.99")], QUOTE)
    assert better.drift_bps == D(-100)


def test_later_fills_of_an_order_meet_the_rest_of_the_book() -> None:
    fills = [fill(OrderSide.BUY, "1", "101"), fill(OrderSide.BUY, "1", "102", sequence=2)]
    assert [drift.paper_price for drift in simulate("a", fills, QUOTE)] == [D(101), D(102)]
    (late,) = simulate("a", fills[1:], QUOTE, filled_before=D(1))
    assert late.paper_price == D(102)


def test_a_book_too_shallow_for_the_order_gives_no_price() -> None:
    (thin,) = simulate("a", [fill(OrderSide.BUY, "3.5", "103")], QUOTE)
    assert (thin.paper_price, thin.drift_bps) == (None, None)
    (beyond,) = simulate("a", [fill(OrderSide.BUY, "2", "101")], QUOTE, limit=D(101))
    assert beyond.paper_price is None
    (blind,) = simulate("a", [fill(OrderSide.BUY, "1", "101")], None)
    assert (blind.paper_price, blind.quoted_at) == (None, None)


def test_a_maker_fills_at_its_limit() -> None:
    (rested,) = simulate("a", [fill(OrderSide.BUY, "1", "95", maker=True)], QUOTE, limit=D(95))
    assert (rested.paper_price, rested.drift_bps) == (D(95), D(0))


@given(
    st.sampled_from(OrderSide),
    st.lists(st.decimals(min_value="0.01", max_value="0.9", places=2), min_size=1, max_size=3),
)
@example(OrderSide.BUY, [D("0.9")] * 3)
def test_fills_at_the_prices_of_the_book_have_no_error(side: OrderSide, quantities: list[Decimal]) -> None:
    """The book has one unit at its best price and two units at the next: the prices are computed here, by hand."""
    best, next_best = (D(101), D(102)) if side is OrderSide.BUY else (D(99), D(98))
    fills, gone = [], D(0)
    for number, quantity in enumerate(quantities):
        at_best = min(quantity, max(1 - gone, D(0)))
        price = (at_best * best + (quantity - at_best) * next_best) / quantity
        fills.append(fill(side, str(quantity), str(price), sequence=number))
        gone += quantity
    assert [drift.drift_bps for drift in simulate("a", fills, QUOTE)] == [0] * len(fills)


@given(st.decimals(min_value=1, max_value=10_000, places=2), st.decimals(min_value=1, max_value=10_000, places=2))
def test_a_higher_price_is_worse_for_a_buyer_and_better_for_a_seller(venue: Decimal, paper: Decimal) -> None:
    expected = float(venue / paper - 1) * 10_000
    assert float(error_bps(OrderSide.BUY, venue, paper)) == pytest.approx(expected, rel=1e-12, abs=1e-4)
    assert float(error_bps(OrderSide.SELL, venue, paper)) == pytest.approx(-expected, rel=1e-12, abs=1e-4)
