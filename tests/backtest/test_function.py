"""The function `run_backtest`: the command's figures as DataFrames, in scripts, notebooks and debuggers."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson
import pandas as pd
import pytest
from support.candles import write_walk
from support.reports import report_data

from trader.__main__ import main
from trader.agents.domain.mask import Mask
from trader.agents.domain.prompt import view_data
from trader.agents.strategy_files import load_strategy
from trader.backtest import BacktestResult, run_backtest
from trader.backtest.execution import End, FinishedBacktest
from trader.backtest.output import TableJournal
from trader.backtest.spec import conditions_of
from trader.core.errors import SettingsError, StartError, StrategyError
from trader.market.sources.files import find_files, read_market
from trader.portfolio.tables import Table, load
from trader.strategies import (
    ClosePosition,
    CreatePosition,
    Decision,
    OrderType,
    PlaceOrder,
    PlannedExit,
    PlannedTarget,
    Side,
    Strategy,
    View,
    build_view,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "strategies.md"
START = "2025-03-02T02:00:00Z"


class Buyer(Strategy):
    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def decide(self, view: View) -> list[Decision]:
        price = float(view.markets["BTC"].price)
        if view.position("BTC") is not None:
            return [ClosePosition(symbol="BTC")] if view.at.minute == 30 else []
        quantity = self.share * float(view.account.equity) / price
        return [
            CreatePosition(
                symbol="BTC", side=Side.LONG, quantity=quantity, leverage=2, stop=price * 0.8, invalidation="none",
                confidence=50,
            )
        ]  # fmt: skip


class LookingBuyer(Buyer):
    seen: ClassVar[list[View]] = []

    def decide(self, view: View) -> list[Decision]:
        self.seen.append(view)
        return super().decide(view)


class Tagging(Strategy):
    """One decision a minute: each way in and out, with a tag or without."""

    def decide(self, view: View) -> list[Decision]:
        price = float(view.markets["BTC"].price)

        def opening(side: Side, tag: str | None, stop: float) -> Decision:
            return CreatePosition(
                symbol="BTC", side=side, quantity=0.01, leverage=1, stop=stop, invalidation="none", confidence=50,
                tag=tag,
            )  # fmt: skip

        plan: dict[int, Decision] = {
            1: PlaceOrder(
                symbol="BTC", side="buy", quantity=0.02, type=OrderType.LIMIT, limit_price=round(price * 0.9999, 1),
                tag="dip",
            ),
            20: opening(Side.LONG, "more", price * 0.5),
            22: ClosePosition(symbol="BTC", fraction=0.5, tag="half"),
            24: ClosePosition(symbol="BTC"),
            26: opening(Side.LONG, None, price * 0.5),
            28: opening(Side.SHORT, "=turn", price * 1.00001),
            45: opening(Side.LONG, "refused", price * 2),
        }  # fmt: skip
        return [plan[view.at.minute]] if view.at.minute in plan else []


class Failing(Strategy):
    def decide(self, view: View) -> list[Decision]:
        raise KeyError("5m")


class Looking(Strategy):
    intervals = ("1m",)
    seen: ClassVar[list[View]] = []

    def __init__(self, history: int) -> None:
        self.history = history

    def decide(self, view: View) -> list[Decision]:
        self.seen.append(view)
        return []


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One market of thirty hours."""
    folder = tmp_path_factory.mktemp("data")
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", datetime(2025, 3, 1, tzinfo=UTC), 1_800, price=90_000, seed=1)
    return folder


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_class_gets_the_figures_of_the_command_as_typed_frames(data: Path, tmp_path: Path) -> None:
    result = run_backtest(Buyer, data, params={"share": 0.5}, start=START, taker_fee=4, out="called")
    options = ("--strategy", f"{__file__}:Buyer", "--param", "share=0.5", "--from", START, "--taker-fee", "4")
    assert main(["backtest", "--data", str(data), "--out", "run", "--no-database", *options]) == 0
    commanded = orjson.loads(Path("run/result.json").read_bytes())
    assert result.equity["at"].is_monotonic_increasing
    assert result.value["ledgerSha256"] == commanded["ledgerSha256"]
    assert result.value == orjson.loads(Path("called/result.json").read_bytes())
    assert result.value["accounts"] == commanded["accounts"]
    assert result.value["strategy"]["sha256"] == commanded["strategy"]["sha256"]
    assert result.accounts.loc["buyer", "equity"] == pytest.approx(commanded["accounts"][0]["equity"])
    assert len(result.trades) == commanded["accounts"][0]["trades"] > 0
    for frame, times in (
        (result.equity, ["at"]), (result.trades, ["opened_at", "closed_at"]), (result.fills, ["at"]),
        (result.decisions, ["at"]),
    ):  # fmt: skip
        assert len(frame) > 0
        assert {str(frame[column].dt.tz) for column in times} == {"UTC"}
    assert result.trades["net_pnl"].dtype == "float64"
    assert result.fills["maker"].dtype == "bool"
    assert result.equity["at"].min() >= pd.Timestamp(START)
    html = methodcaller("_repr_html_")(result)  # as a notebook calls it
    assert html.count("<polyline") == 2
    for label in ("buyer", "baseline/buy-and-hold"):
        assert f">— {label}</text>" in html
    drawn = result.equity.query("account in ('buyer', 'baseline/buy-and-hold')")
    for bound in (drawn["equity"].min(), drawn["equity"].max()):
        assert f">{bound:,.2f}</text>" in html
    for moment in (drawn["at"].min(), drawn["at"].max()):
        assert f">{moment:%Y-%m-%dT%H:%MZ}</text>" in html
    assert f"{result.accounts.loc['buyer', 'equity']:,.2f}" in html


def test_the_drawdown_is_of_hours_in_the_report_too(data: Path) -> None:
    result = run_backtest(Buyer, data, start=START, end="2025-03-02T05:59:59Z", out="run")
    minutes = result.equity.query("account == 'buyer'").set_index("at")["equity"]
    falls = [
        100 * (1 - series / series.cummax().clip(lower=10_000)).max()
        for series in (minutes, minutes.resample("h").last().dropna())
    ]
    assert result.accounts.loc["buyer", "max_drawdown_percent"] == pytest.approx(falls[1])
    assert falls[0] > 1.01 * falls[1]
    assert report_data(Path("run/report.html"))["figures"][0]["drawdown"] == pytest.approx(falls[1])


def test_the_curve_has_what_a_close_left_late_in_the_last_hour(data: Path) -> None:
    class Leaving(Strategy):
        def decide(self, view: View) -> list[Decision]:
            if view.at.minute:
                return []
            plan = PlannedExit(stop=1.0, time_exit=view.at + timedelta(minutes=20))
            return [PlaceOrder(symbol="BTC", side="buy", quantity=0.1, exit_plan=plan)]

    result = run_backtest(Leaving, data, start=START, end="2025-03-02T02:40:00Z")
    curve = result.equity.query("account == 'leaving'").set_index("at")["equity"]
    assert len(result.trades) == 1
    assert curve.index[-1] == pd.Timestamp("2025-03-02T02:40:00Z")
    assert curve.iloc[-1] == result.accounts["equity"]["leaving"]


def test_targets_are_decimals_as_prices_of_a_view_and_a_wrong_one_is_named(data: Path) -> None:
    class Aiming(Strategy):
        def __init__(self, fraction: float = 0.5) -> None:
            self.fraction = fraction

        def decide(self, view: View) -> list[Decision]:
            price: Any = view.markets["BTC"].price
            targets = [PlannedTarget(price=price * 2, fraction=self.fraction)]
            plan = PlannedExit(stop=price / 2, targets=targets)
            return [PlaceOrder(symbol="BTC", side="buy", quantity=0.001, exit_plan=plan)]

    span: dict[str, Any] = {"start": START, "end": "2025-03-02T02:02:00Z"}
    assert run_backtest(Aiming, data, evidence=False, **span).decisions["status"][0] == "ok"
    with pytest.raises(StrategyError, match=r"targets.0.fraction: expected a number above 0 up to 1, got 1.5"):
        run_backtest(Aiming, data, params={"fraction": 1.5}, **span)


def test_falls_and_risk_are_of_the_curve_and_of_whole_days() -> None:
    journal, rng, market = TableJournal(), np.random.default_rng(7), "baseline/buy-and-hold"
    curves = {name: 10_000 * np.exp(np.cumsum(rng.normal(0, 0.004, 12 * 24 + 5))) for name in ("buyer", market)}
    for hour in range(12 * 24 + 5):
        at = datetime(2025, 3, 1, tzinfo=UTC) + timedelta(hours=hour)
        for name, curve in curves.items():
            journal.results.equity.add(at, name, curve[hour], curve[hour], 0)
    end = End(datetime(2025, 3, 13, 4, tzinfo=UTC))
    finished = FinishedBacktest({}, [], journal, Table("series"), [], end, None)
    result = BacktestResult({"accounts": [{"id": "buyer"}], "capital": "10000"}, finished, None)
    curve = result.equity.query("account == 'buyer'").set_index("at")["equity"]
    falls = result.drawdowns()
    assert falls["percent"].iloc[0] == pytest.approx((100 * (1 - curve / curve.cummax())).max())
    for fall in falls.itertuples():
        within = curve[fall.began_at : None if pd.isna(fall.ended_at) else fall.ended_at]
        assert within.iloc[0] == within.iloc[:-1].max()
        assert fall.percent == pytest.approx(100 * (1 - within[fall.lowest_at] / within.iloc[0]))
        assert pd.isna(fall.ended_at) or within.iloc[-1] >= within.iloc[0]
    closes = [[10_000.0, *each[23 : 12 * 24 : 24]] for each in curves.values()]  # the thirteenth day is not whole
    own, other = (np.diff(each) / each[:-1] for each in closes)
    risk, slope = result.risk.loc["buyer"], np.polyfit(other, own, 1)
    assert risk["beta"] == pytest.approx(slope[0])
    assert risk["alpha_percent"] == pytest.approx(36_500 * slope[1])
    assert risk["volatility_percent"] == pytest.approx(100 * own.std(ddof=1) * 365**0.5)
    assert risk["value_at_risk_percent"] == pytest.approx(-100 * np.quantile(own, 0.05))
    last = result.rolling(5).iloc[-1]
    assert last["sharpe", "buyer"] == pytest.approx(own[-5:].mean() / own[-5:].std(ddof=1) * 365**0.5)


def test_a_view_has_the_record_until_then(data: Path) -> None:
    LookingBuyer.seen.clear()
    result = run_backtest(LookingBuyer, data, cadence="7m", evidence=False)
    equity, trades = result.equity, result.trades
    assert len(trades) > 2
    for view in LookingBuyer.seen:
        midnight, own = view.at.replace(hour=0, minute=0), view.account
        today = equity["equity"][(equity["at"] >= midnight) & (equity["at"] < view.at)]
        lowest = min([*today, float(own.equity)])
        fall = max(0.0, 100 * (1 - lowest / float(own.day_opening_equity)))
        assert float(own.day_loss_percent) == pytest.approx(fall, abs=1e-6), view.at
        earlier = equity["equity"][equity["at"] < midnight]
        assert float(own.day_opening_equity) == pytest.approx([10_000.0, *earlier][-1]), view.at
        assert view.stats.trade_count == (trades["closed_at"] <= view.at).sum()


def test_the_day_of_an_account_begins_at_midnight_also_if_nothing_has_happened_since(data: Path) -> None:
    class Once(LookingBuyer):
        def decide(self, view: View) -> list[Decision]:
            made = super().decide(view)
            if view.positions:
                return [ClosePosition(symbol="BTC")]
            return [] if view.trades else made

    LookingBuyer.seen.clear()
    result = run_backtest(Once, data, cadence="20m", evidence=False)
    equity = float(result.accounts["equity"].iloc[0])
    opened = {view.at.day: float(view.account.day_opening_equity) for view in LookingBuyer.seen}
    assert opened == {1: 10_000, 2: pytest.approx(equity)}
    assert equity != 10_000


def test_excursions_are_of_the_candles_within_a_trade(data: Path) -> None:
    result = run_backtest(Buyer, data, start=START, evidence=False, cadence="10m")
    trades, minutes = result.trades, read_market(find_files(data)["BTC"])
    assert len(trades) > 2
    for trade in trades.itertuples():
        first, end = (bisect_left(minutes.minute, at.timestamp() / 60) for at in (trade.opened_at, trade.closed_at))
        whole, touched = slice(first, end - 1), slice(first - 1, end + 1)
        least, most = (
            [100 * (bound(column[part]) / trade.entry_price - 1) for part in (whole, touched)]
            for bound, column in ((min, minutes.low), (max, minutes.high))
        )
        assert least[1] - 0.01 <= trade.mae_percent <= min(least[0] + 0.01, 0)
        assert max(most[0] - 0.01, 0) <= trade.mfe_percent <= most[1] + 0.01
    by_hour = result.trades_by("hour")
    assert by_hour["net_pnl"].sum() == pytest.approx(trades["net_pnl"].sum())
    assert by_hour["trades"].to_dict() == trades["opened_at"].dt.hour.value_counts().sort_index().to_dict()
    assert 0.5 < result.accounts.loc["buyer", "max_leverage"] < 2
    assert result.value["files"].keys() == {f"{data.name}/BTCUSDT-1m-2025-03.csv"}


def test_a_trade_has_the_tags_of_the_orders_that_opened_and_closed_it(data: Path) -> None:
    options: dict[str, Any] = {
        "start": START,
        "end": "2025-03-02T02:50:00Z",
        "guard": {"stop-required": 0, "reversal-cycles": 0},
    }
    result = run_backtest(Tagging, data, out="run", evidence=True, **options)
    trades = result.trades
    assert trades[["close_reason", "entry_tag", "exit_tag"]].to_numpy().tolist() == [
        ["order", "dip", "half"], ["order", "dip", ""], ["order", "", "=turn"], ["stop", "=turn", ""],
    ]  # fmt: skip
    assert load("run").trades["exit_tag"].tolist() == trades["exit_tag"].tolist(), "also of a text like a formula"
    assert result.trades_by("entry_tag")["trades"].to_dict() == {"": 1, "=turn": 1, "dip": 2}
    (market,) = report_data(Path("run/report.html"))["markets"]
    assert [(each["entryTag"], each["exitTag"]) for each in market["trades"]] == [
        ("dip", "half"), ("dip", None), (None, "=turn"), ("=turn", None),
    ]  # fmt: skip


async def test_it_runs_beside_the_event_loop_of_a_notebook(data: Path) -> None:
    asyncio.get_running_loop()
    result = run_backtest("Apex", data, start="2025-03-02T05:30:00", cadence="15m")
    assert [each["id"] for each in result.value["accounts"]] == ["apex-rules"]
    assert result.folder is None
    assert list(Path().iterdir()) == [Path("trials.jsonl")], "it leaves nothing but its trial"


@pytest.fixture
def _in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_in_new_york")
def test_times_without_a_zone_are_utc_wherever_the_machine_is() -> None:
    expected = datetime(2025, 3, 2, 5, tzinfo=UTC)
    for start in (
        "2025-03-02T05:00:00", expected.replace(tzinfo=None), pd.Timestamp("2025-03-02T05:00:00"), expected,
        pd.Timestamp(expected).tz_convert("Asia/Tokyo"),
    ):  # fmt: skip
        assert conditions_of(None, {"start": start}).start == expected


def test_errors_are_exceptions_with_the_words_of_the_command(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, options, arguments in (
        (SettingsError, {"latency": -1}, ("--latency", "-1")),
        (SettingsError, {"start": "soon", "capital": 0}, ("--from", "soon", "--capital", "0")),
        (SettingsError, {"funding": 3}, ("--funding", "3")),
        (SettingsError, {"guard": {"courage": 1}}, ("--guard", "courage=1")),
        (SettingsError, {"cadence": "soon"}, ("--cadence", "soon")),
        (StartError, {"end": "2031-01-01"}, ("--to", "2031-01-01")),
        (StartError, {"markets": ["ETH"]}, ("--market", "ETH")),
        (StartError, {"markets": "FOO"}, ("--market", "FOO")),
    ):
        with pytest.raises(kind) as caught:
            run_backtest(Buyer, data, **options)
        assert main(["backtest", "--data", str(data), "--strategy", f"{__file__}:Buyer", *arguments]) != 0
        said = capsys.readouterr().err
        assert all(line.strip() in said for line in str(caught.value).splitlines()), said
    with pytest.raises(
        StartError, match=r"--market names FOO, whose figures are unknown; --preset and --markets-file define BTC, "
    ):
        run_backtest(Buyer, data, markets="FOO")
    with pytest.raises(StartError, match="set --market to the markets to trade"):
        run_backtest(Buyer, data, markets="ETH")
    with pytest.raises(StartError, match=r"^--markets-file /nowhere: "):
        run_backtest(Buyer, data, markets_file="/nowhere")
    with pytest.raises(SettingsError, match="has no parameter 'size'; it has share"):
        run_backtest(Buyer, data, params={"size": 1})
    with pytest.raises(SettingsError, match="has no method decide"):
        run_backtest(int, data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"strategy": Buyer()}, SettingsError, "strategy is <.*; it must be a class with decide.view., FILE:CLASS, or"),
        ({"strategy": len}, SettingsError, "strategy is <built-in function len>; it must be a class"),
        ({"data": "nope"}, StartError, "nope: No such file or directory"),
        ({"data": None}, SettingsError, "data is None; it must be a folder or file of candles"),
        ({"params": [1]}, SettingsError, r"params is \[1\]; it must be a mapping of names to values"),
        ({"markets": 5}, SettingsError, "markets is 5; it must be a symbol, or a sequence of them"),
        ({"guard": ["leverage-max"]}, SettingsError, "guard is .*; it must be a mapping of names of limits to numbers"),
        ({"guard": {"leverage-max": "abc"}}, SettingsError, "--guard is 'leverage-max=abc'; it must be .* whole"),
        ({"guard": {"leverage-max": 2.7}}, SettingsError, "--guard is 'leverage-max=2.7'; it must be .* whole"),
        ({"out": 5}, SettingsError, "out is 5; it must be a new folder"),
        ({"trials": 5}, SettingsError, "trials is 5; it must be a file"),
        ({"markets_file": 5}, SettingsError, "markets_file is 5; it must be a file"),
        ({"own_data": [1]}, SettingsError, r"own_data is \[1\]; it must be a file or a DataFrame"),
        ({"start": pd.NaT}, SettingsError, "--from: expected an ISO 8601 time .*, got 'NaT'"),
        ({"strategy": ""}, SettingsError, "the strategy is ''; it must be FILE:CLASS"),
        ({"tables": "xml", "out": "run"}, SettingsError, "--tables is 'xml'; it must be one of csv, parquet"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_before_anything_is_made(
    data: Path, arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"strategy": Buyer, "data": data} | arguments
    with pytest.raises(kind, match=words):
        run_backtest(**options)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("several", ["0.5,1", "0.5..1:0.1", [0.5, 1], (0.5, 1)])
def test_several_values_of_a_parameter_are_refused_with_the_way_to_try_them(data: Path, several: object) -> None:
    with pytest.raises(SettingsError, match=r"share of Buyer is .*: Expected `float`, got .*; a run has one value of"):
        run_backtest(Buyer, data, params={"share": several})
    with pytest.raises(SettingsError, match=r"Expected `float`, got `str`$"):
        run_backtest(Buyer, data, params={"share": "half"})


def test_limits_of_the_guard_are_numbers_and_flags_of_python_and_numpy(data: Path) -> None:
    guard: dict[str, Any] = {"leverage-max": np.int64(1), "stop-required": False, "reversal-cycles": 2}
    result = run_backtest(Buyer, data, start=START, end="2025-03-02T02:05:00Z", guard=guard)
    assert set(result.decisions["rule"]) == {"leverage"}
    assert result.value["options"]["guard"] == {"leverage_max": 1, "stop_required": False, "reversal_cycles": 2}


def test_a_failure_keeps_the_exception_of_the_strategy(data: Path) -> None:
    with pytest.raises(StrategyError, match=r"test_function.py:\d+: decide raised KeyError: '5m'") as caught:
        run_backtest(Failing, data, start=START)
    assert isinstance(caught.value.__cause__, KeyError)
    assert not Path("trials.jsonl").exists(), "a run that crashed does not count as a trial"


def test_a_run_that_fails_within_an_hour_has_its_curve_until_then(data: Path) -> None:
    class Leaving(Buyer):
        def decide(self, view: View) -> list[Decision]:
            if view.at.minute == 13:
                raise KeyError("5m")
            return super().decide(view)

    with pytest.raises(StrategyError):
        run_backtest(Leaving, data, start=START, out="run")
    account = orjson.loads(Path("run/result.json").read_bytes())["accounts"][0]
    curve = load("run").equity.frame().query("account == 'leaving'")
    assert curve["at"].iloc[-1] == pd.Timestamp("2025-03-02T02:13:00Z")
    assert curve["equity"].iloc[-1] == pytest.approx(float(account["equity"]))
    assert account["maxDrawdownPercent"] > -account["returnPercent"] - 1e-9 > 0


def test_a_debugger_stops_the_clock_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Strategy):
        deadline_s = 0.02

        def decide(self, view: View) -> list[Decision]:
            before = sys.gettrace()
            sys.settrace(lambda *_: None)
            end = time.monotonic() + 0.06
            while time.monotonic() < end:
                pass
            sys.settrace(before)
            return []

    strategy = load_strategy(Slow, {})
    assert strategy.decide(build_view({"BTC": [1.0]})) == []


def test_a_run_leaves_the_alarms_of_its_caller_as_they_were(data: Path) -> None:
    """Also one that a deadline ended; within the run, the caller's handler does not get the strategy's alarm."""

    class Endless(Strategy):
        deadline_s = 0.05

        def decide(self, view: View) -> list[Decision]:
            while True:
                pass

    def of_the_caller(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, of_the_caller)
    try:
        with pytest.raises(StrategyError, match=r"decide took longer than its deadline_s of 0\.05 s"):
            run_backtest(Endless, data, start=START)
        assert signal.getsignal(signal.SIGALRM) is of_the_caller
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_the_example_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _, section = DOCUMENT.read_text(encoding="utf-8").partition("### From Python")
    strategy, code = (re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0] for text in (before, section))
    Path("dip.py").write_text(strategy, encoding="utf-8")
    Path("candles").mkdir()
    write_walk(Path("candles/BTCUSDT-1m.csv"), datetime(2025, 1, 11, tzinfo=UTC), 2_900, price=90_000, seed=1)
    Path("example.py").write_text(code, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(Path("example.py").absolute()), "exec"), names)
    result = names["result"]
    assert names["by_hour"]["net_pnl"].sum() == pytest.approx(result.trades["net_pnl"].sum())
    last = pytest.approx(result.accounts.loc["dip", "equity"], rel=1e-3)
    assert names["curve"].iloc[-1] == last, "a position is open, and the curve ends with the last whole minute"
    assert len(result.trades) > 0


@pytest.mark.processes
def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, trader; print([name for name in sys.modules if name.startswith('trader.') or name == 'numpy'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_views_have_own_data_from_its_time_on_and_nothing_is_judged_unless_asked(data: Path) -> None:
    Looking.seen.clear()
    times = pd.DatetimeIndex(["2025-03-02T02:01", "2025-03-02T02:03", "2025-03-03"])
    frame = pd.DataFrame({"mood": [1.0, 2.0, 3.0]}, index=times)
    end = "2025-03-02T02:04:00Z"
    result = run_backtest(
        Looking, data, params={"history": 5}, start="2025-03-02T02:00:00Z", end=end, own_data=frame, evidence=False
    )
    assert [view.data for view in Looking.seen] == [{}, {"mood": 1}, {"mood": 1}, {"mood": 2}, {"mood": 2}]
    assert "data" not in view_data(Looking.seen[0])
    assert view_data(Looking.seen[1])["data"] == {"mood": 1}, "as models and agents see it"
    assert (result.value["evidence"], result.value["baselines"], len(result.equity)) == (None, [], 1)
    assert [len(digest) for digest in result.value["ownData"].values()] == [64]
    with pytest.raises(StartError, match="is after the end of the run"):
        run_backtest(Looking, data, params={"history": 5}, start=START, end=end, own_data=frame.tail(1))


@pytest.mark.parametrize(("history", "first"), [(1_000, 1_000), (1_500, 1_500), (10**12, 26 * 60)])
def test_a_strategy_sees_its_whole_history_from_its_first_decision(data: Path, history: int, first: int) -> None:
    views = looked(data, history)[:5]
    counts = [len(view.markets["BTC"].candles["1m"]) for view in views]
    assert counts == [min(history, first + minute) for minute in range(5)]


def looked(data: Path, history: int, end: str = "2025-03-02T02:05:00Z") -> list[View]:
    """Return the views of each minute."""
    Looking.seen.clear()
    run_backtest(Looking, data, params={"history": history}, start=START, end=end)
    return [*Looking.seen]


def test_the_last_view_has_the_minute_in_which_the_prices_end_as_in_a_service(data: Path) -> None:
    views = looked(data, 5, "2025-03-02T02:05:40Z")
    assert [view.markets["BTC"].candles["1m"][-1].open_time.minute for view in views[1:]] == [0, 1, 2, 3, 4, 5]
    assert [view.at.minute for view in views] == [0, 1, 2, 3, 4, 5, 6]


def test_no_strategy_changes_an_array_of_candles_or_finds_later_ones_behind_it(data: Path) -> None:
    views = looked(data, 500)[:5]
    for view in views:
        market = view.markets["BTC"]
        arrays = [read("1m") for read in (market.opens, market.highs, market.lows, market.closes, market.volumes)]
        assert [tuple(row) for row in zip(*arrays, strict=True)] == [candle[1:] for candle in market.candles["1m"]]
        assert not any(array.flags.writeable for array in arrays)
        assert msgspec.json.decode(msgspec.json.encode(view, enc_hook=dict), type=View) == view
    early, late = (view.markets["BTC"].closes("1m") for view in (views[0], views[1]))
    assert early.base is None or early.base.shape == (5, len(early))
    assert early[1:].tolist() == late[:-1].tolist()
    masked = Mask({"BTC": "M1"}, {"BTC": 1}, timedelta(0)).apply(views[0])
    assert masked.markets["M1"].closes("1m").tolist() == (2 * early).tolist()
