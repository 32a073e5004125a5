"""Technical indicators of closed candles, for one window of candles or for many in parallel.
An indicator without a value or with too little history is None, never 0. The smoothed ones follow Wilder (New Concepts
in Technical Trading Systems, 1978), seeded as in TA-Lib, the oracle of the tests. Every series function returns
ascending values starting at the first candle that has one, so the last value is the newest; an empty list means too
little history.

Each element of a series is a float, or an array with one float per window: the arithmetic is written once, and one
array operation is a step of all windows. A service needs the indicators of its latest candles only, and plain floats
compute those fastest; a backtest needs them at every candle, hundreds of times the work.

Every sum adds from left to right and every square is a product, so that the same candles give the same digits in both
forms and on every machine: `sum` and `pow` differ between Python versions and platforms.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise
from math import nan, sqrt
from operator import add
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trader.market.domain.markets import Candle
from trader.market.domain.session_vwap import session_vwap, vwap_fields

BAND_PERIOD = 20
"""Candles of the Bollinger bands, the Keltner channel and the squeeze's momentum."""
BOLLINGER_DEVIATIONS = 2.0
KELTNER_ATRS = 1.5
WILDER_PERIOD = 14
"""Candles of ATR, RSI and ADX."""
KIJUN_PERIOD = 26
SLOW_EMA_PERIOD = 50

WINDOWS_AT_ONCE: Final = 2048
"""How many windows are computed in parallel, which bounds memory."""

Series = Sequence[Any]
"""A float per candle, or an array of floats with one per window."""


class Indicators(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """The indicators of one market at one interval, at its last closed candle. None means absent.

    Prices are in quote currency. The middle of the Bollinger bands is the SMA(20), the middle of the Keltner channel is
    the EMA(20), and the channel extends 1.5 ATR(14) to each side. `rsi`, `adx`, `plus_di` and `minus_di` run from 0 to
    100. `vwap` covers the UTC day of the last closed candle (computed from session candles, it still covers the
    previous day until the first candle of a new day closes, and is then absent until 30 have closed); `vwap_deviation`
    is the volume-weighted standard deviation around it, and the VWAP bands lie 2 deviations away. `squeeze_on` says
    that the Bollinger bands lie inside the Keltner channel, `squeeze_candles` how long the current or last squeeze
    lasted, and `squeeze_released` how many candles ago it ended (0: with this candle; None while it lasts, or if there
    was none). `momentum` is the distance of the close from the middle of its range and mean, smoothed by a regression
    line; positive is upward.
    """

    close: float | None = None
    ema_20: float | None = None
    ema_50: float | None = None
    bollinger_upper: float | None = None
    bollinger_middle: float | None = None
    bollinger_lower: float | None = None
    keltner_upper: float | None = None
    keltner_lower: float | None = None
    atr: float | None = None
    rsi: float | None = None
    adx: float | None = None
    plus_di: float | None = None
    minus_di: float | None = None
    kijun_sen: float | None = None
    vwap: float | None = None
    vwap_deviation: float | None = None
    vwap_upper: float | None = None
    vwap_lower: float | None = None
    squeeze_on: bool | None = None
    squeeze_candles: int | None = None
    squeeze_released: int | None = None
    momentum: float | None = None


class Arithmetic(NamedTuple):
    """The operations that differ between floats and arrays. `quotient` is NaN where the divisor is not positive."""

    where: Callable[[Any, Any, Any], Any]
    larger: Callable[[Any, Any], Any]
    smaller: Callable[[Any, Any], Any]
    root: Callable[[Any], Any]
    quotient: Callable[[Any, Any], Any]


def _quotients(dividends: NDArray[np.float64], divisors: NDArray[np.float64]) -> NDArray[np.float64]:
    quotients = np.full_like(dividends, nan)
    np.divide(dividends, divisors, out=quotients, where=divisors > 0)
    return quotients


FLOATS: Final = Arithmetic(
    where=lambda condition, value, otherwise: value if condition else otherwise,
    larger=max,
    smaller=min,
    root=sqrt,
    quotient=lambda dividend, divisor: dividend / divisor if divisor > 0 else nan,
)
ARRAYS: Final = Arithmetic(np.where, np.maximum, np.minimum, np.sqrt, _quotients)


def total_of(values: Iterable[Any]) -> Any:
    """Return the sum, added from left to right."""
    return reduce(add, values, 0.0)


def sma(values: Series, period: int) -> list[Any]:
    """Simple moving average, starting at index period − 1."""
    if len(values) < period:
        return []
    base = values[0]  # sums of differences stay small, so a long series loses no digits
    total = total_of(value - base for value in values[:period])
    averages = [base + total / period]
    for left, entered in zip(values, values[period:], strict=False):
        total = total + (entered - left)
        averages.append(base + total / period)
    return averages


def ema(values: Series, period: int) -> list[Any]:
    """Exponential moving average with weight 2 / (period + 1), seeded with the SMA; starting at index period − 1."""
    if len(values) < period:
        return []
    weight = 2 / (period + 1)
    average = total_of(values[:period]) / period
    averages = [average]
    for value in values[period:]:
        average = average + weight * (value - average)
        averages.append(average)
    return averages


def deviations(values: Series, period: int, arithmetic: Arithmetic = FLOATS) -> list[Any]:
    """Rolling population standard deviation, starting at index period − 1."""
    if len(values) < period:
        return []
    shifted = [value - values[0] for value in values]
    squared = [value * value for value in shifted]
    total, squares = total_of(shifted[:period]), total_of(squared[:period])
    spread = []
    for index in range(period - 1, len(values)):
        if index >= period:
            total = total + (shifted[index] - shifted[index - period])
            squares = squares + (squared[index] - squared[index - period])
        mean = total / period
        spread.append(arithmetic.root(arithmetic.larger(0.0, squares / period - mean * mean)))
    return spread


def true_ranges(highs: Series, lows: Series, closes: Series, arithmetic: Arithmetic = FLOATS) -> list[Any]:
    """Wilder's true range, starting at index 1."""
    return [
        arithmetic.larger(high, before) - arithmetic.smaller(low, before)
        for high, low, before in zip(highs[1:], lows[1:], closes, strict=False)
    ]


def atr(ranges: Series, period: int = WILDER_PERIOD) -> list[Any]:
    """Average true range, Wilder-smoothed, starting with the range at index period − 1."""
    if len(ranges) < period:
        return []
    average = total_of(ranges[:period]) / period
    averages = [average]
    for true_range in ranges[period:]:
        average = average + (true_range - average) / period
        averages.append(average)
    return averages


def rsi(closes: Series, arithmetic: Arithmetic, period: int = WILDER_PERIOD) -> dict[str, Any]:
    """Wilder's relative strength index at the last close; NaN if the price never moved."""
    if len(closes) <= period:
        return {}
    changes = [close - before for before, close in pairwise(closes)]
    gains = [arithmetic.larger(change, 0.0) for change in changes]
    losses = [arithmetic.larger(-change, 0.0) for change in changes]
    gain, loss = total_of(gains[:period]) / period, total_of(losses[:period]) / period
    for up, down in zip(gains[period:], losses[period:], strict=True):
        gain = (gain * (period - 1) + up) / period
        loss = (loss * (period - 1) + down) / period
    return {"rsi": arithmetic.quotient(100 * gain, gain + loss)}


def directional(
    highs: Series, lows: Series, ranges: Series, arithmetic: Arithmetic, period: int = WILDER_PERIOD
) -> dict[str, Any]:
    """ADX, +DI and −DI at the last candle; like TA-Lib, the first sums cover period − 1 candles.

    NaN if the price never moved. ADX needs twice the history of the two lines.
    """
    if len(ranges) < period:
        return {}
    where, plus, minus, total, strength = arithmetic.where, 0.0, 0.0, 0.0, 0.0
    for index, true_range in enumerate(ranges):
        up = highs[index + 1] - highs[index]
        down = lows[index] - lows[index + 1]
        weight = 1.0 if index < period - 1 else 1 - 1 / period
        plus = plus * weight + where((up > down) & (up > 0), up, 0.0)
        minus = minus * weight + where((down > up) & (down > 0), down, 0.0)
        total = total * weight + true_range
        if index < period - 1:
            continue
        moved = plus + minus
        index_now = arithmetic.quotient(100 * abs(plus - minus), moved)
        change = (index_now - strength) / period if index >= 2 * period - 1 else index_now / period
        strength = where(moved > 0, strength + change, strength)
    lines = {"plus_di": arithmetic.quotient(100 * plus, total), "minus_di": arithmetic.quotient(100 * minus, total)}
    return {**lines, "adx": where(total > 0, strength, nan)} if len(ranges) >= 2 * period - 1 else lines


def kijun_sen(highs: Series, lows: Series, arithmetic: Arithmetic) -> dict[str, Any]:
    """The Ichimoku base line: the middle of the range of the last 26 candles."""
    if len(highs) < KIJUN_PERIOD:
        return {}
    return {"kijun_sen": _middle_of_range(highs[-KIJUN_PERIOD:], lows[-KIJUN_PERIOD:], arithmetic)}


def _middle_of_range(highs: Series, lows: Series, arithmetic: Arithmetic) -> Any:
    return (reduce(arithmetic.larger, highs) + reduce(arithmetic.smaller, lows)) / 2


def squeeze(
    deviation: Series, middle: Series, averages: Series, ranges: Series, arithmetic: Arithmetic
) -> dict[str, Any]:
    """The squeeze, from series that end together: Bollinger deviation and middle (SMA), EMA and ATR. -1 means none."""
    where, length, since = arithmetic.where, 0, -1
    for spread, mean, centre, width in zip(deviation, middle, averages, ranges[-len(middle) :], strict=True):
        room = KELTNER_ATRS * width - BOLLINGER_DEVIATIONS * spread
        is_inside = (mean - centre < room) & (centre - mean < room)
        length = where(is_inside, where(since == 0, length + 1, 1), length)
        since = where(is_inside, 0, where(since < 0, -1, since + 1))
    return {
        "squeeze_on": since == 0,
        "squeeze_candles": where(since < 0, -1, length),
        "squeeze_released": where(since > 0, since - 1, -1),
    }


def momentum(highs: Series, lows: Series, closes: Series, middle: Series, arithmetic: Arithmetic) -> dict[str, Any]:
    """The squeeze's momentum at the last candle.

    The distance of the close from the mean of its SMA (`middle`, which ends together with the candles) and the middle
    of the range, each over 20 candles; the value is the last point of the least-squares line through the last 20
    distances.
    """
    count, period = len(closes), BAND_PERIOD
    if count < 2 * period - 1:
        return {}
    distances = []
    for end in range(count - period + 1, count + 1):
        centre = _middle_of_range(highs[end - period : end], lows[end - period : end], arithmetic)
        distances.append(closes[end - 1] - (centre + middle[end - period]) / 2)
    mean_index = (period - 1) / 2
    mean = total_of(distances) / period
    slope = total_of((index - mean_index) * distance for index, distance in enumerate(distances)) * 12
    return {"momentum": mean + slope / (period * (period * period - 1)) * mean_index}


def _fields(highs: Series, lows: Series, closes: Series, arithmetic: Arithmetic) -> dict[str, Any]:
    """Return the fields of `Indicators`, except the VWAP, that have enough history at the last candle."""
    middle = sma(closes, BAND_PERIOD)
    spread = deviations(closes, BAND_PERIOD, arithmetic)
    averages, slow = ema(closes, BAND_PERIOD), ema(closes, SLOW_EMA_PERIOD)
    true = true_ranges(highs, lows, closes, arithmetic)
    ranges = atr(true)
    fields = {
        "close": closes[-1],
        **rsi(closes, arithmetic),
        **directional(highs, lows, true, arithmetic),
        **kijun_sen(highs, lows, arithmetic),
    }
    if ranges:
        fields["atr"] = ranges[-1]
    if middle:
        band, channel = spread[-1] * BOLLINGER_DEVIATIONS, ranges[-1] * KELTNER_ATRS
        fields |= {
            "ema_20": averages[-1],
            "bollinger_upper": middle[-1] + band,
            "bollinger_middle": middle[-1],
            "bollinger_lower": middle[-1] - band,
            "keltner_upper": averages[-1] + channel,
            "keltner_lower": averages[-1] - channel,
            **squeeze(spread, middle, averages, ranges, arithmetic),
            **momentum(highs, lows, closes, middle, arithmetic),
        }
    if slow:
        fields["ema_50"] = slow[-1]
    return fields


def _known(value: Any) -> Any:
    """Return None for NaN and for negative whole numbers, which no indicator can be."""
    is_absent = value != value or (type(value) is int and value < 0)  # noqa: PLR0124 - NaN
    return None if is_absent else value


def indicators(candles: Sequence[Candle], session: Sequence[Candle] | None = None) -> Indicators:
    """Return all indicators at the last of the closed `candles` (ascending, one interval).

    If `session` is given, the session's VWAP comes from it: candles of a finer interval that reach back to 00:00 UTC,
    when `candles` do not or are too coarse.
    """
    if not candles:
        return Indicators()
    _, _, highs, lows, closes, _ = zip(*candles, strict=True)
    day = vwap_fields(session_vwap(candles if session is None else session))
    fields = {**_fields(highs, lows, closes, FLOATS), **day}
    return Indicators(**{name: _known(value) for name, value in fields.items()})


def indicators_of_windows(candles: Sequence[Candle], length: int) -> list[Indicators]:
    """Return the indicators, without a VWAP, of every run of `length` successive candles, earliest first."""
    prices = np.array([candle[2:5] for candle in candles]).reshape(-1, 3).T
    results = []
    for begin in range(0, len(candles) - length + 1, WINDOWS_AT_ONCE):
        count = min(WINDOWS_AT_ONCE, len(candles) - length + 1 - begin)
        highs, lows, closes = ([column[begin + step :][:count] for step in range(length)] for column in prices)
        columns = _fields(highs, lows, closes, ARRAYS)
        fields = {name: map(_known, values.tolist()) for name, values in columns.items()}
        results += [Indicators(**dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]
    return results
