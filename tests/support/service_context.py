"""The context of procedures and streams over the services of a test."""

from support.operated_exchange import make_operations

from trader.agents.invocations import InvocationReader
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices
from trader.api.context import Context
from trader.database.relay import RelayReader
from trader.live.approvals import Approvals
from trader.market.candles import Candles
from trader.portfolio.analytics import Analytics
from trader.portfolio.evidence import Evidence
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.snapshots import PortfolioService


def make_context(services: AgentServices, leader: RelayReader | None = None) -> Context:
    database, exchange, market, clock = services.database, services.exchange, services.market, services.clock
    settings, runs, agents = services.settings, CurrentRuns(services.database), InvocationScheduler(services)
    invocations = InvocationReader(database, services.models, agents.warnings)
    services.events.subscribe(invocations.on_event)
    return Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=exchange,
        portfolio=PortfolioService(database, exchange, clock, settings, leader),
        analytics=Analytics(database, exchange, clock, runs),
        evidence=Evidence(database, runs, clock),
        models=services.models,
        invocations=invocations,
        agents=agents,
        desk=agents.external,
        candles=Candles(database, market, settings),
        operations=make_operations(database, exchange, clock, settings),
        approvals=Approvals(database, settings.ladder_file, settings.venue),
    )
