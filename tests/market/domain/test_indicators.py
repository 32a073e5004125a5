"""Indicators compared with TA-Lib and numpy, on random and real candles."""

import csv
import gzip
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import msgspec
import numpy
import pytest
import talib
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candles import FOLDER

from trader.market.domain import indicators as ours
from trader.market.domain.indicators import Indicators, indicators
from trader.market.domain.markets import Candle

START = datetime(2025, 1, 6, 3, 0, tzinfo=UTC)


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def walk(seed: int, count: int, price: float = 50_000.0, minutes: int = 5) -> list[Candle]:
    """A random walk of candles with varying volatility."""
    rng = Random(seed)
    candles = []
    for index in range(count):
        scale = price * 0.001 * (0.2 + (index // 40) % 3)
        close = price + rng.gauss(0, scale)
        high = max(price, close) + abs(rng.gauss(0, scale / 2))
        low = min(price, close) - abs(rng.gauss(0, scale / 2))
        at = START + timedelta(minutes=minutes * index)
        candles.append(Candle(at, price, high, low, close, rng.uniform(0.1, 20)))
        price = close
    return candles


def real(symbol: str, start: int, count: int) -> list[Candle]:
    path = FOLDER / f"{symbol}USDT-1m-2025-01.csv.gz"
    if not path.exists():
        pytest.skip("the real candles are not here")
    with gzip.open(path, "rt") as lines:
        rows = list(csv.reader(lines))[1:][start : start + count]
    return [
        Candle(datetime.fromtimestamp(int(row[0]) / 1000, UTC), *(float(text) for text in row[1:6])) for row in rows
    ]


def columns(candles: Sequence[Candle]) -> tuple[Any, Any, Any, Any]:
    """High, low, close, volume as arrays."""
    _, _, high, low, close, volume = (numpy.array(column) for column in zip(*candles, strict=True))
    return high, low, close, volume


def regression_momentum(high: Any, low: Any, close: Any) -> float:
    middle = (talib.MIDPRICE(high, low, 20) + talib.SMA(close, 20)) / 2
    return float(talib.LINEARREG((close - middle)[19:], 20)[-1])


def agree_with_talib(candles: list[Candle]) -> None:
    result = indicators(candles)
    high, low, close, _ = columns(candles)
    upper, middle, lower = talib.BBANDS(close, 20, 2, 2)
    centre, width = talib.EMA(close, 20), talib.ATR(high, low, close, 14)
    expected = {
        "close": close[-1],
        "ema_20": centre[-1],
        "ema_50": talib.EMA(close, 50)[-1],
        "bollinger_upper": upper[-1],
        "bollinger_middle": middle[-1],
        "bollinger_lower": lower[-1],
        "keltner_upper": centre[-1] + 1.5 * width[-1],
        "keltner_lower": centre[-1] - 1.5 * width[-1],
        "atr": width[-1],
        "rsi": talib.RSI(close, 14)[-1],
        "adx": talib.ADX(high, low, close, 14)[-1],
        "plus_di": talib.PLUS_DI(high, low, close, 14)[-1],
        "minus_di": talib.MINUS_DI(high, low, close, 14)[-1],
        "kijun_sen": talib.MIDPRICE(high, low, 26)[-1],
        "momentum": regression_momentum(high, low, close),
    }
    assert {name: getattr(result, name) for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-7)
    inside = (upper < centre + 1.5 * width) & (lower > centre - 1.5 * width)
    assert result.squeeze_on == bool(inside[-1])
    squeezed = numpy.flatnonzero(inside)
    if not len(squeezed):
        assert (result.squeeze_candles, result.squeeze_released) == (None, None)
        return
    newest = int(squeezed[-1])
    start = newest
    while start > 0 and inside[start - 1]:
        start -= 1
    assert result.squeeze_candles == newest - start + 1
    assert result.squeeze_released == (None if inside[-1] else len(inside) - 2 - newest)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_matches_talib(seed: int) -> None:
    agree_with_talib(walk(seed, 90 + 97 * seed))


@pytest.mark.parametrize("symbol", ["BTC", "ETH", "SOL"])
@pytest.mark.parametrize("start", [0, 1_111, 23_456, 49_400])
def test_real_candles_match_talib(symbol: str, start: int) -> None:
    agree_with_talib(real(symbol, start, 500))


@pytest.mark.parametrize("period", [2, 5, 20, 50])
def test_every_value_of_a_series_matches_talib(period: int) -> None:
    candles = walk(11, 260)
    high, low, close, _ = columns(candles)
    highs, lows, closes = list(high), list(low), list(close)
    skip = period - 1
    assert ours.sma(closes, period) == near(list(talib.SMA(close, period)[skip:]))
    assert ours.ema(closes, period) == near(list(talib.EMA(close, period)[skip:]))
    assert ours.deviations(closes, period) == pytest.approx(list(talib.STDDEV(close, period)[skip:]), rel=1e-6)
    ranges = ours.true_ranges(highs, lows, closes)
    assert ours.atr(ranges, period) == near(list(talib.ATR(high, low, close, period)[period:]))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("close", 1),
        ("ema_20", 20),
        ("ema_50", 50),
        ("bollinger_upper", 20),
        ("keltner_upper", 20),
        ("atr", 15),
        ("rsi", 15),
        ("plus_di", 15),
        ("minus_di", 15),
        ("adx", 28),
        ("kijun_sen", 26),
        ("squeeze_on", 20),
        ("momentum", 39),
    ],
)
def test_an_indicator_is_absent_without_enough_history(name: str, needed: int) -> None:
    candles = walk(3, 60)
    assert getattr(indicators(candles[: needed - 1]), name) is None
    assert getattr(indicators(candles[:needed]), name) is not None


def test_without_candles_every_indicator_is_absent() -> None:
    assert indicators([]) == Indicators()


def test_a_market_that_never_moved_has_no_rsi_and_no_direction() -> None:
    still = [Candle(START + timedelta(minutes=index), 7.0, 7.0, 7.0, 7.0, 1.0) for index in range(100)]
    result = indicators(still)
    assert (result.rsi, result.adx, result.plus_di, result.minus_di) == (None, None, None, None)
    assert (result.atr, result.bollinger_upper, result.squeeze_on) == (0.0, 7.0, False)


def test_the_vwap_is_the_volume_weighted_mean_of_its_utc_day() -> None:
    candles = walk(5, 400)
    result = indicators(candles)
    day = [candle for candle in candles if candle.open_time.date() == candles[-1].open_time.date()]
    high, low, close, volume = columns(day)
    typical = (high + low + close) / 3
    vwap = float(numpy.average(typical, weights=volume))
    deviation = float(numpy.sqrt(numpy.average((typical - vwap) ** 2, weights=volume)))
    assert len(day) < len(candles)
    assert (result.vwap, result.vwap_deviation) == (near(vwap), near(deviation))
    assert result.vwap_upper == near(vwap + 2 * deviation)
    assert result.vwap_lower == near(vwap - 2 * deviation)


def test_the_vwap_is_absent_if_the_candles_begin_after_midnight() -> None:
    candles = walk(5, 60)  # from 03:00
    result = indicators(candles)
    assert (result.vwap, result.vwap_deviation, result.vwap_upper) == (None, None, None)


def test_the_vwap_of_a_day_starts_with_its_thirtieth_candle() -> None:
    candles = [candle for candle in walk(5, 400) if candle.open_time.day == 7]
    assert candles[0].open_time.hour == 0
    for count in (1, 2, 29):
        result = indicators(candles[:count])
        assert (result.vwap, result.vwap_deviation, result.vwap_upper, result.vwap_lower) == (None,) * 4, count
    result = indicators(candles[:30])
    high, low, close, volume = columns(candles[:30])
    assert result.vwap == near(numpy.average((high + low + close) / 3, weights=volume))
    assert result.vwap_deviation is not None
    assert candles[29].open_time.strftime("%H:%M") == "02:25", "so from 02:30, with 5-minute candles"


@given(st.integers(0, 10_000), st.integers(1, 700), st.sampled_from([1, 5, 15, 60]))
def test_a_session_of_fewer_than_thirty_candles_has_no_vwap(seed: int, count: int, minutes: int) -> None:
    candles = walk(seed, count, minutes=minutes)
    session = [candle for candle in candles if candle.open_time.date() == candles[-1].open_time.date()]
    result = indicators(candles)
    known = len(session) >= 30 and session[0].open_time.hour == 0
    figures = (result.vwap, result.vwap_deviation, result.vwap_upper, result.vwap_lower)
    assert [figure is not None for figure in figures] == [known] * 4


def test_the_vwap_covers_the_previous_day_until_the_first_candle_of_a_day_closes() -> None:
    candles = walk(5, 700)
    midnight = next(number for number, candle in enumerate(candles) if candle.open_time.day == 8)
    high, low, close, volume = columns(candles[midnight - 288 : midnight])
    yesterday = float(numpy.average((high + low + close) / 3, weights=volume))
    assert indicators(candles[:midnight]).vwap == near(yesterday)
    assert indicators(candles[: midnight + 1]).vwap is None


def test_the_vwap_is_absent_if_nothing_was_traded() -> None:
    silent = [candle._replace(volume=0.0) for candle in walk(5, 400)]
    assert indicators(silent).vwap is None


def test_the_session_may_come_from_finer_candles() -> None:
    fine = walk(9, 500)
    coarse = fine[-30:]
    assert indicators(coarse).vwap is None or coarse[0].open_time.hour == 0
    assert indicators(coarse, fine).vwap == indicators(fine).vwap
    assert msgspec.structs.replace(indicators(coarse, fine), vwap=None).atr == indicators(coarse).atr


def test_momentum_points_in_the_direction_of_a_released_squeeze() -> None:
    quiet = [100 + 0.05 * (-1) ** index for index in range(80)]
    for direction in (1, -1):
        closes = quiet + [100 + direction * 0.4 * step for step in range(1, 4)]
        candles = [
            Candle(START + timedelta(minutes=index), close, close + 0.2, close - 0.2, close, 1.0)
            for index, close in enumerate(closes)
        ]
        before, result = indicators(candles[:80]), indicators(candles)
        assert before.squeeze_on is True
        assert before.squeeze_released is None
        assert result.squeeze_on is False
        assert result.squeeze_released is not None
        assert 0 <= result.squeeze_released < 3
        assert result.momentum is not None
        assert result.momentum * direction > 0


prices = st.floats(min_value=0.01, max_value=1e6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(prices, prices, prices, prices, st.floats(0, 1e6)), max_size=90))
def test_any_history_gives_finite_indicators_within_their_ranges(
    rows: list[tuple[float, float, float, float, float]],
) -> None:
    candles = [
        Candle(START + timedelta(minutes=15 * index), row, max(row, two, *rest), min(row, two, *rest), two, volume)
        for index, (row, two, *rest, volume) in enumerate(rows)
    ]
    result = indicators(candles)
    for name in result.__struct_fields__:
        value = getattr(result, name)
        assert value is None or isinstance(value, bool) or numpy.isfinite(value), name
    for name in ("rsi", "adx", "plus_di", "minus_di"):
        value = getattr(result, name)
        assert value is None or -1e-9 <= value <= 100 + 1e-9, name
    if result.bollinger_upper is not None and result.bollinger_lower is not None:
        assert result.bollinger_upper >= result.bollinger_lower
    if result.vwap is not None:
        assert min(candle.low for candle in candles) * (1 - 1e-9) <= result.vwap
        assert result.vwap <= max(candle.high for candle in candles) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_later_candles_do_not_change_earlier_values(seed: int, count: int) -> None:
    high, low, close, _ = (list(column) for column in columns(walk(seed, count + 40)))
    for series in (ours.sma, ours.ema, ours.deviations):
        before = series(close[:count], 20)
        assert series(close, 20)[: len(before)] == before
    before = ours.atr(ours.true_ranges(high[:count], low[:count], close[:count]))
    assert ours.atr(ours.true_ranges(high, low, close))[: len(before)] == before
