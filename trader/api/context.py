"""What a procedure may use: the services, handed in by the composition root."""

from dataclasses import dataclass

from trader.clock import Clock
from trader.services.agents import Agents
from trader.services.analytics import Analytics
from trader.services.market import MarketData
from trader.services.portfolio import Portfolio
from trader.services.trading import TradingRecords
from trader.services.venue import Venue
from trader.settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    clock: Clock
    market: MarketData
    exchange: Venue
    trading: TradingRecords
    portfolio: Portfolio
    analytics: Analytics
    agents: Agents
