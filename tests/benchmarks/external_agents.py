"""External agents and dashboards together: how fast views are answered, and whether the schedulers are punctual.

    scripts/benchmark external_agents [--agents 100] [--dashboards 50] [--seconds 180]

A demo with its rule agents in a separate process. Every external agent decides once a minute, each at a different time
within the minute: `getView`, an order, `hold`. Every dashboard follows the streams of the page. The measurement starts
with the second minute, because an agent's first view creates its entrant, and a service's first views compute the
indicators. The delay of the models' decisions counts from the full minute. The reference is a bare aiohttp application
that answers the same requests with the bytes of a view, without dashboards.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web
from benchmarks.figures import Figures, temporary_folder
from support.process import ServiceProcess, serving

from trader.agents.domain.models import CYCLE, EXTERNAL
from trader.agents.models_file import ModelEntry
from trader.commands.models_seed import Opening, create_models
from trader.core.clock import SystemClock, floor_time
from trader.core.ownership import EMBEDDED_FOLDER
from trader.core.variant_id import VariantId
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.operations.access import issue
from trader.operations.domain.credentials import AGENT_MARK
from trader.operations.sql.credentials import insert_credential

VIEW_MS_MAX: Final = 50.0
LATE_MS_MAX: Final = 1_000.0
MINUTE_S: Final = 60.0
STREAMS: Final = "positions,trades,conversations,portfolio,workflow"


async def add_agents(folder: Path, count: int) -> list[str]:
    """Add external agents to the demo's database. Return their keys."""
    now, keys = SystemClock().now(), []
    names = [f"agent-{number:03}" for number in range(count)]
    entries = [ModelEntry(id=name, variant=VariantId.APEX, provider=EXTERNAL, router_model=EXTERNAL) for name in names]
    async with EmbeddedPostgres(folder / EMBEDDED_FOLDER).attach() as server:
        database = await Database.connect(server.dsn((await server.databases())[0]), size=1)
        async with database.transaction() as conn:
            await create_models(conn, entries, now, Opening(Decimal(10_000), "USD", 10_000, is_live=False))
            for name in names:
                key, credential = issue(
                    AGENT_MARK,
                    name,
                    now,
                    ("read", "trade"),
                    account_id=name,
                    requests_per_minute=120,
                    decisions_per_minute=2,
                )
                await insert_credential(conn, credential)
                keys.append(key)
        await database.close()
    return keys


class Callers:
    """External agents at one address, and the durations of their views in ms: each agent's first, and all others."""

    def __init__(self, http: aiohttp.ClientSession, url: str, keys: list[str]) -> None:
        self._http = http
        self._url = url
        self._keys = keys
        self.first_view_ms: list[float] = []
        self.view_ms: list[float] = []
        self.view = b""
        self.decisions = 0

    async def run(self, seconds: float) -> None:
        """Let every agent decide once a minute for this long."""
        began_s = time.monotonic()
        apart_s = MINUTE_S / len(self._keys)
        agents = [
            self._decide(key, began_s + number * apart_s, began_s + seconds) for number, key in enumerate(self._keys)
        ]
        await asyncio.gather(*agents)

    async def _decide(self, key: str, at_s: float, until_s: float) -> None:
        number = 0
        while at_s < until_s:
            await asyncio.sleep(at_s - time.monotonic())
            sent_s = time.perf_counter()
            self.view = await self._call(key, "getView", {})
            times_ms = self.view_ms if number else self.first_view_ms
            times_ms.append((time.perf_counter() - sent_s) * 1000)
            shown = orjson.loads(self.view)
            order: dict[str, Any] = {"clientOrderId": str(number), "symbol": "BTC", "quantity": 0.001}
            order |= {"side": "sell", "reduceOnly": True} if number % 2 else {"side": "buy", "exitPlan": {"stop": 1}}
            await self._call(key, "placeOrder", {"viewId": shown["viewId"], **order})
            await self._call(key, "hold", {"viewId": shown["viewId"], "reason": "traded"})
            self.decisions += 1
            number, at_s = number + 1, at_s + MINUTE_S

    async def _call(self, key: str, name: str, request: dict[str, Any]) -> bytes:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self._url}/api/rpc/agent.{name}"
        async with self._http.post(url, data=orjson.dumps(request), headers=headers) as response:
            body = await response.read()
            assert response.status == 200, body
            return body


@asynccontextmanager
async def dashboards(http: aiohttp.ClientSession, url: str, count: int) -> AsyncIterator[None]:
    """Follow the streams of the page this many times, for the duration of the block."""

    async def follow() -> None:
        async with http.get(f"{url}/api/events?streams={STREAMS}") as response:
            assert response.status == 200, response.status
            async for _ in response.content.iter_any():
                pass
        raise AssertionError("the service ended the stream of a dashboard")

    tasks = [asyncio.create_task(follow()) for _ in range(count)]
    yield
    assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def serve_bare() -> None:
    """Serve the bytes of standard input until this process ends. Prints its address."""
    view = sys.stdin.buffer.read()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=view, content_type="application/json")

    app = web.Application()
    app.router.add_post("/api/rpc/{name}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def bare_application(view: bytes) -> AsyncIterator[str]:
    pipe = asyncio.subprocess.PIPE
    command = sys.executable, "-P", "-m", __spec__.name, "--bare"
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(view)
    process.stdin.write_eof()
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def measure(agents: int, dashboard_count: int, seconds: float) -> int:
    figures = Figures()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        service = await stack.enter_async_context(serving(folder, SIM_MAX_ACCOUNTS="10000"))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        keys = await add_agents(folder, agents)
        before = await _schedulers(service)
        load = os.getloadavg()[0]
        async with dashboards(http, service.url, dashboard_count):
            ours = Callers(http, service.url, keys)
            await ours.run(seconds)
        after = await _schedulers(service)
        late_ms = await _decided_late_ms(service)
        async with bare_application(ours.view) as url:
            bare = Callers(http, url, keys)
            await bare.run(min(seconds, 2 * MINUTE_S))
    print(
        f"{ours.decisions} decisions of {agents} agents next to {dashboard_count} dashboards; load {load:.1f} at first"
    )
    for what, share in (("median", 50), ("p99", 99)):
        (least, most) = (statistics.quantiles(each.view_ms, n=100)[share - 1] for each in (bare, ours))
        at_most = VIEW_MS_MAX if share == 99 else None
        figures.show(f"getView, {what}", most, "ms", reference=("bare application", least), at_most=at_most)
    figures.show("getView, the first of an agent, median", statistics.median(ours.first_view_ms), "ms")
    figures.show("decisions of models after the minute, at most", max(late_ms), "ms", at_most=LATE_MS_MAX)
    for name, (skipped, failures) in after.items():
        count = skipped + failures - sum(before[name])
        figures.show(f"{name}: runs that were skipped or failed", count, "", at_most=0)
    return figures.exit_code


async def _schedulers(service: ServiceProcess) -> dict[str, tuple[int, int]]:
    """Return the numbers of skipped and failed runs of each scheduler."""
    _, report = await service.get("/health/schedulers")
    return {name: (each["skipped"], each["failures"]) for name, each in report["schedulers"].items()}


async def _decided_late_ms(service: ServiceProcess) -> list[float]:
    """Return how long after the full minute each decision of a rule agent began, except at startup."""
    late_ms = []
    for variant in VariantId:
        answer = await service.call("models.getInvocations", modelId=f"{variant.lower()}-rules")
        started = [datetime.fromisoformat(each["timestamp"]) for each in answer["conversations"]]
        late_ms += [(at - floor_time(at, CYCLE)).total_seconds() * 1000 for at in sorted(started)[1:]]
    return late_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--dashboards", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        asyncio.run(serve_bare())
    return asyncio.run(measure(options.agents, options.dashboards, options.seconds))


if __name__ == "__main__":
    sys.exit(main())
