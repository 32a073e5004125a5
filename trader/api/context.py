"""Context of procedures and streams, and the keys under which the application holds its parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, Protocol

from aiohttp import web

from trader.agents.external import ExternalAgents
from trader.agents.invocations import InvocationReader
from trader.agents.providers.provider import Provider
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import KnownModels
from trader.core.clock import Clock
from trader.core.schedulers import Schedulers
from trader.database.pool import Database
from trader.database.relay import RelayReader
from trader.exchange.accounts import Accounts
from trader.exchange.halts import Halts
from trader.exchange.protocol import Exchange
from trader.live.approvals import Approvals
from trader.market.candles import Candles
from trader.market.feed import MarketFeed
from trader.operations.access import Access
from trader.operations.alarms import Alarms
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.analytics import Analytics
from trader.portfolio.evidence import Evidence
from trader.portfolio.snapshots import PortfolioService
from trader.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    clock: Clock
    market: MarketFeed
    exchange: Exchange
    portfolio: PortfolioService
    analytics: Analytics
    evidence: Evidence
    models: KnownModels
    invocations: InvocationReader
    agents: InvocationScheduler
    desk: ExternalAgents
    candles: Candles
    operations: OperatorCommands
    approvals: Approvals


class Role(Protocol):
    """The role of this process: a leader trades, a standby can take over, a reader only follows."""

    @property
    def role(self) -> Literal["leader", "standby", "reader"]: ...

    def running_schedulers(self) -> Mapping[str, bool]:
        """Return whether each scheduler is running; on a follower, the leader's schedulers."""


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
