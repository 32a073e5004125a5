"""Choices on the page: filters for tables, sums and files alike, steps that Back undoes, and a way to each decision."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace
from support.chromium import Tab, chromium_program
from support.dashboard import KEEP_FILES, check_jumps, on_page, shows, visit
from support.process import ServiceProcess, serving
from support.records import HOUR, add_curve, add_model, add_trade
from support.waiting import until

from trader.agents.sql.models import upsert_model
from trader.database.pool import Connection, Database

pytestmark = pytest.mark.processes

HOLDS = 320
ADD_TURNS = """
WITH added AS (
    INSERT INTO invocations (id, model_id, status, started_at, finished_at, response)
    SELECT coalesce($5, gen_random_uuid()), 'model-2', 'completed', t, t, $3
    FROM generate_series($1::timestamptz, $2, interval '1 second') t
    RETURNING id, started_at
)
INSERT INTO tool_calls (invocation_id, number, id, type, status, metadata, created_at)
SELECT id, 1, gen_random_uuid(), $4, $6, $7, started_at FROM added
"""
ACTED, REFUSED = "a long entry, long ago", "an order that was refused"


async def add_turns(
    conn: Connection,
    at: datetime,
    count: int,
    text: str,
    kind: str,
    *,
    turn_id: UUID | None = None,
    refusal: str | None = None,
) -> None:
    decision = {"reason": text} if kind == "HOLDING" else {"symbol": "BTC", "side": "LONG", "quantity": 1}
    metadata = {"raw": None, "decisions": [decision], "results": [{"reason": refusal}] if refusal else []}
    end = at + timedelta(seconds=count - 1)
    status = "rejected" if refusal else "ok"
    await conn.execute(ADD_TURNS, at, end, text, kind, turn_id, status, metadata)


TEXTS = """(section => [...document.querySelectorAll(`section[aria-label="${section}"] tbody tr`)].map(row =>
    [...row.cells].map(cell => cell.innerText.trim())))"""
CHOOSE = """((label, value) => {
    const select = document.querySelector(`select[aria-label="${label}"]`)
    select.value = value
    select.dispatchEvent(new Event('change', { bubbles: true }))
})"""
DRAWN = """(() => {
    const { left, top, width } = document.querySelector('.curves .u-over').getBoundingClientRect()
    return [left, top, width]
})()"""


async def test_choices_are_steps_and_reach_everything(tmp_path: Path, dsn: str, database: Database) -> None:
    chromium_program()
    now, turn_id = datetime.now(UTC), uuid4()
    async with database.connection() as conn:
        model = await add_model(conn, "model-2")
        await upsert_model(conn, replace(model, active=False))  # or it would decide, too
        await add_curve(conn, "model-2", now)
        await add_turns(conn, now - 2 * HOUR, 1, ACTED, "CREATE_POSITION", turn_id=turn_id)
        await add_turns(conn, now - 2 * HOUR + timedelta(minutes=1), 1, REFUSED, "CREATE_POSITION", refusal="too large")
        await add_turns(conn, now - HOUR, HOLDS, "wait", "HOLDING")
    async with (
        serving(tmp_path, DATABASE_URL=dsn) as service,
        on_page(tmp_path / "profile", service.url, "/#/system") as tab,
    ):
        async with database.connection() as conn:  # after the start, which refuses trades without fills
            trades = [
                str(await add_trade(conn, "model-2", now - (5 - n) * HOUR, gross=gross, side=side))
                for n, (side, gross) in enumerate((("LONG", "10"), ("SHORT", "-5"), ("LONG", "20"), ("SHORT", "7")))
            ]
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=KEEP_FILES)
        await check_trades(tab, service, trades)
        await check_conversations(tab, service.url, turn_id)
        await check_first_screen_and_zoom(tab, service.url)
        assert tab.problems == []


async def check_trades(tab: Tab, service: ServiceProcess, trades: Sequence[str]) -> None:
    await visit(tab, service.url, "/#/trades")

    async def rows(section: str, count: int) -> list[list[str]]:
        async def found() -> Any:
            texts = await tab.evaluate(f"{TEXTS}('{section}')")
            return texts if len(texts) == count else None

        result: list[list[str]] = await until(found, f"{count} rows of {section}")
        return result

    await rows("Trades", 4)
    await tab.evaluate("document.querySelector('[aria-label=By] button:nth-child(3)').click()")  # by market
    await tab.evaluate(f"{CHOOSE}('Side', 'SHORT')")
    await rows("Trades", 2)
    asked = await service.call("analytics.getTradeTotals", by="market", side="SHORT")
    (total,) = asked["rows"]
    assert (total["trades"], total["netPnl"]) == (2, 0)
    await until(partial(totals_are, tab, ["BTC", "2", "1\n50\u00a0%", "0.00"]), "the sums of the short trades")
    await tab.evaluate("document.querySelector('section[aria-label=Trades] .quiet').click()")
    await until(lambda: tab.evaluate("window.saved !== undefined"), "the file")
    saved = list(csv.DictReader(io.StringIO(await tab.evaluate("saved.text()"))))
    assert [(row["Side"], row["Net"]) for row in saved] == [("SHORT", "6"), ("SHORT", "-6")]
    assert datetime.fromisoformat(saved[0]["Closed"]).tzinfo is not None
    assert saved[0]["Held, s"] == "3600"
    await tab.evaluate("history.back()")
    await rows("Trades", 4)
    assert (await tab.evaluate("location.hash")).startswith("#/trades"), "Back undoes the filter and stays on the page"
    steps = "[...document.querySelectorAll('.steps a')].map(one => one.hash.replace('#/trades/', ''))"
    await tab.evaluate(f"location.hash = '#/trades/{trades[1]}'")
    await until(lambda: tab.evaluate(f"{steps}.join() === '{trades[0]},{trades[2]}'"), "the trades beside it")
    await tab.evaluate("document.querySelectorAll('.steps a')[1].click()")
    await until(lambda: tab.evaluate(f"{steps}.join() === '{trades[1]},{trades[3]}'"), "the next trade")


async def totals_are(tab: Tab, beginning: Sequence[str]) -> bool:
    texts = await tab.evaluate(f"{TEXTS}('Trades summed up')")
    return [row[: len(beginning)] for row in texts] == [list(beginning)]


async def check_conversations(tab: Tab, url: str, turn_id: UUID) -> None:
    """Holds are folded before the list is limited; each decision has an address; only some kinds can be asked for."""
    await visit(tab, url, "/#/conversations")
    await shows(tab, ACTED)
    assert await tab.evaluate("document.querySelector('.held .badge').innerText") == f"hold × {HOLDS}"
    await check_jumps(tab)
    choose = "document.querySelector('[aria-label=Which] button:nth-child({})').click()"
    texts = "[...document.querySelectorAll('.turn .said')].map(one => one.innerText)"
    for place, expected in ((2, [REFUSED, ACTED]), (3, [REFUSED])):
        await tab.evaluate(choose.format(place))
        await until(partial(tab.evaluate, f"JSON.stringify({texts}) === JSON.stringify({expected})"), str(expected))
    await tab.evaluate("history.back()")
    await until(lambda: tab.evaluate("location.hash.includes('show=acted')"), "the step before")
    await until(lambda: tab.evaluate(f"{texts}.length === 2"), "what acted")
    await tab.evaluate(f"document.querySelector('a[href=\"#/conversations/{turn_id}\"]').click()")
    await until(lambda: tab.evaluate(f"{texts}.join() === '{ACTED}'"), "the decision alone")
    at = datetime.fromisoformat(await tab.evaluate("document.querySelector('.turn time').dateTime"))
    await visit(tab, url, f"/#/conversations?at={at:%Y-%m-%dT%H:%MZ}")
    await until(lambda: tab.evaluate(f"{texts}[0] === '{ACTED}'"), "the decisions from a time on")


FIRST_SCREEN = """(() => {
    const top = selector => document.querySelector(selector)?.getBoundingClientRect()
    const stops = [...document.querySelectorAll('a, button, select, input, [tabindex]')]
        .filter(one => one.tabIndex >= 0 && one.checkVisibility())
    return { leader: top('.leader')?.bottom, curve: top('.curves .chart')?.top,
        height: document.documentElement.scrollHeight, stops: stops.findIndex(one => one.closest('.leader')) }
})()"""


async def check_first_screen_and_zoom(tab: Tab, url: str) -> None:
    """Who leads, and the curve, are on the first screen; a range that a drag chose is a step of the address."""
    for width, height in ((390, 844), (1440, 900)):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await tab.command("Emulation.setDeviceMetricsOverride", **size)
        await visit(tab, url, "/#/?window=24h")
        await until(lambda: tab.evaluate("performance.getEntriesByName('curves').length > 0"), "the curves")
        why = "document.querySelector('.leader .why')?.textContent ?? ''"  # of which a phone shows the beginning
        await until(partial(tab.evaluate, f"({why}).includes('its best trade: long BTC')"), "the best trade")
        seen = await tab.evaluate(FIRST_SCREEN)
        assert seen["leader"] < height, width
        assert seen["curve"] < height - 100, width
        assert seen["stops"] < 15, width
    assert seen["height"] == height, "it does not scroll"

    async def drags() -> bool:  # once more if new values arrived meanwhile
        left, top, width = await tab.evaluate(DRAWN)
        steps = (
            ("mouseMoved", 0.2),
            ("mousePressed", 0.2),
            ("mouseMoved", 0.3),
            ("mouseMoved", 0.5),
            ("mouseReleased", 0.5),
        )
        for step, (kind, share) in enumerate(steps):
            held = {"button": "left", "buttons": int(step < 4)} if step else {}
            at = {"x": left + share * width, "y": top + 20, "clickCount": 1}
            await tab.command("Input.dispatchMouseEvent", type=kind, **at, **held)
        return bool(await tab.evaluate("location.hash.includes('from=') && location.hash.includes('to=')"))

    await until(drags, "the range")
    await tab.evaluate("history.back()")
    await until(lambda: tab.evaluate("location.hash === '#/?window=24h'"), "the whole window")
