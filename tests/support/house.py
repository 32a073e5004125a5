"""The parts that health and metrics look at, whose troubles a test sets."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Literal

from aiohttp import web
from support.manual_clock import ManualClock

from trader.api.broadcast import Broadcaster
from trader.api.context import ALARMS, CONTEXT, DATABASE, HALTS, RELAY, ROLE, SCHEDULERS, STARTED_AT
from trader.api.streams import HUBS
from trader.schedulers import Job, Schedulers
from trader.services.agents.budgets import Budget
from trader.services.agents.model_warnings import Failing
from trader.services.operations.alarms import Alarms
from trader.settings import Settings
from trader.store.database.pool import PoolUse

START = datetime(2025, 1, 1, 12, tzinfo=UTC)
NAMES = ("priceTracker", "tradeExecutor", "portfolioSnapshot")


class FakeDatabase:
    def __init__(self) -> None:
        self.pings = 0
        self.error: Exception | None = None
        self.hangs = False
        self.trouble: str | None = None
        self.write_failures = 2

    async def ping(self) -> float:
        self.pings += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if self.error is not None:
            raise self.error
        return 0.7

    def use(self) -> PoolUse:
        return PoolUse(size=5, idle=3, size_max=20)


class FakeMarket:
    source_name = "synthetic"
    last_update_at: datetime | None = None
    has_ended = False

    def troubles(self) -> str | None:
        return None

    def is_stale(self) -> bool:
        return self.last_update_at is None


class FakeAgents:
    """Agents, and their own budgets."""

    def __init__(self) -> None:
        self.models: dict[str, object] = {}
        self.started: dict[str, datetime] = {}
        self.queued: dict[str, datetime] = {}
        self.spent: dict[str, Budget] = {}
        self.failures: dict[str, Failing] = {}
        self.rests: dict[str, str] = {}
        self.skipped = {"running": 3, "waiting": 4}
        self.budgets = self

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


class FakeRole:
    """A leader that sees its own schedulers."""

    role: Literal["leader"] = "leader"

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers

    def running_schedulers(self) -> Mapping[str, bool]:
        return {name: status.running for name, status in self._schedulers.status().items()}


class House:
    """All of the parts, with schedulers whose runs fail when told."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.database = FakeDatabase()
        self.market = FakeMarket()
        self.agents = FakeAgents()
        self.error: Exception | None = None
        self.troubles: dict[str, str] = {}
        self.hub = Broadcaster("positions")
        self.alarms = Alarms([])
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
                portfolio=SimpleNamespace(equity=lambda: {"apex-1": 10500.25}),
                agents=self.agents,
            ),
            DATABASE: self.database,
            HALTS: SimpleNamespace(in_force=()),
            SCHEDULERS: self.schedulers,
            ROLE: FakeRole(self.schedulers),
            RELAY: SimpleNamespace(lag_s=lambda: None),
            ALARMS: self.alarms,
            STARTED_AT: START,
            HUBS: SimpleNamespace(all={self.hub.name: self.hub}),
        }
        for key, part in parts.items():
            app[key] = part
