"""Candles made of smaller ones, on the UTC grid of their interval."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from trader.domain.market.markets import INTERVALS, Candle, Interval

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def epoch_second(moment: datetime) -> int:
    """Whole seconds since 1970, rounded down."""
    return (moment - EPOCH) // _SECOND


def moment_of(second: int) -> datetime:
    """The moment that is `second` seconds after 1970."""
    return datetime.fromtimestamp(second, UTC)


def floor_time(moment: datetime, span: timedelta) -> datetime:
    """The latest multiple of `span` since 1970 that is not after `moment`."""
    return EPOCH + (moment - EPOCH) // span * span


def ceil_time(moment: datetime, span: timedelta) -> datetime:
    """The earliest multiple of `span` since 1970 that is not before `moment`."""
    return EPOCH - (EPOCH - moment) // span * span


def aggregate(candles: Iterable[Candle], interval: Interval) -> list[Candle]:
    """Ascending candles joined into those of `interval`, which is not shorter than theirs."""
    span = INTERVALS[interval]
    joined: list[Candle] = []
    for candle in candles:
        open_time = floor_time(candle.open_time, span)
        if joined and joined[-1].open_time == open_time:
            last = joined[-1]
            joined[-1] = Candle(
                open_time,
                last.open,
                max(last.high, candle.high),
                min(last.low, candle.low),
                candle.close,
                last.volume + candle.volume,
            )
        else:
            joined.append(candle._replace(open_time=open_time))
    return joined
