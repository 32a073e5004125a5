"""The report of a backtest: figures, months, and the trades on candles that a browser draws."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest
from support.candles import write_walk
from support.chromium import chromium_program
from support.reports import opened_report, rows_of

from trader.__main__ import main
from trader.agents.domain.models import rule_model
from trader.agents.variants import VARIANTS
from trader.backtest.report import lines_of, monthly_returns
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Cause
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.evidence import Statement
from trader.portfolio.domain.histories import HourlyValue
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.sql.analytics import CurrentRun
from trader.portfolio.tables import Table, load_table
from trader.seasons.page import page
from trader.seasons.sql.report import AccountReport
from trader.seasons.standings import RankedModel, SeasonReport

START = datetime(2025, 3, 1, tzinfo=UTC)


def test_months_compound_to_the_whole_return_and_end_with_ruin() -> None:
    values = {datetime(2025, 1, 5, 3, 59, tzinfo=UTC): 110, datetime(2025, 1, 31, 23, 59, tzinfo=UTC): 120}
    values |= {datetime(2025, 2, 1, 0, 59, tzinfo=UTC): 90, datetime(2025, 3, 1, 0, 1, tzinfo=UTC): 0}
    values |= {datetime(2025, 4, 1, 0, 1, tzinfo=UTC): 50}
    assert months_of(values) == pytest.approx({1: 20.0, 2: -25.0, 3: -100.0})


def test_the_value_at_the_end_of_a_month_is_of_that_month() -> None:
    values = {datetime(2025, 1, 31, 23, 59, tzinfo=UTC): 120, datetime(2025, 2, 1, tzinfo=UTC): 130}
    assert months_of(values) == pytest.approx({1: 30.0})


def months_of(values: dict[datetime, int]) -> dict[int, float]:
    """Return the monthly gains of an account that began with 100 and had these values, by the number of the month."""
    hours = [HourlyValue("own", at.replace(minute=0), Decimal(value), at) for at, value in values.items()]
    return {month.month: gain for month, gain in monthly_returns(hours, 100.0).items()}


def test_a_line_has_the_last_value_within_each_candle() -> None:
    series = Table("series")
    for minute, symbol, value in ((-1, "BTC", 5), (0, "BTC", 1), (14, "BTC", 2), (15, "ETH", 9), (45, "BTC", 4)):
        series.add(START + timedelta(minutes=minute), symbol, "mean", value, False)
    series.add(START + timedelta(minutes=16), "BTC", "z", 1 / 3, True)
    times = [int(START.timestamp()) + 900 * quarter for quarter in range(4)]
    assert lines_of(series, "BTC", times) == [
        {"name": "mean", "panel": False, "values": [2.0, None, None, 4.0]},
        {"name": "z", "panel": True, "values": [None, 0.33333333, None, None]},
    ]
    assert lines_of(series, "SOL", times) == []


def standing(account_id: str, variant: str, cost: Decimal | None = None) -> RankedModel:
    """Return the place of an account without evidence."""
    zero, end = Decimal(0), START + timedelta(days=2)
    account = AccountReport(
        model_id=account_id, name=account_id.title(), variant=variant, initial_capital=Decimal(10_000),
        started_at=START, at=end, equity=Decimal(10_095), unrealized=zero, gross=Decimal(100), fees=Decimal(5),
        liquidation_fees=zero, funding=zero, insurance=zero, model_cost=cost, invocations=70, trades=1,
        within_minute=0,
    )  # fmt: skip
    run = RunStatistics(CurrentRun(account_id, UUID(int=1), account.initial_capital, START))
    run.set_hours([HourlyValue(account_id, at, Decimal(equity), at) for at, equity in ((START, 10_000), (end, 10_095))])
    return RankedModel(account, run, Statement(48, None, "too short"))


async def words_of(
    folder: Path, *standings: RankedModel, close_reason: Cause = Cause.STOP, is_backtest: bool = True
) -> str:
    """Return the text of a report on accounts with one trade in each variant, with a line between any two elements."""
    chromium_program()
    trade = RunTrade(
        1, Decimal("0.95"), Decimal(100), True, None, START, START + timedelta(hours=1), close_reason, Decimal(0)
    )
    for each in standings:
        each.run.add_trades([trade])
    models = {each.account.model_id: rule_model(VariantId(each.account.variant), START) for each in standings}
    runs = {each.account.model_id: each.run for each in standings}
    nothing: dict[str, Any] | None = (
        {"figures": [], "months": [], "monthly": [], "listings": [], "markets": []} if is_backtest else None
    )
    file = folder / "report.html"
    file.write_text(page(SeasonReport("own", standings, models, runs, backtest=nothing)), encoding="utf-8")
    async with opened_report(file, folder) as tab:
        words: str = await tab.evaluate("document.querySelector('main').innerHTML.replaceAll(/(<[^>]*>)+/g, '|')")
        return words


@pytest.mark.processes
async def test_the_report_of_a_backtest_names_accounts_and_nothing_that_only_a_service_has(tmp_path: Path) -> None:
    pair = standing("one", "Trendsurfer"), standing("two", "Trendsurfer")
    words = await words_of(tmp_path, standing("dip", "Apex"), *pair)
    apex, trendsurfer = VARIANTS[VariantId.APEX].label, VARIANTS[VariantId.TRENDSURFER].label
    assert apex not in words
    assert words.count("|Dip|") == 6, "legends of equity, drawdown and trades, and three tables"
    assert f"{trendsurfer}, 2 accounts" in words
    for absent in ("model", "operator"):
        assert absent not in words.lower()


@pytest.mark.processes
async def test_a_report_names_costs_of_models_and_operators_where_there_are_any(tmp_path: Path) -> None:
    words = await words_of(tmp_path, standing("gpt", "Apex", Decimal("1.25")), close_reason=Cause.OPERATOR)
    assert "The cost of the language models is paid outside the accounts" in words
    assert "|model cost, USD|" in words
    assert "|1.25|" in words
    assert "|by operator|" in words


@pytest.mark.processes
async def test_the_report_of_a_season_names_models_and_variants(tmp_path: Path) -> None:
    words = await words_of(tmp_path, standing("dip", "Apex"), is_backtest=False)
    assert words.count(f"|{VARIANTS[VariantId.APEX].label}|") == 5
    for present in ("|models|", "|variant|", "|by operator|", "|model cost, USD|", "The cost of the language models"):
        assert present in words


DRAWING = """
import math
from trader.strategies import ClosePosition, CreatePosition, SeriesValue, Side

class Drawing:
    intervals = ("1m",)

    def decide(self, view):
        price = float(view.markets["BTC"].price)
        if view.position("BTC") is not None:
            return [ClosePosition(symbol="BTC")] if view.at.minute == 30 else []
        return [CreatePosition(symbol="BTC", side=Side.LONG, quantity=0.05, leverage=2, stop=price * 0.8,
                               invalidation="none", confidence=50)]

    def series(self, view):
        yield SeriesValue("BTC", "mean <b>", view.markets["BTC"].closes("1m")[-60:].mean())
        yield SeriesValue("BTC", "minute", view.at.minute if view.at.minute % 2 else math.nan, panel=True)
"""


@pytest.mark.processes
async def test_a_browser_draws_the_series_of_a_strategy_over_the_candles_and_below_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chromium_program()
    data, out = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_walk(data / "BTCUSDT-1m-2025-03.csv", START, 900, price=90_000, seed=1)
    (tmp_path / "own.py").write_text(DRAWING)
    options = ("--data", str(data), "--out", str(out), "--no-database", "--strategy", f"{tmp_path / 'own.py'}:Drawing")
    assert await asyncio.to_thread(main, ["backtest", *options, "--from", "2025-03-01T12:00:00Z"]) == 0
    capsys.readouterr()
    drawn = load_table(out, "series")
    names, values = drawn["name"], drawn["value"]
    assert set(values[names == "minute"]) == set(range(1, 60, 2))
    last = values[names == "mean <b>"][-1]
    async with opened_report(out / "report.html", tmp_path) as tab:
        await tab.until("document.querySelectorAll('#markets canvas').length > 1")
        legend = "[...document.querySelectorAll('#markets .series span')].map(one => one.innerText.trim())"
        await tab.until(f"{legend}.length === 2")
        assert await tab.evaluate(legend) == [f"mean <b> {last:,.1f}", "minute 59.0000"]
        keys = "[...document.querySelectorAll('#markets .series .key')]"
        colors = await tab.evaluate(f"{keys}.map(one => one.style.getPropertyValue('--key'))")
        await tab.evaluate(WATCHED)  # with a trade selected, most of the lines is out of the picture
        await tab.evaluate("document.querySelectorAll('#markets .steps button')[1].click()")
        await tab.until(f"{colors}.every(color => window.drawn[color])")
        assert await tab.evaluate(f"{colors}.every(color => window.drawn[color].every(isForward))")
        assert tab.problems == []
        assert [await tab.evaluate(INK.format(color=color)) for color in colors] == [[True, False], [False, True]]
        tab.problems.clear()  # the browser warns of reading pixels


WATCHED = """(() => {
    window.drawn = {}
    window.isForward = line => line.length > 1 && line.every((x, place) => !place || x > line[place - 1])
    let line = []
    const { beginPath, lineTo, stroke } = CanvasRenderingContext2D.prototype
    Object.assign(CanvasRenderingContext2D.prototype, {
        beginPath() { line = []; beginPath.call(this) },
        lineTo(x, y) { line.push(x); lineTo.call(this, x, y) },
        stroke() { (window.drawn[this.strokeStyle] ??= []).push(line); stroke.call(this) },
    })
})()"""
"""Keeps the x of the points of each line that is drawn from now on, by color."""

INK = """(() => {{
    const wanted = [1, 3, 5].map(place => parseInt('{color}'.slice(place, place + 2), 16))
    const isInked = canvas => {{
        const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
        for (let at = 0; at < data.length; at += 4) {{
            if (wanted.every((part, place) => data[at + place] === part)) return true
        }}
        return false
    }}
    return [...document.querySelectorAll('#markets .candles tr')]
        .map(row => [...row.querySelectorAll('canvas')].some(isInked))
        .filter((_, place) => place % 2 === 0)
}})()"""
"""Which panes of the chart have pixels of a color; between panes, a row separates them."""

GROUND = """(() => {
    const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true })
    copy.drawImage(document.querySelector('#markets canvas'), 0, 0)
    return JSON.stringify([...copy.getImageData(1, 1, 1, 1).data].slice(0, 3))
})()"""
"""The color of a corner of a chart of candles."""


@pytest.mark.processes
async def test_a_browser_draws_the_trades_on_candles_and_steps_through_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chromium_program()
    data, out = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_walk(data / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    write_walk(data / "ETHUSDT-1m-2025-03.csv", START, 1_800, price=2_200, seed=2)
    options = ("--data", str(data), "--out", str(out), "--no-database", "--variant", "Trendsurfer")
    hours = ("--from", "2025-03-01T12:00:00Z", "--to", "2025-03-01T20:00:00Z")
    assert await asyncio.to_thread(main, ["backtest", *options, *hours]) == 0
    capsys.readouterr()
    (account,) = orjson.loads((out / "result.json").read_bytes())["accounts"]
    rows = (out / "trades.csv").read_text().splitlines()
    columns = rows[0].split(",")
    trades = [dict(zip(columns, row.split(","), strict=True)) for row in rows[1:]]
    own = [trade for trade in trades if trade["symbol"] == "BTC"]
    assert len(own) > 1
    async with opened_report(out / "report.html", tmp_path) as tab:
        await tab.until("document.querySelectorAll('#markets canvas').length > 1")
        heads, figures, *_ = await rows_of(tab, "Figures")
        assert (heads[0], heads[7]) == ("account", "trades")
        assert (figures[0], figures[7]) == ("Trendsurfer Rules", str(account["trades"]))
        assert figures[1] == f"{account['returnPercent']:+.2f} %"
        assert (await rows_of(tab, "Months"))[2][0] == "Buy and hold"
        names = "[...document.querySelectorAll('#markets section')].map(one => one.querySelector('h3').innerText)"
        assert await tab.evaluate(names) == ["BTC", "ETH"]
        steps = "document.querySelector('#markets .steps')"
        assert f"{len(own)} completed trades" in await tab.evaluate(f"{steps}.innerText")
        await tab.evaluate(
            f"[...{steps}.querySelectorAll('button')].find(one => one.innerText === 'Next trade →').click()"
        )
        await tab.until(f"{steps}.innerText.includes('1 of {len(own)}')")
        shown = re.search(r"net ([+−][\d,.]+)", await tab.evaluate(f"{steps}.innerText"))
        first = min(own, key=lambda trade: trade["opened_at"])
        assert shown is not None
        net = Decimal(shown[1].replace("−", "-").replace(",", ""))
        assert net == round(Decimal(first["net_pnl"]), 2)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        for media, paper, buttons in (("screen", [17, 20, 25], "flex"), ("print", [255, 255, 255], "none")):
            await tab.command("Emulation.setEmulatedMedia", media=media, features=dark)
            await tab.until(f"{GROUND} === '{paper}'.replaceAll(' ', '')")
            assert await tab.evaluate(f"getComputedStyle({steps}.querySelector('button')).display") == buttons
