"""Sweeps: backtests over parameters, seeds and periods, in parallel processes.

Every run is a complete backtest in a separate folder, so an interrupted sweep resumes with the missing runs, and a run
that fails or whose process dies does not affect the others.
"""

import asyncio
import hashlib
import itertools
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.strategy_files import load_strategy
from trader.backtest.cluster import WORKER, Cluster, Inputs, connected
from trader.backtest.domain.deflation import expected_best
from trader.backtest.spec import BacktestSpec, environ_of, open_source, params_of
from trader.backtest.trials import KnownTrials, candle_digests, read_trials
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, StartError
from trader.market.sources.files import find_files, find_funding_files
from trader.portfolio.tables import check_format

PLAN, SWEEP, RUNS = "plan.json", "sweep.json", "runs"
RUNS_MAX: Final = 10_000

_RANGE: Final = re.compile(r"(-?[0-9.]+?)\.\.(-?[0-9.]+)(?::([0-9.]+))?")
_SPAN: Final = re.compile(r"([1-9][0-9]{0,3})([hd])/([1-9][0-9]{0,3})([hd])")
HOUR: Final = timedelta(hours=1)
PURGED: Final = HOUR
"""The gap between the period on which parameters are chosen and the period on which they are tried."""

ShowRuns = Callable[[int, int], None]
"""Shows the number of finished runs and the total."""


class SweepPeriod(NamedTuple):
    """A part of the recording, from its first to its last second; None: the defaults of the conditions."""

    start: datetime | None
    end: datetime | None


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


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep: one backtest of `base` for each parameters in `grid` and each of so many seeds, from the base's on.

    `walk_forward` is CHOOSE/TRY, such as 7d/1d. Its runs execute in `workers` processes (None: one per core), or on the
    workers of the Dask scheduler at `cluster`.
    """

    base: BacktestSpec
    grid: tuple[Mapping[str, str], ...]
    seeds: int = 1
    walk_forward: str | None = None
    workers: int | None = None
    cluster: str | None = None

    def run(self, run: SweepRun) -> BacktestSpec:
        """Return the spec of a run, with absolute paths."""
        conditions = replace(self.base.conditions.placed(), seed=run.seed, start=run.period.start, end=run.period.end)
        entrants = replace(self.base.entrants.placed(), params=run.params)
        folder = (self.base.out / RUNS / run.name).absolute()
        return replace(self.base, conditions=conditions, entrants=entrants, out=folder, has_database=False)


def is_grid(texts: Sequence[str] | None) -> bool:
    """Return whether texts of parameters describe more than one combination."""
    names = [text.partition("=")[0] for text in texts or ()]
    return len(set(names)) < len(names) or any(_RANGE.fullmatch(text.partition("=")[2]) for text in texts or ())


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
        folds.append((SweepPeriod(start, tried - PURGED), SweepPeriod(tried, tried + attempt)))
        start += attempt
    if not folds or choose <= PURGED:
        raise SettingsError(
            [f"--walk-forward {text}: one fold needs {(choose + attempt) / HOUR:g} hours, of which the first part is "
             f"above {PURGED / HOUR:g}; the data have {iso(start)} to {iso(end)}, which is {(end - start) / HOUR:.1f}"]
        )  # fmt: skip
    return folds


async def sweep(spec: SweepSpec, show: ShowRuns) -> dict[str, Any]:
    """Run a sweep, or the rest of it, and return its result. Raises `SettingsError` and `StartError`."""
    base, conditions = spec.base, spec.base.conditions
    base.check()
    check_format(base.tables)
    _check_params(base.entrants.strategy, spec.grid)
    _, source = await open_source(conditions, environ_of(conditions))
    span = moment_of(source.span.start), moment_of(source.span.stop - 1)
    folds = folds_of(spec.walk_forward, *span) if spec.walk_forward else []
    count = len(spec.grid) * spec.seeds * max(1, len(folds)) + len(folds) * spec.seeds
    if count > RUNS_MAX:
        raise SettingsError([f"these are {count} runs; a sweep has at most {RUNS_MAX}"])
    async with AsyncExitStack() as stack:
        cluster = None
        if spec.cluster is not None:
            inputs = _inputs(base, list(source.markets))
            cluster = await stack.enter_async_context(connected(spec.cluster, inputs, base.trials))
        _begin(spec)
        board = _Board(spec, count if folds else len(spec.grid) * spec.seeds, cluster, show)
        done = await _carry_out(board, spec, folds)
    digests = candle_digests(conditions.recording, source.markets)
    known = read_trials(base.trials, digests) if base.trials.exists() else KnownTrials.of([])
    value = _value(done, known)
    (base.out / SWEEP).write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    return value


def _check_params(reference: str | type[Any] | None, grid: Sequence[Mapping[str, str]]) -> None:
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


async def _carry_out(board: "_Board", spec: SweepSpec, folds: Sequence[tuple[SweepPeriod, SweepPeriod]]) -> list[Done]:
    """Execute the runs of a grid or, for each fold, its grid and then the best parameters on the following period."""
    conditions = spec.base.conditions
    first = conditions.seed or 0
    seeds = range(first, first + spec.seeds)
    if not folds:
        period = SweepPeriod(conditions.start, conditions.end)
        return await board.carry_out([SweepRun(params, seed, period, "run") for params in spec.grid for seed in seeds])
    done: list[Done] = []
    for number, (choose, attempt) in enumerate(folds, 1):
        chosen_on = await board.carry_out(
            [SweepRun(params, seed, choose, f"fold{number}-choose") for params in spec.grid for seed in seeds]
        )
        done += chosen_on
        for params, _ in _ranked(chosen_on)[:1]:
            done += await board.carry_out([SweepRun(params, seed, attempt, f"fold{number}-try") for seed in seeds])
    return done


def _inputs(spec: BacktestSpec, markets: Sequence[str]) -> list[Inputs]:
    """Return the inputs of a sweep's runs: candles, funding rates, figures of markets, and the strategy."""
    conditions, strategy = spec.conditions, spec.entrants.strategy
    data = conditions.recording
    candles = find_files(data)
    inputs = [Inputs.of(data, [file for symbol in markets for file in candles[symbol]])]
    funding = conditions.funding_folder or data
    rates = [file for symbol, files in find_funding_files(funding).items() if symbol in markets for file in files]
    if rates:
        inputs.append(Inputs.of(funding, rates))
    files = [conditions.markets_file] if conditions.markets_file is not None else []
    files += [Path(strategy.rpartition(":")[0])] if isinstance(strategy, str) else []
    return inputs + [Inputs.of(file, [file]) for file in files]


def _begin(spec: SweepSpec) -> None:
    """Write the plan of a new sweep, or check that the folder has the same plan.

    :raises StartError: the folder exists and does not hold this sweep
    """
    out = spec.base.out
    planned = replace(spec, workers=None, cluster=None, base=replace(spec.base, out=Path(), trials=Path()))
    content = msgspec.json.format(msgspec.json.encode(planned, enc_hook=str, order="sorted"))
    file = out / PLAN
    if not out.exists():
        out.mkdir(parents=True)
        file.write_bytes(content)
    elif not file.exists() or file.read_bytes() != content:
        raise StartError(f"{out} exists and holds no sweep with these options; give --out a new folder.")


class _Board:
    """Executes the runs of a sweep: as many at once as there are cores, or all of them on a cluster."""

    def __init__(self, spec: SweepSpec, count: int, cluster: Cluster | None, show: ShowRuns) -> None:
        self._spec = spec
        self._cluster = cluster
        self._slots = asyncio.Semaphore(spec.workers or os.cpu_count() or 1)
        self._count = count
        self._show = show
        self._done = 0
        show(0, count)

    async def carry_out(self, runs: Sequence[SweepRun]) -> list[Done]:
        """Execute the runs that are not complete yet, and return all of them in this order."""
        return await asyncio.gather(*(self._carry_out(run) for run in runs))

    async def _carry_out(self, run: SweepRun) -> Done:
        spec = self._spec.run(run)
        done = _read(run, spec.out)
        if done is None:
            shutil.rmtree(spec.out, ignore_errors=True)
            ended: tuple[bytes, int | None]
            if self._cluster is not None:
                ended = await self._cluster.run(spec)
            else:
                ended = await self._start(spec)
            done = _read(run, spec.out) or Done(run, None, _reason(spec.out, *ended))
        self._done += 1
        self._show(self._done, self._count)
        return done

    async def _start(self, spec: BacktestSpec) -> tuple[bytes, int | None]:
        """Execute a run in a process once a core is free. Return its output on standard error, and its exit code."""
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                *WORKER, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                _, said = await process.communicate(pickle.dumps(spec))
            except asyncio.CancelledError:
                process.terminate()
                await process.wait()
                raise
        return said, process.returncode


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


def _value(done: Sequence[Done], known: KnownTrials) -> dict[str, Any]:
    tried = [each for each in done if each.run.role.endswith("-try")]
    ranked = _ranked(tried or done)
    return {
        "runs": [
            {"name": each.run.name, "params": each.run.params, "seed": each.run.seed, "role": each.run.role,
             "from": _text_of(each.run.period.start), "to": _text_of(each.run.period.end),
             "returnPercent": each.return_percent, "failure": each.failure}
            for each in done
        ],
        "parameters": [
            {"params": params, "runs": len(values), "meanReturnPercent": mean(values),
             "deviation": stdev(values) if len(values) > 1 else None, "worst": min(values), "best": max(values)}
            for params, values in ranked
        ],
        "failed": [each.run.name for each in done if each.failure is not None],
        "trials": known.trials,
        "bestSharpePerHour": known.best,
        "expectedBestSharpePerHour": None if known.spread is None else expected_best(known.spread, known.trials),
    }  # fmt: skip


def _text_of(moment: datetime | None) -> str | None:
    return None if moment is None else iso(moment)
