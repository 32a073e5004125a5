"""Sweeps: grids, seeds and walk-forwards; complete runs are not repeated, and failed runs are named."""

import csv
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from support.candles import write_walk
from support.chromium import chromium_program
from support.reports import opened_report, report_data, rows_of

from trader.__main__ import main
from trader.backtest import workers
from trader.backtest.sweep import folds_of, grid_of
from trader.backtest.sweep_result import (
    METRICS,
    Done,
    SweepPeriod,
    SweepRun,
    ranked,
    read_run,
    sweep_page,
    sweep_value,
    trial_lines,
)
from trader.backtest.trials import KnownTrials, figures_of_hours
from trader.core.clock import iso
from trader.core.errors import SettingsError
from trader.core.wire import encode
from trader.results import compare_folders, run_sweep

START, END = datetime(2025, 3, 1, tzinfo=UTC), datetime(2025, 3, 11, tzinfo=UTC)

FLIPPER = """
import os, signal
from trader.strategies import ClosePosition, CreatePosition, Side

SEEN = set()

class Flipper:
    def __init__(self, hours: int):
        self.hours = hours

    def decide(self, view):
        1 / (self.hours - 3)
        if self.hours == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        SEEN.add(self.hours)
        assert SEEN == {self.hours}, "another run has changed this module"
        if view.at.minute:
            return
        if view.position("BTC") is not None:
            yield ClosePosition(symbol="BTC")
        elif view.at.hour % self.hours == 0:
            price = view.markets["BTC"].price
            yield CreatePosition(symbol="BTC", side=Side.LONG, quantity=view.account.equity / price, leverage=2,
                                 stop=price * 8 / 10, invalidation="none", confidence=50)
"""


def test_a_grid_is_every_combination_of_ranges_and_repeated_values() -> None:
    grid = grid_of(["window=10..30:10", "risk=0.1..0.2:0.05", "side=long", "side=short"])
    assert len(grid) == 3 * 3 * 2
    assert grid[0] == {"window": "10", "risk": "0.10", "side": "long"}
    assert grid[-1] == {"window": "30", "risk": "0.20", "side": "short"}
    assert grid_of(None) == [{}]
    assert [each["window"] for each in grid_of(["window=10..20:10", "window=20", "window=30"])] == ["10", "20", "30"]
    for wrong in ("window=10..5:1", "window=1..2:0", "window=1..0.5", "window=1...2"):
        with pytest.raises(SettingsError, match=r"a range must be FIRST\.\.LAST:STEP"):
            grid_of([wrong])


def test_walk_forward_periods_never_overlap_their_selection_periods() -> None:
    folds = folds_of("7d/1d", START, END)
    assert len(folds) == 3
    for choose, attempt in folds:
        assert choose.end is not None
        assert attempt.start is not None
        assert choose.end < attempt.start
    assert [attempt.start for _, attempt in folds[1:]] == [attempt.end for _, attempt in folds[:-1]]
    assert len(folds_of("9d/1d", START, END)) == 1
    part = "of which the first part is above 1; from --from, 2025-03-01T00.*, to --to, 2025-03-11T00.*, there are 240.0"
    for text, hours in (("14d/1d", 360), ("1h/1h", 2)):
        with pytest.raises(SettingsError, match=f"one fold needs {hours} hours, {part}"):
            folds_of(text, START, END)
    with pytest.raises(SettingsError, match="it must be CHOOSE/TRY in hours or days"):
        folds_of("a week", START, END)


def test_parameters_rank_by_the_mean_of_a_metric_over_their_seeds_and_those_that_lack_one_come_last() -> None:
    def done(window: str, seed: int, sharpe: float | None, fall: float, failure: str | None = None) -> Done:
        figures = {"sharpePerHour": sharpe, "maxDrawdownPercent": fall}
        return Done(SweepRun({"window": window}, seed, SweepPeriod(START, END), "run"), figures, None, failure)

    runs = [
        done("10", 0, None, 1.0), done("20", 0, 0.1, 9.0), done("20", 1, 0.3, 5.0), done("30", 0, 0.25, 8.0),
        done("30", 1, None, 4.0), done("40", 0, None, 0.0, "it crashed"), done("50", 0, inf, 9.5),
        done("50", 1, 0.1, 9.5),
    ]  # fmt: skip
    orders = {name: [params["window"] for params, _ in ranked(runs, METRICS[name])] for name in ("sharpe", "drawdown")}
    assert orders == {"sharpe": ["50", "20", "10", "30"], "drawdown": ["10", "30", "20", "50"]}


def test_the_test_periods_of_a_walk_forward_compound_for_each_seed() -> None:
    def done(fold: int, seed: int, gain: float | None, role: str = "try") -> Done:
        run = SweepRun({"window": str(fold)}, seed, SweepPeriod(START, END), f"fold{fold}-{role}")
        return Done(run, {"returnPercent": gain}, failure="it crashed" if gain is None else None)

    runs = [done(1, 0, 90.0, "choose"), done(1, 0, 10.0), done(2, 0, -10.0), done(1, 1, 20.0), done(2, 1, 5.0)]
    value = sweep_value(runs, "return", KnownTrials.of([], 24))
    assert value["walkForward"] == {"periods": 2, "meanReturnPercent": pytest.approx((-1.0 + 26.0) / 2)}
    assert next(trial_lines(value)).startswith("The 2 test periods returned +12.50 % together")
    for others in ([], [done(2, 1, None)]):
        assert sweep_value([*runs[:1], *others], "return", KnownTrials.of([], 24))["walkForward"] is None


def test_a_gain_without_risk_is_the_best_though_json_has_no_infinity(tmp_path: Path) -> None:
    hours = {"never-loses": [0.0, 0.001] * 12, "loses": [-0.001, 0.01] * 12, "idle": [0.0] * 24}

    def done(name: str) -> Done:
        run = SweepRun({"kind": name}, 0, SweepPeriod(None, None), "run")
        figures: dict[str, Any] = {each.figure: 1.0 for each in METRICS.values()}
        account = {**figures, "provider": "strategy", "funding": 0.0, "decisions": 1, "equity": 10_000.0}
        account |= figures_of_hours(np.array(hours[name]))
        folder = tmp_path / name
        folder.mkdir()
        value = {"complete": True, "from": iso(START), "to": iso(END), "accounts": [account]}
        (folder / "result.json").write_bytes(encode(value))
        read = read_run(run, folder)
        assert read is not None
        return read

    runs = [done(name) for name in ("idle", "loses", "never-loses")]
    assert orjson.loads((tmp_path / "never-loses" / "result.json").read_bytes())["accounts"][0]["calmar"] is None
    for by in ("sortino", "calmar"):
        value = sweep_value(runs, by, KnownTrials.of([], 24))
        assert [row["params"]["kind"] for row in value["parameters"]] == ["never-loses", "loses", "idle"]
        assert orjson.loads(encode(value))["parameters"][0]["metric"] is None
        (tmp_path / "sweep.html").write_text(sweep_page("swept", value))
        assert report_data(tmp_path / "sweep.html")["parameters"][0]["metric"] == "Infinity"


@pytest.mark.processes
def test_a_sweep_without_a_period_states_the_one_that_its_runs_traded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_walk(tmp_path / "data" / "BTCUSDT-1m-2025-03.csv", START, 120, price=90_000, seed=1)
    (tmp_path / "idle.py").write_text("class Idle:\n    def decide(self, view):\n        pass\n")
    out = tmp_path / "sweep"
    options = ("--data", str(tmp_path / "data"), "--strategy", f"{tmp_path / 'idle.py'}:Idle", "--out", str(out))
    assert main(["backtest", *options, "--seeds", "2", "--workers", "1", "--json"]) == 0
    value = orjson.loads(capsys.readouterr().out)
    with (out / "sweep.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    traded = ("2025-03-01T00:00:00.000Z", "2025-03-01T01:59:59.000Z")
    assert [(row["from"], row["to"]) for row in (*value["runs"], *rows)] == [traded] * 4


@pytest.mark.processes
async def test_the_page_of_a_sweep_has_a_heat_map_of_each_two_parameters_that_vary(tmp_path: Path) -> None:
    chromium_program()
    rows = [
        {"params": {"window": window, "risk": risk, "side": "<b>"}, "runs": 1, "metric": value,
         "meanReturnPercent": value, "deviation": None, "worst": value, "best": value}
        for window, risk, value in (("20", "0.1", 1.5), ("9", "0.1", -0.5), ("20", "0.2", 0.5))
    ]  # fmt: skip
    found = {"probability": 0.375, "configurations": 3, "blocks": 4, "choices": 6}
    value = {
        "by": "return", "runs": rows, "parameters": rows, "overfitting": found, "walkForward": None,
        "bestSharpePerHour": None,
    }  # fmt: skip
    shades = "[...document.querySelectorAll('td[title]')].map(td => parseInt(td.style.background.split('accent)')[1]))"
    file = tmp_path / "sweep.html"
    file.write_text(sweep_page("<b>", value))
    async with opened_report(file, tmp_path) as tab:
        assert "Probability of backtest overfitting: 38 %." in await tab.evaluate("document.body.innerText")
        assert await tab.evaluate("document.querySelector('main b')") is None
        heat = await rows_of(tab, "window and risk")
        assert heat == [["window ↓ risk →", "0.1", "0.2"], ["9", "-0.5", ""], ["20", "+1.5", "+0.5"]]
        assert await tab.evaluate(shades) == [0, 45, 23]
        _, *parameters = await rows_of(tab, "Parameters")
        assert parameters[0] == ["20", "0.1", "<b>", "1", "+1.5", "", "+1.5", "+1.5"]
        rows[0]["metric"] = inf
        file.write_text(sweep_page("swept", value))
        await tab.command("Page.reload")
        await tab.until("document.title === 'Sweep: swept' && document.querySelectorAll('section').length === 2")
        assert (await rows_of(tab, "window and risk"))[1:] == [["9", "-0.5", ""], ["20", "∞", "+0.5"]]
        assert await tab.evaluate(shades) == [0, 45, 45]


@pytest.mark.parametrize("more", [("--walk-forward", "3h/2h"), ("--seeds", "2"), ()])
def test_a_list_of_values_in_one_parameter_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", START, 600, price=90_000, seed=1)
    (tmp_path / "flip.py").write_text(FLIPPER)
    options = (
        "--strategy",
        f"{tmp_path / 'flip.py'}:Flipper",
        "--param",
        "hours=2,4",
        "--out",
        str(tmp_path / "sweep"),
    )
    assert main(["backtest", "--data", str(tmp_path), *options, *more]) == 2
    said = capsys.readouterr().err
    assert "the parameter hours of Flipper is '2,4'" in said
    assert "a run has one value of each; a sweep of the command has several: each in a --param of its own, or " in said
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("spans", "is_enough"), [("8h/2h", True), ("9h/2h", False)])
def test_a_fold_may_be_as_long_as_the_time_that_is_traded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spans: str, *, is_enough: bool
) -> None:
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", START, 4 * 1_440, price=90_000, seed=1)
    (tmp_path / "sweep").mkdir()  # which refuses the sweep only after its folds
    options = ("--data", str(tmp_path), "--out", str(tmp_path / "sweep"), "--to", "2025-03-02T09:59:59Z")
    assert main(["backtest", *options, "--walk-forward", spans]) == (1 if is_enough else 2)
    words = "exists and holds no sweep" if is_enough else (
        "from --from, 2025-03-02T00:00:00.000Z, to --to, 2025-03-02T10:00:00.000Z, there are 10.0"
    )  # fmt: skip
    assert words in capsys.readouterr().err


def test_a_ratio_is_refused_for_runs_of_less_than_a_day_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", START, 600, price=90_000, seed=1)
    options = ("--data", str(tmp_path), "--out", str(tmp_path / "sweep"), "--by", "sharpe")
    assert main(["backtest", *options, "--seeds", "2"]) == 2
    assert "--by sharpe needs runs of at least 24 hours; these have 10.0" in capsys.readouterr().err
    assert main(["backtest", *options]) == 2
    assert "--by: only for a sweep" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.processes
def test_a_sweep_from_python_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_walk(tmp_path / "data" / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    (tmp_path / "flip.py").write_text(FLIPPER)
    called = run_sweep(
        "flip.py:Flipper", "data", {"hours": (2, 4)}, out="called", seeds=2, workers=1,
        cadence="15m", start="2025-03-01T23:00:00Z",
    )  # fmt: skip
    options = ("--param", "hours=2..4:2", "--seeds", "2", "--cadence", "15m", "--from", "2025-03-01T23:00:00Z")
    command = ("backtest", "--data", "data", "--strategy", "flip.py:Flipper", *options, "--out", "commanded", "--json")
    assert main([*command]) == 0
    commanded = orjson.loads(capsys.readouterr().out)
    assert [called[name] for name in ("runs", "parameters", "best")] == [
        commanded[name] for name in ("runs", "parameters", "best")
    ]
    first, second = compare_folders(sorted(Path("called/runs").glob("run,*")))
    assert (first["runs"], second["runs"], second["verdict"] != "") == (2, 2, True)
    assert not list(Path("called/runs").glob("run,*/equity.*")), "only the best run has tables"
    assert len(list(Path("called/runs").glob("best,*/equity.csv"))) == 1
    with pytest.raises(TypeError, match="leverage"):
        run_sweep("flip.py:Flipper", "data", {}, out="other", leverage=3)
    with pytest.raises(SettingsError, match="by is 'profit'"):
        run_sweep("flip.py:Flipper", "data", {}, out="other", by="profit")
    for params, wrong, words in (
        ({}, {"seeds": 0}, "seeds is 0; it must be a whole number from 1"),
        ({}, {"workers": "all"}, "workers is 'all'; it must be a whole number from 1"),
        ({"hours": 2}, {"walk_forward": 7}, "--walk-forward is 7; it must be CHOOSE/TRY"),
        ({"hours": []}, {}, "params has no value of hours"),
        ("hours=2", {}, "params is 'hours=2'; it must be a mapping"),
    ):
        with pytest.raises(SettingsError, match=words):
            run_sweep("flip.py:Flipper", "data", cast("Any", params), out="other", **cast("Any", wrong))
    again = run_sweep("flip.py:Flipper", "data", {"hours": [2, 2]}, out="again", start="2025-03-02T04:00:00Z")
    assert (len(again["runs"]), again["failed"]) == (1, []), "the same value twice is one run, in one folder"


@pytest.mark.processes
def test_a_sweep_resumes_where_it_stopped_and_names_failed_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_walk(tmp_path / "data" / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    (tmp_path / "flip.py").write_text(FLIPPER)

    def sweep(*more: str) -> tuple[int, dict[str, Any]]:
        options = ("--data", "data", "--strategy", "flip.py:Flipper", "--cadence", "15m", "--out", "sweep", *more)
        code = main(["backtest", *options, "--from", "2025-03-01T23:00:00Z", "--json"])
        captured = capsys.readouterr()
        return code, orjson.loads(captured.out)

    code, value = sweep("--param", "hours=2..5:1", "--seeds", "2")
    assert code == 1
    assert {row["params"]["hours"]: row["runs"] for row in value["parameters"]} == {"2": 2, "4": 2}
    assert value["failed"] == [f"run,hours={hours},seed={seed}" for seed in (0, 1) for hours in (3, 5)]
    failures = {(run["params"]["hours"], run["failure"]) for run in value["runs"]} - {("2", None), ("4", None)}
    assert ("5", "its process ended with -9") in failures
    assert all("flip.py:12: decide raised ZeroDivisionError" in failure for hours, failure in failures if hours == "3")
    with (tmp_path / "sweep" / "sweep.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["hours"], row["seed"], row["failure"]) for row in rows] == [
        (run["params"]["hours"], str(run["seed"]), run["failure"] or "") for run in value["runs"]
    ]
    assert [row["return_percent"] for row in rows] == [str(run["returnPercent"] or "") for run in value["runs"]]
    # Only the best run has evidence and a report.
    runs_of = {report.parent.name for report in (tmp_path / "sweep" / "runs").glob("*/report.html")}
    assert runs_of == {value["best"]} == {f"best,hours={value['parameters'][0]['params']['hours']},seed=0"}
    trials = [orjson.loads(line) for line in (tmp_path / "trials.jsonl").read_bytes().splitlines()]
    assert {each["params"]["hours"] for each in trials} == {"2", "4"}, "a run that crashed does not count as a trial"
    assert value["trials"] == len({each["ledger"] for each in trials})
    # Complete runs are not repeated.
    kept = tmp_path / "sweep" / "runs" / "run,hours=4,seed=1" / "result.json"
    written = kept.stat().st_mtime_ns
    _, again = sweep("--param", "hours=2..5:1", "--seeds", "2", "--by", "trades")
    assert kept.stat().st_mtime_ns == written
    figures = {row["params"]["hours"]: row["meanReturnPercent"] for row in again["parameters"]}
    assert figures == {row["params"]["hours"]: row["meanReturnPercent"] for row in value["parameters"]}
    assert again["parameters"][0]["metric"] >= again["parameters"][1]["metric"] > 0
    code, other = sweep("--param", "hours=2..6:2")
    assert code == 1
    assert "holds no sweep with these options" in str(other)
    # The runs are compared, paired by their seeds.
    runs = [f"sweep/runs/run,hours={hours},seed={seed}" for hours in (2, 4) for seed in (0, 1)]
    assert main(["compare", *runs, "--json"]) == 0
    first, second = orjson.loads(capsys.readouterr().out)["rows"]
    means = {row["params"]["hours"]: row["meanReturnPercent"] for row in value["parameters"]}
    assert (first["runs"], second["runs"]) == (2, 2)
    assert second["difference"] == pytest.approx(means["4"] - means["2"], abs=0.1)
    assert second["bySeeds"][0] <= second["difference"] <= second["bySeeds"][1]
    assert main(["compare", *runs[:2]]) == 2
    assert "differ in more than the seed" in capsys.readouterr().err


@pytest.mark.processes
def test_a_cluster_that_loses_a_worker_walks_forward_to_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_walk(tmp_path / "data" / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    killed = tmp_path / "killed"
    killer = f"""
        import os, pathlib, signal
        if not pathlib.Path({str(killed)!r}).exists():
            pathlib.Path({str(killed)!r}).touch()
            os.kill(os.getppid(), signal.SIGKILL)
"""
    (tmp_path / "flip.py").write_text(FLIPPER.replace("view):\n", f"view):{killer}"))

    def sweep(out: str, *more: str) -> dict[str, Any]:
        options = ("--data", "data", "--strategy", "flip.py:Flipper", "--param", "hours=2..4:2", "--out", out)
        period = ("--from", "2025-03-01T23:00:00Z", "--cadence", "15m", "--walk-forward", "4h/2h")
        more = ("--trials", f"{out}.jsonl", *more)
        assert main(["backtest", *options, *period, *more, "--json"]) == 0
        value: dict[str, Any] = orjson.loads(capsys.readouterr().out)
        return value

    from distributed import LocalCluster  # noqa: PLC0415 - a third of a second, in every worker

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:  # type: ignore[no-untyped-call]
        distant = sweep("distant", "--cluster", cluster.scheduler_address)
    assert killed.exists()
    near = sweep("near")
    assert distant == near
    assert [run["role"] for run in near["runs"]] == ["fold1-choose", "fold1-choose", "fold1-try"]
    chosen = max(near["runs"][:2], key=lambda run: run["returnPercent"])
    assert near["runs"][2]["params"] == chosen["params"]
    assert near["runs"][2]["from"] > chosen["to"]
    for run in near["runs"]:
        here, there = (
            orjson.loads((tmp_path / out / "runs" / run["name"] / "result.json").read_bytes())
            for out in ("near", "distant")
        )
        assert {**here, "accounts": [], "options": {}} == {**there, "accounts": [], "options": {}}
        ledgers = [(tmp_path / out / "runs" / run["name"] / "ledger.jsonl").read_bytes() for out in ("near", "distant")]
        assert ledgers[0] == ledgers[1]


def test_an_unreachable_cluster_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "CONNECT_TIMEOUT_S", 0.5)
    write_walk(tmp_path / "BTCUSDT-1m-2025-03.csv", START, 1_800, price=90_000, seed=1)
    options = ("--data", str(tmp_path), "--seeds", "2", "--out", str(tmp_path / "sweep"), "--cluster")
    assert main(["backtest", *options, "tcp://127.0.0.1:1"]) == 1
    assert "--cluster tcp://127.0.0.1:1: no scheduler with a worker answers there" in capsys.readouterr().err
    assert main(["backtest", *options, "nonsense://there"]) == 1
    assert not (tmp_path / "sweep").exists()
