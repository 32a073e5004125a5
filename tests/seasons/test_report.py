"""The season report: one self-contained file, which explains every change of equity by costs or names the rest."""

import re
from pathlib import Path

import pytest
from benchmarks.bulk import language_models, seed_season
from support.calls import Call
from support.chromium import is_installed, open_tab
from support.outline import Outline

from trader.agents.variants import VARIANTS
from trader.commands.models_seed import sample_models
from trader.database.pool import Database
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
    html = (tmp_path / "season.html").read_text(encoding="utf-8")
    assert "to the last digit" in html
    assert "&lt;Season &amp; one&gt;" in html
    outline = Outline()
    outline.feed(html)
    assert (outline.open, outline.fetched) == ([], [])
    assert "url(" not in html
    evidence = html.partition("<h2>Evidence</h2>")[2]
    assert "whole hours" in evidence or "common hours" in evidence or "cannot be seen" in evidence
    await _is_drawn(tmp_path)
    async with database.connection() as conn:
        accounts = await store.select_report_accounts(conn)
        assert len(accounts) == MODELS
        for account in accounts:
            assert account.change == account.explained
            assert f"{account.equity:,.2f}" in html
            assert account.name in evidence
        assert await conn.execute(CHARGE_MORE, "qwen-apex") == "UPDATE 1"
    assert "<td>1 min</td><td>100.0 %</td>" not in html
    broken = await call("report")
    assert broken.code == 1
    assert "NOT explained by the books: the equity of 1 accounts" in broken.out
    html = (tmp_path / "season.html").read_text(encoding="utf-8")
    assert "qwen-apex" in html.partition("seal bad")[2][:200]
    async with database.connection() as conn:
        await conn.execute(CLOSE_SOONER)  # which also moves what is closed since the last snapshot to before it
    await call("report")
    html = (tmp_path / "season.html").read_text(encoding="utf-8")
    assert "<td>1 min</td><td>100.0 %</td>" in html, "the trades that were held for less than a minute"
    brief, all_trades = re.findall(r"<td>([\d,]+) of ([\d,]+)</td>", html.partition("<h2>Leaderboard</h2>")[2])[0]
    assert brief == all_trades != "0"


async def _is_drawn(folder: Path) -> None:
    """Open the report in a browser, if there is one, and check its charts and its evidence."""
    if not is_installed():
        return
    async with open_tab(folder / "profile", (folder / "season.html").as_uri()) as tab:
        empty = (
            """[...document.querySelectorAll('[data-chart]')].filter(host => !host.querySelector('canvas')).length"""
        )
        assert await tab.evaluate("document.querySelectorAll('[data-chart]').length") == 2 * (len(VARIANTS) + 1) + 1
        assert await tab.evaluate(empty) == 0
        assert await tab.evaluate("document.querySelectorAll('#evidence tbody tr').length") == MODELS
        assert tab.problems == []


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
    assert "Excluded from all figures, as their run has no snapshot yet: 1 models: apex-rules" in made.out
    board = (tmp_path / "season.html").read_text(encoding="utf-8").partition("<h2>Leaderboard</h2>")[2]
    assert "Trendsurfer Rules" in board
    assert "no snapshot yet since it began" in board.partition("Apex Rules")[2]
    assert "4,321.00" in board


async def test_without_models_there_is_nothing_to_report(database: Database, call: Call, tmp_path: Path) -> None:
    made = await call("report")
    assert made.code == 1
    assert "nothing to report" in made.err
