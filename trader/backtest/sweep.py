"""Sweeps: backtests over parameters, seeds and periods, in parallel processes.

Every run is a backtest in a separate folder, so an interrupted sweep resumes with the missing runs, and a run that
fails or whose process dies does not affect the others. Evidence, a report and tables take longer than a run of a day,
so only the best run has them, in a run of its own.
"""

import asyncio
import inspect
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.strategy_files import load_strategy
from trader.backtest.execution import Interrupts
from trader.backtest.function import as_file, completed, run_backtest, spec_of
from trader.backtest.spec import RESULT, BacktestSpec, data_files, environ_of, open_source, params_of
from trader.backtest.sweep_result import (
    METRICS,
    Done,
    SweepPeriod,
    SweepRun,
    ranked,
    read_run,
    sweep_page,
    sweep_value,
    write_csv,
)
from trader.backtest.trials import KnownTrials, data_digests, hours_within, read_trials
from trader.backtest.workers import Cluster, Inputs, Workers, client_of
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, StartError
from trader.core.files import decode_json, read_regular, replace_file
from trader.market.sources.files import find_funding_files
from trader.portfolio.tables import check_format

PLAN, SWEEP, TABLE, PAGE, RUNS = "plan.json", "sweep.json", "sweep.csv", "sweep.html", "runs"
RUNS_MAX: Final = 10_000
BEST: Final = "best"
"""The role of the run with evidence and a report."""

_RANGE: Final = re.compile(r"(-?[0-9.]+?)\.\.(-?[0-9.]+)(?::([0-9.]+))?")
_SPAN: Final = re.compile(r"([1-9][0-9]{0,3})([hd])/([1-9][0-9]{0,3})([hd])")
HOUR: Final = timedelta(hours=1)
PURGED: Final = HOUR
"""The gap between the period on which parameters are chosen and the period on which they are tried."""

ShowRuns = Callable[[int, int], None]
"""Shows the number of finished runs and the total."""


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep: one backtest of `base` for each combination in `grid` and each of `seeds` consecutive seeds.

    `walk_forward` is CHOOSE/TRY, such as 7d/1d, and `by` the metric that chooses. With `reports` every run has
    evidence, a report and tables. Its runs execute in `workers` processes (None: one per core), or on the workers of
    the Dask scheduler at `cluster`.
    """

    base: BacktestSpec
    grid: tuple[Mapping[str, str], ...]
    seeds: int = 1
    walk_forward: str | None = None
    by: str = "return"
    reports: bool = False
    workers: int | None = None
    cluster: str | None = None

    def run(self, run: SweepRun) -> BacktestSpec:
        """Return the spec of a run, with absolute paths."""
        conditions = replace(self.base.conditions.placed(), seed=run.seed, start=run.period.start, end=run.period.end)
        entrants = replace(self.base.entrants.placed(), params=run.params)
        folder, is_whole = (self.base.out / RUNS / run.name).absolute(), self.reports or run.role == BEST
        return replace(
            self.base,
            conditions=conditions,
            entrants=entrants,
            out=folder,
            has_database=False,
            tables=self.base.tables if is_whole else None,
            has_evidence=is_whole,
        )


def is_grid(texts: Sequence[str] | None) -> bool:
    """Return whether texts of parameters describe more than one combination."""
    names = [text.partition("=")[0] for text in texts or ()]
    return len(set(names)) < len(names) or any(_RANGE.fullmatch(text.partition("=")[2]) for text in texts or ())


def grid_of(texts: Sequence[str] | None) -> list[dict[str, str]]:
    """Return every combination of the parameters; each may be a range such as `10..50:10`, or be given several times.

    A value given twice counts once.

    :raises SettingsError: a text has no name, or the step of a range does not lead to its end
    """
    values: dict[str, list[str]] = {}
    for text in texts or ():
        for name, value in params_of([text]).items():
            values.setdefault(name, []).extend(_range(text, value))
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*map(dict.fromkeys, values.values()))]


def _range(text: str, value: str) -> list[str]:
    parts = _RANGE.fullmatch(value)
    if parts is None:
        return [value]
    try:
        first, last, step = map(Decimal, parts.groups(default="1"))
        count = int((last - first) / step) if first <= last else -1
    except ArithmeticError:
        count = -1
    if not 0 <= count < RUNS_MAX:
        raise SettingsError([f"--param is {text!r}; a range must be FIRST..LAST:STEP, such as window=10..50:10"])
    return [str(first + number * step) for number in range(count + 1)]


def folds_of(text: str, start: datetime, end: datetime) -> list[tuple[SweepPeriod, SweepPeriod]]:
    """Return the periods of a walk-forward: each period on which parameters are chosen, with the one that follows it.

    The data are traded from `start` to `end`, which is exclusive.

    :raises SettingsError: the text is not like 7d/1d, or the time is shorter than one fold
    """
    spans = _SPAN.fullmatch(str(text))
    if spans is None:
        raise SettingsError([f"--walk-forward is {text!r}; it must be CHOOSE/TRY in hours or days, such as 7d/1d"])
    unit = {"h": timedelta(hours=1), "d": timedelta(days=1)}
    choose, attempt = int(spans[1]) * unit[spans[2]], int(spans[3]) * unit[spans[4]]
    if choose <= PURGED or start + choose + attempt > end:
        raise SettingsError(
            [f"--walk-forward {text}: one fold needs {(choose + attempt) / HOUR:g} hours, of which the first part is "
             f"above {PURGED / HOUR:g}; from --from, {iso(start)}, to --to, {iso(end)}, there are "
             f"{(end - start) / HOUR:.1f}"]
        )  # fmt: skip
    folds = []
    while start + choose + attempt <= end:
        tried = start + choose
        folds.append((SweepPeriod(start, tried - PURGED), SweepPeriod(tried, tried + attempt)))
        start += attempt
    return folds


async def sweep(spec: SweepSpec, show: ShowRuns) -> dict[str, Any]:
    """Run a sweep, or the rest of it, and return its result. Raises `SettingsError` and `StartError`."""
    base, conditions = spec.base, spec.base.conditions
    base.check()
    check_format(base.tables)
    if base.entrants.strategy is not None:
        for params in spec.grid:  # so that none fails only when its runs begin
            load_strategy(base.entrants.strategy, params)
    last_seed = (conditions.seed or 0) + spec.seeds - 1
    _, source = await open_source(conditions, environ_of(replace(conditions, seed=last_seed)))
    start, last = moment_of(source.span.start), moment_of(source.span.stop - 1)
    folds = folds_of(spec.walk_forward, start, last + timedelta(seconds=1)) if spec.walk_forward else []
    count = len(spec.grid) * spec.seeds * max(1, len(folds)) + (len(folds) * spec.seeds or 1)
    if count > RUNS_MAX:
        raise SettingsError([f"these are {count} runs; a sweep has at most {RUNS_MAX}"])
    _check_metric(spec.by, folds[0][0] if folds else SweepPeriod(start, last))
    async with AsyncExitStack() as stack:
        cluster = None
        if spec.cluster is not None:
            inputs = _inputs(base, list(source.markets))
            cluster = Cluster(await stack.enter_async_context(client_of(spec.cluster)), inputs, base.trials)
        _begin(spec)
        workers = await stack.enter_async_context(Workers(spec.workers or os.cpu_count() or 1))
        board = _Board(spec, count, cluster or workers, show)
        done = await _carry_out(board, spec, folds)
        best = None
        for _, runs in ranked(done, METRICS[spec.by])[: 0 if folds else 1]:
            [best] = await board.carry_out([runs[0].run if spec.reports else runs[0].run._replace(role=BEST)])
    digests = data_digests(conditions.recording, source.markets)
    lengths = (len(each.returns) for each in reversed(done) if each.returns is not None)  # the test periods first
    hours = next(lengths, hours_within(start, last))
    known = read_trials(base.trials, digests, hours) if base.trials.exists() else KnownTrials.of([], hours)
    value = sweep_value(done, spec.by, known) | {"best": best and best.run.name}
    replace_file(base.out / SWEEP, msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    write_csv(base.out / TABLE, done)
    replace_file(base.out / PAGE, sweep_page(base.out.name, value))
    return value


def run_sweep(
    strategy: type[Any] | str, data: str | PathLike[str], params: Mapping[str, Any], *, out: str | Path, **options: Any
) -> dict[str, Any]:
    """Run the backtests of every combination of parameters in processes, and return the content of `sweep.json`.

    A parameter has one value, or a list or range of them. `options` are those of `run_backtest`, and `seeds`,
    `walk_forward` (such as "7d/1d"), `by`, `reports`, `workers` and `cluster` as in the command. A class must be at the
    top of its file, and the sweep below `if __name__ == "__main__":`. An interrupted sweep resumes in its folder.

    :raises SettingsError: an argument, the strategy's class or a parameter is wrong
    :raises StartError: the candles cannot be read, or the folder holds something else
    :raises TypeError: an option has another name
    """
    strategy = as_file(strategy)
    own = {name: options.pop(name) for name in SweepSpec.__struct_fields__ if name in options}
    inspect.signature(run_backtest).bind(strategy, data, **options)  # no other names
    if (by := own.get("by", "return")) not in METRICS:
        raise SettingsError([f"by is {by!r}; it must be one of {', '.join(METRICS)}"])
    _check_kinds(params, own)
    listed = {name: each if isinstance(each, list | tuple | range) else [each] for name, each in params.items()}
    values = {name: dict.fromkeys(map(str, each)) for name, each in listed.items()}  # one run of each, in its folder
    grid = tuple(dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))
    with tempfile.TemporaryDirectory(prefix="trader-sweep-") as folder:
        base = spec_of(Path(folder), strategy, data, out=out, **options)
        return completed(sweep(SweepSpec(base=base, grid=grid, **own), lambda _done, _count: None), Interrupts())


def _check_kinds(params: object, own: Mapping[str, Any]) -> None:
    """Check what the command's parser would refuse. Raises `SettingsError`."""
    problems = [
        f"{name} is {own[name]!r:.100}; it must be a whole number from 1"
        for name in ("seeds", "workers")
        if own.get(name) is not None and not (isinstance(own[name], int) and own[name] >= 1)
    ]
    if not isinstance(params, Mapping):
        problems.append(f"params is {params!r:.100}; it must be a mapping of names to values, or to lists of them")
    else:
        lists = {name: each for name, each in params.items() if isinstance(each, list | tuple | range)}
        problems += [f"params has no value of {name}" for name, each in lists.items() if not each]
    if problems:
        raise SettingsError(problems)


def _check_metric(by: str, period: SweepPeriod) -> None:
    """Check that runs have hours enough for the metric. Raises `SettingsError`."""
    assert period.start is not None
    assert period.end is not None
    hours, needed = (period.end - period.start + timedelta(seconds=1)) / HOUR, METRICS[by].hours_min
    if hours < needed:
        raise SettingsError([f"--by {by} needs runs of at least {needed} hours; these have {hours:.1f}"])


async def _carry_out(board: "_Board", spec: SweepSpec, folds: Sequence[tuple[SweepPeriod, SweepPeriod]]) -> list[Done]:
    """Execute the runs of a grid or, for each fold, its grid and then the best parameters on the following period."""
    conditions = spec.base.conditions
    first = conditions.seed or 0
    seeds = range(first, first + spec.seeds)
    if not folds:
        period = SweepPeriod(conditions.start, conditions.end)
        return await board.carry_out([SweepRun(params, seed, period, "run") for seed in seeds for params in spec.grid])
    done: list[Done] = []
    for number, (choose, attempt) in enumerate(folds, 1):
        chosen_on = await board.carry_out(
            [SweepRun(params, seed, choose, f"fold{number}-choose") for seed in seeds for params in spec.grid]
        )
        done += chosen_on
        for params, _ in ranked(chosen_on, METRICS[spec.by])[:1]:
            done += await board.carry_out([SweepRun(params, seed, attempt, f"fold{number}-try") for seed in seeds])
    return done


def _inputs(spec: BacktestSpec, markets: Sequence[str]) -> list[Inputs]:
    """Return the inputs of a sweep's runs: candles, funding rates, figures of markets, and the strategy."""
    conditions, strategy = spec.conditions, spec.entrants.strategy
    data = conditions.recording
    inputs = [Inputs.of(data, data_files(data, markets))]
    funding = conditions.funding_folder or data
    rates = [file for symbol, files in find_funding_files(funding).items() if symbol in markets for file in files]
    if rates:
        inputs.append(Inputs.of(funding, rates))
    files = [*conditions.own_data, *([conditions.markets_file] if conditions.markets_file is not None else [])]
    files += [Path(strategy.rpartition(":")[0])] if isinstance(strategy, str) else []
    return inputs + [Inputs.of(file, [file]) for file in files]


def _begin(spec: SweepSpec) -> None:
    """Write the plan of a new sweep, or check that the folder has the same plan.

    :raises StartError: the folder exists and does not hold this sweep
    """
    out = spec.base.out
    planned = replace(spec, by="", workers=None, cluster=None, base=replace(spec.base, out=Path(), trials=Path()))
    content = msgspec.json.format(msgspec.json.encode(planned, enc_hook=str, order="sorted"))
    file = out / PLAN
    if not out.exists():
        out.mkdir(parents=True)
        replace_file(file, content)
        return
    try:
        is_same = read_regular(file) == content and not (out / RUNS).is_symlink()
    except OSError:
        is_same = False
    if not is_same:
        raise StartError(f"{out} exists and holds no sweep with these options; give --out a new folder.")


class _Board:
    """Executes the runs of a sweep: as many at once as there are cores, or all of them on a cluster."""

    def __init__(self, spec: SweepSpec, count: int, workers: Workers | Cluster, show: ShowRuns) -> None:
        self._spec, self._workers, self._show = spec, workers, show
        self._count, self._done = count, 0
        show(0, count)

    async def carry_out(self, runs: Sequence[SweepRun]) -> list[Done]:
        """Execute the runs that are not complete yet, and return all of them in this order."""
        return await asyncio.gather(*(self._carry_out(run) for run in runs))

    async def _carry_out(self, run: SweepRun) -> Done:
        spec = self._spec.run(run)
        done = read_run(run, spec.out)
        if done is None:
            shutil.rmtree(spec.out, ignore_errors=True)
            ended = await self._workers.run(spec)
            done = read_run(run, spec.out) or Done(run, failure=_reason(spec.out, *ended))
        self._done += 1
        self._show(self._done, self._count)
        return done


def _reason(folder: Path, said: bytes, code: int) -> str:
    """Return why a run failed: from its result, else from the end of its output, else from its exit code."""
    try:
        ended = decode_json(read_regular(folder / RESULT, below=folder.parents[1]), dict[str, Any])["ended"]
    except (OSError, msgspec.MsgspecError, KeyError):
        ended = None
    lines = said.decode(errors="replace").strip().splitlines()
    return ended or (lines[-1].strip() if lines else f"its process ended with {code}")
