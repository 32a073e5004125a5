"""Technical indicators of closed candles, in plain Python on floats.

An indicator with too little history, or without a value, is None, never 0. The smoothed ones are Wilder's
(New Concepts in Technical Trading Systems, 1978), seeded as TA-Lib seeds them, which is the oracle of the tests.
"""

import msgspec


class Indicators(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """The indicators of one market at one interval, at its last closed candle. None: absent.

    Prices are in quote currency; `rsi`, `adx`, `plus_di` and `minus_di` run from 0 to 100. `vwap` is that of the
    present UTC day, `vwap_deviation` the volume-weighted standard deviation around it, and the VWAP bands lie 2
    deviations away. `squeeze_on` says that the Bollinger bands lie inside the Keltner channel, `squeeze_candles` how
    long the present squeeze, or the last one, lasted, and `squeeze_released` how many candles ago it ended (0: with
    this candle; None while it lasts, or when there was none). `momentum` is how far the close stands from the middle
    of its range and mean, smoothed by a regression line; positive is upward.
    """

    close: float | None = None
    ema_20: float | None = None
    ema_50: float | None = None
    sma_20: float | None = None
    bollinger_upper: float | None = None
    bollinger_middle: float | None = None
    bollinger_lower: float | None = None
    keltner_upper: float | None = None
    keltner_middle: float | None = None
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
