"""The excursions of a trade, from its fills and the candles within it."""

from decimal import Decimal

import msgspec
import pytest
from support.records import FILL, MINUTE, make_position

from trader.api.schemas.common import UNSET
from trader.api.schemas.trades import Excursion
from trader.exchange.domain.orders import Side
from trader.exchange.sql.trades import WholeTrade
from trader.market.candles import Extremes

CANDLES = Extremes(95.0, 108.0, MINUTE)


@pytest.mark.parametrize(
    ("side", "prices", "extremes", "expected"),
    [
        (Side.LONG, (100, 104), CANDLES, (95.0, 108.0, -5.0, 8.0)),
        (Side.SHORT, (100, 104), CANDLES, (95.0, 108.0, -8.0, 5.0)),
        (Side.LONG, (100, 104), None, (100.0, 104.0, 0.0, 4.0)),
        (Side.LONG, (), None, (100.0, 100.0, 0.0, 0.0)),
    ],
)
def test_the_excursion_of_a_trade_counts_its_fills_and_candles_in_percent_of_the_entry(
    side: Side, prices: tuple[int, ...], extremes: Extremes | None, expected: tuple[float, ...]
) -> None:
    position = msgspec.structs.replace(make_position(entry="100"), side=side)
    whole = WholeTrade(
        "ax", position, [msgspec.structs.replace(FILL, price=Decimal(price)) for price in prices], None, None
    )
    interval = UNSET if extremes is None else "1m"
    assert msgspec.structs.astuple(Excursion.of(whole, extremes)) == (*expected, interval)
