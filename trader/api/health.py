"""Health endpoints: `GET /health` says whether the service does its work, `/health/live` whether the process answers,
and `/health/schedulers` reports on each part.

The database is pinged with a short timeout, and the result is reused for a moment, so that many requests are one query.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

from aiohttp import hdrs, web
from msgspec import UNSET, UnsetType

from trader.api.context import ALARMS, CONTEXT, DATABASE, HALTS, RELAY, ROLE, SCHEDULERS, STARTED_AT
from trader.api.routes import Documented, Route, json_answer
from trader.api.schemas.common import BudgetUse, iso
from trader.api.schemas.health import (
    AlarmFiring,
    DatabaseHealth,
    HealthReport,
    LiveReport,
    MarketHealth,
    ModelFailing,
    ModelRunning,
    ModelWaiting,
    SchedulerHealth,
    SchedulersReport,
    StreamHealth,
    halts_in_force,
)
from trader.api.streams import HUBS
from trader.domain.operations.alarms import Alarm, AlarmCause, Condition
from trader.errors import DatabaseUnavailable, Unavailable
from trader.store.database.pool import NOT_ANSWERING, Database

log = logging.getLogger(__name__)

PING_S = 1.0
"""A database that takes longer to answer is not healthy."""

GOOD_FOR_S = 0.2

STALE_S: Final = 60.0
"""A market without an update for so long is unhealthy."""

SILENT_S: Final = 30.0
"""A leader of which nothing has come for so long is unhealthy. It is also when its schedulers count as not running."""

FAILURES_MAX: Final = 2
"""A scheduler that fails more often than this in a row is unhealthy."""

WATCH_EVERY_S: Final = 5.0
LOG_EVERY_S: Final = 60.0
"""How often the reasons are logged while the service is unhealthy."""

NOT_STORED: dict[str, str] = {hdrs.CACHE_CONTROL: "no-store"}


_HEADERS: Final = ("X-Request-Id", "Cache-Control")

HEALTH: Final = Route(
    "/health",
    "Whether the service is healthy",
    tag="health",
    responses={
        200: Documented(
            "Bookings are written, the market is live, and every scheduler does its work.", HealthReport, _HEADERS
        ),
        503: Documented(
            "One of these does not hold, or books and venue disagree; `reasons` says which.", HealthReport, _HEADERS
        ),
    },
    alias="/api/health",
    head=True,
)
LIVE: Final = Route(
    "/health/live",
    "Whether the process answers, for supervisors that restart it",
    tag="health",
    responses={200: Documented("It does.", LiveReport, _HEADERS)},
    alias="/api/health/live",
    head=True,
)
REPORT: Final = Route(
    "/health/schedulers",
    "The parts of the service in detail; always 200",
    tag="health",
    responses={200: Documented("The report.", SchedulersReport, _HEADERS)},
    alias="/api/health/schedulers",
    head=True,
)


class DatabaseProbe:
    """Pings the database at most once at a time, and reuses the last result for `GOOD_FOR_S`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asking = asyncio.Lock()
        self._answer = DatabaseHealth(ok=False, latency_ms=None)
        self._good_until_s = 0.0

    async def ask(self) -> DatabaseHealth:
        async with self._asking:
            if time.monotonic() >= self._good_until_s:
                self._answer = await self._latency()
                self._good_until_s = time.monotonic() + GOOD_FOR_S
            return self._answer

    async def _latency(self) -> DatabaseHealth:
        try:
            async with asyncio.timeout(PING_S):
                return DatabaseHealth(ok=True, latency_ms=round(await self._database.ping(), 3))
        except (Unavailable, OSError, TimeoutError):  # the pool logs the cause
            return DatabaseHealth(ok=False, latency_ms=None)


PROBE: Final = web.AppKey("probe", DatabaseProbe)


async def answer_health(request: web.Request) -> web.Response:
    """Answer whether the service does its work, with the reasons when it does not."""
    app = request.app
    reasons = [problem.text for problem in find_problems(app, await app[PROBE].ask())]
    context = app[CONTEXT]
    report = HealthReport(
        status="unhealthy" if reasons else "healthy",
        timestamp=iso(context.clock.now()),
        schedulers=dict(app[ROLE].running_schedulers()),
        reasons=reasons or UNSET,
        reconciliation=dict(context.exchange.troubles) or UNSET,
        halts=halts_in_force(app[HALTS].in_force),
        lag_seconds=_lag(app),
    )
    return json_answer(503 if reasons else 200, report, NOT_STORED)


async def answer_live(request: web.Request) -> web.Response:
    """Answer that the process runs, whatever else is wrong."""
    now = request.app[CONTEXT].clock.now()
    return json_answer(200, LiveReport(status="alive", timestamp=iso(now)), NOT_STORED)


async def answer_report(request: web.Request) -> web.Response:
    """Report on each part of the service."""
    database = await request.app[PROBE].ask()
    return json_answer(200, _schedulers_report(request.app, database), NOT_STORED)


def routes() -> list[web.RouteDef]:
    """Return the routes of the three reports."""
    return [*HEALTH.get(answer_health), *LIVE.get(answer_live), *REPORT.get(answer_report)]


async def watch(app: web.Application) -> AsyncIterator[None]:
    """Log and report problems while the application runs."""
    app[PROBE] = DatabaseProbe(app[DATABASE])
    watching = asyncio.create_task(_watch(app), name="health")
    yield
    watching.cancel()
    await asyncio.wait([watching])


def find_problems(app: web.Application, database: DatabaseHealth) -> list[Alarm]:
    """Return why the service does not do its work now; nothing when it does."""
    return [
        *_database_problems(app, database),
        *_market_problems(app),
        *_scheduler_problems(app),
        *(
            Alarm(AlarmCause("reconciliation", account), f"books and venue disagree on {account}: {why}")
            for account, why in app[CONTEXT].exchange.troubles.items()
        ),
    ]


def _database_problems(app: web.Application, database: DatabaseHealth) -> Iterator[Alarm]:
    trouble = app[DATABASE].trouble
    if trouble is not None or not database.ok:
        yield Alarm(AlarmCause("database"), str(DatabaseUnavailable(trouble or NOT_ANSWERING)))
    if (lag_s := app[RELAY].lag_s()) is not None and lag_s > SILENT_S:
        yield Alarm(AlarmCause("database"), f"nothing has come from the leader for {lag_s:.0f} s")


def _market_problems(app: web.Application) -> Iterator[Alarm]:
    market, now = app[CONTEXT].market, app[CONTEXT].clock.now()
    silent_s = (now - (market.last_update_at or app[STARTED_AT])).total_seconds()
    if silent_s > STALE_S and not market.has_ended:
        trouble = market.troubles()
        text = f"no update of the market for {silent_s:.0f} s" + (f": {trouble}" if trouble else "")
        yield Alarm(AlarmCause("market"), text)


def _scheduler_problems(app: web.Application) -> Iterator[Alarm]:
    statuses, running = app[SCHEDULERS].status(), app[ROLE].running_schedulers()
    if not running:
        yield Alarm(AlarmCause("scheduler"), "no scheduler runs")
    for name, runs in running.items():
        status = statuses.get(name)
        if not runs:
            yield Alarm(AlarmCause("scheduler", name), f"the scheduler {name} does not run")
        elif status is not None and status.failures_in_a_row > FAILURES_MAX:
            text = f"the scheduler {name} failed {status.failures_in_a_row} times: {status.last_error}"
            yield Alarm(AlarmCause("scheduler", name), text)


async def _watch(app: web.Application) -> None:
    """Log what is wrong when it has lasted for two looks, once a minute while it goes on, and when it ends."""
    looks = 0
    logged_s = -LOG_EVERY_S
    while True:
        problems = find_problems(app, await app[PROBE].ask())
        if not problems or looks > 0:
            app[ALARMS].watch(problems)
        now_s = time.monotonic()
        if problems and looks > 0 and now_s - logged_s >= LOG_EVERY_S:
            log.error("unhealthy: %s", "; ".join(problem.text for problem in problems))
            logged_s = now_s
        elif not problems and logged_s > 0:
            log.info("healthy again")
            logged_s = -LOG_EVERY_S
        looks = looks + 1 if problems else 0
        await asyncio.sleep(WATCH_EVERY_S)


def _schedulers_report(app: web.Application, database: DatabaseHealth) -> SchedulersReport:
    context = app[CONTEXT]
    now, market, agents = context.clock.now(), context.market, context.agents
    budgets = agents.budgets.states(agents.models)
    return SchedulersReport(
        timestamp=iso(now),
        started_at=iso(app[STARTED_AT]),
        uptime_seconds=(now - app[STARTED_AT]).total_seconds(),
        trading_mode=context.settings.trading_mode,
        role=app[ROLE].role,
        database=database,
        market=MarketHealth(
            source=market.source_name,
            last_update_at=None if market.last_update_at is None else iso(market.last_update_at),
            stale=market.is_stale(),
            trouble=market.troubles() or UNSET,
        ),
        streams={
            name: StreamHealth(subscribers=len(hub), capacity=hub.capacity) for name, hub in app[HUBS].all.items()
        },
        schedulers={name: SchedulerHealth.from_attributes(status) for name, status in app[SCHEDULERS].status().items()},
        models_running=[
            ModelRunning(model_id=model_id, running_for_seconds=(now - since).total_seconds())
            for model_id, since in agents.running().items()
        ],
        models_waiting=[
            ModelWaiting(model_id=model_id, waiting_for_seconds=(now - since).total_seconds())
            for model_id, since in agents.waiting().items()
        ]
        or UNSET,
        models_failing=[
            ModelFailing(model_id=model_id, failures=failing.in_a_row, reason=failing.reason)
            for model_id, failing in agents.failing().items()
        ]
        or UNSET,
        providers_resting=dict(agents.in_cooldown()) or UNSET,
        budgets={model_id: BudgetUse.of(budget) for model_id, budget in budgets.items()} or UNSET,
        halts=halts_in_force(app[HALTS].in_force),
        lag_seconds=_lag(app),
        alarms=[_alarm(firing) for firing in app[ALARMS].firing()] or UNSET,
    )


def _alarm(firing: Condition) -> AlarmFiring:
    return AlarmFiring(
        cause=firing.alarm.cause.kind,
        subject=firing.alarm.cause.subject,
        message=firing.alarm.text,
        since=iso(firing.since),
        count=firing.count,
        consequences=list(firing.consequences),
    )


def _lag(app: web.Application) -> float | UnsetType:
    lag_s = app[RELAY].lag_s()
    return UNSET if lag_s is None else round(lag_s, 3)
