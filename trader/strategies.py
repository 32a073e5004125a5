"""Published names for strategy files: `from trader.strategies import CreatePosition, Side`."""

from trader.agents.built_view import GivenPosition, build_view
from trader.agents.domain.strategy import Peek, SeriesValue, Strategy
from trader.agents.domain.tools import (
    CancelOrder,
    ClosePosition,
    CreatePosition,
    Decision,
    Holding,
    PlaceOrder,
    PlacePair,
    PlannedExit,
    PlannedTarget,
    UpdateExitPlan,
)
from trader.agents.domain.view import (
    ObservedAccount,
    ObservedFill,
    ObservedMarket,
    ObservedOrder,
    ObservedPosition,
    VariantLimits,
    View,
)
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Cause, ExitPlan, OrderType, PlanTarget, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Candle, Interval

__all__ = [
    "CancelOrder", "Candle", "Cause", "ClosePosition", "CreatePosition", "Decision", "ExitPlan", "GivenPosition",
    "Holding", "Indicators", "Interval", "ObservedAccount", "ObservedFill", "ObservedMarket", "ObservedOrder",
    "ObservedPosition", "OrderType", "Peek", "PlaceOrder", "PlacePair", "PlanTarget", "PlannedExit", "PlannedTarget",
    "SeriesValue", "Side", "Strategy", "UpdateExitPlan", "VariantId", "VariantLimits", "View", "build_view",
]  # fmt: skip
