"""SMA cross: long while the short average of closes is above the long one, short while it is below.

trader lab candles make candles
trader lab backtest --data candles --strategy docs/examples/sma_cross.py:SmaCross --param window=40
"""

from collections.abc import Iterator

from trader.strategies import (
    ClosePosition,
    CreatePosition,
    Decision,
    ObservedMarket,
    SeriesValue,
    Side,
    Strategy,
    VariantId,
    View,
)


class SmaCross(Strategy):
    variant = VariantId.TRENDSURFER  # whose guard judges it
    intervals = ("15m",)

    def __init__(self, window: int = 40, fast: int = 10, risk: float = 0.01, stop_atrs: float = 2.0) -> None:
        if not 1 <= fast < window <= 300:
            raise ValueError(f"fast is {fast} and window {window}; 1 <= fast < window <= 300 candles")
        self.window, self.fast, self.risk, self.stop_atrs = window, fast, risk, stop_atrs

    def decide(self, view: View) -> Iterator[Decision]:
        for symbol, market in view.markets.items():
            wanted, held = self._wanted(market), view.position(symbol)
            if wanted is None or market.stale:
                continue
            if held is not None and held.side is not wanted:
                yield ClosePosition(symbol=symbol)
            elif held is None:
                yield from self._entry(view, market, wanted)

    def series(self, view: View) -> Iterator[SeriesValue]:
        for symbol, market in view.markets.items():
            closes = market.closes("15m")
            if len(closes) >= self.window:
                yield SeriesValue(symbol, f"average of {self.fast}", closes[-self.fast :].mean())
                yield SeriesValue(symbol, f"average of {self.window}", closes[-self.window :].mean())

    def _wanted(self, market: ObservedMarket) -> Side | None:
        """Return the side of the short average; None without enough candles."""
        closes = [candle.close for candle in market.candles["15m"][-self.window :]]
        if len(closes) < self.window:
            return None
        return Side.LONG if sum(closes[-self.fast :]) / self.fast > sum(closes) / self.window else Side.SHORT

    def _entry(self, view: View, market: ObservedMarket, side: Side) -> Iterator[Decision]:
        atr = market.indicators["15m"].atr
        if atr is None:  # too little history
            return
        price, equity = float(market.price), float(view.account.equity)
        distance = self.stop_atrs * atr
        quantity = min(self.risk * equity / distance, 0.5 * equity / price)  # at most half the equity in a market
        if quantity * price < float(market.min_notional):
            return
        yield CreatePosition(
            symbol=market.symbol,
            side=side,
            quantity=quantity,
            leverage=2,
            stop=price - side.direction * distance,
            invalidation="the averages cross back",
            confidence=55,
        )
