"""Derived books: valid at every price and in every market, and wider and thinner as the price moves more."""

from datetime import UTC, datetime
from decimal import Decimal
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.market_fidelity import cost_bp

from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS, Quote
from trader.market.sources.books import BookModel, Grid, TrailingDay, stress, stress_after
from trader.market.sources.files import FileRow, Minutes

AT = datetime(2025, 1, 6, tzinfo=UTC)
LEVELS = {symbol: row.character.level for symbol, row in SIMULATED_MARKETS.items()}

symbols = st.sampled_from(tuple(LEVELS))
scales = st.floats(0.05, 20)
tensions = st.floats(0.5, 100)


def quote_of(symbol: str, tension: float, *, scale: float = 1.0, busyness: float = 1.0) -> Quote:
    row = SIMULATED_MARKETS[symbol]
    grid = Grid(row.rules)
    return BookModel(grid, row.calm).quote(AT, grid.nearest(LEVELS[symbol] * scale), tension, busyness)


def near_depth(quote: Quote, bp: int) -> Decimal:
    """The quantity offered within `bp` basis points of the mid."""
    return sum(
        (level.quantity for level in quote.book.asks if level.price <= quote.mark * (1 + Decimal(bp) / 10_000)),
        Decimal(0),
    )


@given(symbols, scales, tensions, st.floats(0, 50))
def test_a_book_is_never_crossed_and_its_levels_are_ordered(
    symbol: str, scale: float, tension: float, busyness: float
) -> None:
    market, quote = MARKETS[symbol], quote_of(symbol, tension, scale=scale, busyness=busyness)
    bids, asks = ([level.price for level in side] for side in (quote.book.bids, quote.book.asks))
    assert (quote.bid, quote.ask) == (bids[0], asks[0])
    assert quote.bid < quote.mark < quote.ask
    assert (quote.bid + quote.ask) / 2 == quote.mark
    assert bids == sorted(set(bids), reverse=True)
    assert asks == sorted(set(asks))
    assert all(price > 0 and price % market.tick == 0 for price in bids + asks)
    assert all(level.quantity > 0 and level.quantity % market.lot == 0 for level in quote.book.bids + quote.book.asks)
    plain = Quote(symbol, AT, quote.bid, quote.ask, quote.mark, lambda: quote.book)
    assert quote.imbalance == plain.imbalance, "known without the book"


@given(symbols, tensions, tensions, st.sampled_from((2, 5, 20, 80)))
def test_more_stress_never_narrows_or_deepens_a_book(symbol: str, first: float, second: float, bp: int) -> None:
    less, more = (quote_of(symbol, tension) for tension in sorted((first, second)))
    tick = MARKETS[symbol].tick
    assert more.ask - more.bid >= less.ask - less.bid - tick  # the mid decides whether it is even or odd
    lots = 12 * MARKETS[symbol].lot
    assert near_depth(more, bp) <= near_depth(less, bp) * Decimal("1.35") + lots  # a level may enter the range


@given(symbols, st.floats(0, 50, exclude_min=True), st.floats(0, 50, exclude_min=True))
def test_volume_deepens_a_book_within_limits(symbol: str, first: float, second: float) -> None:
    less, more = (near_depth(quote_of(symbol, 1.0, busyness=busyness), 80) for busyness in sorted((first, second)))
    assert less <= more <= less * Decimal("3.01")


@given(symbols, tensions)
def test_half_a_million_is_filled_at_a_price_that_grows_with_the_amount(symbol: str, tension: float) -> None:
    quote = quote_of(symbol, tension)
    costs = [round(cost_bp(quote.book.asks, float(quote.mark), amount), 6) for amount in (1e3, 2e4, 1e5, 5e5)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


@given(st.integers(0, 10**5), st.integers(0, 10**5), st.floats(1e-6, 0.1))
def test_stress_grows_with_the_move_and_is_bounded(last_15: int, more: int, usual_range: float) -> None:
    calmer = stress(last_15, last_15 + more, 2_000_000, usual_range)
    wilder = stress(last_15 + more, last_15 + 2 * more, 2_000_000, usual_range)
    assert 0.5 <= calmer <= wilder <= 100
    assert stress(last_15, last_15 + more, 2_000_000, 0.0) == 1.0


@pytest.mark.parametrize(
    ("moves", "is_thinnest"),
    [
        ((0, 0, 0, 0, 0, -100), True),
        ((0, -20, -20, -20, -20, -20), True),
        ((0, 20, 20, 20, 20, 20), True),
        ((0, 0, 0, 0, 0, 99), False),
        ((-19, -20, -20, -20, -20), False),
        ((-100, 0, 0, 0, 0, 0, 0), False),
        ((), False),
    ],
)
def test_a_running_price_has_its_thinnest_book_until_it_stands_still(moves: tuple[int, ...], is_thinnest: bool) -> None:
    marks = list(accumulate(moves, initial=10_000))
    assert (stress_after(marks, 0.02) == 100) is is_thinnest


@given(symbols, tensions, st.floats(0, 2))
def test_no_side_is_ever_empty_and_a_book_where_nothing_traded_is_the_thinnest(
    symbol: str, tension: float, busyness: float
) -> None:
    usual, paused = quote_of(symbol, tension, busyness=busyness), quote_of(symbol, tension, busyness=0.0)
    assert usual.book.bids
    assert usual.book.asks
    assert paused.ask - paused.bid >= usual.ask - usual.bid
    assert sum(level.quantity for level in paused.book.bids) <= sum(level.quantity for level in usual.book.bids)


def test_a_minute_without_volume_and_the_first_one_after_a_pause_have_traded_nothing() -> None:
    minutes = Minutes()
    for number, volume in ((0, 4.0), (1, 4.0), (2, 0.0), (3, 4.0), (4, 4.0), (2_884, 4.0), (2_885, 4.0)):
        minutes.append(FileRow(number, 100.0, 101.0, 100.0, 100.0, volume))
    day = TrailingDay(0.01, minutes)
    assert [place for place in range(7) if not day.busyness(place)] == [2, 3, 5]


def test_the_usual_minute_comes_from_the_previous_day() -> None:
    minutes = Minutes()
    for number in range(3_000):
        high = 101.0 if number < 1_500 else 102.0
        minutes.append(FileRow(number, 100.0, high, 100.0, 100.0, 4.0 if number % 2 else 16.0))
    day = TrailingDay(0.01, minutes)
    assert day.usual_range(0) == 0
    assert day.busyness(0) == 1
    assert day.usual_range(1) == pytest.approx(0.01)
    assert day.usual_range(1_500) == pytest.approx(0.01)
    assert day.usual_range(1_501) > 0.01
    assert day.usual_range(2_940) == pytest.approx(0.02)
    assert day.busyness(2_001) == pytest.approx(4 / 3)
    assert day.busyness(2_002) == pytest.approx(2 / 3)
