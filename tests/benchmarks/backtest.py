"""Speed of backtests, compared with backtesting.py on the same candles, and its growth with the data.

    scripts/benchmark backtest [folder of kline files] [--nautilus PYTHON] [--vectorbt PYTHON]

The sweep has 20 seeds on two cores and is compared with a single run, both in elapsed time.

The scripted account enters at the crossings of two precomputed averages, with a stop and a target and without
baselines; the reference does the same, once with precomputed averages and once with averages computed every minute. The
reference has no margin calls, funding, depth, latency or guard. nautilus_trader and vectorbt, which need other library
versions than trader, trade the same entries in the interpreters that are given. All times are processor time, which
other processes disturb least, except for the command with its database, which is measured in elapsed time.
"""

import argparse
import asyncio
import gc
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from backtesting import Backtest as Reference
from backtesting import Strategy as ReferenceStrategy
from benchmarks.figures import Figures
from support.candles import FOLDER
from support.process import COMMAND

from trader.agents.domain.models import Model, rule_model
from trader.agents.domain.strategy import Peek, Strategy
from trader.agents.domain.tools import CreatePosition, Decision
from trader.agents.domain.view import View
from trader.backtest.execution import BacktestListener, Interrupts, execute
from trader.backtest.market import BacktestMarket
from trader.backtest.output import LedgerLines
from trader.backtest.run import Backtest, rule_models
from trader.backtest.sources import RecordingStrategySource
from trader.backtest.spec import BacktestSpec, Participants, conditions_of
from trader.core.clock import iso, moment_of
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import Side
from trader.market.sources.files import Minutes, find_files, read_market
from trader.market.sources.replay import ReplaySource
from trader.settings.settings import Settings

MARKETS = ("BTC", "ETH", "SOL")
ELSEWHERE = {"nautilus": "nautilus_trader", "vectorbt": "vectorbt"}
"""References in interpreters of their own, by option."""

FAST, SLOW = 20, 100
STOP, TARGET = 0.004, 0.008
QUANTITY = 0.05

CANDLES_PER_S_MIN = 55_000
SEASON_S_MAX = 30.0
DURABLE_S_MAX = 60.0
GROWTH_MAX = 2.1
SWEEP_RUNS, SWEEP_WORKERS, SWEEP_MAX = 20, 2, 11.0
DAY_RUNS, DAY_RUNS_S_MAX = 200, 40.0
MONTH_S_MAX = 3.0
MEGABYTES_MAX = 500


def crossings(minutes: Minutes) -> dict[int, int]:
    """Return the minutes that begin after the fast average has crossed the slow one: +1 upward, -1 downward."""
    closes = pd.Series(np.array(minutes.close))
    above = np.sign(closes.rolling(FAST).mean() - closes.rolling(SLOW).mean()).to_numpy()
    turns = np.flatnonzero((above[1:] != above[:-1]) & ~np.isnan(above[:-1])) + 1
    return {minutes.minute[int(turn)] + 1: int(above[turn]) for turn in turns if above[turn]}


class Scripted(RecordingStrategySource):
    """Enters at the crossings if no position is open."""

    def __init__(self, model: Model, entries: dict[int, int]) -> None:
        super().__init__(model, Strategy())
        self._entries = {minute * 60: side for minute, side in entries.items()}
        self._seconds = sorted(self._entries)

    def next_after(self, second: int) -> int | None:
        place = bisect_right(self._seconds, second)
        return self._seconds[place] if place < len(self._seconds) else None

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        if peek.account.positions:
            return []
        side, price = self._entries[int(peek.now.timestamp())], float(peek.mark("BTC"))
        return [
            CreatePosition(
                symbol="BTC",
                side=Side.LONG if side > 0 else Side.SHORT,
                quantity=QUANTITY,
                leverage=1,
                stop=round(price * (1 - side * STOP), 1),
                target=round(price * (1 + side * TARGET), 1),
                invalidation="the averages cross back",
                confidence=50,
            )
        ]


def timed(work: Callable[[], object]) -> float:
    """Return the processor time of a call in seconds."""
    gc.collect()
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def reference_trades(minutes: Minutes, entries: dict[int, int], *, ahead: bool) -> tuple[float, int]:
    """Return the processor time of the reference and its number of trades."""
    columns = {
        name.capitalize(): np.array(getattr(minutes, name)) for name in ("open", "high", "low", "close", "volume")
    }
    candles = pd.DataFrame(columns, index=pd.to_datetime(np.array(minutes.minute) * 60, unit="s"))
    sides = [entries.get(minute + 1, 0) for minute in minutes.minute]

    class Crossing(ReferenceStrategy):  # type: ignore[misc]
        def init(self) -> None:
            self.place = 0

        def next(self) -> None:
            if ahead:
                side = sides[len(self.data) - 1]
            else:
                closes = self.data.Close
                now = np.sign(closes[-FAST:].mean() - closes[-SLOW:].mean())
                before = np.sign(closes[-FAST - 1 : -1].mean() - closes[-SLOW - 1 : -1].mean())
                side = int(now) if now != before and len(closes) > SLOW else 0
            if not side or self.position:
                return
            price = self.data.Close[-1]
            order = self.buy if side > 0 else self.sell
            order(size=1, sl=price * (1 - side * STOP), tp=price * (1 + side * TARGET))

    test = Reference(candles, Crossing, cash=10_000_000, commission=0.0005)
    trades = 0

    def run() -> None:
        nonlocal trades
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trades = len(test.run()["_trades"])

    return timed(run), trades


def trades_elsewhere(program: str, python: Path, minutes: Minutes, entries: dict[int, int]) -> tuple[float, int]:
    """Return the processor time of a reference that runs in an interpreter of its own, and its number of trades."""
    columns = {name: list(getattr(minutes, name)) for name in ("open", "high", "low", "close", "volume")}
    given = {
        "minutes": list(minutes.minute), **columns, "entries": entries,
        "stop": STOP, "target": TARGET, "quantity": QUANTITY,
    }  # fmt: skip
    command = [python, Path(__file__).with_name(program)]
    done = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    return result["seconds"], result["trades"]


def opened(
    folder: Path, markets: Sequence[str], start: datetime | None = None, end: datetime | None = None
) -> BacktestMarket:
    source = ReplaySource(folder, markets, start=start, end=end)
    asyncio.run(source.open())
    return asyncio.run(BacktestMarket.open(source, ("15m", "1h")))


def finish(run: Backtest) -> None:
    for _ in run.run():
        pass


def scripted(market: BacktestMarket, entries: dict[int, int]) -> tuple[float, int]:
    """Return the processor time of the scripted account, and its number of trades."""
    model = rule_model(VariantId.APEX, moment_of(market.span.start))
    run = Backtest.fresh(
        market, settings(), [(model, Scripted(model, entries))], [LedgerLines(io.BytesIO())], has_baselines=False
    )
    return timed(lambda: finish(run)), run.accounts[0].state.trade_count


def season(folder: Path, start: datetime | None = None, end: datetime | None = None) -> tuple[float, float, Backtest]:
    """Let the four agents trade. Return the processor time of the preparation and of the run."""
    result: list[BacktestMarket] = []
    prepared_s = timed(lambda: result.append(opened(folder, MARKETS, start, end)))
    models = rule_models(list(VariantId), None, moment_of(result[0].span.start), {})
    run = Backtest.fresh(result[0], settings(), models, [LedgerLines(io.BytesIO())])
    return prepared_s, timed(lambda: finish(run)), run


def shortest_s(folder: Path, start: datetime | None = None, end: datetime | None = None) -> float:
    """Return the processor time of the faster of two runs, since other guests of the host slow some of them."""
    return min(season(folder, start, end)[1] for _ in range(2))


def durable(folder: Path) -> float:
    """Return the elapsed time of the command with its database."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # as root, the server runs as `nobody`, which must have access
        began_s = time.monotonic()
        command = [*COMMAND, "backtest", "--data", str(folder.resolve()), "--out", f"{place}/run"]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began_s


STRATEGY = f"{Path(__file__).parents[2]}/docs/examples/sma_cross.py:SmaCross"


def month(folder: Path) -> float:
    """Return the processor time of a run of a sweep over all candles of BTC, which decides every 15 minutes."""
    with tempfile.TemporaryDirectory() as place:
        spec = BacktestSpec(
            conditions=conditions_of(folder.resolve(), {"market": ["BTC"], "seed": 1}),
            entrants=Participants(strategy=STRATEGY, every="15m"),
            out=Path(place) / "run",
            trials=Path(place) / "trials.jsonl",
            has_database=False,
            has_evidence=False,
        )
        return timed(lambda: asyncio.run(execute(spec, BacktestListener(), Interrupts())))


def sweep_of_days(folder: Path) -> float:
    """Return the elapsed time of a sweep of runs over the last day of BTC, which decide every 15 minutes."""
    minutes = read_market(find_files(folder)["BTC"])
    start = moment_of(minutes.minute[-1] * 60) - timedelta(days=1)
    command = [*COMMAND, "backtest", "--data", str(folder.resolve()), "--strategy", STRATEGY, "--no-database"]
    command += ["--market", "BTC", "--cadence", "15m", "--from", iso(start), "--param", "window=20..39:1"]
    command += ["--seeds", str(DAY_RUNS // 20), "--workers", str(SWEEP_WORKERS), "--out", "sweep"]
    with tempfile.TemporaryDirectory() as place:
        began_s = time.monotonic()
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began_s


def sweep_over_run(folder: Path) -> float:
    """Return the duration of a sweep relative to the mean of one run before and one after it."""
    command = [*COMMAND, "backtest", "--data", str(folder.resolve()), "--strategy", STRATEGY, "--no-database"]
    with tempfile.TemporaryDirectory() as place:

        def took_s(*more: str) -> float:
            began_s = time.monotonic()
            subprocess.run([*command, *more], cwd=place, check=True, stdout=subprocess.DEVNULL)
            return time.monotonic() - began_s

        before_s = took_s("--out", "before")
        sweep_s = took_s("--out", "sweep", "--seeds", str(SWEEP_RUNS), "--workers", str(SWEEP_WORKERS))
        return sweep_s / ((before_s + took_s("--out", "after")) / 2)


def settings() -> Settings:
    return Settings.load({}, None, demo=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    for name, package in ELSEWHERE.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PYTHON", help=f"an interpreter that has {package}")
    options = parser.parse_args()
    folder = options.folder
    figures = Figures()
    market = opened(folder, ["BTC"])
    minutes = read_market(find_files(folder)["BTC"])
    entries = crossings(minutes)
    ahead_s, ahead_trades = reference_trades(minutes, entries, ahead=True)
    each_s, _ = reference_trades(minutes, entries, ahead=False)
    ours_s, trades = scripted(market, entries)
    count = len(minutes)
    print(f"{count} minutes of BTC: {trades} trades, {ahead_trades} of the reference")
    figures.show("backtesting.py, averages of every minute", count / each_s, "/s")
    for name, package in ELSEWHERE.items():
        python = getattr(options, name)
        if python is None:
            print(f"{package} is left out: --{name} names the interpreter of an environment that has it")
        else:
            reference_s, reference_count = trades_elsewhere(f"{name}_reference.py", python, minutes, entries)
            figures.show(f"{package}, averages ahead, {reference_count} trades", count / reference_s, "/s")
    figures.show(
        "scripted account, candles",
        (market.span.stop - market.span.start) / 60 / ours_s,
        "/s",
        reference=("backtesting.py, averages ahead", count / ahead_s),
        at_least=CANDLES_PER_S_MIN,
    )
    prepared_s, whole_s, run = season(folder)
    span = run.ends_at - run.starts_at
    decisions = sum(account.decisions for account in run.accounts)
    print(f"four agents, three markets, {span / timedelta(minutes=1):,.0f} minutes, {decisions:,} decisions")
    figures.show("reading and preparing", prepared_s, "s")
    figures.show("four agents, without durable writes", whole_s, "s", at_most=SEASON_S_MAX)
    figures.show("the command, with durable writes and the report", durable(folder), "s", at_most=DURABLE_S_MAX)
    figures.show("one market, every 15 minutes, without a report", month(folder), "s", at_most=MONTH_S_MAX)
    figures.show(f"a sweep of {DAY_RUNS} runs of a day", sweep_of_days(folder), "s", at_most=DAY_RUNS_S_MAX)
    figures.show(f"a sweep of {SWEEP_RUNS} runs over one run", sweep_over_run(folder), "", at_most=SWEEP_MAX)
    middle = run.starts_at + span / 2
    halves_s = shortest_s(folder, end=middle) + shortest_s(folder, start=middle)  # they are not equally busy
    growth = 2 * min(whole_s, season(folder)[1]) / halves_s
    figures.show("the whole period over the mean of its halves", growth, "", at_most=GROWTH_MAX)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures.show("peak memory, the reference included", peak, "MB", at_most=MEGABYTES_MAX)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
