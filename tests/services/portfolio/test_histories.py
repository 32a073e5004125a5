"""Kept histories are what the rows say, whatever was asked before, written since, or renamed."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.records import MINUTE, START, FakeExchange, add_model, make_account, make_snapshot
from support.scripted import make_settings

from trader.api.schemas.portfolio import GetPortfolioHistoryOutput, records_of
from trader.clock import iso
from trader.domain.models import VariantId
from trader.services.portfolio.histories import Histories, make_bucket, stretches
from trader.services.portfolio.snapshots import RESOLUTIONS, WINDOWS, Portfolio, Window
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.portfolio import snapshots as store
from trader.store.portfolio.snapshots import EquityValue

DAY = timedelta(days=1)
NAMES = {"a": VariantId.APEX, "b": VariantId.APEX, "c": VariantId.SOVEREIGN}


class Shelf:
    """A portfolio over snapshots with gaps, written as time goes on."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        self.rng = Random(seed)
        self.clock = ManualClock(START)
        exchange = FakeExchange(*(make_account(name) for name in NAMES))
        self.portfolio = Portfolio(database, exchange, self.clock, make_settings())  # type: ignore[arg-type]

    async def open(self) -> None:
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START, START + 40 * DAY)
            for name, variant in NAMES.items():
                await add_model(conn, name, variant)

    async def live(self, span: timedelta, every: timedelta) -> None:
        """Go on in time; each account has a snapshot at most of the times."""
        end, snapshots = self.clock.now() + span, []
        while self.clock.now() < end:
            await self.clock.advance(every)
            for name in NAMES:
                if self.rng.random() < 0.8:
                    value = Decimal(self.rng.randrange(1, 10**9)).scaleb(-4)
                    snapshots.append(make_snapshot(name, self.clock.now(), value))
        async with self.database.connection() as conn:
            await store.insert_snapshots(conn, snapshots)

    async def compare(self, start: datetime, end: datetime, points: int, **chosen: object) -> str:
        """Both ways must say the same. Gives the resolution."""
        asked = {"start": start, "end": end, "points_max": points, **chosen}
        plain = await self.portfolio.history(**asked)  # type: ignore[arg-type]
        kept = await self.portfolio.encoded_history(records_of, **asked)  # type: ignore[arg-type]
        body = b'{"history":[%b],"resolution":"%b"}' % (b",".join(kept.pieces), kept.resolution.encode())
        shown = msgspec.json.decode(body, type=GetPortfolioHistoryOutput)
        assert kept.resolution == plain.resolution
        assert [(one.model_id, one.net_portfolio, one.created_at, one.model.name) for one in shown.history] == [
            (account_id, value, iso(at), plain.models[account_id].name) for account_id, value, at in plain.values
        ]
        return plain.resolution


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_kept_equals_what_is_read(database: Database, seed: int) -> None:
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


RAW_HOURS = """
SELECT m.variant::text, date_trunc('hour', s.created_at, 'UTC') AS hour, round(avg(s.net_portfolio), 8) AS value
FROM portfolio_snapshots s JOIN models m ON m.id = s.account_id
WHERE s.created_at >= $1
GROUP BY 1, 2
ORDER BY hour
"""


async def compare_variants(shelf: Shelf, window: Window) -> None:
    found = await shelf.portfolio.variant_history(window, shelf.clock.now())
    async with shelf.database.connection() as conn:
        rows = await conn.fetch(RAW_HOURS, shelf.clock.now() - WINDOWS[window])
    wanted = {variant: [(hour, value) for v, hour, value in rows if v == variant] for variant in VariantId}
    assert {variant: [tuple(point) for point in points] for variant, points in found.variants.items()} == wanted


@pytest.mark.parametrize("seed", range(4))
async def test_variant_histories_equal_the_raw_rows_at_any_time(database: Database, seed: int) -> None:
    shelf = Shelf(database, seed)
    await shelf.open()
    await shelf.live(28 * DAY, timedelta(minutes=47))
    rng = shelf.rng
    for _ in range(25):
        await compare_variants(shelf, rng.choice(("24h", "7d", "30d")))
        async with database.connection() as conn:
            if rng.random() < 0.2:  # a model changes sides, and all of its past with it
                to = rng.choice(list(VariantId))
                await conn.execute("UPDATE models SET variant = $1::text::variant_id WHERE id = 'b'", to.value)
        await shelf.live(timedelta(minutes=rng.choice((1, 9, 61, 3000))), timedelta(minutes=rng.choice((1, 7, 31))))


@pytest.mark.parametrize("hours", [1, 30])
async def test_what_is_written_after_the_clock_was_set_back_is_not_missing(database: Database, hours: int) -> None:
    """Hours that were over begin again, and what is kept of them is not all of them any more."""
    shelf = Shelf(database, 1)
    await shelf.open()
    await shelf.live(3 * DAY, timedelta(minutes=7))
    start, window = START + DAY, timedelta(hours=hours)
    for step in (timedelta(0), -window, window / 2, window, window):
        if step < timedelta(0):
            shelf.clock._now += step
        else:
            await shelf.live(step, timedelta(minutes=5))
        await shelf.compare(start, shelf.clock.now(), 15_000)
        await shelf.compare(start, shelf.clock.now(), 100)
        for name in WINDOWS:
            await compare_variants(shelf, name)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5))), st.sets(st.sampled_from("abcd")), st.integers(0, 6)
)
def test_a_bucket_gives_what_is_asked_of_it(rows: list[tuple[str, int]], chosen: set[str], since: int) -> None:
    values = [EquityValue(name, Decimal(place), START + at * MINUTE) for place, (name, at) in enumerate(rows)]
    values.sort(key=lambda value: value.created_at)
    records = [b"%d" % value.net_portfolio for value in values]
    bucket = make_bucket(values, records, {name: name for name in "abcd"})
    assert bucket.joined == b",".join(records)
    found = bucket.of(stretches(bucket.ids, chosen), START + since * MINUTE)
    assert b",".join(found) == b",".join(
        record
        for value, record in zip(values, records, strict=True)
        if value.account_id in chosen and value.created_at >= START + since * MINUTE
    )


async def test_a_new_name_or_a_new_model_is_seen_at_once(database: Database) -> None:
    shelf = Shelf(database, 1)
    await shelf.open()
    await shelf.live(DAY, timedelta(minutes=5))
    start, end = START, shelf.clock.now()
    await shelf.compare(start, end, 1000)
    async with database.connection() as conn:
        await conn.execute("UPDATE models SET name = 'Renamed' WHERE id = 'a'")
        await conn.execute("DELETE FROM models WHERE id = 'c'")
    await shelf.compare(start, end, 1000)


async def test_a_snapshot_on_its_way_is_not_missed(database: Database) -> None:
    """In a replay minutes pass in milliseconds: a bucket is kept only when no statement is under way for it."""
    shelf = Shelf(database, 2)
    await shelf.open()
    await shelf.live(DAY, timedelta(minutes=5))
    async with database.transaction() as conn:
        await conn.execute("LOCK TABLE portfolio_hourly IN EXCLUSIVE MODE")
        job = asyncio.create_task(shelf.portfolio.take_snapshots(shelf.clock.now()))
        while not await conn.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        await shelf.clock.advance(DAY / 2)
        await shelf.compare(START, shelf.clock.now(), 1000)
    await job
    await shelf.compare(START, shelf.clock.now(), 1000)


async def test_what_is_kept_is_bounded(database: Database) -> None:
    shelf = Shelf(database, 3)
    await shelf.open()
    await shelf.live(3 * DAY, timedelta(minutes=5))
    kept = shelf.portfolio._histories = Histories(database, bytes_max=50_000)
    for days in (1, 3, 1, 2):
        await shelf.compare(shelf.clock.now() - days * DAY, shelf.clock.now(), 15_000)
        assert 0 < kept.size <= 50_000


async def test_times_without_any_snapshot_cannot_fill_the_memory(database: Database) -> None:
    shelf = Shelf(database, 4)
    await shelf.open()
    kept = shelf.portfolio._histories = Histories(database, bytes_max=200_000)
    for year in range(1, 31, 3):
        start = START.replace(year=year)
        await shelf.compare(start, start + 900 * DAY, 1000)
        buckets = sum(map(len, kept._kept.values()))
        assert 0 < buckets <= 200_000 // 200
