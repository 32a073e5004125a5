"""The dashboard in a real browser: it shows the procedures' answers live, across restarts, and as text."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.chromium import Tab, chromium_program
from support.dashboard import KEEP_FILES, check_jumps, gone, on_page, shows, visit
from support.orpc import installed_packages
from support.process import ServiceProcess, serving
from support.run_profile import is_nightly
from support.waiting import turns, until


class TcpForwarder:
    """Forwards connections to the address last set, and counts bytes sent to callers; `to` drops open ones."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.bytes_back = 0

    def to(self, url: str | None) -> None:
        """Forward to this address from now on; None refuses."""
        parts = urlsplit(url or "")
        self._target = (parts.hostname or "", parts.port or 0) if url else None
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            if self._target is not None:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                ends.add(far_writer)
                self._writers |= ends
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer, self._count))
        except OSError:
            pass  # the target is unreachable, so the caller is dropped
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    def _count(self, size: int) -> None:
        self.bytes_back += size


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None] = lambda _: None
) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            count(len(data))
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def forwarding() -> AsyncIterator[TcpForwarder]:
    switch = TcpForwarder()
    server = await asyncio.start_server(switch.serve, "127.0.0.1", 0)
    switch.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield switch
    finally:
        server.close()
        switch.to(None)
        await turns(1)  # closes the connections


async def choose_moment(tab: Tab, label: str, minute: str) -> None:
    """Enter a minute in one of the fields of the range."""
    chosen = f"""(() => {{
        const field = [...document.querySelectorAll('.moment')].find(one => one.innerText.startsWith('{label}')).control
        field.value = '{minute}'
        field.dispatchEvent(new Event('change', {{ bubbles: true }}))
    }})()"""
    await tab.evaluate(chosen)


pytestmark = pytest.mark.processes

HOSTILE = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>${window.pwned=1}' " & </td>"""

ADD_MODEL = """
INSERT INTO models (id, name, variant, provider, router_model_name, active, created_at)
VALUES ($1, $2, $3, 'openrouter', $4, false, $5)
"""
ADD_MODEL_WITH_BUDGET = """
INSERT INTO models (id, name, variant, provider, router_model_name, created_at, configuration)
VALUES ($1, $1, 'Apex', 'openrouter', 'some/model', $2, $3)
"""
ADD_COST = """
INSERT INTO invocations (id, model_id, status, started_at, finished_at, cost_usd)
VALUES ($1, $2, 'completed', $3, $3, $4)
"""
ADD_INVOCATION = """
INSERT INTO invocations
    (id, model_id, status, started_at, finished_at, response, step_count, input_tokens, output_tokens)
VALUES ($1, $2, 'completed', $3, $3, $4, 1, 10, 10)
"""
ADD_CALL = """
INSERT INTO tool_calls (id, invocation_id, number, type, status, metadata, created_at)
VALUES ($1, $2, 1, 'CREATE_POSITION', 'rejected', $3, $4)
"""


ADD_DRIFT = """
INSERT INTO shadow_drift (account_id, symbol, side, quantity, paper_price, drift_bps, signed, sent_at)
VALUES ('hostile', $1, 'sell', 1, 2000, 7.25, 'hash', $2)
"""


async def add_hostile_model(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    at, invocation = datetime.now(UTC) - timedelta(minutes=1), uuid4()
    metadata = {
        "raw": {"name": HOSTILE, "arguments": HOSTILE},
        "decisions": [{"symbol": HOSTILE, "side": HOSTILE, "quantity": 1}],
        "results": [{"rule": HOSTILE, "reason": HOSTILE}],
    }
    try:
        await conn.execute(ADD_MODEL, "hostile", HOSTILE, "Apex", HOSTILE, at)
        await conn.execute(ADD_INVOCATION, invocation, "hostile", at, HOSTILE)
        await conn.execute(ADD_CALL, UUID(int=1), invocation, json.dumps(metadata), at)
        await conn.execute(ADD_DRIFT, HOSTILE, at)
    finally:
        await conn.close()


async def trade(service: ServiceProcess, account: str, symbol: str = "BTC") -> None:
    for side in ("buy", "sell"):
        request = {"accountId": account, "symbol": symbol, "side": side, "quantity": 0.05, "reduceOnly": side == "sell"}
        order = (await service.call("simulator.placeOrder", **request))["order"]
        assert order["status"] == "filled", order


async def test_figures_equal_the_procedures_and_hostile_texts_do_nothing(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        await add_hostile_model(dsn)
        await trade(service, "by-hand")
        await trade(service, "apex-rules", "ETH")
        async with on_page(tmp_path / "profile", service.url, "/#/models") as tab:
            for path in ("/#/conversations", "/#/models/hostile", "/#/models", "/#/trades"):
                await visit(tab, service.url, path)
                if path != "/#/trades":
                    await shows(tab, '<img src=x onerror="window.pwned=1">')
                await tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
                assert await tab.evaluate("typeof window.pwned") == "undefined"
                others = "document.querySelectorAll('#app img:not(.brand > img), #app script').length"
                assert await tab.evaluate(others) == 0
            leads = "document.querySelector('section[aria-label=Trades] tbody a')"
            await until(lambda: tab.evaluate(f"{leads} !== null"), "the trades")
            await tab.evaluate(f"{leads}.click()")
            await shows_a_trade_and_its_market(tab, service)
            assert tab.problems == []
            await check_the_operator(tab, service)
            for path, text in (("trades/x", "There is no such trade"), ("markets/NONE", "is not traded here")):
                await tab.evaluate(f"location.hash = '#/{path}'")
                await shows(tab, text)
        assert service.traceback() == ""


async def check_the_operator(tab: Tab, service: ServiceProcess) -> None:
    """Without a token nothing is shown or asked for; with one, halts are given and lifted, and figures are right."""
    asks = "Object.keys(answers).filter(key => key.startsWith('operations.')).length"
    panel = "section[aria-label='Halt and resume']"
    press = f"[...document.querySelectorAll(\"{panel} button\")].find(one => one.innerText === '%s').click()"
    await visit(tab, service.url, "/#/system")
    await shows(tab, "Schedulers")
    assert await tab.evaluate(f'[document.querySelectorAll("{panel}").length, {asks}]') == [0, 0]
    await tab.evaluate("location.hash = '#/operator'")
    field = "document.querySelector('input[type=password]')"
    await until(lambda: tab.evaluate(f"{field} !== null"), "the field")
    enter = """(field => {
        field.value = 'secret'
        field.dispatchEvent(new Event('input', { bubbles: true }))
        setTimeout(() => field.form.requestSubmit(), 100)
    })"""
    await tab.evaluate(f"{enter}({field})")
    await shows(tab, "Nothing is halted.")
    for verb, said, count in (("Halt", "Halted all accounts:", 1), ("Resume", "Lifted the halt of all accounts", 0)):
        await tab.evaluate(press % verb)
        await shows(tab, f"{verb} all accounts?")
        await tab.evaluate(press % f"Yes, {verb.lower()}")
        await shows(tab, said)
        assert len((await service.get("/health"))[1].get("halts", [])) == count
        await shows(tab, "operator: requested by an operator")
        await until(partial(tab.evaluate, f'document.querySelectorAll("{panel} .button").length === {3 + count}'))
    await tab.evaluate(press % "Flatten")
    await shows(tab, "Type flatten to confirm")
    confirm = f"[...document.querySelectorAll(\"{panel} button\")].find(one => one.innerText === 'Yes, flatten')"
    assert await tab.evaluate(f"{confirm}.disabled")
    word = "document.querySelector('[role=alertdialog] input')"
    await tab.evaluate(f"({word}.value = 'flatten', {word}.dispatchEvent(new Event('input', {{ bubbles: true }})), 0)")
    await until(partial(tab.evaluate, f"!{confirm}.disabled"), "the typed confirmation")
    await tab.evaluate(f"{confirm}.click()")
    await shows(tab, "Orders are being canceled and positions closed.")
    await until(partial(tab.evaluate, f'document.querySelectorAll("{panel} .button").length === 4'), "the halt")
    await tab.evaluate(press % "Resume")
    await tab.evaluate(f"setTimeout(() => {{ {press % 'Yes, resume'} }}, 200)")
    await shows(tab, "Lifted the halt of all accounts")
    activity = await service.call("operations.getActivity")
    assert activity["halts"][0]["haltedBy"] == "an operator on the dashboard"
    shown = """[
        answers[Object.keys(answers).find(key => key.startsWith('operations.getActivity'))],
        ...['Refusals by rule', 'Failures and latency'].map(title =>
            [...document.querySelectorAll(`section[aria-label="${title}, seven days"] tbody tr`)].map(row =>
                [...row.cells].map(cell => cell.innerText)))]"""

    async def agree() -> bool:
        """Return whether both tables show the figures of the last answer that the page received."""
        answer, refusals, latencies = await tab.evaluate(shown)
        return refusals == [[one["rule"], str(one["calls"]), str(one["models"])] for one in answer["refusals"]] and [
            row[1] for row in latencies
        ] == [f"{one['invocations']:,}" for one in answer["models"]]

    await until(agree, "the figures")
    drift = "document.querySelectorAll('section[aria-label^=\"Paper against the venue\"] tbody tr')"
    cells = await tab.evaluate(f"[...{drift}].map(row => [...row.cells].map(cell => cell.innerText))")
    errors = ["1", "+7.25", "+7.25", "7.25", "+7.25"]
    assert cells == [
        ["shadow", HOSTILE, "sell", "1k to 10k", "0.3 to 1 s", *errors], ["shadow", "all", "", "", "", *errors]
    ]  # fmt: skip
    assert {"rule": HOSTILE, "calls": 1, "models": 1} in activity["refusals"]
    assert await tab.evaluate("typeof window.pwned") == "undefined"
    await tab.evaluate(press % "Forget the token")
    await until(lambda: tab.evaluate("location.hash === '#/'"), "the way out")
    await tab.evaluate("location.hash = '#/system'")
    await shows(tab, "Schedulers")
    assert await tab.evaluate(f'document.querySelectorAll("{panel}").length') == 0


async def shows_a_trade_and_its_market(tab: Tab, service: ServiceProcess) -> None:
    """The page of a trade draws its candles; its market's page draws them live, with the marks of all trades."""
    drawn = "performance.getEntriesByName('candles').length > 0"
    await until(lambda: tab.evaluate(drawn), "the candles of the trade")
    await shows(tab, "Plan and outcome")
    trade_id = (await tab.evaluate("location.hash")).removeprefix("#/trades/")
    trade = (await service.call("trading.getTrade", id=trade_id))["trade"]
    figures = f"""(() => {{
        const {{ trade }} = window.answers['trading.getTrade {{"id":"{trade_id}"}}']
        return [trade.netPnl, trade.fills.length]
    }})()"""
    assert await tab.evaluate(figures) == [trade["netPnl"], len(trade["fills"])]
    rows = "document.querySelectorAll('section[aria-label=Fills] tbody tr').length"
    assert await tab.evaluate(rows) == len(trade["fills"]) > 1
    trades = (await service.call("trading.getTrades", symbol=trade["symbol"]))["trades"]
    await tab.evaluate("performance.clearMarks(); document.querySelector('.title h1 a:last-child').click()")
    await until(lambda: tab.evaluate(drawn), "the candles of the market")
    labels = "document.querySelector('.candles').getAttribute('aria-label')"
    await until(lambda: tab.evaluate(f"Number({labels}.match(/with (\\d+)/)[1]) >= {2 * len(trades)}"), "its marks")
    ink = """(() => [...document.querySelectorAll('.candles canvas')].some(canvas => {
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true })
        copy.drawImage(canvas, 0, 0)
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height)
        return new Set(new Uint32Array(data.buffer)).size > 5
    }))()"""
    await until(lambda: tab.evaluate(ink), "candles are drawn")
    price = "document.querySelector('.title b').innerText"
    first = await tab.evaluate(price)
    await until(lambda: tab.evaluate(f"{price} !== {json.dumps(first)}"), "the running candle")


async def test_the_budget_of_a_model_is_on_its_page(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    conn, now = await asyncpg.connect(dsn), datetime.now(UTC)
    spenders: dict[str, tuple[dict[str, Any], str, list[str]]] = {
        "paused": ({"budget_usd_per_day": 0.5}, "of 0.50 a day", ["budget spent: paused"]),
        "managing": (
            {"budget_usd_per_day": 5, "when_spent": "manage", "manage_usd_per_day": 4.5},
            "of 5.00 a day",
            ["budget spent: only reduces"],
        ),
        "trading": ({"budget_usd_per_day": 500}, "of 500.00 a day", []),
    }
    try:
        for name, (budget, _, _) in spenders.items():
            configuration = json.dumps({"when_spent": "pause", "every": "24h"} | budget)
            await conn.execute(ADD_MODEL_WITH_BUDGET, name, now, configuration)
            await conn.execute(ADD_COST, uuid4(), name, now, Decimal("0.75"))
    finally:
        await conn.close()
    async with (
        serving(tmp_path, DATABASE_URL=dsn) as service,
        on_page(tmp_path / "profile", service.url) as tab,
    ):
        for name, (_, tile, badges) in spenders.items():
            await visit(tab, service.url, f"/#/models/{name}")
            await shows(tab, "Model cost today, USD")
            await shows(tab, tile)
            text = "[...document.querySelectorAll('.tile')].find(one => one.innerText.includes('today')).innerText"
            assert (await tab.evaluate(text)).split("\n") == ["Model cost today, USD", "0.75", tile]
            shown = "[...document.querySelectorAll('.title .badge.warn')].map(one => one.innerText)"
            assert await tab.evaluate(shown) == badges
        assert tab.problems == []


async def test_evidence_is_in_words_and_a_new_service_shows_its_whole_run(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    async with (
        serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service,
        on_page(tmp_path / "profile", service.url, "/#/models/apex-rules") as tab,
    ):
        await until(lambda: tab.evaluate("document.querySelectorAll('.differences li').length === 4"), "evidence")
        pressed = """[...document.querySelectorAll('[aria-label="Window"] [aria-pressed=true]')]"""
        assert await tab.evaluate(f"{pressed}.map(one => one.innerText)") == ["Run"]
        asked = 'analytics.getEvidence {"window":"run","modelId":"apex-rules"}'
        shows_reasons = f"""(() => {{
            const shown = [...document.querySelectorAll('.differences li')].map(one => one.innerText)
            const reasons = window.answers[{json.dumps(asked)}].entrants[0].differences.map(one => one.reason)
            return shown.every((text, number) => text.includes(`Not distinguishable yet: ${{reasons[number]}}.`))
        }})()"""
        await until(lambda: tab.evaluate(shows_reasons), "the reasons of the last answer")
        await shows(tab, "Leverage by volatility")
        await visit(tab, service.url, "/#/models?window=nothing")
        await shows(tab, "No entrant can be called the best.")
        assert tab.problems == []


ORDER_SEEN_MS = """(async account => {
    const rows = () => [...document.querySelectorAll('section[aria-label="Positions"] tbody tr')]
    const row = () => rows().some(one => one.innerText.includes(account))
    const answer = await fetch('/api/rpc/simulator.placeOrder', { method: 'POST',
        body: JSON.stringify({ accountId: account, symbol: 'BTC', side: 'buy', quantity: 0.01 }) })
    const { order } = await answer.json()
    if (order.status !== 'filled') return order.reason
    const began = performance.now()
    while (!row() && performance.now() - began < 10_000) await new Promise(resolve => setTimeout(resolve, 10))
    return performance.now() - began
})"""


LISTEN = """
window.spoken = []
for (const region of document.querySelectorAll('[role=alert], [role=status], [aria-live]')) {
    new MutationObserver(() => spoken.push(region.innerText))
        .observe(region, { subtree: true, childList: true, characterData: true })
}
"""


ANSWER_LATE = """
const late = { getModelStats: 100, getTrades: 200, getInvocations: 400, getEquityCurves: 600, getLeaderboard: 800,
  getModels: 500 }
const answered = window.fetch
window.fetch = async (path, init) => {
  const answer = await answered(path, init)
  await new Promise(done => setTimeout(done, late[String(path).split('.').at(-1)] ?? 0))
  return answer
}
"""
"""Delays the answers that the tops of pages show the most."""

CURRENT_IS_SEEN = """(() => {
    const { left, right } = document.querySelector('nav [aria-current]').getBoundingClientRect()
    return document.title.includes('System') && left >= 0 && right <= innerWidth
})()"""


async def test_an_order_is_on_the_page_within_a_second(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    async with (
        serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service,
        on_page(tmp_path / "profile", service.url) as tab,
    ):
        await tab.command(
            "Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False
        )
        await visit(tab, service.url, "/#/?tab=positions")
        await tab.evaluate(LISTEN)
        data_at = "document.querySelector('.status > span:last-child').innerText"
        first = await tab.evaluate(data_at)
        times = [await tab.evaluate(f"{ORDER_SEEN_MS}('by-hand-{number}')") for number in range(3)]
        assert min(times) <= 1000, times
        await until(lambda: tab.evaluate(f"{data_at} !== {json.dumps(first)}"), "the next values of all models")
        assert await tab.evaluate("spoken") == [], "live regions say what is wrong, and not what changes all the time"
        await check_jumps(tab)
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=ANSWER_LATE)
        for width, height in ((1440, 900), (390, 844)):
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < height}
            await tab.command("Emulation.setDeviceMetricsOverride", **size)
            await visit(tab, service.url, "/#/?tab=chat")
            await tab.until("Boolean(document.querySelector('.lead') && document.querySelector('.feed'))")
            await gone(tab, "Reading …")
            await check_jumps(tab)
        for path in ("conversations", "models", "models/apex-rules", "positions"):
            await visit(tab, service.url, f"/#/{path}")
            await gone(tab, "Reading …")
            await check_jumps(tab)
        await tab.evaluate("location.hash = '#/system'")
        await tab.until(CURRENT_IS_SEEN)


async def test_the_page_survives_a_takeover_and_a_restart(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    async with forwarding() as switch:
        shared = {"DATABASE_URL": dsn, "SIM_LATENCY_MS": "0", "SERVER_URL": switch.url}
        async with serving(tmp_path, **shared) as first, serving(tmp_path, **shared) as second:
            switch.to(first.url)
            async with on_page(tmp_path / "profile", switch.url, "/#/?tab=positions") as tab:
                await until(lambda: order_is_shown(tab, first, "before"))  # it has received data from the service
                await first.kill()
                switch.to(None)
                await shows(tab, "The connection to the service is lost. What you see is as of")
                switch.to(second.url)
                await gone(tab, "The connection to the service is lost")
                await until(lambda: order_is_shown(tab, second, "after-takeover"))
                assert await second.stop() == 0
                switch.to(None)
                await shows(tab, "The connection to the service is lost")
                async with serving(tmp_path, **shared) as third:
                    switch.to(third.url)
                    await gone(tab, "The connection to the service is lost")
                    await until(lambda: order_is_shown(tab, third, "after-restart"))


async def order_is_shown(tab: Tab, service: ServiceProcess, account: str) -> bool:
    order: dict[str, Any] = {"symbol": "BTC", "side": "buy", "quantity": 0.01}
    request = {"accountId": account, "clientOrderId": "one", **order}
    status, answer = await service.try_call("simulator.placeOrder", **request)
    if status != 200 or answer["order"]["status"] != "filled":
        return False
    await shows(tab, account)
    return True


BEFORE = "document.querySelector('main > :last-child')"
"""The content of a page, which leaves the document with the page."""

AXE = """axe.run(document, { resultTypes: ['violations'] }).then(found => found.violations
    .filter(one => one.impact === 'serious' || one.impact === 'critical')
    .map(one => `${one.id}: ${one.help}: ${one.nodes.slice(0, 3).map(node => node.html).join(' | ')}`))"""


SMALL_TARGETS = """[...document.querySelectorAll('a, button, select, input, summary')]
    .filter(each => !each.closest('p') && !each.matches('.visually-hidden'))
    .filter(each => each.checkVisibility({ contentVisibilityAuto: true }))
    .map(each => [each, each.getBoundingClientRect()])
    .filter(([, { width, height }]) => width < 44 || height < 44)
    .map(([each, { width, height }]) => `${width} × ${height}: ${each.outerHTML.slice(0, 120)}`)"""
"""Whatever can be pressed on a phone is 44 px wide and high, but for links within a sentence."""
CUT_OFF = """[document.documentElement, ...document.querySelectorAll('.scroll')]
    .filter(each => each.scrollWidth > each.clientWidth)
    .map(each => `${each.ariaLabel}: ${each.scrollWidth} px in ${each.clientWidth}`)"""


async def test_axe_finds_nothing_serious(tmp_path: Path, dsn: str) -> None:
    chromium_program()
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        await trade(service, "apex-rules")
        trade_id = (await service.call("trading.getTrades"))["trades"][0]["id"]
        async with on_page(tmp_path / "profile", service.url) as tab:
            # By day, each width in one color scheme: the colors of a scheme are the same at every width.
            for width, scheme in ((1440, "light"), (390, "dark"), *((1440, "dark"), (390, "light")) * is_nightly()):
                await axe_finds_nothing(tab, service, trade_id, width, scheme)
            await until(lambda: tab.evaluate("/[0-9a-f]{64}/.test(document.body.innerText)"), "the head of the record")
            assert tab.problems == []


async def axe_finds_nothing(tab: Tab, service: ServiceProcess, trade_id: str, width: int, scheme: str) -> None:
    """Every page at a width and in a color scheme, for everybody and, on a phone, for an operator."""
    axe = (installed_packages() / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    await tab.command("Emulation.setDeviceMetricsOverride", **size)
    panel = "sessionStorage.setItem('operator', 'any')" if width < 600 else "sessionStorage.clear()"
    await tab.evaluate(panel)  # it is on System
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    await tab.command("Emulation.setEmulatedMedia", features=features)
    await visit(tab, service.url, "/")
    await tab.evaluate(axe + ";0")
    compared = "compare?one=apex-rules&other=contrarian-rules"
    for path in (
        "", "models", "models/apex-rules", "variants/Apex", compared, "?alone=apex-rules&tab=events", "positions",
        "?tv=1", "trades", "markets/BTC", f"trades/{trade_id}", "conversations", "operator", "system",
    ):  # fmt: skip
        if path:
            await tab.evaluate(f"{BEFORE}.id = 'before'; location.hash = '#/{path}'")
        ready = f"{BEFORE}?.id !== 'before' && !document.body.innerText.includes('Reading …')"
        await until(partial(tab.evaluate, ready), path)
        assert await tab.evaluate(AXE) == [], (path, width, scheme)
        if width < 600:
            assert await tab.evaluate(SMALL_TARGETS) == [], path
        assert await tab.evaluate(CUT_OFF) == [], (path, width, scheme)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_keyboard_reaches_pages_standings_and_cursor(service: ServiceProcess, tmp_path: Path) -> None:
    chromium_program()
    async with on_page(tmp_path / "profile", service.url) as tab:

        async def press(key: str) -> None:
            for kind in ("keyDown", "keyUp"):
                await tab.command("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

        for key, place in (("4", "#/trades"), ("6", "#/system"), ("1", "#/")):
            await press(key)
            await until(partial(tab.evaluate, f"location.hash === '{place}'"), place)
        dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        await press("t")
        assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        await until(lambda: tab.evaluate("document.querySelectorAll('.rows button').length >= 4"), "the standings")
        await tab.evaluate("document.querySelector('.rows button').focus()")
        await press(" ")
        await until(lambda: tab.evaluate("document.querySelectorAll('.rows button[aria-pressed=true]').length === 1"))
        await tab.evaluate("document.querySelector('.chart[tabindex]').focus()")
        await press("ArrowLeft")
        await until(lambda: tab.evaluate("document.querySelector('.u-cursor-x')?.style.transform !== ''"), "crosshair")
        assert "alone=" in await tab.evaluate("location.hash"), "the address contains every choice"
        await tab.evaluate("document.querySelector('.curves [aria-expanded]').click()")
        await until(lambda: tab.evaluate("document.querySelector('.moment input') !== null"), "the options")
        await tab.evaluate("document.querySelector('.moment input').focus()")
        await press("Escape")
        await until(lambda: tab.evaluate("document.querySelectorAll('.rows button[aria-pressed=true]').length === 0"))
        assert "alone=" not in await tab.evaluate("location.hash")
        assert tab.problems == []


@pytest.mark.asyncio(loop_scope="session")
async def test_every_choice_is_in_the_address(service: ServiceProcess, tmp_path: Path) -> None:
    chromium_program()
    async with on_page(tmp_path / "profile", service.url) as tab:
        await until(lambda: tab.evaluate("document.querySelectorAll('.rows button').length >= 4"), "the standings")
        await tab.evaluate("document.querySelector('.curves [aria-expanded]').click()")
        await until(lambda: tab.evaluate("document.querySelector('[aria-label=Lines]') !== null"), "the options")
        await tab.evaluate("document.querySelector('[aria-label=Lines] button:last-child').click()")
        await until(lambda: tab.evaluate("location.hash.includes('lines=variants')"), "the choice of lines")
        await choose_moment(tab, "From", "2026-03-04T05:06")
        await choose_moment(tab, "To", "2026-03-05T00:00")
        assert "from=2026-03-04T05%3A06Z&to=2026-03-05T00%3A00Z" in await tab.evaluate("location.hash")
        asked = 'key.includes(\'"startDate":"2026-03-04T05:06Z","endDate":"2026-03-05T00:00Z"\')'
        await until(lambda: tab.evaluate(f"Object.keys(answers).some(key => {asked})"), "the curves of the range")
        pressed = "document.querySelectorAll('[aria-label=Window] [aria-pressed=true]').length"
        assert await tab.evaluate(pressed) == 0
        await tab.evaluate("document.querySelector('[aria-label=Window] button:last-child').click()")
        await until(lambda: tab.evaluate(f"{pressed} === 1"), "the window")
        assert "from=" not in await tab.evaluate("location.hash")
        await visit(tab, service.url, "/#/?lines=variants&from=tomorrow")
        await shows(tab, "The curves cannot be read")
        await tab.evaluate("document.querySelector('[aria-label=Window] button:last-child').click()")
        await gone(tab, "The curves cannot be read")
        assert {problem["entry"]["source"] for problem in tab.problems} == {"network"}, (
            "only that the range was refused"
        )
        tab.problems.clear()
        await visit(tab, service.url, "/#/models?window=run")
        saved = """(() => {
            let saved = null
            HTMLAnchorElement.prototype.click = function () { saved = [this.download, this.href.slice(0, 5)] }
            document.querySelector('section[aria-label=Leaderboard] .quiet').click()
            return saved
        })()"""
        await until(
            lambda: tab.evaluate("document.querySelector('section[aria-label=Leaderboard] .quiet')"), "the board"
        )
        assert await tab.evaluate(saved) == ["leaderboard.csv", "blob:"]
        await tab.evaluate("document.querySelector('section[aria-label=Leaderboard] th.head button').click()")
        assert "sort-leaderboard=-model" in await tab.evaluate("location.hash")
        sorted_by = "document.querySelector('section[aria-label=Leaderboard] th.head')?.ariaSort"
        await until(lambda: tab.evaluate(f"{sorted_by} === 'descending'"), "the order of the table")
        # Until the page is long enough and stays so, since its parts arrive in turn.
        await until(
            lambda: tab.evaluate("(scrollTo(0, 300), history.state?.scroll === 300)"), "the scroll in the history"
        )
        await tab.evaluate("location.hash = '#/trades'")
        await until(lambda: tab.evaluate("scrollY === 0"), "the top of a new page")
        await tab.evaluate("history.back()")
        await until(lambda: tab.evaluate("scrollY === 300 && location.hash.includes('sort-')"), "the way back")
        assert tab.problems == []


LONG_TABLES = """(async () => {
    const folder = document.querySelector('script[type=module]').src.replace('app.js', '')
    const [{ html, render }, { Table }] = await Promise.all(
        ['lib', 'components'].map(name => import(`${folder}${name}.js`)))
    const host = document.body.appendChild(document.createElement('div'))
    const columns = [{ key: 'a', title: 'A', by: row => row, cell: row => `row ${row}` }]
    const rows = Array.from({ length: 35 }, (_, place) => place)
    const table = label => html`<${Table} label=${label} columns=${columns} rows=${rows} empty="" />`
    render(html`${table('One')}${table('Other')}<p>below</p>`, host)
    host.querySelector('.quiet').click()
    const seen = { added: [], shown: [], below: [] }
    const rowsIn = changes => changes.flatMap(one => [...one.addedNodes]).filter(node => node.tagName === 'TR')
    new MutationObserver(changes => seen.added.push(rowsIn(changes).length))
        .observe(host, { childList: true, subtree: true })
    const count = () => host.querySelectorAll('tbody tr').length
    const look = () => {
        seen.shown.push(count())
        seen.below.push(host.querySelector('p:last-of-type').getBoundingClientRect().top + scrollY)
    }
    for (look(); count() < 70; look()) await new Promise(requestAnimationFrame)
    const lines = (await saved.text()).trim().split('\\r\\n').length
    return { ...seen, lines, last: host.querySelector('tbody tr:last-child').innerText }
})()"""


@pytest.mark.asyncio(loop_scope="session")
async def test_long_tables_come_in_pieces_and_push_nothing_down(service: ServiceProcess, tmp_path: Path) -> None:
    """No task of the page draws many rows, their place is reserved, and a file has them all from the start."""
    chromium_program()
    async with on_page(tmp_path / "profile", service.url, "/#/system") as tab:
        await tab.evaluate(KEEP_FILES)
        seen = await tab.evaluate(LONG_TABLES)
        assert (seen["shown"][0], seen["lines"], seen["last"]) == (20, 36, "row 34")
        assert max(seen["added"]) <= 10
        assert max(seen["below"]) - min(seen["below"]) < 2, "pixels"
