"""Walks over a book: never more than shown, never worse than the limit, nothing twice."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st
from support.books import START, depth, levels, seconds

from trader.domain.exchange.account import Taken
from trader.domain.exchange.matching import Execution, taken_of, totals, walk
from trader.domain.exchange.orders import OrderSide
from trader.domain.market.markets import Book

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
def test_walks_take_what_is_shown_and_no_more(
    book: Book, flow: list[tuple[OrderSide, Decimal, Decimal | None]]
) -> None:
    taken = taken_of(book, None)
    met: dict[tuple[OrderSide, Decimal], Decimal] = {}
    for side, wanted, limit in flow:
        executions, taken = walk(book, side, wanted, taken, limit)
        prices = [execution.price for execution in executions]
        assert prices == sorted(set(prices), reverse=side is OrderSide.SELL)
        for price, quantity, _ in executions:
            assert quantity > 0
            assert limit is None or (limit - price) * side.direction >= 0
            met[side, price] = met.get((side, price), Decimal(0)) + quantity
        shown = book.asks if side is OrderSide.BUY else book.bids
        reachable = [level for level in shown if limit is None or (limit - level.price) * side.direction >= 0]
        assert totals(executions)[0] <= wanted
        if totals(executions)[0] < wanted:  # then nothing within reach is left
            assert all(met[side, level.price] == level.quantity for level in reachable)
    for side, shown_levels in ((OrderSide.BUY, book.asks), (OrderSide.SELL, book.bids)):
        assert all(met.get((side, level.price), 0) <= level.quantity for level in shown_levels)
        assert sum(quantity for (of, _), quantity in met.items() if of is side) <= depth(shown_levels)


def test_a_level_is_gone_until_the_next_snapshot() -> None:
    book = Book("BTC", START, levels([(100, 1)]), levels([(101, 1), (102, 1)]))
    executions, taken = walk(book, OrderSide.BUY, Decimal(1), taken_of(book, None))
    assert executions == [Execution(Decimal(101), Decimal(1))]
    assert walk(book, OrderSide.BUY, Decimal(1), taken_of(book, taken))[0][0].price == 102
    later = Book("BTC", START + seconds(1), book.bids, book.asks)
    assert walk(later, OrderSide.BUY, Decimal(1), taken_of(later, taken))[0][0].price == 101


def test_the_two_sides_of_a_book_are_taken_apart() -> None:
    book = Book("BTC", START, levels([(100, 1)]), levels([(101, 1)]))
    _, taken = walk(book, OrderSide.BUY, Decimal(1), taken_of(book, None))
    assert taken == Taken(START, {}, {Decimal(101): Decimal(1)})
    assert walk(book, OrderSide.SELL, Decimal(1), taken)[0] == [Execution(Decimal(100), Decimal(1))]


def test_the_depth_taken_is_a_value_that_no_later_walk_changes() -> None:
    book = Book("BTC", START, levels([(100, 5)]), levels([(101, 5)]))
    _, first = walk(book, OrderSide.BUY, Decimal(1), taken_of(book, None))
    walk(book, OrderSide.BUY, Decimal(1), first)
    assert first.asks == {Decimal(101): Decimal(1)}
