"""The commands of seasons."""

import json
from pathlib import Path

import pytest
from support.calls import Call
from support.records import add_model

from trader.__main__ import main
from trader.core.errors import SettingsError
from trader.database.pool import Database
from trader.exchange.sql.accounts import DatabaseIdentity, upsert_service_state
from trader.portfolio.domain.seasons import seed_digest
from trader.portfolio.seasons import require_terms
from trader.record.sql.chain import select_anchors
from trader.settings.settings import Settings

SEASON = """\
name = "Winter"
start = 2198-12-01T00:00:00Z
end = 2199-01-01T00:00:00Z
markets = ["BTC", "ETH", "SOL"]
capital = 10_000
taker_fee_bps = 5
maker_fee_bps = 2
latency_ms = 200
replicates = 1
compare = ["holdNothing", "bestOther"]
alpha = 0.05
stopping = "end"
disqualify = ["reset"]
entrants = ["ada", "bob"]
"""
SEED = "271828"
EDIT_RULES = """
UPDATE season_records SET record = edited, digest = sha256(convert_to(edited, 'UTF8'))
FROM (SELECT replace(record, '0.05', '0.5') AS edited FROM season_records WHERE number = 0) r WHERE number = 0
"""


@pytest.fixture
async def season_file(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a season, with a database in which a service with these entrants has started."""
    monkeypatch.setenv("MARKET_SOURCE", "synthetic")
    async with database.connection() as conn:
        await add_model(conn, "ada")
        await add_model(conn, "bob")
        identity = DatabaseIdentity(f"synthetic:sha256:{seed_digest(SEED)}", "simulated")
        await upsert_service_state(conn, identity)
    file = tmp_path / "season.toml"
    file.write_text(SEASON)
    return file


async def test_a_season_is_opened_once_and_shown_with_every_amendment(
    call: Call, season_file: Path, database: Database
) -> None:
    opened = await call("season", "open", str(season_file), "--json")
    assert opened.code == 0, opened.err
    assert opened.value["season"] == 1
    assert opened.value["seedDigest"] == seed_digest(SEED)
    async with database.connection() as conn:
        (anchor,) = await select_anchors(conn)
        (link,) = await conn.fetch(
            "SELECT position, digest, kind, record FROM chain_links ORDER BY position DESC LIMIT 1"
        )
    assert (anchor.position, anchor.digest, link["kind"]) == (link["position"], link["digest"], "season_records")
    assert opened.value["digest"] in link["record"], "in the chain, and anchored, before anything is decided"
    again = await call("season", "open", str(season_file))
    assert again.code == 1
    assert "season 1 (Winter) is still open" in again.err
    same = await call("season", "amend", str(season_file), "--reason", "none")
    assert same.code == 2
    assert "nothing is changed" in same.out
    season_file.write_text(SEASON.replace("alpha = 0.05", "alpha = 0.01"))
    amended = await call("season", "amend", str(season_file), "--reason", "agreed by all")
    assert amended.code == 0, amended.err
    async with database.connection() as conn:
        assert len(await select_anchors(conn)) == 2
    shown = await call("season", "show", "--json")
    (season,) = shown.value["seasons"]
    assert season["digest"] == opened.value["digest"], "what it was opened with stays"
    assert season["rules"]["alpha"] == 0.01
    (amendment,) = season["amendments"]
    assert (amendment["reason"], amendment["changes"]) == (
        "agreed by all",
        [{"rule": "alpha", "before": 0.05, "after": 0.01}],
    )
    assert "alpha: 0.05 → 0.01" in (await call("season", "show")).out
    assert (await call("verify")).code == 0
    async with database.connection() as conn, conn.transaction():
        await conn.execute("SET LOCAL session_replication_role = replica")
        await conn.execute(EDIT_RULES)
    verified = await call("verify")
    assert verified.code == 1
    assert "season_records 1, 0: record is" in verified.out


@pytest.mark.parametrize(
    ("line", "instead", "where", "what"),
    [
        ("end = 2199-01-01T00:00:00Z", "end = 2198-11-30T00:00:00Z", "line 3: end", "is not after the start"),
        ("start = 2198-12-01T00:00:00Z", "start = 2020-12-01T00:00:00Z", "line 2: start", "is in the past"),
        ("start = 2198-12-01T00:00:00Z", "start = 2198-12-01", "line 2: start", "a time with its offset"),
        ('entrants = ["ada", "bob"]', 'entrants = ["ada", "eve"]', "line 14: entrants", "unknown model 'eve'"),
        ('["BTC", "ETH", "SOL"]', '["BTC", "ETH", "SOL", "PEPE"]', "line 4: markets", "'PEPE' has no source of prices"),
        ('["holdNothing", "bestOther"]', '["holdNothing", "luck"]', "line 10: compare", "expected one of bestOther"),
        ("capital = 10_000", "capital = 500", "line 14: entrants", "has a capital of 10000"),
        ("taker_fee_bps = 5", "taker_fee_bps = 4", "line 6: taker_fee_bps", "SIM_TAKER_FEE_BPS"),
        ("replicates = 1", "replicates = 3", "line 14: entrants", "replicates is 3"),
        ("alpha = 0.05", "alpha = 0.05\nprize = 1", "line 12: prize", "unknown field"),
        ("alpha = 0.05", "alpha =", "season.toml", "line 11"),
    ],
)
async def test_an_invalid_season_file_is_refused_with_line_and_reason_and_opens_nothing(
    line: str, instead: str, where: str, what: str, call: Call, season_file: Path
) -> None:
    season_file.write_text(SEASON.replace(line, instead))
    said = await call("season", "open", str(season_file))
    assert said.code == 2
    assert where in said.out
    assert what in said.out
    assert (await call("season", "show", "--json")).value["seasons"] == []


async def test_a_service_with_other_settings_than_the_season_does_not_start(
    call: Call, season_file: Path, database: Database, tmp_path: Path
) -> None:
    def settings(**texts: str) -> Settings:
        return Settings.load({"MARKET_SOURCE": "synthetic", **texts}, tmp_path / ".env", demo=True)

    await require_terms(database, settings(SIM_TAKER_FEE_BPS="4"))
    assert (await call("season", "open", str(season_file))).code == 0
    await require_terms(database, settings())
    with pytest.raises(SettingsError, match=r"taker_fee_bps: 5; the service has 4 \(SIM_TAKER_FEE_BPS\)"):
        await require_terms(database, settings(SIM_TAKER_FEE_BPS="4"))


def test_a_plan_is_printed_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "season-plan --models 2 --sharpe 12 --days 90 --seasons 10 --replicates 2"
    words = asked.split()
    assert main(words) == 0
    assert "2 entrants, 7 comparisons at α 0.05" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["days"] == [7, 14, 30, 60, 90]
    assert [power["question"] for power in answer["powers"]] == ["holdNothing", "baseline", "otherModel"]


def test_a_plan_follows_the_rules_of_a_season_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "season.toml"
    words = ["season-plan", str(file), "--json", "--seasons", "10", "--sharpe", "12"]
    file.write_text(SEASON.replace("alpha = 0.05", "alpha = 0.2").replace("replicates = 1", "replicates = 3"))
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["comparisons"], answer["alpha"], answer["days"]) == (3, 0.2, [7, 14, 30, 31])
    assert {(power["question"], power["replicates"]) for power in answer["powers"]} == {
        ("holdNothing", 3),
        ("otherModel", 3),
    }
    primary = '\n[primary]\nentrant = "ada"\nagainst = "holdNothing"\nalpha = 0.4\n'
    file.write_text(SEASON + primary)
    assert main([*words, "--sharpe", "20", "--days", "90"]) == 0
    registered, nothing, *_ = json.loads(capsys.readouterr().out)["powers"]
    assert (registered["question"], nothing["question"]) == ("primary", "holdNothing")
    assert registered["days_needed"] < nothing["days_needed"]
    file.write_text(SEASON.replace('entrants = ["ada", "bob"]\n', ""))
    assert main(words) == 2
    assert "--models is needed: the file names no entrants" in capsys.readouterr().err
    file.write_text(SEASON.replace("end = 2199-01-01", "end = 2198-01-01"))
    assert main(words) == 2
    assert "line 3: end: 2198-01-01T00:00:00.000Z is not after the start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--models", "0", "--models: 0 is not from 1 to 1000"),
        ("--days", "5000", "--days: 5000 is not from 1 to 1095"),
        ("--noise", "-1", "--noise: -1 is not from 0 to 100"),
    ],
)
def test_a_plan_with_impossible_figures_says_what_is_allowed(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--models": "8", "--sharpe": "3", option: value}
    assert main(["season-plan", *(f"{name}={each}" for name, each in words.items())]) != 0
    assert why in capsys.readouterr().err
