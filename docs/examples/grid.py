"""Grid: buys one unit at each step below an anchor price, and sells it one step higher.

trader lab candles make candles
trader lab backtest --data candles --strategy docs/examples/grid.py:Grid --param step=0.005 --param levels=5
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from trader.strategies import (
    ClosePosition,
    CreatePosition,
    Decision,
    ObservedMarket,
    Side,
    Strategy,
    VariantId,
    View,
)


class Grid(Strategy):
    variant = VariantId.CONTRARIAN
    intervals = ("1h",)

    def __init__(self, step: Decimal = Decimal("0.005"), levels: int = 5, share: Decimal = Decimal("0.05")) -> None:
        self.step, self.levels, self.share = step, levels, share
        self.grids: dict[str, tuple[Decimal, Decimal]] = {}  # the anchor price and the unit of each market

    def decide(self, view: View) -> Iterator[Decision]:
        for symbol, market in view.markets.items():
            if market.stale:
                continue
            held = view.position(symbol)
            if held is None:  # a new grid; after a stop-out it begins at the lower price
                unit = self.share * view.account.equity / market.price
                self.grids[symbol] = market.price, unit - unit % market.lot
            anchor, unit = self.grids[symbol]
            units = 0 if held is None or not unit else round(held.quantity / unit)
            below = (anchor - market.price) / (anchor * self.step)
            wanted = min(self.levels, max(1, int(below) + 1))  # one unit from the start on
            if wanted > units and unit * market.price >= market.min_notional:
                yield self._buy(market, anchor, unit * (wanted - units))
            elif wanted < units - 1 or (units == 1 and below < -1):  # a step above where it was bought
                yield ClosePosition(symbol=symbol, fraction=1 if units == 1 else (units - wanted) / units)

    def _buy(self, market: ObservedMarket, anchor: Decimal, quantity: Decimal) -> Decision:
        lowest = anchor * (1 - self.step * (self.levels + 2))
        return CreatePosition(
            symbol=market.symbol,
            side=Side.LONG,
            quantity=float(quantity),
            leverage=2,
            stop=float(lowest),
            invalidation="the price leaves the grid below",
            confidence=50,
        )

    def save(self) -> Any:
        return {symbol: [str(anchor), str(unit)] for symbol, (anchor, unit) in self.grids.items()}

    def load(self, state: Any) -> None:
        self.grids = {symbol: (Decimal(anchor), Decimal(unit)) for symbol, (anchor, unit) in state.items()}
