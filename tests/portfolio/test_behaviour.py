"""The excursions of a trade, from its fills and the candles within it."""

from decimal import Decimal

import msgspec
import pytest
from support.records import FILL, MINUTE, make_position

from trader.exchange.domain.orders import Side
from trader.exchange.sql.trades import WholeTrade
from trader.market.candles import Extremes
from trader.portfolio.behaviour import TradeExcursion, excursion_of

CANDLES = Extremes(95.0, 108.0, MINUTE)


@pytest.mark.parametrize(
    ("side", "prices", "extremes", "expected"),
    [
        (Side.LONG, (100, 104), CANDLES, TradeExcursion(95.0, 108.0, -5.0, 8.0)),
        (Side.SHORT, (100, 104), CANDLES, TradeExcursion(95.0, 108.0, -8.0, 5.0)),
        (Side.LONG, (100, 104), None, TradeExcursion(100.0, 104.0, 0.0, 4.0)),
        (Side.LONG, (), None, TradeExcursion(100.0, 100.0, 0.0, 0.0)),
    ],
)
def test_the_excursion_of_a_trade_counts_its_fills_and_candles_in_percent_of_the_entry(
    side: Side, prices: tuple[int, ...], extremes: Extremes | None, expected: TradeExcursion
) -> None:
    position = msgspec.structs.replace(make_position(entry="100"), side=side)
    whole = WholeTrade(
        "ax", position, [msgspec.structs.replace(FILL, price=Decimal(price)) for price in prices], None, None
    )
    assert excursion_of(whole, extremes) == expected
