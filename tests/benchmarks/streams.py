"""Event streams under load and abuse: delay of updates, losses, pings and memory.

    scripts/benchmark streams [minutes of simulated time] [--shared] [--page-minutes N]

The cost of the combined stream for a page is measured first, on a real service with 100 models (`stream_bytes`): at
most 10 MB an hour.

Five streams with 50 slots each. Each stream has 40 well-behaved subscribers and 10 misbehaving ones (`stream_abuse`),
with over a hundred connections a second in total. Meanwhile time runs fast: every 0.15 s is a second of a working
service, with a new state of every stream and the events of ten workflow steps; few real seconds have half of that. The
loop is idle long before the next update, otherwise a queue would be measured; the output shows the share of its core
that the service uses, and the share that the host took away.

Arrival times come from the kernel (`stream_readers`). After the warm-up every update and every well-behaved subscriber
counts. After the warm-up and at the end all callers leave. Exit code 1 if one of these does not hold:

- an update reaches the last well-behaved socket within 20 ms at p99 (not judged with `--shared`: other processes use
  the machine)
- every update reaches every well-behaved subscriber, and none of them is disconnected
- pings arrive within 1 s of their time
- memory grows by less than 5 MB after the warm-up, peak compared with peak
- each time all callers have left, no subscriber or connection remains
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import uvloop
from benchmarks.figures import Figures
from benchmarks.stream_bytes import measure_bytes
from benchmarks.stream_readers import STREAMS, Arrivals, pin_server, resident_bytes, start_caller, stolen_s
from benchmarks.stream_servers import Service, followed
from support.served import counted
from support.sse import workflow_step

from trader.api.streams import Timing
from trader.core.logs import configure_logs

SUBSCRIBERS: Final = 40
ROUND_S: Final = 0.15
WARM_ROUNDS_MIN: Final = 60
"""Until every stalled reader has filled its buffers."""

STEPS: Final = 10
STEP_BYTES: Final = 400
TIMING: Final = Timing(ping_s=3.0, write_s=2.0)
"""Intervals of pings and write timeouts, in fast time too."""

P99_MAX_MS: Final = 20.0
PING_LATE_MAX_S: Final = 1.0
GROWTH_MAX_MB: Final = 5.0
LEAVE_WAIT_S: Final = 10.0


class LoadedService(Service):
    """The service with the events of many workflows."""

    def __init__(self) -> None:
        super().__init__(TIMING)

    def publish(self) -> int:
        for step in range(STEPS):
            self.events.publish(workflow_step(datetime.now(UTC), step, "x" * STEP_BYTES, modelId=f"model-{step}"))
        return super().publish()

    def requested(self) -> int:
        return round(sum(counted(self.app).values()))

    def dropped(self) -> int:
        return sum(broadcaster.dropped for broadcaster in self.broadcasters.all.values())


@dataclass
class Sessions:
    """Measurements of one server."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    peak_subscribers: int = 0
    peak_bytes: int = 0
    busy_s: float = 0.0
    stolen_s: float = 0.0
    lasted_s: float = 0.0
    left: int = 0

    async def run(self, server: Service, port: int, rounds: int) -> None:
        """Publish `rounds` updates to all callers, which then leave."""
        readers = await followed(server, port, SUBSCRIBERS, TIMING.ping_s)
        abusers = await start_caller("benchmarks.stream_abuse", str(port))
        await asyncio.sleep(1)  # until they are connected
        marks_ns = await self._publish(server, rounds)
        self.arrivals.add(await readers.finish(marks_ns))
        await abusers.communicate(b"")
        assert abusers.returncode == 0
        self.left += await left(server)

    async def _publish(self, server: Service, rounds: int) -> list[int]:
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


async def left(server: Service) -> int:
    """Return how many subscribers and connections are left after all callers have gone."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + LEAVE_WAIT_S
    while (present := server.present()) and loop.time() < until_s:
        await asyncio.sleep(0.05)
    return present


async def measure(figures: Figures, rounds: int, *, is_shared: bool) -> int:
    service, warm, measured = LoadedService(), Sessions(), Sessions()
    port = await service.start()
    await warm.run(service, port, max(WARM_ROUNDS_MIN, rounds // 6))
    await measured.run(service, port, rounds)
    await service.stop()
    return show(figures, service, warm, measured, is_shared=is_shared)


def show(figures: Figures, service: LoadedService, warm: Sessions, measured: Sessions, *, is_shared: bool) -> int:
    arrivals = measured.arrivals
    print(
        f"{len(STREAMS)} streams with {SUBSCRIBERS} well-behaved subscribers, {measured.peak_subscribers} at most; "
        f"{service.requested()} connections, of which {service.dropped()} were dropped as too slow"
    )
    busy, stolen = measured.busy_s / measured.lasted_s, measured.stolen_s / measured.lasted_s
    print(f"core busy {busy:.0%}, taken by other guests of the host {stolen:.1%}")
    for share, at_most in ((0.5, None), (0.99, P99_MAX_MS), (1.0, None)):
        what = f"update at the last socket, p{100 * share:g}"
        figures.show(what, arrivals.last_ms_at(share), "ms", at_most=at_most, is_judged=not is_shared)
    figures.show("updates of which a subscriber got only the next", arrivals.superseded, "")
    figures.show("updates that a subscriber never got", arrivals.missing, "", at_most=0)
    figures.show("well-behaved subscribers disconnected", arrivals.lost, "", at_most=0)
    figures.show("pings", arrivals.pings, "", at_least=1)
    figures.show("largest distance of a ping from its time", arrivals.pings_late_s, "s", at_most=PING_LATE_MAX_S)
    growth_mb = (measured.peak_bytes - warm.peak_bytes) / 1e6
    figures.show("growth of memory after the warm-up", growth_mb, "MB", at_most=GROWTH_MAX_MB)
    figures.show("subscribers and connections left at the end", warm.left + measured.left, "", at_most=0)
    return figures.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description="Event streams under load and abuse.")
    parser.add_argument("minutes", nargs="?", type=float, default=30, help="of simulated time; nearly 7 times as fast")
    parser.add_argument(
        "--shared", action="store_true", help="other processes use this machine: the time of updates is not judged"
    )
    parser.add_argument("--page-minutes", type=int, default=3, help="of real time: what a page costs; 0 leaves it out")
    options = parser.parse_args()
    figures = Figures()
    if options.page_minutes:
        asyncio.run(measure_bytes(figures, options.page_minutes))
    with Path(os.devnull).open("w") as nowhere:
        with redirect_stderr(nowhere):
            configure_logs("info", "json")  # one line per request, as in a service
        warnings = logging.StreamHandler()
        warnings.setLevel(logging.WARNING)
        logging.getLogger().addHandler(warnings)
        pin_server()
        gc.collect()
        gc.freeze()  # as the service does once it has started
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(figures, round(options.minutes * 60), is_shared=options.shared))


if __name__ == "__main__":
    sys.exit(main())
