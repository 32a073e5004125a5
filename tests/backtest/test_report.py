"""The report of a backtest: figures, months, and the trades on candles that a browser draws."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.candles import write_walk
from support.chromium import chromium_program, open_tab

from trader.__main__ import main
from trader.backtest.report import monthly_returns, time_held
from trader.core.statistics import EquityPoint

START = datetime(2025, 3, 1, tzinfo=UTC)
CELLS = """[...document.querySelectorAll('section')].find(one => one.querySelector('h2')?.innerText === '{title}')
    .querySelectorAll('tbody tr')"""


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=8))
def test_time_in_the_market_counts_no_minute_twice(spans: list[list[int]]) -> None:
    held = time_held((START + timedelta(minutes=start), START + timedelta(minutes=end)) for start, end in spans)
    assert held == timedelta(minutes=len({minute for start, end in spans for minute in range(start, end)}))


def test_months_compound_to_the_whole_return_and_end_with_ruin() -> None:
    values = {datetime(2025, 1, 5, 3, tzinfo=UTC): 110.0, datetime(2025, 1, 31, 23, tzinfo=UTC): 120.0}
    values |= {datetime(2025, 2, 1, tzinfo=UTC): 90.0, datetime(2025, 3, 1, tzinfo=UTC): 0.0}
    values |= {datetime(2025, 4, 1, tzinfo=UTC): 50.0}
    months = monthly_returns([EquityPoint(hour, value, None) for hour, value in values.items()], 100.0)
    assert {month.month: gain for month, gain in months.items()} == pytest.approx({1: 20.0, 2: -25.0, 3: -100.0})


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
    assert await asyncio.to_thread(main, ["backtest", *options, "--from", "2025-03-01T12:00:00Z"]) == 0
    capsys.readouterr()
    (account,) = orjson.loads((out / "result.json").read_bytes())["accounts"]
    rows = (out / "trades.csv").read_text().splitlines()
    columns = rows[0].split(",")
    trades = [dict(zip(columns, row.split(","), strict=True)) for row in rows[1:]]
    own = [trade for trade in trades if trade["symbol"] == "BTC"]
    assert len(own) > 1
    async with open_tab(tmp_path / "profile", (out / "report.html").as_uri()) as tab:
        await tab.until("document.querySelectorAll('#markets canvas').length > 1")
        figures = await tab.evaluate(f"{CELLS.format(title='Figures')}[0].innerText")
        name, gained, _, _, _, _, _, count, *_ = figures.split("\t")
        assert (name, count) == ("Trendsurfer Rules", str(account["trades"]))
        assert gained == f"{account['returnPercent']:+.2f} %".replace("-", "−")
        assert await tab.evaluate(f"{CELLS.format(title='Months')}[1].innerText.split('\\t')[0]") == "Buy and hold"
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
        assert tab.problems == []
