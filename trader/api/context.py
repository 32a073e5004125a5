"""Context of procedures and streams, and the keys under which the application holds its parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol

from aiohttp import web

from trader.clock import Clock
from trader.gateways.agents.providers import Provider
from trader.schedulers import Schedulers
from trader.services.agents.schedule import Agents
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.protocol import Exchange
from trader.services.market.candles import Candles
from trader.services.market.feed import MarketFeed
from trader.services.operations.access import Access
from trader.services.operations.alarms import Alarms
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.snapshots import Portfolio
from trader.services.relay import RelayReader
from trader.settings import Settings
from trader.store.database.pool import Database


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
    candles: Candles


class Role(Protocol):
    """The role of this process: a leader trades, a standby would take over, a reader only follows."""

    @property
    def role(self) -> Literal["leader", "standby", "reader"]: ...

    def running_schedulers(self) -> Mapping[str, bool]:
        """Return whether each scheduler runs, on the leader when this process is none."""


CONTEXT: Final = web.AppKey("context", Context)
DATABASE: Final = web.AppKey("database", Database)
ACCOUNTS: Final = web.AppKey("accounts", Accounts)
HALTS: Final = web.AppKey("halts", Halts)
SCHEDULERS: Final = web.AppKey("schedulers", Schedulers)
ROLE: Final[web.AppKey[Role]] = web.AppKey("role")
RELAY: Final = web.AppKey("relay", RelayReader)
PROVIDERS: Final[web.AppKey[Mapping[str, Provider]]] = web.AppKey("providers")
ALARMS: Final = web.AppKey("alarms", Alarms)
ACCESS: Final = web.AppKey("access", Access)
STARTED_AT: Final = web.AppKey("started_at", datetime)
