"""The location of the recorded candles that some tests trade on; without them, these tests are skipped."""

import gzip
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Final

from trader.core.clock import epoch_second
from trader.market.sources.files import find_files

FOLDER: Final = Path(os.environ.get("TRADER_TEST_CANDLES", Path(__file__).parents[3] / "shared" / "data"))
"""Files such as BTCUSDT-1m-2025-01.csv.gz: BTC, ETH and SOL, 2025-01-01 03:00 to 2025-02-04 20:19 UTC, no gaps."""


def write_walk(file: Path, start: datetime, count: int, *, price: float, seed: int) -> None:
    """Write candles of a random walk that alternates between calm and wild hours, so that rule agents trade on it."""
    rng = Random(seed)
    lines = ["open_time,open,high,low,close,volume"]
    for number in range(count):
        size = price * (0.0012 if number // 90 % 3 == 2 else 0.0002)
        close = price + rng.gauss(0.35 * size * (-1) ** (number // 270), size)
        high, low = max(price, close) + abs(rng.gauss(0, size / 3)), min(price, close) - abs(rng.gauss(0, size / 3))
        at = int(start.timestamp() * 1000) + 60_000 * number
        lines.append(f"{at},{price:.2f},{high:.2f},{low:.2f},{close:.2f},{rng.expovariate(0.1):.3f}")
        price = round(close, 2)
    file.write_text("\n".join(lines))


def write_part(
    folder: Path, candles: Path, begin: datetime, end: datetime, without: Mapping[str, Sequence[range]] | None = None
) -> Path:
    """Write the recorded candles from `begin` to `end` to a new folder, `without` some minutes since 1970 by market.

    A replay of them starts in a fraction of the time of a replay of a whole recording.
    """
    folder.mkdir()
    minutes = range(epoch_second(begin) // 60, epoch_second(end) // 60 + 1)
    for symbol, (path,) in find_files(candles).items():
        kept = ["open_time,open,high,low,close,volume\n"]
        gaps = (without or {}).get(symbol, ())
        with gzip.open(path, "rt") as lines:
            next(lines)
            for line in lines:
                minute = int(line.partition(",")[0]) // 60_000
                if minute in minutes and not any(minute in gap for gap in gaps):
                    kept.append(line)
        (folder / f"{symbol}USDT-1m.csv").write_text("".join(kept))
    return folder
