"""Protective orders: the terms that an exit plan requires, and the worst price of a market order."""

from decimal import Decimal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import START, make_book

from trader.core.money import format_decimal, round_to
from trader.exchange.domain.account import Account, Position, Run
from trader.exchange.domain.orders import ExitPlan, OrderSide, Side
from trader.exchange.domain.venue_orders import VenueOrderType
from trader.live.domain.protective_orders import (
    ProtectiveTerms,
    reachable_price,
    terms_of_account,
    terms_of_plan,
    worst_price,
)
from trader.market.domain.markets import MARKETS, Quote

D = Decimal
BTC = MARKETS["BTC"]
PLAN = ExitPlan(stop=D("90000.06"), target=D(99000), invalidation_price=D(91000), time_exit=START)


def position(side: Side = Side.LONG, **more: object) -> Position:
    fields: dict[str, object] = {
        "id": UUID(int=1), "symbol": "BTC", "side": side, "quantity": D("0.5"), "entry_notional": D(47_000),
        "margin": D(47_000), "opened_at": START, "funded_until": START, "exit_plan": PLAN, **more,
    }  # fmt: skip
    return Position(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("side", "closing"), [(Side.LONG, OrderSide.SELL), (Side.SHORT, OrderSide.BUY)])
def test_stop_and_target_cover_the_whole_position_on_the_tick(side: Side, closing: OrderSide) -> None:
    assert terms_of_plan(position(side), PLAN, BTC) == [
        ProtectiveTerms("BTC", VenueOrderType.STOP, closing, D("0.5"), D("90000.1")),
        ProtectiveTerms("BTC", VenueOrderType.TARGET, closing, D("0.5"), D("99000.0")),
    ]


def test_a_plan_without_a_price_on_the_tick_needs_no_order() -> None:
    assert terms_of_plan(position(), ExitPlan(invalidation_price=D(1)), BTC) == []
    assert terms_of_plan(position(), ExitPlan(stop=D("0.04")), BTC) == []


def test_a_closing_or_undecided_position_needs_no_order() -> None:
    run = Run(id=UUID(int=1), number=1, initial_capital=D(10_000), quote_currency="USDT", started_at=START)

    def wanted(held: Position, *busy: str) -> int:
        account = Account(id="a", run=run, sequence=1, changed_at=START, positions={"BTC": held})
        return len(terms_of_account(account, dict(MARKETS), busy))

    assert (wanted(position()), wanted(position(closing="stop")), wanted(position(), "BTC")) == (2, 0, 0)
    assert wanted(position(), "ETH") == 2


@given(
    st.sampled_from(list(OrderSide)),
    st.decimals("0.2", "1000000", places=1),
    st.decimals("0", "0.3", places=3),
)
def test_the_worst_price_is_on_the_tick_within_the_slippage_and_not_better_than_the_price(
    side: OrderSide, price: Decimal, slippage: Decimal
) -> None:
    worst = worst_price(side, price, slippage, BTC)
    assert worst > 0
    assert worst % BTC.tick == 0
    assert (worst - price) * side.direction >= 0 or worst == BTC.tick
    assert abs(worst - price) <= price * slippage, "never outside of the venue's band"


@given(st.decimals("100", "900000", places=1), st.decimals("-0.1", "0.1", places=3), st.sampled_from(list(OrderSide)))
def test_a_closing_market_order_stays_within_the_band_around_mark_and_book(
    best: Decimal, away: Decimal, side: OrderSide
) -> None:
    quote = Quote("BTC", START, best, best + BTC.tick, best * (1 + away), lambda: make_book("BTC", best, START))
    limit = reachable_price(side, quote, closes=True, market=BTC)
    if side is OrderSide.BUY:
        assert limit <= D("1.05") * min(quote.mark, quote.ask)
    else:
        assert limit >= D("0.95") * max(quote.mark, quote.bid)


@given(
    digits=st.integers(1, 10**9), exponent=st.integers(-9, 2), decimals=st.integers(0, 5),
    side=st.sampled_from(OrderSide), slippage=st.sampled_from((D("0.01"), D("0.05"))),
)  # fmt: skip
def test_prices_follow_a_rule_of_significant_figures(
    digits: int, exponent: int, decimals: int, side: OrderSide, slippage: Decimal
) -> None:
    tick, price = D(1).scaleb(decimals - 6), D(digits).scaleb(exponent)
    market = msgspec.structs.replace(MARKETS["BTC"], tick=tick, figures=5)
    worst = worst_price(side, price, slippage, market)
    rounded = round_to(price, market.tick_at(price))
    for each in filter(None, (worst, rounded)):
        plain = format_decimal(each)
        assert each % tick == 0, "too many decimals"
        assert "." not in plain or len(plain.replace(".", "").lstrip("0")) <= 5, plain
    if worst > tick:
        assert side.direction * (price * (1 + side.direction * slippage) - worst) >= 0, "never worse than allowed"
    assert abs(rounded - price) <= market.tick_at(price) / 2
