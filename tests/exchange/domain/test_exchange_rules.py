"""Rules of markets, orders and fills, one test each, with numbers that can be checked by hand."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.books import deep_quote
from support.paper_bench import BUY, SELL, D, PaperBench, eth, prices

from trader.exchange.domain.orders import OrderSide, OrderStatus

# --- markets ----------------------------------------------------------------------------------------------------------


def test_quantities_are_rounded_down_to_the_lot() -> None:
    answer = PaperBench().order(BUY, "1.00019")
    assert (answer.requested_quantity, answer.total_quantity, answer.status) == (D("1.00019"), D("1.0001"), "filled")


@pytest.mark.parametrize(("side", "asked", "booked"), [(BUY, "1900.019", "1900.01"), (SELL, "2100.011", "2100.02")])
def test_limit_prices_are_rounded_to_the_tick_on_the_passive_side(side: OrderSide, asked: str, booked: str) -> None:
    desk = PaperBench()
    desk.order(side, "1", limit=asked)
    assert desk.account.resting[0].limit_price == D(booked)


def test_less_than_one_lot_is_rejected() -> None:
    answer = PaperBench(10_000, deep_quote("BTC", 9_000_000)).order(BUY, "0.0000099", symbol="BTC")
    assert answer.status is OrderStatus.REJECTED
    assert "below one lot" in str(answer.reason)


def test_less_than_the_minimum_notional_is_rejected() -> None:
    desk = PaperBench()
    assert "below the minimum" in str(desk.order(BUY, "0.0049").reason)
    assert desk.order(BUY, "0.005").status is OrderStatus.FILLED


def test_a_limit_below_one_tick_is_rejected_rather_than_ignored() -> None:
    answer = PaperBench().order(BUY, "1", limit="0.001")
    assert answer.status is OrderStatus.REJECTED
    assert "below one tick" in str(answer.reason)


def test_a_reduce_only_order_may_close_the_whole_position_however_small() -> None:
    desk = PaperBench()
    desk.order(BUY, "0.005")
    desk.eth(100)
    assert desk.order(SELL, "0.0049", reduce_only=True).status is OrderStatus.REJECTED
    assert desk.order(SELL, "0.005", reduce_only=True).status is OrderStatus.FILLED
    assert not desk.account.positions


# --- orders and fills -------------------------------------------------------------------------------------------------


def test_a_market_order_walks_the_opposite_side_level_by_level() -> None:
    answer = PaperBench(10_000, eth([(1999, 5)], [(2001, 1), (2002, 1), (2005, 9)])).order(BUY, "2.5")
    assert prices(answer) == [(D(2001), D(1)), (D(2002), D(1)), (D(2005), D("0.5"))]
    assert answer.average_price == D("2002.2")


def test_the_unfilled_part_of_a_market_order_is_canceled() -> None:
    desk = PaperBench(10_000, eth([(1999, 5)], [(2001, 1)]))
    answer = desk.order(BUY, "2")
    assert (answer.status, answer.total_quantity) == (OrderStatus.PARTIAL, D(1))
    assert not desk.account.resting


def test_a_crossing_limit_order_takes_up_to_its_limit_and_rests_the_remainder() -> None:
    desk = PaperBench(10_000, eth([(1999, 5)], [(2001, 1), (2002, 1), (2003, 9)]))
    answer = desk.order(BUY, "3", limit="2002")
    assert prices(answer) == [(D(2001), D(1)), (D(2002), D(1))]
    assert (answer.status, answer.total_fees) == (OrderStatus.RESTING, D(4003) * D("0.0005"))
    assert [(o.remaining, o.quantity, o.id) for o in desk.account.resting] == [(D(1), D(3), answer.id)]


def test_a_resting_order_fills_as_maker_at_its_limit_once_a_later_book_trades_through_it() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", limit="1990")
    assert desk.tick(eth([(1990, 5)], [("1990.01", 5)])) is None
    posting = desk.tick(eth([(1979, 5)], [(1980, 5)]))
    assert posting is not None
    (fill,) = posting.fills
    assert (fill.price, fill.quantity, fill.maker, fill.fee) == (D(1990), D(1), True, D(1990) * D("0.0002"))
    assert posting.resting[0].status == "FILLED"


@pytest.mark.parametrize(("side", "limit", "best"), [(BUY, "2000.01", "ask"), (SELL, "1999.99", "bid")])
def test_a_post_only_order_rests_or_is_refused_but_never_takes(side: OrderSide, limit: str, best: str) -> None:
    desk = PaperBench()
    answer = desk.order(side, "1", limit=limit, post_only=True)
    refusal = f"post-only: a {side} at {limit} would take from the book, whose best {best} is {limit}"
    assert (answer.status, answer.reason) == (OrderStatus.REJECTED, refusal)
    passive = str(D(limit) - side.direction * D("0.01"))
    assert desk.order(side, "1", limit=passive, post_only=True).status is OrderStatus.RESTING
    assert not desk.account.fees


def test_with_touch_a_resting_order_fills_in_full_once_the_mark_is_at_its_limit() -> None:
    desk = PaperBench(limit_fills="touch")
    desk.order(BUY, "2", limit="1990")
    assert desk.tick(eth([("1989.99", 5)], [("1990.03", 5)])) is None
    assert desk.tick(eth([("1989.99", 1)], [("1990.01", 1)])) is not None
    assert (desk.position.quantity, desk.position.entry_price) == (D(2), D(1990))


def test_with_queue_a_resting_order_waits_for_the_quantity_ahead_of_it() -> None:
    desk = PaperBench(limit_fills="queue")
    desk.tick(eth([(1990, 3)], [(1991, 5)]))
    desk.order(BUY, "2", limit="1990")
    assert desk.account.resting[0].ahead == 3
    posting = desk.tick(eth([(1988, 5)], [(1989, 1), (1990, 1)]))
    assert posting is not None
    assert not posting.fills
    assert (desk.account.resting[0].ahead, desk.account.resting[0].remaining) == (D(1), D(2))
    desk.tick(eth([(1988, 5)], [(1990, "1.5")]))
    assert (desk.position.quantity, desk.account.resting[0].ahead) == (D("0.5"), D(0))
    desk.tick(eth([(1988, 5)], [(1990, 9)]))
    assert (desk.position.quantity, desk.position.entry_price) == (D(2), D(1990))
    assert not desk.account.resting


def test_the_best_opposite_price_at_the_limit_is_enough() -> None:
    desk = PaperBench()
    desk.order(SELL, "1", limit="2010")
    assert desk.tick(eth([(2010, 5)], [(2011, 5)])) is not None
    assert desk.position.entry_price == 2010


def test_a_resting_order_fills_up_to_the_quantity_shown_at_or_beyond_its_limit() -> None:
    desk = PaperBench()
    desk.order(BUY, "2", limit="1990")
    desk.tick(eth([(1980, 5)], [(1989, "0.3"), (1990, "0.4"), (1991, 50)]))
    assert (desk.position.quantity, desk.account.resting[0].remaining) == (D("0.7"), D("1.3"))


def test_the_best_price_fills_first_then_the_oldest() -> None:
    desk = PaperBench()
    worse, first, second = (desk.order(BUY, "1", limit=limit).id for limit in ("1989", "1990", "1990"))
    posting = desk.tick(eth([(1970, 5)], [(1980, "1.5")]))
    assert posting is not None
    assert [(fill.request_id, fill.quantity) for fill in posting.fills] == [(first, D(1)), (second, D("0.5"))]
    assert worse in {order.id for order in desk.account.resting}


def test_a_resting_order_reserves_quantity_times_limit_over_leverage() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", limit="1990", leverage=5)
    assert (desk.reserved, desk.available) == (D(398), D(9_602))


def test_a_reducing_order_reserves_nothing() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.order(SELL, "1", limit="2100", reduce_only=True)
    desk.order(SELL, "1.5", limit="2200")
    assert desk.reserved == D("0.5") * 2200


def test_resting_orders_can_reduce_a_position_only_once() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.order(SELL, "1", limit="2100")
    desk.order(SELL, "1", limit="2200")
    assert desk.reserved == 2_200


def test_resting_quantity_beyond_the_position_needs_margin_even_if_each_order_alone_would_reduce() -> None:
    desk = PaperBench(10_000)
    desk.order(BUY, "4")
    assert desk.order(SELL, "4", limit="2100").status is OrderStatus.RESTING
    refused = desk.order(SELL, "4", limit="2200")  # would open a short of 8,800 on an available 1,996
    assert refused.status is OrderStatus.REJECTED
    assert "insufficient margin" in str(refused.reason)
    assert desk.order(SELL, "4", limit="2200", reduce_only=True).status is OrderStatus.RESTING
    assert desk.order(SELL, "4", limit="2200", leverage=10).status is OrderStatus.RESTING
    assert desk.available > 0


def test_taken_depth_recovers_with_the_half_life_rather_than_with_the_next_book() -> None:
    book = eth([(1999, 5)], [(2001, 1), (2003, 1)])
    desk = PaperBench(10_000, book)
    assert prices(desk.order(BUY, "1")) == [(D(2001), D(1))]
    assert prices(desk.order(BUY, "1")) == [(D(2003), D(1))]
    assert desk.order(BUY, "1").status is OrderStatus.REJECTED
    desk.tick(book, after=timedelta(seconds=5))
    assert prices(desk.order(BUY, "2")) == [(D(2003), D(1))], "half of 2 is missing, starting at the best level"
    desk.tick(book, after=timedelta(seconds=100))
    assert prices(desk.order(BUY, "1")) == [(D(2001), D(1))]
    assert prices(desk.order(SELL, "1")) == [(D(1999), D(1))], "the other side was never touched"


def test_a_reset_does_not_restore_taken_depth() -> None:
    desk = PaperBench(10_000, eth([(1999, 5)], [(2001, 1)]))
    desk.order(BUY, "1")
    desk.reset()
    assert desk.order(BUY, "1").status is OrderStatus.REJECTED


def test_maker_fills_take_depth_too() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", limit="1990")
    desk.tick(eth([(1970, 5)], [(1980, "1.2"), (2100, 5)]))
    assert prices(desk.order(BUY, "1", limit="2000")) == [(D(1980), D("0.2"))]


def test_accounts_never_affect_each_other() -> None:
    first, second = (
        PaperBench(10_000, eth([(1999, 5)], [(2001, 1)])),
        PaperBench(10_000, eth([(1999, 5)], [(2001, 1)])),
    )
    second.moment = first.moment
    assert prices(first.order(BUY, "1")) == prices(second.order(BUY, "1"))


def test_the_fee_is_charged_per_fill() -> None:
    desk = PaperBench(10_000, eth([(1999, 5)], [(2001, 1), (2002, 1)]))
    answer = desk.order(BUY, "2")
    assert [fill.fee for fill in answer.fills] == [D("1.0005"), D("1.001")]
    assert desk.account.cash == D(10_000) - D("2.0015")


def test_reduce_only_never_opens() -> None:
    answer = PaperBench().order(BUY, "1", reduce_only=True)
    assert (answer.status, answer.fills) == (OrderStatus.REJECTED, ())


def test_reduce_only_never_flips_and_is_capped_at_the_position() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    answer = desk.order(SELL, "5", reduce_only=True)
    assert (answer.status, answer.total_quantity, answer.requested_quantity) == (OrderStatus.FILLED, D(1), D(5))
    assert not desk.account.positions


def test_a_resting_reduce_only_order_with_nothing_left_to_reduce_is_canceled() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.order(SELL, "1", limit="2100", reduce_only=True)
    desk.order(SELL, "1")
    assert not desk.account.resting
    assert desk.postings[-1].resting[0].cancel_reason == "nothing is left to reduce"


def test_two_reduce_only_orders_close_one_position_once() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    for limit in ("2100", "2101"):
        desk.order(SELL, "1", limit=limit, reduce_only=True)
    desk.eth(2_200)
    assert (desk.account.positions, desk.account.resting) == ({}, ())


def test_an_opposite_order_closes_first_and_opens_the_rest() -> None:
    desk = PaperBench(10_000, eth([(1999, 2), (1998, 2)], [(2001, 1)]))
    opened = desk.order(BUY, "1")
    answer = desk.order(SELL, "3", leverage=2)
    assert prices(answer) == [(D(1999), D(1)), (D(1999), D(1)), (D(1998), D(1))]
    assert answer.realized_pnl == -2
    (trade,) = desk.postings[-1].trades
    assert (trade.gross_pnl, trade.parent_id, trade.fees) == (D(-2), None, D("1.0005") + D("0.9995"))
    assert (desk.position.side, desk.position.quantity, desk.position.entry_notional) == ("SHORT", D(2), D(3997))
    assert (desk.position.fees, desk.position.margin) == (D(3997) * D("0.0005"), D("1998.5"))
    assert desk.position.id not in {opened.id, answer.id, trade.id}


def test_an_addition_averages_the_entry_price_by_quantity() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.eth(1_000)
    desk.order(BUY, "3")
    assert desk.position.entry_price == (D("2000.01") + 3 * D("1000.01")) / 4


def test_leverage_given_with_an_addition_applies_to_the_added_part() -> None:
    desk = PaperBench(10_000, eth([(1999, 9)], [(2000, 9)]))
    desk.order(BUY, "1", leverage=10)
    desk.order(BUY, "1")
    assert (desk.position.margin, desk.position.leverage) == (D(2200), D("1.8181818181818182"))


def test_a_partial_close_splits_off_its_share_of_fees_and_funding() -> None:
    desk = PaperBench(10_000, eth([(2000, 9)], [(2000, 9)]))
    desk.order(BUY, "4")
    desk.eth(2_000, timedelta(hours=1))
    desk.tick(eth([(2000, 9)], [(2000, 9)]))
    desk.order(SELL, "1")
    (trade,) = desk.postings[-1].trades
    assert trade.parent_id == desk.position.id != trade.id
    assert trade.fees == 1 + 1
    assert trade.funding == D(-2000) * D("0.0000125")
    assert (desk.position.fees, desk.position.funding) == (D(3), D(-6000) * D("0.0000125"))


@given(
    quantity=st.integers(0, 300).map(lambda power: f"1e{power}"),
    price=st.integers(0, 300).map(lambda power: f"1e{power}"),
    side=st.sampled_from(OrderSide),
    reduce_only=st.booleans(),
)
def test_an_order_of_any_size_is_answered(quantity: str, price: str, side: OrderSide, reduce_only: bool) -> None:
    bench = PaperBench()
    bench.order(OrderSide.BUY, "1")
    cash = bench.account.cash
    answer = bench.order(side, quantity, limit=price, reduce_only=reduce_only)
    assert answer.status in OrderStatus
    if answer.status is OrderStatus.REJECTED:
        assert answer.reason
        assert bench.account.cash == cash


# --- pairs ------------------------------------------------------------------------------------------------------------


def two_markets(capital: int = 10_000) -> PaperBench:
    return PaperBench(capital, eth([(1999, 5)], [(2001, 3)]), deep_quote("SOL", 100))


def test_a_pair_is_two_orders_in_one_posting() -> None:
    desk = two_markets()
    bought, sold = desk.pair((BUY, "2", "ETH"), (SELL, "40", "SOL"))
    assert (bought.status, sold.status) == (OrderStatus.FILLED, OrderStatus.FILLED)
    assert {symbol: position.side for symbol, position in desk.account.positions.items()} == {
        "ETH": "LONG", "SOL": "SHORT",
    }  # fmt: skip
    (posting,) = desk.postings
    assert (posting.sequence_before, posting.account) == (0, desk.account)
    assert [fill.request_id for fill in posting.fills] == [bought.id, sold.id]
    assert [fill.sequence for fill in posting.fills] == sorted(fill.sequence for fill in posting.fills)


def test_a_pair_closes_one_position_and_opens_another_with_its_margin() -> None:
    desk = two_markets(4_100)
    desk.order(BUY, "2")
    assert "insufficient margin" in str(desk.order(SELL, "30", symbol="SOL").reason)
    desk.pair((SELL, "2", "ETH"), (SELL, "30", "SOL"))
    assert list(desk.account.positions) == ["SOL"]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((BUY, "3.5", "ETH"), (SELL, "1", "SOL"), "first (buy 3.5 ETH) cannot be filled: the book has only 3 ETH"),
        ((SELL, "1", "SOL"), (BUY, "9", "ETH"), "second (buy 9 ETH) cannot be filled: the book has only 3 ETH"),
        ((BUY, "2", "ETH"), (BUY, "2", "ETH"), "second (buy 2 ETH) cannot be filled: the book has only 1 ETH"),
        (
            (BUY, "3", "ETH"),
            (BUY, "2", "ETH"),
            "second (buy 2 ETH) cannot be filled: the ETH book shows nothing",
        ),
        ((BUY, "1", "ETH"), (SELL, "900", "SOL"), "second (sell 900 SOL) cannot be filled: insufficient margin: "),
    ],
)
def test_neither_order_of_a_pair_is_placed_if_one_cannot_be_filled(
    first: tuple[OrderSide, str, str], second: tuple[OrderSide, str, str], reason: str
) -> None:
    desk = two_markets()
    before = desk.account
    answers = desk.pair(first, second)
    assert {answer.status for answer in answers} == {OrderStatus.REJECTED}
    assert len({answer.id for answer in answers}) == 2
    for answer in answers:
        assert str(answer.reason).startswith(f"neither order of the pair is placed; the {reason}")
    assert replace(desk.account, sequence=0, last_order_at=None) == replace(before, sequence=0, last_order_at=None)
    assert (desk.account.sequence, desk.postings[-1].fills) == (before.sequence + 2, [])


def test_a_pair_in_one_market_writes_each_row_once() -> None:
    desk = two_markets()
    desk.pair((BUY, "2", "ETH"), (SELL, "2", "ETH"))
    (posting,) = desk.postings
    assert (posting.positions, len(posting.trades), desk.account.positions) == ([], 1, {})
    desk.pair((SELL, "1", "ETH"), (BUY, "1", "ETH"))
    assert len({trade.id for posting in desk.postings for trade in posting.trades}) == 2
