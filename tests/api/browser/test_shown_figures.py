"""What the page shows, read from the rendered page, is what the procedures answer for the same row."""

import csv
import io
import itertools
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace
from support.chromium import Tab, chromium_program
from support.dashboard import KEEP_FILES, WRITTEN, figure, on_page, shows, visit
from support.process import ServiceProcess, serving
from support.records import HOUR, add_curve, add_model, add_run, add_trade, make_model, make_run
from support.waiting import until

from trader.agents.domain.entrants import Entrant, fingerprint
from trader.agents.domain.models import ModelConfiguration
from trader.agents.sql.entrants import insert_entrant
from trader.agents.sql.models import upsert_model
from trader.database.pool import Connection, Database

pytestmark = pytest.mark.processes

ADD_COST = """
INSERT INTO invocations (id, model_id, status, started_at, finished_at, cost_usd, entrant)
VALUES ($1, $2, 'completed', $3, $3, $4, 1)
"""
REPLICATES = {"Ada 2": Decimal("0.75"), "Ada 10": Decimal("2.25")}
"""The replicates of one configuration by name, with the cost of each in the last hour."""

DOCTORED = """
const answered = window.fetch
window.fetch = async (path, init) => {
  const response = await answered(path, init)
  const body = await response.clone().json()
  const stale = { stale: true, lastUpdateAt: '2026-03-04T05:06:07.000Z' }
  if (path.endsWith('analytics.getEvidence')) {
    body.entrants.forEach((one, place) => {
      one.returnPercent = [-1.25, null, 3.5][place % 3]
      const found = { smallestDifference: 34850776.6, differencePercent: 1.5, verdict: 'not distinguishable yet' }
      for (const each of one.differences) if (each.reference === 'holdNothing') Object.assign(each, found)
    })
  } else if (path === '/health/schedulers') Object.assign(body.market, stale)
  else return response
  return Response.json(body)
}
"""


async def add_replicates(conn: Connection) -> None:
    now = datetime.now(UTC)
    for number, (name, usd) in enumerate(REPLICATES.items()):
        model = make_model(f"ada-{number}")
        configuration = ModelConfiguration(replicate_of="ada")
        await upsert_model(conn, replace(model, name=name, provider="lab", active=False, configuration=configuration))
        await add_run(conn, model.id, make_run(model.id, at=now - timedelta(days=2)))
        begun = Entrant(
            model_id=model.id,
            number=1,
            fingerprint=fingerprint("{}", None),
            configuration="{}",
            answered_by=None,
            began_at=now - timedelta(days=2),
        )
        await insert_entrant(conn, begun)
        for cost, at in ((usd, now - timedelta(hours=1)), (Decimal(100), now - timedelta(hours=30))):
            await conn.execute(ADD_COST, uuid4(), model.id, at, cost)


CELLS = """[...document.querySelectorAll('section[aria-label="Leaderboard"] tbody tr')].map(row =>
    Object.fromEntries([...row.cells].map(cell => [cell.dataset.label, cell.innerText.trim()])))"""


async def test_a_saved_table_has_its_figures_raw_and_each_part_says_what_it_is_of(
    tmp_path: Path, dsn: str, database: Database
) -> None:
    chromium_program()
    async with database.connection() as conn:
        await add_replicates(conn)
        for name, percent in (("model-10", -1), ("model-2", 1)):
            model = await add_model(conn, name)
            await upsert_model(conn, replace(model, active=False))  # or it would decide, too
            await add_curve(conn, name, datetime.now(UTC), percent)
    async with (
        serving(tmp_path, DATABASE_URL=dsn) as service,
        on_page(tmp_path / "profile", service.url, "/#/system") as tab,
    ):
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=WRITTEN + KEEP_FILES)
        await visit(tab, service.url, "/#/models?window=24h")
        answered = (
            'window.answers[\'analytics.getLeaderboard {"window":"24h","variant":"all","details":true}\']?.entries'
        )
        await until(lambda: tab.evaluate(f"{CELLS}.length === 3"), "the board")
        entries = {entry["modelId"]: entry for entry in await tab.evaluate(answered)}
        (joint,) = (entry for entry in entries.values() if entry["replicates"] > 1)
        assert joint["details"]["replicates"]["costUsd"] == pytest.approx(float(sum(REPLICATES.values())))
        assert joint["modelId"] not in joint["modelIds"] == joint["details"]["replicates"]["modelIds"]

        await tab.evaluate("document.querySelector('section[aria-label=Leaderboard] .quiet').click()")
        saved = list(csv.DictReader(io.StringIO(await tab.evaluate("saved.text()"))))
        assert len(saved) == len(entries)
        for row in saved:
            entry = entries[row["Model id"]]
            assert (row["Model"], row["Return, %"]) == (
                entry["modelName"],
                await tab.evaluate(f"String({entry['pnlPercent']})"),
            )
            assert {"95 % low, %", "95 % high, %"} <= row.keys()
        await tab.evaluate("document.querySelector('section[aria-label=Leaderboard] th.head button').click()")
        names = f"{CELLS}.map(cells => cells.Model.split('\\n')[0])"
        await until(
            lambda: tab.evaluate(f"{names}.join() === 'Model model-10,Model model-2,Ada (mean of 2)'"),
            "the names, descending",
        )
        for width in (1024, 1440):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.command("Emulation.setDeviceMetricsOverride", **size)
            await until(lambda: tab.evaluate(f"({CUT}).length === 0"), "tables without a cut column")
        await check_a_comparison(tab, service, database)
        await check_the_leader(tab, service, database)
        await check_the_axes(tab, service.url)
        await check_the_mark(tab, service.url, database)
        await check_one_state(tab, service.url)
        await check_evidence(tab)
        assert tab.problems == []


CUT = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"


async def check_the_mark(tab: Tab, url: str, database: Database) -> None:
    """In a replay, rows with trades held for less than a minute are marked, and the panel says what that means."""
    async with database.connection() as conn:
        await add_trade(conn, "model-2", datetime.now(UTC), held=timedelta(seconds=59), label="brief")
    # Boards of other windows may be kept for this minute, since no account of the service has traded.
    await visit(tab, url, "/#/models?window=run")
    board = 'window.answers[\'analytics.getLeaderboard {"window":"run","variant":"all","details":true}\']'
    counts = f"{board}?.entries.map(one => one.modelIds[0] + ' ' + one.details.withinMinute).toSorted().join()"
    await until(lambda: tab.evaluate(f"{counts} === 'ada-0 0,model-10 0,model-2 1'"), "the brief trade")
    marked = f"{CELLS}.filter(cells => cells.Model.includes('under 1 min')).map(cells => cells.Model.split('\\n')[0])"
    assert await tab.evaluate(marked) == [], "the prices of a synthetic market are all its own"
    await tab.evaluate("document.body.dataset.market = 'replay'")
    await tab.evaluate("location.hash = '#/system'")
    await until(lambda: tab.evaluate(f"{CELLS}.length === 0"), "another page")
    await tab.evaluate("location.hash = '#/models?window=run'")
    await until(lambda: tab.evaluate(f"{marked}.length === 1"), "the mark")
    assert (await tab.evaluate(marked))[0].startswith("Model model-2")
    await shows(tab, "“Under 1 min”: it held trades for less than a minute")


SECTION_ROWS = """(section => [...document.querySelectorAll(`section[aria-label="${section}"] tbody tr`)].map(row =>
    [...row.cells].map(cell => cell.innerText.trim().replaceAll(/\\s+/g, ' '))))"""


async def check_a_comparison(tab: Tab, service: ServiceProcess, database: Database) -> None:
    """Two entrants side by side, as the procedures answer, on every width; the leaderboard leads to them."""
    at = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - 2 * HOUR
    async with database.connection() as conn:
        for name, side, gross in (("model-2", "LONG", "12.5"), ("model-10", "SHORT", "-4")):
            await add_trade(conn, name, at + timedelta(minutes=30), side=side, gross=gross, funding="-0.5")
    leads = "document.querySelector('section[aria-label=Leaderboard] .button')?.hash ?? ''"
    await visit(tab, service.url, "/#/models?window=24h")
    is_known = f"/^#.compare.one=[\\w-]+&other=[\\w-]+&window=24h$/.test({leads})"
    await until(lambda: tab.evaluate(is_known), "the way to the comparison")
    await visit(tab, service.url, "/#/compare?one=model-2&other=model-10&window=run")
    rows = {}
    for section in ("Disagreements", "Trades in the same hours"):
        found = f"{SECTION_ROWS}('{section}')"
        await until(partial(tab.evaluate, f"{found}.length === 1"), section)
        rows[section] = await tab.evaluate(found)
    answer = await service.call("analytics.getComparison", modelId="model-2", against="model-10")
    percent = figure(answer["curve"][-1]["differencePercent"], unit="\u00a0%", sign=True)
    hours, reason = answer["difference"]["hours"], answer["difference"]["reason"]
    assert hours in {5, 6}, "six if the first value is at the full hour"
    assert answer["disagreedHours"] == 1
    await shows(tab, f"{percent} over {hours} common hours, no interval yet. Not distinguishable yet: {reason}.")
    (apart,) = answer["disagreements"]
    assert (apart["side"], apart["againstSide"]) == ("LONG", "SHORT")
    assert rows["Disagreements"][0][2:] == ["60 min", "LONG", "SHORT"]
    assert rows["Trades in the same hours"][0][1:] == ["BTC LONG +11.00", "BTC SHORT −5.50"]
    drawn = "document.querySelector('section[aria-label=Difference] canvas')?.width > 0"
    for width in (390, 1024, 1440):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await tab.command("Emulation.setDeviceMetricsOverride", **size)
        await until(partial(tab.evaluate, drawn), "the curve")
        await until(partial(tab.evaluate, "document.documentElement.scrollWidth <= innerWidth"), f"{width} px")
    await tab.evaluate("location.hash = '#/compare?one=model-2&other=nobody'")
    await shows(tab, "There is no model nobody.")


async def check_the_leader(tab: Tab, service: ServiceProcess, database: Database) -> None:
    """The trade that made a leader is the best one of the window, of however many; titles have names."""
    at = datetime.now(UTC) - 3 * HOUR
    async with database.connection() as conn:
        best = {
            model_id: [await add_trade(conn, model_id, at, gross=gross, label=gross) for gross in ("-5", "30", "20")][1]
            for model_id in ("ada-0", "model-2", "model-10")
        }
    leader, second, *_ = (await service.call("analytics.getLeaderboard", window="30d", details=True))["entries"]
    trade = (await service.call("trading.getTrade", id=str(best[leader["modelIds"][0]])))["trade"]
    await visit(tab, service.url, "/#/?window=30d")
    await shows(tab, f"its best trade: long BTC, {at:%-d %b}, {figure(trade['netPnl'], sign=True)}.")
    assert second["pnlPercent"] == leader["pnlPercent"]
    await shows(tab, f"tied with \u2068{second['modelName']}\u2069")  # a name cannot turn the words around it
    await tab.evaluate("document.querySelector('.leader a.inline').click()")
    await shows(tab, f"fees {figure(-trade['fees'])}, funding {figure(trade['funding'])}")
    assert await tab.evaluate("location.hash") == f"#/trades/{trade['id']}"
    await until(lambda: tab.evaluate("document.title.endsWith('Trade · trader')"), "the title")
    await tab.evaluate("location.hash = '#/models/model-2'")
    await until(lambda: tab.evaluate("document.title.endsWith('model-2 · trader')"), "the title")


async def check_evidence(tab: Tab) -> None:
    """The evidence is ordered by result, has no empty column, and says once that nothing is decided."""
    await tab.evaluate("location.hash = '#/models'")
    texts = """[...document.querySelectorAll('section[aria-label="Evidence"] tr')].map(row =>
        [...row.cells].map(cell => cell.innerText.trim()))"""
    await until(lambda: tab.evaluate(f"({texts}).length === 4"), "the evidence")
    heads, *rows = await tab.evaluate(texts)
    by_head = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [row["Return"] for row in by_head] == ["+3.50\u00a0%", "−1.25\u00a0%", "–"]
    assert {row["Nothing held"] for row in by_head} == {"+1.5\u00a0%"}
    assert {row["Detectable from"] for row in by_head} == {"over 100\u00a0%"}
    assert all({row[head] for row in by_head} != {"–"} for head in heads)
    text = await tab.evaluate("document.querySelector('section[aria-label=Evidence]').innerText")
    assert "None of the differences below can be told from noise yet." in text
    assert "not distinguishable yet" not in text


async def check_the_axes(tab: Tab, url: str) -> None:
    """Marks of an axis are as far apart as their labels say, and the first time is not cut."""
    await visit(tab, url, "/#/?window=24h")
    await until(lambda: tab.evaluate("performance.getEntriesByName('curves').length > 0"), "the curves")
    await until(lambda: tab.evaluate("written.some(([text]) => /^\\d\\d:\\d\\d$/.test(text))"), "the times")
    await tab.evaluate("written.length = 0; document.documentElement.dataset.theme = 'dark'")  # drawn once more
    await until(lambda: tab.evaluate("written.some(([text]) => /^\\d\\d:\\d\\d$/.test(text))"), "the times again")
    written = await tab.evaluate("written")
    marks = [
        (float(text.removesuffix(" %").replace("−", "-")), y)
        for text, _, y, chart in written
        if chart.startswith("Equity") and re.fullmatch(r"−?[\d.]+ %", text)
    ]
    latest = marks[-1:]  # of the last drawing, whose marks ascend
    for mark in reversed(marks[:-1]):
        if mark[0] >= latest[0][0]:
            break
        latest.insert(0, mark)
    assert len(latest) >= 3
    steps = {round((one - other) / (y - z), 4) for (one, y), (other, z) in itertools.pairwise(latest)}
    assert max(steps) - min(steps) <= 0.05 * abs(min(steps)), latest
    times = [x for text, x, _, _ in written if len(text) == 5 and text[2] == ":"]
    assert min(times) >= 0, "the first label begins within the picture"


async def check_one_state(tab: Tab, url: str) -> None:
    """Stale prices are told in the dot, the banner and the title."""
    await tab.command("Page.addScriptToEvaluateOnNewDocument", source=DOCTORED)
    await tab.command("Page.navigate", url="about:blank")
    await tab.command("Page.navigate", url=f"{url}/")
    await until(lambda: tab.evaluate("document.querySelector('.status') !== null"), "the page")
    await shows(tab, "Prices are stale: the last update of the market synthetic was at 4 Mar, 05:06 UTC")
    assert await tab.evaluate("document.querySelector('[role=status]').innerText") == "stale prices"
    assert await tab.evaluate("document.querySelector('.dot').className") == "dot warn"
    assert await tab.evaluate("document.title") == "stale prices · Overview · trader"
