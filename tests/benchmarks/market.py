"""What market data costs: ticks, books, candles, and how long the event loop is held. Fails when a bound is missed.

python -m benchmarks.market [folder of kline files]
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter

from trader.gateways.market.replay import ReplaySource
from trader.gateways.market.source import MarketSource
from trader.gateways.market.synthetic import SyntheticSource

SYMBOLS = ("BTC", "ETH", "SOL")
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)

TICK_US_MAX = 60.0
CANDLES_S_MAX = 1.5
BLOCK_MS_MAX = 50.0

missed = False


def report(what: str, value: float, unit: str, bound: float | None = None) -> None:
    global missed  # noqa: PLW0603 - the exit code of a script
    is_missed = bound is not None and value > bound
    missed = missed or is_missed
    limit = "" if bound is None else f"   bound {bound:g} {unit}{'   MISSED' if is_missed else ''}"
    print(f"{what:<52}{value:>10.1f} {unit}{limit}")


async def measured(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Seconds that `work` took, and the longest that it held the event loop."""
    longest = 0.0
    done = False

    async def watch() -> None:
        nonlocal longest
        while not done:
            begin = perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, perf_counter() - begin)

    watching = asyncio.create_task(watch())
    begin = perf_counter()
    await work()
    took = perf_counter() - begin
    done = True
    await watching
    return took, longest


async def measure_ticks(name: str, source: MarketSource, after: datetime) -> None:
    hour = timedelta(hours=1)
    kept = [tick async for tick in source.history(after, after + hour) if tick.at.second < 5]  # hours are made once
    begin = perf_counter()
    count = 0
    async for _ in source.history(after, after + hour):
        count += 1
    report(f"{name}: a tick of 3 markets", (perf_counter() - begin) / count * 1e6, "µs", TICK_US_MAX)
    begin = perf_counter()
    books = [quote.book for tick in kept for quote in tick.quotes.values()]
    report(f"{name}: a book", (perf_counter() - begin) / len(books) * 1e6, "µs")


async def measure_candles(name: str, source: MarketSource, end: datetime) -> None:
    async def quarter_hours() -> None:
        for symbol in SYMBOLS:
            await source.candles(symbol, "15m", end - timedelta(hours=25), end)

    async def four_hours() -> None:
        for symbol in SYMBOLS:
            await source.candles(symbol, "4h", end - timedelta(hours=1200), end)

    took, block = await measured(quarter_hours)
    report(f"{name}: 100 candles of 15m of 3 markets", took * 1000, "ms", CANDLES_S_MAX * 1000)
    report(f"{name}: longest hold of the loop meanwhile", block * 1000, "ms", BLOCK_MS_MAX)
    took, block = await measured(four_hours)
    report(f"{name}: 300 candles of 4h of 3 markets", took * 1000, "ms")
    report(f"{name}: longest hold of the loop meanwhile", block * 1000, "ms", BLOCK_MS_MAX)


async def main(folder: Path | None) -> int:
    await measure_candles("synthetic", SyntheticSource(0, SYMBOLS), NOW)
    await measure_ticks("synthetic", SyntheticSource(0, SYMBOLS), NOW)
    if folder is not None:
        replay = ReplaySource(folder, SYMBOLS, speed=0)
        took, block = await measured(replay.open)
        report("replay: reading the folder", took * 1000, "ms")
        report("replay: longest hold of the loop meanwhile", block * 1000, "ms")
        start = replay.clock(None).now()
        await measure_candles("replay", replay, start + timedelta(hours=500))
        await measure_ticks("replay", replay, start)
    return int(missed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)))
