"""Memory of the service over simulated days of trading in lockstep: it must not grow after the second day.

  scripts/benchmark memory                   90 days of 3 markets, the rule agents of the demo (an hour or more)
  scripts/benchmark memory --days 10 --symbols BTC

The real process replays a recording of random walks as fast as it can follow. `anonymous` is its own memory, without
mapped program files; each line is the end of a simulated day. Exit code 1: the last day ended more than 5 MB above the
second.
"""

import argparse
import asyncio
import csv
import gzip
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Final

from support.process import ServiceProcess, serving

GROWTH_MB_MAX: Final = 5.0
BEGIN_MS: Final = 1_735_689_600_000  # 2025-01-01
MINUTES_PER_DAY: Final = 1440
WARM_UP_DAYS: Final = 1
"""A replay trades from its 25th hour on."""

LOOK_S: Final = 1.0
MOVE: Final = 0.0006
"""Standard deviation of a minute's return."""

START_PRICES: Final = {"BTC": 94_000.0, "ETH": 3_300.0, "SOL": 190.0}


def write_candles(folder: Path, symbols: Sequence[str], days: int) -> None:
    """Write random walks as recorded candles of one minute, the same in every run."""
    for symbol in symbols:
        random = Random(symbol)
        price = START_PRICES[symbol]
        with gzip.open(folder / f"{symbol}USDT-1m-2025-01.csv.gz", "wt", compresslevel=1, newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("open_time", "open", "high", "low", "close", "volume"))
            for minute in range(days * MINUTES_PER_DAY):
                opened, price = price, price * (1 + random.gauss(0, MOVE))
                high, low = max(opened, price) * (1 + MOVE / 3), min(opened, price) * (1 - MOVE / 3)
                figures = (f"{figure:.2f}" for figure in (opened, high, low, price))
                rows.writerow((BEGIN_MS + minute * 60_000, *figures, "10"))


def anonymous_mb(pid: int) -> float:
    """Return the resident anonymous memory of a process."""
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, "only Linux says it"
    return int(match[1]) / 1024


async def trades_so_far(service: ServiceProcess) -> int:
    """Return the number of closed trades: an idle service would not grow either."""
    async with service.http.get(f"{service.url}/metrics") as response:
        text = await response.text()
    return sum(int(float(count)) for count in re.findall(r"^trader_trades_total\S* (\S+)$", text, re.MULTILINE))


async def market_time(service: ServiceProcess) -> datetime | None:
    _, report = await service.get("/health/schedulers")
    at = report["market"]["lastUpdateAt"]
    return None if at is None else datetime.fromisoformat(at)


async def measure(days: int, symbols: Sequence[str]) -> int:
    """Print the memory at the end of each simulated day; return the exit code."""
    with tempfile.TemporaryDirectory() as place:
        candles = Path(place, "candles")
        candles.mkdir()
        write_candles(candles, symbols, WARM_UP_DAYS + days + 1)
        environ = {"MARKET_SOURCE": f"replay:{candles}", "REPLAY_SPEED": "0", "MARKETS": ",".join(symbols)}
        ends: list[float] = []
        async with serving(Path(place), **environ) as service:
            begin: datetime | None = None
            while len(ends) < days:
                await asyncio.sleep(LOOK_S)
                service.log.clear()  # this is the process that would grow
                now = await market_time(service)
                begin = begin or now
                if now is None or begin is None or now - begin < timedelta(days=len(ends) + 1):
                    continue
                ends.append(anonymous_mb(service.process.pid))
                grown = ends[-1] - ends[min(1, len(ends) - 1)]
                trades = await trades_so_far(service)
                memory = f"anonymous {ends[-1]:7.2f} MB  since day 2 {grown:+6.2f} MB"
                print(f"day {len(ends):3}  {memory}  {trades:6,} trades", flush=True)
            await service.stop()
    growth = ends[-1] - ends[1]
    print(f"from the end of day 2 to that of day {days}: {growth:+.2f} MB (at most {GROWTH_MB_MAX:+g})")
    return int(growth > GROWTH_MB_MAX)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=90, help="simulated days, at least 3")
    parser.add_argument("--symbols", default="BTC,ETH,SOL", help="markets, of these three")
    options = parser.parse_args()
    return asyncio.run(measure(max(3, options.days), options.symbols.split(",")))


if __name__ == "__main__":
    sys.exit(main())
