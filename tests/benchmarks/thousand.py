"""A hundred models and a thousand dashboards through 20 readers, all on this machine: the load of each part.

  scripts/benchmark thousand [--models 100] [--readers 20] [--dashboards 1000] [--seconds 180]

A leader runs rule models that have traded for a day, and its readers follow a streaming replica. A dashboard is one
stream of all events, requested like the page's and read to the end of the run, and one read of five kinds in turn every
five seconds. Models, orders, processes, connections and PostgreSQL are real; the market is synthetic, and everything
shares the cores of one machine without a network in between. The processor time of each part is what it would need on a
separate machine; the figure for the whole machine also includes the PostgreSQL servers and everything else that runs.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
from benchmarks.figures import Figures, temporary_folder
from benchmarks.readers import READS, TICK_S, processor_s
from support.process import ServiceProcess, serving
from support.replication import replicated

ROOT: Final = Path(__file__).resolve().parents[2]
READ_EVERY_S: Final = 5.0
LOOK_EVERY_S: Final = 5.0

PARTS: Final = """Real: processes, connections, orders, models and PostgreSQL. Simulated: the market and the dashboards.
Not there: a network between the parts. Calculated: the reference of the streams."""


class Dashboards:
    """Totals of all dashboards: bytes of their streams, durations of their reads, and failures."""

    def __init__(self) -> None:
        self.bytes = 0
        self.waits_ms: list[float] = []
        self.failed = 0

    async def show(self, http: aiohttp.ClientSession, url: str, number: int) -> None:
        """Run one dashboard until canceled."""
        reading = asyncio.create_task(self._read(http, url, number))
        try:
            async with http.get(f"{url}/api/events", headers={"Accept-Encoding": "gzip"}) as response:
                response.raise_for_status()
                async for piece in response.content.iter_any():
                    self.bytes += len(piece)
            self.failed += 1  # the reader ended the stream
        except aiohttp.ClientError:
            self.failed += 1
        finally:
            reading.cancel()

    async def _read(self, http: aiohttp.ClientSession, url: str, number: int) -> None:
        await asyncio.sleep(number % 50 / 50 * READ_EVERY_S)
        while True:
            name, body = READS[number % len(READS)]
            number, began_s = number + 1, time.perf_counter()
            try:
                async with http.post(f"{url}/api/rpc/{name}", data=body) as response:
                    await response.read()
                    self.failed += response.status != 200
                self.waits_ms.append((time.perf_counter() - began_s) * 1000)
            except aiohttp.ClientError:
                self.failed += 1
            await asyncio.sleep(READ_EVERY_S)


async def seed(dsn: str, models: int) -> None:
    """Write a day of trading by rule models, spread over the variants."""
    words = ["--demo", "--models", str(models), "--history", "1", "--database-url", dsn]
    process = await asyncio.create_subprocess_exec(sys.executable, ROOT / "scripts" / "seed_accounts.py", *words)
    if await process.wait():
        raise SystemExit("the models cannot be written")


@asynccontextmanager
async def showing(readers: Sequence[ServiceProcess], count: int) -> AsyncIterator[Dashboards]:
    """Open the dashboards, spread over the readers, for the duration of the block."""
    dashboards = Dashboards()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None), auto_decompress=False
    ) as http:
        urls = [readers[number % len(readers)].url for number in range(count)]
        tasks = [asyncio.create_task(dashboards.show(http, url, number)) for number, url in enumerate(urls)]
        try:
            yield dashboards
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def look(leader: ServiceProcess, readers: Sequence[ServiceProcess], seconds: float) -> tuple[int, list[float]]:
    """Check the health of all for this long.

    Return the number of unhealthy results, and the ages of the readers' data.
    """
    unhealthy, ages, ends_s = 0, list[float](), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for service in (leader, *readers):
            status, report = await service.get("/health")
            unhealthy += status != 200
            if service is not leader:
                ages.append(report["lagSeconds"])
        await asyncio.sleep(LOOK_EVERY_S)
    return unhealthy, sorted(ages)


def machine_processor_s() -> float:
    """Return the processor time used by all processes of the machine on all cores."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) * TICK_S


async def measure(folder: Path, options: argparse.Namespace) -> Figures:
    figures, processes = Figures(), list[ServiceProcess]()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(replicated(folder))
        await seed(cluster.dsn, options.models)
        (folder / "leader").mkdir()
        leader = await stack.enter_async_context(serving(folder / "leader", DATABASE_URL=cluster.dsn))
        replica = await cluster.add_replica()
        for number in range(options.readers):
            (place := folder / f"reader-{number}").mkdir()
            processes.append(await stack.enter_async_context(serving(place, DATABASE_URL=replica.dsn, ROLE="reader")))
        dashboards = await stack.enter_async_context(showing(processes, options.dashboards))
        await asyncio.sleep(10)  # every stream has sent its state
        pids = {"leader": [leader.process.pid], "readers": [each.process.pid for each in processes]}
        pids["callers"] = [os.getpid()]
        before, machine_s = {part: sum(map(processor_s, of)) for part, of in pids.items()}, machine_processor_s()
        received, began_s = dashboards.bytes, time.monotonic()
        dashboards.waits_ms.clear()
        unhealthy, ages = await look(leader, processes, options.seconds)
        spent_s = time.monotonic() - began_s
        for part, of in pids.items():
            share = (sum(map(processor_s, of)) - before[part]) / spent_s
            figures.show(f"processor of the {part}", 100 * share, "%")
        figures.show("processor of the whole machine", 100 * (machine_processor_s() - machine_s) / spent_s, "%")
        rate = (dashboards.bytes - received) / spent_s
        figures.show(
            "streams to all dashboards",
            rate / 1e6,
            "MB/s",
            reference=("5 MB an hour each", options.dashboards * 5 / 3600),
        )
        waits = sorted(dashboards.waits_ms)
        figures.show("reads of all dashboards", len(waits) / spent_s, "/s", reference=("asked", options.dashboards / 5))
        figures.show("median read", waits[len(waits) // 2], "ms")
        figures.show("p99 read", waits[len(waits) * 99 // 100], "ms")
        figures.show("age of what a reader shows, median", ages[len(ages) // 2], "s")
        figures.show("age of what a reader shows, longest", ages[-1], "s", at_most=5)
        figures.show("streams and reads that failed", dashboards.failed, "", at_most=0)
        figures.show("looks that found a process unhealthy", unhealthy, "", at_most=0)
        _, report = await leader.get("/health/schedulers")
        for name, scheduler in report["schedulers"].items():
            figures.show(f"runs of {name} that were skipped", scheduler["skipped"], "", at_most=0)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--dashboards", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args(arguments)
    print(PARTS)
    with temporary_folder() as folder:
        return asyncio.run(measure(folder, options)).exit_code


if __name__ == "__main__":
    sys.exit(main())
