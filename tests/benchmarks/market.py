"""Cost of market data: ticks, books and candles, and how long they block the event loop.

scripts/benchmark market [folder of kline files]
"""

import asyncio
import sys
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter

from benchmarks.figures import Figures
from support.loop_lag import LoopLag

from trader.market.sources.replay import ReplaySource
from trader.market.sources.source import MarketSource
from trader.market.sources.synthetic import SyntheticSource

SYMBOLS = ("BTC", "ETH", "SOL")
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)

TICK_US_MAX = 60.0
CANDLES_MS_MAX = 1_500.0
HOLD_MS_MAX = 50.0


async def measure(figures: Figures, what: str, work: Awaitable[object], at_most_ms: float | None = None) -> None:
    """Show how long `work` takes, and the longest time for which it blocks the event loop."""
    async with LoopLag() as lag:
        began_s = perf_counter()
        await work
        took_ms = (perf_counter() - began_s) * 1000
    figures.show(what, took_ms, "ms", at_most=at_most_ms)
    figures.show("  longest hold of the event loop", max(lag.cpu_ms), "ms", at_most=HOLD_MS_MAX)


async def measure_ticks(figures: Figures, name: str, source: MarketSource, after: datetime) -> None:
    kept = [tick async for tick in source.history(after, after + HOUR) if tick.at.second < 5]  # hours are cached now
    began_s = perf_counter()
    count = len([None async for _ in source.history(after, after + HOUR)])
    figures.show(f"{name}: a tick of 3 markets", (perf_counter() - began_s) / count * 1e6, "µs", at_most=TICK_US_MAX)
    began_s = perf_counter()
    books = [quote.book for tick in kept for quote in tick.quotes.values()]
    figures.show(f"{name}: a book", (perf_counter() - began_s) / len(books) * 1e6, "µs")


async def measure_candles(figures: Figures, name: str, source: MarketSource, end: datetime) -> None:
    async def quarter_hours() -> None:
        for symbol in SYMBOLS:
            await source.candles(symbol, "15m", end - 25 * HOUR, end)

    async def four_hours() -> None:
        for symbol in SYMBOLS:
            await source.candles(symbol, "4h", end - 1200 * HOUR, end)

    await measure(figures, f"{name}: 100 candles of 15m of 3 markets", quarter_hours(), CANDLES_MS_MAX)
    await measure(figures, f"{name}: 300 candles of 4h of 3 markets", four_hours())


async def main(folder: Path | None) -> int:
    figures = Figures()
    await measure_candles(figures, "synthetic", SyntheticSource(0, SYMBOLS), NOW)
    await measure_ticks(figures, "synthetic", SyntheticSource(0, SYMBOLS), NOW)
    if folder is not None:
        replay = ReplaySource(folder, SYMBOLS, speed=0)
        await replay.open()
        start = replay.clock(None).now()
        await measure_candles(figures, "replay", replay, start + 500 * HOUR)
        await measure_ticks(figures, "replay", replay, start)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
