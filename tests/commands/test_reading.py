"""The commands that read: their output for known rows, for people and for programs."""

import re
import socket
from datetime import timedelta
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.calls import Call
from support.records import HOUR, START, add_invocation, add_model, add_trade
from support.seasons import add_season
from support.served import make_health_app, served
from support.service_parts import NAMES, ServiceParts
from support.sinks import sinks

from trader.agents.domain.models import Model, ModelConfiguration, TokenPrice
from trader.agents.sql.models import upsert_model
from trader.api.health import present_alarms
from trader.api.schemas.common import ENCODER
from trader.core.variant_id import VariantId
from trader.database.leadership import LeaderLock
from trader.database.pool import Database
from trader.database.relay import LeaderView, upsert_relay
from trader.operations.alarms import Alarms, Maintenance
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.sql.status import select_maintenance, upsert_maintenance
from trader.portfolio.tables import load

MODELS_FILE = """
[[models]]
id = "new"
variant = "Contrarian"
provider = "rules"
router_model = "rules/contrarian"
initial_capital = 500

[[models]]
id = "ada"
name = "Ada Again"
variant = "Apex"
provider = "openrouter"
router_model = "some/model"
initial_capital = 500
"""


@pytest.fixture
async def rows(database: Database) -> None:
    """Two models with trades; `bob` has made more of its account."""
    async with database.connection() as conn:
        await add_model(conn, "ada")
        await add_model(conn, "bob", VariantId.SOVEREIGN)
        await add_trade(conn, "ada", START + HOUR, gross="10", fees="1")
        await add_trade(conn, "bob", START + 2 * HOUR, gross="30", fees="1", side="SHORT")
        await add_invocation(conn, "ada", START + HOUR)
        await add_invocation(conn, "bob", START + HOUR)
        await conn.execute(
            "INSERT INTO service_state (market_identity, trading_mode, processed_until)"
            " VALUES ('synthetic:0', 'simulated', $1)",
            START + timedelta(hours=3),
        )


async def test_listed_trades_equal_the_answer_of_the_procedure(rows: None, call: Call) -> None:
    result = (await call("show", "trades", "--json")).value
    assert [(trade["modelId"], trade["side"], trade["netPnl"]) for trade in result["trades"]] == [
        ("bob", "SHORT", 29), ("ada", "LONG", 9),
    ]  # fmt: skip
    assert result["database"]["service"] == "not running"
    assert [
        trade["modelId"] for trade in (await call("show", "trades", "--account", "ada", "--json")).value["trades"]
    ] == ["ada"]
    assert len((await call("show", "trades", "--limit", "1")).out.splitlines()) == 2
    shown = (await call("show", "trades")).out.splitlines()
    assert shown[0].split()[:3] == ["closed", "account", "market"]
    assert "bob" in shown[1]
    assert "+29.00" in shown[1]


async def test_an_export_has_every_trade_as_typed_columns(rows: None, call: Call, tmp_path: Path) -> None:
    counts = (await call("export", "all", "--json")).value["rows"]
    assert counts == {"trades": 2, "fills": 0, "equity": 0, "decisions": 0}
    assert (await call("export", "bobs", "--account", "bob", "--tables", "parquet")).code == 0
    trades = load(tmp_path / "all").trades
    assert list(trades["account"]) == ["ada", "bob"]
    assert list(trades["net_pnl"]) == [9, 29]
    bob = load(tmp_path / "bobs").trades
    for name, column in trades.arrays().items():
        np.testing.assert_array_equal(bob[name], column[1:])
    refused = await call("export", "all")
    assert refused.code == 1
    assert "all cannot be written: File exists" in refused.err


async def test_accounts_match_the_board(rows: None, call: Call) -> None:
    accounts = (await call("accounts", "list", "--json")).value["accounts"]
    assert {account["accountId"]: account["equity"] for account in accounts} == {"ada": 10009, "bob": 10029}
    assert (await call("accounts", "show", "bob", "--json")).value["account"] == accounts[1]
    board = (await call("show", "board", "--json")).value
    assert [(entry["rank"], entry["modelId"], entry["pnlAbsolute"]) for entry in board["entries"]] == [
        (1, "bob", 29), (2, "ada", 9),
    ]  # fmt: skip
    assert [
        entry["modelId"] for entry in (await call("show", "board", "--variant", "Apex", "--json")).value["entries"]
    ] == ["ada"]
    assert "10,029.00" in (await call("accounts", "show", "bob")).out
    assert (await call("show", "positions", "--json")).value["positions"] == []


async def test_the_board_of_a_season_that_is_over_shows_its_end(rows: None, call: Call, database: Database) -> None:
    async with database.connection() as conn:
        await add_season(conn, start=START, end=START + 1.5 * HOUR)
    board = (await call("show", "board", "--json")).value
    assert board["asOf"] == "2026-03-04T01:30:00Z"
    assert {entry["modelId"]: entry["tradesCount"] for entry in board["entries"]} == {"ada": 1, "bob": 0}


async def test_status_fails_until_a_service_leads_and_says_why(
    rows: None, call: Call, database: Database, dsn: str
) -> None:
    outcome = await call("status", "--json")
    assert outcome.code == 1
    assert outcome.value["troubles"] == ["the service is not running"]
    facts = outcome.value["status"]
    assert (facts["models"], facts["trades"], facts["invocations"], facts["positions"]) == (2, 2, 2, 0)
    lock = LeaderLock(dsn)
    assert await lock.try_acquire()
    assert (await call("status", "--json")).value["troubles"] == [
        "the service has just started, or hangs: its last heartbeat was never"
    ]
    async with database.connection() as conn:
        await conn.execute("UPDATE service_state SET heartbeat_at = now(), schedulers = $1", {"tradeExecutor": False})
        assert (await call("status", "--json")).value["troubles"] == ["tradeExecutor is not running"]
        await conn.execute("UPDATE service_state SET schedulers = $1", {"tradeExecutor": True})
        well = await call("status")
        assert (well.code, well.out.splitlines()[-1]) == (0, "all well")
        assert "the service is running" in well.err
        await conn.execute("INSERT INTO halts (cause, reason, halted_by) VALUES ('drawdown', 'it fell', 'limit')")
    outcome = await call("status")
    assert outcome.code == 1
    halted = re.search(r"NOT well    halted: all accounts: drawdown: it fell \(since 20.* UTC, by limit\)", outcome.out)
    assert halted, outcome.out
    await lock.release()


async def test_status_shows_health_first_and_names_what_it_cannot_read(
    rows: None, call: Call, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await asyncpg.connect(dsn, server_settings={"application_name": "psql"})
    async with served(make_health_app(ServiceParts())) as server, other.transaction():
        monkeypatch.setenv("PORT", str(server.port))
        await other.execute("LOCK TABLE commands")
        outcome = await call("status")
        assert outcome.code == 1
        assert outcome.out.startswith(f"health      unhealthy, at http://localhost:{server.port}")
        pid = other.get_server_pid()
        assert (
            f"NOT well    not read: Table commands is locked by pid {pid} (psql: LOCK TABLE commands)." in outcome.out
        )
        monkeypatch.setenv("DATABASE_URL", "postgresql://u@127.0.0.1:1/trader")
        outcome = await call("status")
        assert outcome.out.startswith(f"health      unhealthy, at http://localhost:{server.port}")
        assert (
            "NOT well    the database cannot be read: The database at 127.0.0.1:1/trader cannot be used" in outcome.out
        )
    await other.close()


async def test_status_shows_the_health_report_of_the_service(
    rows: None, call: Call, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.connection() as conn:
        await conn.execute("UPDATE service_state SET heartbeat_at = now(), schedulers = $1", {"tradeExecutor": True})
    async with served(make_health_app(ServiceParts())) as server, TestServer(web.Application()) as stranger:
        monkeypatch.setenv("PORT", str(server.port))
        outcome = await call("status")
        assert f"unhealthy, at http://localhost:{server.port}, but none leads on this database" in outcome.out
        assert "NOT well    the service is not running" in outcome.out
        lock = LeaderLock(dsn)
        assert await lock.try_acquire()
        outcome = await call("status", "--json")
        reasons = [f"the scheduler {name} does not run" for name in NAMES]
        assert (outcome.code, outcome.value["troubles"]) == (1, [f"unhealthy: {reason}" for reason in reasons])
        assert outcome.value["health"]["report"]["reasons"] == reasons
        elsewhere = stranger.port
        monkeypatch.setenv("PORT", str(elsewhere))
        monkeypatch.setenv("SERVER_URL", f"http://127.0.0.1:{server.port}")
        assert (await call("status", "--json")).value["health"]["url"] == f"http://127.0.0.1:{server.port}"
        monkeypatch.delenv("SERVER_URL")
        outcome = await call("status")
        assert f"something other than trader answers at http://localhost:{elsewhere}" in outcome.out
    outcome = await call("status")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "all well"), "the service may be on another machine"
    assert f"no service answers at http://localhost:{elsewhere}: " in outcome.out
    view = LeaderView(
        now=START, updated_at=None, quotes=(), markets=None, market_troubles={}, account_troubles={}, warning=None,
        snapshots_created=0, alarms=ENCODER.encode(present_alarms(failing_model())).decode(),
    )  # fmt: skip
    async with database.connection() as conn:
        term = await conn.fetchval("SELECT term FROM service_state")
        await upsert_relay(conn, 1, msgspec.json.encode(view).decode(), term)
    outcome = await call("status")
    assert (outcome.code, "all well" in outcome.out) == (1, False), "the leader recorded its alarms a moment ago"
    assert "NOT well    model ada: ada failed 23 times in a row: no (since " in outcome.out
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        monkeypatch.setattr("trader.commands.status.ASK_S", 0.1)
        monkeypatch.setenv("PORT", str(hanging.getsockname()[1]))
        outcome = await call("status")
        assert (outcome.code, outcome.out.count("NOT well    no service answers at")) == (1, 1)
    monkeypatch.setenv("PORT", "http")
    assert "unavailable: PORT: expected a whole number" in (await call("status")).out
    await lock.release()


async def test_all_is_not_well_while_an_alarm_is_present(
    rows: None, call: Call, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.connection() as conn:
        await conn.execute("UPDATE service_state SET heartbeat_at = now(), schedulers = $1", {"tradeExecutor": True})
    lock, service_parts = LeaderLock(dsn), ServiceParts()
    assert await lock.try_acquire()
    service_parts.market.last_update_at = service_parts.clock.now()
    async with served(make_health_app(service_parts)) as server:
        await service_parts.schedulers.start()
        await service_parts.clock.advance(timedelta(seconds=1))
        monkeypatch.setenv("PORT", str(server.port))
        well = await call("status")
        assert (well.code, well.out.splitlines()[-1]) == (0, "all well"), well.out
        failing_model(service_parts.alarms)
        outcome = await call("status")
        assert (outcome.code, "all well" in outcome.out) == (1, False)
        assert "health      healthy, at http://localhost:" in outcome.out
        assert re.search(
            r"NOT well    model ada: ada failed 23 times in a row: no \(since .* UTC, not sent\)", outcome.out
        )
        assert [alarm["state"] for alarm in (await call("status", "--json")).value["alarms"]] == ["pending"]
        await service_parts.schedulers.close()
    await lock.release()


def failing_model(alarms: Alarms | None = None) -> Alarms:
    """The alarms of a service with a model that has just failed once more."""
    alarms = alarms or Alarms([])
    alarms.sources.append(lambda: [Alarm(AlarmCause("model", "ada"), "ada failed 23 times in a row: no")])
    return alarms


async def test_an_empty_database_has_nothing_to_show(database: Database, call: Call) -> None:
    assert (await call("status", "--json")).value["status"]["marketIdentity"] is None
    for words in (
        ("show", "trades"),
        ("show", "positions"),
        ("show", "board"),
        ("accounts", "list"),
        ("models", "list"),
    ):
        outcome = await call(*words)
        assert outcome.code == 0, outcome
        assert "Traceback" not in outcome.err


async def test_models_are_added_updated_and_paused(rows: None, call: Call, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(MODELS_FILE, encoding="utf-8")
    added = await call("models", "add", "models.toml")
    assert "1 of 2 models added, 1 account opened." in added.out
    assert "ada is already open with 10000; its capital does not change." in added.out
    assert "ada has no `every`" in added.out
    assert (await call("models", "pause", "new")).out.startswith("new is paused.")
    assert (await call("models", "pause", "new")).out == "new was already paused.\n"
    listed = {
        model["model"]["id"]: model["model"] for model in (await call("models", "list", "--json")).value["models"]
    }
    assert {name: (entry["active"], entry["name"]) for name, entry in listed.items()} == {
        "ada": (True, "Ada Again"), "bob": (True, listed["bob"]["name"]), "new": (False, "new"),
    }  # fmt: skip
    assert (await call("models", "resume", "new")).code == 0
    assert (await call("accounts", "show", "new", "--json")).value["account"]["equity"] == 500
    (tmp_path / "models.toml").write_text(MODELS_FILE.replace("Contrarian", "Contrary"), encoding="utf-8")
    wrong = await call("models", "add", "models.toml")
    assert wrong.code == 2
    assert wrong.err.startswith("Nothing was changed:\n  models.toml, line 4: model 1.variant: expected one of Apex")


async def test_a_removed_model_is_gone_unless_it_has_a_record(
    rows: None, database: Database, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "models.toml").write_text(MODELS_FILE, encoding="utf-8")
    assert (await call("models", "add", "models.toml")).code == 0
    assert (await call("models", "remove", "new")).out == "new is removed. It had never decided or traded.\n"
    assert (await call("audit", "chain")).code == 0, "the record says that it was removed"
    assert "There is no model 'new'" in (await call("models", "remove", "new")).err
    assert "There is no account 'new'" in (await call("accounts", "show", "new")).err
    assert (await call("models", "add", "models.toml")).out.startswith("1 of 2 models"), "its name is free again"
    async with database.connection() as conn:
        await conn.execute("DELETE FROM invocation_counts WHERE model_id = 'bob'")
        await conn.execute("DELETE FROM invocations WHERE model_id = 'bob'")
    for model_id in ("ada", "bob"):  # one has decided and traded, the other has only traded
        kept = await call("models", "remove", model_id, "--json")
        assert (kept.value["removed"], kept.value["active"]) == (False, False)
        assert f"`trader flatten --account {model_id}`" in (await call("models", "remove", model_id)).out
    assert len((await call("show", "trades", "--json")).value["trades"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "trades", "--account", "eve"), "There is no account 'eve'. Existing accounts: ada, bob."),
        (("accounts", "show", "eve"), "There is no account 'eve'. Existing accounts: ada, bob."),
        (("accounts", "reset", "eve"), "There is no account 'eve'. Existing accounts: ada, bob."),
        (("models", "pause", "eve"), "There is no model 'eve'. Existing models: ada, bob."),
    ],
)
async def test_unknown_names_list_the_existing_ones(rows: None, call: Call, words: tuple[str, ...], said: str) -> None:
    outcome = await call(*words)
    assert (outcome.code, said in outcome.err) == (1, True), outcome


async def test_budgets_of_today_are_shown(call: Call, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    capped = ModelConfiguration(price=TokenPrice(input=1, output=2), budget_usd_per_day=1, when_spent="pause")
    async with database.connection() as conn:
        await conn.execute(
            "INSERT INTO service_state (market_identity, trading_mode, lived_until) VALUES ('m', 'simulated', $1)",
            START + HOUR,
        )
        for name in ("ada", "bob"):
            model = Model(
                id=name, name=name, variant=VariantId.APEX, provider="openai", router_model_name="lab/one",
                created_at=START, configuration=capped,
            )  # fmt: skip
            await upsert_model(conn, model)
        await add_invocation(conn, "bob", START)
        await conn.execute("UPDATE invocations SET cost_usd = 0.995, unmetered_attempts = 1")
    monkeypatch.setenv("AI_BUDGET_USD_PER_DAY", "5")
    said = await call("status", "--budgets")
    assert "~0.9950 USD  paused by its budget" in said.out
    assert "All models: 0.995 of 5 USD (AI_BUDGET_USD_PER_DAY)." in said.out
    listed = {row.split()[0]: row for row in (await call("models", "list")).out.splitlines() if row.strip()}
    assert "active" in listed["ada"]
    assert "paused by its budget" in listed["bob"]
    budget = (await call("status", "--budgets", "--json")).value["budgets"]["bob"]
    assert budget == {"usd": 1, "spentUsd": 0.995, "isEstimated": True, "state": "pause"}


async def test_sinks_are_tested(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sinks() as here:
        unset = await call("status", "--test-notice")
        assert (unset.code, unset.out) == (1, "NOTIFY_URL is not set: alarms are not sent anywhere\n")
        monkeypatch.setenv("NOTIFY_URL", f"{here.url}/works,{here.url}/fails")
        tested = await call("status", "--test-notice")
        assert (tested.code, tested.out) == (1, "json 1: sent\njson 2: failed: the answer was HTTP 500\n")


async def test_past_alarms_are_listed_from_the_database(call: Call, database: Database) -> None:
    alarms = Alarms([])
    alarms.keep_history(database, "trader here:1")
    for text in ("this process has taken over, term 3", "this process has lost the leading role"):
        alarms.add(Alarm(AlarmCause("takeover"), text, under=None))
    alarms.add(Alarm(AlarmCause("liquidation", "apex"), "apex: LONG 1 BTC"))
    await alarms.close()
    said = await call("status", "--since", "1h")
    lines = [line.split("  ", 1)[1] for line in said.out.splitlines()]
    assert sorted(lines) == [
        "event     liquidation apex: apex: LONG 1 BTC (trader here:1)",
        "event     takeover: this process has lost the leading role (trader here:1)",
    ]
    listed = (await call("status", "--since", "2020-01-01", "--json")).value["notices"]
    assert {(each["cause"], each["subject"]) for each in listed} == {("liquidation", "apex"), ("takeover", "")}
    assert "nothing was reported since" in (await call("status", "--since", "2099-01-01")).out
    wrong = await call("status", "--since", "yesterday")
    assert (wrong.code, "'yesterday' is neither a time such as" in wrong.err) == (2, True)
    async with database.connection() as conn:
        await conn.execute("UPDATE alarm_history SET at = now() - interval '91 days' WHERE cause = 'takeover'")
    alarms = Alarms([])
    alarms.keep_history(database, "trader here:1")
    alarms.add(Alarm(AlarmCause("stop"), "asked to stop"))
    await alarms.close()
    assert "takeover" not in (await call("status", "--since", "2020-01-01")).out, "they are kept for 90 days"


async def test_recorded_checks_appear_in_the_metrics(rows: None, call: Call, database: Database) -> None:
    recorded = await call("audit", "--record", "--json")
    assert (recorded.code, recorded.value["isClean"], recorded.value["isIntact"]) == (1, False, True)
    only = await call("audit", "chain", "--json")
    assert (only.code, "isClean" in only.value) == (0, False)
    assert (await call("audit", "books", "--anchors", "x")).code == 2
    maintenance = Maintenance()
    async with database.connection() as conn:
        await maintenance.read(conn)
    problems = {run.task: run.problems > 0 for run in maintenance.runs}
    assert problems == {"audit": True, "verify": False}
    async with database.connection() as conn:
        await upsert_maintenance(conn, "backup", 0)
        await upsert_maintenance(conn, "backup", 3)
        (backup, *_) = [run for run in await select_maintenance(conn) if run.task == "backup"]
    assert (backup.problems, backup.success_age_s is not None) == (3, True), "the last clean one stays known"
