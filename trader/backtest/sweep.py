"""Sweeps: backtests over parameters, seeds and periods, in parallel processes.

Every run is a complete backtest in a separate folder, so an interrupted sweep resumes with the missing runs, and a run
that fails or whose process dies does not affect the others.
"""

import argparse
import asyncio
import hashlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.strategy_files import load_strategy
from trader.backtest.cluster import Cluster, Inputs, connected
from trader.backtest.domain.deflation import expected_best
from trader.backtest.options import environ_of, open_source, params_of
from trader.backtest.trials import data_digest, read_trials, trials_file
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, StartError
from trader.market.sources.files import find_files, find_funding_files

PLAN, SWEEP, RUNS = "plan.json", "sweep.json", "runs"
RUNS_MAX: Final = 10_000

_RANGE: Final = re.compile(r"(-?[0-9.]+?)\.\.(-?[0-9.]+)(?::([0-9.]+))?")
_SPAN: Final = re.compile(r"([1-9][0-9]{0,3})([hd])/([1-9][0-9]{0,3})([hd])")
HOUR: Final = timedelta(hours=1)
PURGED: Final = HOUR
"""The gap between the period on which parameters are chosen and the period on which they are tried."""

_PASSED_ON: Final = (
    "data", "strategy", "variant", "market", "capital", "taker_fee", "maker_fee", "latency", "funding", "preset",
    "cadence", "guard", "tables", "markets_file",
)  # fmt: skip
"""The options of a sweep that are passed to every run."""


ShowRuns = Callable[[int, int], None]
"""Shows the number of finished runs and the total."""


class SweepPeriod(NamedTuple):
    """A part of the recording, from its first to its last second; None: the defaults of `--from` and `--to`."""

    start: str | None
    end: str | None


class SweepRun(NamedTuple):
    """One backtest of a sweep."""

    params: Mapping[str, str]
    seed: int
    period: SweepPeriod
    role: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        parts = [self.role, *(f"{name}={value}" for name, value in self.params.items()), f"seed={self.seed}"]
        whole = ",".join(parts)
        plain = re.sub(r"[^A-Za-z0-9=,._-]", "_", whole)[:150]
        return plain if plain == whole else f"{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


class Done(NamedTuple):
    """A finished run: the return of its first account in percent, or why it failed."""

    run: SweepRun
    return_percent: float | None
    failure: str | None = None


def is_sweep(options: argparse.Namespace) -> bool:
    """Return whether the options describe more than one run."""
    names = [text.partition("=")[0] for text in options.param or ()]
    has_range = any(_RANGE.fullmatch(text.partition("=")[2]) for text in options.param or ())
    return has_range or len(set(names)) < len(names) or options.seeds is not None or options.walk_forward is not None


def grid_of(texts: Sequence[str] | None) -> list[dict[str, str]]:
    """Return every combination of the parameters; each may be a range such as `10..50:10`, or be given several times.

    :raises SettingsError: a text has no name, or the step of a range does not lead to its end
    """
    values: dict[str, list[str]] = {}
    for text in texts or ():
        for name, value in params_of([text]).items():
            values.setdefault(name, []).extend(_range(text, value))
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _range(text: str, value: str) -> list[str]:
    parts = _RANGE.fullmatch(value)
    if parts is None:
        return [value]
    try:
        first, last, step = map(Decimal, parts.groups(default="1"))
        count = int((last - first) / step)
    except ArithmeticError:
        count = -1
    if not 0 <= count < RUNS_MAX:
        raise SettingsError([f"--param is {text!r}; a range must be FIRST..LAST:STEP, such as window=10..50:10"])
    return [str(first + number * step) for number in range(count + 1)]


def folds_of(text: str, start: datetime, end: datetime) -> list[tuple[SweepPeriod, SweepPeriod]]:
    """Return the periods of a walk-forward: each period on which parameters are chosen, with the one that follows it.

    :raises SettingsError: the text is not like 7d/1d, or the data are shorter than one fold
    """
    spans = _SPAN.fullmatch(text)
    if spans is None:
        raise SettingsError([f"--walk-forward is {text!r}; it must be CHOOSE/TRY in hours or days, such as 7d/1d"])
    unit = {"h": timedelta(hours=1), "d": timedelta(days=1)}
    choose, attempt = int(spans[1]) * unit[spans[2]], int(spans[3]) * unit[spans[4]]
    folds = []
    while start + choose + attempt <= end:
        tried = start + choose
        folds.append((SweepPeriod(iso(start), iso(tried - PURGED)), SweepPeriod(iso(tried), iso(tried + attempt))))
        start += attempt
    if not folds or choose <= PURGED:
        raise SettingsError(
            [f"--walk-forward {text}: one fold needs {(choose + attempt) / HOUR:g} hours, of which the first part is "
             f"above {PURGED / HOUR:g}; the data have {iso(start)} to {iso(end)}, which is {(end - start) / HOUR:.1f}"]
        )  # fmt: skip
    return folds


async def sweep(options: argparse.Namespace, show: ShowRuns) -> dict[str, Any]:
    """Run a sweep, or the rest of it, and return its result. Raises `SettingsError` and `StartError`."""
    grid, seeds = grid_of(options.param), _seeds(options)
    _check_params(options.strategy, grid)
    _, source = await open_source(options, environ_of(options))
    span = moment_of(source.span.start), moment_of(source.span.stop - 1)
    folds = folds_of(options.walk_forward, *span) if options.walk_forward else []
    count = len(grid) * len(seeds) * max(1, len(folds)) + len(folds) * len(seeds)
    if count > RUNS_MAX:
        raise SettingsError([f"these are {count} runs; a sweep has at most {RUNS_MAX}"])
    async with AsyncExitStack() as stack:
        cluster = None
        if options.cluster is not None:
            inputs = _inputs(options, list(source.markets))
            cluster = await stack.enter_async_context(connected(options.cluster, inputs, trials_file(options)))
        _begin(options)
        board = _Board(options, count if folds else len(grid) * len(seeds), cluster, show)
        done = await _carry_out(board, options, grid, seeds, folds)
    digest = data_digest(options.data, list(source.markets))
    known = read_trials(trials_file(options), digest) if trials_file(options).exists() else []
    ratios = [trial.sharpe_per_hour for trial in known if trial.sharpe_per_hour is not None]
    value = _value(done, len(known), expected_best(ratios, len(known)), max(ratios, default=None))
    (options.out / SWEEP).write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    return value


def _check_params(reference: str | None, grid: Sequence[Mapping[str, str]]) -> None:
    """Make the strategy with every combination of parameters, so that none fails only when its runs begin.

    :raises SettingsError: a strategy cannot be made
    """
    if reference is None:
        return
    for params in grid:
        try:
            load_strategy(reference, params)
        except SettingsError as error:
            lists = [f"{name}={value}" for name, value in params.items() if "," in value]
            hints = [f"--param {each}: give each value in a --param of its own, or a range" for each in lists]
            raise SettingsError([*error.problems, *hints]) from None


async def _carry_out(
    board: "_Board",
    options: argparse.Namespace,
    grid: Sequence[Mapping[str, str]],
    seeds: Sequence[int],
    folds: Sequence[tuple[SweepPeriod, SweepPeriod]],
) -> list[Done]:
    """Execute the runs of a grid or, for each fold, its grid and then the best parameters on the following period."""
    if not folds:
        period = SweepPeriod(options.start, options.end)
        return await board.carry_out([SweepRun(params, seed, period, "run") for params in grid for seed in seeds])
    done: list[Done] = []
    for number, (choose, attempt) in enumerate(folds, 1):
        chosen_on = await board.carry_out(
            [SweepRun(params, seed, choose, f"fold{number}-choose") for params in grid for seed in seeds]
        )
        done += chosen_on
        for params, _ in _ranked(chosen_on)[:1]:
            done += await board.carry_out([SweepRun(params, seed, attempt, f"fold{number}-try") for seed in seeds])
    return done


def _inputs(options: argparse.Namespace, markets: Sequence[str]) -> list[Inputs]:
    """Return the inputs of a sweep's runs: candles, funding rates, figures of markets, and the strategy."""
    candles, data = find_files(options.data), options.data
    inputs = [Inputs.of(data, [file for symbol in markets for file in candles[symbol]])]
    funding = data if options.funding is None else Path(options.funding)
    rates = [file for symbol, files in find_funding_files(funding).items() if symbol in markets for file in files]
    if rates:
        inputs.append(Inputs.of(funding, rates))
    files = [options.markets_file] if options.markets_file is not None else []
    files += [Path(options.strategy.rpartition(":")[0])] if options.strategy is not None else []
    return inputs + [Inputs.of(file, [file]) for file in files]


def _seeds(options: argparse.Namespace) -> list[int]:
    first = int(options.seed or 0)
    return list(range(first, first + (options.seeds or 1)))


def _begin(options: argparse.Namespace) -> None:
    """Write the plan of a new sweep, or check that the folder has the same plan.

    :raises StartError: the folder exists and does not hold this sweep
    """
    names = (*_PASSED_ON, "param", "seed", "seeds", "start", "end", "walk_forward")
    plan = {name: value for name in names if (value := getattr(options, name)) is not None}
    content = msgspec.json.format(msgspec.json.encode(plan, enc_hook=str, order="sorted"))
    file = options.out / PLAN
    if not options.out.exists():
        options.out.mkdir(parents=True)
        file.write_bytes(content)
    elif not file.exists() or file.read_bytes() != content:
        raise StartError(f"{options.out} exists and holds no sweep with these options; give --out a new folder.")


class _Board:
    """Executes the runs of a sweep: as many at once as there are cores, or all of them on a cluster."""

    def __init__(self, options: argparse.Namespace, count: int, cluster: Cluster | None, show: ShowRuns) -> None:
        self._options = options
        self._cluster = cluster
        self._slots = asyncio.Semaphore(options.workers or os.cpu_count() or 1)
        self._count = count
        self._show = show
        self._done = 0
        show(0, count)

    async def carry_out(self, runs: Sequence[SweepRun]) -> list[Done]:
        """Execute the runs that are not complete yet, and return all of them in this order."""
        return await asyncio.gather(*(self._carry_out(run) for run in runs))

    async def _carry_out(self, run: SweepRun) -> Done:
        folder = (self._options.out / RUNS / run.name).absolute()
        done = _read(run, folder)
        if done is None:
            shutil.rmtree(folder, ignore_errors=True)
            arguments = list(_arguments(self._options, run, folder))
            ended: tuple[bytes, int | None]
            if self._cluster is not None:
                ended = await self._cluster.run(arguments, folder)
            else:
                ended = await self._start(arguments)
            done = _read(run, folder) or Done(run, None, _reason(folder, *ended))
        self._done += 1
        self._show(self._done, self._count)
        return done

    async def _start(self, arguments: Sequence[str]) -> tuple[bytes, int | None]:
        """Run `trader` with these arguments once a core is free.

        Return its output on standard error, and its exit code.
        """
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trader", *arguments,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                _, said = await process.communicate()
            except asyncio.CancelledError:
                process.terminate()
                await process.wait()
                raise
        return said, process.returncode


def _arguments(options: argparse.Namespace, run: SweepRun, folder: Path) -> Iterator[str]:
    """Yield the arguments of a run, with absolute paths."""
    yield "backtest"
    for name in _PASSED_ON:
        value = getattr(options, name)
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            is_path = name in {"data", "strategy"} or (name == "funding" and Path(each).is_dir())
            yield from (f"--{name.replace('_', '-')}", str(Path(each).absolute()) if is_path else str(each))
    for name, value in run.params.items():
        yield from ("--param", f"{name}={value}")
    for flag, text in (("--from", run.period.start), ("--to", run.period.end)):
        yield from () if text is None else (flag, text)
    yield from ("--seed", str(run.seed), "--out", str(folder), "--trials", str(trials_file(options)), "--no-database")


def _read(run: SweepRun, folder: Path) -> Done | None:
    """Return a finished run; None: it has yet to be executed."""
    try:
        value = msgspec.json.decode((folder / "result.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    if value["complete"] is not True:
        return None
    own = [account for account in value["accounts"] if account["provider"] == "strategy"] or value["accounts"]
    return Done(run, mean(account["returnPercent"] for account in own))


def _reason(folder: Path, said: bytes, code: int | None) -> str:
    """Return why a run failed: from its result, else from the end of its output, else from its exit code."""
    try:
        ended = msgspec.json.decode((folder / "result.json").read_bytes())["ended"]
    except (OSError, msgspec.MsgspecError):
        ended = None
    lines = said.decode(errors="replace").strip().splitlines()
    return ended or (lines[-1].strip() if lines else f"its process ended with {code}")


def _ranked(done: Sequence[Done]) -> list[tuple[Mapping[str, str], list[float]]]:
    """Return the parameters with their returns over the seeds, the best mean first, without failed runs."""
    returns: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for each in done:
        if each.return_percent is not None:
            returns.setdefault(tuple(each.run.params.items()), []).append(each.return_percent)
    return sorted(((dict(params), values) for params, values in returns.items()), key=lambda pair: -mean(pair[1]))


def _value(done: Sequence[Done], trials: int, best_by_luck: float, best: float | None) -> dict[str, Any]:
    tried = [each for each in done if each.run.role.endswith("-try")]
    ranked = _ranked(tried or done)
    return {
        "runs": [
            {"name": each.run.name, "params": each.run.params, "seed": each.run.seed, "role": each.run.role,
             "from": each.run.period.start, "to": each.run.period.end, "returnPercent": each.return_percent,
             "failure": each.failure}
            for each in done
        ],
        "parameters": [
            {"params": params, "runs": len(values), "meanReturnPercent": mean(values),
             "deviation": stdev(values) if len(values) > 1 else None, "worst": min(values), "best": max(values)}
            for params, values in ranked
        ],
        "failed": [each.run.name for each in done if each.failure is not None],
        "trials": trials,
        "bestSharpePerHour": best,
        "expectedBestSharpePerHour": best_by_luck,
    }  # fmt: skip
