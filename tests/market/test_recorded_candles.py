"""Candles for charts: recorded from the source, and read at each length."""

from datetime import UTC, datetime, timedelta

import pytest
from support.feed import ScriptedSource, tick
from support.manual_clock import ManualClock
from support.scripted import make_settings

from trader.core.errors import MarketUnavailable
from trader.database.pool import Database
from trader.market.candles import CANDLES_MAX, CHUNKS_MAX, SPAN_MAX, Candles
from trader.market.domain.markets import Candle, extend_candle
from trader.market.feed import MarketFeed
from trader.market.sources.synthetic import SyntheticSource, aggregate
from trader.market.sql.candles import insert_minutes

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
END = NOW.replace(second=0)


def make_candles(database: Database, source: SyntheticSource | ScriptedSource, **environment: str) -> Candles:
    return Candles(database, MarketFeed(source, ManualClock(NOW)), make_settings(**environment))


async def test_recorded_candles_match_what_the_source_closed(database: Database) -> None:
    source = SyntheticSource(0, ("BTC", "ETH"))
    candles = make_candles(database, source)
    await candles.record(NOW, since=NOW)
    await candles.record(NOW + HOUR, since=NOW)
    await make_candles(database, source).record(NOW + HOUR, since=NOW)  # a restart repeats nothing
    for symbol in ("BTC", "ETH"):
        minutes = await source.candles(symbol, "1m", END - DAY + MINUTE, END + HOUR)
        assert await candles.read(symbol, MINUTE, END - MINUTE, END + HOUR) == minutes[-61:]
        quarters = await candles.read(symbol, 15 * MINUTE, END - DAY, END + HOUR)
        assert [candle._replace(volume=0) for candle in quarters] == [
            candle._replace(volume=0) for candle in aggregate(minutes, "15m")
        ][1:], "the first is truncated"
        hours = await candles.read(symbol, HOUR, None, END + DAY)
        joined = aggregate(minutes, "1h")
        assert [candle[:5] for candle in hours] == [candle[:5] for candle in joined]
        assert [candle.volume for candle in hours] == pytest.approx([candle.volume for candle in joined])
        between = minutes[1:-60]
        assert await candles.extremes(symbol, END - DAY + timedelta(seconds=61), END) == (
            min(candle.low for candle in between),
            max(candle.high for candle in between),
            MINUTE,
        )
    assert await candles.extremes("BTC", END, END + timedelta(seconds=59)) is None


async def test_minutes_are_recorded_after_a_clock_that_was_days_ahead(database: Database) -> None:
    source = ScriptedSource()
    candles = make_candles(database, source)
    await candles.record(NOW, since=NOW)
    source.late = 2 * DAY  # it has no candles of a future that only the clock shows
    await candles.record(NOW + 2 * DAY, since=NOW)
    source.late = timedelta(0)
    await candles.record(NOW + HOUR, since=NOW)
    assert [each.open_time for each in await candles.read("BTC", MINUTE, END - MINUTE, END + HOUR)] == [
        END + number * MINUTE for number in range(-1, 60)
    ]


async def test_a_minute_that_the_source_publishes_late_is_recorded_with_the_next_one(database: Database) -> None:
    source = ScriptedSource()
    candles = make_candles(database, source)
    source.late = MINUTE
    await candles.record(NOW, since=NOW)
    source.late = timedelta(0)
    await candles.record(NOW + MINUTE, since=NOW)
    read = await candles.read("BTC", MINUTE, END - 3 * MINUTE, END + MINUTE)
    assert [each.open_time for each in read] == [END + number * MINUTE for number in range(-3, 1)]


async def test_a_clock_that_is_ahead_by_more_than_the_retention_drops_a_day_at_most(database: Database) -> None:
    source = ScriptedSource()
    candles = make_candles(database, source, CANDLE_RETENTION_DAYS="3")
    await candles.record(NOW, since=NOW)
    source.late = 9 * DAY
    await candles.record(NOW + 9 * DAY, since=NOW)
    assert len(await candles.read("BTC", MINUTE, END - HOUR, END)) == 60


async def test_a_read_has_the_latest_candles_of_its_range_within_its_limit(database: Database) -> None:
    source = SyntheticSource(0, ("BTC",))
    candles = make_candles(database, source)
    await candles.record(NOW, since=NOW)
    read = await candles.read("BTC", MINUTE, None, END)
    assert (len(read), read[-1].open_time) == (CANDLES_MAX + 1, END - MINUTE)
    assert await candles.read("BTC", MINUTE, END - 2 * MINUTE, END) == read[-2:]
    assert await candles.read("BTC", MINUTE, END, END) == []
    assert await candles.read("BTC", DAY, None, datetime.max.replace(tzinfo=UTC)) == []


@pytest.mark.parametrize("start", [None, END - DAY * 9])
async def test_a_read_reaches_back_a_bounded_span(database: Database, start: datetime | None) -> None:
    candles = make_candles(database, ScriptedSource())
    first, earlier = (Candle(END - minutes * MINUTE, 1.0, 1.0, 1.0, 1.0, 1.0) for minutes in (SPAN_MAX, SPAN_MAX + 1))
    async with database.writing() as conn:
        await insert_minutes(conn, [("BTC", earlier), ("BTC", first)])
    assert await candles.read("BTC", MINUTE, start, END) == [first]
    assert await candles.read("BTC", MINUTE, start, END - MINUTE) == [earlier, first]


async def test_minutes_are_kept_for_their_retention_and_hours_for_good(database: Database) -> None:
    source = SyntheticSource(0, ("BTC",))
    candles = make_candles(database, source, CANDLE_RETENTION_DAYS="1")
    await candles.record(NOW, since=NOW - 9 * DAY)
    await candles.record(NOW + DAY, since=NOW - 9 * DAY)
    assert (await candles.read("BTC", MINUTE, END - MINUTE, END + DAY))[0].open_time > END
    hours = await candles.read("BTC", HOUR, END - DAY, END + DAY)
    assert (hours[0].open_time, len(hours)) == (END.replace(minute=0) - 23 * HOUR, 48)
    extremes = await candles.extremes("BTC", END - DAY, END - HOUR)
    assert extremes is not None
    assert extremes.span == HOUR


async def test_a_long_gap_is_filled_in_several_calls(database: Database) -> None:
    candles = make_candles(database, SyntheticSource(0, ("BTC",)))
    await candles.record(NOW, since=NOW - (CHUNKS_MAX + 1) * DAY)  # including the day before it
    assert await candles.read("BTC", MINUTE, END - 2 * DAY, END) == []
    await candles.record(NOW, since=NOW - (CHUNKS_MAX + 1) * DAY)
    assert (await candles.read("BTC", MINUTE, END - DAY, END))[-1].open_time == END - MINUTE


async def test_candles_that_a_source_lacks_now_are_recorded_later(database: Database) -> None:
    source = ScriptedSource()
    candles = make_candles(database, source)
    source.candle_error = MarketUnavailable("the venue does not answer")
    await candles.record(NOW, since=NOW)
    assert await candles.read("BTC", MINUTE, None, END) == []
    source.candle_error = None
    await candles.record(NOW, since=NOW)
    assert (await candles.read("BTC", MINUTE, None, END))[-1].open_time == END - MINUTE


async def test_the_running_candle_covers_the_marks_that_were_seen() -> None:
    market = MarketFeed(ScriptedSource(), ManualClock(NOW))

    async def applied(_: object) -> None:
        assert market.running

    for second, price in ((1, 101.5), (2, 102.5)):
        await market.take(tick(second, "BTC"), applied)
        assert market.running == {"BTC": Candle(END, 101.5, price, 101.5, price, 0.0)}
    assert extend_candle(market.running["BTC"], END + MINUTE, 7.0) == Candle(END + MINUTE, 7.0, 7.0, 7.0, 7.0, 0.0)
