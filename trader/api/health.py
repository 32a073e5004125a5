"""Health endpoints: `GET /health` says whether the service does its work, `/health/live` whether the process answers,
and `/health/schedulers` reports on each part.

The database is pinged with a short timeout, and the result is reused for a moment, so that many requests are one query.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal, Protocol

from aiohttp import hdrs, web
from msgspec import UNSET, UnsetType

from trader.api.broadcast import Broadcaster
from trader.api.routes import Documented, Route
from trader.api.schemas.common import BudgetUse, iso
from trader.api.schemas.health import (
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
from trader.api.site import Site, json_answer
from trader.clock import Clock
from trader.domain.exchange.halts import Halt
from trader.domain.operations.alarms import Alarm, AlarmCause
from trader.errors import Unavailable
from trader.services.agents.budgets import Budget
from trader.services.agents.model_warnings import Failing

log = logging.getLogger(__name__)

PING_S = 1.0
"""A database that takes longer to answer is not healthy."""

GOOD_FOR_S = 0.2

STALE_S: Final = 60.0
"""A market without an update for so long is unhealthy."""

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
SCHEDULERS: Final = Route(
    "/health/schedulers",
    "The parts of the service in detail; always 200",
    tag="health",
    responses={200: Documented("The report.", SchedulersReport, _HEADERS)},
    alias="/api/health/schedulers",
    head=True,
)


class SchedulerStatus(Protocol):
    """The status of a scheduler."""

    @property
    def interval_ms(self) -> int: ...
    @property
    def running(self) -> bool: ...
    @property
    def runs(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def failures_in_a_row(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def last_started_at(self) -> datetime | None: ...
    @property
    def last_finished_at(self) -> datetime | None: ...
    @property
    def last_duration_ms(self) -> int | None: ...
    @property
    def last_error(self) -> str | None: ...
    @property
    def next_due_at(self) -> datetime | None: ...


class MarketStatus(Protocol):
    """The status of the market feed."""

    @property
    def source_name(self) -> str: ...
    @property
    def last_update_at(self) -> datetime | None: ...
    @property
    def has_ended(self) -> bool: ...
    def is_stale(self) -> bool: ...
    def troubles(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class HealthSources:
    """The sources of the reports. `ping` returns the database's latency in milliseconds.

    `schedulers` are those of this process; `running` says which of them run, on the leader when this one is a standby.
    `lag_s` is how old the newest record of the leader is, None on the leader. `write_trouble` says why the last write
    failed. `troubles` are the accounts whose books and venue disagree, with the reason. `report` takes the problems of
    every look, once they have lasted for two.
    """

    clock: Clock
    started_at: datetime
    trading_mode: str
    ping: Callable[[], Awaitable[float]]
    market: MarketStatus
    hubs: Mapping[str, Broadcaster]
    schedulers: Callable[[], Mapping[str, SchedulerStatus]]
    running: Callable[[], Mapping[str, bool]]
    role: Callable[[], Literal["leader", "standby", "reader"]]
    models_running: Callable[[], Mapping[str, datetime]]
    models_waiting: Callable[[], Mapping[str, datetime]]
    lag_s: Callable[[], float | None] = lambda: None
    write_trouble: Callable[[], str | None] = lambda: None
    troubles: Callable[[], Mapping[str, str]] = dict
    halts: Callable[[], Sequence[Halt]] = tuple
    budgets: Callable[[], Mapping[str, Budget]] = dict
    models_failing: Callable[[], Mapping[str, Failing]] = dict
    providers_resting: Callable[[], Mapping[str, str]] = dict
    report: Callable[[Sequence[Alarm]], None] = lambda _: None


class _DatabaseProbe:
    """Pings the database at most once at a time, and reuses the last result for `GOOD_FOR_S`."""

    def __init__(self, ping: Callable[[], Awaitable[float]]) -> None:
        self._ping = ping
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
                return DatabaseHealth(ok=True, latency_ms=round(await self._ping(), 3))
        except (Unavailable, OSError, TimeoutError):  # the pool logs the cause
            return DatabaseHealth(ok=False, latency_ms=None)


def setup(site: Site, sources: HealthSources) -> None:
    """Add the endpoints to the site."""
    database = _DatabaseProbe(sources.ping)

    async def health(_: web.BaseRequest) -> web.Response:
        return _answer_health(sources, await database.ask())

    async def schedulers(_: web.BaseRequest) -> web.Response:
        return json_answer(200, _schedulers_report(sources, await database.ask()), NOT_STORED)

    async def live(_: web.BaseRequest) -> web.Response:
        return json_answer(200, LiveReport(status="alive", timestamp=iso(sources.clock.now())), NOT_STORED)

    site.tasks["health"] = partial(_watch, sources, database)
    HEALTH.add_to(site, health)
    LIVE.add_to(site, live)
    SCHEDULERS.add_to(site, schedulers)


def _answer_health(sources: HealthSources, database: DatabaseHealth) -> web.Response:
    running = dict(sources.running())
    troubles = dict(sources.troubles())
    reasons = [problem.text for problem in find_problems(sources, database)]
    report = HealthReport(
        status="unhealthy" if reasons else "healthy",
        timestamp=iso(sources.clock.now()),
        schedulers=running,
        reasons=reasons or UNSET,
        reconciliation=troubles or UNSET,
        halts=halts_in_force(sources.halts()),
        lag_seconds=_lag(sources),
    )
    return json_answer(503 if reasons else 200, report, NOT_STORED)


def find_problems(sources: HealthSources, database: DatabaseHealth) -> list[Alarm]:
    """Return why the service does not do its work now; nothing when it does."""
    problems = [] if database.ok else [Alarm(AlarmCause("database"), "the database does not answer")]
    if (trouble := sources.write_trouble()) is not None:
        problems.append(Alarm(AlarmCause("database", "writes"), f"bookings cannot be written: {trouble}"))
    lag_s, market = sources.lag_s(), sources.market
    if lag_s is not None and lag_s > STALE_S:
        problems.append(Alarm(AlarmCause("database", "leader"), f"nothing has come from the leader for {lag_s:.0f} s"))
    silent_s = (sources.clock.now() - (market.last_update_at or sources.started_at)).total_seconds()
    if silent_s > STALE_S and not market.has_ended:
        trouble = market.troubles()
        text = f"no update of the market for {silent_s:.0f} s" + (f": {trouble}" if trouble else "")
        problems.append(Alarm(AlarmCause("market"), text))
    statuses, running = sources.schedulers(), sources.running()
    if not running:
        problems.append(Alarm(AlarmCause("scheduler"), "no scheduler runs"))
    for name, runs in running.items():
        status = statuses.get(name)
        if not runs:
            problems.append(Alarm(AlarmCause("scheduler", name), f"the scheduler {name} does not run"))
        elif status is not None and status.failures_in_a_row > FAILURES_MAX:
            text = f"the scheduler {name} failed {status.failures_in_a_row} times: {status.last_error}"
            problems.append(Alarm(AlarmCause("scheduler", name), text))
    problems += (
        Alarm(AlarmCause("reconciliation"), f"books and venue disagree on {account}: {why}")
        for account, why in sources.troubles().items()
    )
    return problems


async def _watch(sources: HealthSources, database: _DatabaseProbe) -> None:
    """Log what is wrong when it has lasted for two looks, once a minute while it goes on, and when it ends."""
    looks = 0
    logged_s = -LOG_EVERY_S
    while True:
        problems = find_problems(sources, await database.ask())
        if not problems or looks > 0:
            sources.report(problems)
        now_s = time.monotonic()
        if problems and looks > 0 and now_s - logged_s >= LOG_EVERY_S:
            log.error("unhealthy: %s", "; ".join(problem.text for problem in problems))
            logged_s = now_s
        elif not problems and logged_s > 0:
            log.info("healthy again")
            logged_s = -LOG_EVERY_S
        looks = looks + 1 if problems else 0
        await asyncio.sleep(WATCH_EVERY_S)


def _schedulers_report(sources: HealthSources, database: DatabaseHealth) -> SchedulersReport:
    now = sources.clock.now()
    updated_at = sources.market.last_update_at
    return SchedulersReport(
        timestamp=iso(now),
        started_at=iso(sources.started_at),
        uptime_seconds=(now - sources.started_at).total_seconds(),
        trading_mode=sources.trading_mode,
        role=sources.role(),
        database=database,
        market=MarketHealth(
            source=sources.market.source_name,
            last_update_at=_iso_or_none(updated_at),
            stale=sources.market.is_stale(),
            trouble=sources.market.troubles() or UNSET,
        ),
        streams={name: StreamHealth(subscribers=len(hub), capacity=hub.capacity) for name, hub in sources.hubs.items()},
        schedulers={name: _scheduler(status) for name, status in sources.schedulers().items()},
        models_running=[
            ModelRunning(model_id=model_id, running_for_seconds=(now - since).total_seconds())
            for model_id, since in sources.models_running().items()
        ],
        models_waiting=[
            ModelWaiting(model_id=model_id, waiting_for_seconds=(now - since).total_seconds())
            for model_id, since in sources.models_waiting().items()
        ]
        or UNSET,
        models_failing=[
            ModelFailing(model_id=model_id, failures=failing.in_a_row, reason=failing.reason)
            for model_id, failing in sources.models_failing().items()
        ]
        or UNSET,
        providers_resting=dict(sources.providers_resting()) or UNSET,
        budgets={model_id: BudgetUse.of(budget) for model_id, budget in sources.budgets().items()} or UNSET,
        halts=halts_in_force(sources.halts()),
        lag_seconds=_lag(sources),
    )


def _lag(sources: HealthSources) -> float | UnsetType:
    lag_s = sources.lag_s()
    return UNSET if lag_s is None else round(lag_s, 3)


def _scheduler(status: SchedulerStatus) -> SchedulerHealth:
    return SchedulerHealth(
        running=status.running,
        interval_ms=status.interval_ms,
        runs=status.runs,
        failures=status.failures,
        skipped=status.skipped,
        last_started_at=_iso_or_none(status.last_started_at),
        last_finished_at=_iso_or_none(status.last_finished_at),
        last_duration_ms=status.last_duration_ms,
        last_error=status.last_error,
        next_due_at=_iso_or_none(status.next_due_at),
    )


def _iso_or_none(moment: datetime | None) -> str | None:
    return None if moment is None else iso(moment)
