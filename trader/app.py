"""The composition root: every part of the service is made here once, in order, and ended in the opposite order."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from aiohttp import web

from trader.api import connections, cors, feeds, health, metrics, openapi, rpc, streams, warm
from trader.api.context import Context
from trader.clock import iso
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import StartError, Unavailable
from trader.gateways.agents.providers import make_providers
from trader.gateways.agents.taapi import make_supplier
from trader.gateways.lighter.account import LighterAccounts
from trader.gateways.market.source import MarketSource
from trader.gateways.sources import make_source
from trader.leadership import Guards, Service
from trader.schedulers import Schedulers, jobs
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.exchange.protocol import Exchange
from trader.services.live.drift import DriftRecorder
from trader.services.live.exchange import LiveExchange
from trader.services.market.feed import MarketFeed
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import Operations
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.snapshots import Portfolio
from trader.services.portfolio.trades import TradingRecords
from trader.settings import Settings
from trader.store.database.leadership import SILENCE_S, LeaderLock
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema
from trader.store.exchange.accounts import select_processed_until
from trader.store.operations.safety import select_halts

log = logging.getLogger("trader")

BODY_BYTES_MAX: Final = 1024 * 1024
_REQUESTS_END_S: Final = 1.0
"""How long requests may take to end at shutdown; the framework waits as long twice. The streams are closed before."""

_READY_S: Final = 30.0
"""How long callers may be kept waiting at the start for answers to be made ready."""


async def serve(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT.

    :raises StartError: something the service needs is missing, too old, or of another market
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        outside = await _open_outside(settings, stack)
        # Before anything is traded: whoever cannot listen must not have led meanwhile.
        sockets = connections.bind(settings.host, settings.port)
        for one in sockets:
            stack.callback(one.close)
        service = await _make_services(settings, outside, stack)
        stop = asyncio.create_task(stopping.wait(), name="stop signal")
        stack.push_async_callback(_cancel, [stop])
        if not await _take_role(service, stop):
            return
        stack.push_async_callback(service.resign)
        tasks = [
            asyncio.create_task(service.follow_market(), name="market feed"),
            asyncio.create_task(service.keep_role(), name="role"),
            asyncio.create_task(service.operations.run(), name="operators"),
            stop,
        ]
        if outside.server is not None:
            tasks.append(asyncio.create_task(_fail_with(outside.server), name="embedded PostgreSQL"))
        ready = asyncio.create_task(_make_ready(service), name="first answers")
        stack.push_async_callback(_cancel, [*tasks, ready])
        await asyncio.wait([*tasks, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        settle_memory()
        port = await _listen(service, settings, sockets, stack)
        log.info(
            "listening on http://%s:%d (%s, market %s)", settings.host, port, settings.trading_mode, outside.source.name
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only the stop signal ends by itself: this raises what another one died of
        log.info("stopping")


async def _take_role(service: Service, stop: asyncio.Task[Any]) -> bool:
    """Lead or stand by. False when it is to stop before that: of a long downtime the catching up takes minutes."""
    taking = asyncio.create_task(service.take_role(), name="taking the role")
    try:
        await asyncio.wait([taking, stop], return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            taking.result()
            return True
        log.info("stopping before the start is done")
        return False
    finally:
        await _cancel([taking])


def settle_memory() -> None:
    """Leave what the start has made to itself: walking through it again holds up everybody for some 30 ms each time.

    Of a long season the walk that this begins with takes tenths of a second, so nobody should be waiting yet.
    """
    gc.collect()
    gc.freeze()


async def check(settings: Settings) -> list[str]:
    """Try what the service needs without running it. One line per part.

    :raises StartError: something is missing, too old, or of another market
    """
    async with AsyncExitStack() as stack:
        outside = await _open_outside(settings, stack)
        source = outside.source
        latency_ms = await outside.database.ping()
        accounts = outside.accounts
        where = "" if accounts is None else f": account {accounts.default_index} at {accounts.url}"
        async with outside.database.connection() as conn:
            halts = await select_halts(conn)
        return [
            f"settings: valid, {settings.trading_mode}{where}",
            f"market: {source.identity} with {', '.join(source.markets)}",
            f"database: connected, schema in place, {latency_ms:.1f} ms",
            *(f"halted: {halt}" for halt in halts),
        ]


async def _make_ready(service: Service) -> None:
    """Read what answers are made of before anybody asks: of a long season it takes seconds. Models trade meanwhile."""
    context, began_s = service.context, time.monotonic()
    try:
        async with asyncio.timeout(_READY_S):
            await warm.warm(context, context.clock.now())
            await rpc.rehearse(context)
    except (Unavailable, TimeoutError) as error:
        log.warning("the first answers will take longer: %s", str(error) or f"they are not ready after {_READY_S:g} s")
        return
    log.info("the first answers were made ready in %.1f s", time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Outside:
    """What the service stands on. `server` is the embedded PostgreSQL, when the database is there.

    `accounts` are those of a real venue, when orders go to one.
    """

    source: MarketSource
    database: Database
    dsn: str
    server: EmbeddedPostgres | None
    accounts: LighterAccounts | None


async def _open_outside(settings: Settings, stack: AsyncExitStack) -> Outside:
    """Open the market source, the venue and the database, and bring its schema in place."""
    accounts = await _open_accounts(settings, stack)
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    server = None
    if settings.database_url is None:
        server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER))
        name = database_name(source.identity, None if accounts is None else accounts.default_index)
        dsn = await _embedded_dsn(server, name)
    else:
        dsn = settings.database_url
    database = await Database.connect(dsn)
    stack.push_async_callback(database.close)
    await apply_schema(database)
    return Outside(source, database, dsn, server, accounts)


async def _open_accounts(settings: Settings, stack: AsyncExitStack) -> LighterAccounts | None:
    """The accounts at a real venue; None on paper. Here, and only here, it is decided which of the two it is.

    :raises StartError: live trading is not confirmed, or the venue's SDK is missing or does not sign what it is given
    """
    if settings.trading_mode != "live":
        return None
    if settings.live_confirm != settings.venue_account_index:
        raise StartError(
            "TRADING_MODE=live trades real money. To confirm it set LIVE_CONFIRM to the account that is traded: "
            f"LIVE_CONFIRM={settings.venue_account_index}"
        )
    accounts = LighterAccounts(settings)
    stack.push_async_callback(accounts.close)
    accounts.prove()
    return accounts


async def _embedded_dsn(server: EmbeddedPostgres, name: str) -> str:
    """A database of the embedded server. One per market and live account, so that all can share the folder."""
    log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
    return await server.ensure_database(name)


async def _make_services(settings: Settings, outside: Outside, stack: AsyncExitStack) -> Service:
    source, database = outside.source, outside.database
    async with database.connection() as conn:
        clock = source.clock(resume_at=await select_processed_until(conn))
        await ensure_partitions(conn, clock.now())
    events = EventBus()
    market = MarketFeed(source, clock)
    accounts = Accounts(database, LedgerWriter(database), events)
    halts = Halts(database, clock, events)
    exchange: Exchange
    if outside.accounts is None:
        exchange = PaperExchange(database, market, clock, settings, accounts, halts)
        silence_s = SILENCE_S
    else:
        drift = DriftRecorder(database)
        exchange = LiveExchange(database, market, clock, events, settings, outside.accounts, accounts, halts, drift)
        silence_s = 0  # one that goes on would send its orders to the venue, which knows no terms
    limits = LossLimits(database, exchange, halts, settings)
    guards = Guards(halts, limits, Operations(database, exchange, halts, limits))
    portfolio = Portfolio(database, exchange, clock, settings)
    providers = make_providers(settings)
    stack.push_async_callback(providers.close)
    supplier = make_supplier(settings, clock)
    if supplier is not None:
        stack.push_async_callback(supplier.close)
    agents = Agents(database, exchange, market, clock, events, settings, providers, supplier=supplier)
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
    keeper = warm.Keeper(context)

    async def take_snapshots(now: datetime) -> None:
        await portfolio.take_snapshots(now)
        await keeper.keep(now)

    schedulers = Schedulers(jobs(events, agents.run_batch, take_snapshots), clock)
    hubs = streams.Hubs(feeds.loads(context), events, clock)
    await hubs.start()
    stack.push_async_callback(hubs.close)
    log.info("the market's time is %s", iso(clock.now()))
    return Service(context, database, accounts, events, hubs, schedulers, LeaderLock(outside.dsn, silence_s), guards)


def build_app(service: Service) -> web.Application:
    """The HTTP application over running services."""
    context = service.context
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    dispatcher = rpc.setup(app, context)
    openapi.setup(app, context)
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
            schedulers=service.schedulers.status,
            role=lambda: service.role,
            running=service.running_schedulers,
            troubles=lambda: context.exchange.troubles,
            models_running=context.agents.running,
            halts=lambda: service.halts.in_force,
        ),
    )
    if context.settings.metrics == "on":
        metrics.setup(
            app,
            metrics.MetricsSources(
                hubs=service.hubs.all,
                schedulers=service.schedulers.status,
                pool=service.database.use,
                tally=service.accounts.tally,
                providers=context.agents.providers,
                kept=dispatcher.kept,
                models_running=context.agents.running,
            ),
        )
    cors.setup(app, context.settings)
    return app


async def _listen(service: Service, settings: Settings, sockets: Sequence[socket.socket], stack: AsyncExitStack) -> int:
    """Serve HTTP; the port listened on (PORT 0 takes any free one)."""
    limits = connections.ConnectionLimits.of(settings)
    connections.raise_file_limit(limits.connections_max)
    server = connections.HttpServer(build_app(service), limits, shutdown_timeout_s=_REQUESTS_END_S)
    stack.push_async_callback(server.stop)
    try:
        await server.start(sockets)
    except OSError as error:  # another process took the port in the same moment
        raise connections.cannot_listen(settings.host, settings.port, error) from error
    return int(sockets[0].getsockname()[1])


async def _fail_with(server: EmbeddedPostgres) -> None:
    """End the service when its database has ended by itself: a supervisor starts both again."""
    raise StartError(f"the embedded PostgreSQL has ended by itself: {await server.ended()}")


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
