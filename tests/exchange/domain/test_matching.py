"""Walks over a book: never more than shown, never worse than the limit, nothing twice; and how depth recovers."""

from datetime import timedelta
from decimal import Decimal

from hypothesis import example, given
from hypothesis import strategies as st
from support.books import START, depth, levels, seconds

from trader.core.money import round_to
from trader.exchange.domain.account import TAKEN_KEPT, Take, Taken
from trader.exchange.domain.matching import Execution, gone_from, missing, totals, walk
from trader.exchange.domain.orders import OrderSide
from trader.market.domain.markets import Book

quantities = st.integers(1, 50).map(Decimal)
sides = st.lists(quantities, max_size=5)
books = st.builds(
    lambda bids, asks: Book(
        "BTC",
        START,
        levels([(100 - n, quantity) for n, quantity in enumerate(bids)]),
        levels([(101 + n, quantity) for n, quantity in enumerate(asks)]),
    ),
    sides,
    sides,
)
orders = st.lists(
    st.tuples(st.sampled_from(OrderSide), quantities, st.none() | st.integers(95, 106).map(Decimal)), max_size=8
)


@given(books, orders)
def test_walks_take_only_what_is_shown(book: Book, flow: list[tuple[OrderSide, Decimal, Decimal | None]]) -> None:
    gone = dict.fromkeys(OrderSide, Decimal(0))
    met: dict[tuple[OrderSide, Decimal], Decimal] = {}
    for side, wanted, limit in flow:
        executions = walk(book, side, wanted, gone[side], limit)
        prices = [execution.price for execution in executions]
        assert prices == sorted(set(prices), reverse=side is OrderSide.SELL)
        for price, quantity, _ in executions:
            assert quantity > 0
            assert limit is None or (limit - price) * side.direction >= 0
            met[side, price] = met.get((side, price), Decimal(0)) + quantity
        gone[side] += totals(executions)[0]
        shown = book.asks if side is OrderSide.BUY else book.bids
        reachable = [level for level in shown if limit is None or (limit - level.price) * side.direction >= 0]
        assert totals(executions)[0] <= wanted
        if totals(executions)[0] < wanted:  # then nothing is left within reach
            assert all(met[side, level.price] == level.quantity for level in reachable)
    for side, shown_levels in ((OrderSide.BUY, book.asks), (OrderSide.SELL, book.bids)):
        assert all(met.get((side, level.price), 0) <= level.quantity for level in shown_levels)
        assert sum(quantity for (of, _), quantity in met.items() if of is side) <= depth(shown_levels)


def test_missing_depth_is_missing_from_the_best_levels() -> None:
    book = Book("BTC", START, levels([(100, 1)]), levels([(101, 1), (102, 2)]))
    assert walk(book, OrderSide.BUY, Decimal(2), Decimal("1.5")) == [Execution(Decimal(102), Decimal("1.5"))]
    assert walk(book, OrderSide.BUY, Decimal(1), Decimal(9)) == []


HALF_LIFE = seconds(5)


def test_half_of_the_taken_depth_returns_after_one_half_life_and_all_after_twenty() -> None:
    takes = Taken().plus(OrderSide.BUY, Take(START, Decimal(8))).buy
    left = [missing(takes, START + seconds(after), HALF_LIFE) for after in (0, 5, 10, 99, 100)]
    assert left[:3] == [8, 4, 2]
    assert 0 < left[3] < Decimal("0.00001")
    assert left[4] == 0
    assert missing(takes, START - seconds(1), HALF_LIFE) == 0, "a book does not lack what is taken later"
    assert missing(takes, START, seconds(0)) == 0, "a venue's own book shows what is missing"


@given(st.lists(st.tuples(st.integers(0, 90_000), quantities), min_size=1, max_size=8), st.integers(0, 30_000))
def test_missing_depth_shrinks_with_time_and_never_exceeds_the_taken_depth(
    taken_at: list[tuple[int, Decimal]], later: int
) -> None:
    taken = Taken()
    for ms, quantity in sorted(taken_at):
        taken = taken.plus(OrderSide.SELL, Take(START + seconds(ms / 1000), quantity))
    last = taken.sell[-1].at
    before = missing(taken.sell, last, HALF_LIFE)
    assert taken.sell[-1].quantity <= before <= sum(quantity for _, quantity in taken_at)
    assert 0 <= missing(taken.sell, last + seconds(later / 1000), HALF_LIFE) <= before
    assert taken.buy == ()


@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 5_000, 10_000, 15_000, 99_999)) | st.integers(0, 100_000), quantities)),
    st.sampled_from(("0.1", "0.01", "0.00001", "3", "100")),
    st.integers(1, 1_000),
)
@example([(0, Decimal(3))], "0.1", 20)  # 1.5 lots, which floats take for 1.4999999999999998
def test_lots_that_are_gone_are_rounded_from_the_exact_sum(
    taken_ago: list[tuple[int, Decimal]], lot: str, parts: int
) -> None:
    """Depth is often gone by half a lot, after a half-life: rounding goes to even, on every machine."""
    at, taken = START + seconds(200), Taken()
    for ms, quantity in sorted(taken_ago, reverse=True):
        taken = taken.plus(OrderSide.BUY, Take(at - seconds(ms / 1000), quantity / parts))
    gone = gone_from(taken, OrderSide.BUY, at, HALF_LIFE, Decimal(lot))
    assert gone == round_to(missing(taken.buy, at, HALF_LIFE), Decimal(lot))


@given(st.lists(st.tuples(st.sampled_from(OrderSide), st.integers(0, 40).map(lambda n: 2 * n), quantities)))
def test_takes_of_rows_are_those_that_were_added_one_by_one(drawn: list[tuple[OrderSide, int, Decimal]]) -> None:
    takes = [(side, Take(START + timedelta(minutes=minute), quantity)) for side, minute, quantity in drawn]
    one_by_one = Taken()
    for side, take in sorted(takes, key=lambda each: each[1].at):
        one_by_one = one_by_one.plus(side, take)
    assert Taken.of_all(takes) == one_by_one


def test_takes_at_the_same_time_merge_and_old_ones_are_dropped() -> None:
    first = Taken().plus(OrderSide.BUY, Take(START, Decimal(1)))
    both = first.plus(OrderSide.BUY, Take(START, Decimal(2)))
    assert both.buy == (Take(START, Decimal(3)),)
    assert first.buy == (Take(START, Decimal(1)),)
    assert both.plus(OrderSide.BUY, Take(START + TAKEN_KEPT, Decimal(1))).buy == (Take(START + TAKEN_KEPT, Decimal(1)),)
