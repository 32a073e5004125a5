"""Technical indicators of closed candles, in plain Python on floats.

An indicator with too little history, or without a value, is None, never 0. The smoothed ones are Wilder's
(New Concepts in Technical Trading Systems, 1978), seeded as TA-Lib seeds them, which is the oracle of the tests.
Every series function gives the values from the first candle that has one on, ascending, so the last is the newest;
an empty list is too little history.

Every sum adds up from left to right and every square is a product, so that the same candles give the same digits on
every machine: `sum` and `pow` differ between versions of Python and of its platform.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import reduce
from itertools import pairwise
from math import sqrt
from operator import add, attrgetter

import msgspec

from trader.domain.market.markets import Candle

BAND_PERIOD = 20
"""Candles of the Bollinger bands, the Keltner channel and the squeeze's momentum."""
BOLLINGER_DEVIATIONS = 2.0
KELTNER_ATRS = 1.5
VWAP_DEVIATIONS = 2.0
SESSION_CANDLES_MIN = 30
"""Candles that must have closed in a session before it has a VWAP: the deviation of fewer measures next to nothing."""
WILDER_PERIOD = 14
"""Candles of ATR, RSI and ADX."""
KIJUN_PERIOD = 26
SLOW_EMA_PERIOD = 50

Floats = Sequence[float]


class Indicators(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """The indicators of one market at one interval, at its last closed candle. None: absent.

    Prices are in quote currency. The middle of the Bollinger bands is the SMA(20), that of the Keltner channel the
    EMA(20), and the channel reaches 1.5 ATR(14) to each side. `rsi`, `adx`, `plus_di` and `minus_di` run from 0 to
    100. `vwap` is that of the UTC day of the last closed candle (of the session's: until the first one of a day has
    closed it is still that of the day before, then it is absent until 30 have closed), `vwap_deviation` the
    volume-weighted standard deviation around it, and the VWAP bands lie 2 deviations away. `squeeze_on` says that the
    Bollinger bands lie inside the Keltner channel, `squeeze_candles` how long the present squeeze, or the last one,
    lasted, and `squeeze_released` how many candles ago it ended (0: with this candle; None while it lasts, or when
    there was none). `momentum` is how far the close stands from the middle of its range and mean, smoothed by a
    regression line; positive is upward.
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


class Directional(msgspec.Struct, frozen=True, gc=False):
    """Wilder's directional movement at the last candle. `adx` needs twice the history of the two lines."""

    adx: float | None = None
    plus_di: float | None = None
    minus_di: float | None = None


class Squeeze(msgspec.Struct, frozen=True, gc=False):
    """The state of the squeeze at the last candle; see `Indicators`."""

    on: bool | None = None
    candles: int | None = None
    released: int | None = None


class SessionVwap(msgspec.Struct, frozen=True, gc=False):
    """Volume-weighted mean of the typical price since 00:00 UTC, and the deviation around it."""

    vwap: float
    deviation: float


def total_of(values: Iterable[float]) -> float:
    """Return the sum, added up from left to right."""
    return reduce(add, values, 0.0)


def sma(values: Floats, period: int) -> list[float]:
    """Simple moving average, from index period − 1 on."""
    if len(values) < period:
        return []
    base = values[0]  # sums of differences stay small, so that a long series loses no digits
    total = total_of(value - base for value in values[:period])
    averages = [base + total / period]
    for left, entered in zip(values, values[period:], strict=False):
        total += entered - left
        averages.append(base + total / period)
    return averages


def ema(values: Floats, period: int) -> list[float]:
    """Exponential moving average with weight 2 / (period + 1), seeded with the SMA; from index period − 1 on."""
    if len(values) < period:
        return []
    weight = 2 / (period + 1)
    average = total_of(values[:period]) / period
    averages = [average]
    for value in values[period:]:
        average += weight * (value - average)
        averages.append(average)
    return averages


def deviations(values: Floats, period: int) -> list[float]:
    """Rolling population standard deviation, from index period − 1 on."""
    if len(values) < period:
        return []
    base = values[0]
    shifted = [value - base for value in values]
    total = total_of(shifted[:period])
    squares = total_of(value * value for value in shifted[:period])
    mean = total / period
    spread = [sqrt(max(0.0, squares / period - mean * mean))]
    for left, entered in zip(shifted, shifted[period:], strict=False):
        total += entered - left
        squares += entered * entered - left * left
        mean = total / period
        spread.append(sqrt(max(0.0, squares / period - mean * mean)))
    return spread


def true_ranges(highs: Floats, lows: Floats, closes: Floats) -> list[float]:
    """Wilder's true range, from index 1 on."""
    return [
        (high if high > before else before) - (low if low < before else before)  # noqa: FURB136 - half the time
        for high, low, before in zip(highs[1:], lows[1:], closes, strict=False)
    ]


def atr(highs: Floats, lows: Floats, closes: Floats, period: int = WILDER_PERIOD) -> list[float]:
    """Average true range, Wilder-smoothed, from index `period` on."""
    ranges = true_ranges(highs, lows, closes)
    if len(ranges) < period:
        return []
    average = total_of(ranges[:period]) / period
    averages = [average]
    for true_range in ranges[period:]:
        average += (true_range - average) / period
        averages.append(average)
    return averages


def rsi(closes: Floats, period: int = WILDER_PERIOD) -> float | None:
    """Wilder's relative strength index of the last close. None also when the price never moved."""
    if len(closes) <= period:
        return None
    changes = [close - before for before, close in pairwise(closes)]
    gain = total_of(change for change in changes[:period] if change > 0) / period
    loss = -total_of(change for change in changes[:period] if change < 0) / period
    rest = period - 1
    for change in changes[period:]:
        if change > 0:
            gain = (gain * rest + change) / period
            loss = loss * rest / period
        else:
            gain = gain * rest / period
            loss = (loss * rest - change) / period
    moved = gain + loss
    return 100 * gain / moved if moved > 0 else None


def directional(highs: Floats, lows: Floats, closes: Floats, period: int = WILDER_PERIOD) -> Directional:
    """ADX, +DI and −DI at the last candle, with the first sums over period − 1 candles, as TA-Lib has them."""
    ranges = true_ranges(highs, lows, closes)
    if len(ranges) < period:
        return Directional()
    plus = minus = total = strength = 0.0
    keep = 1 - 1 / period
    for index, true_range in enumerate(ranges):
        up = highs[index + 1] - highs[index]
        down = lows[index] - lows[index + 1]
        weight = 1.0 if index < period - 1 else keep
        plus = plus * weight + (up if up > down and up > 0 else 0.0)
        minus = minus * weight + (down if down > up and down > 0 else 0.0)
        total = total * weight + true_range
        moved = plus + minus
        if index >= 2 * period - 1 and moved > 0:
            strength += (100 * abs(plus - minus) / moved - strength) / period
        elif index >= period - 1 and moved > 0:
            strength += 100 * abs(plus - minus) / moved / period
    if total <= 0:
        return Directional()
    return Directional(strength if len(ranges) >= 2 * period - 1 else None, 100 * plus / total, 100 * minus / total)


def kijun_sen(highs: Floats, lows: Floats, period: int = KIJUN_PERIOD) -> float | None:
    """The base line of Ichimoku: the middle of the range of the last `period` candles."""
    if len(highs) < period:
        return None
    return (max(highs[-period:]) + min(lows[-period:])) / 2


def session_vwap(candles: Sequence[Candle]) -> SessionVwap | None:
    """VWAP of the UTC day in which the last candle opened.

    None when the candles do not reach back to that day's 00:00, fewer than 30 have closed since, or nothing was traded.
    """
    if not candles:
        return None
    midnight = midnight_of(candles[-1].open_time)
    first = bisect_left(candles, midnight, key=attrgetter("open_time"))
    if candles[0].open_time > midnight:
        return None
    session = SessionSums()
    for candle in candles[first:]:
        session.add(candle)
    return session.vwap()


class SessionSums:
    """The sums of a session's candles, from which its VWAP follows. Prices count as differences to its first one."""

    def __init__(self) -> None:
        self._base = 0.0
        self._count = 0
        self._volume = self._traded = self._squares = 0.0

    def add(self, candle: Candle) -> None:
        """Add the next candle."""
        price = (candle.high + candle.low + candle.close) / 3
        if not self._count:
            self._base = price
        above = price - self._base
        self._count += 1
        self._volume += candle.volume
        self._traded += above * candle.volume
        self._squares += above * above * candle.volume

    def vwap(self) -> SessionVwap | None:
        """Return the VWAP; None when fewer than 30 candles have closed, or nothing was traded."""
        if self._count < SESSION_CANDLES_MIN or self._volume <= 0:
            return None
        mean = self._traded / self._volume
        return SessionVwap(self._base + mean, sqrt(max(0.0, self._squares / self._volume - mean * mean)))


def midnight_of(moment: datetime) -> datetime:
    """Return the beginning of the UTC day."""
    return moment - timedelta(
        hours=moment.hour, minutes=moment.minute, seconds=moment.second, microseconds=moment.microsecond
    )


def squeeze(deviation: Floats, middle: Floats, averages: Floats, ranges: Floats) -> Squeeze:
    """The squeeze from series that end together: Bollinger deviation and middle (SMA), EMA and ATR."""
    newest: int | None = None
    age = -1
    for spread, mean, centre, width in zip(
        reversed(deviation), reversed(middle), reversed(averages), reversed(ranges), strict=False
    ):
        age += 1
        room = KELTNER_ATRS * width - BOLLINGER_DEVIATIONS * spread
        if mean - centre < room and centre - mean < room:
            newest = age if newest is None else newest
        elif newest is not None:
            return Squeeze(newest == 0, age - newest, newest - 1 if newest else None)
    if newest is None:
        return Squeeze(on=False) if age >= 0 else Squeeze()
    return Squeeze(newest == 0, age + 1 - newest, newest - 1 if newest else None)


def momentum(highs: Floats, lows: Floats, closes: Floats, middle: Floats, period: int = BAND_PERIOD) -> float | None:
    """The squeeze's momentum at the last candle.

    The close's distance from the mean of its SMA (`middle`, ending together with the candles) and the middle of the
    range, over `period` candles each; the last value of the least-squares line through the last `period` distances.
    """
    count = len(closes)
    if count < 2 * period - 1:
        return None
    distances = []
    for back in range(period - 1, -1, -1):
        end = count - back
        centre = (max(highs[end - period : end]) + min(lows[end - period : end])) / 2
        distances.append(closes[end - 1] - (centre + middle[len(middle) - 1 - back]) / 2)
    mean_index = (period - 1) / 2
    mean = total_of(distances) / period
    slope = total_of((index - mean_index) * distance for index, distance in enumerate(distances)) * 12
    return mean + slope / (period * (period * period - 1)) * mean_index


def vwap_fields(day: SessionVwap) -> dict[str, float]:
    """Return the fields of `Indicators` that follow from a session's VWAP."""
    return {
        "vwap": day.vwap,
        "vwap_deviation": day.deviation,
        "vwap_upper": day.vwap + VWAP_DEVIATIONS * day.deviation,
        "vwap_lower": day.vwap - VWAP_DEVIATIONS * day.deviation,
    }


def indicators(candles: Sequence[Candle], session: Sequence[Candle] | None = None) -> Indicators:
    """All indicators at the last of the closed `candles` (ascending, one interval).

    The session's VWAP is taken from the `session` candles when they are given: those of a finer interval that reach
    back to 00:00 UTC, where `candles` do not, or are too coarse.
    """
    if not candles:
        return Indicators()
    _, _, highs, lows, closes, _ = zip(*candles, strict=True)
    middle = sma(closes, BAND_PERIOD)
    spread = deviations(closes, BAND_PERIOD)
    averages = ema(closes, BAND_PERIOD)
    ranges = atr(highs, lows, closes)
    slow = ema(closes, SLOW_EMA_PERIOD)
    movement = directional(highs, lows, closes)
    state = squeeze(spread, middle, averages, ranges)
    day = session_vwap(candles if session is None else session)
    vwap = {} if day is None else vwap_fields(day)
    band = spread[-1] * BOLLINGER_DEVIATIONS if spread else 0.0
    channel = ranges[-1] * KELTNER_ATRS if ranges and averages else None
    return Indicators(
        close=closes[-1],
        ema_20=averages[-1] if averages else None,
        ema_50=slow[-1] if slow else None,
        bollinger_upper=middle[-1] + band if middle else None,
        bollinger_middle=middle[-1] if middle else None,
        bollinger_lower=middle[-1] - band if middle else None,
        keltner_upper=averages[-1] + channel if channel is not None else None,
        keltner_lower=averages[-1] - channel if channel is not None else None,
        atr=ranges[-1] if ranges else None,
        rsi=rsi(closes),
        adx=movement.adx,
        plus_di=movement.plus_di,
        minus_di=movement.minus_di,
        kijun_sen=kijun_sen(highs, lows),
        squeeze_on=state.on,
        squeeze_candles=state.candles,
        squeeze_released=state.released,
        momentum=momentum(highs, lows, closes, middle) if middle else None,
        **vwap,
    )
