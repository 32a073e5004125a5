"""What dashboards ask for is made ready after the start, and not again within moments of real time."""

import time
from datetime import datetime
from typing import Any

import pytest
from support.manual_clock import ManualClock

from trader.api import warm
from trader.domain.models import VariantId
from trader.services.portfolio.snapshots import VariantHistories

NOW = datetime.fromisoformat("2025-01-31T12:00:00Z")


class Noted:
    """Services that note what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.clock = ManualClock(NOW)
        self.analytics = self.portfolio = self

    async def refresh(self) -> None:
        self.asked.append("analytics")

    async def prepare(self, now: datetime) -> None:
        assert now == NOW
        self.asked.append("hours")

    async def variant_history(self, window: str, now: datetime) -> VariantHistories:
        assert now == NOW
        self.asked.append(f"variants {window}")
        return VariantHistories({variant: [] for variant in VariantId}, [])

    async def encoded_history(self, _: object, *, start: datetime, end: datetime, points_max: int) -> None:
        self.asked.append(f"history {(end - start).days} {points_max}")


async def test_the_default_answers_are_made_ready_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: Any = Noted()
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    keeper = warm.Keeper(noted)
    await keeper.keep(NOW)
    assert noted.asked == ["analytics", "hours", "variants 30d", "history 7 1000"]
    seconds[0] += warm.EVERY_S - 1
    await keeper.keep(NOW)
    assert len(noted.asked) == 4
    seconds[0] += 1
    await keeper.keep(NOW)
    assert len(noted.asked) == 8
