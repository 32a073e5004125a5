"""Inject faults into separate services, and measure when they are reported and resolved, and what was lost.

Each fault has its own service and PostgreSQL server in a temporary folder, and a client that places an order every half
second before, during and after the fault. The table shows how long `/health` and a webhook of NOTIFY_URL took to report
the fault and, after its end, to report the recovery, the number of notices, and the acknowledged orders that were lost.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tools.fault_benches import Bench, opened
from tools.fault_list import FAULTS, Fault

LOOK_EVERY_S: Final = 0.1
TOLD_S: Final = 150.0
RESOLVED_S: Final = 150.0
EVENTS: Final = ("start", "stop", "takeover")
"""The causes of notices that have no end."""


class Told(NamedTuple):
    """The measured delays of a fault, in seconds; None: it was not reported."""

    fault: Fault
    unhealthy_s: float | None
    told_s: float | None
    healthy_s: float | None
    resolved_s: float | None
    notices: Sequence[str]
    lost: int
    problems: Sequence[str]
    answer: str

    @property
    def is_clean(self) -> bool:
        noticed_s = self.unhealthy_s if self.fault.is_unhealthy else self.told_s
        is_noticed = self.fault.kind is None or noticed_s is not None
        is_over = self.healthy_s is not None and self.healthy_s <= self.fault.bench.healthy_within_s
        return self.lost == 0 and not self.problems and is_noticed and is_over


async def measure(bench: Bench, fault: Fault, *, waits_for_notices: bool) -> Told:
    """Cause a fault in a healthy service, and measure."""
    await _until(lambda: _is(bench, healthy=True), RESOLVED_S)
    heard, began = len(bench.notices()), len(bench.answers)
    async with fault.inject(bench):
        begun_s = time.monotonic()
        limit_s = TOLD_S if fault.kind is not None else 0.0
        is_told = asyncio.create_task(_until(lambda: _is_told(bench, heard, fault.kind), limit_s))
        unhealthy_s = await _until(lambda: _is(bench, healthy=False), TOLD_S) if fault.is_unhealthy else None
        if waits_for_notices:
            await asyncio.sleep(max(0.0, fault.lasts_s - (time.monotonic() - begun_s)))
        answers = bench.answers[began:]
    ended_s = time.monotonic()
    healthy_s = await _until(lambda: _is(bench, healthy=True), RESOLVED_S)
    resolved_s = None
    if waits_for_notices:
        await is_told
        if fault.kind is not None and fault.kind not in EVENTS:
            is_over = await _until(lambda: _is_resolved(bench, heard, fault.kind), RESOLVED_S) is not None
            resolved_s = time.monotonic() - ended_s if is_over else None
    is_told.cancel()
    lost, problems = await bench.lost()
    notices = [f"{notice['state']} {notice['cause']}" for notice in bench.notices()[heard:]]
    told_s = is_told.result() if is_told.done() and not is_told.cancelled() else None
    return Told(
        fault, unhealthy_s, told_s, healthy_s, resolved_s, notices, lost, problems, answers[-1] if answers else ""
    )


async def _is(bench: Bench, *, healthy: bool) -> bool:
    return await bench.is_healthy() is healthy


async def _is_told(bench: Bench, heard: int, kind: str | None) -> bool:
    return any(notice["cause"] == kind for notice in bench.notices()[heard:])


async def _is_resolved(bench: Bench, heard: int, kind: str | None) -> bool:
    return any(notice["state"] == "resolved" and notice["cause"] == kind for notice in bench.notices()[heard:])


async def _until(condition: Callable[[], Awaitable[bool]], limit_s: float) -> float | None:
    """Return the seconds until a condition holds; None if it does not hold within the limit."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < limit_s:
        if await condition():
            return time.monotonic() - began_s
        await asyncio.sleep(LOOK_EVERY_S)
    return None


async def run(folder: Path, faults: Sequence[Fault]) -> bool:
    """Run the faults and print a row for each. Return whether nothing was lost, and each was reported and resolved."""
    is_clean = True
    heads = ("fault", "unhealthy", "told", "healthy", "resolved", "lost", "notices")
    print("{:32} {:>10} {:>8} {:>8} {:>9} {:>5}  {}".format(*heads), flush=True)
    for number, fault in enumerate(faults):
        if (lack := fault.lacks()) is not None:
            print(f"{fault.name}: skipped, it needs {lack}", flush=True)
            continue
        place = folder / str(number)
        place.mkdir()
        async with opened(place, fault.bench) as bench:
            told = await measure(bench, fault, waits_for_notices=True)
        is_clean = is_clean and told.is_clean
        times = (told.unhealthy_s, told.told_s, told.healthy_s, told.resolved_s)
        shown = ["-" if each is None else f"{each:.1f} s" for each in times]
        row = (fault.name, *shown, told.lost, ", ".join(told.notices))
        print("{:32} {:>10} {:>8} {:>8} {:>9} {:>5}  {}".format(*row), flush=True)
        print(f"{'':32}   {told.answer}", *told.problems, sep="\n", flush=True)
    return is_clean


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="WORD", help="only the faults whose name has one of these words")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.faults or any(word in fault.name for word in options.faults)]
    folder = Path(tempfile.mkdtemp(prefix="trader-faults-"))
    folder.chmod(0o755)  # as root, the server runs as another user, which must have access
    try:
        return 0 if asyncio.run(run(folder, chosen)) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
