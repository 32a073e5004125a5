"""Health endpoints: `GET /health` says whether the service works, `/health/live` whether the process responds, and
`/health/schedulers` reports on each part.

The database is pinged with a short timeout, and the result is reused briefly, so that many requests share one query.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web
from msgspec import UNSET, UnsetType

from trader.api.context import ACCOUNTS, ALARMS, CONTEXT, DATABASE, HALTS, RELAY, ROLE, SCHEDULERS, STARTED_AT
from trader.api.routes import Documented, Route, json_answer
from trader.api.rpc import DISPATCHER
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
from trader.api.streams import BROADCASTERS
from trader.core import tasks
from trader.core.clock import SystemClock
from trader.core.errors import DatabaseUnavailable, Unavailable
from trader.database.pool import NOT_ANSWERING, OF_TABLES, Database
from trader.database.schema import SPARED
from trader.operations.alarms import Alarms
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.sql.status import Obstacle, select_obstacles

log = logging.getLogger(__name__)

PING_S = 1.0
"""A database that takes longer to respond is unhealthy."""

PROBE_CACHE_S = 0.2

STALE_S: Final = 60.0
"""A market without an update for this long is unhealthy."""

FIRST_PRICE_S: Final = 30.0
"""A market that has had no price at all since the start is unhealthy after this time."""

PRICE_TRACKER: Final = "priceTracker"
"""The scheduler that also counts as not running while the market has no prices to track."""

SILENT_S: Final = 30.0
"""A leader silent for this long is unhealthy, and its schedulers count as not running."""

FAILURES_MAX: Final = 2
"""A scheduler that fails more often than this in a row is unhealthy."""

WATCH_EVERY_S: Final = 1.0
"""How often health is checked for alarms, which is also the precision of their times."""

LOG_AFTER_S: Final = 5.0
LOG_EVERY_S: Final = 60.0
"""How long the service must be unhealthy before the reasons are logged, and the interval of their repetition."""

NOT_STORED: dict[str, str] = {hdrs.CACHE_CONTROL: "no-store"}


_HEADERS: Final = ("X-Request-Id", "Cache-Control")


def _route(path: str, summary: str, body: Any, **responses: str) -> Route:
    documented = {int(status[1:]): Documented(text, body, _HEADERS) for status, text in responses.items()}
    return Route(path, summary, tag="health", responses=documented, alias=f"/api{path}", head=True)


HEALTH: Final = _route(
    "/health",
    "Whether the service is healthy",
    HealthReport,
    _200="Postings are written, the market is live, and every scheduler is running.",
    _503="One of these fails, or books and venue disagree; `reasons` says which.",
)
LIVE: Final = _route(
    "/health/live", "Whether the process answers, for supervisors that restart it", LiveReport, _200="It does."
)
REPORT: Final = _route(
    "/health/schedulers", "The parts of the service in detail; always 200", SchedulersReport, _200="The report."
)


class DatabaseProbe:
    """Pings the database at most once at a time, and reuses the last result for `PROBE_CACHE_S`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asking = asyncio.Lock()
        self._answer = DatabaseHealth(ok=False, latency_ms=None)
        self._good_until_s = 0.0
        self._obstacles: Sequence[Obstacle] = ()

    @property
    def obstacles(self) -> Sequence[Obstacle]:
        """What keeps the service from tables, if the database's trouble is with tables."""
        return self._obstacles if self._database.trouble in OF_TABLES else ()

    @property
    def is_spared(self) -> bool:
        """Whether the trouble is only with tables without which the service trades."""
        return bool(self.obstacles) and {each.table for each in self.obstacles} <= SPARED

    async def ask(self) -> DatabaseHealth:
        async with self._asking:
            is_new = self._database.trouble in OF_TABLES and not self._obstacles
            if is_new or time.monotonic() >= self._good_until_s:
                self._answer = await self._latency()
                self._good_until_s = time.monotonic() + PROBE_CACHE_S
            return self._answer

    async def _latency(self) -> DatabaseHealth:
        try:
            is_of_tables = self._database.trouble in OF_TABLES  # the ping may clear it
            async with asyncio.timeout(PING_S):
                latency_ms = round(await self._database.ping(), 3)
                self._obstacles = await self._read_obstacles() if is_of_tables else ()
                return DatabaseHealth(ok=True, latency_ms=latency_ms)
        except (Unavailable, OSError, TimeoutError):  # the pool logs the cause
            return DatabaseHealth(ok=False, latency_ms=None)

    async def _read_obstacles(self) -> Sequence[Obstacle]:
        """Return the obstacles without the statements of sessions: anybody may read `/health`."""
        async with self._database.connection() as conn:
            return [each._replace(query=None) for each in await select_obstacles(conn)]


PROBE: Final = web.AppKey("probe", DatabaseProbe)


async def answer_health(request: web.Request) -> web.Response:
    """Report whether the service works, with the reasons if it does not."""
    app = request.app
    reasons = [problem.text for problem in find_problems(app, await app[PROBE].ask())]
    context = app[CONTEXT]
    report = HealthReport(
        status="unhealthy" if reasons else "healthy",
        timestamp=iso(context.clock.now()),
        schedulers=_running_schedulers(app),
        reasons=reasons or UNSET,
        reconciliation=dict(context.exchange.troubles) or UNSET,
        halts=halts_in_force(app[HALTS].in_force),
        lag_seconds=_lag(app),
        alarms=_alarms(app) or UNSET,
    )
    return json_answer(503 if reasons else 200, report, NOT_STORED)


async def answer_live(request: web.Request) -> web.Response:
    """Report that the process runs, whatever else is wrong."""
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
    app[ALARMS].sources.append(partial(_degradations, app))
    maintenance = tasks.keep(partial(app[ALARMS].watch_database, app[DATABASE]), "maintenance")
    watching = tasks.keep(partial(_watch, app), "health")
    yield
    await tasks.end(watching, maintenance)


def find_problems(app: web.Application, database: DatabaseHealth) -> list[Alarm]:
    """Return the current problems of the service; an empty list if it works."""
    return [
        *_database_problems(app, database),
        *_market_problems(app),
        *_scheduler_problems(app),
        *_failing_requests(app),
        *(
            Alarm(AlarmCause("reconciliation", account), f"books and venue disagree on {account}: {why}")
            for account, why in app[CONTEXT].exchange.troubles.items()
        ),
    ]


def _database_problems(app: web.Application, database: DatabaseHealth) -> Iterator[Alarm]:
    trouble, since = app[DATABASE].trouble, app[DATABASE].failing_since
    if (trouble is not None or not database.ok) and not app[PROBE].is_spared:
        text = str(DatabaseUnavailable(trouble or NOT_ANSWERING))
        text += "".join(f" {each}." for each in app[PROBE].obstacles)
        yield _database_alarm(app, text, since)
    elif (slow_s := app[ACCOUNTS].service_level.slow_s()) is not None:
        yield Alarm(AlarmCause("database"), f"The database is slow: postings typically take {slow_s:.1f} s.")
    if (lag_s := app[RELAY].lag_s()) is not None and lag_s > SILENT_S:
        since = SystemClock().now() - timedelta(seconds=lag_s)
        yield Alarm(AlarmCause("database"), f"nothing was received from the leader for {lag_s:.0f} s", since=since)


def _degradations(app: web.Application) -> Iterator[Alarm]:
    """Yield the tables that cannot be used now although the service trades."""
    if app[PROBE].is_spared:
        for each in app[PROBE].obstacles:
            yield Alarm(AlarmCause("degraded", each.table), f"degraded: {each.table}. {each}.")


def _database_alarm(app: web.Application, text: str, since: datetime | None) -> Alarm:
    """Return the alarm about the database, with the failures that it has caused."""
    impact = []
    since = min(filter(None, (since, app[ALARMS].began(AlarmCause("database")))), default=None)
    if since is not None and (refused := app[ACCOUNTS].service_level.refused_since(since)):
        impact.append(f"{refused} orders were refused")
    for name, status in app[SCHEDULERS].status().items():
        if status.failures_in_a_row:
            impact.append(f"{name} failed {status.failures_in_a_row} times")
    return Alarm(AlarmCause("database"), text, since=since, impact=", ".join(impact))


def _failing_requests(app: web.Application) -> Iterator[Alarm]:
    """Yield what callers get errors for, whatever the reason; only a leader answers orders and decides."""
    sources = [app[DISPATCHER].outcomes]
    if app[ROLE].role == "leader":
        context = app[CONTEXT]
        sources += [app[ACCOUNTS].service_level.outcomes, context.agents.outcomes, context.operations.outcomes]
    for failing in chain.from_iterable(source.failing() for source in sources):
        yield Alarm(AlarmCause("requests"), failing.text, since=failing.since, impact=f"{failing.failures} failed")


def _recent_failure(app: web.Application, looked_s: float) -> Iterator[Alarm]:
    """Yield a failure of the database that ended after `looked_s`, the monotonic time of the last check."""
    failure = app[DATABASE].last_failure
    if failure is not None and failure.ended_s > looked_s and not app[PROBE].is_spared:
        yield _database_alarm(app, str(DatabaseUnavailable(failure.cause)), failure.began)


def _market_problems(app: web.Application) -> Iterator[Alarm]:
    market, now = app[CONTEXT].market, app[CONTEXT].clock.now()
    silent_s = (now - (market.last_update_at or app[STARTED_AT])).total_seconds()
    is_first = market.last_update_at is None
    if silent_s > (FIRST_PRICE_S if is_first else STALE_S) and not market.has_ended:
        trouble = market.troubles()
        text = (
            f"no price in the {silent_s:.0f} s since the start"
            if is_first
            else f"no update of the market for {silent_s:.0f} s"
        )
        is_real_time = isinstance(app[CONTEXT].clock, SystemClock)
        since = now - timedelta(seconds=silent_s) if is_real_time and not is_first else None
        yield Alarm(AlarmCause("market"), text + (f": {trouble}" if trouble else ""), since=since)


def _running_schedulers(app: web.Application) -> dict[str, bool]:
    """Return which schedulers are running: the price tracker only while there are prices."""
    has_prices = not any(_market_problems(app))
    running = app[ROLE].running_schedulers()
    return {name: runs and (has_prices or name != PRICE_TRACKER) for name, runs in running.items()}


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
    """Pass problems to the alarms, and log those that last, once a minute while they persist, and when they end."""
    since_s: float | None = None
    logged_s = looked_s = -math.inf
    app[ALARMS].is_healthy = False  # until it is known, also after a bug in this loop
    while True:
        problems = find_problems(app, await app[PROBE].ask())
        now_s = time.monotonic()
        if not any(problem.cause.kind == "database" for problem in problems):
            app[ALARMS].watch([*problems, *_recent_failure(app, looked_s)])
        else:
            app[ALARMS].watch(problems)
        looked_s = now_s
        since_s = None if not problems else now_s if since_s is None else since_s
        if since_s is not None and now_s - since_s >= LOG_AFTER_S and now_s - logged_s >= LOG_EVERY_S:
            log.error("unhealthy: %s", "; ".join(problem.text for problem in problems))
            logged_s = now_s
        elif not problems and logged_s > -math.inf:
            log.info("healthy again")
            logged_s = -math.inf
        await asyncio.sleep(WATCH_EVERY_S)


def _schedulers_report(app: web.Application, database: DatabaseHealth) -> SchedulersReport:
    context = app[CONTEXT]
    now, market, agents = context.clock.now(), context.market, context.agents
    budgets, working = agents.budgets.states(context.models.by_id), _running_schedulers(app)
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
            name: StreamHealth(subscribers=len(broadcaster), capacity=broadcaster.capacity)
            for name, broadcaster in app[BROADCASTERS].all.items()
        },
        schedulers={
            name: SchedulerHealth.from_attributes(replace(status, running=status.running and working[name]))
            for name, status in app[SCHEDULERS].status().items()
        },
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
        budgets={model_id: BudgetUse.from_attributes(budget) for model_id, budget in budgets.items()} or UNSET,
        halts=halts_in_force(app[HALTS].in_force),
        lag_seconds=_lag(app),
        alarms=_alarms(app) or UNSET,
    )


def _alarms(app: web.Application) -> list[AlarmFiring]:
    """Return the present alarms of this process, and those of the leader that it follows."""
    own, relay = present_alarms(app[ALARMS]), app[RELAY]
    if relay.lag_s() is None or relay.view is None:
        return own
    known = {(each.cause, each.subject) for each in own}
    relayed = msgspec.json.decode(relay.view.alarms, type=list[AlarmFiring])
    return own + [each for each in relayed if (each.cause, each.subject) not in known]


def present_alarms(alarms: Alarms) -> list[AlarmFiring]:
    """Return the present conditions on the wire, oldest first."""
    return [AlarmFiring.from_attributes(condition) for condition in alarms.present()]


def _lag(app: web.Application) -> float | UnsetType:
    lag_s = app[RELAY].lag_s()
    return UNSET if lag_s is None else round(lag_s, 3)
