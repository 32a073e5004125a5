"""The parts that health and metrics observe, with problems set by the test."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Literal

from aiohttp import web
from support.manual_clock import ManualClock

from trader.agents.domain.invocations import Failing
from trader.agents.domain.shares import Budget
from trader.api.broadcast import Broadcaster
from trader.api.context import ACCOUNTS, ALARMS, CONTEXT, DATABASE, HALTS, RELAY, ROLE, SCHEDULERS, STARTED_AT
from trader.api.streams import BROADCASTERS
from trader.core.errors import DatabaseUnavailable
from trader.core.schedulers import Job, Schedulers
from trader.database.pool import Connection, StatementFailure
from trader.exchange.accounts import Tally
from trader.exchange.service_level import Outcomes, ServiceLevel
from trader.operations.alarms import Alarms
from trader.settings.settings import Settings

START = datetime(2025, 1, 1, 12, tzinfo=UTC)
NAMES = ("priceTracker", "tradeExecutor", "portfolioSnapshot")


class FakeDatabase:
    def __init__(self) -> None:
        self.pings = 0
        self.error: Exception | None = None
        self.hangs = False
        self.trouble: str | None = None
        self.write_failures = 2
        self.failing_since: datetime | None = None
        self.last_failure: StatementFailure | None = None
        self.hosts = ()

    async def ping(self) -> float:
        self.pings += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return 0.7

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        raise DatabaseUnavailable("not reachable")
        yield

    def use(self) -> tuple[int, int, int]:
        return 5, 3, 20


class FakeMarket:
    source_name = "synthetic"
    last_update_at: datetime | None = None
    has_ended = False

    def troubles(self) -> str | None:
        return None

    def is_stale(self) -> bool:
        return self.last_update_at is None


class FakeAgents:
    """Agents with their budgets."""

    def __init__(self) -> None:
        self.models: dict[str, object] = {}
        self.started: dict[str, datetime] = {}
        self.queued: dict[str, datetime] = {}
        self.spent: dict[str, Budget] = {}
        self.failures: dict[str, Failing] = {}
        self.rests: dict[str, str] = {}
        self.skipped = {"running": 3, "waiting": 4}
        self.ends: dict[str, int] = {}
        self.budgets = self
        self.outcomes = Outcomes()

    def running(self) -> Mapping[str, datetime]:
        return self.started

    def waiting(self) -> Mapping[str, datetime]:
        return self.queued

    def failing(self) -> Mapping[str, Failing]:
        return self.failures

    def in_cooldown(self) -> Mapping[str, str]:
        return self.rests

    def states(self, _: object) -> Mapping[str, Budget]:
        return self.spent


class FakeRelay:
    """A relay of a leader with alarms, which this process follows once there is a lag."""

    def __init__(self) -> None:
        self.lag: float | None = None
        self.alarms = "[]"

    def lag_s(self) -> float | None:
        return self.lag

    @property
    def view(self) -> "FakeRelay":
        return self


class FakeRole:
    """A leader that reports its own schedulers."""

    role: Literal["leader"] = "leader"

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers

    def running_schedulers(self) -> Mapping[str, bool]:
        return {name: status.running for name, status in self._schedulers.status().items()}


class ServiceParts:
    """All parts, with schedulers whose runs fail on demand."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.database: Any = FakeDatabase()
        self.market = FakeMarket()
        self.agents = FakeAgents()
        self.error: Exception | None = None
        self.troubles: dict[str, str] = {}
        self.broadcaster = Broadcaster("positions")
        self.alarms = Alarms([])
        self.relay = FakeRelay()
        self.service_level = ServiceLevel()
        runs = dict.fromkeys(NAMES, self.run)
        self.schedulers = Schedulers([Job(n, timedelta(seconds=10), run) for n, run in runs.items()], self.clock)

    async def run(self, now: datetime) -> None:
        if self.error is not None:
            raise self.error

    def hand_to(self, app: web.Application, settings: Settings | None = None) -> None:
        """Give the parts to an application."""
        parts: dict[web.AppKey[Any], object] = {
            CONTEXT: SimpleNamespace(
                settings=settings or Settings.load({}, None, demo=True),
                clock=self.clock,
                market=self.market,
                exchange=self,
                portfolio=SimpleNamespace(
                    live=lambda: SimpleNamespace(values={"apex-1": SimpleNamespace(net_portfolio=Decimal("10500.25"))})
                ),
                models=SimpleNamespace(by_id=self.agents.models),
                agents=self.agents,
                operations=SimpleNamespace(outcomes=Outcomes()),
            ),
            DATABASE: self.database,
            ACCOUNTS: SimpleNamespace(service_level=self.service_level, tally=Tally()),
            HALTS: SimpleNamespace(in_force=()),
            SCHEDULERS: self.schedulers,
            ROLE: FakeRole(self.schedulers),
            RELAY: self.relay,
            ALARMS: self.alarms,
            STARTED_AT: START,
            BROADCASTERS: SimpleNamespace(all={self.broadcaster.name: self.broadcaster}),
        }
        for key, part in parts.items():
            app[key] = part
