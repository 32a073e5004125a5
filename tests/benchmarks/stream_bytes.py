"""Cost of the combined stream for a page: 100 rule models of a real service, each deciding once a minute.

All of them hold a manually opened position from the start. The page reads as a browser does (compressed, all
streams), for whole minutes.
"""

import asyncio
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Final

from benchmarks.figures import Figures, temporary_folder
from support.process import ServiceProcess, serving

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = 100
STATES: Final = ("positions", "trades", "conversations", "portfolio", "trades:new", "conversations:new", "ping")
HOUR_S: Final = 3600
HOUR_MAX_MB: Final = 10.0
NAME: Final = re.compile(rb"^event: (.+)$", re.MULTILINE)
HEAD: Final = (
    b"GET /api/events?streams=positions,trades,conversations,portfolio,workflow HTTP/1.1\r\n"
    b"Host: localhost\r\nAccept-Encoding: gzip\r\n\r\n"
)


async def measure_bytes(figures: Figures, minutes: int) -> None:
    """Start a service and show how much its stream sends to one page within this many minutes."""
    with temporary_folder() as folder:
        command = (sys.executable, ROOT / "scripts" / "seed_accounts.py", "--demo", "--models", str(MODELS))
        await asyncio.to_thread(subprocess.run, command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        async with serving(folder, "--demo=fresh") as service:
            held = await open_positions(service)
            first, later = await read(int(service.url.rpartition(":")[2]), minutes * 60)
    events, total = sum(later["events"]), first + sum(map(sum, later.values()))
    figures.show("first states of a page", first / 1e3, "kB")
    figures.show(f"position message, {held} positions", mean(later["positions"]) / 1e3, "kB")
    figures.show("of them workflow events, per hour", events / 1e6 * HOUR_S / (minutes * 60), "MB")
    figures.show(
        f"bytes per page and hour, {MODELS} models", total / 1e6 * HOUR_S / (minutes * 60), "MB", at_most=HOUR_MAX_MB
    )


async def open_positions(service: ServiceProcess) -> int:
    """Open a position on the account of every model. Return the number of positions."""
    prices = (await service.call("trading.getCryptoPrices"))["prices"]
    models = (await service.call("models.getModels"))["models"]
    for model, price in zip(models, cycle(prices), strict=False):
        order = {"symbol": price["symbol"], "side": "buy", "quantity": 1000 / price["price"], "leverage": 2}
        await service.call("simulator.placeOrder", accountId=model["id"], **order)
    return len(await service.call("trading.getPositions"))


async def read(port: int, seconds: float) -> tuple[int, dict[str, list[int]]]:
    """Return the bytes on the wire of the first message, and of the later ones by kind."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    unpacker, first, result = zlib.decompressobj(wbits=31), 0, defaultdict[str, list[int]](list)
    try:
        async with asyncio.timeout(seconds):
            while True:
                size = int(await reader.readline(), 16)
                text = unpacker.decompress(await reader.readexactly(size))
                names = NAME.findall(text)
                await reader.readexactly(2)
                name = names[0].decode() if len(names) == 1 else ""
                if not first:
                    first = size
                else:
                    result[name if name in STATES else "events"].append(size)
    except TimeoutError:
        return first, result
    finally:
        writer.close()
