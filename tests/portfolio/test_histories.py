"""Histories match the rows exactly, at any time and at every resolution."""

import json
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random

import pytest
from support.manual_clock import ManualClock
from support.records import MINUTE, START, FakeExchange, add_model, equity_values, make_account, make_snapshot
from support.scripted import make_settings

from trader.core.clock import floor_time
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.portfolio.domain.histories import RESOLUTIONS
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql import snapshots as store

DAY = timedelta(days=1)
NAMES = {"a": VariantId.APEX, "b": VariantId.APEX, "c": VariantId.SOVEREIGN}


class Shelf:
    """A portfolio over snapshots with gaps, written as time passes."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        self.rng = Random(seed)
        self.clock = ManualClock(START)
        exchange = FakeExchange(*(make_account(name) for name in NAMES))
        self.portfolio = PortfolioService(database, exchange, self.clock, make_settings())  # type: ignore[arg-type]
        self.written: list[tuple[str, Decimal, datetime]] = []

    async def open(self) -> None:
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START, START + 40 * DAY)
            for name, variant in NAMES.items():
                await add_model(conn, name, variant)

    async def live(self, span: timedelta, every: timedelta) -> None:
        """Advance time; each account has a snapshot at most of the moments."""
        end, snapshots = self.clock.now() + span, []
        while self.clock.now() < end:
            await self.clock.advance(every)
            for name in NAMES:
                if self.rng.random() < 0.8:
                    value = Decimal(self.rng.randrange(1, 10**9)).scaleb(-4)
                    snapshots.append(make_snapshot(name, self.clock.now(), value))
                    self.written.append((name, value, self.clock.now()))
        async with self.database.connection() as conn:
            await store.insert_snapshots(conn, snapshots)

    async def compare(self, start: datetime, end: datetime, points: int, **chosen: object) -> str:
        """Compare a history with the snapshots. Return its resolution."""
        asked = {"start": start, "end": end, "points_max": points, **chosen}
        chunks, resolution = await self.portfolio.history(**asked)  # type: ignore[arg-type]
        bucket = RESOLUTIONS[resolution]
        last = {
            (name, floor_time(at, bucket)): (name, value, at)
            for name, value, at in self.written
            if start <= at <= end
            and name == chosen.get("model_id", name)
            and NAMES[name] == chosen.get("variant", NAMES[name])
        }
        wanted = sorted(last.values(), key=lambda entry: (entry[2], NAMES[entry[0]], entry[0]))
        values = equity_values(chunks)
        assert values == wanted[len(wanted) - len(values) :], resolution
        assert values or not wanted
        assert len(values) == len(wanted) or end - start >= points * bucket, "only what is too long is cut"
        return resolution


@pytest.mark.parametrize("seed", range(2))
async def test_histories_equal_the_snapshots_at_any_time(database: Database, seed: int) -> None:
    shelf = Shelf(database, seed)
    await shelf.open()
    await shelf.live(26 * DAY, timedelta(minutes=53))
    seen = set()
    for _ in range(40):
        rng, now = shelf.rng, shelf.clock.now()
        end = rng.choice((now, now - rng.random() * DAY, now.replace(minute=0, second=0, microsecond=0)))
        start = end - rng.choice((0.2, 1, 3, 7, 20, 30)) * rng.uniform(0.9, 1.0) * DAY
        chosen = rng.choice(({}, {"model_id": "b"}, {"variant": VariantId.APEX}, {"model_id": "none"}))
        seen.add(await shelf.compare(start, end, rng.choice((100, 300, 1000, 15_000)), **chosen))
        await shelf.live(rng.choice((1, 20, 300)) * MINUTE, MINUTE * rng.choice((1, 7)))
    assert seen == set(RESOLUTIONS)


async def test_a_window_ends_with_the_current_minute(database: Database) -> None:
    """Nothing older than the window is shown, and the output changes once a minute."""
    shelf = Shelf(database, 1)
    await shelf.open()
    async with database.connection() as conn:
        times = [START + timedelta(seconds=seconds) for seconds in (0, 10, 60, 61)]
        await store.insert_snapshots(conn, [make_snapshot("a", at, str(n)) for n, at in enumerate(times)])
    await shelf.clock.advance(DAY)
    shown = []
    for seconds in (0, 1, 59, 1):
        await shelf.clock.advance(timedelta(seconds=seconds))
        points = (await shelf.portfolio.variant_history("24h"))[VariantId.APEX]
        shown.append([point.value for point in points])
    assert shown == [[Decimal("1.5")], [Decimal("2.5")], [Decimal("2.5")], []]


async def test_any_name_of_a_model_is_json(database: Database) -> None:
    shelf = Shelf(database, 1)
    await shelf.open()
    await shelf.live(timedelta(hours=1), 20 * MINUTE)
    async with database.connection() as conn:
        for name in ('quoted "twice"', "back\\slash", "tab\tand\nline", "été 策略 🚀", "</script>"):
            await conn.execute("UPDATE models SET name = $1, router_model_name = $1 WHERE id = 'a'", name)
            chunks, _ = await shelf.portfolio.history(model_id="a", start=START, end=shelf.clock.now(), points_max=1000)
            records = json.loads(b"[%b]" % b",".join(chunks))
            assert records
            for record in records:
                assert record["model"] == {"name": name, "variant": "Apex", "openRouterModelName": name}
