"""Masks: the parts they hide, and exact round trips through a mask and its inverse."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.mask import UNKNOWN, Mask
from trader.agents.domain.tools import ClosePosition, CreatePosition, PlaceOrder, PlacePair, PlannedExit
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, Side
from trader.market.domain.markets import Candle

START = datetime(2025, 3, 1, 12, tzinfo=UTC)
PRICES = {"BTC": 90_000.5, "DOGE": 0.2, "SOL": 100.0}
MASK = Mask.hiding(frozenset({"symbols", "dates", "scale"}), PRICES, START)

amounts = st.decimals(Decimal("0.00000001"), Decimal(1_000_000), places=8)
floats = st.floats(1e-6, 1e9)


@given(amounts, amounts, floats, floats, st.sampled_from(list(PRICES)))
def test_orders_and_decisions_survive_masking_and_unmasking_exactly(
    quantity: Decimal, price: Decimal, size: float, stop: float, symbol: str
) -> None:
    inverse = MASK.inverse()
    plan = ExitPlan(stop=price, target=price, invalidation="below 3", time_exit=START)
    order = Order(account_id="one", symbol=symbol, side=OrderSide.BUY, quantity=quantity, exit_plan=plan)
    assert inverse.apply(MASK.apply(order)) == order
    assert MASK.apply(order).quantity * (MASK.apply(plan, symbol).stop or 0) == quantity * price
    decision = CreatePosition(
        symbol=symbol, side=Side.LONG, quantity=size, leverage=2, stop=stop, invalidation="never", confidence=50
    )
    assert inverse.apply(MASK.apply(decision)) == decision


@given(floats, floats, floats)
def test_both_orders_of_a_pair_are_masked_by_their_own_markets(size: float, first: float, second: float) -> None:
    pair = PlacePair(
        first=PlaceOrder(symbol="BTC", side="buy", quantity=size, exit_plan=PlannedExit(stop=first)),
        second=PlaceOrder(
            symbol="SOL", side="sell", quantity=size, exit_plan=PlannedExit(stop=second, time_exit=START)
        ),
    )
    masked = MASK.apply(pair)
    assert MASK.inverse().apply(masked) == pair
    for own, hidden in zip(pair.orders, masked.orders, strict=True):
        scale = 2.0 ** MASK.powers[own.symbol]
        assert own.exit_plan is not None
        assert own.exit_plan.stop is not None
        assert hidden.exit_plan is not None
        assert (hidden.symbol, hidden.quantity) == (MASK.names[own.symbol], own.quantity / scale)
        assert hidden.exit_plan.stop == own.exit_plan.stop * scale


@pytest.mark.parametrize("symbol", PRICES)
def test_a_masked_market_has_another_name_scale_and_time_on_the_same_weekday(symbol: str) -> None:
    price = PRICES[symbol]
    candle = Candle(START, price, price, price, price, 8.0)
    masked = MASK.apply(candle, symbol)
    assert 64 <= masked.close < 256
    assert masked.close != candle.close
    assert masked.close * masked.volume == candle.close * candle.volume
    assert masked.open_time.year == 2001
    assert (masked.open_time - START) % timedelta(weeks=1) == timedelta()
    assert MASK.names[symbol] not in PRICES


@pytest.mark.parametrize("symbol", PRICES)
def test_a_price_is_masked_exactly(symbol: str) -> None:
    price = Decimal(str(PRICES[symbol]))
    masked = MASK.price(symbol, price)
    assert 64 <= masked < 256
    assert MASK.inverse().price(MASK.names[symbol], masked) == price


def test_each_part_can_be_hidden_separately() -> None:
    order = Order(account_id="one", symbol="BTC", side=OrderSide.BUY, quantity=Decimal(3), exit_plan=ExitPlan(
        time_exit=START
    ))  # fmt: skip
    symbols = Mask.hiding(frozenset({"symbols"}), PRICES, START).apply(order)
    dates = Mask.hiding(frozenset({"dates"}), PRICES, START).apply(order)
    scale = Mask.hiding(frozenset({"scale"}), PRICES, START).apply(order)
    assert (symbols.symbol, symbols.quantity, symbols.exit_plan) == ("M01", Decimal(3), order.exit_plan)
    assert (dates.symbol, dates.quantity) == ("BTC", Decimal(3))
    assert dates.exit_plan != order.exit_plan
    assert (scale.symbol, scale.quantity, scale.exit_plan) == ("BTC", Decimal(3 * 1024), order.exit_plan)


def test_a_masked_agent_trades_no_market_by_its_real_name() -> None:
    assert MASK.inverse().apply(ClosePosition(symbol="m01-perp")).symbol == "BTC"
    assert MASK.inverse().apply(ClosePosition(symbol="BTC")).symbol == UNKNOWN


def test_a_masked_exchange_text_has_no_figures_or_symbols() -> None:
    text = MASK.text("the quantity 0.00001 is below one lot of BTC (1E-5) at 2025-03-01T12:00:00.000Z")
    assert text == "the quantity … is below one lot of M01 (…) at …"
