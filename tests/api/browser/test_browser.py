"""A browser on another origin against the running service: CORS_ORIGINS as browsers understand it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.chromium import Tab, browsing, chromium_program, open_tab
from support.orpc import installed_packages
from support.process import ServiceProcess, serving
from support.waiting import becomes, until

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
SEEN_WITHIN_S = 60


class Frontend:
    """The server of the frontend's page, reachable as `localhost` and as `127.0.0.1`: two origins to a browser."""

    def __init__(self, packages: Path) -> None:
        self.seen: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_post("/seen", self._take)
        app.router.add_static("/packages", packages, follow_symlinks=True)
        app.router.add_static("/here", HERE)
        self._imports = json.dumps({"imports": dict(imports(packages))})
        self.server = TestServer(app, host="127.0.0.1")

    async def _page(self, _: web.Request) -> web.Response:
        tell = "error => fetch('/seen', { method: 'POST', body: JSON.stringify({ broken: String(error) }) })"
        script = f'<script type="module">import("/here/page.mjs").catch({tell})</script>'
        text = f'<!doctype html><script type="importmap">{self._imports}</script>{script}'
        return web.Response(text=text, content_type="text/html")

    async def _take(self, request: web.Request) -> web.Response:
        self.seen.put_nowait(await request.json())
        return web.Response()

    def origin(self, host: str) -> str:
        return f"http://{host}:{self.server.port}"

    async def visit(self, folder: Path, host: str, service: ServiceProcess) -> dict[str, Any]:
        """Open the page in a browser, and return the results of its steps."""
        address = f"{self.origin(host)}/?service={service.url}"
        async with browsing(folder / host, "--remote-debugging-port=0", address) as browser:
            ended = asyncio.create_task(browser.wait())
            seen = asyncio.create_task(self.seen.get())
            await asyncio.wait([ended, seen], timeout=SEEN_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            assert seen.done(), "the page did not report what it saw"
            return seen.result()


def imports(packages: Path) -> list[tuple[str, str]]:
    """Where a browser finds each module of the packages."""
    entries = []
    for manifest in (*packages.glob("@orpc/*/package.json"), packages / "radash" / "package.json"):
        told = json.loads(manifest.read_text())
        folder = manifest.parent.relative_to(packages)
        exports = told["exports"] if "." in told["exports"] else {".": told["exports"]}
        for name, target in exports.items():
            chosen = target["import"] if isinstance(target, dict) else target
            path = chosen if isinstance(chosen, str) else chosen["default"]
            entries.append((f"{told['name']}{name[1:]}", f"/packages/{folder}/{path.removeprefix('./')}"))
    return entries


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    chromium_program()
    frontend = Frontend(installed_packages())
    await frontend.server.start_server()
    yield frontend
    await frontend.server.close()


async def test_a_listed_origin_works_and_another_is_refused(frontend: Frontend, tmp_path: Path, dsn: str) -> None:
    listed = frontend.origin("localhost")
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0", CORS_ORIGINS=listed) as service:
        await becomes(service.status, 200)  # the schedulers run soon after the start
        assert await frontend.visit(tmp_path, "localhost", service) == {
            "plain": 4,
            "requestId": "string",
            "refusal": "VALIDATION_ERROR",
            "unknown": 404,
            "orpc": 4,
            "orpcError": "NOT_FOUND",
            "batch": 2,
            "positions": 4,
            "positionsWithCredentials": 4,
            "workflow": "connected",
            "health": "healthy",
            "document": "3.1.0",
            "order": "filled",
            "simpleOrder": 200,
            "blindOrder": "opaque",
        }
        account = (await service.call("simulator.getAccount", accountId="localhost"))["account"]
        assert account["positions"][0]["quantity"] == 0.03

        seen = await frontend.visit(tmp_path, "127.0.0.1", service)
        # A browser sends simple requests without a preflight and only hides the answer, so the service refuses them
        # itself.
        assert seen.pop("blindOrder") == "opaque"
        assert {name: kind for name, kind in seen.items() if kind not in {"TypeError", "Error"}} == {}
        account = (await service.call("simulator.getAccount", accountId="127.0.0.1"))["account"]
        assert (account["runId"], account["positions"]) == (None, [])
        assert service.traceback() == ""


TRY = """(async () => {
    const trial = document.querySelector('.try[data-path$="variants.getVariants"]')
    trial.open = true
    trial.querySelector('button').click()
    const shown = trial.querySelector('pre')
    while (!/^\\d+ in/.test(shown.textContent)) await new Promise(resolve => setTimeout(resolve, 20))
    return Number(shown.textContent.split(' ')[0])
})()"""


async def check_reference(tab: Tab, document: dict[str, Any]) -> None:
    """The page shows the whole document: each operation, field and error, and no Markdown is left."""
    words = " ".join((await tab.evaluate("document.body.textContent")).split())
    for path, methods in document["paths"].items():
        (operation,) = methods.values()
        assert path in words
        for text in (operation["summary"], operation.get("description", "")):
            assert " ".join(text.replace("`", "").split()) in words, path
    fields = {field for schema in document["components"]["schemas"].values() for field in schema.get("properties", ())}
    names = await tab.evaluate("[...document.querySelectorAll('td.name')].map(cell => cell.textContent)")
    assert fields - {"error", "code", "issues", "path", "message"} <= set(names)
    told = await tab.evaluate("document.querySelector('.introduction').textContent")
    assert not re.search(r"`|^## |^- |\|", told, re.MULTILINE)
    codes = await tab.evaluate("[...document.querySelectorAll('.introduction td code')].map(code => code.textContent)")
    assert document["components"]["responses"].keys() <= set(codes)
    ids = await tab.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(set(ids)) == len(ids)
    anchors = "[...document.querySelectorAll('a[href^=\"#\"]')].map(link => link.hash.slice(1))"
    assert set(await tab.evaluate(anchors)) <= set(ids)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_reference_page_is_searchable_and_shown_in_both_schemes(
    service: ServiceProcess, tmp_path: Path
) -> None:
    chromium_program()
    shown = "[...document.querySelectorAll('article')].filter(one => one.offsetParent).map(one => one.id)"
    search = """(words => {
        const input = document.querySelector('input[type=search]')
        input.value = words
        input.dispatchEvent(new Event('input'))
    })"""
    ground = "getComputedStyle(document.body).backgroundColor"
    _, document = await service.get("/api/openapi.json")
    async with open_tab(tmp_path / "profile", f"{service.url}/api/docs") as tab:
        await until(lambda: tab.evaluate("document.querySelectorAll('.try .button').length"))
        await check_reference(tab, document)
        assert len(await tab.evaluate(shown)) == len(document["paths"])
        await tab.evaluate(f"{search}('order simulator')")
        evaluated = await tab.evaluate(shown)
        assert {"simulator.placeOrder", "simulator.cancelOrder"} <= set(evaluated)
        assert "variants.getVariants" not in evaluated
        await tab.evaluate(f"{search}('liquidationprice')")
        assert {"trading.getPositions", "positions"} & set(await tab.evaluate(shown)), "fields are found too"
        await tab.evaluate(f"{search}('')")
        assert await tab.evaluate(TRY) == 200
        assert await tab.evaluate("document.querySelectorAll('pre .copy').length") > 0
        assert len(await tab.evaluate(shown)) == len(document["paths"])
        colours = {}
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.command("Emulation.setEmulatedMedia", features=features)
            colours[scheme] = await tab.evaluate(ground)
        assert colours == {"light": "rgb(247, 248, 250)", "dark": "rgb(11, 13, 16)"}
        await tab.command("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert await tab.evaluate(wider) is False
        assert tab.problems == []
    assert service.traceback() == ""
