"""The season report: one self-contained file, which explains every change of equity by costs or names the rest."""

from decimal import Decimal
from pathlib import Path

import pytest
from benchmarks.bulk import language_models, seed_season
from support.calls import Call
from support.chromium import is_installed
from support.reports import opened_report, report_data, rows_of

from trader.agents.sql.models import select_models
from trader.agents.variants import VARIANTS
from trader.commands.models_seed import sample_models
from trader.database.pool import Database
from trader.portfolio.run_statistics import CurrentRuns
from trader.seasons.sql import report as store

pytestmark = pytest.mark.processes

MODELS = 8


CHARGE_MORE = """
UPDATE fills SET fee = fee + 1e-16
WHERE account_id = $1 AND sequence = (SELECT min(sequence) FROM fills WHERE account_id = $1)
"""

CLOSE_SOONER = "UPDATE orders SET closed_at = opened_at + interval '59 seconds' WHERE status = 'CLOSED'"


async def test_a_season_is_rendered_and_unexplained_equity_named(
    database: Database, dsn: str, call: Call, tmp_path: Path
) -> None:
    await seed_season(dsn, 1, language_models(MODELS), cycle=15, shown=False)
    made = await call("report", "--name", "<Season & one>")
    assert made.code == 0, made.err
    shown = report_data(tmp_path / "season.html")
    runs = await CurrentRuns(database).refresh()
    async with database.connection() as conn:
        models = {model.id: model for model in await select_models(conn)}
        accounts = await store.select_report_accounts(conn, models, runs)
        assert len(accounts) == len(shown["evidence"]["entrants"]) == MODELS
        assert all(account.change == account.explained for account in accounts)
        assert sorted(
            (model["account"]["name"], model["account"]["equity"], model["change"]) for model in shown["models"]
        ) == sorted((account.name, str(account.equity), str(account.change)) for account in accounts)
        assert await conn.execute(CHARGE_MORE, "qwen-apex") == "UPDATE 1"
    await _is_drawn(tmp_path)
    broken = await call("report")
    assert broken.code == 1
    assert "NOT explained by the books: the equity of 1 account\n" in broken.out
    assert report_data(tmp_path / "season.html")["unexplained"] == ["qwen-apex"]
    async with database.connection() as conn:
        await conn.execute(CLOSE_SOONER)  # which also moves what is closed since the last snapshot to before it
    await call("report")
    shown = report_data(tmp_path / "season.html")
    assert all(trades["brief"] == 100 for trades in shown["trades"])
    assert all(model["account"]["withinMinute"] == model["account"]["trades"] > 0 for model in shown["models"])


async def _is_drawn(folder: Path) -> None:
    """Open the report in a browser, if there is one, and check its charts, its tables and its evidence."""
    if not is_installed():
        return
    shown = report_data(folder / "season.html")
    async with opened_report(folder / "season.html", folder) as tab:
        await tab.until("[...document.querySelectorAll('.chart')].every(host => host.querySelector('canvas'))")
        assert await tab.evaluate("document.querySelectorAll('.chart').length") == 2 * (len(VARIANTS) + 1) + 1
        assert await tab.evaluate("document.querySelectorAll('#evidence tbody tr').length") == MODELS
        text = await tab.evaluate("document.querySelector('main').innerText")
        assert "<Season & one>: " in text
        assert "add up to the change of its equity, to the last digit" in text
        assert "This board cannot separate" in text
        heads, *rows = await rows_of(tab, "Leaderboard")
        for row, model in zip(rows, shown["models"], strict=True):
            cells, account = dict(zip(heads, row, strict=True)), model["account"]
            assert (cells["model"], cells["equity"]) == (account["name"], f"{Decimal(account['equity']):,.2f}")
            returned = f"{model['returnPercent']:+.2f} %"
            assert cells["return"] == ("0.00 %" if returned in {"+0.00 %", "-0.00 %"} else returned)
        heads, *rows = (await rows_of(tab, "Where the money went"))[8:]
        assert [row[0] for row in rows][-1] == "all"
        assert Decimal(rows[-1][7].replace(",", "")) == round(
            sum(Decimal(model["change"]) for model in shown["models"]), 2
        )


RESET = """
WITH ended AS (
    UPDATE runs SET ended_at = started_at + interval '12 hours' WHERE account_id = $1 AND ended_at IS NULL
    RETURNING *
)
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
SELECT gen_random_uuid(), account_id, number + 1, 4321, quote_currency, ended_at FROM ended
"""


async def test_a_model_without_a_snapshot_since_its_reset_is_shown(
    database: Database, dsn: str, call: Call, tmp_path: Path
) -> None:
    await seed_season(dsn, 1, sample_models(2), cycle=30, shown=False)
    async with database.connection() as conn:
        assert await conn.execute(RESET, "apex-rules") == "INSERT 0 1"
    made = await call("report")
    assert made.code == 0, made.err
    assert "Excluded from all figures, without a snapshot yet: 1 model: apex-rules" in made.out
    shown = report_data(tmp_path / "season.html")
    assert [model["account"]["name"] for model in shown["models"]] == ["Trendsurfer Rules"]
    assert [(model["name"], model["initialCapital"]) for model in shown["unvalued"]] == [("Apex Rules", "4321")]
    if is_installed():
        async with opened_report(tmp_path / "season.html", tmp_path) as tab:
            *_, last = await rows_of(tab, "Leaderboard")
            assert last[0].startswith("Apex Rules")
            assert "no snapshot yet since it began on" in last[0]
            assert last[0].endswith("with 4,321.00")


async def test_without_models_there_is_nothing_to_report(database: Database, call: Call, tmp_path: Path) -> None:
    made = await call("report")
    assert made.code == 1
    assert "nothing to report" in made.err
