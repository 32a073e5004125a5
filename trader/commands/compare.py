"""The command compare: finished backtests against each other, paired by seed and by hour."""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from trader.commands.command import Result, command, table
from trader.core.clock import floor_time
from trader.core.errors import SettingsError
from trader.core.files import decode_json, read_regular
from trader.core.intervals import percent, student_quantile
from trader.core.statistics import grouped
from trader.portfolio.domain.evidence import compare, judge_family
from trader.portfolio.domain.returns import ReturnSeries, mean_series

_HOUR = timedelta(hours=1)
_HOURS_MAX = 500_000


class _Run(NamedTuple):
    """A finished backtest: its identity without the seed, its seed, and the hourly log returns of its account."""

    label: str
    key: str
    seed: int | None
    returns: ReturnSeries


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of backtests")


@command("compare", example="trader lab compare sweep/runs/run,*", arguments=_arguments, compares=True)
def compare_runs(options: argparse.Namespace) -> Result:
    """Compare finished backtests of one period with the first, paired by seed and hour.

    Runs that differ only in their seed share a row. `by hours` is the 95 % interval of the difference in return from
    the paired hours; `by seeds` is the interval of its mean over the paired seeds. The verdict is corrected for all
    rows together.
    """
    rows = compare_folders(options.runs)
    return Result({"rows": rows}, _lines(rows))


def compare_folders(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the rows of a comparison of backtests with the first: label, runs, mean return, difference and verdict.

    :raises SettingsError: a folder holds no backtest, or all are the same but for the seed
    """
    runs = [_read(Path(folder)) for folder in folders]
    groups = grouped(runs, lambda run: run.key)
    if len(groups) < 2:
        raise SettingsError(["compare needs backtests that differ in more than the seed"])
    reference, *others = groups.values()
    statements = [compare(*_paired(reference, group)) for group in others]
    rows = [_row(reference, None, None, "")]
    for group, statement, verdict in zip(others, statements, judge_family(statements), strict=True):
        interval = statement.interval_percent
        why = statement.reason or verdict.word
        rows.append(_row(group, reference, None if interval is None else [interval.low, interval.high], why))
    return rows


class _Account(msgspec.Struct, rename="camel"):
    id: str
    provider: str
    hourly_returns: Annotated[list[float | None], msgspec.Meta(min_length=1, max_length=_HOURS_MAX)]


class _Result(msgspec.Struct):
    """The parts of a result that are compared."""

    accounts: Annotated[list[_Account], msgspec.Meta(min_length=1)]
    options: dict[str, Any]
    strategy: dict[str, Any] | None
    seed: int | None
    from_: datetime = msgspec.field(name="from")


def _read(folder: Path) -> _Run:
    """Return the run of a folder. Raises `SettingsError`."""
    try:
        result = decode_json(read_regular(folder / "result.json"), _Result)
        strategy = result.strategy or {}
        params = " ".join(f"{name}={text}" for name, text in dict(strategy.get("params", {})).items())
    except (OSError, ValueError, TypeError) as error:  # includes errors of msgspec
        raise SettingsError([f"{folder} must be the folder of a backtest (result.json): {error}"]) from None
    accounts = result.accounts
    own = next((each for each in accounts if each.provider == "strategy"), accounts[0])
    same = {**result.options, "seed": None, "from": result.from_, "strategy": strategy, "account": own.id}
    with np.errstate(divide="ignore", invalid="ignore"):  # a loss of everything, and what follows it
        returns = np.log1p(np.array(own.hourly_returns, dtype=np.float64))
    key = msgspec.json.encode(same, order="sorted").decode()
    series = ReturnSeries(floor_time(result.from_, _HOUR), returns)
    return _Run(f"{own.id} {params}".strip(), key, result.seed, series)


def _paired(reference: Sequence[_Run], group: Sequence[_Run]) -> tuple[ReturnSeries | None, ReturnSeries | None]:
    """Return the mean returns of both over their common seeds, or over all seeds if they have none in common."""
    seeds = {run.seed for run in reference} & {run.seed for run in group}
    sides = ([run.returns for run in side if run.seed in seeds or not seeds] for side in (group, reference))
    mine, others = (mean_series(side) for side in sides)
    return mine, others


def _row(
    group: Sequence[_Run], reference: Sequence[_Run] | None, by_hours: Sequence[float] | None, verdict: str
) -> dict[str, Any]:
    returns = {run.seed: percent(float(run.returns.values.sum())) for run in group}
    row: dict[str, Any] = {"label": group[0].label, "runs": len(group), "meanReturnPercent": mean(returns.values())}
    if reference is None:
        return row | {"difference": None, "byHours": None, "bySeeds": None, "verdict": verdict}
    beside = {run.seed: percent(float(run.returns.values.sum())) for run in reference}
    paired = [returns[seed] - beside[seed] for seed in returns.keys() & beside.keys()]
    difference = mean(paired) if paired else mean(returns.values()) - mean(beside.values())
    by_seeds = None
    if len(paired) > 1:
        half = student_quantile(0.025, len(paired) - 1) * stdev(paired) / math.sqrt(len(paired))
        by_seeds = [difference - abs(half), difference + abs(half)]
    return row | {"difference": difference, "byHours": by_hours, "bySeeds": by_seeds, "verdict": verdict}


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    heads = ("backtest", "verdict", "runs", "mean return", "difference", "by hours", "by seeds")
    yield from table(
        heads,
        (
            (
                row["label"],
                row["verdict"] or "compared with",
                str(row["runs"]),
                f"{row['meanReturnPercent']:+.2f} %",
                "" if row["difference"] is None else f"{row['difference']:+.2f} %",
                _interval(row["byHours"]),
                _interval(row["bySeeds"]),
            )
            for row in rows
        ),
        text_columns=2,
    )


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:+.2f} to {bounds[1]:+.2f} %"
