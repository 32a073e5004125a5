"""The composition root: every part of the service is made here once, in order, and ended in the opposite order."""

import asyncio
import logging
import re
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final

from aiohttp import web

from trader.api import cors, feeds, health, rpc, streams
from trader.api.context import Context
from trader.clock import Clock, iso
from trader.errors import StartError
from trader.gateways.llm import make_providers
from trader.gateways.market import make_source
from trader.gateways.market.source import MarketSource
from trader.schedulers import Schedulers, jobs
from trader.services.agents import Agents
from trader.services.analytics import Analytics
from trader.services.events import EventBus
from trader.services.exchange import Exchange
from trader.services.market import MarketData
from trader.services.portfolio import Portfolio
from trader.services.trading import TradingRecords
from trader.settings import Settings
from trader.store.embedded import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.store.partitions import ensure_partitions
from trader.store.pool import Database, apply_schema
from trader.store.trading import select_processed_until

log = logging.getLogger("trader")

BODY_BYTES_MAX: Final = 1024 * 1024
_STREAMS_END_S: Final = 1.0
"""How long requests may take to end at shutdown; the streams are closed before."""


async def serve(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT.

    :raises StartError: something the service needs is missing, too old, or of another market
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        source, database = await _open_outside(settings, stack)
        service = await _start_services(settings, source, database, stack)
        feed = asyncio.create_task(service.follow_market(), name="market feed")
        stack.push_async_callback(_cancel, feed)
        await service.schedulers.start()
        stack.push_async_callback(service.schedulers.close)
        port = await _listen(service, settings, stack)
        log.info("listening on http://%s:%d (%s, market %s)", settings.host, port, settings.trading_mode, source.name)
        stopped = asyncio.create_task(stopping.wait(), name="stop signal")
        await asyncio.wait([stopped, feed], return_when=asyncio.FIRST_COMPLETED)
        if feed.done():
            feed.result()  # the feed never ends by itself: this raises what it died of
        log.info("stopping")


async def check(settings: Settings) -> list[str]:
    """Try what the service needs without running it. One line per part.

    :raises StartError: something is missing, too old, or of another market
    """
    async with AsyncExitStack() as stack:
        source, database = await _open_outside(settings, stack)
        latency_ms = await database.ping()
        return [
            f"settings: valid, {settings.trading_mode}",
            f"market: {source.identity} with {', '.join(source.markets)}",
            f"database: connected, schema in place, {latency_ms:.1f} ms",
        ]


class Service:
    """The running parts that the composition root ties together."""

    def __init__(
        self, context: Context, database: Database, hubs: streams.Hubs, schedulers: Schedulers, events: EventBus
    ) -> None:
        self.context = context
        self.database = database
        self.hubs = hubs
        self.schedulers = schedulers
        self.events = events
        self.started_at = context.clock.now()

    async def follow_market(self) -> None:
        """Take every tick of the market to the exchange, for ever."""
        await self.context.market.run(self.context.exchange.on_tick, self.started_at)


async def _open_outside(settings: Settings, stack: AsyncExitStack) -> tuple[MarketSource, Database]:
    """The market source and the database, with its schema."""
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    dsn = settings.database_url or await _embedded_dsn(source, stack)
    database = await Database.connect(dsn)
    stack.push_async_callback(database.close)
    await apply_schema(database)
    return source, database


async def _embedded_dsn(source: MarketSource, stack: AsyncExitStack) -> str:
    """A database of the embedded server. One per market, so that a demo and a replay can share the folder."""
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER))
    name = "trader_" + re.sub(r"[^a-z0-9]+", "_", source.identity.lower()).strip("_")
    log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
    return await server.ensure_database(name)


async def _start_services(
    settings: Settings, source: MarketSource, database: Database, stack: AsyncExitStack
) -> Service:
    async with database.connection() as conn:
        resume_at = await select_processed_until(conn)
    clock: Clock = source.clock(resume_at)
    async with database.connection() as conn:
        await ensure_partitions(conn, clock.now())
    events = EventBus()
    market = MarketData(source, clock)
    exchange = Exchange(database, market, clock, events, settings)
    portfolio = Portfolio(database, exchange, clock, settings)
    providers = make_providers(settings)
    stack.push_async_callback(providers.close)
    agents = Agents(database, exchange, market, clock, events, settings, providers)
    context = Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=exchange,
        trading=TradingRecords(database, exchange),
        portfolio=portfolio,
        analytics=Analytics(database, exchange, clock),
        agents=agents,
    )
    await exchange.start()
    stack.push_async_callback(exchange.close)
    await agents.start()
    stack.push_async_callback(agents.close)
    schedulers = Schedulers(jobs(events, agents.run_batch, portfolio.take_snapshots), clock)
    hubs = streams.Hubs(feeds.loads(context), events, clock)
    await hubs.start()
    stack.push_async_callback(hubs.close)
    log.info("the market's time is %s", iso(clock.now()))
    return Service(context, database, hubs, schedulers, events)


def build_app(service: Service) -> web.Application:
    """The HTTP application over running services."""
    context = service.context
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    rpc.setup(app, context)
    streams.setup(app, service.hubs)
    health.setup(
        app,
        health.HealthSources(
            clock=context.clock,
            started_at=service.started_at,
            trading_mode=context.settings.trading_mode,
            ping=service.database.ping,
            market=context.market,
            hubs=service.hubs.all,
            schedulers=lambda: dict(_statuses(service.schedulers)),
            models_running=context.agents.running,
        ),
    )
    cors.setup(app, context.settings)
    return app


def _statuses(schedulers: Schedulers) -> Mapping[str, health.SchedulerStatus]:
    return schedulers.status()


async def _listen(service: Service, settings: Settings, stack: AsyncExitStack) -> int:
    """Serve HTTP; the port listened on (PORT 0 takes any free one)."""
    runner = web.AppRunner(build_app(service), access_log=None, shutdown_timeout=_STREAMS_END_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, settings.host, settings.port)
    await site.start()
    addresses = runner.addresses
    if not addresses:
        raise StartError(f"nothing listens on {settings.host} port {settings.port}")
    return int(addresses[0][1])


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
