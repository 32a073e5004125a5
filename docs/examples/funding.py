"""Funding: hold the side that funding pays, where four hours of it pay for the trade.

trader lab exam run --models docs/examples/exam.toml --states 100
"""

from collections.abc import Iterator
from datetime import timedelta

import numpy as np

from trader.strategies import ClosePosition, CreatePosition, Decision, ObservedMarket, Side, Strategy, VariantId, View

HOURS = 4


class Funding(Strategy):
    variant = VariantId.SOVEREIGN  # whose guard judges it
    intervals = ("15m",)

    def __init__(self, risk: float = 0.01) -> None:
        self.risk = risk

    def decide(self, view: View) -> Iterator[Decision]:
        for symbol, market in view.markets.items():
            rate, price = float(market.funding_rate), float(market.price)
            costs = 2 * float(view.account.taker_fee_rate) + float(market.spread) / price
            if HOURS * abs(rate) <= costs:
                continue
            side, deviation = (Side.SHORT if rate > 0 else Side.LONG), deviation_of(market)
            if any(held.symbol == symbol and held.side is not side for held in view.positions):
                yield ClosePosition(symbol=symbol)  # the guard does not reverse it at once
                continue
            yield CreatePosition(
                symbol=symbol,
                side=side,
                quantity=self.risk / deviation * float(view.account.equity) / price,
                leverage=3,
                stop=price * (1 - 4 * deviation * (1 if side is Side.LONG else -1)),
                invalidation="the funding rate is back to usual",
                time_exit=view.at + timedelta(hours=HOURS),
                confidence=60,
            )


def deviation_of(market: ObservedMarket) -> float:
    """Return the standard deviation of the return over four hours, from those of 15 minutes."""
    return float(np.diff(np.log(market.closes("15m"))).std() * np.sqrt(4 * HOURS))
