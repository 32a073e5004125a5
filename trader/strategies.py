"""Published names for strategy files: `from trader.strategies import CreatePosition, Side`."""

from trader.agents.domain.strategy import Peek, Strategy
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision, Holding, UpdateExitPlan
from trader.agents.domain.view import ObservedAccount, ObservedMarket, ObservedPosition, VariantLimits, View
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Candle, Interval

__all__ = [
    "Candle", "ClosePosition", "CreatePosition", "Decision", "ExitPlan", "Holding", "Indicators", "Interval",
    "ObservedAccount", "ObservedMarket", "ObservedPosition", "Peek", "Side", "Strategy", "UpdateExitPlan",
    "VariantId", "VariantLimits", "View",
]  # fmt: skip
