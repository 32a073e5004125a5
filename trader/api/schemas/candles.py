"""Candles on the wire: a range of them in columns, and the running ones."""

from typing import Annotated

import msgspec
from msgspec import Meta

from trader.api.schemas.common import UNSET, Input, Timestamp, UnsetType, Wire, iso
from trader.api.schemas.paging import IsoTime
from trader.domain.market.markets import Candle
from trader.domain.portfolio.histories import Resolution


class GetCandlesInput(Input, kw_only=True):
    """The candles that open at `from` or later, and before `to` and `before`; a time without a zone is UTC.

    `symbol` takes any spelling of a market.
    """

    symbol: Annotated[str, Meta(max_length=32)]
    interval: Resolution
    start: IsoTime | UnsetType = msgspec.field(default=UNSET, name="from")
    to: IsoTime | UnsetType = UNSET
    before: IsoTime | UnsetType = UNSET


class GetCandlesOutput(Wire, kw_only=True):
    """Candles in columns, ascending; `times` are when they open, the last may still be running.

    `volume` is in base units, null where the source has none. An answer has the latest 1,000 of its range, and
    `nextBefore` when there are earlier ones. Candles under an hour are kept for CANDLE_RETENTION_DAYS, others for good.
    """

    symbol: str
    interval: Resolution
    times: list[Timestamp]
    open: list[float]
    high: list[float]
    low: list[float]
    close: list[float]
    volume: list[float | None]
    next_before: Timestamp | UnsetType = UNSET


class RunningCandle(Wire, kw_only=True):
    """The candle of the running minute of a market. `time` is when it opened."""

    symbol: str
    time: Timestamp
    open: float
    high: float
    low: float
    close: float

    @classmethod
    def of(cls, symbol: str, candle: Candle) -> "RunningCandle":
        return cls.from_attributes(candle, symbol=symbol, time=iso(candle.open_time))
