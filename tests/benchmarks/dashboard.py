"""The dashboard with 100 models and 30 days in a real browser, compared with an empty page and the chart's bare answer.

  scripts/benchmark dashboard    100 models, 30 days (made first, which takes minutes)
  scripts/benchmark dashboard --quick    100 models, 3 days
  scripts/benchmark dashboard --folder DIR    keeps the season there, and opens the one that is there already

`first chart` is the time from the navigation until the chart shows its data, `longest task` the longest time for which
the main thread was blocked, from the navigation until 15 seconds of live updates later, and `of its own` the longest of
these in processor time: on a busy machine the former includes waiting. Exit code 1: a floor is missed.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.bulk import language_models, seed_season
from benchmarks.figures import temporary_folder
from support.chromium import Tab, open_tab
from support.process import ServiceProcess, serving

from trader.composition.external import make_source
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres, database_name
from trader.settings.settings import Settings

TRACED: Final = {"includedCategories": ["toplevel"]}
FIRST_CHART_MS: Final = 1000.0
LONGEST_TASK_MS: Final = 100.0
LOADS: Final = 5
LIVE_S: Final = 15

OBSERVE: Final = """
window.tasks = []
new PerformanceObserver(found => tasks.push(...found.getEntries().map(one => one.duration)))
    .observe({ type: 'longtask', buffered: true })
"""
CHART: Final = "performance.getEntriesByName('curves')[0]?.startTime ?? null"
BARE: Final = """(async () => {
    const began = performance.now()
    const startDate = (await (await fetch('/api/rpc/analytics.getRunInfo', { method: 'POST' })).json()).runStartTime
    const answer = await fetch('/api/rpc/trading.getEquityCurves', { method: 'POST',
        body: JSON.stringify({ startDate, points: 200 }) })
    const size = (await answer.text()).length
    return [performance.now() - began, size]
})()"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 days instead of 30")
    parser.add_argument("--folder", type=Path, help="of the season; default: a temporary one")
    options = parser.parse_args(arguments)
    with temporary_folder() as scratch:
        folder = options.folder or scratch / "season"
        if not folder.exists():
            asyncio.run(seed(folder, 3 if options.quick else 30))
        return asyncio.run(measure(folder, scratch))


async def seed(folder: Path, days: int) -> None:
    """Write the season into the database of a demo in this folder."""
    folder.mkdir(parents=True)
    async with EmbeddedPostgres(folder / EMBEDDED_FOLDER) as server:
        name = database_name(make_source(Settings.load({}, None, demo=True)).identity)
        await seed_season(
            await server.ensure_database(name), days, language_models(100)
        )  # they do not trade without a key


async def measure(folder: Path, scratch: Path) -> int:
    async with serving(folder, "--demo=fresh") as service, open_tab(scratch / "profile", "about:blank#start") as tab:
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=OBSERVE)
        empty = [await load(tab, f"{service.url}/assets/none", "performance.now()") for _ in range(LOADS)]
        bare, size = await tab.evaluate(BARE)
        bare, _ = await tab.evaluate(BARE)
        charts, tasks = [], []
        for number in range(LOADS):
            is_last = number == LOADS - 1
            if is_last:
                await tab.command("Tracing.start", transferMode="ReturnAsStream", traceConfig=TRACED)
            charts.append(await load(tab, f"{service.url}/#/?window=run", CHART))
            await asyncio.sleep(LIVE_S if is_last else 2)
            tasks.append(await tab.evaluate("Math.max(0, ...tasks)"))
        own = longest_of_its_own(await trace(tab))
        wire = await wire_bytes(service)
    print(f"empty page          {median(empty):8.0f} ms")
    print(f"bare answer         {bare:8.0f} ms, {size:,} characters")
    print(f"first chart         {median(charts):8.0f} ms  (at most {FIRST_CHART_MS:.0f}; all: {shown(charts)})")
    print(f"longest task        {max(tasks):8.0f} ms  (at most {LONGEST_TASK_MS:.0f}; all: {shown(tasks)})")
    print(f"    of its own      {own:8.0f} ms of processor time in the last load")
    print(f"page on the wire    {wire:8,} bytes before data")
    return int(median(charts) > FIRST_CHART_MS or max(tasks) > LONGEST_TASK_MS)


def shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


async def load(tab: Tab, url: str, ready: str) -> float:
    """Open an address and return the time until it was ready."""
    await tab.command("Page.navigate", url="about:blank")
    await tab.command("Page.navigate", url=url)
    async with asyncio.timeout(60):
        while (evaluated := await tab.evaluate(f"location.href === 'about:blank' ? null : {ready}")) is None:
            await asyncio.sleep(0.05)
    return float(evaluated)


async def wire_bytes(service: ServiceProcess) -> int:
    """Return the bytes of the page and of every file that it loads, compressed."""
    total, paths = 0, {"/"}
    done: set[str] = set()
    while paths - done:
        path = (paths - done).pop()
        done.add(path)
        headers = {"Accept-Encoding": "gzip"}
        async with service.http.get(service.url + path, headers=headers, auto_decompress=False) as response:
            total += len(await response.read())
        if path == "/":
            async with service.http.get(service.url + path) as response:
                text = await response.text()
            paths |= {part.partition('"')[0] for part in text.split('="')[1:] if part.startswith("/assets/")}
    return total


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


if __name__ == "__main__":
    sys.exit(main())
