"""Indicators at every candle of a long series at once: those of `indicators`, digit for digit, for backtests.

A service computes its indicators over the latest candles only. Over the candles of weeks that is the same work hundreds
of times; here one step of all windows is one operation on arrays. A step does what `indicators` does with one more
candle, in the same order, so the floats are the same.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trader.domain.market.indicators import (
    BAND_PERIOD,
    BOLLINGER_DEVIATIONS,
    KELTNER_ATRS,
    KIJUN_PERIOD,
    SLOW_EMA_PERIOD,
    WILDER_PERIOD,
    Indicators,
    SessionSums,
    SessionVwap,
    midnight_of,
)
from trader.domain.market.markets import Candle

Array = NDArray[np.float64]

AT_ONCE: Final = 2048
"""Windows that are stepped through together, which bounds the memory."""


def indicators_of_windows(candles: Sequence[Candle], first: Sequence[int]) -> list[Indicators]:
    """Return the indicators, without a VWAP, at each candle: those of the candles from `first` of it up to it."""
    found: list[Indicators] = []
    if not candles:
        return found
    highs, lows, closes = (np.array([one[column] for one in candles]) for column in (2, 3, 4))
    for begin in range(0, len(candles), AT_ONCE):
        stop = min(begin + AT_ONCE, len(candles))
        starts, ends = np.array(first[begin:stop]), np.arange(begin, stop)
        order = np.argsort(starts - ends, kind="stable")  # the longest first: those that go on are a slice
        columns = _Windows(highs, lows, closes, starts[order], ends[order]).columns()
        places = np.argsort(order, kind="stable")
        rows = {name: _values(values[places]) for name, values in columns.items()}
        found += [Indicators(**dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)]
    return found


def vwaps_of_windows(candles: Sequence[Candle], first: Sequence[int]) -> list[SessionVwap | None]:
    """Return the session's VWAP at each candle, of the candles from `first` of it up to it."""
    found: list[SessionVwap | None] = []
    midnight: datetime | None = None
    sums, begin = SessionSums(), 0
    for place, candle in enumerate(candles):
        if midnight is None or midnight_of(candle.open_time) != midnight:
            midnight, sums, begin = midnight_of(candle.open_time), SessionSums(), place
        sums.add(candle)
        reaches_back = candles[first[place]].open_time <= midnight and first[place] <= begin
        found.append(sums.vwap() if reaches_back else None)
    return found


def _values(column: NDArray[Any]) -> list[Any]:
    """Return a column as Python values. NaN and negative whole numbers are None, since no indicator is either."""
    if column.dtype == np.float64:
        return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - NaN
    if column.dtype == np.int8:
        return [None if value < 0 else bool(value) for value in column.tolist()]
    return [None if value < 0 else value for value in column.tolist()]


class _Windows:
    """Windows [starts, ends] of one series, the longest first, side by side: a row for each step from their starts.

    A window that has ended keeps its last value, so the last row of a result holds that of every window.
    """

    def __init__(self, highs: Array, lows: Array, closes: Array, starts: NDArray[Any], ends: NDArray[Any]) -> None:
        self._highs, self._lows, self._series = highs, lows, closes
        self._ends = ends
        self._lengths = ends - starts + 1
        self._steps = int(self._lengths[0])
        places = np.minimum(starts + np.arange(self._steps)[:, np.newaxis], ends)
        self._closes: Array = closes[places]
        before = self._closes[:-1]
        self._true_ranges: Array = np.maximum(highs[places[1:]], before) - np.minimum(lows[places[1:]], before)
        self._ups: Array = highs[places[1:]] - highs[places[:-1]]
        self._downs: Array = lows[places[:-1]] - lows[places[1:]]
        self._active = [int(np.count_nonzero(self._lengths > step)) for step in range(self._steps)]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the fields of `Indicators` by name, at the end of each window."""
        middle, spread = self._middle(), self._deviations()
        fast, slow = self._ema(BAND_PERIOD), self._ema(SLOW_EMA_PERIOD)[-1]
        width = self._atr()
        band, channel = spread[-1] * BOLLINGER_DEVIATIONS, width[-1] * KELTNER_ATRS
        on, candles, released = self._squeeze(spread, middle, fast, width)
        adx, plus_di, minus_di = self._directional()
        return {
            "close": self._closes[-1],
            "ema_20": fast[-1],
            "ema_50": slow,
            "bollinger_upper": middle[-1] + band,
            "bollinger_middle": middle[-1],
            "bollinger_lower": middle[-1] - band,
            "keltner_upper": fast[-1] + channel,
            "keltner_lower": fast[-1] - channel,
            "atr": width[-1],
            "rsi": self._rsi(),
            "adx": adx,
            "plus_di": plus_di,
            "minus_di": minus_di,
            "kijun_sen": np.where(
                self._lengths >= KIJUN_PERIOD, self._middle_of_range(self._ends, KIJUN_PERIOD), np.nan
            ),
            "squeeze_on": on,
            "squeeze_candles": candles,
            "squeeze_released": released,
            "momentum": self._momentum(middle),
        }

    def _scan(self, begin: int, seed: Array, following: Callable[[Array, int, int], Array]) -> Array:
        """Return a row for each step: the seed at step `begin`, then what `following` makes of the row before it.

        `following` takes that row of the windows that have this step, the step, and how many windows these are.
        """
        rows = np.full_like(self._closes, np.nan)
        if begin >= self._steps:
            return rows
        row = np.where(self._lengths > begin, seed, np.nan)
        rows[begin] = row
        for step in range(begin + 1, self._steps):
            count = self._active[step]
            rows[step] = row
            rows[step, :count] = following(row[:count], step, count)
            row = rows[step]
        return rows

    def _total(self, rows: Array, begin: int, stop: int) -> Array:
        """Return the sum over rows, added up from the first to the last."""
        total = np.zeros(rows.shape[1])
        for row in rows[begin:stop]:
            total = total + row
        return total

    def _middle(self) -> Array:
        closes, period = self._closes, BAND_PERIOD
        base = closes[0]
        totals = self._scan(
            period - 1,
            self._total(closes - base, 0, period),
            lambda row, step, count: row + (closes[step, :count] - closes[step - period, :count]),
        )
        middle: Array = base + totals / period
        return middle

    def _deviations(self) -> Array:
        period = BAND_PERIOD
        shifted = self._closes - self._closes[0]
        squared = shifted * shifted
        totals = self._scan(
            period - 1,
            self._total(shifted, 0, period),
            lambda row, step, count: row + (shifted[step, :count] - shifted[step - period, :count]),
        )
        squares = self._scan(
            period - 1,
            self._total(squared, 0, period),
            lambda row, step, count: row + (squared[step, :count] - squared[step - period, :count]),
        )
        mean = totals / period
        spread: Array = np.sqrt(np.maximum(0.0, squares / period - mean * mean))
        return spread

    def _ema(self, period: int) -> Array:
        closes, weight = self._closes, 2 / (period + 1)
        return self._scan(
            period - 1,
            self._total(closes, 0, period) / period,
            lambda row, step, count: row + weight * (closes[step, :count] - row),
        )

    def _atr(self) -> Array:
        ranges, period = self._true_ranges, WILDER_PERIOD
        return self._scan(
            period,
            self._total(ranges, 0, period) / period,
            lambda row, step, count: row + (ranges[step - 1, :count] - row) / period,
        )

    def _rsi(self) -> Array:
        period, rest = WILDER_PERIOD, WILDER_PERIOD - 1
        changes = self._closes[1:] - self._closes[:-1]
        rises, falls = np.where(changes > 0, changes, 0.0), np.where(changes > 0, 0.0, changes)
        gain = self._scan(
            period,
            self._total(rises, 0, period) / period,
            lambda row, step, count: (row * rest + rises[step - 1, :count]) / period,
        )[-1]
        loss = self._scan(
            period,
            -self._total(falls, 0, period) / period,
            lambda row, step, count: (row * rest - falls[step - 1, :count]) / period,
        )[-1]
        return _divided(100 * gain, gain + loss)

    def _directional(self) -> tuple[Array, Array, Array]:
        period, keep = WILDER_PERIOD, 1 - 1 / WILDER_PERIOD
        pluses = np.where((self._ups > self._downs) & (self._ups > 0), self._ups, 0.0)
        minuses = np.where((self._downs > self._ups) & (self._downs > 0), self._downs, 0.0)
        plus, minus, total, strength = np.zeros((4, self._closes.shape[1]))
        for index in range(self._steps - 1):
            count = self._active[index + 1]
            weight = 1.0 if index < period - 1 else keep
            plus[:count] = plus[:count] * weight + pluses[index, :count]
            minus[:count] = minus[:count] * weight + minuses[index, :count]
            total[:count] = total[:count] * weight + self._true_ranges[index, :count]
            if index < period - 1:
                continue
            known = strength[:count]
            moved = plus[:count] + minus[:count]
            one = _divided(100 * np.abs(plus[:count] - minus[:count]), moved)
            after = known + ((one - known) / period if index >= 2 * period - 1 else one / period)
            strength[:count] = np.where(moved > 0, after, known)
        has_lines, has_adx = self._lengths > period, self._lengths >= 2 * period
        return (
            np.where(has_adx & (total > 0), strength, np.nan),
            np.where(has_lines, _divided(100 * plus, total), np.nan),
            np.where(has_lines, _divided(100 * minus, total), np.nan),
        )

    def _squeeze(
        self, spread: Array, middle: Array, averages: Array, ranges: Array
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return whether each window's last candle is in a squeeze, the length of the last one, and its age."""
        room = KELTNER_ATRS * ranges - BOLLINGER_DEVIATIONS * spread
        inside = (middle - averages < room) & (averages - middle < room)
        length, since = np.zeros(room.shape[1], np.int64), np.full(room.shape[1], -1, np.int64)
        for step in range(BAND_PERIOD - 1, self._steps):
            count = self._active[step]
            now, before = inside[step, :count], since[:count]
            length[:count] = np.where(now, np.where(before == 0, length[:count] + 1, 1), length[:count])
            since[:count] = np.where(now, 0, np.where(before < 0, -1, before + 1))
        is_known = self._lengths >= BAND_PERIOD
        on = np.where(is_known, since == 0, -1).astype(np.int8)
        return on, np.where(since < 0, -1, length), np.where(since > 0, since - 1, -1)

    def _momentum(self, middle: Array) -> Array:
        period, lengths = BAND_PERIOD, self._lengths
        has_history = lengths >= 2 * period - 1
        windows = np.arange(len(lengths))
        total, slope = np.zeros((2, len(lengths)))
        mean_index = (period - 1) / 2
        for index in range(period):
            back = period - 1 - index
            ends, steps = self._ends - back, np.maximum(lengths - 1 - back, 0)
            centre = self._middle_of_range(ends, period)
            distance = self._series[np.maximum(ends, 0)] - (centre + middle[steps, windows]) / 2
            total = total + distance
            slope = slope + (index - mean_index) * distance
        momentum = total / period + slope * 12 / (period * (period * period - 1)) * mean_index
        return np.where(has_history, momentum, np.nan)

    def _middle_of_range(self, ends: NDArray[Any], period: int) -> Array:
        """Return (highest + lowest) / 2 of the `period` candles up to each place; anything where there are fewer."""
        if len(self._highs) < period:
            return np.full(len(ends), np.nan)
        places = np.maximum(ends - period + 1, 0)
        highest = np.lib.stride_tricks.sliding_window_view(self._highs, period)[places].max(axis=1)
        lowest = np.lib.stride_tricks.sliding_window_view(self._lows, period)[places].min(axis=1)
        middle: Array = (highest + lowest) / 2
        return middle


def _divided(dividend: Array, divisor: Array) -> Array:
    """Return the quotient, NaN where the divisor is not positive."""
    result = np.full_like(dividend, np.nan)
    np.divide(dividend, divisor, out=result, where=divisor > 0)
    return result
