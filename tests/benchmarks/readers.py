"""Readers on two streaming replicas: their cost for the leader, and the reads per second of 1, 2 and 4 of them.

  scripts/benchmark readers            60 rounds of three turns, 5 s for each number of readers
  scripts/benchmark readers --quick    12 rounds, 2 s for each
  scripts/benchmark readers --subscribers 40    fewer of each stream, on all readers together, than 200

Each leader handles 5 orders and 5 reads a second. Its processor time per order is measured in turns: while no reader
runs, while the readers of another installation serve 200 subscribers of each stream on the same cores, and while its
own do. The cost of sharing cores and caches is in both of the last two, so their ratio is the readers' cost for their
leader. A reader's processor time per read is what another machine would need. Exit code 1: the leader needs over 5 %
more with its own readers than with another installation's.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

import orjson
from benchmarks.figures import Figures, temporary_folder
from support.process import ServiceProcess, serving
from support.replication import replicated

READERS: Final = 4
STREAMS: Final = ("positions", "trades", "conversations", "portfolio", "workflow")
PER_SECOND: Final = 5
CONNECTIONS: Final = 8
"""Open connections of a caller of one reader."""

FOLLOWING_S: Final = 10.0
TURN_S: Final = 3.0
SETTLING_S: Final = 1.0
"""From a change of turns until it is measured: readers that were stopped catch up."""

READS: Final[Sequence[tuple[str, bytes]]] = (
    ("trading.getPositions", b"{}"),
    ("trading.getTrades", b"{}"),
    ("trading.getCryptoPrices", b"{}"),
    ("analytics.getLeaderboard", b"{}"),
    ("models.getModels", b"{}"),
)
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Return the processor time used by a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 rounds, 2 s for each number of readers")
    parser.add_argument("--subscribers", type=int, default=200, help="of each stream, on all readers together")
    parser.add_argument("--call", nargs=2, metavar=("URL", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--subscribe", nargs="+", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.call:
        print(asyncio.run(call(options.call[0], float(options.call[1]))))
        return 0
    if options.subscribe:
        print(asyncio.run(subscribe(options.subscribe, options.subscribers)))
        return 0
    rounds, reads_s = (12, 2.0) if options.quick else (60, 5.0)
    return asyncio.run(measure(options.subscribers, rounds, reads_s))


async def call(url: str, seconds: float) -> int:
    """Read on `CONNECTIONS` connections as fast as the reader answers. Return the number of answers."""
    requests = [
        f"POST /api/rpc/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        for name, body in READS
    ]
    host, _, port = url.removeprefix("http://").partition(":")
    end_s = time.monotonic() + seconds

    async def one(first: int) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        count = 0
        while time.monotonic() < end_s:
            writer.write(requests[(first + count) % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(int(size.partition(b":")[2]))
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*map(one, range(CONNECTIONS))))


async def read_all(readers: Sequence[ServiceProcess], seconds: float) -> tuple[int, float, float]:
    """Let a separate process call each reader.

    Return the answers, the readers' processor time, and the elapsed time.
    """
    began_s, before_s = time.monotonic(), sum(processor_s(reader.process.pid) for reader in readers)
    callers = [await helper("--call", reader.url, str(seconds)) for reader in readers]
    counts = [int((await caller.communicate())[0]) for caller in callers]
    used_s = sum(processor_s(reader.process.pid) for reader in readers) - before_s
    return sum(counts), used_s, time.monotonic() - began_s


@asynccontextmanager
async def trading(leader: ServiceProcess) -> AsyncIterator[list[float]]:
    """Send orders and reads to the leader at a fixed rate. Yield the durations of the orders so far, in seconds."""
    durations: list[float] = []

    async def go_on() -> None:
        started_s, number = time.monotonic(), 0
        while True:
            side = "buy" if number % 2 == 0 else "sell"
            asked_s = time.monotonic()
            await leader.call("simulator.placeOrder", accountId="load", symbol="BTC", side=side, quantity=0.001)
            durations.append(time.monotonic() - asked_s)
            await leader.call("trading.getPositions")
            number += 1
            await asyncio.sleep(max(0.0, started_s + number / PER_SECOND - time.monotonic()))

    task = asyncio.create_task(go_on())
    yield durations
    assert not task.done() or task.exception() is None, task
    task.cancel()
    await asyncio.wait([task])


async def subscribe(urls: Sequence[str], subscribers: int) -> int:
    """Follow every stream, with the subscribers spread over the readers, until standard input ends.

    Return the bytes.
    """
    received: list[int] = []

    async def follow(url: str, name: str, place: int) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /api/events/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        while chunk := await reader.read(2**18):
            received[place] += len(chunk)

    tasks = []
    for number in range(subscribers):
        for name in STREAMS:
            received.append(0)
            following = follow(urls[number % len(urls)], name, len(received) - 1)
            tasks.append(asyncio.create_task(following))
    while not all(received):
        await asyncio.sleep(0.1)
    print("subscribed", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    assert not any(task.done() for task in tasks), "a subscriber was dropped"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return sum(received)


async def helper(*arguments: str) -> asyncio.subprocess.Process:
    """Start this program for another part."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "benchmarks.readers", *arguments, stdin=pipe, stdout=pipe
    )


@asynccontextmanager
async def subscribing(readers: Sequence[ServiceProcess], subscribers: int) -> AsyncIterator[None]:
    """Run all subscribers of all streams for the duration of the block; print the bytes that they received."""
    process = await helper("--subscribers", str(subscribers), "--subscribe", *(reader.url for reader in readers))
    assert process.stdout is not None
    async with asyncio.timeout(120):
        assert await process.stdout.readline() == b"subscribed\n"
    began_s = time.monotonic()
    yield
    sent, _ = await process.communicate(b"")  # which closes its input
    rate = int(sent) / (time.monotonic() - began_s)
    print(f"{subscribers} subscribers of each stream received {rate / 1e6:.1f} MB/s together", flush=True)


@dataclass(frozen=True)
class Installation:
    """A primary with two replicas, its leader, which takes orders and reads, and readers at the replicas."""

    leader: ServiceProcess
    readers: Sequence[ServiceProcess]
    durations: Sequence[float]
    """Of the leader's orders so far, in seconds."""


@asynccontextmanager
async def installed(folder: Path) -> AsyncIterator[Installation]:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(replicated(folder))
        common = {"SIM_LATENCY_MS": "0", "LOG_FORMAT": "json"}
        leader = await stack.enter_async_context(serving(folder, **common, DATABASE_URL=cluster.dsn))
        replicas = [await cluster.add_replica() for _ in range(2)]
        readers = [
            await stack.enter_async_context(
                serving(folder, **common, DATABASE_URL=replicas[number % 2].dsn, ROLE="reader")
            )
            for number in range(READERS)
        ]
        yield Installation(leader, readers, await stack.enter_async_context(trading(leader)))


async def measure(subscribers: int, rounds: int, reads_s: float) -> int:
    figures = Figures()
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(installed(stack.enter_context(temporary_folder())))
        async with installed(stack.enter_context(temporary_folder())) as strangers:
            await show_cost(figures, ours, strangers, subscribers, rounds)
        readers = ours.readers
        before_s = processor_s(readers[0].process.pid)
        await asyncio.sleep(FOLLOWING_S)
        idle = (processor_s(readers[0].process.pid) - before_s) / FOLLOWING_S
        figures.show("processor of a reader that only follows", 100 * idle, "%")
        for count in (1, 2, 4):
            answers, used_s, took_s = await read_all(readers[:count], reads_s)
            figures.show(f"reads of {count} readers", answers / reads_s, "/s")
            figures.show("  processor time per read", 1000 * (used_s - count * idle * took_s) / answers, "ms")
        figures.show("lag of the readers at most", max([await lag_s(reader) for reader in readers]), "s")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return figures.exit_code


async def show_cost(
    figures: Figures, ours: Installation, strangers: Installation, subscribers: int, rounds: int
) -> None:
    """Measure our leader's processor time in turns: without readers, next to foreign readers, and with its own."""
    pid = ours.leader.process.pid
    turns: dict[str, Sequence[ServiceProcess]] = {
        "no": (),
        "other services'": strangers.readers,
        "its own": ours.readers,
    }
    costs_ms: dict[str, list[float]] = {name: [] for name in turns}
    everyone = (*ours.readers, *strangers.readers)
    async with subscribing(ours.readers, subscribers), subscribing(strangers.readers, subscribers):
        for number in range(rounds):
            # Reverse every second round, so that costs which grow with the books affect all equally.
            for name, serving_ones in sorted(turns.items(), reverse=number % 2 == 1):
                for reader in everyone:
                    reader.process.send_signal(signal.SIGCONT if reader in serving_ones else signal.SIGSTOP)
                await asyncio.sleep(SETTLING_S)
                before_s, count = processor_s(pid), len(ours.durations)
                await asyncio.sleep(TURN_S)
                used_s = processor_s(pid) - before_s
                costs_ms[name].append(1000 * used_s / max(1, len(ours.durations) - count))
        for reader in everyone:
            reader.process.send_signal(signal.SIGCONT)
    for name, of_turns in costs_ms.items():
        figures.show(f"leader's time per order beside {name} readers", fmean(of_turns), "ms")
    ratios = [log(own / others) for own, others in zip(costs_ms["its own"], costs_ms["other services'"], strict=True)]
    error = stdev(ratios) / sqrt(len(ratios))
    figures.show("its own against other services'", 100 * exp(fmean(ratios)), "%", at_most=105)
    figures.show("  its standard error", 100 * error, "%")


async def lag_s(reader: ServiceProcess) -> float:
    async with reader.http.get(f"{reader.url}/health") as response:
        return float(orjson.loads(await response.read())["lagSeconds"])


if __name__ == "__main__":
    sys.exit(main())
