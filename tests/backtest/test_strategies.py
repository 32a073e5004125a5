"""Strategy files in backtests: the built-in rule agents, the examples of the documentation, and mistakes."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from support.candles import FOLDER, write_part, write_walk
from support.reports import report_data

from trader.__main__ import main
from trader.agents.domain.mask import Mask
from trader.agents.domain.tools import RECORDED_TOOLS, decode, request_of
from trader.agents.strategy_files import LoadedStrategy, load_strategy
from trader.backtest.masking import MaskedPeek
from trader.core.errors import SettingsError, StrategyError
from trader.core.variant_id import VariantId
from trader.market.domain.indicators import indicators
from trader.portfolio import tables as results
from trader.strategies import (
    CancelOrder,
    Candle,
    ClosePosition,
    CreatePosition,
    Decision,
    GivenPosition,
    OrderType,
    PlaceOrder,
    PlacePair,
    PlannedExit,
    SeriesValue,
    Side,
    View,
    build_view,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
RULES = ROOT / "trader" / "agents" / "domain" / "rules"

BUYER = """
from trader.strategies import CreatePosition, Side

class Buyer:
    def __init__(self, leverage: float, symbol: str = "BTC"):
        self.leverage, self.symbol, self.bought = leverage, symbol, 0

    def decide(self, view):
        price = view.markets[self.symbol].price
        if view.position(self.symbol) is None:
            self.bought += 1
            return [CreatePosition(symbol=self.symbol, side=Side.LONG, quantity=view.account.equity / price,
                                   leverage=self.leverage, stop=price * 8 / 10, invalidation="none", confidence=50)]

    def save(self):
        return {"bought": self.bought}

    def load(self, state):
        self.bought = state["bought"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two markets of thirty hours."""
    folder = tmp_path_factory.mktemp("data")
    start = datetime(2025, 3, 1, tzinfo=UTC)
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", start, 1_800, price=90_000, seed=1)
    write_walk(folder / "ETHUSDT-1m-2025-03.csv", start, 1_800, price=2_200, seed=2)
    return folder


@pytest.fixture
def asked() -> list[bytes]:
    """The requests to the server of `model_url`."""
    return []


@pytest.fixture
def model_url(asked: list[bytes]) -> Iterator[str]:
    """The address of a chat-completions server that answers LONG."""

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "long"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write nothing on standard error."""

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def backtest(data: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the result."""
    code = main(["backtest", "--data", str(data), "--out", str(out), "--no-database", *options])
    return code, orjson.loads((out / "result.json").read_bytes())


TRADES_WITHIN = {
    VariantId.APEX: ("03T01:00", "03T03:00"),
    VariantId.TRENDSURFER: ("03T01:00", "03T03:00"),
    VariantId.CONTRARIAN: ("02T16:00", "02T18:00"),
    VariantId.SOVEREIGN: ("03T03:00", "03T05:00"),
}
"""Hours of the recording in February 2025 in which each rule agent trades."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hours of `TRADES_WITHIN`, and the candles before them that the indicators need."""
    if not FOLDER.is_dir():
        pytest.skip("the recorded candles are not on this machine")
    begin, end = datetime(2025, 2, 2, tzinfo=UTC), datetime(2025, 2, 3, 5, tzinfo=UTC)
    return write_part(tmp_path_factory.mktemp("recorded") / "candles", FOLDER, begin, end)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VariantId)
def test_the_file_of_a_rule_agent_gives_the_ledger_of_its_variant(
    recorded: Path, tmp_path: Path, variant: VariantId
) -> None:
    begin, end = TRADES_WITHIN[variant]
    period = ("--from", f"2025-02-{begin}:00Z", "--to", f"2025-02-{end}:00Z")
    _, built_in = backtest(recorded, tmp_path / "variant", "--variant", variant, *period)
    file = f"{RULES / variant.lower()}.py:{variant}"
    _, loaded = backtest(recorded, tmp_path / "file", "--strategy", file, *period)
    assert len(results.load(tmp_path / "variant").fills) > 0
    assert loaded["ledgerSha256"] == built_in["ledgerSha256"]
    assert loaded["strategy"]["class"] == variant
    assert built_in["strategy"] is None


@pytest.mark.slow
def test_the_examples_trade(data: Path, tmp_path: Path, model_url: str) -> None:
    for reference, hour, *params in (
        ("sma_cross.py:SmaCross", 4, "window=20", "fast=5"),
        ("grid.py:Grid", 4, "step=0.002"),
        ("ask_model.py:AskModel", 0, "model=some", f"base_url={model_url}"),
    ):
        options = [text for param in params for text in ("--param", param)]
        out = tmp_path / reference.partition(".")[0]
        last_hours = ("--from", f"2025-03-02T0{hour}:00:00Z")
        code, result = backtest(data, out, "--strategy", str(EXAMPLES / reference), *options, *last_hours)
        assert code == 0
        assert result["accounts"][0]["trades"] > 0, reference
        assert result["strategy"]["params"] == dict(param.split("=", 1) for param in params)


@pytest.mark.slow
def test_decisions_of_a_strategy_are_stored_under_the_view_they_answer(
    data: Path, tmp_path: Path, model_url: str, asked: list[bytes]
) -> None:
    def run(name: str, reference: str, cassette: str, *params: str) -> tuple[str, int]:
        given = [text for param in params for text in ("--param", param)]
        options = ["--strategy", str(EXAMPLES / reference), "--cassette", str(tmp_path / cassette), "--market", "BTC"]
        period = ["--cadence", "5m", "--from", "2025-03-02T01:00:00Z", "--to", "2025-03-02T03:00:00Z"]
        code, result = backtest(data, tmp_path / name, *options, *period, "--mask", "symbols,scale", *given)
        assert (code, result["accounts"][0]["trades"] > 0) == (0, True)
        return result["ledgerSha256"], result["answers"]["asked"]

    model = "ask_model.py:AskModel", "models", "model=some", f"base_url={model_url}"
    first = run("first", *model)
    requests = len(asked)
    assert requests > 0
    assert run("again", *model) == (first[0], 0)
    assert len(asked) == requests

    grid = "grid.py:Grid"  # has a state, which a run from a cut cassette needs
    whole, count = run("whole", grid, "grids", "step=0.002")
    lines = (tmp_path / "grids" / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "answers.jsonl").write_bytes(b"".join(lines[: count // 2]) + lines[-1][:50])
    assert run("resumed", grid, "cut", "step=0.002") == (whole, count - count // 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of quantstats about pandas
def test_the_notebook_draws_the_tear_sheet_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes its cells in order, like a notebook, without the packages of Jupyter."""
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", datetime(2025, 3, 1, tzinfo=UTC), 4 * 1440, price=90_000, seed=1)
    options = ("--strategy", f"{EXAMPLES / 'sma_cross.py'}:SmaCross", "--param", "window=20", "--cadence", "30m")
    code, result = backtest(tmp_path, tmp_path / "run", *options)
    assert code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "tear_sheet.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # the notebook of the documentation
    (account,) = result["accounts"]
    assert names["account"] == account["id"]
    assert names["by_market"]["net_pnl"].sum() == pytest.approx(names["trades"]["net_pnl"].sum())
    assert set(names["equity"].columns) > {account["id"]}
    assert names["equity"][account["id"]].iloc[-1] == pytest.approx(account["equity"])
    assert [day.day for day in names["daily"].index] == [2, 3, 4]
    assert 100 * ((1 + names["daily"]).prod() - 1) == pytest.approx(account["returnPercent"])
    assert "Sharpe" in (tmp_path / "tear_sheet.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_guard_judges_a_strategy_unless_it_is_off(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "buyer.py"
    file.write_text(BUYER)
    options = ("--strategy", f"{file}:Buyer", "--param", "leverage=20", "--from", "2025-03-02T05:00:00Z")
    _, judged = backtest(data, tmp_path / "judged", *options)
    _, free = backtest(data, tmp_path / "free", *options, "--guard", "none")
    assert judged["accounts"][0]["equity"] == 10_000
    assert free["accounts"][0]["equity"] != 10_000
    rejected = results.load(tmp_path / "judged").decisions
    assert set(rejected["rule"]) == {"leverage"}
    assert rejected["reason"][0] == "Leverage 20 is above the 10 that your variant allows."
    run = results.load(tmp_path / "free")
    assert set(run.decisions["status"]) == {"ok"}
    assert len(run.trades) == free["accounts"][0]["trades"]
    own = run.equity["account"] == "buyer"
    assert set(run.equity["account"][~own]) == {"baseline/hold-nothing", "baseline/buy-and-hold", "baseline/apex-rules"}
    assert np.diff(run.equity["at"][own]).max() <= np.timedelta64(1, "h")
    # The repeated run has the same conditions.
    capsys.readouterr()
    assert main(["backtest", "--run", str(tmp_path / "free"), "--guard", "leverage-max=3", "--json"]) == 0
    (account,) = orjson.loads(capsys.readouterr().out)["accounts"]
    assert (account["recorded"], account["equity"]) == (free["accounts"][0]["equity"], 10_000)


def test_a_decision_for_an_unknown_market_fails_as_in_a_service(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "lost.py"
    file.write_text(
        "from trader.strategies import ClosePosition\n"
        "class Lost:\n    def decide(self, view):\n        return [ClosePosition(symbol='DOGE')]\n"
    )
    code, _ = backtest(data, tmp_path / "run", "--strategy", f"{file}:Lost", "--from", "2025-03-02T05:50:00Z")
    assert code == 0
    failed = results.load(tmp_path / "run").decisions
    assert set(failed["status"]) == {"failed"}
    assert failed["reason"][0] == "There is no market 'DOGE'; the markets are BTC, ETH."


def test_refused_decisions_are_counted_by_rule_with_the_last_reason(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bare.py"
    file.write_text(
        "from trader.strategies import ClosePosition, PlaceOrder\nclass Bare:\n    def decide(self, view):\n"
        "        yield PlaceOrder(symbol='BTC', side='buy', quantity=0.01)\n"
        "        if view.at.minute == 55:\n            yield ClosePosition(symbol=f'{view.at:%Hh%M}')\n"
    )
    _, value = backtest(data, tmp_path / "run", "--strategy", f"{file}:Bare", "--from", "2025-03-02T04:50:00Z")
    rows = [(row["rule"] or row["status"], row["reason"]) for row in results.load(tmp_path / "run").decisions.records()]
    counts, reasons = Counter(rule for rule, _ in rows), dict(rows)
    assert set(counts) == {"stop", "failed"}
    assert value["accounts"][0]["refused"] == [
        {"rule": rule, "count": count, "reason": reasons[rule]} for rule, count in counts.most_common()
    ]
    assert "'05H55'" in reasons["failed"].upper()
    said = f"bare: refused: {counts['stop']} stop ({reasons['stop']}); 2 failed ({reasons['failed']})"
    assert said in capsys.readouterr().out
    assert report_data(tmp_path / "run" / "report.html")["figures"][0]["refused"] == len(rows)


def load(tmp_path: Path, text: str, **params: Any) -> LoadedStrategy:
    (tmp_path / "own.py").write_text(text)
    return load_strategy("own.py:Buyer", params, tmp_path)


def test_a_plain_class_gets_the_defaults_and_its_state_is_saved_and_loaded(tmp_path: Path) -> None:
    strategy = load(tmp_path, BUYER, leverage="2")
    assert (strategy.name, strategy.variant, strategy.intervals) == ("buyer", VariantId.APEX, ("15m",))
    strategy.load({"bought": 7})
    assert strategy.save() == {"bought": 7}
    assert load(tmp_path, BUYER, leverage=Decimal(3)).save() == {"bought": 0}


@pytest.mark.parametrize(
    ("text", "params", "words"),
    [
        (
            BUYER.replace("def decide", "def decides"),
            ("leverage=2",),
            "own.py:4: Buyer has no method decide(self, view)",
        ),
        (BUYER, (), "Buyer needs the parameter leverage"),
        (BUYER, ("leverage=2", "windov=1"), "Buyer has no parameter 'windov'; it has leverage, symbol"),
        (BUYER, ("leverage=high",), "the parameter leverage of Buyer is 'high'"),
        (
            BUYER,
            ("leverage=nan",),
            "the parameter leverage of Buyer is 'nan': Expected a finite number",
        ),
        (
            BUYER.replace("leverage: float", "leverage: __import__('typing').Literal['low', 'high']"),
            ("leverage=none",),
            "the parameter leverage of Buyer is 'none': Expected one of high, low",
        ),
        (BUYER.replace("class Buyer", "class Seller"), ("leverage=2",), "has no class 'Buyer'; its classes are Seller"),
        (BUYER.replace("class Buyer:", "class Buyer"), ("leverage=2",), "own.py:4: expected ':'"),
        ("import nothing_here\n" + BUYER, ("leverage=2",), "own.py:1: raised ModuleNotFoundError"),
        (BUYER.replace("symbol, 0", "symbol, 1 / 0"), ("leverage=2",), "own.py:6: Buyer() raised"),
        (BUYER + "\n    variant = 'Best'", ("leverage=2",), "Buyer.variant is 'Best'; expected one of Apex"),
        (BUYER + "\n    intervals = '15m'", ("leverage=2",), "Buyer.intervals is '15m'; it must be a tuple of 1m"),
    ],
)
def test_a_wrong_file_class_or_parameter_is_named_before_anything_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, params: tuple[str, ...], words: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    options = ["--strategy", f"{tmp_path / 'own.py'}:Buyer", *(word for param in params for word in ("--param", param))]
    assert main(["backtest", "--data", str(data), "--out", str(tmp_path / "out"), "--no-database", *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("1 / 0", "own.py:10: decide raised ZeroDivisionError: division by zero"),
        ("view.markets['XRP']", "own.py:10: decide raised KeyError: 'XRP'"),
        ("raise SystemExit(3)", "own.py:10: decide raised SystemExit: 3"),
        ("while True: pass", "own.py:10: decide took longer than its deadline_s of 0.2 s"),
        ("return ['buy']", "own.py:8: decide returned 'buy'; expected one of CreatePosition"),
        ("price = -price", "own.py:8: decide returned a CreatePosition with quantity: expected a number above 0 up to"),
        ("price *= 10**9", "own.py:8: decide returned a CreatePosition with stop: expected a number above 0 up to"),
    ],
)
def test_a_failure_while_it_trades_ends_the_run_at_the_time_reached(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str, words: str
) -> None:
    text = BUYER.replace("        if view.position", f"        {statement}\n        if view.position")
    (tmp_path / "own.py").write_text(f"{text}\n    deadline_s = 0.2")
    options = ("--strategy", f"{tmp_path / 'own.py'}:Buyer", "--param", "leverage=2", "--variant", "Apex")
    code, result = backtest(data, tmp_path / "out", *options, "--from", "2025-03-02T00:00:00Z")
    assert code == 1
    assert result["complete"] is False
    assert words in result["ended"]
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said[0] == said[-1] == f"Ended at {result['to']}: {result['ended']}", "what a reader looks for first"
    assert {account["decisions"] for account in result["accounts"]} == {1}, "all accounts end at the same time"


def test_texts_of_a_decision_are_those_that_a_database_holds(tmp_path: Path) -> None:
    text = """
from trader.strategies import ClosePosition

class Buyer:
    def __init__(self, symbol: str):
        self.symbol = symbol

    def decide(self, view):
        return ClosePosition(symbol=self.symbol)
"""
    view = build_view({"BTC": [93_000]})
    assert load(tmp_path, text, symbol="B\x00TC").decide(view) == [ClosePosition(symbol="BTC")]
    with pytest.raises(StrategyError, match="a ClosePosition with symbol: expected text of 1 to 32 characters"):
        load(tmp_path, text, symbol="\x00").decide(view)
    with pytest.raises(StrategyError, match=r"a ClosePosition with 'utf-8' codec can't encode character '\\ud800'"):
        load(tmp_path, text, symbol="B\ud800").decide(view)


def test_a_masked_strategy_peeks_at_masked_marks() -> None:
    class Marks:
        def mark(self, symbol: str) -> Decimal:
            return {"BTC": Decimal("90000.5")}[symbol]

    mask = Mask.hiding(frozenset({"symbols", "scale"}), {"BTC": 90_000.5}, datetime(2025, 3, 1, tzinfo=UTC))
    peek: Any = Marks()
    assert MaskedPeek(peek, mask).mark("M01") == Decimal("90000.5") / 1024


@pytest.mark.slow
def test_rule_agents_decide_alike_behind_a_mask(data: Path, tmp_path: Path) -> None:
    options = ("--mask", "symbols,dates,scale", "--from", "2025-03-01T20:00:00Z", "--to", "2025-03-02T02:00:00Z")
    code, result = backtest(data, tmp_path / "run", *options)
    assert code == 0
    written = results.load(tmp_path / "run")
    for table in (written.trades, written.fills, written.decisions):
        columns = [values for name, values in table.arrays().items() if name != "account"]
        rows: dict[str, list[str]] = {}
        for account, *row in zip(table["account"], *columns, strict=True):
            rows.setdefault(account, []).append(str(row))
        assert {f"{account}:masked" for account in rows if ":" not in account} == {each for each in rows if ":" in each}
        for account, own in rows.items():
            assert own == rows[f"{account.removesuffix(':masked')}:masked"]
    assert len(written.trades) > 0
    assert [each["equity"] for each in result["masked"]["maskedMinusPlain"]] == [0] * 4


# Units: a strategy without a backtest

RISING = build_view(
    {"BTC": np.linspace(90_000, 93_000, 60)}, held={"BTC": GivenPosition(Side.LONG, 0.1, 91_000, leverage=2)}
)


def decide(tmp_path: Path, body: str, view: View = RISING, attributes: str = "") -> list[Decision]:
    """Return the decisions of a strategy with this body of `decide`."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    strategy = load(
        tmp_path,
        "import numpy as np\nfrom trader.strategies import *\n\n\n"
        f"class Buyer(Strategy):\n    {attributes or 'pass'}\n\n    def decide(self, view):\n{lines}\n",
    )
    return strategy.decide(view)


@pytest.mark.parametrize(
    "returned", ["5", "True", "'buy'", "{'symbol': 'BTC'}", "ClosePosition", "np.float64(0.5)", "[None]", "[['buy']]"]
)
def test_an_invalid_decision_is_reported_with_the_allowed_types(tmp_path: Path, returned: str) -> None:
    with pytest.raises(StrategyError, match=r"own.py:8: decide returned .*; expected one of Create"):
        decide(tmp_path, f"return {returned}")


def test_one_decision_needs_no_list(tmp_path: Path) -> None:
    assert decide(tmp_path, "return ClosePosition(symbol='BTC')") == [ClosePosition(symbol="BTC")]


def test_scalars_of_numpy_and_times_of_pandas_are_numbers_and_times(tmp_path: Path) -> None:
    (made,) = decide(
        tmp_path,
        "import pandas as pd\n"
        "price = view.markets['BTC'].closes('15m').mean()\n"
        "yield CreatePosition(symbol=np.str_('BTC'), side=Side.LONG, quantity=np.float32(0.5), leverage=np.int64(2),\n"
        "    stop=price * 0.9, invalidation='none', confidence=np.float64(50),\n"
        "    time_exit=pd.Timestamp('2025-01-07', tz='UTC'))",
    )
    assert made == CreatePosition(
        symbol="BTC", side=Side.LONG, quantity=0.5, leverage=2.0, stop=91_500 * 0.9, invalidation="none",
        confidence=50.0, time_exit=datetime(2025, 1, 7, tzinfo=UTC),
    )  # fmt: skip
    assert isinstance(made, CreatePosition)
    assert {type(made.quantity), type(made.leverage), type(made.stop)} == {float}
    with pytest.raises(StrategyError, match=r"CreatePosition with .* is a ndarray; expected a number"):
        decide(
            tmp_path,
            "return [CreatePosition(symbol='BTC', side=Side.LONG, quantity=np.ones(2), leverage=1, stop=1,\n"
            "    invalidation='none', confidence=1)]",
        )


NOTING = """
import json
from pathlib import Path

from trader.strategies import Cause, CreatePosition, Side, Strategy

class Noting(Strategy):
    def __init__(self, file: str):
        self.file, self.told, self.entries = Path(file), [], 0

    def on_fill(self, fill):
        self.told.append([fill.sequence, fill.cause, fill.symbol, str(fill.quantity), str(fill.price), str(fill.fee)])

    def may_act(self, peek):
        if "BTC" in peek.markets:
            self.file.write_text(json.dumps(self.told))
        return self.entries < 2 and (not self.told or self.told[-1][1] != Cause.ORDER)

    def decide(self, view):
        assert [fill.sequence for fill in view.fills] == [sequence for sequence, *_ in self.told]
        self.entries += 1
        symbol = next(iter(view.markets))
        assert {fill.symbol for fill in view.fills} <= {symbol}
        price = view.markets[symbol].price
        yield CreatePosition(symbol=symbol, side=Side.LONG, quantity=view.account.equity / price, leverage=2,
                             stop=price * 999 / 1000, target=price * 1001 / 1000, invalidation="none", confidence=50)
"""


@pytest.mark.parametrize("mask", [(), ("--mask", "symbols,scale,dates")])
def test_a_strategy_is_told_of_each_fill_before_it_is_asked(data: Path, tmp_path: Path, mask: tuple[str, ...]) -> None:
    """Of its own orders and of its stop or target, even while `may_act` says no."""
    file, told, out = tmp_path / "noting.py", tmp_path / "told", tmp_path / "out"
    file.write_text(NOTING)
    code, result = backtest(
        data, out, "--strategy", f"{file}:Noting", "--param", f"file={told}", "--market", "BTC", *mask
    )
    assert (code, result["ended"]) == (0, None)
    heard = [(symbol, *map(float, figures), cause) for _, cause, symbol, *figures in orjson.loads(told.read_bytes())]
    fills = list(results.load(out).fills.rows())
    own = [(symbol, quantity, price, fee, cause) for _, account, symbol, _, quantity, price, fee, _, cause in fills
           if account == "noting"]  # fmt: skip
    assert heard == own
    assert [is_order for is_order, _ in groupby(cause == "order" for *_, cause in heard)] == [True, False] * 2
    assert bool(mask) == ("noting:masked" in {account for _, account, *_ in fills})


def test_a_strategy_may_place_and_cancel_limit_orders(tmp_path: Path) -> None:
    placed, cancelled = decide(
        tmp_path,
        "bid = np.float64(92_000.5)\n"
        "yield PlaceOrder(symbol='BTC', side='buy', quantity=0.01, type=OrderType.LIMIT, limit_price=bid,\n"
        "    exit_plan=PlannedExit(stop=bid * 0.99))\n"
        "yield CancelOrder(symbol='BTC', order_id='7')",
    )
    assert isinstance(placed, PlaceOrder)
    assert (placed.limit_price, placed.client_order_id) == (92_000.5, None)
    assert placed.exit_plan == PlannedExit(stop=92_000.5 * 0.99)
    assert cancelled == CancelOrder(symbol="BTC", order_id="7")


def test_a_strategy_may_place_a_pair(tmp_path: Path) -> None:
    made = decide(
        tmp_path,
        "price = view.markets['BTC'].price\n"
        "return PlacePair(first=PlaceOrder(symbol='BTC', side='buy', quantity=np.float64(0.5), leverage=np.int64(2)),\n"
        "    second=PlaceOrder(symbol='ETH', side='sell', quantity=price / 2_000,\n"
        "        exit_plan=PlannedExit(stop=np.float32(2_500))))",
    )
    assert made == [
        PlacePair(
            first=PlaceOrder(symbol="BTC", side="buy", quantity=0.5, leverage=2.0),
            second=PlaceOrder(symbol="ETH", side="sell", quantity=46.5, exit_plan=PlannedExit(stop=2_500.0)),
        )
    ]
    assert request_of(1, made[0]).name == "placePair"
    assert decode(request_of(1, made[0]), RECORDED_TOOLS) == made[0]


HEDGER = """
from trader.strategies import PlaceOrder, PlacePair, PlannedExit

class Hedger:
    def decide(self, view):
        (first, one), (second, other) = view.markets.items()
        if view.at.minute % 30 == 0:
            yield PlacePair(
                first=self.order(first, "buy", 900 / one.price, one.price * 8 / 10),
                second=self.order(second, "sell", 900 / other.price, other.price * 12 / 10),
            )
        elif view.at.minute % 30 == 15 and len(view.positions) == 2:
            yield PlacePair(
                first=self.order(first, "sell", 300 / one.price), second=self.order(second, "buy", 300 / other.price)
            )
        elif view.at.minute % 30 == 20:
            yield PlacePair(
                first=self.order(first, "sell", 300 / one.price), second=self.order(second, "sell", 300 / other.price)
            )

    def order(self, symbol, side, quantity, stop=None):
        plan = None if stop is None else PlannedExit(stop=stop)
        return PlaceOrder(symbol=symbol, side=side, quantity=quantity, exit_plan=plan, reduce_only=plan is None)
"""


def test_pairs_trade_alike_behind_a_mask_and_from_a_cassette(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "hedger.py"
    file.write_text(HEDGER)
    hours = ("--from", "2025-03-01T20:00:00Z", "--to", "2025-03-01T22:00:00Z")
    options, kept = ("--strategy", f"{file}:Hedger", *hours), ("--cassette", str(tmp_path / "kept"))
    for name, more in (("masked", ("--mask", "symbols,dates,scale")), ("asked", kept), ("again", kept)):
        code, result = backtest(data, tmp_path / name, *options, *more)
        assert (code, result["ended"]) == (0, None)
    rows: dict[str, list[list[Any]]] = {}
    for name in ("masked", "asked", "again"):
        written = results.load(tmp_path / name)
        for row in (*written.fills.rows(), *written.decisions.rows()):
            rows.setdefault(f"{name} {row[1]}", []).append([row[0], *row[2:]])
    first, *others = rows.values()
    assert others == [first] * 3
    assert {row[3] for row in first if row[1] == "placePair"} == {"ok", "rejected"}


ORDER = "PlaceOrder(symbol='BTC', side='buy', quantity=1)"


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (f"first={ORDER}, second=None", "`second` is None; expected a PlaceOrder"),
        (f"first=ClosePosition(symbol='BTC'), second={ORDER}", "`first` is ClosePosition.*; expected a PlaceOrder"),
        (
            f"first={ORDER}, second=PlaceOrder(symbol='BTC', side='buy', quantity=1, type='limit', limit_price=9)",
            "`second` is a limit order; a pair has market orders",
        ),
        (
            f"first=PlaceOrder(symbol='BTC', side='buy', quantity=1, client_order_id='mine'), second={ORDER}",
            "`first` has the clientOrderId 'mine'; the orders of a pair have none",
        ),
        (f"first={ORDER}, second=PlaceOrder(symbol='BTC', side='up', quantity=1)", r"second.side: expected one of"),
        (f"first={ORDER}", "Missing required argument 'second'"),
    ],
)
def test_a_wrong_order_of_a_pair_is_named(tmp_path: Path, orders: str, words: str) -> None:
    with pytest.raises(StrategyError, match=rf"own.py:[89]: decide r.*{words}"):
        decide(tmp_path, f"return PlacePair({orders})")


def test_it_decides_only_once_it_is_warm(tmp_path: Path) -> None:
    body, attributes = "yield ClosePosition(symbol='BTC')", "warm_up = 60"
    assert decide(tmp_path, body, attributes=attributes)
    assert not decide(tmp_path, body, build_view({"BTC": [90_000.0] * 59}), attributes)
    for wrong in ("history = 0", "history = 1.5", "warm_up = -1", "warm_up = 301"):
        with pytest.raises(SettingsError, match="must be a whole number of candles"):
            decide(tmp_path, body, attributes=wrong)


def test_a_warm_up_that_never_ends_is_refused_before_anything_is_made(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "class Late:\n    intervals, warm_up = ('15m', '1h'), {}\n\n    def decide(self, view):\n        pass\n"
    places = ("--data", str(data), "--out", str(tmp_path / "run"), "--no-database")
    options = (*places, "--strategy", f"{tmp_path / 'late.py'}:Late")
    (tmp_path / "late.py").write_text(text.format(30))
    assert main(["backtest", *options, "--to", "2025-03-02T05:30:00Z"]) == 2
    said = capsys.readouterr().err
    for symbol in ("BTC", "ETH"):
        assert f"Late.warm_up is 30, so it would never decide: {symbol} has 29 closed candles of 1h at the end" in said
    assert "it must be at most 29" in said
    assert " of 15m" not in said
    assert not list(tmp_path.glob("run*"))
    assert not list(tmp_path.glob("*.jsonl"))
    (tmp_path / "late.py").write_text(text.format(29))
    assert main(["backtest", *options, "--from", "2025-03-02T05:00:00Z", "--to", "2025-03-02T05:30:00Z"]) == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("5", "own.py:7: series returned 5; expected a SeriesValue"),
        ("SeriesValue('XRP', 'mean', 1)", "series returned the market 'XRP'; expected one of BTC"),
        ("SeriesValue('BTC', '', 1)", "series returned the name ''; expected 1 to 40 characters"),
        ("SeriesValue('BTC', 'mean', 'high')", "series returned the value 'high' of 'mean'; expected a number"),
        ("view.markets['XRP']", "own.py:8: series raised KeyError: 'XRP'"),
    ],
)
def test_wrong_values_of_a_series_are_named(tmp_path: Path, value: str, words: str) -> None:
    text = "from trader.strategies import *\n\nclass Buyer(Strategy):\n    def decide(self, view):\n        pass\n\n"
    strategy = load(tmp_path, f"{text}    def series(self, view):\n        yield {value}\n")
    with pytest.raises(StrategyError, match=re.escape(words)):
        strategy.series(RISING)


def test_a_series_has_no_values_without_a_number_or_before_the_warm_up(tmp_path: Path) -> None:
    text = (
        "import numpy as np\nfrom trader.strategies import *\n\nclass Buyer:\n    warm_up = 60\n\n"
        "    def decide(self, view):\n        pass\n\n    def series(self, view):\n"
        "        return [SeriesValue('BTC', 'a', np.float64(2)), SeriesValue('BTC', 'b', np.nan, panel=True)]\n"
    )
    assert load(tmp_path, text).series(RISING) == [SeriesValue("BTC", "a", 2.0)]
    alone = text.replace("return [", "return ").replace(", SeriesValue('BTC', 'b', np.nan, panel=True)]", "")
    assert load(tmp_path, alone).series(RISING) == [SeriesValue("BTC", "a", 2.0)]
    assert load(tmp_path, text).series(build_view({"BTC": [90_000.0] * 59})) == []
    assert load(tmp_path, BUYER, leverage=2).series(RISING) == []


def test_a_view_for_a_unit_test_is_like_a_real_one() -> None:
    market = RISING.markets["BTC"]
    assert market.closes("15m")[-1] == market.price == RISING.positions[0].mark == 93_000
    assert market.opens("15m")[1:].tolist() == market.closes("15m")[:-1].tolist()
    assert (market.highs("15m") >= market.lows("15m")).all()
    assert RISING.account.equity == 10_200
    assert market.indicators["15m"] == market.indicator_history["15m"][-1]
    assert market.indicators["15m"].rsi == 100
    assert msgspec.json.decode(msgspec.json.encode(RISING), type=View) == RISING


def test_a_view_for_a_unit_test_has_several_intervals_candles_with_volumes_and_resting_orders() -> None:
    hour = datetime(2025, 1, 6, 11, tzinfo=UTC)
    view = build_view(
        {
            "BTC": {
                "1h": [Candle(hour, 91_000, 93_000, 90_000, 92_000, 7.5)],
                "15m": np.linspace(90_000, 92_500, 400),
            },
            "ETH": [2_000, 2_100],
        },
        orders=[
            PlaceOrder(symbol="ETH", side="sell", quantity=2, type=OrderType.LIMIT, limit_price=2_200),
            PlaceOrder(symbol="BTC", side="buy", quantity=0.5, type=OrderType.LIMIT, limit_price=90_500.5),
        ],
    )
    market = view.markets["BTC"]
    assert market.price == 92_500, "of the finest interval"
    assert (market.closes("1h").tolist(), market.volumes("1h").tolist()) == ([92_000], [7.5])
    assert set(market.candles) == set(market.indicators) == {"1h", "15m"}
    assert market.indicators["15m"] == indicators(market.candles["15m"][-300:])
    assert [(order.symbol, order.limit_price, order.remaining) for order in view.orders] == [
        ("ETH", 2_200, 2), ("BTC", Decimal("90500.5"), Decimal("0.5")),
    ]  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{'FOO': [1]}", "closes has 'FOO'; allowed are BTC, ETH, "),
        ("{'BTC': []}", "BTC 15m has no prices; it needs at least one close or Candle"),
        ("{'BTC': 90_000}", "BTC 15m is 90000; it must be a sequence of closes or of Candles"),
        ("{'BTC': [90_000, np.nan]}", "BTC 15m[1] is nan; it must be a finite number above 0"),
        ("{'BTC': ['dear']}", "BTC 15m[0] is 'dear'; it must be a finite number above 0"),
        ("{'BTC': [1]}, interval='7m'", "BTC has the interval '7m'; allowed are 1m, 5m, 15m, 1h, 4h"),
        ("{'BTC': {}}", "BTC has no interval; it needs at least one of 1m, "),
        ("{'BTC': [LATE]}", "BTC 15m[0] opens at 2025-01-06T12:00:00+00:00; candles of 15m ascend, "),
        ("{'BTC': [LATE]}, at=LATE.open_time.replace(tzinfo=None)", "at is datetime.datetime(2025, 1, 6, 12, 0); it "),
        ("{'BTC': [LATE._replace(low=0)]}, at=LATE.open_time.replace(hour=13)", "BTC 15m[0].low is 0; it must be "),
        ("{'BTC': [LATE, 5]}, at=LATE.open_time.replace(hour=13)", "BTC 15m[1] is 5; it must be a Candle, "),
        ("{'BTC': [1]}, held={'ETH': GivenPosition(Side.LONG, 1, 1)}", "held has 'ETH'; allowed are BTC"),
        ("{'BTC': [1]}, held={'BTC': GivenPosition(Side.LONG, -1, 1)}", "the quantity held in BTC is -1; it must be "),
        ("{'BTC': [1]}, capital=0", "capital is 0; it must be a finite number above 0"),
        ("{}, orders=[PlaceOrder(symbol='ETH', side='buy', quantity=1)]", "orders has 'ETH'; allowed are none, "),
        ("{'BTC': [1]}, orders=[PlaceOrder(symbol='BTC', side='buy', quantity=1)]", "allowed are limit orders, "),
    ],
)
def test_wrong_arguments_of_a_view_for_a_unit_test_are_named(arguments: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        eval(f"build_view({arguments})")  # the arguments above


LATE = Candle(datetime(2025, 1, 6, 12, tzinfo=UTC), 1, 1, 1, 1, 1)
"""A candle that opens at the time of a view."""
