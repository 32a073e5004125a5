"""The event streams under load and abuse: `python -m benchmarks.stream_load [minutes of simulated time]`.

Five streams with 50 places each. On every stream 40 well-behaved callers follow, and 10 misbehave (`benchmarks.abuse`):
they read nothing, read slowly, close their half of the connection, or vanish and come again, over a hundred times a
second in all. Meanwhile a market is followed in fast time: every 0.15 s is a second of a service at work, and brings a
new state of every stream and the events of ten steps of workflows; few real seconds have half of that. The pace leaves
the loop free again long before the next update, else a queue would be measured: how much of its core the service is
busy is told, and how much of that core the host gave to others, which is in every figure.

When an update has arrived is what the kernel says (`benchmarks.arrivals`). After the warm-up every update counts, and
every well-behaved subscriber; those who misbehave are not followed. After each sitting all callers leave. The
reference, in turns with the service, is a bare loop that writes the same states to the same callers, well-behaved or
not; it is left out when the machine is said to be shared. Exit code 1 when one of these does not hold:

- an update reaches the last well-behaved socket within 20 ms at p99 (only told on a shared machine)
- every update reaches everybody, and no well-behaved subscriber is cut off
- pings arrive within 1 s of their time
- memory grows by less than 5 MB after warm-up, peak compared with peak
- when all callers have left, nothing is left of them, each time
"""

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.arrivals import STREAMS, Arrivals, resident_bytes, start_caller, stolen_s
from benchmarks.streams import P99_MAX_MS, ROUND_S, Bare, Service, followed, run

from trader.api.streams import Timing
from trader.logs import configure_logs
from trader.services.events import WorkflowProgress

GOOD: Final = 40
SITTINGS: Final = 4
WARM_ROUNDS_MIN: Final = 120
"""Until every stalled reader has filled what there is for it."""

STEPS: Final = 10
STEP_BYTES: Final = 400
TIMING: Final = Timing(ping_s=3.0, write_s=2.0)
"""In fast time too: of the pings and of the patience with readers."""

PING_LATE_MAX_S: Final = 1.0
GROWTH_MAX_BYTES: Final = 5_000_000
LEAVE_WAIT_S: Final = 10.0


class LoadedService(Service):
    """The service of the fan-out benchmark, in fast time and with the events of many workflows."""

    def __init__(self) -> None:
        super().__init__(TIMING)

    def publish(self) -> int:
        for step in range(STEPS):
            details = {"modelId": f"model-{step}", "step": step, "rest": "x" * STEP_BYTES}
            self.events.publish(WorkflowProgress("workflow:step", datetime.now(UTC), details))
        return super().publish()

    def came(self) -> int:
        return sum(sum(latencies.counts) for latencies in self.requests.latencies.values())

    def cut_off(self) -> int:
        return sum(hub.dropped for hub in self.hubs.all.values())


@dataclass
class Sittings:
    """What was seen of one server."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    peak_subscribers: int = 0
    peak_bytes: int = 0
    busy_s: float = 0.0
    stolen_s: float = 0.0
    lasted_s: float = 0.0
    left: int = 0

    async def sit(self, server: Service | Bare, port: int, rounds: int) -> None:
        """So many rounds with all callers; then they leave."""
        readers = await followed(server, port, GOOD, TIMING.ping_s)
        abusers = await start_caller("benchmarks.abuse", str(port))
        await asyncio.sleep(1)  # they have come
        marks_ns = await self._publish(server, rounds)
        self.arrivals.add(await readers.finish(marks_ns))
        await abusers.communicate(b"")
        assert abusers.returncode == 0
        self.left += await left(server)

    async def _publish(self, server: Service | Bare, rounds: int) -> list[int]:
        loop = asyncio.get_running_loop()
        began_s, began_busy_s, began_stolen_s = loop.time(), time.process_time(), stolen_s()
        marks_ns = []
        for number in range(1, rounds + 1):
            marks_ns.append(server.publish())
            await asyncio.sleep(max(0.0, began_s + number * ROUND_S - loop.time()))
            self.peak_subscribers = max(self.peak_subscribers, server.connected())
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
        self.lasted_s += loop.time() - began_s
        self.busy_s += time.process_time() - began_busy_s
        self.stolen_s += stolen_s() - began_stolen_s
        return marks_ns


async def left(server: Service | Bare) -> int:
    """Subscribers and connections that stay when nobody is there."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + LEAVE_WAIT_S
    while (present := server.present()) and loop.time() < until_s:
        await asyncio.sleep(0.05)
    return present


async def measure(rounds: int, *, is_shared: bool) -> int:
    service, reference = LoadedService(), Bare()
    port, reference_port = await service.start(), await reference.start()
    warm, measured, bare = Sittings(), Sittings(), Sittings()

    async def refer() -> None:
        if not is_shared:  # times are not judged then, so there is nothing to compare them with
            await bare.sit(reference, reference_port, max(10, rounds // 30))

    await warm.sit(service, port, max(WARM_ROUNDS_MIN, rounds // 6))
    await refer()
    for _ in range(SITTINGS):
        await measured.sit(service, port, rounds // SITTINGS)
        await refer()
    await service.stop()
    await reference.stop()
    return told(service, warm, measured, None if is_shared else bare)


def told(service: LoadedService, warm: Sittings, measured: Sittings, bare: Sittings | None) -> int:
    arrivals = measured.arrivals
    print(
        f"{len(STREAMS)} streams × {GOOD} well-behaved callers; at most {measured.peak_subscribers} subscribers in all"
    )
    print(f"{service.came()} callers came; of those who could not keep up {service.cut_off()} were cut off")
    for name, sittings in (("service", measured), *((("reference", bare),) if bare else ())):
        busy, stolen = sittings.busy_s / sittings.lasted_s, sittings.stolen_s / sittings.lasted_s
        print(f"{sittings.arrivals.told(name)}   core busy {busy:.0%}, taken by other guests of the host {stolen:.1%}")
    if bare:
        print(f"service / reference, p99: {arrivals.last_ms_at(0.99) / bare.arrivals.last_ms_at(0.99):.2f}")
    print(f"updates of which some subscriber got only the next: {arrivals.superseded}")
    grown = measured.peak_bytes - warm.peak_bytes
    left = warm.left + measured.left
    p99_ms = arrivals.last_ms_at(0.99)
    bars = [
        (f"last socket p99 {p99_ms:.1f} ms", f"< {P99_MAX_MS:g} ms", p99_ms < P99_MAX_MS if bare else None),
        (f"{arrivals.missing} updates missing", "0", not arrivals.missing),
        (f"{arrivals.lost} well-behaved subscribers lost", "0", not arrivals.lost),
        (
            f"{arrivals.pings} pings, at most {arrivals.pings_late_s:.2f} s beside their time",
            f"< {PING_LATE_MAX_S:g} s",
            arrivals.pings > 0 and arrivals.pings_late_s < PING_LATE_MAX_S,
        ),
        (f"memory growth {grown / 1e6:.1f} MB", f"< {GROWTH_MAX_BYTES / 1e6:g} MB", grown < GROWTH_MAX_BYTES),
        (f"{left} subscribers and connections left", "0", not left),
    ]
    for what, goal, is_met in bars:
        print(f"{what} (goal {goal}): {'not judged' if is_met is None else 'met' if is_met else 'MISSED'}")
    return 1 if any(is_met is False for *_, is_met in bars) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The event streams under load and abuse.")
    parser.add_argument("minutes", nargs="?", type=float, default=30, help="of simulated time; nearly 7 times as fast")
    parser.add_argument(
        "--shared", action="store_true", help="others use this machine: the time of updates is only told"
    )
    options = parser.parse_args()
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        configure_logs("info", "json")  # a line per request, as a service writes them
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    logging.getLogger().addHandler(warnings)
    return run(measure(round(options.minutes * 60), is_shared=options.shared))


if __name__ == "__main__":
    sys.exit(main())
