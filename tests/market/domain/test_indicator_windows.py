"""Indicators and VWAPs of many windows at once: equal to those of each window alone, digit for digit."""

from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trader.market.domain.indicators import Indicators, indicators, indicators_of_windows
from trader.market.domain.markets import Candle
from trader.market.domain.session_vwap import session_vwap, vwaps_of_windows

START = datetime(2025, 1, 1, 20, tzinfo=UTC)
SPAN = timedelta(minutes=15)


def walk(seed: int, count: int, *, step: float, gaps: bool) -> list[Candle]:
    """Candles of a random walk; some moves are zero, and gaps leave some candles out."""
    rng = Random(seed)
    candles, price = [], 100.0
    for number in range(count):
        opened = price
        price = max(1.0, price + rng.choice((0.0, rng.gauss(0, step), rng.gauss(0, step))))
        high = max(opened, price) + rng.choice((0.0, abs(rng.gauss(0, step))))
        low = min(opened, price) - rng.choice((0.0, min(0.5, abs(rng.gauss(0, step)))))
        if not gaps or rng.random() > 0.1:
            volume = rng.choice((0.0, rng.expovariate(1)))
            candles.append(Candle(START + number * SPAN, opened, high, low, price, volume))
    return candles


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 150),
    length=st.sampled_from([1, 14, 15, 19, 20, 27, 28, 38, 39, 60, 97]),
    step=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_every_window_has_the_indicators_of_its_candles(seed: int, count: int, length: int, step: float) -> None:
    candles = walk(seed, count, step=step, gaps=False)
    computed = indicators_of_windows(candles, length)
    assert len(computed) == max(0, count - length + 1)
    for begin, of_window in enumerate(computed):
        assert of_window == indicators(candles[begin : begin + length], []), begin


def test_more_windows_than_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.market.domain.indicators.WINDOWS_AT_ONCE", 16)
    candles = walk(7, 90, step=1.0, gaps=True)
    expected = [indicators(candles[begin : begin + 45], []) for begin in range(len(candles) - 44)]
    assert indicators_of_windows(candles, 45) == expected
    assert expected[-1] != Indicators()
    assert indicators_of_windows([], 45) == []


def starts(candles: list[Candle], kept: timedelta) -> list[int]:
    """The first candle of each window: the first that opened within `kept` before the window's end."""
    return [
        next(n for n, first in enumerate(candles) if first.open_time > candle.open_time - kept) for candle in candles
    ]


@pytest.mark.parametrize("gaps", [False, True])
def test_every_window_has_the_vwap_of_its_session(gaps: bool) -> None:
    candles = walk(3, 400, step=1.0, gaps=gaps)
    for kept in (20, 60, 97):
        first = starts(candles, kept * SPAN)
        expected = [session_vwap(candles[begin : place + 1]) for place, begin in enumerate(first)]
        assert vwaps_of_windows(candles, first) == expected
        assert any(expected) == (kept > 30)
