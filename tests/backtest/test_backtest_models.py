"""The `backtest` command with AI models: they are asked once, within a budget, and their answers are replayed."""

import fcntl
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.candles import write_walk
from support.prompts import data_of
from support.reports import report_data
from support.trading_provider import COST_USD, TradingProvider, call, opening, trading_provider

from trader.__main__ import main

pytestmark = pytest.mark.slow

START = datetime(2025, 3, 1, tzinfo=UTC)
KEY = "sk-test-000000000000000001"
MODELS = """
[[models]]
id = "one"
variant = "Apex"
provider = "openai"
router_model = "lab/one"
every = "5m"
training_cutoff = 2025-06-30
price = {input = 0.36, output = 2.0}
"""
PERIOD = ("--from", "2025-03-01T12:00:00Z", "--to", "2025-03-01T12:30:00Z")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", START, 780, price=90_000, seed=1)
    write_walk(folder / "ETHUSDT-1m-2025-03.csv", START, 780, price=2_200, seed=2)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(MODELS)
    return file


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TradingProvider]:
    with trading_provider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield provider


def backtest(data: Path, out: Path, *options: str) -> int:
    return main(["backtest", "--data", str(data), "--out", str(out), "--no-database", *PERIOD, *options])


def result(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = orjson.loads((out / "result.json").read_bytes())
    return results


def answers(cassette: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (cassette / "answers.jsonl").read_bytes().splitlines()]


def test_a_cassette_gives_the_same_ledger_without_a_provider(
    data: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with trading_provider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert backtest(data, tmp_path / "asked", "--models", str(models), "--budget-usd", "1") == 0
        requests = provider.requests
    assert provider.keys == {KEY}
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "before cut-off: the period begins before the end" in capsys.readouterr().out
    cassette = tmp_path / "asked" / "cassette"
    assert backtest(data, tmp_path / "again", "--models-from", str(cassette)) == 0
    asked, again = result(tmp_path / "asked"), result(tmp_path / "again")
    assert (tmp_path / "asked" / "ledger.jsonl").read_bytes() == (tmp_path / "again" / "ledger.jsonl").read_bytes()
    assert asked["ledgerSha256"] == again["ledgerSha256"]
    assert requests == len(answers(cassette)) == asked["answers"]["asked"]
    assert again["answers"]["asked"] == 0
    (account,) = asked["accounts"]
    assert account["contamination"] == "before cut-off"
    assert account["trainingCutoff"] == "2025-06-30"
    assert account["decisions"] == 7
    assert account["trades"] > 0
    assert account["modelCostUsd"] == pytest.approx(requests * COST_USD)
    assert "before cut-off" in report_data(tmp_path / "asked" / "report.html")["models"][0]["account"]["name"]
    for file in (tmp_path / "asked").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_the_files_of_several_models_do_not_depend_on_the_order_of_answers(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path
) -> None:
    models.write_text(MODELS + MODELS.replace('"one"', '"two"').replace("lab/one", "lab/two"))
    provider.delays_s = {"lab/one": 0.05}
    assert backtest(data, tmp_path / "asked", "--models", str(models), "--budget-usd", "1") == 0
    assert backtest(data, tmp_path / "again", "--models-from", str(tmp_path / "asked" / "cassette")) == 0
    for name in ("ledger.jsonl", "decisions.jsonl", "trades.csv", "fills.csv", "equity.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "asked" / name).read_bytes(), name


def test_ctrl_c_ends_the_wait_for_an_answer(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path
) -> None:
    options = ("--models", str(models), "--cassette", str(tmp_path / "kept"), "--budget-usd", "1")
    provider.interrupt_at = 6
    assert backtest(data, tmp_path / "one", *options) == 130
    assert len(answers(tmp_path / "kept")) == 5
    assert not result(tmp_path / "one")["complete"]
    assert backtest(data, tmp_path / "two", *options) == 0
    assert provider.requests == len(answers(tmp_path / "kept")) + 1


def test_a_provider_that_fails_ends_the_backtest(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("trader.backtest.answers.PAUSE_S", 0.0)
    provider.status = 404
    assert backtest(data, tmp_path / "run", "--models", str(models), "--budget-usd", "1") == 1
    assert "one cannot be asked: openai answered 404" in capsys.readouterr().out
    assert provider.requests == 3
    assert result(tmp_path / "run")["accounts"][0]["decisions"] == 0


def test_an_ended_run_continues_without_repeating_requests(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    options = ("--models", str(models), "--cassette", str(kept), "--budget-usd")
    assert backtest(data, tmp_path / "one", *options, "0.005") == 1
    assert provider.requests == 3, "a budget is spent when the answers have reached it"
    assert "The budget of 0.005 USD is spent: 3 answers cost 0.006 USD." in capsys.readouterr().out
    part = result(tmp_path / "one")
    assert not part["complete"]
    assert part["to"] < "2025-03-01T12:30"
    with (kept / "answers.jsonl").open("ab") as file:
        file.write(b'{"digest":"torn')
    assert backtest(data, tmp_path / "two", *options, "1") == 0
    whole = result(tmp_path / "two")
    assert whole["complete"]
    digests = [line["digest"] for line in answers(kept)]
    assert provider.requests == len(digests) == len(set(digests)) == 3 + whole["answers"]["asked"]
    assert backtest(data, tmp_path / "three", *options, "1") == 0
    assert provider.requests == len(digests)
    assert result(tmp_path / "three")["ledgerSha256"] == whole["ledgerSha256"]


def test_missing_parts_are_named(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    asking = ("--models", str(models))
    assert backtest(data, out, *asking) == 2
    said = capsys.readouterr().err
    assert "--budget-usd is required" in said
    assert "one: 7 decisions, 0.0 million tokens, 0.02 USD when the provider caches prompts and 0.02 USD" in said
    assert backtest(data, out, *asking, "--budget-usd", "0") == 2
    assert "--budget-usd: expected an amount above 0 and at most 1000000, got '0'" in capsys.readouterr().err
    assert backtest(data, out, *asking, "--budget-usd", "nan", "--funding", "0") == 2
    assert "--budget-usd: expected an amount above 0 and at most 1000000, got 'nan'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "answers.jsonl").touch()
    assert backtest(data, out, "--models-from", str(tmp_path / "empty")) == 2
    assert "names no model in models.json" in capsys.readouterr().err
    assert backtest(data, out, "--budget-usd", "1") == 2
    assert "--budget-usd: only with --models" in capsys.readouterr().err
    assert backtest(data, out, "--models-from", str(tmp_path)) == 2
    assert "it must be a cassette" in capsys.readouterr().err
    assert backtest(data, out, *asking, "--budget-usd", "1", "--cassette", str(tmp_path / "kept")) == 0
    assert backtest(data, tmp_path / "other", "--models-from", str(tmp_path / "kept"), "--taker-fee", "9") == 2
    said = capsys.readouterr().err
    assert "has no answer of one at 2025-03-01T12:00:00.001Z, step 1, to the request with the" in said
    assert not (tmp_path / "other").exists()
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert backtest(data, tmp_path / "other", *asking, "--budget-usd", "1") == 2
    assert "openai has no key. Set OPENAI_API_KEY" in capsys.readouterr().err


def test_a_strangers_folder_is_only_data(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, code = tmp_path / "ran", tmp_path / "theirs.py"
    code.write_text(f"open({str(ran)!r}, 'w')\nclass Own:\n    def decide(self, view): ...\n")
    run, cassette = tmp_path / "run", tmp_path / "run" / "cassette"
    assert backtest(data, run, "--models", str(models), "--budget-usd", "1") == 0
    own = result(run)
    for file, kept in ((cassette / "models.json", list), (run / "result.json", dict)):
        content = orjson.loads(file.read_bytes())
        model = (content if kept is list else content["models"])[-1]
        model |= {"provider": "strategy", "router_model_name": f"{code}:Own"}
        file.write_bytes(orjson.dumps(content))
    assert backtest(data, tmp_path / "x", "--models-from", str(cassette)) == 2
    assert "models.json has one, which decide by code" in capsys.readouterr().err
    requests = provider.requests
    assert backtest(data, tmp_path / "again", "--models-from", str(run)) == 0
    again = result(tmp_path / "again")
    figures = ("id", "equity", "trades", "fees", "funding")
    assert [[each[name] for name in figures] for each in again["accounts"]] == [
        [each[name] for name in figures] for each in own["accounts"]
    ]
    assert provider.requests == requests
    line = orjson.loads((run / "decisions.jsonl").read_bytes().splitlines()[0])
    for change in (
        {"startedAt": "2025-03-01T12:10:00"},
        {"startedAt": "2025-03-01T12:10:00Z", "steps": [line["steps"][0] | {"at": "9999-01-01T00:00:00Z"}]},
        {"steps": [line["steps"][0] | {"calls": [{"number": 1, "tool": "exec", "arguments": {}}]}]},
        {"steps": [line["steps"][0] | {"calls": [line["steps"][0]["calls"][0] | {"arguments": {"symbol": 1}}]}]},
    ):
        (run / "decisions.jsonl").write_bytes(orjson.dumps(line | change))
        assert backtest(data, tmp_path / "x", "--models-from", str(run)) == 2
        assert "must be the folder of a backtest (result.json, decisions.jsonl)" in capsys.readouterr().err
    assert not ran.exists()
    assert not (tmp_path / "x").exists()


def test_only_one_process_at_a_time_appends_to_a_cassette(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "answers.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        options = ("--models", str(models), "--budget-usd", "1", "--cassette", str(tmp_path))
        assert backtest(data, tmp_path / "run", *options) == 2
    assert "another process adds answers to the cassette" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert provider.requests == 0


def test_an_unknown_cost_ends_the_requests(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write_text(MODELS.replace("price", "#"))
    provider.usage = {}
    assert backtest(data, tmp_path / "run", "--models", str(models), "--budget-usd", "1") == 1
    assert "give the model a `price`" in capsys.readouterr().out
    assert provider.requests == 1


def test_decisions_repeated_under_other_conditions_split_the_difference_by_cause(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    models.write_text(MODELS + '[[models]]\nid = "rules"\nvariant = "Apex"\nprovider = "rules"\nrouter_model = "r"\n')
    assert backtest(data, run, "--models", str(models), "--budget-usd", "1") == 0
    requests = provider.requests
    capsys.readouterr()
    conditions = ("--taker-fee", "20", "--latency", "3000", "--guard", "position-notional-max=0")
    assert main(["backtest", "--run", str(run), *conditions, "--json"]) == 0
    results = json.loads(capsys.readouterr().out, parse_float=Decimal)
    assert provider.requests == requests, "no model is asked"
    assert [condition["cause"] for condition in results["conditions"]] == ["fees", "latency", "guard"]
    account, idle = results["accounts"]
    if account["id"] != "one":
        account, idle = idle, account
    parts = {part["cause"]: Decimal(part["change"]) for part in account["parts"]}
    assert sum(parts.values()) == Decimal(account["change"])
    assert Decimal(account["recorded"]) + sum(parts.values()) == Decimal(account["equity"])
    assert parts["fees"] < 0
    assert parts["latency"] != 0
    assert account["equity"] == 10_000, "the guard refuses every position"
    assert account["trades"]["guard"] == 0 < account["trades"]["recorded"]
    assert "notional" not in account["refused"]["latency"]
    assert account["refused"]["guard"]["notional"] > 0
    assert {part["change"] for part in idle["parts"]} == {0}
    assert main(["backtest", "--run", str(run), "--guard", "position-notional-max=0"]) == 0
    printed = capsys.readouterr().out
    before, after = (sum(account["refused"][cause].values()) for cause in ("recorded", "guard"))
    assert re.search(rf"{account['trades']['recorded']} → 0 +{before} → {after}\n", printed)
    assert "one: refused only under these conditions:" in printed
    free = ("--taker-fee", "0")
    assert backtest(data, tmp_path / "free", "--models", str(models), "--budget-usd", "1", *free) == 0
    capsys.readouterr()
    assert main(["backtest", "--run", str(run), *free, "--json"]) == 0
    ended = {each["id"]: each["equity"] for each in json.loads(capsys.readouterr().out)["accounts"]}
    assert {each["id"]: each["equity"] for each in result(tmp_path / "free")["accounts"]} == ended, (
        "only the fees differ"
    )


def test_wrong_conditions_are_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert backtest(data, run, "--variant", "Apex") == 0
    for options, words in {
        ("--taker-fee", "9", "--run", "nowhere"): "--run is 'nowhere'; it must be the folder of a backtest",
        (
            "--guard",
            "leverage-max=x",
            "--run",
            str(run),
        ): "--guard is 'leverage-max=x'; it must be none, or NAME=NUMBER",
        ("--guard", "luck=1", "--run", str(run)): "with one of the names leverage-max, position-notional-max",
        ("--capital", "9", "--run", str(run)): "--capital: not allowed with --run",
        ("--from", "2025-03-01", "--to", "2025-03-02", "--run", str(run)): "--from, --to: not allowed with --run",
        ("--run", str(run)): "--run needs another condition",
        ("--guard", "none", "--data", ".", "--models", "m.toml"): "--guard: not with AI models",
        ("--param", "window=1", "--data", "."): "--param: only with --strategy",
        (): "--data is missing",
    }.items():
        assert main(["backtest", *options]) == 2
        assert words in capsys.readouterr().err
    lines = (run / "result.json").read_text().replace('"complete": true', '"complete": false')
    (run / "result.json").write_text(lines)
    assert main(["backtest", "--run", str(run), "--latency", "0"]) == 2
    assert "ended early" in capsys.readouterr().err


class RelativeProvider(TradingProvider):
    """Buys for a tenth of its equity in the first market, reads it, and closes half, based only on its view."""

    def calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(message["role"] == "tool" for message in messages):
            return [call(1, "holding", reason="done")]
        view = data_of(messages[1]["content"])
        symbol, *_ = view["markets"]
        price = view["now"][symbol]["price"]
        order = opening(symbol, view["account"]["equity"] / 10 / price) | {"stop": 0.9 * price}
        if "positions" in view:
            order |= {"stop": 1.1 * price}  # which the guard refuses with a reason
        reading = [call(2, "fetchIndicators", symbol=symbol, interval="1h"), call(3, "fetchOrderBook", symbol=symbol)]
        closing = call(4, "closePosition", symbol=symbol, fraction=0.5)
        refused = call(5, "closePosition", symbol=symbol, fraction=1e-9)
        return [call(1, "createPosition", **order), *reading, closing, refused]


def figures(content: bytes) -> set[str]:
    """Return the numbers with five digits or more that are not whole."""
    return {text for text in re.findall(r"\d+\.\d+", content.decode()) if len(text) > 5}


def test_requests_to_a_masked_model_contain_no_market_date_or_price(
    data: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("support.trading_provider.TradingProvider", RelativeProvider)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    options = ("--mask", "symbols,dates,scale", "--thinking", "off")
    with trading_provider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        asking = ("--models", str(models), "--budget-usd", "1")
        assert backtest(data, tmp_path / "asked", *asking, *options) == 0
        sent = [orjson.dumps(request) for request in provider.asked]
    masked = [each for each in sent if b"M01" in each]
    plain = [each for each in sent if b"M01" not in each]
    assert len(masked) == len(plain) > 7
    told = b"".join(masked)
    assert b"rejected" in told
    for identifier in (b"BTC", b"ETH", b"2025"):
        assert identifier not in told
    rows = [line.split(",")[1:5] for file in data.glob("*.csv") for line in file.read_text().splitlines()[1:]]
    prices = {f"{float(cell):.6g}" for row in rows for cell in row} | {cell for row in rows for cell in row}
    shown = figures(told)
    assert prices & figures(b"".join(plain))
    assert not prices & shown
    (difference,) = result(tmp_path / "asked")["masked"]["maskedMinusPlain"]
    assert (difference["trades"], round(difference["equity"], 2)) == (0, 0)
    assert "one: masked (dates, scale, symbols) minus plain" in capsys.readouterr().out
    decided = [orjson.loads(line) for line in (tmp_path / "asked" / "decisions.jsonl").read_bytes().splitlines()]
    assert {call["arguments"]["symbol"] for each in decided for step in each["steps"] for call in step["calls"]
            if "symbol" in call["arguments"]} == {"BTC"}  # fmt: skip
    assert {each["startedAt"][:10] for each in decided} == {"2025-03-01"}
    cassette = str(tmp_path / "asked" / "cassette")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert backtest(data, tmp_path / "again", "--models-from", cassette, *options) == 0
    assert result(tmp_path / "again")["ledgerSha256"] == result(tmp_path / "asked")["ledgerSha256"]
    assert backtest(data, tmp_path / "plain", "--models-from", cassette, "--thinking", "off") == 0
    assert [account["id"] for account in result(tmp_path / "plain")["accounts"]] == ["one"]


def test_calls_refused_before_decoding_and_failed_cycles_are_listed(
    data: Path, models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.always = [call(1, "createPosition", symbol="BTC"), call(2, "sell", symbol="BTC"), call(3, "holding")]
    assert backtest(data, tmp_path / "run", "--models", str(models), "--budget-usd", "1") == 0
    (account,) = result(tmp_path / "run")["accounts"]
    assert [(each["rule"], each["count"]) for each in account["refused"]] == [("failed", 21)]
    assert account["ended"] == {"holding": 7}
    assert "one: refused: 21 failed (Bad arguments: reason: required" in capsys.readouterr().out
    assert (tmp_path / "run" / "decisions.csv").read_text().count("There is no tool 'sell'") == 7
    models.write_text(MODELS.replace("lab/one", "lab/talks"))
    provider.always = []
    assert backtest(data, tmp_path / "talk", "--models", str(models), "--budget-usd", "1") == 0
    (account,) = result(tmp_path / "talk")["accounts"]
    assert (account["decisions"], account["ended"]) == (0, {"calls": 7})
    assert "one: failed cycles, which decide nothing, ended 7 by calls" in capsys.readouterr().out


def test_a_changed_field_of_the_provider_asks_again(
    data: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trading_provider() as provider:
        monkeypatch.setenv("LAB_API_KEY", KEY)
        own = f'[[providers]]\nname = "lab"\nbase_url = "{provider.url}"\nkey_variable = "LAB_API_KEY"\n'
        own += f'key_host = "{provider.url.split("/")[2]}"\n'
        options = ("--models", str(models), "--budget-usd", "1", "--cassette", str(tmp_path / "kept"))
        sending = "--send-keys-to", provider.url.split("/")[2]
        for number, (temperature, asked) in enumerate(((0.1, True), (0.1, False), (0.2, True))):
            before = provider.requests
            models.write_text(f"{own}request = {{temperature = {temperature}}}\n{MODELS.replace('openai', 'lab')}")
            assert backtest(data, tmp_path / f"run{number}", *options, *sending) == 0
            assert (provider.requests > before) == asked
