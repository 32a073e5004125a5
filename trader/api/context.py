"""Context of procedures and streams: the services that they may use."""

from dataclasses import dataclass

from trader.clock import Clock
from trader.services.agents.schedule import Agents
from trader.services.exchange.protocol import Exchange
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.snapshots import Portfolio
from trader.settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    clock: Clock
    market: MarketFeed
    exchange: Exchange
    portfolio: Portfolio
    analytics: Analytics
    evidence: Evidence
    agents: Agents
