"""Every figure of the standings, the chart, a model's page and a comparison, held against SQL of the test's own."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from msgspec.structs import replace
from support.chromium import Tab, chromium_program
from support.dashboard import WRITTEN, figure, on_page, visit
from support.process import serving
from support.records import HOUR, MINUTE, add_run, add_trade, make_model, make_run, make_snapshot
from support.waiting import becomes, until

from trader.agents.domain.entrants import Entrant
from trader.agents.sql.entrants import insert_entrant
from trader.agents.sql.models import upsert_model
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import Account
from trader.portfolio.domain.baselines import BUY_AND_HOLD, BaselineState
from trader.portfolio.sql.snapshots import SavedBaseline, insert_snapshots, upsert_baselines

pytestmark = pytest.mark.processes

NOW = datetime(2026, 3, 20, 14, 45, tzinfo=UTC)
"""When the replay begins: at minute 45, when the last hourly value is far from that of the window's start."""

BEGAN = NOW - timedelta(days=33)
DAY = timedelta(days=1)
PRICE = 50_000
WINDOWS = {"24h": DAY, "7d": 7 * DAY, "30d": 30 * DAY, "run": None}


class Planted(NamedTuple):
    """A model of the test: its drift a day, what it earned in trades, and when its account was reset."""

    name: str
    drift: float
    nets: Sequence[str]
    fingerprint: str
    reset: timedelta | None = None
    changed: timedelta | None = None
    """How long ago its configuration was changed."""


MODELS = {
    "ada-1": Planted("Ada 1", 9, ("310.25", "-40"), "a"),
    "ada-2": Planted("Ada 2", -4, ("-120", "15.8"), "a"),
    "ada-3": Planted("Ada 3", 2, ("77.7",), "a", reset=10 * HOUR),
    "bo": Planted("Bo", 14, ("500", "-3.3", "12"), "b"),
    "cy": Planted("Cy", -11, ("-260", "30"), "c", reset=4 * DAY),
    "di": Planted("Di", 5, ("101", "-99.3"), "e", changed=3 * DAY),
}
ENTRANTS = {"Ada (mean of 3)": ("ada-1", "ada-2", "ada-3"), "Bo": ("bo",), "Cy": ("cy",), "Di": ("di",)}

OPEN_POSITION = """
INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged, fees,
                    funding, opened_at, funded_until)
SELECT gen_random_uuid(), account_id, id, 'BTC', 'LONG', 'OPEN', 0.02, 980, 980, false, 0.5, 0, $1, $2
FROM runs WHERE account_id = 'di'
"""
ADD_FILLS = """
INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee, liquidation_fee, maker,
                   cause, created_at)
SELECT account_id, row_number() OVER (PARTITION BY account_id ORDER BY at), run_id, id, 'BTC', f.side, quantity,
       notional / quantity, 0.5, 0, false, 'order', at
FROM orders CROSS JOIN LATERAL (VALUES ('buy', entry_notional, opened_at), ('sell', exit_notional, closed_at))
    f (side, notional, at)
WHERE at IS NOT NULL
"""
ADD_COST = """
INSERT INTO invocations (id, model_id, status, started_at, finished_at, cost_usd, entrant)
VALUES ($1, $2, 'completed', $3, $3, $4, $5)
"""


def wave(at: datetime, drift: float) -> Decimal:
    """A value that the drift moves by the day, and far more from one half hour to the next."""
    halves = int((at - BEGAN) / (30 * MINUTE))
    return Decimal(10_000) + Decimal(str(drift * halves / 48)) + 7 * (halves * 7919 % 97)


def moments(start: datetime) -> list[datetime]:
    """Two moments of each hour from a start on: of the minutes 44 and 59."""
    first = BEGAN.replace(minute=0)
    halves = (first + step * HOUR + minute * MINUTE for step in range(33 * 24 + 1) for minute in (44, 59))
    return [at for at in halves if start <= at < NOW]


async def plant(database: Database) -> None:
    """A month of accounts, with replicates, resets, a changed configuration, trades and costs."""
    async with database.connection() as conn:
        await ensure_partitions(conn, BEGAN, NOW)
        for model_id, planted in MODELS.items():
            model = replace(make_model(model_id), name=planted.name, provider="lab", active=False, created_at=BEGAN)
            await upsert_model(conn, model)
            await plant_account(conn, model_id, planted)
        await conn.execute(OPEN_POSITION, NOW - 2 * HOUR, NOW.replace(minute=0))
        await conn.execute(ADD_FILLS)
        await conn.execute("UPDATE accounts SET sequence = 100")
        run = make_run(BUY_AND_HOLD.id, at=BEGAN)
        state = BaselineState(account=Account(id=BUY_AND_HOLD.id, run=run, sequence=0, changed_at=BEGAN))
        await upsert_baselines(conn, [SavedBaseline(BUY_AND_HOLD, state, NOW)])
        await insert_snapshots(conn, [make_snapshot(BUY_AND_HOLD.id, at, wave(at, 3)) for at in moments(BEGAN)])


async def plant_account(conn: Connection, model_id: str, planted: Planted) -> None:
    reset = None if planted.reset is None else NOW - planted.reset
    await add_run(conn, model_id, make_run(model_id, at=BEGAN))
    if reset is not None:
        await add_run(conn, model_id, make_run(model_id, 2, capital="20000", at=reset))
    began = [BEGAN] if planted.changed is None else [BEGAN, NOW - planted.changed]
    for number, at in enumerate(began, start=1):
        entrant = Entrant(
            model_id=model_id, number=number, fingerprint=f"{planted.fingerprint}{number}" * 32, configuration="{}",
            answered_by=None, began_at=at,
        )  # fmt: skip
        await insert_entrant(conn, entrant)
    snapshots = [
        make_snapshot(model_id, at, wave(at, planted.drift) * (2 if number == 2 else 1), number=number)
        for at in moments(BEGAN)
        for number in (1 if reset is None or at < reset else 2,)
    ]
    await insert_snapshots(conn, snapshots)
    for age, net in zip((5, 29, 300), planted.nets, strict=False):
        gross, number = str(Decimal(net) + 1), 1 if reset is None else 2
        await add_trade(conn, model_id, NOW - age * HOUR + 7 * MINUTE, gross=gross, number=number)
    for at, usd in ((NOW - 2 * HOUR, "0.75"), (NOW - 30 * HOUR, "3"), (NOW - 20 * DAY, "40")):
        number = sum(each <= at for each in began)
        await conn.execute(ADD_COST, uuid4(), model_id, at, Decimal(usd), number)


SELECT_ACCOUNTS = """
SELECT a.*, coalesce((SELECT net_portfolio FROM portfolio_snapshots s
                      WHERE s.run_id = a.run_id AND s.created_at <= a.since
                      ORDER BY s.created_at DESC LIMIT 1), a.capital)::float8 AS first,
       (SELECT count(*) FROM orders o WHERE o.run_id = a.run_id AND o.closed_at >= a.since) AS trades,
       (SELECT coalesce(sum(fees), 0)::float8 FROM orders o
        WHERE o.run_id = a.run_id AND o.closed_at >= a.since) AS fees,
       (SELECT sum(cost_usd)::float8 FROM invocations i
        WHERE i.model_id = a.id AND i.started_at >= a.since) AS cost
FROM (
    SELECT r.account_id AS id, r.id AS run_id, r.initial_capital::float8 AS capital,
           greatest($1::timestamptz, r.started_at,
                    CASE WHEN $1::timestamptz IS NOT NULL
                         THEN (SELECT max(began_at) FROM entrants WHERE model_id = r.account_id) END) AS since,
           (r.initial_capital + coalesce((
               SELECT sum(coalesce(net_pnl, quantity * 50000 - entry_notional - fees))
               FROM orders o WHERE o.run_id = r.id), 0))::float8 AS worth
    FROM runs r WHERE r.ended_at IS NULL
) a
"""
"""The accounts at their start in a window and now: a current run's capital and what its trades earned and its position
is worth. Without a window ($1) they are of the whole run, whatever the configuration."""

SELECT_HELD = """
SELECT (array_agg(net_portfolio ORDER BY created_at DESC))[1]::float8 AS worth,
       coalesce((array_agg(net_portfolio ORDER BY created_at DESC) FILTER (WHERE created_at <= $1))[1],
                10000)::float8 AS first
FROM portfolio_snapshots WHERE account_id = 'baseline/buy-and-hold'
"""
SELECT_HOURS = """
SELECT date_trunc('hour', s.created_at) AS hour, r.initial_capital::float8 AS capital,
       (array_agg(s.net_portfolio ORDER BY s.created_at DESC))[1]::float8 AS value, max(s.created_at) AS at
FROM portfolio_snapshots s JOIN runs r ON r.id = s.run_id
WHERE r.ended_at IS NULL AND s.account_id = $1 GROUP BY 1, 2 ORDER BY 1
"""
SELECT_RUN = """
SELECT count(net_pnl) AS trades, coalesce(sum(net_pnl), 0)::float8 AS net, coalesce(sum(fees) FILTER (WHERE closed_at
       IS NOT NULL), 0)::float8 AS fees, max(net_pnl)::float8 AS best, min(net_pnl)::float8 AS worst
FROM orders o JOIN runs r ON r.id = o.run_id WHERE r.ended_at IS NULL AND o.account_id = $1
"""


def percent(value: float | None, *, sign: bool = True) -> str:
    return figure(value, unit="\u00a0%", sign=sign)


def money(value: float | None) -> str:
    return figure(value, sign=True)


class Truth:
    """What the rows of the database say of one window."""

    def __init__(self, database: Database, window: str) -> None:
        self.database = database
        self.span = WINDOWS[window]

    async def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        async with self.database.connection() as conn:
            return [dict(row) for row in await conn.fetch(query, *values)]

    async def accounts(self) -> dict[str, dict[str, Any]]:
        start = BEGAN if self.span is None else NOW + MINUTE - self.span
        found = {row["id"]: row for row in await self.rows(SELECT_ACCOUNTS, start)}
        (held,) = await self.rows(SELECT_HELD, start)
        for row in (*found.values(), held):
            row["return"] = 100 * row["worth"] / row["first"] - 100
        return found | {"held": held}

    async def hours(self, ids: Sequence[str], since: datetime | None) -> dict[datetime, float]:
        """The logarithm of what equal parts in the accounts of an entrant returned in each of its whole hours."""
        parts: dict[datetime, list[tuple[float, float]]] = {}
        for model_id in ids:
            rows = await self.rows(SELECT_HOURS, model_id)
            before = 1.0
            for row in rows:
                after = row["value"] / row["capital"]
                parts.setdefault(row["hour"], []).append((before, after))
                before = after
        changed = MODELS[ids[0]].changed
        first = max(each for each in (BEGAN.replace(minute=0), since, changed and NOW - changed) if each)
        return {
            hour: log(sum(after for _, after in found) / sum(before for before, _ in found))
            for hour, found in parts.items()
            if first <= hour < NOW.replace(minute=0)
        }


SEEN = """(() => {
    const texts = (parent, ...chosen) => chosen.map(each => parent.querySelector(each)?.innerText.trim() ?? '')
    const told = [...document.querySelectorAll('.hint.values .row')]
    return {
        standings: [...document.querySelectorAll('.rows li')].map(row => [
            row.querySelector('.named')?.title ?? row.querySelector('.name').innerText, ...texts(row, '.place', 'b')]),
        leader: texts(document, '.leader .lead .name', '.leader .lead .figure'),
        why: texts(document, '.leader .why')[0].split(/[;.] /)[0],
        box: Object.fromEntries(told.map(row => texts(row, 'bdi', 'span'))),
    }
})()"""
TILES = """Object.fromEntries([...document.querySelectorAll('.tile')].map(tile => {
    const [name, ...rest] = tile.innerText.split('\\n').filter(Boolean)
    return [name, rest.join(' ')]
}))"""
ENDS = "[...new Set(written.filter(([, , , chart]) => chart.startsWith('Equity')).map(([text]) => text))]"


PLOT = """(({ left, top, width }) => [left, top, width])(document.querySelector('.u-over').getBoundingClientRect())"""


async def see(tab: Tab) -> dict[str, Any]:
    """Read the overview, with the cursor at the end of the lines, whose box is then shown."""
    await tab.evaluate("document.querySelector('.chart[tabindex]')?.focus()")
    await tab.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    return dict(await tab.evaluate(SEEN))


async def test_one_figure_is_one_figure(tmp_path: Path, dsn: str, database: Database) -> None:
    chromium_program()
    await plant(database)
    flat = [f"{int((NOW.timestamp() + 60 * n) * 1000)},{PRICE},{PRICE},{PRICE},{PRICE},1" for n in range(30)]
    (tmp_path / "BTCUSDT-1m.csv").write_text("\n".join(["open_time,open,high,low,close,volume", *flat]))
    replay = {"MARKET_SOURCE": f"replay:{tmp_path}", "MARKETS": "BTC", "SNAPSHOT_RETENTION_DAYS": "90"}
    async with (
        serving(tmp_path, DATABASE_URL=dsn, **replay) as service,
        on_page(tmp_path / "profile", service.url, "/#/system") as tab,
    ):
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=WRITTEN)
        await tab.command(
            "Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False
        )
        pairs = [("Bo", "Cy"), ("Di", "Ada (mean of 3)"), ("Ada (mean of 3)", "Bo"), ("Cy", "Di")]
        for window, model_id, pair in zip(WINDOWS, ("ada-3", "di", "cy", "ada-1"), pairs, strict=True):
            truth = Truth(database, window)
            await check_the_overview(tab, service.url, window, truth)
            await check_the_board(tab, window, truth)
            await check_a_model(tab, window, truth, model_id)
            await check_a_pair(tab, window, truth, *pair)
        assert tab.problems == []
        assert service.traceback() == ""


async def check_the_overview(tab: Tab, url: str, window: str, truth: Truth) -> None:
    await visit(tab, url, f"/#/?window={window}")

    async def figures() -> tuple[dict[str, Any], dict[str, float]]:
        accounts = await truth.accounts()
        returns = {name: fmean(accounts[each]["return"] for each in ids) for name, ids in ENTRANTS.items()}
        held = accounts["held"]["return"]
        order = sorted((*returns, "Buy and hold"), key=lambda name: -returns.get(name, held))
        places = iter(range(1, len(order)))
        first = max(returns, key=lambda name: returns[name])
        apart = returns[first] - held
        word = "ahead of" if apart > 0 else "behind"
        return {
            "standings": [
                [name, str(next(places)) if name in returns else "", percent(returns.get(name, held))] for name in order
            ],
            "leader": [first, percent(returns[first])],
            "why": f"{figure(abs(apart))} points {word} buy and hold ({percent(held)})",
            "box": {name: percent(returns.get(name, held)) for name in order},
        }, {name: fmean(accounts[each]["worth"] for each in ids) for name, ids in ENTRANTS.items()}

    await becomes(partial(see, tab), (await figures())[0])
    expected, worths = await figures()
    ends = [f"{name.replace(' (mean of 3)', ' ×3')} {value}" for name, value in expected["box"].items()]
    assert set(ends) <= set(await tab.evaluate(ENDS)), window
    await tab.evaluate("document.querySelector('[aria-label=Unit] button:last-child').click()")
    values = {name: figure(value) for name, value in worths.items()}

    async def box() -> dict[str, str]:
        return {name: value for name, value in (await see(tab))["box"].items() if name in values}

    await becomes(box, values)
    accounts = await truth.accounts()
    first = min(accounts[each]["since"] for each in MODELS)
    old = {name for name, ids in ENTRANTS.items() if all(accounts[each]["since"] == first for each in ids)}
    left, top, width = await tab.evaluate(PLOT)
    at = {"x": left + 0.1 * width, "y": top + 20}

    async def earlier() -> set[str]:
        await tab.command("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return set((await tab.evaluate(SEEN))["box"])

    await becomes(earlier, {*old, "Buy and hold"})


def fall(values: Sequence[float]) -> float:
    """The largest fall from an earlier value, in percent."""
    return max(100 * (1 - value / max(values[: place + 1])) for place, value in enumerate(values))


CELLS = """[...document.querySelectorAll('section[aria-label="%s"] tbody tr')].map(row =>
    Object.fromEntries([...row.cells].map(cell => [cell.dataset.label, cell.innerText.trim().split('\\n')[0]])))"""


async def check_the_board(tab: Tab, window: str, truth: Truth) -> None:
    """The row of an entrant has the means of its accounts."""
    accounts, rows = await truth.accounts(), {}
    for name, ids in ENTRANTS.items():
        own = [accounts[each] for each in ids]
        falls = [
            fall([row["first"], *(each["value"] for each in hours if each["at"] > row["since"]), row["worth"]])
            for row in own
            for hours in (await truth.rows(SELECT_HOURS, row["id"]),)
        ]
        cost, gain = fmean(row["cost"] for row in own), fmean(row["worth"] - row["first"] for row in own)
        trades = fmean(row["trades"] for row in own)
        rows[name] = {
            "Return": percent(fmean(row["return"] for row in own)),
            "Drawdown": percent(fmean(falls), sign=False),
            "Trades": figure(trades, 0 if trades.is_integer() else 1),
            "Fees": figure(fmean(row["fees"] for row in own)),
            "Model cost": figure(cost),
            "Cost a day": figure(cost / ((NOW - min(row["since"] for row in own)) / DAY)),
            "Net after cost": money(gain - cost),
            "Equity": figure(fmean(row["worth"] for row in own)),
        }
    await tab.evaluate(f"location.hash = '#/models?window={window}'")

    async def shown() -> dict[str, dict[str, str]]:
        cells = await tab.evaluate(CELLS % "Leaderboard")
        return {
            name: {key: row[key] for key in rows[name] if key in row} for row in cells if (name := row["Model"]) in rows
        }

    await becomes(shown, rows)


async def check_a_model(tab: Tab, window: str, truth: Truth, model_id: str) -> None:
    """The page of an account is of its current run, and its chart of the window."""
    (whole,) = (row for row in await truth.rows(SELECT_ACCOUNTS, None) if row["id"] == model_id)
    (run,) = await truth.rows(SELECT_RUN, model_id)
    hours = await truth.rows(SELECT_HOURS, model_id)
    counted = await truth.rows(
        "SELECT count(*) AS all FROM invocations WHERE model_id = $1 AND started_at >= $2", model_id, whole["since"]
    )
    gain = whole["worth"] - whole["capital"]
    best, worst = (run["best"] if run["best"] > 0 else None), (run["worst"] if run["worst"] < 0 else None)
    drawdown = fall([whole["capital"], *(row["value"] for row in hours)])
    tiles = {
        "Equity": f"{figure(whole['worth'])} {percent(100 * gain / whole['capital'])} since the start",
        "Net after model cost": f"{money(gain - whole['cost'])} cost {figure(whole['cost'])} USD",
        "Completed trades": str(run["trades"]),
        "Largest drawdown": f"{percent(drawdown, sign=False)} best {money(best)}, worst {money(worst)}",
        "Invocations": str(counted[0]["all"]),
    }
    await tab.evaluate(f"location.hash = '#/models/{model_id}?window={window}'")

    async def shown() -> dict[str, str]:
        found = await tab.evaluate(TILES)
        if not found:  # what a failure shows instead
            return {"page": await tab.evaluate("document.body.innerText.slice(0, 400)")}
        return {name: found.get(name, "").split(" last ")[0] for name in tiles}

    await becomes(shown, tiles)
    end = f"{MODELS[model_id].name} {percent((await truth.accounts())[model_id]['return'])}"
    await until(partial(tab.evaluate, f"{ENDS}.includes({json.dumps(end)})"), f"{end} in {window}")


async def check_a_pair(tab: Tab, window: str, truth: Truth, one: str, other: str) -> None:
    """A comparison names the entrants that it measures, over their common hours, and the accounts of its costs."""
    since = None if truth.span is None else NOW.replace(minute=0) - truth.span
    first, second = [await truth.hours(ENTRANTS[name], since) for name in (one, other)]
    common = first.keys() & second.keys()
    apart = 100 * (exp(sum(first[hour] - second[hour] for hour in common)) - 1)
    ids = [ENTRANTS[name][0] for name in (one, other)]
    await tab.evaluate(f"location.hash = '#/compare?one={ids[0]}&other={ids[1]}&window={window}'")
    said = f"{one} against {other}: {percent(apart)} over {len(common)} common hours,"
    text = "document.querySelector('section[aria-label=Difference] .stack > p')?.innerText.replaceAll('\\n', '') ?? ''"
    await becomes(lambda: tab.evaluate(f"({text}).slice(0, {len(said)})"), said)
    rows = []
    for model_id in ids:
        (whole,) = (row for row in await truth.rows(SELECT_ACCOUNTS, None) if row["id"] == model_id)
        (run,) = await truth.rows(SELECT_RUN, model_id)
        row = {
            "Model": MODELS[model_id].name,
            "Trades": str(run["trades"]),
            "Realized, net": money(run["net"]),
            "Fees": figure(run["fees"]),
            "Funding": "0.00",
            "Model cost": figure(whole["cost"]),
            "Net after cost": money(whole["worth"] - whole["capital"] - whole["cost"]),
        }
        rows.append(row)
    await becomes(lambda: tab.evaluate(CELLS % "Cost in the current run"), rows)
