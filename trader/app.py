"""The running service: starts its parts in order, serves HTTP, and ends everything in reverse order."""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from aiohttp import web

from trader.api import connections, edge, health, metrics, openapi, record, rpc, streams
from trader.api.context import (
    ACCESS,
    ACCOUNTS,
    ALARMS,
    CONTEXT,
    DATABASE,
    HALTS,
    PROVIDERS,
    RELAY,
    ROLE,
    SCHEDULERS,
    STARTED_AT,
)
from trader.api.dashboard import page
from trader.api.streams import BROADCASTERS
from trader.backtest.history import write_demo_history
from trader.composition.external import check_external, open_external
from trader.composition.service import Service, make_service
from trader.core import tasks
from trader.core.clock import SystemClock
from trader.core.errors import SettingsError, StartError, Unavailable
from trader.core.schedulers import describe_error
from trader.database.embedded.server import EmbeddedPostgres
from trader.operations.access import Access
from trader.operations.alarms import HEARTBEAT_EVERY_S, Alarms, ClockWatch, send_heartbeats
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.notifications import Heartbeat, make_sinks, sender_of
from trader.operations.supervisor import (
    ALIVE,
    READY,
    STEADY_S,
    STOPPING,
    Restarts,
    ServiceAddress,
    Supervisor,
    announced,
    end_signals,
)
from trader.settings.checks import local_address
from trader.settings.settings import Settings

log = logging.getLogger("trader")

_READY_S: Final = 30.0
"""How long the start waits for the statistics before the service listens."""


async def serve(settings: Settings, supervisor: Supervisor) -> None:
    """Run the service until SIGTERM, SIGHUP or SIGINT.

    :raises StartError: something the service needs is missing, too old, or of another market
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (*end_signals(), signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    restarts, now = Restarts(settings.port), SystemClock().now
    restarts.begin(now())
    async with AsyncExitStack() as stack:
        alarms = _open_alarms(settings, stack)
        if restarts.failures.is_first_kill:
            alarms.add(Alarm(AlarmCause("stop"), restarts.failures.text))
        stop = asyncio.create_task(_wait_for_stop(stopping, supervisor, alarms), name="stop signal")
        stack.push_async_callback(tasks.end, stop)
        try:
            await _serve(settings, supervisor, alarms, restarts, stop)
        except Exception as error:
            text = describe_error(error)
            if restarts.failures.count == 0:  # the notice of the next lasting start counts those that follow
                alarms.add(Alarm(AlarmCause("stop"), f"ended by an error: {text}"))
            if not isinstance(error, SettingsError):  # which no further start mends
                restarts.fail(text, now())
            raise
        restarts.end()


async def _back_off(restarts: Restarts) -> None:
    """Wait longer from failure to failure, unless a person at a terminal waits for the start."""
    pause_s = 0 if sys.stderr.isatty() else restarts.failures.pause_s
    if pause_s:
        log.warning("starting in %g s%s", pause_s, restarts.failures.summary)
    await asyncio.sleep(pause_s)


async def announce_start(restarts: Restarts, alarms: Alarms, text: str) -> None:
    """Send the notice of the start; after failures, only once this process has run for a while, with their count.

    Continues until it is canceled.
    """
    if restarts.failures.count:
        await asyncio.sleep(STEADY_S)
    alarms.add(Alarm(AlarmCause("start"), f"{text}{restarts.failures.summary}"))
    await asyncio.sleep(STEADY_S if restarts.failures.count == 0 else 0)
    restarts.steady()
    await asyncio.Event().wait()


async def _serve(
    settings: Settings, supervisor: Supervisor, alarms: Alarms, restarts: Restarts, stop: asyncio.Task[None]
) -> None:
    async with AsyncExitStack() as stack:
        if not await _finishes(_back_off(restarts), stop):
            return
        external = await open_external(settings, stack)
        restarts.run()
        # Bind before any trading: a process that cannot listen must never lead.
        sockets = connections.bind(settings.host, settings.port)
        for sock in sockets:
            stack.callback(sock.close)
        if external.is_written:
            history = write_demo_history(settings, external.source, external.dsn)
            if not await _finishes(history, stop):
                return
        service = await make_service(settings, external, alarms, stack)
        freeze_startup_objects()
        if not await _finishes(service.leadership.take_role(), stop):  # lead or stand by
            return
        stack.push_async_callback(service.leadership.resign)
        endless = [*_endless_tasks(service, external.server), stop]
        ready = asyncio.create_task(_read_statistics(service), name="first statistics")
        stack.push_async_callback(tasks.end, *endless, ready)
        await asyncio.wait([*endless, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        freeze_startup_objects()
        app = build_app(settings, service)
        port = await stack.enter_async_context(connections.serving(app, settings, sockets))
        address = ServiceAddress(local_address(settings.host, port), app[ACCESS].local_token, is_of_folder=True)
        stack.enter_context(announced(port, address))
        mode = f"{settings.trading_mode}, market {external.source.name}"
        log.info("listening on http://%s:%d (%s)", settings.host, port, mode)
        supervisor.notify(READY)
        announce = partial(announce_start, restarts, alarms, f"started as {service.leadership.role} ({mode})")
        stack.push_async_callback(tasks.end, tasks.keep(announce, "notice of the start"))
        if supervisor.watchdog_s is not None:
            endless.append(asyncio.create_task(_keep_alive(supervisor, supervisor.watchdog_s), name="watchdog"))
            stack.push_async_callback(tasks.end, endless[-1])
        done, _ = await asyncio.wait(endless, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only the stop signal ends on its own; any other task ended with an error, which this raises


async def _wait_for_stop(stopping: asyncio.Event, supervisor: Supervisor, alarms: Alarms) -> None:
    await stopping.wait()
    log.info("stopping")
    supervisor.notify(STOPPING)
    alarms.add(Alarm(AlarmCause("stop"), "stopping on a signal"))  # sent while the rest of the service ends


async def _keep_alive(supervisor: Supervisor, every_s: float) -> None:
    """Prove to the supervisor that the event loop is running."""
    while True:
        supervisor.notify(ALIVE)
        await asyncio.sleep(every_s)


def _open_alarms(settings: Settings, stack: AsyncExitStack) -> Alarms:
    """Return the alarms of this process, with the dead-man ping running alongside."""
    alarms = Alarms(
        make_sinks(settings.notify_urls, sender_of(settings)), disk_least=settings.disk_alarm_mb * 1_000_000
    )
    alarms.sources.append(ClockWatch().problems)
    stack.push_async_callback(alarms.close)
    if settings.heartbeat_url is not None:
        heartbeat = Heartbeat(settings.heartbeat_url)
        stack.push_async_callback(heartbeat.close)
        beats = partial(send_heartbeats, heartbeat, HEARTBEAT_EVERY_S, lambda: alarms.is_healthy)
        stack.push_async_callback(tasks.end, tasks.keep(beats, "dead-man pings"))
    return alarms


async def _finishes(work: Coroutine[Any, Any, None], stop: asyncio.Task[Any]) -> bool:
    """Run a part of the startup, which may take minutes. Return False if stopped before its end."""
    task = asyncio.create_task(work, name="start")
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        stop.result()
        log.info("stopping before startup is complete")
        return False
    finally:
        await tasks.end(task)


def _endless_tasks(service: Service, server: EmbeddedPostgres | None) -> list[asyncio.Task[Any]]:
    """Start the tasks that run as long as the service; if one ends, the process ends."""
    endless: list[asyncio.Task[Any]] = [
        asyncio.create_task(service.leadership.follow_market(), name="market feed"),
        asyncio.create_task(service.leadership.keep_role(), name="role"),
        asyncio.create_task(service.trading.operations.run(), name="operators"),
        asyncio.create_task(service.anchors.run(), name="anchors of the chain"),
    ]
    if server is not None:
        endless.append(asyncio.create_task(_fail_with(server), name="embedded PostgreSQL"))
    return endless


def freeze_startup_objects() -> None:
    """Exclude the objects created at startup from garbage collection, since each full collection would take 30 ms.

    Called before models trade, and again before requests arrive, to include the statistics of a long season.
    """
    gc.collect()
    gc.freeze()


async def check(settings: Settings) -> list[str]:
    """Check everything that the service needs, without running it or changing anything. Return one line per part.

    :raises StartError: something is missing, too old, or of another market
    """
    async with AsyncExitStack() as stack:
        return await check_external(settings, stack)


async def _read_statistics(service: Service) -> None:
    """Read the trades and hours of the current runs once, which takes seconds in a long season.

    Models trade meanwhile.
    """
    context, began_s = service.context, time.monotonic()
    try:
        async with asyncio.timeout(_READY_S):
            await context.analytics.model_stats()
    except (Unavailable, TimeoutError) as error:
        log.warning("the first statistics will take longer: %s", str(error) or f"not read within {_READY_S:g} s")
        return
    log.info("the statistics of the current runs were read in %.1f s", time.monotonic() - began_s)


def build_app(settings: Settings, service: Service) -> web.Application:
    """Return the HTTP application, with its routes, its middleware, and the parts that its handlers use."""
    access = Access(service.database, settings.api_token, settings.read_token)
    service.alarms.sources.append(access.alarms)
    routes = [
        *page.routes(service.context), *openapi.routes(settings), *streams.routes(), *health.routes(),
        *record.routes(), *(metrics.routes() if settings.metrics == "on" else ()),
    ]  # fmt: skip
    app = edge.make_app(settings, access, rpc.make_dispatcher(service.context), routes)
    app[CONTEXT] = service.context
    app[DATABASE] = service.database
    app[ACCOUNTS] = service.trading.accounts
    app[HALTS] = service.trading.halts
    app[SCHEDULERS] = service.schedulers
    app[ROLE] = service.leadership
    app[RELAY] = service.coordination.reader
    app[PROVIDERS] = service.providers
    app[ALARMS] = service.alarms
    app[STARTED_AT] = service.started_at
    app[BROADCASTERS] = service.broadcasters
    app.cleanup_ctx.extend([streams.run, health.watch, *([metrics.measure] if settings.metrics == "on" else ())])
    app.on_shutdown.append(streams.end)
    return app


async def _fail_with(server: EmbeddedPostgres) -> None:
    """Raise an error if the embedded server ends on its own: a supervisor restarts both."""
    raise StartError(f"the embedded PostgreSQL has ended unexpectedly: {await server.ended()}")
