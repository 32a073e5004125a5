"""Contrarian: mean reversion toward VWAP on 15-minute candles.

With ADX below 25, a price 2 deviations from VWAP, or with an RSI below 30 or above 70, tends to revert. The stop,
1.5 ATR beyond the entry, risks one percent of equity; the target is VWAP; time exit after 6 h.
"""

from datetime import timedelta
from decimal import Decimal
from typing import Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.rules.common import RuleAgent, cost_refusal, missing_history
from trader.agents.domain.rules.sizing import Signal, entry_price
from trader.agents.domain.view import ObservedMarket, VariantLimits, View
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.session_vwap import VWAP_DEVIATIONS

ADX_MAX: Final = 25.0
RSI_LOW: Final = 30.0
RSI_HIGH: Final = 70.0
STOP_ATRS: Final = 1.5
RISK: Final = Decimal("0.01")
LIFETIME: Final = timedelta(hours=6)
COST_SHARE_MAX: Final = 0.35
"""Maximum share of the distance to VWAP that costs may take."""


class Stretch(msgspec.Struct, frozen=True):
    """A price stretched away from VWAP: the side of the fade, the distance back, and the figures that favor it."""

    side: Side
    vwap: float
    distance: float
    deviations: float
    rsi: float
    adx: float

    @property
    def why(self) -> str:
        return (
            f"range with ADX {self.adx:.1f}, {self.deviations:.1f} deviations from VWAP {self.vwap:.6g}, "
            f"RSI {self.rsi:.1f}"
        )

    @property
    def confidence(self) -> float:
        """Return the confidence: higher for a larger deviation, a more extreme RSI and a weaker trend."""
        extreme = max(RSI_LOW - self.rsi, self.rsi - RSI_HIGH, 0.0)
        beyond = max(self.deviations - VWAP_DEVIATIONS, 0.0)
        return 50 + min(extreme, 20) + 8 * min(beyond, 1.5) + 0.6 * max(ADX_MAX - self.adx, 0.0)


def stretch(price: float, indicators: Indicators, adx_max: float) -> Stretch | str:
    """Return how far a ranging market is stretched away from VWAP, or why there is nothing to fade."""
    adx, rsi, vwap, deviation = indicators.adx, indicators.rsi, indicators.vwap, indicators.vwap_deviation
    if adx is None or rsi is None or vwap is None or deviation is None:
        return missing_history(ADX=adx, RSI=rsi, VWAP=vwap, deviation=deviation)
    if adx >= adx_max:
        return f"no range, ADX {adx:.1f}"
    away = price - vwap
    deviations = abs(away) / deviation if deviation > 0 else 0.0
    far, below = deviations >= VWAP_DEVIATIONS, away < 0
    if not (far or (rsi < RSI_LOW if below else rsi > RSI_HIGH)):
        return (
            f"range with ADX {adx:.1f}, but {price:.6g} is {deviations:.1f} deviations from VWAP {vwap:.6g} "
            f"and RSI {rsi:.1f}: nothing to fade"
        )
    return Stretch(Side.LONG if below else Side.SHORT, vwap, abs(away), deviations, rsi, adx)


def _stake(market: ObservedMarket, side: Side, atr: float, vwap: float) -> Signal:
    stop = float(entry_price(market, side)) - side.direction * STOP_ATRS * atr
    return Signal(side=side, stop=stop, target=vwap, lifetime=LIFETIME, risk=RISK)


class Contrarian(RuleAgent):
    """The rule agent of the variant Contrarian."""

    name = "contrarian-rules"
    variant = VariantId.CONTRARIAN
    intervals = ("15m",)
    limits = VariantLimits(leverage_max=3)

    def may_enter(self, indicators: Indicators, price: float) -> bool:
        return not isinstance(stretch(price, indicators, ADX_MAX), str)

    def stake(self, view: View, market: ObservedMarket, indicators: Indicators, side: Side) -> Signal | None:
        atr, vwap = indicators.atr, indicators.vwap
        return None if atr is None or vwap is None else _stake(market, side, atr, vwap)

    def enter(self, view: View, market: ObservedMarket, indicators: Indicators) -> Signal | str:
        stretched = stretch(float(market.price), indicators, ADX_MAX)
        if isinstance(stretched, str):
            return stretched
        atr = indicators.atr
        if atr is None:
            return missing_history(ATR=atr)
        refusal = cost_refusal(view, market, stretched.distance, COST_SHARE_MAX)
        if refusal is not None:
            return f"{stretched.why}, but {refusal}"
        return replace(
            _stake(market, stretched.side, atr, stretched.vwap),
            invalidation=f"The range breaks: the price goes {STOP_ATRS} ATR ({STOP_ATRS * atr:.6g}) beyond the entry.",
            confidence=stretched.confidence,
            why=stretched.why,
        )
