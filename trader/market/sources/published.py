"""Candle files in Binance's published form, one per market and month, written from a market source."""

import gzip
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Final

from trader.core.clock import epoch_second
from trader.core.money import format_decimal, from_number
from trader.market.domain.markets import Candle
from trader.market.sources.synthetic import SyntheticSource

_HEADER: Final = (
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
)
_DAY: Final = timedelta(days=1)


def month_name(symbol: str, kind: str, month: str) -> str:
    """Return the published name of a market's month (`2025-01`), without its suffix; `kind` is 1m or fundingRate."""
    return f"{symbol}USDT-{kind}-{month}"


async def write_candles(folder: Path, source: SyntheticSource, start: datetime, days: int) -> AsyncIterator[int]:
    """Write the 1-minute candles of every market of a source for whole UTC days, starting at `start`.

    Yield the number of days written so far after each day of each market. The same source gives the same bytes.

    :raises OSError: a file cannot be written
    """
    written = 0
    every_day = [start + number * _DAY for number in range(days)]
    for symbol in source.markets:
        for month, days_of_month in groupby(every_day, "{:%Y-%m}".format):
            path = folder / f"{month_name(symbol, '1m', month)}.csv.gz"
            with path.open("xb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                packed.write(f"{_HEADER}\n".encode())
                for day in days_of_month:
                    candles = await source.candles(symbol, "1m", day, day + _DAY)
                    packed.write(_lines(candles).encode())
                    written += 1
                    yield written


def _lines(candles: Iterable[Candle]) -> str:
    """Return candles as rows. The synthetic market has no single trades, so the columns that count trades are 0."""
    lines = []
    for candle in candles:
        open_ms = epoch_second(candle.open_time) * 1000
        figures = [format_decimal(from_number(figure)) for figure in candle[1:]]
        quote_volume = candle.volume * (candle.open + candle.high + candle.low + candle.close) / 4
        lines.append(f"{open_ms},{','.join(figures)},{open_ms + 59_999},{quote_volume:.3f},0,0,0,0\n")
    return "".join(lines)
