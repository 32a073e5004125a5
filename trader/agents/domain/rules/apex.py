"""Apex: volatility squeezes on 15-minute candles, sized by the Kelly criterion.

While the Bollinger bands lie inside the Keltner channel, volatility is low; when they leave it, a move begins. Apex
trades it in its direction, only on its side of VWAP: stop 1.5 ATR, target 3 ATR, time exit after 2 h. The leverage
follows from the stop, which may lose a tenth of the margin: 10 if the stop is at most 1 % away, less beyond.
"""

from datetime import timedelta
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec.structs import replace

from trader.agents.domain.rules.common import RuleAgent, cost_refusal, missing_history
from trader.agents.domain.rules.sizing import Signal, entry_price
from trader.agents.domain.view import ObservedMarket, ObservedStats, VariantLimits, View
from trader.core.money import ZERO, divide
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Side
from trader.market.domain.indicators import Indicators

RELEASE_CANDLES_MAX: Final = 5
"""Maximum age, in candles, of a release that is still traded."""
STOP_ATRS: Final = 1.5
TARGET_ATRS: Final = 3.0
LIFETIME: Final = timedelta(hours=2)
COST_SHARE_MAX: Final = 0.3
"""Maximum share of the distance to the target that costs may take."""

PRIOR_TRADES: Final = 20
PRIOR_WIN_RATE: Final = Decimal("0.52")
PRIOR_PAYOFF: Final = Decimal("1.5")
RISK_MAX: Final = Decimal("0.02")
"""Risk cap: a fifth of the daily loss limit. Half Kelly of the prior alone would be a tenth of equity."""
RISK_PROBE: Final = Decimal("0.0025")
"""Risk while the agent's record shows no edge (Kelly fraction zero): small trades that let the record change."""
MARGIN_RISK: Final = Decimal("0.1")
"""Maximum share of its margin that a position may lose at the stop."""


def half_kelly(stats: ObservedStats) -> Decimal:
    """Return half of p − (1 − p) / b, with win rate p and payoff b = average win / average loss; not below zero.

    Until there are 20 closed trades, the prior stands in for the missing ones: 52 % and 1.5:1.
    """
    own = Decimal(stats.trade_count)
    prior = max(PRIOR_TRADES - own, ZERO)
    own_rate = divide(Decimal(repr(stats.win_rate_percent or 0.0)), Decimal(100))
    win_rate = divide(own * own_rate + prior * PRIOR_WIN_RATE, own + prior)
    own_payoff = PRIOR_PAYOFF
    if stats.average_win is not None and stats.average_loss:
        own_payoff = divide(stats.average_win, stats.average_loss)
    payoff = divide(own * own_payoff + prior * PRIOR_PAYOFF, own + prior)
    if payoff <= 0:
        return ZERO
    return max(divide(win_rate - divide(1 - win_rate, payoff), Decimal(2)), ZERO)


def risk(stats: ObservedStats) -> Decimal:
    """Return the share of equity that a trade may lose."""
    return min(max(half_kelly(stats), RISK_PROBE), RISK_MAX)


class Release(NamedTuple):
    """The release of a squeeze on the right side of VWAP: its side and its figures."""

    side: Side
    atr: float
    length: int
    released: int
    momentum: float
    above: float
    why: str


def release(indicators: Indicators, price: float) -> Release | str:
    """Return the release tradable at a price, or why there is none."""
    atr, vwap, momentum = indicators.atr, indicators.vwap, indicators.momentum
    if atr is None or vwap is None or momentum is None or indicators.squeeze_on is None:
        return missing_history(ATR=atr, VWAP=vwap, momentum=momentum, squeeze=indicators.squeeze_on)
    if indicators.squeeze_on:
        return f"in a squeeze for {indicators.squeeze_candles} candles, no release yet"
    released, length = indicators.squeeze_released, indicators.squeeze_candles
    if released is None or length is None or released > RELEASE_CANDLES_MAX:
        return "no squeeze in sight" if released is None else f"the last squeeze ended {released} candles ago, too long"
    side = Side.LONG if momentum > 0 else Side.SHORT
    above = (price - vwap) * side.direction
    why = f"squeeze of {length} candles released {released} candles ago, momentum {momentum:+.6g}, VWAP {vwap:.6g}"
    if momentum == 0 or above <= 0:
        return f"{why}, {price:.6g} is on the wrong side of it for a {side}"
    return Release(side, atr, length, released, momentum, above, why)


def _confidence(length: int, released: int, momentum_atrs: float, above_atrs: float) -> float:
    """Return the confidence: higher for long squeezes, fresh releases and strong momentum, lower far from VWAP."""
    return 48 + min(length, 20) + 10 * min(momentum_atrs, 1.5) - 3 * released - 4 * max(0.0, min(above_atrs, 8.0) - 3)


def _stake(view: View, market: ObservedMarket, side: Side, atr: float) -> Signal:
    entry = float(entry_price(market, side))
    return Signal(
        side=side,
        stop=entry - side.direction * STOP_ATRS * atr,
        target=entry + side.direction * TARGET_ATRS * atr,
        lifetime=LIFETIME,
        risk=risk(view.stats),
        margin_risk=MARGIN_RISK,
    )


class Apex(RuleAgent):
    """The rule agent of the variant Apex."""

    name = "apex-rules"
    variant = VariantId.APEX
    intervals = ("15m",)
    limits = VariantLimits(leverage_max=10)

    def may_enter(self, indicators: Indicators, price: float) -> bool:
        return not isinstance(release(indicators, price), str)

    def stake(self, view: View, market: ObservedMarket, indicators: Indicators, side: Side) -> Signal | None:
        return None if indicators.atr is None else _stake(view, market, side, indicators.atr)

    def enter(self, view: View, market: ObservedMarket, indicators: Indicators) -> Signal | str:
        released_squeeze = release(indicators, float(market.price))
        if isinstance(released_squeeze, str):
            return released_squeeze
        side, atr, length, released, momentum, above, why = released_squeeze
        refusal = cost_refusal(view, market, TARGET_ATRS * atr, COST_SHARE_MAX)
        if refusal is not None:
            return f"{why}, but {refusal}"
        return replace(
            _stake(view, market, side, atr),
            invalidation=(
                f"The release fails: the price gives back {STOP_ATRS} ATR ({STOP_ATRS * atr:.6g}) of the entry."
            ),
            confidence=_confidence(length, released, abs(momentum) / atr, above / atr),
            why=why,
        )
