"""Seeding: repeatable models and accounts from a file or arguments, and a history whose books balance."""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from support.records import add_run, make_run
from support.waiting import until

from trader.__main__ import main
from trader.agents.domain.models import ModelConfiguration, TokenPrice
from trader.agents.sql.models import select_models
from trader.backtest.history import history_database
from trader.core.clock import SystemClock
from trader.database.leadership import LeaderLock, update_heartbeat
from trader.database.pool import Database
from trader.exchange.sql.accounts import (
    DatabaseIdentity,
    select_accounts,
    select_processed_until,
    upsert_service_state,
)
from trader.portfolio.audit import audit

FILE = """
[[models]]
id = "deepseek-apex"
name = "DeepSeek"
variant = "Apex"
provider = "openrouter"
router_model = "deepseek/deepseek-chat"
initial_capital = 2500.5

[[models]]
id = "rules-c"
variant = "Contrarian"
provider = "rules"
router_model = "rules/contrarian"
active = false
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)


def _run(*arguments: str) -> int:
    """Run it in a separate thread, since the test already has an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(main, ["models", "add", *arguments]).result()


async def test_seeding_a_models_file_is_repeatable(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("models.toml").write_text(FILE, encoding="utf-8")
    before = SystemClock().now()
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    assert "2 of 2 models added, 2 accounts opened" in capsys.readouterr().out
    Path("models.toml").write_text(FILE.replace("2500.5", "9").replace("DeepSeek", "Deep"), encoding="utf-8")
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    output = capsys.readouterr().out
    assert "0 of 2 models added, 0 accounts opened" in output
    assert "deepseek-apex is already open with 2500.5" in output
    async with database.connection() as conn:
        models = {model.id: model for model in await select_models(conn)}
        accounts = await select_accounts(conn)
    assert models["deepseek-apex"].name == "Deep"
    assert (models["rules-c"].name, models["rules-c"].active) == ("rules-c", False)
    assert before <= models["deepseek-apex"].created_at <= SystemClock().now()
    assert {name: float(account.run.initial_capital) for name, account in accounts.items()} == {
        "deepseek-apex": 2500.5,
        "rules-c": 10_000,
    }
    assert (await audit(database)).is_clean


async def test_a_live_model_gets_its_venue_account_without_paper_capital(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "TRADING_MODE": "live", "VENUE_ACCOUNT_INDEX": "7", "LIVE_CONFIRM": "7", "VENUE_API_KEY": "ab" * 40,
        "OPENAI_BASE_URL": "http://127.0.0.1:9",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    Path("models.toml").write_text(FILE + "venue_account_index = 12\n", encoding="utf-8")
    assert _run("models.toml", "--database-url", dsn) == 0
    assert "2 of 2 models added, 0 accounts opened" in capsys.readouterr().out
    Path("models.toml").write_text(FILE, encoding="utf-8")
    assert _run("models.toml", "--database-url", dsn) == 0
    async with database.connection() as conn:
        indexes = {model.id: model.venue_account_index for model in await select_models(conn)}
        assert await select_accounts(conn) == {}
    assert indexes == {"deepseek-apex": None, "rules-c": "12"}, "a file that does not name it leaves it"


async def test_one_model_is_seeded_by_arguments(database: Database, dsn: str) -> None:
    asked = ["--variant", "Sovereign", "--provider", "nim", "--router-model", "meta/llama-4", "--capital", "77"]
    assert _run(*asked, "--demo", "--database-url", dsn) == 0
    async with database.connection() as conn:
        (model,) = await select_models(conn)
        accounts = await select_accounts(conn)
    assert (model.id, model.provider, model.router_model_name) == ("llama-4-sovereign", "nim", "meta/llama-4")
    assert accounts[model.id].run.initial_capital == 77


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a file"),
        (["--variant", "Apex"], "needs --variant and --provider"),
        (["--variant", "Apex", "--provider", "nim"], "the model: router_model: "),
        (["--models", "2", "--router-model", "m"], "--router-model: only for one model, with --variant"),
        (["--models", "0"], "--models"),
        (["--history", "-1"], "--history"),
        (["--history", "nan"], "--history"),
        (["--models", "2", "--cycle", "0"], "--cycle"),
        (["missing.toml"], "missing.toml"),
        (["--models", "2", "--capital", "500"], "--capital: only for one model, with --variant"),
        (["--history", "1", "--capital", "0"], "--capital: only for one model"),
        (["missing.toml", "--id", "ada", "--name", "Ada"], "--id, --name: only for one model"),
        (["--variant", "Apex", "--provider", "acme", "--router-model", "m"], "unknown provider 'acme'"),
        (["--variant", "Apex", "--provider", "nim", "--router-model", "m", "--id", "a b"], "the model"),
        (["--variant", "Apex", "--provider", "nim", "--router-model", "m", "--capital", "nan"], "the model"),
        (["--variant", "Apex", "--provider", "nim", "--router-model", "m", "--request", '{"n": 2}'], "request.n: the"),
        (["--models", "2", "--request", "{}"], "--request: only for one model"),
    ],
)
def test_errors_are_reported_and_nothing_is_changed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["models", "add", *arguments, "--demo", "--database-url", "postgresql://nobody@127.0.0.1:1/none"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (("[[models]]", "[[model]]"), ["line 2: model: unknown field; known are models, providers, owners, rates"]),
        (('"Apex"', '"apex"'), ["line 5: model 1.variant: expected one of Apex, Trendsurfer"]),
        (("active = false", "active = 0"), ["line 15: model 2.active: expected true or false, got 0"]),
        (("2500.5", "-1"), ["line 8: model 1.initial_capital: expected a number above 0 up to 1e+09, got -1"]),
        (('id = "rules-c"', 'id = "deepseek-apex"'), ["line 11: model 2.id: 'deepseek-apex' is given twice"]),
        (('"openrouter"', '"router"'), ["line 6: model 1.provider: unknown provider 'router'; expected one of open"]),
        (("[[models]]", "[[models"), ["models.toml: ", "line 2"]),
        (("\nname", '\nnickname = "x"\nname'), ["line 4: model 1.nickname: unknown field; known are", "request"]),
        (("\nname", '\nlogo = "a\\u0000b"\nname'), ["line 4: model 1.logo: expected a line of 1 to 200 characters"]),
        (("\nname", '\nlogo = "a\\u001bb"\nname'), ["line 4: model 1.logo"]),
        (('variant = "Apex"\n', ""), ["line 2: model 1.variant: required: expected one of Apex"]),
        (
            ("\nname", "\nrequest = {tools = [], n = 2}\nname"),
            ["model 1.request.tools", "model 1.request.n: the serv"],
        ),
        (("\nname", "\n[models.request]\nseed = 1\nstream = true\nname"), ["line 6: model 1.request.stream: the serv"]),
        (("\nname", "\nrequest = {top_p = inf}\nname"), ["line 4: model 1.request.top_p: expected text, finite"]),
        (("\nname", "\nrequest = {until = 2025-01-01}\nname"), ["line 4: model 1.request.until: expected text"]),
        (
            ("\nname", "\nrequest = '{\"seed\": }'\nname"),
            ["line 4: model 1.request: expected a table of fields, or the"],
        ),
        (("\nname", "\nrequest = '[1]'\nname"), ["line 4: model 1.request: expected a table of fields"]),
        (
            ("\nname", "\nprice = {input = 1, outputs = 2}\nname"),
            ["line 4: model 1.price.outputs: unknown", "1.price.output: req"],
        ),
        (
            ("\nname", "\nprice = {input = -1, output = 2}\nname"),
            ["line 4: model 1.price.input: expected USD per million"],
        ),
        (("active = false", "request = {top_p = 1}"), ["line 15: model 2.request: only an AI model has it, not rules"]),
        (("\nname", "\nprice = 0.28\nname"), ["line 4: model 1.price: a price without a unit: expected a table with"]),
        (
            ("\nname", '\nprice = {input = 1, output = 2, currency = "EUR"}\nname'),
            ["line 4: model 1.price.currency: there is no rate of EUR: give the price in USD, or"],
        ),
        (
            ("\nname", '\nowner = "lab"\nname'),
            ["line 4: model 1.owner: unknown owner 'lab'; [[owners]] defines n"],
        ),
        (
            ("\nname", "\nowner_budget_usd_per_day = 1\nname"),
            ["line 4: model 1.owner_budget_usd_per_day: set it as budget_usd_per_day of the owner"],
        ),
        (
            ("[[models]]", '[[owners]]\nname = "a"\nbudget_usd_per_day = 1\n' * 2 + "[[models]]"),
            ["line 6: owner 2.name: 'a' is given twice; every owner needs its own name"],
        ),
        (("[[models]]", '[[owners]]\nname = "a"\n[[models]]'), ["owner 1.budget_usd_per_day: required"]),
        (
            ("[[models]]", "[rates]\nEUR = 0\n[[models]]"),
            ["line 3: rates.EUR: expected USD for one EUR, a number above 0"],
        ),
        (
            ("[[models]]", '[[providers]]\nname = "openai"\nbase_url = "http://a/v1"\n[[models]]'),
            ["line 3: provider 1.name: 'openai' ships with the service; give another name"],
        ),
        (
            ("[[models]]", '[[providers]]\nname = "lab"\nbase_url = "a"\nprotocol = "soap"\nslot = 1\n[[models]]'),
            [
                "line 4: provider 1.base_url: expected an http or https address",
                "line 5: provider 1.protocol: expected one of chat, gemini, messages, responses",
                "line 6: provider 1.slot: unknown field; known are",
            ],
        ),
        (
            ("[[models]]", '[[providers]]\nname = "a"\nbase_url = "http://a/v1"\n' * 2 + "[[models]]"),
            ["line 6: provider 2.name: 'a' is given twice"],
        ),
        (
            (
                "[[models]]",
                '[[providers]]\nname = "a"\nbase_url = "http://a"\nprotocol = "gemini"\nstream = true\n'
                'headers = {Authorization = "x"}\nrequest = {contents = []}\n[[models]]',
            ),
            [
                "line 6: provider 1.stream: only the protocols chat and responses are streamed",
                "line 7: provider 1.headers.Authorization: expected a header's name, but none of authorization",
                "line 8: provider 1.request.contents: the service sets it itself",
            ],
        ),
        (("\nname", '\nevery = "30s"\nname'), ['line 4: model 1.every: expected minutes or hours, such as "5m"']),
        (("\nname", "\nbudget_usd_per_day = 0\nname"), ["line 4: model 1.budget_usd_per_day: expected USD, a number"]),
        (("\nname", "\nbudget_usd_per_day = nan\nname"), ["line 4: model 1.budget_usd_per_day: expected USD"]),
        (("\nname", '\nwhen_spent = "stop"\nname'), ["line 4: model 1.when_spent: expected one of manage, pause"]),
        (("\nname", '\nprompt = "none.md"\nname'), ["line 4: model 1.prompt: expected the name of a UTF-8 file"]),
        (("\nname", "\nattempt_timeout_s = 1\nname"), ["line 4: model 1.attempt_timeout_s: expected a whole number"]),
        (("\nname", "\ntraining_cutoff = 2025\nname"), ["line 4: model 1.training_cutoff: expected a date such"]),
        (("\nname", "\nreplicates = 0\nname"), ["line 4: model 1.replicates: expected a whole number from 1"]),
        (("\nname", "\ncolor = 'red'\nname"), ["line 4: model 1.color: expected a color such as"]),
        (("active = false", "prompt = 'x.md'"), ["line 15: model 2.prompt: only an AI model has it"]),
        (
            ("active = false", f"replicates = 2\n{FILE[:132]}".replace("deepseek-apex", "rules-c-2")),
            ["rules-c-2: given twice"],
        ),
        (('id = "deepseek-apex"\n', "id = 5\nvariantt = 7\n"), ["line 3: model 1.id", "line 4: model 1.variantt"]),
    ],
)
def test_errors_in_the_file_are_located(
    capsys: pytest.CaptureFixture[str], change: tuple[str, str], problems: list[str]
) -> None:
    Path("models.toml").write_text(FILE.replace(*change, 1), encoding="utf-8")
    assert (
        main(["models", "add", "models.toml", "--demo", "--database-url", "postgresql://nobody@127.0.0.1:1/none"]) == 2
    )
    reported = capsys.readouterr().err
    for problem in problems:
        assert problem in reported
    located = re.findall(r"models\.toml, line (\d+: [^:]+):", reported)
    assert len(located) == len(set(located)), "each mistake has one line"


async def test_owners_and_other_currencies_are_stored_in_usd(database: Database, dsn: str) -> None:
    whole = '[rates]\nEUR = 1.25\n[[owners]]\nname = "lab"\nbudget_usd_per_day = 7\n' + FILE
    price = '\nowner = "lab"\nprice = {input = 1, cached = 0.5, output = 2, currency = "EUR"}\nname'
    Path("models.toml").write_text(whole.replace("\nname", price, 2).replace(price, "\nname", 1), encoding="utf-8")
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    async with database.connection() as conn:
        model = next(model for model in await select_models(conn) if model.provider != "rules")
    assert model.configuration.price == TokenPrice(input=1.25, cached=0.625, output=2.5)
    assert (model.configuration.owner, model.configuration.owner_budget_usd_per_day) == ("lab", 7)


async def test_fields_of_requests_are_stored(database: Database, dsn: str) -> None:
    fields = 'request = {reasoning_effort = "none", reasoning = {max_tokens = 1024}, provider = {order = ["a", "b"]}}'
    third = """
[[models]]
id = "third"
variant = "Apex"
provider = "openai"
router_model = "gpt-5.6"
request = '{"temperature": null}'
"""
    Path("models.toml").write_text(FILE.replace("\nname", f"\n{fields}\nname", 1) + third, encoding="utf-8")
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    reasoning = {"reasoning_effort": "none", "reasoning": {"max_tokens": 1024}}
    assert await _requests(database) == {
        "deepseek-apex": {**reasoning, "provider": {"order": ["a", "b"]}},
        "rules-c": {},
        "third": {"temperature": None},
    }
    Path("models.toml").write_text(FILE, encoding="utf-8")
    arguments = ["--variant", "Apex", "--provider", "nim", "--router-model", "x/y", "--request", '{"seed": 7}']
    assert _run("models.toml", *arguments, "--demo", "--database-url", dsn) == 0
    requests = await _requests(database)
    assert (requests["deepseek-apex"], requests["y-apex"]) == ({}, {"seed": 7}), "what the file leaves out is gone"


async def test_a_models_file_sets_each_models_requests(database: Database, dsn: str) -> None:
    Path("own.md").write_text("# Own\n\nHold.\n", encoding="utf-8")
    fields = """
every = "5m"
price = {input = 0.28, cached = 0.028, output = 0.42}
budget_usd_per_day = 2.5
when_spent = "pause"
prompt = "own.md"
attempt_timeout_s = 90
training_cutoff = 2025-06-30
color = "#a855f7"
replicates = 2
"""
    Path("models.toml").write_text(FILE.replace("\ninitial_capital = 2500.5\n", fields), encoding="utf-8")
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    async with database.connection() as conn:
        models = {model.id: model for model in await select_models(conn)}
    assert sorted(models) == ["deepseek-apex-1", "deepseek-apex-2", "rules-c"]
    assert models["deepseek-apex-2"].name == "DeepSeek 2"
    assert models["deepseek-apex-1"].configuration == ModelConfiguration(
        attempt_timeout_s=90,
        every="5m",
        price=TokenPrice(input=0.28, cached=0.028, output=0.42),
        budget_usd_per_day=2.5,
        when_spent="pause",
        prompt="# Own\n\nHold.\n",
        training_cutoff=date(2025, 6, 30),
        color="#a855f7",
        replicate_of="deepseek-apex",
    )
    assert models["rules-c"].configuration == ModelConfiguration()


async def test_surplus_replicates_are_deactivated_and_reactivated(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def seeded(replicates: str) -> set[str]:
        Path("models.toml").write_text(FILE.replace("\nname", f"{replicates}\nname", 1), encoding="utf-8")
        assert _run("models.toml", "--demo", "--database-url", dsn) == 0
        async with database.connection() as conn:
            return {model.id for model in await select_models(conn) if model.active}

    other = ["--variant", "Apex", "--provider", "rules", "--router-model", "r", "--id", "deepseek-apex-9"]
    assert _run(*other, "--demo", "--database-url", dsn) == 0
    numbered = [f"deepseek-apex-{number}" for number in (1, 2, 3)]
    assert await seeded("\nreplicates = 3") == {*numbered, "deepseek-apex-9"}, "one of them is not a replicate"
    assert await seeded("\nreplicates = 2") == {*numbered[:2], "deepseek-apex-9"}
    assert "deepseek-apex-3 is a surplus replicate and was deactivated" in capsys.readouterr().out
    assert await seeded("") == {"deepseek-apex", "deepseek-apex-9"}
    assert await seeded("\nreplicates = 3") == {*numbered, "deepseek-apex", "deepseek-apex-9"}
    assert (await audit(database)).is_clean


async def test_seeding_an_ai_model_without_a_cadence_prints_its_daily_cost(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--variant", "Apex", "--provider", "nim", "--router-model", "a/b", "--demo", "--database-url", dsn]
    assert _run(*asked) == 0
    assert "b-apex has no `every`, so it decides 1440 times a day" in capsys.readouterr().out
    assert _run(*asked, "--every", "5m") == 0
    assert "every" not in capsys.readouterr().out
    price = "\nprice = {input = 1, cached = 0.1, output = 2}\nname"
    Path("models.toml").write_text(FILE.replace("\nname", price, 1), encoding="utf-8")
    assert _run("models.toml", "--demo", "--database-url", dsn) == 0
    told = capsys.readouterr().out
    assert "deepseek-apex has no `every`" in told
    assert "2.30 USD when the provider caches prompts and 7.49 when it does not" in told
    assert "rules-c has" not in told
    async with database.connection() as conn:
        cadences = {model.id: model.configuration.every for model in await select_models(conn)}
    assert cadences == {"b-apex": "5m", "deepseek-apex": None, "rules-c": None}


async def _requests(database: Database) -> dict[str, Mapping[str, object]]:
    async with database.connection() as conn:
        return {model.id: model.configuration.request for model in await select_models(conn)}


async def test_a_history_is_written_once_and_continued(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = SystemClock().now()
    arguments = ["--demo", "--models", "2", "--history", "0.02", "--cycle", "5", "--database-url", dsn]
    assert _run(*arguments) == 0
    assert "is written" in capsys.readouterr().out
    async with database.connection() as conn:
        until = await select_processed_until(conn)
        invocations = await conn.fetchval("SELECT count(*) FROM invocations WHERE status = 'completed'")
        first = await conn.fetchval("SELECT min(created_at) FROM portfolio_snapshots")
        last = await conn.fetchval("SELECT max(created_at) FROM portfolio_snapshots")
        accounts = await select_accounts(conn)
    assert until is not None
    assert began - timedelta(minutes=1) <= until <= SystemClock().now()
    assert invocations in range(10, 15), "28 minutes, a run of each of the two every five"
    assert {account.run.started_at for account in accounts.values()} == {first.replace(second=0, microsecond=0)}
    assert last <= until, "idle accounts have none in their last minutes"
    assert (await audit(database)).is_clean
    assert _run(*arguments) == 0
    output = capsys.readouterr().out
    assert "0 of 2 models added" in output
    assert "complete up to" in output or "is written" in output
    assert (await audit(database)).is_clean


async def test_with_a_running_service_the_history_stays_and_models_start_now(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = LeaderLock(dsn)
    assert await lock.try_acquire()
    before = SystemClock().now()
    asked = ["--models", "1", "--history", "90", "--database-url", dsn]
    for added in (1, 0):
        assert _run(*asked) == 0
        said = capsys.readouterr()
        assert "the service is running" in said.err
        assert f"{added} of 1 model added, {added} account" in said.out
        assert "new models start now: a service is using it." in said.out
    await lock.release()
    async with database.connection() as conn:
        assert (await select_accounts(conn))["apex-rules"].run.started_at >= before
        assert await select_processed_until(conn) is None


async def test_models_are_added_once_a_history_is_complete(database: Database, dsn: str) -> None:
    async with history_database(dsn):
        seeding = asyncio.create_task(
            asyncio.to_thread(main, ["models", "add", "--models", "1", "--database-url", dsn])
        )
        async with database.connection() as conn:
            await until(lambda: conn.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))
            assert not seeding.done()
            assert await select_models(conn) == []
    assert await seeding == 0
    async with database.connection() as conn:
        assert [model.id for model in await select_models(conn)] == ["apex-rules"]


async def test_accounts_opened_after_a_history_leave_it_unchanged(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    past = ["--models", "1", "--history", "0.01", "--database-url", dsn]
    assert _run(*past) == 0
    assert "is written" in capsys.readouterr().out
    assert _run("--models", "2", "--database-url", dsn) == 0
    assert _run(*past) == 0
    assert "accounts were opened, such as trendsurfer-rules." in capsys.readouterr().out


async def test_an_impossible_history_is_rejected(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    past = ["--history", "0.01", "--database-url", dsn]
    ai = ["--variant", "Apex", "--provider", "nim", "--router-model", "m"]
    assert _run(*ai, *past) == 1
    assert "these models are not: m-apex" in capsys.readouterr().err
    await _open_late(database)
    assert _run(*past) == 1
    assert "These accounts are open without a history: late." in capsys.readouterr().err
    monkeypatch.setenv("MARKET_SOURCE", "venue")
    assert _run("--models", "1", *past) == 2
    assert "--history needs the synthetic market; MARKET_SOURCE is venue" in capsys.readouterr().err
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM models") == 0, "what is refused changes nothing"


async def test_a_demo_adds_nothing_to_live_trading(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRADING_MODE", "live")
    assert _run("--demo", "--models", "1", "--database-url", dsn) == 1
    assert "is for live trading, which excludes --demo" in capsys.readouterr().err
    async with database.connection() as conn:
        assert await select_models(conn) == []


async def test_rule_agents_need_no_router_model(database: Database, dsn: str) -> None:
    file = '[[models]]\nid = "mine"\nvariant = "Contrarian"\nprovider = "rules"\n'
    Path("models.toml").write_text(file, encoding="utf-8")
    assert _run("models.toml", "--variant", "Apex", "--provider", "rules", "--database-url", dsn) == 0
    async with database.connection() as conn:
        names = {model.id: model.router_model_name for model in await select_models(conn)}
    assert names == {"mine": "rules/contrarian", "apex-rules": "rules/apex"}


async def _open_late(database: Database) -> None:
    async with database.connection() as conn:
        await add_run(conn, "late", make_run("late", at=datetime(2100, 1, 1, tzinfo=UTC)))


async def test_a_model_whose_key_the_running_service_lacks_is_refused(
    database: Database, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = LeaderLock(dsn)
    assert await lock.try_acquire()
    async with database.connection() as conn:
        await upsert_service_state(conn, DatabaseIdentity("synthetic", "simulated"))
        assert await update_heartbeat(conn, 0, {}, ["mistral", "anthropic"])
    own = (
        '[[models]]\nid = "{0}"\nvariant = "Apex"\nprovider = "{0}"\nrouter_model = "m"\n[[providers]]\nname = "{0}"\n'
    )
    keyed = 'base_url = "https://x.example"\nkey_host = "x.example"\nkey_variable = "{}_API_KEY"\n'
    local = own.format("local") + 'base_url = "http://127.0.0.1:9"\n'
    cases = (FILE, own.format("acme") + keyed.format("ACME"))
    for text, variable in zip(cases, ("OPENROUTER_API_KEY", "ACME_API_KEY"), strict=True):
        Path("models.toml").write_text(text, encoding="utf-8")
        assert _run("models.toml", "--send-keys-to", "x.example", "--database-url", dsn) == 1
        said = capsys.readouterr().err
        assert "The running service (market synthetic) has no key of" in said
        assert f"set {variable} " in said
        assert "add the models, and start `trader serve`" in said
    for text in (FILE.replace("openrouter", "mistral"), local, own.format("anthropic") + keyed.format("ANTHROPIC")):
        Path("models.toml").write_text(text, encoding="utf-8")
        assert _run("models.toml", "--send-keys-to", "x.example", "--database-url", dsn) == 0, capsys.readouterr()
    await lock.release()
    Path("models.toml").write_text(FILE.replace("deepseek-apex", "later"), encoding="utf-8")
    capsys.readouterr()
    assert _run("models.toml", "--database-url", dsn) == 0, "the next service may have the key"
    needed = "OPENROUTER_API_KEY is not set here: the service needs it when it starts."
    assert needed in capsys.readouterr().out
    Path(".env").write_text("OPENROUTER_API_KEY=sk-or-x\n", encoding="utf-8")
    assert _run("models.toml", "--database-url", dsn) == 0
    assert needed not in capsys.readouterr().out
