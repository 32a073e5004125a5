"""The jobs of the service."""

import asyncio
from datetime import UTC, datetime, timedelta

from support.manual_clock import ManualClock

from trader.composition.service import jobs
from trader.core.events import Event, EventBus, MarketChecked
from trader.core.schedulers import Schedulers

START = datetime(2025, 1, 1, 12, 0, 17, 300_000, tzinfo=UTC)


async def test_the_three_jobs_run_in_order() -> None:
    clock = ManualClock(START)
    seen: list[tuple[str, datetime]] = []
    events = EventBus()

    def listener(event: Event) -> None:
        assert isinstance(event, MarketChecked)
        seen.append(("checked", event.at))

    async def start_batch(now: datetime) -> None:
        await asyncio.sleep(0.001)  # real work takes time; the clock waits for it
        seen.append(("batch", now))

    async def take_snapshots(now: datetime) -> None:
        seen.append(("snapshots", now))

    events.subscribe(listener)
    schedulers = Schedulers(jobs(events, start_batch, take_snapshots), clock)
    await schedulers.start()
    await clock.advance(timedelta(seconds=103))
    status = schedulers.status()
    await schedulers.close()
    assert list(status) == ["priceTracker", "tradeExecutor", "portfolioSnapshot"]
    assert [s.interval_ms for s in status.values()] == [10_000, 60_000, 60_000]
    noon, first = START.replace(second=0, microsecond=0), START + timedelta(milliseconds=1)
    assert seen[:3] == [("checked", START), ("batch", first), ("snapshots", first + timedelta(milliseconds=1))]
    assert [when for name, when in seen if name == "batch"] == [
        first,
        noon + timedelta(minutes=1),
        noon + timedelta(minutes=2),
    ]
    assert [when for name, when in seen if name == "checked"] == [
        START, *(noon + timedelta(seconds=10 * n) for n in range(2, 13))
    ]  # fmt: skip
