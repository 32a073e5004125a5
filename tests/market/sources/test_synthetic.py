"""Synthetic source: a function of seed and time, with the statistics of a real market."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import combinations, pairwise
from math import exp, log, sqrt
from statistics import correlation, pstdev
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_clock import ManualClock

from trader.core.clock import epoch_second, moment_of
from trader.core.errors import MarketUnavailable, StartError
from trader.market.domain.markets import (
    INTERVALS,
    MARKETS,
    PLAIN_FUNDING_RATE,
    SIMULATED_MARKETS,
    Book,
    Candle,
    Interval,
    Quote,
    Tick,
)
from trader.market.sources.path import BLOCK_H, HOUR_S, KNOT_S, KNOTS, Paths, Regime, Regimes
from trader.market.sources.rows import PRESET_MARKETS
from trader.market.sources.synthetic import SyntheticSource, aggregate

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SYMBOLS = ("BTC", "ETH", "SOL")

source = SyntheticSource(7, SYMBOLS)
seconds = st.integers(0, 4_000_000_000)


def seen(tick: Tick) -> list[tuple[datetime, str, Decimal, Decimal, Decimal, Book]]:
    return [(tick.at, s, q.bid, q.ask, q.mark, q.book) for s, q in tick.quotes.items()]


async def test_history_yields_the_pushed_ticks() -> None:
    clock = ManualClock(NOW)
    pushed: list[Tick] = []
    async for tick in source.ticks(clock, NOW + timedelta(milliseconds=300)):
        pushed.append(tick)
        if len(pushed) == 130:
            break
    ticks = SyntheticSource(7, SYMBOLS).history(NOW + timedelta(milliseconds=300), pushed[-1].at)
    assert [seen(tick) for tick in pushed] == [seen(tick) async for tick in ticks]
    assert [tick.at for tick in pushed] == [NOW + timedelta(seconds=n) for n in range(1, 131)]
    assert clock.now() == pushed[-1].at


async def test_history_excludes_after_and_includes_until() -> None:
    ticks = [tick async for tick in source.history(NOW, NOW + timedelta(seconds=2))]
    assert [tick.at for tick in ticks] == [NOW + timedelta(seconds=1), NOW + timedelta(seconds=2)]
    assert not [tick async for tick in source.history(NOW, NOW)]


def test_another_process_sees_the_same_market() -> None:
    moments = NOW, datetime(2026, 3, 4, 6, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 58, tzinfo=UTC)
    ticks = [source.tick(epoch_second(at)) for at in moments]
    program = (
        "from trader.market.sources.synthetic import SyntheticSource\n"
        "source = SyntheticSource(7, ('BTC', 'ETH', 'SOL'))\n"
        f"for at in {[epoch_second(at) for at in moments]}:\n"
        "    print([(s, str(q.mark), str(q.book)) for s, q in source.tick(at).quotes.items()])"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.splitlines() == [
        str([(s, str(q.mark), str(q.book)) for s, q in tick.quotes.items()]) for tick in ticks
    ]


def test_the_order_of_calls_does_not_matter() -> None:
    source, other = SyntheticSource(3, SYMBOLS), SyntheticSource(3, SYMBOLS)
    moments = [epoch_second(NOW) + offset for offset in (0, 5_000_000, -9_000_000, 7, 30_000, 1)]
    forward = {moment: seen(source.tick(moment)) for moment in moments}
    backward = {moment: seen(other.tick(moment)) for moment in reversed(moments)}
    assert forward == backward


def test_another_seed_gives_another_market() -> None:
    marks = {SyntheticSource(seed, SYMBOLS).tick(epoch_second(NOW)).quotes["BTC"].mark for seed in range(5)}
    assert len(marks) == 5


def test_one_market_does_not_depend_on_which_others_are_followed() -> None:
    alone = SyntheticSource(7, ["SOL"]).tick(epoch_second(NOW))
    assert list(alone.quotes) == ["SOL"]
    assert alone.quotes["SOL"].book == source.tick(epoch_second(NOW)).quotes["SOL"].book


def check_book(quote: Quote) -> None:
    market, book = MARKETS[quote.symbol], quote.book
    assert (book.symbol, book.at) == (quote.symbol, quote.at)
    assert len(book.bids) == len(book.asks) == 12
    bids, asks = [level.price for level in book.bids], [level.price for level in book.asks]
    assert bids == sorted(set(bids), reverse=True)
    assert asks == sorted(set(asks))
    assert bids[-1] > 0
    assert bids[0] < asks[0]
    assert (bids[0], asks[0], (bids[0] + asks[0]) / 2) == (quote.bid, quote.ask, quote.mark)
    assert all(price % market.tick == 0 for price in bids + asks)
    assert all(level.quantity > 0 and level.quantity % market.lot == 0 for level in book.bids + book.asks)


@settings(max_examples=40, deadline=None)
@given(seconds)
def test_books_are_valid(second: int) -> None:
    for quote in source.tick(second).quotes.values():
        check_book(quote)
        level = Decimal(SIMULATED_MARKETS[quote.symbol].character.level)
        assert level / 4 < quote.mark < level * 4


def near_depth(quote: Quote, bp: int) -> Decimal:
    """The bid quantity within `bp` basis points of the best bid."""
    worst = quote.bid * (1 - Decimal(bp) / 10_000)
    return sum((level.quantity for level in quote.book.bids if level.price >= worst), Decimal(0))


def test_books_resemble_a_liquid_market() -> None:
    spreads, depths = [], []
    for hour in range(80):
        quote = source.tick(epoch_second(NOW) + hour * 3607).quotes["BTC"]
        if Regimes(7).of_block(epoch_second(quote.at) // HOUR_S // BLOCK_H) is Regime.CRASH:
            continue
        spreads.append(float((quote.ask - quote.bid) / quote.mark) * 1e4)
        depths.append(near_depth(quote, 2) * quote.mark)
    assert 0.1 < min(spreads) < 0.2 < max(spreads) < 1.5
    assert min(depths) > 20_000
    assert max(depths) < 1_500_000
    assert 150_000 < sorted(depths)[len(depths) // 2] < 450_000
    assert len(set(depths)) > 60


def test_books_are_wide_and_thin_in_a_crash() -> None:
    regimes = Regimes(7)
    block = next(block for block in range(60_000, 61_000) if regimes.of_block(block) is Regime.CRASH)
    crash = next(c for c in regimes.crashes(block * BLOCK_H) if c.second // (BLOCK_H * HOUR_S) == block)
    calm, steep = (source.tick(crash.second + after).quotes["ETH"] for after in (-1800, 600))
    assert (steep.ask - steep.bid) / steep.mark > 4 * (calm.ask - calm.bid) / calm.mark
    assert near_depth(steep, 5) < near_depth(calm, 5) / 4


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1_000_000), st.sampled_from((1, BLOCK_H, BLOCK_H * 256)), st.sampled_from(SYMBOLS))
def test_prices_are_continuous_at_the_joints_of_hours_blocks_and_eras(place: int, size: int, symbol: str) -> None:
    hour = place // size * size
    paths = Paths(11)
    before, after = paths.hour(symbol, hour - 1), paths.hour(symbol, hour)
    assert after[0] == pytest.approx(before[-1], abs=1e-12)
    assert len(before) == len(after) == KNOTS + 1


async def test_candles_match_the_ticks() -> None:
    start = NOW.replace(minute=30, second=0)
    end = start + timedelta(hours=1)
    ticks = [tick async for tick in source.history(start - timedelta(seconds=1), end)]
    for symbol in SYMBOLS:
        candles = await source.candles(symbol, "1m", start, end)
        assert [candle.open_time for candle in candles] == [start + timedelta(minutes=n) for n in range(60)]
        for number, candle in enumerate(candles):
            marks = [float(tick.quotes[symbol].mark) for tick in ticks[number * 60 : number * 60 + 60]]
            assert candle[1:5] == pytest.approx((marks[0], max(marks), min(marks), marks[-1]), rel=1e-12)
            assert candle.volume > 0


@pytest.mark.parametrize("interval", get_args(Interval))
async def test_candles_of_every_interval_are_closed_aligned_and_complete(interval: Interval) -> None:
    span = INTERVALS[interval]
    start, end = NOW - 3 * span, NOW
    candles = await source.candles("ETH", interval, start, end)
    assert len(candles) in (2, 3)
    assert all(start <= candle.open_time and candle.open_time + span <= end for candle in candles)
    assert all((candle.open_time - datetime(1970, 1, 1, tzinfo=UTC)) % span == timedelta(0) for candle in candles)
    assert all(later.open_time - earlier.open_time == span for earlier, later in pairwise(candles))
    minutes = await source.candles("ETH", "1m", candles[0].open_time, candles[-1].open_time + span)
    joined = aggregate(minutes, interval)
    assert [candle[:5] for candle in joined] == [candle[:5] for candle in candles]
    assert [candle.volume for candle in joined] == pytest.approx([candle.volume for candle in candles])


async def test_candles_of_an_unknown_market_are_unavailable() -> None:
    with pytest.raises(MarketUnavailable, match="DOGE"):
        await source.candles("DOGE", "1m", NOW, NOW)


def returns(candles: Sequence[Candle]) -> list[float]:
    return [log(later.close / earlier.close) for earlier, later in pairwise(candles)]


async def test_markets_are_correlated_and_as_volatile_as_real_ones() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    hourly = {s: returns(await source.candles(s, "1h", start, start + timedelta(days=7))) for s in SYMBOLS}
    assert 0.5 < correlation(hourly["BTC"], hourly["ETH"]) < 0.97
    assert 0.5 < correlation(hourly["BTC"], hourly["SOL"]) < 0.97
    volatility = {symbol: pstdev(series) * sqrt(8766) for symbol, series in hourly.items()}
    assert 0.25 < volatility["BTC"] < 0.9
    assert volatility["BTC"] < volatility["ETH"] < volatility["SOL"] < 1.5


def test_every_regime_occurs_with_the_moves_of_its_name() -> None:
    regimes, paths = Regimes(5), Paths(5)
    blocks: dict[Regime, list[int]] = {regime: [] for regime in Regime}
    for block in range(60_000, 62_000):
        blocks[regimes.of_block(block)].append(block)
    assert {regime: len(result) // 100 for regime, result in blocks.items()} == {
        Regime.UP: pytest.approx(5, abs=1),
        Regime.DOWN: pytest.approx(5, abs=1),
        Regime.RANGE: pytest.approx(9, abs=1),
        Regime.CRASH: 0,
    }
    assert len(blocks[Regime.CRASH]) > 20

    def move(block: int) -> float:
        return paths.hour("BTC", (block + 1) * BLOCK_H)[0] - paths.hour("BTC", block * BLOCK_H)[0]

    moves = {regime: [move(block) for block in chosen[:30]] for regime, chosen in blocks.items()}
    mean_up = sum(moves[Regime.UP]) / 30
    mean_down = sum(moves[Regime.DOWN]) / 30
    assert mean_up > 0.006
    assert mean_down < -0.006
    assert abs(sum(moves[Regime.RANGE]) / 30) < 0.004


def test_a_crash_falls_5_to_15_percent_within_20_minutes_and_recovers_in_part() -> None:
    regimes, paths = Regimes(5), Paths(5)
    crashes = [
        crash
        for block in range(60_000, 60_300)
        if regimes.of_block(block) is Regime.CRASH
        for crash in regimes.crashes(block * BLOCK_H)
        if crash.second // (BLOCK_H * HOUR_S) == block
    ]
    assert len(crashes) >= 3
    for crash in crashes[:4]:
        for symbol in SYMBOLS:
            assert 0.05 <= 1 - exp(-crash.depth * SIMULATED_MARKETS[symbol].character.beta) <= 0.15

            def price(second: int, symbol: str = symbol) -> float:
                return exp(paths.hour(symbol, second // HOUR_S)[second % HOUR_S // KNOT_S])

            before, bottom = price(crash.second), price(crash.second + 1200)
            recovered = price(crash.second + 4800)
            assert 0.04 < 1 - bottom / before < 0.16  # its depth and the noise of 20 minutes
            assert bottom < recovered < before


def test_markets_are_correlated_by_the_share_of_the_factor_in_their_volatility() -> None:
    paths, hours = Paths(3), range(486_000, 486_000 + 40 * 97, 97)
    moves, parts = {}, {}
    for symbol, (_, character, _) in SIMULATED_MARKETS.items():
        path = [paths.hour(symbol, hour)[::12] for hour in hours]
        moves[symbol] = [after - before for minutes in path for before, after in pairwise(minutes)]
        common = character.beta * 0.36
        parts[symbol] = common / sqrt(common**2 + character.own_volatility**2)
    for first, second in combinations(SIMULATED_MARKETS, 2):
        assert abs(correlation(moves[first], moves[second]) - parts[first] * parts[second]) < 0.05, (first, second)


def test_prices_stay_plausible_for_years() -> None:
    paths = Paths(0)
    for symbol, (_, character, _) in SIMULATED_MARKETS.items():
        prices = [exp(paths.hour(symbol, hour)[0]) for hour in range(0, 30 * 8766, 5_003)]
        assert character.level / 4 < min(prices)
        assert max(prices) < character.level * 4


def test_an_unknown_market_fails_the_start() -> None:
    with pytest.raises(StartError, match=r"MARKETS names PEPE, .*BTC, ETH, SOL, BNB, XRP, DOGE$"):
        SyntheticSource(0, ["BTC", "PEPE"])
    with pytest.raises(StartError, match=r"MARKETS names DOGE, .*BTC, ETH, SOL, XRP$"):
        SyntheticSource(0, ["BTC", "DOGE"], PRESET_MARKETS["lighter-standard"])


def test_synthetic_funding_uses_the_plain_rate() -> None:
    assert source.funding_rate("BTC", NOW) == PLAIN_FUNDING_RATE


def test_identity_names_the_seed() -> None:
    assert source.identity == "synthetic:7"
    assert source.ends_at is None
    assert moment_of(epoch_second(NOW)) == NOW


class WaitingClock(ManualClock):
    """A clock that remembers the longest wait."""

    longest = timedelta(0)

    async def advance_to(self, moment: datetime) -> None:
        self.longest = max(self.longest, moment - self.now())
        await super().advance_to(moment)


async def test_a_clock_that_was_set_neither_stops_the_market_nor_makes_it_pass_the_time_in_between() -> None:
    clock = WaitingClock(datetime(2025, 6, 2, 22, 50, 0, 500_000, tzinfo=UTC))
    ticks = aiter(SyntheticSource(3, ("BTC",)).ticks(clock, clock.now()))
    for span in (timedelta(0), timedelta(hours=3), -timedelta(hours=5), timedelta(hours=2)):
        clock.set_by(span)
        for _ in range(3):
            tick = await anext(ticks)
            assert abs(tick.at - clock.now()) <= timedelta(seconds=1)
    assert clock.longest <= timedelta(seconds=1)
