"""Cost of each view of the dashboard with 100 trading rule models: bytes, layout shifts, and tasks.

Every view is open in a separate browser behind a forwarder that counts the bytes sent to it, without any interaction.
They are opened two at a time, since more on two cores would fall behind; then all are observed together.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.figures import Figures
from benchmarks.stream_bytes import HOUR_MAX_MB, read
from support.chromium import Tab, open_tab
from support.dashboard import RECORD_JUMPS
from support.process import ServiceProcess, serving
from support.tcp_forwarder import forwarding

HOUR_S: Final = 3600.0
SHIFT_MAX: Final = 0.05
OWN_TASK_MAX_MS: Final = 50.0
AT_ONCE: Final = 2
SETTLED_S: Final = 20.0
"""Time after which a view has loaded its initial content."""
READ_S: Final = 120.0
"""How long the messages of positions are read in parallel with the views."""

SIZE: Final[dict[str, Any]] = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}

TRACED: Final = {"includedCategories": ["toplevel"]}


async def measure_views(figures: Figures, folder: Path, minutes: float, *, shows_jumps: bool) -> None:
    """Open every view on the service of `folder` for this many minutes, and show the cost of each."""
    async with serving(folder, "--demo=fresh") as service:
        views, places = await views_of(service), asyncio.Semaphore(AT_ONCE)
        with tempfile.TemporaryDirectory() as scratch:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(watch(service.url, path, Path(scratch) / str(number), minutes * 60, places))
                    for number, path in enumerate(views)
                ]
                reading = group.create_task(read(int(service.url.rpartition(":")[2]), READ_S))
        held = len(await service.call("trading.getPositions"))
    sizes = reading.result()[1]["positions"]
    figures.show(f"position message, {held} positions", mean(sizes) / 1e3, "kB")
    for path, task in zip(views, watches, strict=True):
        first, later, jumps, own_ms = task.result()
        hour = (first + later * (HOUR_S - SETTLED_S) / (minutes * 60)) / 1e6
        figures.show(f"{path}: first hour", hour, "MB", at_most=HOUR_MAX_MB)
        figures.show(f"    of it until {SETTLED_S:.0f} s after the address", first / 1e6, "MB")
        figures.show(
            "    layout shift", sum(jump["value"] for jump in jumps), "", at_most=SHIFT_MAX, is_judged=minutes <= 10
        )
        figures.show("    longest task of its own", own_ms, "ms", at_most=OWN_TASK_MAX_MS)
        if shows_jumps:
            print(*(json.dumps(jump) for jump in jumps), sep="\n", file=sys.stderr)


async def views_of(service: ServiceProcess) -> list[str]:
    model = (await service.call("models.getModels"))["models"][0]
    trade = (await service.call("trading.getTrades", modelId=model["id"], limit=1))["trades"][0]
    names = ("", "models", "positions", "trades", "conversations", "system", "markets/BTC")
    return [*names, f"models/{model['id']}", f"variants/{model['variant']}", f"trades/{trade['id']}"]


async def watch(
    url: str, path: str, profile: Path, seconds: float, places: asyncio.Semaphore
) -> tuple[int, int, list[Any], float]:
    """Open a view once a slot is free, release the slot when the view has settled, and keep the view open.

    Return the bytes until it settled and after that, its layout shifts, and its longest task in ms.
    """
    async with AsyncExitStack() as stack:
        switch = await stack.enter_async_context(forwarding())
        switch.to(url)
        rule = f"--host-resolver-rules=MAP {url.removeprefix('http://')} {switch.url.removeprefix('http://')}"
        async with places:
            tab = await stack.enter_async_context(open_tab(profile, "about:blank#start", rule))
            await tab.command("Emulation.setDeviceMetricsOverride", **SIZE)
            await tab.command("Page.addScriptToEvaluateOnNewDocument", source=RECORD_JUMPS)
            await tab.command("Tracing.start", transferMode="ReturnAsStream", traceConfig=TRACED)
            await tab.command("Page.navigate", url=f"{url}/#/{path}")
            await asyncio.sleep(SETTLED_S)
        first = switch.bytes_back
        await asyncio.sleep(seconds)
        later = switch.bytes_back - first
        jumps = await tab.evaluate("jumps")
        await tab.command("Page.stopLoading")
        return first, later, jumps, longest_of_its_own(await trace(tab))


async def trace(tab: Tab) -> list[dict[str, Any]]:
    """End a trace and return its events."""
    await tab.command("Tracing.end")
    handle = (await tab.event("Tracing.tracingComplete"))["stream"]
    result: dict[str, Any] = {"eof": False}
    parts: list[str] = []
    while not result["eof"]:
        result = await tab.command("IO.read", handle=handle)
        parts.append(result["data"])
    events: list[dict[str, Any]] = json.loads("".join(parts))["traceEvents"]
    return events


def longest_of_its_own(events: list[dict[str, Any]]) -> float:
    """Return the processor time of the longest task on a main thread, in milliseconds."""
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = (event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in threads)
    return max((task.get("tdur", 0) for task in tasks), default=0) / 1000
