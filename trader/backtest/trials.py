"""The trial ledger of backtests: one line per account and run, and deflated figures that count them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from trader.backtest.chosen import is_masked
from trader.backtest.domain.selection import deflate, hourly_sharpe, spread_within
from trader.backtest.run import Backtest
from trader.backtest.spec import data_files
from trader.core.clock import SystemClock, ceil_time, floor_time
from trader.core.errors import SettingsError, StartError
from trader.core.files import BYTES_MAX, append_lines, decode_json, file_digest, read_lines
from trader.core.statistics import max_drawdown, over_risk

TRIALS: Final = "trials.jsonl"


class Trial(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An account of a run. `data` has the digest of each file of market data, `ledger` is the digest of its ledger."""

    at: datetime
    data: tuple[str, ...]
    model: str
    ledger: str
    strategy: str | None
    params: Mapping[str, Any]
    seed: int | None
    from_: datetime = msgspec.field(name="from")
    to: datetime
    return_percent: float
    sharpe_per_hour: float | None

    @property
    def hours(self) -> int:
        """The number of its hourly returns."""
        return hours_within(self.from_, self.to)


class KnownTrials(NamedTuple):
    """The trials on some candles: their number, their best Sharpe ratio per hour, and its spread within families.

    A family is the trials of one model, whatever its code and its parameters were. Both figures are of as many hours
    as the run has that they judge: the error of a ratio falls with the root of its hours, so a day's ratios, which
    spread widely by luck alone, would make every month look like luck.
    """

    trials: int
    best: float | None
    spread: float | None

    @classmethod
    def of(cls, trials: Sequence[Trial], hours: int) -> "KnownTrials":
        """Summarize trials for a run of these hours.

        Other seeds and fees do not make another configuration, and do not add to the spread.
        """
        configurations: defaultdict[tuple[str, bytes], list[float]] = defaultdict(list)
        for trial in trials:
            if trial.sharpe_per_hour is not None:
                own = msgspec.json.encode([trial.strategy, trial.params, trial.from_, trial.to], order="sorted")
                configurations[trial.model, own].append(trial.sharpe_per_hour * math.sqrt(trial.hours / hours))
        families: defaultdict[str, list[float]] = defaultdict(list)
        for (model, _), ratios in configurations.items():
            families[model].append(mean(ratios))
        best = max(itertools.chain(*configurations.values()), default=None)
        return cls(len(trials), best, spread_within(families.values()))


def data_digests(data: Path, markets: Collection[str]) -> tuple[str, ...]:
    """Return the SHA-256 of each file that a backtest of these markets reads, in hexadecimal."""
    return tuple(map(file_digest, data_files(data, markets)))


def hourly_returns(run: Backtest) -> dict[str, npt.NDArray[np.float64]]:
    """Return the hourly simple returns of each account, the first one relative to its initial capital."""
    returns = {}
    for followed in run.accounts:
        capital, last = float(followed.account.run.initial_capital), [float(each.last) for each in followed.hours]
        values = whole_hours([capital, *last], run.starts_at, run.reached + _TICK)
        with np.errstate(divide="ignore", invalid="ignore"):  # an account with no equity left
            returns[followed.account.id] = np.diff(values) / np.array(values[:-1])
    return returns


def whole_hours(values: Sequence[float], start: datetime, end: datetime) -> list[float]:
    """Return the value at the start and the last values of the hours of the clock, one for each whole hour of the run.

    A part of an hour is no hour: where the run begins or ends within one, the shorter part is joined with the hour
    beside it. The value just after a run that ends on the hour is such a part, too. A run has at least one hour.
    """
    kept = list(values)
    first, last = ceil_time(start, _HOUR) - start or _HOUR, end - floor_time(end, _HOUR)
    for _ in range(len(kept) - 1 - hours_within(start, end - _TICK)):
        if last <= first:
            del kept[-2]
            last = _HOUR
        else:
            del kept[1]
            first = _HOUR
    return kept


def hours_within(start: datetime, reached: datetime) -> int:
    """Return the number of whole hours of a run from its first to its last second; at least one."""
    return max(1, (reached + _TICK - start) // _HOUR)


_TICK: Final = timedelta(seconds=1)
_HOUR: Final = timedelta(hours=1)
_HOURS_PER_YEAR: Final = 365 * 24


def figures_of_hours(returns: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the Sharpe, Sortino and Calmar ratios of hourly simple returns, and the returns.

    Ratios are None below 24 hours, without variation and after ruin; a gain without a losing hour or without a fall is
    infinite, which JSON has as null. They are per hour; Calmar is the return of a year, compounded from these hours,
    over the maximal drawdown.
    """
    sharpe, sortino, calmar = hourly_sharpe(returns), None, None
    if sharpe is not None:
        sortino = over_risk(float(np.mean(returns)), math.sqrt(float(np.mean(np.minimum(returns, 0.0) ** 2))))
        equity = np.cumprod(np.concatenate([[1.0], 1 + returns]))
        fall = max_drawdown(equity)
        if fall is not None and equity[-1] > 0:
            year = math.expm1(min(700.0, math.log(equity[-1]) * _HOURS_PER_YEAR / len(returns)))
            calmar = over_risk(100 * year, fall.percent)
    return {"sharpePerHour": sharpe, "sortinoPerHour": sortino, "calmar": calmar, "hourlyReturns": returns.tolist()}


def add_trials(file: Path, data: Path, run: Backtest, value: Mapping[str, Any], *, counts: bool) -> None:
    """Add a run on these candles to the ledger, and the figures of the hours to each account of its result.

    A run that crashed does not count: it did not try a strategy, and its accounts have no deflated figures. A model
    and its masked copy are one trial, with the figures of the model.

    :raises StartError: the ledger cannot be read or written
    """
    returns = hourly_returns(run)
    for account in value["accounts"]:
        account.update(figures_of_hours(returns[account["id"]]), deflated=None)
    if not counts:
        return
    digests = data_digests(data, value["markets"])
    strategy = value["strategy"]
    models = {followed.model.id: followed.model for followed in run.accounts}
    trials = [
        Trial(
            at=SystemClock().now(),
            data=digests,
            model=account["id"],
            ledger=value["ledgerSha256"],
            strategy=strategy["sha256"] if strategy and models[account["id"]].provider == "strategy" else None,
            params=models[account["id"]].configuration.params,
            seed=value["seed"],
            from_=run.starts_at,
            to=run.reached,
            return_percent=account["returnPercent"],
            sharpe_per_hour=account["sharpePerHour"],
        )
        for account in value["accounts"]
        if not is_masked(account["id"], models)
    ]
    lines = b"".join(msgspec.json.encode(trial) + b"\n" for trial in trials)
    try:
        append_lines(file, lines)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}; --trials names another file.") from error
    known = read_trials(file, digests, hours_within(run.starts_at, run.reached))
    for account in value["accounts"]:
        account["deflated"] = deflate(returns[account["id"]], known.spread, known.trials)


def read_trials(file: Path, data: Collection[str], hours: int) -> KnownTrials:
    """Return the trials on any of these files of candles, where repetitions of a run count once, for a run of `hours`.

    Raises `SettingsError` for a broken line.
    """
    known: dict[tuple[str, str], Trial] = {}
    for number, line in enumerate(read_lines(file, BYTES_MAX), 1):
        try:
            trial = decode_json(line, Trial)
        except msgspec.MsgspecError as error:
            raise SettingsError(
                [f"{file}, line {number} is not a trial of a backtest: {error}; --trials names another file"]
            ) from None
        if not set(data).isdisjoint(trial.data):
            known[trial.ledger, trial.model] = trial
    return KnownTrials.of(list(known.values()), hours)


def check_trials(file: Path) -> None:
    """Check the ledger, if there is one, before a run that will be added to it.

    :raises SettingsError: a line is broken
    :raises StartError: the ledger cannot be read
    """
    try:
        read_trials(file, (), 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error.strerror}; --trials names another file.") from error
