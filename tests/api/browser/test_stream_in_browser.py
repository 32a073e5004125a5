"""The combined stream in a real browser: its EventSource over a breaking connection, and the tabs of one origin."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import resources
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from support.chromium import open_tab
from support.manual_clock import ManualClock
from support.records import START
from support.served import Client, make_stream_app, served
from support.sse import workflow_step
from support.waiting import becomes

from trader.api import streams
from trader.api.broadcast import EVENTS_MAX
from trader.core.events import EventBus
from trader.settings.settings import Settings

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
MODULE = Path(str(resources.files("trader.api.dashboard") / "static"))
CUTS = int(os.environ.get("STREAM_CUTS", "100"))
PATIENCE_S = 60
CUT_S = 0.5
STEPS_AT_ONCE = 50
BEHIND_MAX = EVENTS_MAX // 2
"""Steps by which a reader may be behind: a cut connection carries little, and what left the ring is a reset."""


class Service:
    """A page, the streams, and a procedure to call."""

    def __init__(self) -> None:
        self.positions = 0
        self.steps = 0
        self._random = Random(2)
        self.events = EventBus()
        loads = dict.fromkeys(("positions", "trades", "conversations", "portfolio", "candles"), self._load)
        self.broadcasters = streams.Broadcasters(loads, self.events, ManualClock(START))

    def make_app(self, origins: str) -> web.Application:
        routes = [web.get("/page", self._page), web.get("/empty", self._empty), web.post("/call", self._call)]
        for name, folder in (("module", MODULE), ("here", HERE)):
            routes.append(web.get(f"/{name}/{{path:.*}}", partial(self._file, folder)))
        settings = Settings.load({"PORT": "0", "CORS_ORIGINS": origins}, None, demo=True)
        return make_stream_app(self.broadcasters, streams.Timing(watch_s=0.05, retry_ms=1), routes, settings)

    async def _load(self) -> bytes:
        return b'[{"modelId":"a","pnl":%d},{"modelId":"b","pnl":"%b"}]' % (self.positions, b"7" * 300)

    async def _file(self, folder: Path, request: web.Request) -> web.Response:
        file = folder / request.match_info["path"]
        return web.Response(body=file.read_bytes(), content_type="text/javascript")

    async def _page(self, _: web.Request) -> web.Response:
        text = '<!doctype html><link rel="icon" href="data:,"><script type="module" src="/here/stream.mjs"></script>'
        return web.Response(text=text, content_type="text/html")

    async def _empty(self, _: web.Request) -> web.Response:
        return web.Response(text="<!doctype html>", content_type="text/html")

    async def _call(self, _: web.Request) -> web.Response:
        return web.json_response({})

    def step(self) -> None:
        self.steps += 1
        text = self._random.randbytes(150).hex()  # as long, once compressed, as the text of a model
        self.events.publish(workflow_step(START, self.steps, text))

    def move(self) -> None:
        self.positions += 1
        self.broadcasters.states["positions"].changed()


@asynccontextmanager
async def serving(origins: str = "") -> AsyncIterator[tuple[Service, Client]]:
    service = Service()
    async with served(service.make_app(origins)) as client:
        yield service, client


class Scissors:
    """A proxy that, while `cutting`, ends each connection after a random number of bytes of the response."""

    def __init__(self) -> None:
        self.port = 0
        """Where the service is."""

        self._random = Random(1)
        self.cutting = False
        self.cuts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return
        requests = asyncio.create_task(self._pass(reader, ours))
        try:
            with suppress(OSError):
                await self._pass_some(theirs, writer)
        finally:
            requests.cancel()
            ours.transport.abort()
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)

    async def _pass_some(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not within the head of the response: a browser takes a partial head for a complete one, which is not a stream.
        allowance = self._random.randrange(450, 1200)
        while data := await reader.read(allowance if self.cutting else 65536):
            writer.write(data)
            await writer.drain()
            allowance = max(1, allowance - len(data))
            if self.cutting and allowance == 1:
                self.cuts += 1
                return


async def test_cuts_neither_lose_nor_duplicate_an_event(tmp_path: Path) -> None:
    scissors = Scissors()
    proxy = await asyncio.start_server(scissors.serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    async with proxy, serving(origin) as (service, client):
        scissors.port = client.port
        async with open_tab(tmp_path, f"{origin}/page") as tab:
            await tab.evaluate("plain('/api/events?streams=positions,workflow'); 0")
            await tab.until("tab.states.includes('open') && seen.opened")
            scissors.cutting = True
            async with asyncio.timeout(PATIENCE_S + CUTS * CUT_S):
                while scissors.cuts < CUTS:
                    service.step()
                    if not service.steps % 7:
                        service.move()
                    if not service.steps % STEPS_AT_ONCE:
                        await tab.until(
                            f"{service.steps} - Math.min(seen.steps.length, tab.steps.length) < {BEHIND_MAX}",
                            within_s=CUTS * CUT_S,
                        )
                    await asyncio.sleep(0.01)  # a hundred steps a second
            scissors.cutting = False
            service.step()
            service.move()
            for seen in ("seen", "tab"):
                await tab.until(f"{seen}.steps.at(-1) === {service.steps}")
                assert await tab.evaluate(f"[{seen}.resets, {seen}.steps.length]") == [0, service.steps]
                assert await tab.evaluate(f"{seen}.steps.every((step, index) => step === index + 1)")
            await tab.until(f"tab.positions[0].pnl === {service.positions}")


async def test_five_tabs_share_a_connection_and_procedures_answer_at_once(tmp_path: Path) -> None:
    async with serving() as (service, client), open_tab(tmp_path, str(client.make_url("/page"))) as first:
        address = str(client.make_url("/page"))
        others = [await first.open_another(address) for _ in range(4)]
        for tab in (first, *others):
            await tab.until("tab.positions !== null && tab.states.includes('open')")
        assert len(service.broadcasters.states["positions"]) == len(service.broadcasters.workflow) == 1
        call = "fetch('/call', { method: 'POST' }).then(answer => answer.status)"
        assert await asyncio.gather(*(tab.evaluate(call) for tab in (first, *others))) == [200] * 5

        # The tab with the connection is closed; the next one continues where it ended.
        for _ in range(3):
            service.step()
        await others[-1].until("tab.steps.length === 3")
        await first.command("Page.navigate", url="about:blank")
        for _ in range(3):
            service.step()
        service.move()
        for tab in others:
            await tab.until(f"tab.steps.length === 6 && tab.positions[0].pnl === {service.positions}")
            assert await tab.evaluate("[tab.steps.join(), tab.resets]") == ["1,2,3,4,5,6", 0]
        await becomes(lambda: len(service.broadcasters.states["positions"]), 1)  # a closed one is noticed in a moment


async def test_five_tabs_of_other_pages_leave_a_connection_for_procedures(tmp_path: Path) -> None:
    async with serving() as (service, client), open_tab(tmp_path, str(client.make_url("/empty"))) as first:
        others = [await first.open_another(str(client.make_url("/empty"))) for _ in range(4)]
        for tab in (first, *others):
            await tab.evaluate("globalThis.source = new EventSource('/api/events'); 0")
        for tab in (first, *others):
            await tab.until("source.readyState === 1")
        assert len(service.broadcasters.workflow) == 5
        call = "fetch('/call', { method: 'POST' }).then(answer => answer.status)"
        assert [await tab.evaluate(call) for tab in (first, *others)] == [200] * 5
