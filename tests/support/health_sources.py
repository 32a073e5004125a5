"""Sources of the health reports whose troubles a test sets."""

import asyncio
from datetime import UTC, datetime, timedelta

from support.manual_clock import ManualClock

from trader.api.broadcast import Broadcaster
from trader.api.health import HealthSources
from trader.schedulers import Job, Schedulers
from trader.services.agents.budgets import Budget
from trader.services.agents.model_warnings import Failing

START = datetime(2025, 1, 1, 12, tzinfo=UTC)
NAMES = ("priceTracker", "tradeExecutor", "portfolioSnapshot")


class FakeDatabase:
    def __init__(self) -> None:
        self.pings = 0
        self.error: Exception | None = None
        self.hangs = False

    async def ping(self) -> float:
        self.pings += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if self.error is not None:
            raise self.error
        return 0.7


class FakeMarket:
    source_name = "synthetic"
    last_update_at: datetime | None = None
    has_ended = False

    def troubles(self) -> str | None:
        return None

    def is_stale(self) -> bool:
        return self.last_update_at is None


class House:
    """The parts that health looks at, with a batch that fails when told."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.database = FakeDatabase()
        self.market = FakeMarket()
        self.error: Exception | None = None
        self.models_running: dict[str, datetime] = {}
        self.models_waiting: dict[str, datetime] = {}
        self.budgets: dict[str, Budget] = {}
        self.models_failing: dict[str, Failing] = {}
        self.providers_resting: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        self.write_trouble: str | None = None
        self.hub = Broadcaster("positions")
        runs = dict.fromkeys(NAMES, self.run)
        self.schedulers = Schedulers([Job(n, timedelta(seconds=10), run) for n, run in runs.items()], self.clock)

    async def run(self, now: datetime) -> None:
        if self.error is not None:
            raise self.error

    def sources(self) -> HealthSources:
        return HealthSources(
            clock=self.clock,
            started_at=START,
            trading_mode="simulated",
            ping=self.database.ping,
            market=self.market,
            hubs={"positions": self.hub},
            schedulers=self.schedulers.status,
            running=lambda: {name: status.running for name, status in self.schedulers.status().items()},
            role=lambda: "leader",
            models_running=lambda: self.models_running,
            models_waiting=lambda: self.models_waiting,
            budgets=lambda: self.budgets,
            models_failing=lambda: self.models_failing,
            providers_resting=lambda: self.providers_resting,
            troubles=lambda: self.troubles,
            write_trouble=lambda: self.write_trouble,
        )
