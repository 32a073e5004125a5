"""Replay source: the path and books of recorded candles, its clocks, and the candles it serves."""

import asyncio
import gzip
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from hypothesis import strategies as st
from support.candles import FOLDER
from support.waiting import until

from trader.backtest.spec import conditions_of, open_source
from trader.composition.external import make_source
from trader.core.clock import LockstepClock, ScaledClock, SystemClock
from trader.core.errors import MarketDataError, MarketUnavailable, StartError
from trader.live.source import VenueSource
from trader.market.domain.markets import MARKETS, PLAIN_FUNDING_RATE, Candle, Interval, Quote, Tick
from trader.market.sources.books import Grid
from trader.market.sources.files import FileRow
from trader.market.sources.recorded_minutes import PlainMinutes
from trader.market.sources.replay import ReplaySource
from trader.market.sources.rows import PATH_EDGE
from trader.market.sources.source import MarketSource, Seed
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.settings import Settings

START = datetime(2025, 1, 6, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
needs_real = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the recorded candles are not at {FOLDER}")


def rows_of(count: int, *, first: int = 0, price: float = 95000.0) -> list[FileRow]:
    """Candles that rise by 1 a minute and reach 2 in both directions."""
    minute = int(START.timestamp()) // 60 + first
    return [FileRow(minute + n, price + n, price + n + 3, price + n - 2, price + n + 1, 5.0 + n) for n in range(count)]


def write(folder: Path, rows: Sequence[FileRow], name: str = "BTCUSDT-1m-2025-01.csv") -> Path:
    place = folder / name
    text = "".join(f"{row.minute * 60_000},{','.join(map(repr, row[1:]))}\n" for row in rows)
    place.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return place


async def opened(place: Path, symbols: Sequence[str] = ("BTC",), **options: object) -> ReplaySource:
    source = ReplaySource(place, symbols, **options)  # type: ignore[arg-type]
    await source.open()
    return source


@st.composite
def candles(draw: st.DrawFn) -> FileRow:
    prices = sorted(draw(st.lists(st.floats(10, 1e6), min_size=4, max_size=4)))
    first, second = draw(st.permutations(prices[1:3]))
    return FileRow(0, first, prices[3], prices[0], second, draw(st.floats(0, 1e9)))


# Playing


def marks_of(ticks: Sequence[Tick], symbol: str = "BTC") -> list[Decimal]:
    return [tick.quotes[symbol].mark for tick in ticks]


async def test_there_is_a_tick_a_second_with_a_book_around_the_path(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(5)))
    ticks = [tick async for tick in source.history(START - MINUTE, START + 10 * MINUTE)]
    assert [tick.at for tick in ticks] == [START + timedelta(seconds=n) for n in range(300)]
    grid = Grid(MARKETS["BTC"])
    paths = [marks_of(ticks)[begin : begin + 60] for begin in range(0, 300, 60)]
    for row, path in zip(rows_of(5), paths, strict=True):
        low, high, *ends = (grid.price(mark) for mark in grid.corners(row))
        assert (min(path), max(path), path[0], path[-1]) == (low, high, *ends)
    for tick in ticks:
        quote = tick.quotes["BTC"]
        bids, asks = ([level.price for level in side] for side in (quote.book.bids, quote.book.asks))
        assert (quote.bid, quote.ask) == (bids[0], asks[0])
        assert (quote.bid + quote.ask) / 2 == quote.mark
        assert quote.bid < quote.ask
        assert bids == sorted(set(bids), reverse=True)
        assert asks == sorted(set(asks))
        assert len(bids) == len(asks) == 12
        assert all(price > 0 and price % MARKETS["BTC"].tick == 0 for price in bids + asks)
        assert quote.book.at == tick.at


def near_depth(quote: Quote) -> float:
    """The quantity offered within 3 basis points of the best ask."""
    return float(sum(level.quantity for level in quote.book.asks if level.price <= quote.ask * Decimal("1.0003")))


async def test_a_move_widens_and_thins_the_book_while_it_lasts(tmp_path: Path) -> None:
    rows = rows_of(30)
    rows[10] = rows[10]._replace(high=rows[10].high + 300)
    source = await opened(write(tmp_path, rows))
    ticks = [tick async for tick in source.history(START - MINUTE, START + 30 * MINUTE)]
    spreads = [float(tick.quotes["BTC"].ask - tick.quotes["BTC"].bid) for tick in ticks]
    depths = [near_depth(tick.quotes["BTC"]) for tick in ticks]
    calm = slice(5 * 60, 10 * 60)
    assert max(spreads[10 * 60 : 11 * 60]) > 20 * max(spreads[calm])
    assert min(depths[10 * 60 : 11 * 60]) < min(depths[calm]) / 5
    assert max(spreads[13 * 60 : 14 * 60]) < 2 * max(spreads[calm])


async def test_a_book_knows_nothing_of_the_future(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    rows = rows_of(10)
    last = rows[9]._replace(volume=900.0)
    sources = (
        await opened(write(tmp_path, rows)),
        await opened(write(tmp_path / "other", [*rows[:9], last])),
        await opened(write(tmp_path / "other", [*rows[:9], last._replace(high=99_000.0)])),
    )
    before = [
        [tick.quotes["BTC"].book async for tick in source.history(START - MINUTE, START + 9 * MINUTE - MINUTE / 60)]
        for source in sources
    ]
    assert before[0] == before[1] == before[2]


async def test_history_yields_the_same_ticks_as_a_lockstep_replay(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(3)), speed=0)
    clock = source.clock(None)
    assert isinstance(clock, LockstepClock)
    assert clock.now() == START
    pushed = []
    async for tick in source.ticks(clock, START):
        assert clock.now() == tick.at
        pushed.append(tick)
        if tick.at == source.ends_at:
            break
    assert [tick.at for tick in pushed] == [START + timedelta(seconds=n) for n in range(1, 180)]
    assert marks_of(pushed) == marks_of([tick async for tick in source.history(START, START + timedelta(days=1))])


async def test_after_its_end_prices_become_stale_and_the_replay_waits(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(1)), speed=0)
    clock = source.clock(None)
    assert source.ends_at == START + timedelta(seconds=59)
    ticks = source.ticks(clock, START)
    last = await anext(ticks)
    while last.at < source.ends_at:
        last = await anext(ticks)
    waiting = asyncio.ensure_future(anext(ticks))
    await until(lambda: last.quotes["BTC"].is_stale(clock.now()))
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_speed_is_a_multiple_of_real_time(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(10)), speed=600)
    clock = source.clock(None)
    assert isinstance(clock, ScaledClock)
    begin = monotonic()
    count = 0
    async for tick in source.ticks(clock, START):
        assert clock.now() == tick.at - timedelta(milliseconds=1), "its moment arrives once it has been applied"
        count += 1
        if count == 120:
            break
    assert monotonic() - begin >= 0.19  # 120 s at 600 times real time


async def test_time_waits_for_a_feed_that_cannot_keep_up(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(10)), speed=1_000_000)
    clock = source.clock(None)
    previous = clock.now()
    async for tick in source.ticks(clock, START):
        await asyncio.sleep(0.001)  # a thousand seconds of the clock, if the feed did not hold it back
        assert previous <= clock.now() < tick.at
        previous = clock.now()
        if tick.at == START + 2 * MINUTE:
            break


async def test_a_released_clock_continues_from_where_it_was_held() -> None:
    clock = ScaledClock(START, 1_000_000)
    await clock.advance_to(START + timedelta(seconds=5))
    await asyncio.sleep(0.01)  # ten thousand seconds of the clock, if nothing held it
    assert clock.now() == START + timedelta(seconds=4.999)
    clock.release()
    await until(lambda: clock.now() > START + timedelta(seconds=1000))


async def test_a_clock_resumes_where_an_earlier_process_left_off(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(10)), speed=0)
    assert source.clock(START + 7 * MINUTE).now() == START + 7 * MINUTE


async def test_a_gap_has_no_ticks(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, [*rows_of(2), *rows_of(2, first=100)]))
    times = [tick.at async for tick in source.history(START - MINUTE, START + 200 * MINUTE)]
    assert len(times) == 240
    assert {later - earlier for earlier, later in pairwise(times)} == {
        timedelta(seconds=1),
        98 * MINUTE + timedelta(seconds=1),
    }
    assert [candle.open_time for candle in await source.candles("BTC", "1m", START, START + 200 * MINUTE)] == [
        START + minute * MINUTE for minute in (0, 1, 100, 101)
    ]


async def test_where_the_price_stands_still_plain_minutes_have_the_books_of_the_replay(tmp_path: Path) -> None:
    minute = int(START.timestamp()) // 60
    still = [FileRow(minute + n, 95000.0, 95000.0, 95000.0, 95000.0, 5.0 + n) for n in (0, 1, 2, 50, 51)]
    source = await opened(write(tmp_path, still))
    recording = source.recordings["BTC"]
    plain = PlainMinutes(source.rows["BTC"], recording.minutes)
    opening = recording.grid.nearest(95000.0)
    for second in (60 * row.minute + within for row in still for within in (0, 30)):
        plainly, drawn = plain.quote(second, opening), recording.quote(second, opening)
        assert (plainly.at, plainly.mark, plainly.book) == (drawn.at, drawn.mark, drawn.book)
    assert (plain.minute(minute + 3), plain.marks(minute + 3)) == (None, ())
    assert set(plain.corners(range(minute + 3, minute + 4)).flat) == {-1}


@pytest.mark.parametrize(("distance", "remembers"), [(1, True), (2, False)])
async def test_a_minute_after_a_gap_forgets_the_moves_before_it(tmp_path: Path, distance: int, remembers: bool) -> None:
    minute = int(START.timestamp()) // 60
    books = []
    for first in (95000.0, 95100.0):  # the same range and close, but another path
        before = FileRow(minute, first, 95100.0, 95000.0, 95080.0, 5.0)
        after = FileRow(minute + distance, 95080.0, 95090.0, 95070.0, 95080.0, 5.0)
        source = await opened(write(tmp_path, [before, after, after._replace(minute=after.minute + 1)]))
        plain = PlainMinutes(source.rows["BTC"], source.recordings["BTC"].minutes)
        books.append(plain.quote(60 * after.minute + 30, plain.marks(after.minute)[0]).book)
    assert (books[0] != books[1]) is remembers


async def test_a_market_in_a_gap_is_missing_from_the_tick(tmp_path: Path) -> None:
    write(tmp_path, rows_of(5))
    write(tmp_path, [*rows_of(2, price=3000), *rows_of(2, first=3, price=3000)], "ETHUSDT-1m-2025-01.csv")
    source = await opened(tmp_path, ("BTC", "ETH"))
    ticks = [tick async for tick in source.history(START - MINUTE, START + 5 * MINUTE)]
    assert [len(tick.quotes) for tick in ticks[::60]] == [2, 2, 1, 2, 2]
    assert len(ticks) == 300


async def test_a_market_is_traded_while_it_has_candles(tmp_path: Path) -> None:
    write(tmp_path, rows_of(20))
    write(tmp_path, rows_of(20, first=5, price=3000), "ETHUSDT-1m-2025-01.csv.gz")
    source = await opened(tmp_path, ("BTC", "ETH"))
    ticks = [tick async for tick in source.history(START - MINUTE, START + 100 * MINUTE)]
    assert ticks[0].at == START == source.clock(None).now()
    assert ticks[-1].at == START + 25 * MINUTE - timedelta(seconds=1) == source.ends_at
    traded = [list(tick.quotes) for tick in ticks[::60]]
    assert traded == [["BTC"]] * 5 + [["BTC", "ETH"]] * 15 + [["ETH"]] * 5
    assert source.identity == "replay:2025-01-06T00:00:00.000Z:0"
    btc, eth = source.markets["BTC"], source.markets["ETH"]
    assert (btc.begins_at, btc.ends_at) == (None, START + 20 * MINUTE - timedelta(seconds=1))
    assert (eth.begins_at, eth.ends_at) == (START + 5 * MINUTE, None)


async def test_start_and_end_limit_the_replay(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(20)), start=START + 3 * MINUTE, end=START + 5 * MINUTE)
    clock = source.clock(None)
    assert clock.now() - (START + 3 * MINUTE) < MINUTE
    assert source.ends_at == START + 5 * MINUTE
    assert len(await source.candles("BTC", "1m", START, START + 3 * MINUTE)) == 3


async def test_long_data_is_traded_after_a_warm_up(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(2 * 1440 + 1)), speed=0)
    assert source.clock(None).now() == START + timedelta(days=1)


@pytest.mark.parametrize(
    ("symbols", "options", "reason"),
    [
        (("BTC", "SOL"), {}, "has candles of BTC, ETH but not of SOL"),
        (("BTC", "DOGE"), {}, "has candles of BTC, ETH but not of DOGE"),
        (("BTC", "PEPE"), {}, "MARKETS names PEPE, whose figures are unknown"),
        (("BTC", "ETH"), {"end": START + MINUTE}, "ETH has candles from .*T01:40:00.000Z to .*, and none from"),
        (("BTC",), {"start": START + 60 * MINUTE}, "REPLAY_START and REPLAY_END leave nothing"),
        (("BTC",), {"start": START - MINUTE}, "REPLAY_START is .*, which is before that"),
        (("BTC",), {"end": START}, "REPLAY_START and REPLAY_END leave nothing"),
    ],
)
async def test_a_recording_that_cannot_be_replayed_fails_the_start(
    tmp_path: Path, symbols: tuple[str, ...], options: dict[str, object], reason: str
) -> None:
    write(tmp_path, rows_of(5))
    write(tmp_path, rows_of(5, first=100, price=3000), "ETHUSDT.csv")
    with pytest.raises(StartError, match=reason):
        await opened(tmp_path, symbols, **options)


async def test_a_price_of_only_a_few_ticks_fails_the_start(tmp_path: Path) -> None:
    rows = [FileRow(row.minute, 3.0, 4.0, 2.0, 3.0, 1.0) for row in rows_of(3)]
    with pytest.raises(MarketDataError, match=r"BTCUSDT.*a price of 2\.0 is too low for the tick 0\.1 of BTC"):
        await opened(write(tmp_path, rows))


async def test_a_price_of_more_ticks_than_floats_can_count_fails_the_start(tmp_path: Path) -> None:
    for price, is_refused in ((1e14, False), (1e14 + 0.1, True), (1e18, True)):
        rows = [FileRow(row.minute, price, price, price, price, 1.0) for row in rows_of(3)]
        refusal = pytest.raises(MarketDataError, match=r"BTCUSDT.*a price of .* is too high for the tick 0\.1 of BTC")
        with refusal if is_refused else nullcontext():
            await opened(write(tmp_path, rows))


# Candles


@pytest.mark.parametrize("interval", ["5m", "15m", "1h"])
async def test_candles_are_closed_aligned_and_sums_of_their_minutes(tmp_path: Path, interval: Interval) -> None:
    width = {"5m": 5, "15m": 15, "1h": 60}[interval]
    rows = rows_of(200, first=7)
    source = await opened(write(tmp_path, rows))
    closed = await source.candles("BTC", interval, START - timedelta(days=1), START + timedelta(days=1))
    first = -(-7 // width)
    assert [candle.open_time for candle in closed] == [
        START + number * width * MINUTE for number in range(first, 207 // width)
    ]
    for candle in closed:
        begin = int((candle.open_time - START) / MINUTE) - 7
        part = rows[begin : begin + width]
        assert candle == Candle(
            candle.open_time,
            part[0].open,
            max(row.high for row in part),
            min(row.low for row in part),
            part[-1].close,
            sum(row.volume for row in part),
        )


async def test_an_open_candle_is_not_served(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(100)))
    for seconds, count in ((899, 0), (900, 1), (1799, 1), (1800, 2)):
        assert len(await source.candles("BTC", "15m", START, START + timedelta(seconds=seconds))) == count
    with pytest.raises(MarketUnavailable, match="ETH"):
        await source.candles("ETH", "1m", START, START)


async def test_funding_uses_the_plain_rate(tmp_path: Path) -> None:
    source = await opened(write(tmp_path, rows_of(2)))
    assert source.funding_rate("BTC", START) == PLAIN_FUNDING_RATE
    await source.close()


# The real candles


@pytest.mark.slow
@needs_real
async def test_the_recorded_month_is_complete_and_played_exactly() -> None:
    source = await opened(FOLDER, ("BTC", "ETH", "SOL"), speed=0)
    assert source.identity == "replay:2025-01-01T03:00:00.000Z:0"
    assert source.ends_at == datetime(2025, 2, 4, 20, 19, 59, tzinfo=UTC)
    assert source.clock(None).now() == datetime(2025, 1, 2, 3, tzinfo=UTC)
    crash = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)
    hour = source.history(crash - timedelta(seconds=1), crash + timedelta(minutes=60) - timedelta(seconds=1))
    ticks = [tick async for tick in hour]
    assert len(ticks) == 3600
    for symbol in ("BTC", "ETH", "SOL"):
        closed = await source.candles(symbol, "1m", crash, crash + timedelta(minutes=60))
        assert len(closed) == 60
        quarter = float(MARKETS[symbol].tick) / 4 + 1e-9
        for number, candle in enumerate(closed):
            marks = [float(mark) for mark in marks_of(ticks[number * 60 : number * 60 + 60], symbol)]
            assert abs(min(marks) - candle.low) <= quarter
            assert abs(max(marks) - candle.high) <= quarter
    lows = [candle.low for candle in await source.candles("ETH", "1m", crash, crash + timedelta(minutes=60))]
    assert min(lows) < 2_130
    day = await source.candles("BTC", "4h", crash - timedelta(days=30), crash)
    assert all(math.isfinite(candle.volume) and candle.volume > 0 for candle in day)


# Choosing the source


def test_the_settings_choose_the_source(tmp_path: Path) -> None:
    settings = Settings.load({"MARKETS": "BTC"}, None, demo=True)

    def made(market_source: str) -> MarketSource:
        return make_source(msgspec.structs.replace(settings, market_source=market_source))

    assert isinstance(made("synthetic"), SyntheticSource)
    assert isinstance(made("synthetic").clock(None), SystemClock)
    assert isinstance(made(f"replay:{tmp_path}"), ReplaySource)
    assert isinstance(made("venue"), VenueSource)
    with pytest.raises(StartError, match="rumour"):
        made("rumour")


@pytest.mark.parametrize(
    ("given", "fee_bp"),
    [
        ({"VENUE_PRESET": "lighter-standard"}, 0),
        ({"SIM_TAKER_FEE_BPS": "0.1"}, 0.1),
        ({"VENUE_PRESET": "lighter-standard", "SIM_TAKER_FEE_BPS": "1"}, 1),
        ({"VENUE_PRESET": "lighter-premium"}, 2.8),
        ({}, 5),
    ],
)
def test_spreads_of_a_service_without_fees_cover_what_drawn_paths_give_away_and_those_of_backtests_do_not(
    tmp_path: Path, given: Mapping[str, str], fee_bp: float
) -> None:
    place = write(tmp_path, rows_of(5))
    replayed = {"MARKETS": "BTC", "MARKET_SOURCE": f"replay:{place}", **given}
    service = make_source(Settings.load(replayed, None, demo=True))
    _, backtest = asyncio.run(open_source(conditions_of(place, {}), {**replayed, "SIM_SEED": "0"}))
    assert isinstance(service, ReplaySource)
    assert isinstance(backtest, ReplaySource)
    asyncio.run(service.open())
    service.use_seed(Seed(0))
    surcharge_bp = max(0.0, PATH_EDGE * backtest.recordings["BTC"].minutes.range_bp / 2 - fee_bp)
    assert service.rows["BTC"].calm.surcharge_bp == pytest.approx(surcharge_bp)
    assert backtest.rows["BTC"].calm.surcharge_bp == 0, "everybody decides by the minute or slower"
    quote, usual = (each.recordings["BTC"].quote(int(START.timestamp()) + 90, 0) for each in (service, backtest))
    assert (quote.mark, quote.book.bids[0].quantity) == (usual.mark, usual.book.bids[0].quantity)
    wider_bp = float((usual.bid - quote.bid) / usual.mark) * 1e4
    assert wider_bp == pytest.approx(surcharge_bp, abs=0.01)
