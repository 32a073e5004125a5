"""Trendsurfer: follows trends on 15-minute candles, with the Kijun-Sen as a stop that only ever tightens.

A trend needs ADX above 25; the stronger of +DI and −DI and the close against the Kijun-Sen must agree on its side. The
stop risks one percent of equity; there is no target: the stop follows the Kijun-Sen until the price returns to it.
"""

from decimal import Decimal
from typing import Final

from trader.agents.domain.rules.common import (
    Held,
    Review,
    RuleAgent,
    close_position,
    cost_refusal,
    describe_plan,
    describe_position,
    missing_history,
)
from trader.agents.domain.rules.sizing import Signal, entry_price, tightened
from trader.agents.domain.tools import UpdateExitPlan
from trader.agents.domain.view import ObservedMarket, ObservedPosition, VariantLimits, View
from trader.core.money import format_decimal
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Side
from trader.market.domain.indicators import Indicators

ADX_MIN: Final = 25.0
RISK: Final = Decimal("0.01")
STOP_ATRS_MIN: Final = 0.75
"""Nearer than this, the Kijun-Sen is within the noise."""
STOP_ATRS_MAX: Final = 4.0
"""Farther than this, the entry is late."""
COST_SHARE_MAX: Final = 0.5
"""Maximum share of the distance to the stop that costs may take."""


def trend(indicators: Indicators) -> Side | str:
    """Return the side of the trend from ±DI and the close against the Kijun-Sen, or why there is none."""
    adx, plus, minus, kijun, close = (
        indicators.adx,
        indicators.plus_di,
        indicators.minus_di,
        indicators.kijun_sen,
        indicators.close,
    )
    if adx is None or plus is None or minus is None or kijun is None or close is None:
        return missing_history(ADX=adx, plusDI=plus, minusDI=minus, Kijun=kijun, close=close)
    if adx <= ADX_MIN:
        return f"no trend, ADX {adx:.1f}"
    if plus > minus and close > kijun:
        return Side.LONG
    if minus > plus and close < kijun:
        return Side.SHORT
    return (
        f"ADX {adx:.1f}, but +DI {plus:.1f}, −DI {minus:.1f} and close {close:.6g} against Kijun {kijun:.6g} disagree"
    )


def confidence(indicators: Indicators) -> float:
    """Return the confidence in a trend, from the excess of ADX over 25 and the distance between +DI and −DI."""
    assert indicators.adx is not None  # `trend` has checked them
    assert indicators.plus_di is not None
    assert indicators.minus_di is not None
    return 50 + min(indicators.adx - ADX_MIN, 25) * 0.8 + min(abs(indicators.plus_di - indicators.minus_di), 40) / 2


class Trendsurfer(RuleAgent):
    """The rule agent of the variant Trendsurfer."""

    name = "trendsurfer-rules"
    variant = VariantId.TRENDSURFER
    intervals = ("15m",)
    limits = VariantLimits(leverage_max=5)

    def may_enter(self, indicators: Indicators, price: float) -> bool:
        return isinstance(trend(indicators), Side)

    def may_review(self, held: Held) -> bool:
        """Return whether the stop may move, which requires that the Kijun-Sen has passed it."""
        kijun, position = held.indicators.kijun_sen, held.position
        return kijun is not None and tightened(held.tick, position.side, position.exit_plan.stop, kijun) is not None

    def stake(self, view: View, market: ObservedMarket, indicators: Indicators, side: Side) -> Signal | None:
        kijun = indicators.kijun_sen
        return None if kijun is None else Signal(side=side, stop=kijun, risk=RISK)

    def enter(self, view: View, market: ObservedMarket, indicators: Indicators) -> Signal | str:
        side = trend(indicators)
        if not isinstance(side, Side):
            return side
        atr, kijun = indicators.atr, indicators.kijun_sen
        if atr is None or kijun is None:
            return missing_history(ATR=atr, Kijun=kijun)
        entry = float(entry_price(market, side))
        distance = (entry - kijun) * side.direction
        why = (
            f"trend with ADX {indicators.adx:.1f}, +DI {indicators.plus_di:.1f}, −DI {indicators.minus_di:.1f}, "
            f"Kijun {kijun:.6g}, ATR {atr:.6g}"
        )
        if not STOP_ATRS_MIN * atr <= distance <= STOP_ATRS_MAX * atr:
            room = f"{STOP_ATRS_MIN} to {STOP_ATRS_MAX} ATR"
            return f"{why}, but {entry:.6g} is {distance:.6g} from the Kijun, not {room}"
        refusal = cost_refusal(view, market, distance, COST_SHARE_MAX)
        if refusal is not None:
            return f"{why}, but {refusal}"
        return Signal(
            side=side,
            stop=kijun,
            risk=RISK,
            invalidation=f"The price comes back through the Kijun-Sen({kijun:.6g}), which the stop follows.",
            confidence=confidence(indicators),
            why=why,
        )

    def review(self, view: View, market: ObservedMarket, held: ObservedPosition) -> Review:
        """Move the stop to the Kijun-Sen if that tightens it; close if the price is already beyond it."""
        indicators = market.indicators.get(self.intervals[0])
        kijun = indicators.kijun_sen if indicators is not None else None
        state = f"{describe_position(held)}, {describe_plan(held)}"
        if kijun is None:
            return Review(None, f"{state}; too little history for Kijun")
        stop = tightened(market.tick, held.side, held.exit_plan.stop, kijun)
        if stop is None:
            return Review(None, f"{state}; Kijun {kijun:.6g} would not tighten it")
        if (market.price - stop) * held.side.direction <= 0:
            return close_position(held, f"{format_decimal(market.price)} is beyond the Kijun {kijun:.6g}")
        return Review(
            UpdateExitPlan(symbol=held.symbol, stop=float(stop)), f"{state}; stop to Kijun {format_decimal(stop)}"
        )
