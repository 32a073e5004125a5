"""Composition root: makes every part of the service once, in order, and ends them in reverse order."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from aiohttp import web

from trader.api import connections, cors, health, metrics, openapi, rpc, stream_states, streams
from trader.api.context import Context
from trader.api.dashboard import page
from trader.api.schemas.common import ENCODER
from trader.clock import Clock, JumpWatch, SystemClock, iso
from trader.domain.operations.alarms import Alarm, Cause
from trader.embedded.server import EmbeddedPostgres
from trader.errors import StartError, Unavailable
from trader.external import ExternalSystems, open_external
from trader.gateways.agents.anchor_sinks import make_sink
from trader.gateways.agents.providers import Provider, find_outages, make_providers
from trader.gateways.agents.taapi import make_supplier
from trader.gateways.market.source import MarketSource
from trader.gateways.operations.notifications import Heartbeat, make_sinks
from trader.gateways.operations.supervisor import ALIVE, READY, STOPPING, Supervisor
from trader.gateways.sources import make_recorder
from trader.history import write_demo_history
from trader.leadership import Leadership, Relay, TradingControls
from trader.schedulers import Schedulers, describe_error, jobs
from trader.services.agents.anchors import Anchors
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts, log_trades
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.exchange.protocol import Exchange
from trader.services.exchange.read_only import ReadOnlyExchange
from trader.services.live.drift import DriftRecorder
from trader.services.live.exchange import LiveExchange
from trader.services.market.feed import MarketFeed
from trader.services.market.followed import FollowedMarket
from trader.services.operations.alarms import Alarms, send_heartbeats
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import OperatorCommands
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.baselines import Baselines
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.luck import LuckTable
from trader.services.portfolio.run_statistics import CurrentRuns
from trader.services.portfolio.snapshots import Portfolio
from trader.services.relay import LeaderView, RelayedQuote, RelayReader, RelayWriter
from trader.settings import Settings
from trader.store.database.leadership import SILENCE_S, LeaderLock
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.exchange.accounts import select_lived_until
from trader.store.operations.halts import select_halts

log = logging.getLogger("trader")

BODY_BYTES_MAX: Final = 1024 * 1024
_REQUESTS_END_S: Final = 1.0
"""How long requests may take to end at shutdown; the framework waits twice as long. Streams are closed before."""

_READY_S: Final = 30.0
"""How long the start waits for the statistics before the service listens."""


_CLOCK_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of the running service that its HTTP application and its tasks use."""

    context: Context
    database: Database
    accounts: Accounts
    providers: Mapping[str, Provider]
    hubs: streams.Hubs
    schedulers: Schedulers
    controls: TradingControls
    leadership: Leadership
    anchors: Anchors
    alarms: Alarms
    started_at: datetime


async def serve(settings: Settings, supervisor: Supervisor) -> None:
    """Run the service until SIGTERM or SIGINT.

    :raises StartError: something the service needs is missing, too old, or of another market
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        alarms = _open_alarms(settings, stack)
        stop = asyncio.create_task(_wait_for_stop(stopping, supervisor, alarms), name="stop signal")
        stack.push_async_callback(_cancel, [stop])
        try:
            await _serve(settings, supervisor, alarms, stop)
        except Exception as error:
            alarms.add(Alarm(Cause("stop"), f"ended by an error: {describe_error(error)}"))
            raise


async def _serve(settings: Settings, supervisor: Supervisor, alarms: Alarms, stop: asyncio.Task[None]) -> None:
    async with AsyncExitStack() as stack:
        external = await open_external(settings, stack)
        # Before anything is traded: a process that cannot listen must not have led in the meantime.
        sockets = connections.bind(settings.host, settings.port)
        for one in sockets:
            stack.callback(one.close)
        if not await _finishes(write_demo_history(settings, external), stop):
            return
        service = await _make_service(settings, external, alarms, stack)
        freeze_startup_objects()
        if not await _finishes(service.leadership.take_role(), stop):  # lead or stand by
            return
        stack.push_async_callback(service.leadership.resign)
        tasks = [*_endless_tasks(service, external.server), stop]
        ready = asyncio.create_task(_read_statistics(service), name="first statistics")
        stack.push_async_callback(_cancel, [*tasks, ready])
        await asyncio.wait([*tasks, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        freeze_startup_objects()
        port = await _listen(service, settings, sockets, stack)
        mode = f"{settings.trading_mode}, market {external.source.name}"
        log.info("listening on http://%s:%d (%s)", settings.host, port, mode)
        supervisor.notify(READY)
        alarms.add(Alarm(Cause("start"), f"started as {service.leadership.role} ({mode})"))
        if supervisor.watchdog_s is not None:
            tasks.append(asyncio.create_task(_keep_alive(supervisor, supervisor.watchdog_s), name="watchdog"))
            stack.push_async_callback(_cancel, tasks[-1:])
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only the stop signal ends by itself: this raises the error that ended any other task


async def _wait_for_stop(stopping: asyncio.Event, supervisor: Supervisor, alarms: Alarms) -> None:
    await stopping.wait()
    log.info("stopping")
    supervisor.notify(STOPPING)
    alarms.add(Alarm(Cause("stop"), "stops as asked by a signal"))  # sent while the rest of the service ends


async def _watch_clock() -> None:
    """Log when the machine's clock is set: whatever is dated by it shifts."""
    watch = JumpWatch(SystemClock().now, time.monotonic)
    while True:
        await asyncio.sleep(_CLOCK_EVERY_S)
        if (jump := watch.jump()) is not None:
            way = "back" if jump < timedelta(0) else "forward"
            log.warning("the machine's clock was set %s by %.1f s, or slept", way, abs(jump.total_seconds()))


async def _keep_alive(supervisor: Supervisor, every_s: float) -> None:
    """Prove to the supervisor that the event loop turns."""
    while True:
        supervisor.notify(ALIVE)
        await asyncio.sleep(every_s)


def _open_alarms(settings: Settings, stack: AsyncExitStack) -> Alarms:
    """Return the alarms of this process, with the dead-man ping running beside them."""
    sender = f"trader {socket.gethostname()}:{settings.port}"
    alarms = Alarms(make_sinks(settings.notify_urls, sender), disk_least=settings.disk_alarm_mb * 1_000_000)
    stack.push_async_callback(alarms.close)
    if settings.heartbeat_url is not None:
        heartbeat = Heartbeat(settings.heartbeat_url)
        stack.push_async_callback(heartbeat.close)
        beats = send_heartbeats(heartbeat, settings.heartbeat_every_s, lambda: alarms.is_healthy)
        stack.push_async_callback(_cancel, [asyncio.create_task(beats, name="dead-man pings")])
    return alarms


async def _finishes(work: Coroutine[Any, Any, None], stop: asyncio.Task[Any]) -> bool:
    """Do a part of the start. False when stopped before its end: catching up on a long downtime takes minutes."""
    task = asyncio.create_task(work, name="start")
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        log.info("stopping before the start is done")
        return False
    finally:
        await _cancel([task])


def _endless_tasks(service: Service, server: EmbeddedPostgres | None) -> list[asyncio.Task[Any]]:
    """Start the tasks that run as long as the service; one that ends takes the process with it."""
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(service.leadership.follow_market(), name="market feed"),
        asyncio.create_task(service.leadership.keep_role(), name="role"),
        asyncio.create_task(service.controls.operations.run(), name="operators"),
        asyncio.create_task(service.anchors.run(), name="anchors of the chain"),
        asyncio.create_task(_watch_clock(), name="clock"),
    ]
    if server is not None:
        tasks.append(asyncio.create_task(_fail_with(server), name="embedded PostgreSQL"))
    return tasks


def freeze_startup_objects() -> None:
    """Freeze the objects made at start out of garbage collection: each full collection would walk them for 30 ms.

    Done before models trade, and again before callers come, with what was read of a long season since.
    """
    gc.collect()
    gc.freeze()


async def check(settings: Settings) -> list[str]:
    """Check what the service needs without running it. Return one line per part.

    :raises StartError: something is missing, too old, or of another market
    """
    async with AsyncExitStack() as stack:
        external = await open_external(settings, stack)
        source = external.source
        latency_ms = await external.database.ping()
        accounts = external.venue_accounts
        where = "" if accounts is None else f": account {accounts.default_index} at {accounts.url}"
        async with external.database.connection() as conn:
            halts = await select_halts(conn)
        return [
            f"settings: valid, {settings.trading_mode}{where}",
            f"market: {source.identity} with {', '.join(source.markets)}",
            f"database: connected, schema in place, {latency_ms:.1f} ms",
            *(f"halted: {halt}" for halt in halts),
        ]


async def _read_statistics(service: Service) -> None:
    """Read the trades and hours of the current runs once: of a long season it takes seconds. Models trade meanwhile."""
    context, began_s = service.context, time.monotonic()
    try:
        async with asyncio.timeout(_READY_S):
            await context.analytics.model_stats()
    except (Unavailable, TimeoutError) as error:
        log.warning("the first statistics will take longer: %s", str(error) or f"not read within {_READY_S:g} s")
        return
    log.info("the statistics of the current runs were read in %.1f s", time.monotonic() - began_s)


async def _make_service(
    settings: Settings, external: ExternalSystems, alarms: Alarms, stack: AsyncExitStack
) -> Service:
    database, events = external.database, EventBus()
    events.subscribe(log_trades)
    events.subscribe(alarms.on_event)
    followed = RelayReader(database, events)
    leader = followed if settings.role == "reader" else None
    source = external.source if leader is None else FollowedMarket(external.source, leader)
    clock = await _make_clock(source, external)
    recorder = make_recorder(settings, source) if leader is None else None
    market = MarketFeed(source, clock, recorder=recorder)
    accounts = Accounts(database, LedgerWriter(database), events)
    halts = Halts(database, clock, events)
    exchange: Exchange
    if leader is not None:
        exchange = ReadOnlyExchange(market, clock, settings, accounts, leader)
    elif (venue := external.venue_accounts) is None:
        exchange = PaperExchange(database, market, clock, settings, accounts, halts)
    else:
        drift = DriftRecorder(database)
        exchange = LiveExchange(database, market, clock, events, settings, venue, accounts, halts, drift)
    limits = LossLimits(database, exchange, halts, settings)
    controls = TradingControls(halts, limits, OperatorCommands(database, exchange, halts, limits))
    providers = make_providers(settings)
    alarms.providers = lambda: find_outages(providers)
    stack.push_async_callback(providers.close)
    supplier = make_supplier(settings, clock)
    if supplier is not None:
        stack.push_async_callback(supplier.close)
    runs, luck = CurrentRuns(database), LuckTable(database, market, settings)
    stack.push_async_callback(luck.close)
    context = Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=exchange,
        portfolio=Portfolio(database, exchange, clock, settings, leader),
        analytics=Analytics(database, exchange, clock, runs),
        evidence=Evidence(database, runs, luck, clock),
        agents=Agents(database, exchange, market, clock, events, settings, providers, supplier=supplier, leader=leader),
    )
    baselines = Baselines(database, exchange, market, clock, settings)
    schedulers = _make_schedulers(context, events, baselines)
    hubs = streams.Hubs(stream_states.state_loaders(context), events, clock)
    await hubs.start()
    stack.push_async_callback(hubs.close)
    # A silent leader's lock is freed on paper only: the venue cannot refuse the orders of a leader whose term is over.
    silence_s = SILENCE_S if external.venue_accounts is None else 0
    lock = None if leader is not None else LeaderLock(external.dsn, silence_s)
    relay = Relay(RelayWriter(database, events, lambda: leader_view(context), ENCODER.encode), followed)
    leadership = Leadership(context, database, accounts, events, schedulers, lock, controls, baselines, relay)
    alarms.is_leader = lambda: leadership.role == "leader"
    sink = make_sink(settings.anchor_url)
    if sink is not None:
        stack.push_async_callback(sink.close)
    anchors = Anchors(database, sink, lambda: leadership.role == "leader")
    return Service(
        context, database, accounts, providers, hubs, schedulers, controls, leadership, anchors, alarms, clock.now()
    )


async def _make_clock(source: MarketSource, external: ExternalSystems) -> Clock:
    """Return the clock of the market, from where the last process left off."""
    async with external.database.connection() as conn:
        clock = source.clock(resume_at=await select_lived_until(conn))
        if external.is_written:
            await ensure_partitions(conn, clock.now())
    log.info("the market's time is %s", iso(clock.now()))
    return clock


def leader_view(context: Context) -> LeaderView:
    """Return what the leader shows to the processes that follow it."""
    market = context.market
    troubles = {symbol: trouble for symbol in market.markets if (trouble := market.trouble(symbol)) is not None}
    return LeaderView(
        now=context.clock.now(),
        updated_at=market.last_update_at,
        quotes=tuple(RelayedQuote(q.symbol, q.at, q.bid, q.ask, q.mark) for q in market.quotes().values()),
        markets=tuple(market.markets.values()),
        market_troubles=troubles,
        account_troubles=dict(context.exchange.troubles),
        warning=context.agents.warning(),
        snapshots_created=context.portfolio.created,
    )


def _make_schedulers(context: Context, events: EventBus, baselines: Baselines) -> Schedulers:
    async def start_batch(now: datetime) -> None:
        await context.agents.start_batch(now)
        await baselines.decide(now, {model.variant for model in context.agents.models.values() if model.active})

    async def take_snapshots(now: datetime) -> None:
        await context.portfolio.take_snapshots(now)
        await baselines.record(now)

    return Schedulers(jobs(events, start_batch, take_snapshots), context.clock)


def build_app(service: Service) -> web.Application:
    """Return the HTTP application of the service."""
    context, leadership, halts = service.context, service.leadership, service.controls.halts
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    page.setup(app, context.settings)  # before the procedures, whose last route answers every path that no other has
    dispatcher = rpc.setup(app, context)
    openapi.setup(app, context)
    streams.setup(app, service.hubs)
    health_sources = health.HealthSources(
        clock=context.clock,
        started_at=service.started_at,
        trading_mode=context.settings.trading_mode,
        ping=service.database.ping,
        market=context.market,
        hubs=service.hubs.all,
        schedulers=service.schedulers.status,
        role=lambda: leadership.role,
        lag_s=lambda: leadership.lag_s,
        running=leadership.running_schedulers,
        troubles=lambda: context.exchange.troubles,
        models_running=context.agents.running,
        models_waiting=context.agents.waiting,
        write_trouble=lambda: service.database.write_trouble,
        halts=lambda: halts.in_force,
        budgets=lambda: context.agents.budgets.states(context.agents.models),
        report=service.alarms.watch,
    )
    health.setup(app, health_sources)
    if context.settings.metrics == "on":
        metrics.setup(
            app,
            metrics.MetricsSources(
                hubs=service.hubs.all,
                schedulers=service.schedulers.status,
                pool=service.database.use,
                tally=service.accounts.tally,
                providers=service.providers,
                cache=dispatcher.cache,
                large_answers=dispatcher.large_answers,
                models_running=context.agents.running,
                models_waiting=context.agents.waiting,
                cycles_skipped=lambda: context.agents.skipped,
                health=health_sources,
                write_failures=lambda: service.database.write_failures,
                equity=context.portfolio.equity,
                alarms=service.alarms,
            ),
        )
    app.on_response_prepare.append(health.lag_header(health_sources))
    cors.setup(app, context.settings)
    return app


async def _listen(service: Service, settings: Settings, sockets: Sequence[socket.socket], stack: AsyncExitStack) -> int:
    """Serve HTTP. Return the port (PORT 0 takes any free one)."""
    limits = connections.ConnectionLimits.of(settings)
    limits = replace(limits, connections_max=connections.raise_file_limit(limits.connections_max))
    server = connections.HttpServer(build_app(service), limits, shutdown_timeout_s=_REQUESTS_END_S)
    stack.push_async_callback(server.stop)
    try:
        await server.start(sockets)
    except OSError as error:  # another process took the port in the same moment
        raise connections.cannot_listen(settings.host, settings.port, error) from error
    return int(sockets[0].getsockname()[1])


async def _fail_with(server: EmbeddedPostgres) -> None:
    """Raise when the embedded server has ended by itself: a supervisor starts both again."""
    raise StartError(f"the embedded PostgreSQL has ended by itself: {await server.ended()}")


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
