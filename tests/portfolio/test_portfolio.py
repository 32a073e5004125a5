"""Snapshots are taken when due, are exact, and yield the histories of the specification."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.records import (
    HOUR,
    MINUTE,
    START,
    FakeExchange,
    add_model,
    add_run,
    equity_values,
    make_account,
    make_position,
    make_run,
    make_snapshot,
    seen,
)
from support.scripted import make_settings

from trader.core.clock import floor_time
from trader.core.errors import Unavailable
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.exchange.paper import PaperExchange
from trader.portfolio.domain.histories import RESOLUTIONS, Point, average_by_hour, choose_resolution
from trader.portfolio.snapshots import PortfolioService, is_due
from trader.portfolio.sql import snapshots as store

DAY = timedelta(days=1)


class PaperBench:
    """A portfolio service over accounts that the test controls."""

    def __init__(self, database: Database, exchange: FakeExchange, **settings: str) -> None:
        self.database = database
        self.exchange = exchange
        self.clock = ManualClock(START)
        self.portfolio = self.start(**settings)

    def start(self, **settings: str) -> PortfolioService:
        """Return a service as in a new process."""
        exchange: PaperExchange = self.exchange  # type: ignore[assignment]
        return PortfolioService(self.database, exchange, self.clock, make_settings(**settings))

    async def snapshots(self) -> list[tuple[str, datetime, Decimal]]:
        async with self.database.connection() as conn:
            rows = await conn.fetch("SELECT * FROM portfolio_snapshots ORDER BY created_at, account_id")
        return [(row["account_id"], row["created_at"], row["net_portfolio"]) for row in rows]

    async def counted(self) -> int:
        async with self.database.connection() as conn:
            count: int = await conn.fetchval("SELECT sum(count) FROM portfolio_hourly")
        return count


@pytest.fixture
async def desk(database: Database) -> PaperBench:
    async with database.connection() as conn:
        for name in ("idle", "busy"):
            await add_model(conn, name, VariantId.APEX)
        await add_run(conn, "manual", make_run("manual"))
    return PaperBench(
        database,
        FakeExchange(
            make_account("idle"),
            make_account("busy", positions={"BTC": make_position()}),
            make_account("manual", last_order_at=START),
            marks={"BTC": "50100.5"},
        ),
    )


async def test_active_accounts_are_recorded_every_minute_and_idle_ones_hourly(desk: PaperBench) -> None:
    for minute in range(63):
        await desk.portfolio.take_snapshots(START + minute * MINUTE)
    taken = await desk.snapshots()
    assert [at for name, at, _ in taken if name == "busy"] == [START + minute * MINUTE for minute in range(63)]
    assert [at for name, at, _ in taken if name == "idle"] == [START, START + HOUR]
    until_quiet = [START + minute * MINUTE for minute in range(11)]
    assert [at for name, at, _ in taken if name == "manual"] == [*until_quiet, START + HOUR]
    assert {net for name, _, net in taken if name == "busy"} == {Decimal("10010.05")}
    assert desk.portfolio.live().snapshots_created == 1


async def test_the_count_of_snapshots_is_of_the_last_call(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async with database.connection() as conn:
        await add_model(conn, "idle", VariantId.APEX)
    desk = PaperBench(database, FakeExchange(make_account("idle")))
    counts = []
    for minute in (0, 1, 60):
        await desk.portfolio.take_snapshots(START + minute * MINUTE)
        counts.append(desk.portfolio.live().snapshots_created)
    assert counts == [1, 0, 1]

    async def fail(*_: object) -> int:
        raise Unavailable("the server is gone")

    monkeypatch.setattr(store, "insert_snapshots", fail)
    with pytest.raises(Unavailable):
        await desk.portfolio.take_snapshots(START + 2 * HOUR)
    assert desk.portfolio.live().snapshots_created == 0


async def test_a_restart_within_the_minute_counts_nothing_twice(desk: PaperBench) -> None:
    await desk.portfolio.take_snapshots(START)
    for process in (desk.start(), desk.start()):
        await process.take_snapshots(START)
        assert process.live().snapshots_created == 0
    assert await desk.counted() == 3
    later = desk.start()
    await later.take_snapshots(START + 30 * MINUTE)
    assert await desk.counted() == 4, "the idle ones were taken in this hour, before the restart"


async def test_snapshots_of_a_term_that_was_over_are_taken_in_the_next(desk: PaperBench) -> None:
    desk.exchange.term = 1  # which is over in the database, unnoticed
    await desk.portfolio.take_snapshots(START)
    assert await desk.snapshots() == []
    desk.exchange.term = 0
    await desk.portfolio.take_snapshots(START + MINUTE)
    assert {name for name, *_ in await desk.snapshots()} == {"idle", "busy", "manual"}


async def test_a_new_run_is_recorded_at_once(desk: PaperBench) -> None:
    await desk.portfolio.take_snapshots(START)
    desk.exchange.put(msgspec.structs.replace(make_account("idle"), run=make_run("idle", 2, capital="500")))
    await desk.portfolio.take_snapshots(START + MINUTE)
    assert ("idle", START + MINUTE, Decimal(500)) in await desk.snapshots()


async def test_an_account_without_a_market_price_is_omitted(desk: PaperBench) -> None:
    desk.exchange.known_marks.clear()
    await desk.portfolio.take_snapshots(START)
    assert {name for name, _, _ in await desk.snapshots()} == {"idle", "manual"}
    assert set(desk.portfolio.live().values) == {"idle", "manual"}
    desk.exchange.known_marks["BTC"] = Decimal(50_000)
    await desk.portfolio.take_snapshots(START + MINUTE)
    assert ("busy", START + MINUTE, Decimal(10_000)) in await desk.snapshots()


async def test_partitions_follow_the_weeks_and_the_retention(database: Database) -> None:
    desk = PaperBench(database, FakeExchange(make_account("busy", last_order_at=START)), SNAPSHOT_RETENTION_DAYS="14")
    for day in range(60):
        await desk.portfolio.take_snapshots(START + day * DAY)
    days = [(at - START).days for _, at, _ in await desk.snapshots()]
    assert days[-1] == 59
    assert days[0] in range(59 - 14 - 8, 59 - 14)
    assert await desk.counted() == 60


# Of a year, filled a week at a time: a small row an hour in each raw table, and the hour of the rollup.
FILL_WEEK = """
WITH hours AS (SELECT generate_series($1::timestamptz, $1 + interval '167 hours', '1 hour') AS at),
snapshots AS (
    INSERT INTO portfolio_snapshots (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at)
    SELECT 'busy', $2::uuid, 1, 1, 0, at FROM hours
), payloads AS (
    INSERT INTO invocation_payloads (invocation_id, payload, created_at)
    SELECT gen_random_uuid(), sha256(at::text::bytea), at FROM hours
)
INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
SELECT 'busy', at, $2::uuid, 1, 1, 1, at FROM hours
"""
SELECT_RAW = """
SELECT (SELECT count(*) FROM portfolio_snapshots) AS snapshots, (SELECT count(*) FROM invocation_payloads) AS payloads,
       (SELECT min(created_at) FROM portfolio_snapshots) AS oldest,
       (SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits
        WHERE inhparent IN ('portfolio_snapshots'::regclass, 'invocation_payloads'::regclass)) AS bytes
"""


@pytest.mark.slow
async def test_a_year_of_rows_stays_as_large_as_its_retention(database: Database) -> None:
    account = make_account("busy")
    desk = PaperBench(database, FakeExchange(account), SNAPSHOT_RETENTION_DAYS="35")
    sizes = []
    for week in range(53):
        now = START + week * 7 * DAY
        await desk.portfolio.maintain(now)
        async with database.connection() as conn:
            await conn.execute(FILL_WEEK, now, account.run.id)
            raw = await conn.fetchrow(SELECT_RAW)
            hours = await conn.fetchval("SELECT count(*) FROM portfolio_hourly")
        assert raw is not None
        assert max(START, now - 42 * DAY) <= raw["oldest"] <= max(START, now - 35 * DAY)
        assert raw["snapshots"] == raw["payloads"] == (now + 7 * DAY - raw["oldest"]) / HOUR
        assert hours == 168 * (week + 1), "the rollup is kept for good"
        sizes.append(raw["bytes"])
    assert 4 * max(sizes[6:]) <= 5 * min(sizes[6:]), "from the sixth week on, they grow no more"


def test_live_values_are_exact(desk: PaperBench) -> None:
    live = desk.portfolio.live()
    busy = live.values["busy"]
    assert seen(busy.cash, busy.unrealized_pnl, busy.net_portfolio) == (10_000, Decimal("10.05"), Decimal("10010.05"))
    assert live.at == busy.created_at == START


def test_an_order_keeps_an_account_active_for_ten_minutes() -> None:
    account = make_account("a", last_order_at=START)
    last = store.LastSnapshot(account.run.id, START)
    assert is_due(account, last, START + 10 * MINUTE)
    assert not is_due(account, last, START + 10 * MINUTE + timedelta(milliseconds=1))


def test_an_idle_account_has_one_snapshot_in_each_hour_of_the_clock() -> None:
    account, half_past = make_account("a"), START + 30 * MINUTE
    last = store.LastSnapshot(account.run.id, half_past)
    assert not is_due(account, last, START + 59 * MINUTE)
    assert is_due(account, last, START + HOUR)
    assert is_due(account, last, START + 24 * HOUR + 30 * MINUTE)
    assert is_due(account, last, START), "it is by a clock that was ahead"


# -- histories


async def _fill(database: Database, *rows: tuple[str, datetime, str]) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, min(at for _, at, _ in rows), max(at for _, at, _ in rows))
        await store.insert_snapshots(conn, [make_snapshot(name, at, value) for name, at, value in rows])


async def test_variant_history_follows_the_specification(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "a1", VariantId.APEX)
        await add_model(conn, "a2", VariantId.APEX)
        await add_model(conn, "s1", VariantId.SOVEREIGN)
        await add_run(conn, "manual", make_run("manual"))
    now = START + 30 * HOUR + 30 * MINUTE
    first = START + 6 * HOUR
    await _fill(
        database,
        ("a1", first + 29 * MINUTE, "900000"),  # a minute before the window
        ("a1", first + 30 * MINUTE, "100"),
        ("a2", first + 50 * MINUTE, "103"),
        ("a2", first + 51 * MINUTE, "104"),
        ("s1", first + 3 * HOUR, "50"),
        ("a1", first + 3 * HOUR, "101"),
        ("a1", first + 3 * HOUR + MINUTE, "102"),
        ("manual", first + 3 * HOUR, "777"),
        ("s1", now, "60"),
    )
    desk = PaperBench(database, FakeExchange())
    await desk.clock.advance(now - START)
    history = await desk.portfolio.variant_history("24h")
    assert {variant: [(point.hour, point.value) for point in points] for variant, points in history.items()} == {
        VariantId.APEX: [(first, Decimal("102.33333333")), (first + 3 * HOUR, Decimal("101.5"))],
        VariantId.TRENDSURFER: [],
        VariantId.CONTRARIAN: [],
        VariantId.SOVEREIGN: [(first + 3 * HOUR, 50), (START + 30 * HOUR, 60)],
    }
    assert average_by_hour(history.values()) == [
        Point(first, Decimal("102.33333333")),
        Point(first + 3 * HOUR, Decimal("75.75")),
        Point(START + 30 * HOUR, Decimal(60)),
    ]


async def test_history_takes_raw_rows_for_short_ranges_and_the_rollup_for_long_ones(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "one", VariantId.APEX)
        await add_model(conn, "two", VariantId.CONTRARIAN)
    minutes = [START + n * MINUTE for n in range(0, 600, 3)]
    await _fill(database, *(("one", at, str(n)) for n, at in enumerate(minutes)), ("two", START, "5"))
    desk = PaperBench(database, FakeExchange())
    await desk.clock.advance(2 * DAY)

    async def values(span: timedelta, **more: object) -> tuple[str, list[int]]:
        more = {"model_id": "one", "points_max": 1000} | more
        chunks, resolution = await desk.portfolio.history(start=START, end=START + span, **more)  # type: ignore[arg-type]
        return resolution, [int(value) for _, value, _ in equity_values(chunks)]

    assert await values(2 * HOUR) == ("1m", list(range(41)))
    assert await values(10 * HOUR, points_max=100) == ("15m", [*range(4, 200, 5), 199][:40])
    assert await values(20 * DAY) == ("1h", [*range(19, 200, 20)])
    assert await values(40 * DAY) == ("4h", [79, 159, 199])
    assert await values(400 * DAY) == ("1d", [199])
    assert await values(HOUR, model_id="two") == ("1m", [5])
    assert await values(HOUR, model_id=None, variant=VariantId.CONTRARIAN) == ("1m", [5])
    assert await values(HOUR, model_id="two", variant=VariantId.APEX) == ("1m", [])
    assert await values(HOUR, model_id="nobody") == ("1m", [])


async def test_history_beyond_the_retention_comes_from_the_rollup(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "one")
    await _fill(database, ("one", START, "1"), ("one", START + MINUTE, "2"), ("one", START + HOUR, "3"))
    desk = PaperBench(database, FakeExchange(), SNAPSHOT_RETENTION_DAYS="10")
    await desk.clock.advance(30 * DAY)
    await desk.portfolio.maintain(desk.clock.now())
    assert len(await desk.snapshots()) == 3, "the newest are kept, whatever the clock says"
    await _fill(database, ("one", START + 30 * DAY, "4"))
    await desk.portfolio.maintain(desk.clock.now() + DAY)
    assert len(await desk.snapshots()) == 1
    chunks, resolution = await desk.portfolio.history(start=START, end=START + 2 * HOUR, points_max=1000)
    assert resolution == "1h"
    assert [value for _, value, _ in equity_values(chunks)] == [2, 3]


@given(
    start=st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - the bounds of hypothesis are naive
    span=st.timedeltas(timedelta(0), 800 * DAY),
    points_max=st.integers(100, 15_000),
)
def test_the_resolution_is_the_finest_that_fits(start: datetime, span: timedelta, points_max: int) -> None:
    end = start + span
    chosen = choose_resolution(start, end, points_max, datetime.min.replace(tzinfo=start.tzinfo))

    def points(bucket: timedelta) -> int:
        return (floor_time(end, bucket) - floor_time(start, bucket)) // bucket + 1

    assert points(RESOLUTIONS[chosen]) <= points_max or chosen == "1d"
    suited = {"1m": 1, "5m": 3, "15m": 7, "1h": 30, "4h": 90}
    for finer in list(RESOLUTIONS)[: list(RESOLUTIONS).index(chosen)]:
        assert points(RESOLUTIONS[finer]) > points_max or span > suited[finer] * DAY


@pytest.mark.parametrize(("days", "resolution"), [(1, "1m"), (3, "5m"), (7, "15m"), (30, "1h"), (90, "4h"), (91, "1d")])
def test_ranges_have_their_resolution(days: int, resolution: str) -> None:
    assert choose_resolution(START, START + days * DAY, 15_000, START) == resolution


async def test_a_range_that_no_resolution_can_hold_shows_its_latest_part(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "one")
    await _fill(database, *(("one", START + day * DAY, str(day)) for day in range(150)))
    desk = PaperBench(database, FakeExchange())
    await desk.clock.advance(149 * DAY)
    for end in (START + 149 * DAY, datetime.max.replace(tzinfo=START.tzinfo)):  # `until` in the far future, too
        chunks, _ = await desk.portfolio.history(start=START, end=end, points_max=100)
        assert [int(value) for _, value, _ in equity_values(chunks)] == list(range(50, 150))
    earliest = datetime.min.replace(tzinfo=START.tzinfo)
    assert (await desk.portfolio.history(start=earliest, end=earliest + DAY, points_max=100))[0] == []
