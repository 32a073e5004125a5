"""Sovereign: trades according to the market's regime, on hourly candles.

With ADX above 25 it follows the trend, below 20 it fades the range, and in between it opens nothing. It risks two
percent of equity, halved for every 5 % of drawdown; the stop is 2 ATR away; the target is VWAP in a range, and there is
none in a trend. It closes a position that has not earned its risk (1 R) within 24 h.
"""

from datetime import timedelta
from decimal import Decimal
from typing import Final

from msgspec.structs import replace

from trader.agents.domain.rules import contrarian, trendsurfer
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
from trader.agents.domain.rules.sizing import Signal, entry_price
from trader.agents.domain.view import ObservedMarket, ObservedPosition, VariantLimits, View
from trader.core.money import divide
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Side
from trader.market.domain.indicators import Indicators

RANGE_ADX_MAX: Final = 20.0
STOP_ATRS: Final = 2.0
RISK: Final = Decimal("0.02")
DRAWDOWN_STEP_PERCENT: Final = 5
PATIENCE: Final = timedelta(hours=24)
COST_SHARE_MAX: Final = 0.35
"""Maximum share of the distance to the target (without one, to the stop) that costs may take."""


def risk(drawdown_percent: Decimal) -> Decimal:
    """Return the share of equity that a trade may lose: 2 %, halved for every full 5 % of drawdown."""
    return divide(RISK, Decimal(2) ** int(drawdown_percent // DRAWDOWN_STEP_PERCENT))


def _follow(view: View, market: ObservedMarket, indicators: Indicators, atr: float) -> Signal | str:
    side = trendsurfer.trend(indicators)
    if not isinstance(side, Side):
        return side
    why = f"trend regime, ADX {indicators.adx:.1f}, +DI {indicators.plus_di:.1f}, −DI {indicators.minus_di:.1f}"
    return _signal(view, market, side, atr, None, trendsurfer.confidence(indicators), why)


def _fade(view: View, market: ObservedMarket, indicators: Indicators, atr: float) -> Signal | str:
    stretched = contrarian.stretch(float(market.price), indicators, RANGE_ADX_MAX)
    if isinstance(stretched, str):
        return stretched
    return _signal(view, market, stretched.side, atr, stretched.vwap, stretched.confidence, stretched.why)


def _signal(
    view: View, market: ObservedMarket, side: Side, atr: float, target: float | None, confidence: float, why: str
) -> Signal | str:
    entry = float(entry_price(market, side))
    way = STOP_ATRS * atr if target is None else abs(target - entry)
    refusal = cost_refusal(view, market, way, COST_SHARE_MAX)
    if refusal is not None:
        return f"{why}, but {refusal}"
    stake = _stake(view, market, side, atr, target)
    return replace(
        stake,
        invalidation=f"The price goes {STOP_ATRS} ATR ({STOP_ATRS * atr:.6g}) against the entry, or earns less than "
        "its risk within 24 h.",
        confidence=confidence,
        why=f"{why}, {100 * stake.risk:.2f} % at risk in a drawdown of {view.account.drawdown_percent:.1f} %",
    )


def _stake(view: View, market: ObservedMarket, side: Side, atr: float, target: float | None) -> Signal:
    stop = float(entry_price(market, side)) - side.direction * STOP_ATRS * atr
    return Signal(side=side, stop=stop, target=target, risk=risk(view.account.drawdown_percent))


def _is_unearned(risk: Decimal | None, unrealized: Decimal) -> bool:
    """Return whether a position has not earned 1 R; without a stop, there is no risk to measure by."""
    return risk is None or unrealized < risk


class Sovereign(RuleAgent):
    """The rule agent of the variant Sovereign."""

    name = "sovereign-rules"
    variant = VariantId.SOVEREIGN
    intervals = ("1h",)
    limits = VariantLimits(leverage_max=5)

    def may_enter(self, indicators: Indicators, price: float) -> bool:
        adx = indicators.adx
        if adx is None or indicators.atr is None:
            return False
        if adx > trendsurfer.ADX_MIN:
            return isinstance(trendsurfer.trend(indicators), Side)
        return adx < RANGE_ADX_MAX and not isinstance(contrarian.stretch(price, indicators, RANGE_ADX_MAX), str)

    def may_review(self, held: Held) -> bool:
        """Return whether to close a position: after 24 h, if it has not earned its risk."""
        position = held.position
        return held.now - position.opened_at >= PATIENCE and _is_unearned(position.risk, position.unrealized(held.mark))

    def stake(self, view: View, market: ObservedMarket, indicators: Indicators, side: Side) -> Signal | None:
        adx, atr = indicators.adx, indicators.atr
        if adx is None or atr is None or RANGE_ADX_MAX <= adx <= trendsurfer.ADX_MIN:
            return None
        if adx > trendsurfer.ADX_MIN:
            return _stake(view, market, side, atr, None)
        return None if indicators.vwap is None else _stake(view, market, side, atr, indicators.vwap)

    def enter(self, view: View, market: ObservedMarket, indicators: Indicators) -> Signal | str:
        adx, atr = indicators.adx, indicators.atr
        if adx is None or atr is None:
            return missing_history(ADX=adx, ATR=atr)
        if adx > trendsurfer.ADX_MIN:
            return _follow(view, market, indicators, atr)
        if adx < RANGE_ADX_MAX:
            return _fade(view, market, indicators, atr)
        return f"between the regimes, ADX {adx:.1f}"

    def review(self, view: View, market: ObservedMarket, held: ObservedPosition) -> Review:
        """Close a position that has not earned 1 R (the loss at its stop) within 24 h."""
        state = f"{describe_position(held)}, {describe_plan(held)}"
        if view.at - held.opened_at < PATIENCE:
            return Review(None, state)
        if _is_unearned(held.risk, held.unrealized):
            earned = "without a risk to measure by" if held.risk is None else f"below 1 R ({held.risk:.2f})"
            return close_position(held, f"{earned} after 24 h")
        return Review(None, f"{state}; above 1 R ({held.risk:.2f}) after 24 h")
