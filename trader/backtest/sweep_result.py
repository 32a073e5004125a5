"""Result of a sweep: its runs, their parameters from the best to the worst by a metric, and its page."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite, prod
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trader.api.dashboard.reports import report_page
from trader.backtest.domain.selection import HOURS_MIN, expected_best, overfitting
from trader.backtest.spec import RESULT
from trader.backtest.trials import KnownTrials, figures_of_hours
from trader.core.clock import iso
from trader.core.files import decode_json, read_regular
from trader.portfolio import tables


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
    """A finished run: the figures of its account by their names in `result.json`, or why it failed.

    `returns` are the hourly returns. With several accounts, both are means over them. `traded` is the period that was
    traded, in texts.
    """

    run: SweepRun
    figures: Mapping[str, float | None] = {}
    returns: npt.NDArray[np.float64] | None = None
    failure: str | None = None
    traded: tuple[str, str] | None = None

    @property
    def period(self) -> tuple[str | None, str | None]:
        """The period that was traded; of a failed run, what was asked for."""
        start, end = (None if each is None else iso(each) for each in self.run.period)
        return self.traded or (start, end)


class Metric(NamedTuple):
    """A figure by which parameters are chosen; by default more is better."""

    figure: str
    is_less_better: bool = False
    hours_min: int = 0

    def of(self, done: Sequence[Done]) -> float | None:
        """Return the mean over runs; None unless each has the figure: a mean of the others would hide a ruined one."""
        values = [value for each in done if (value := each.figures.get(self.figure)) is not None]
        return mean(values) if values and len(values) == len(done) else None


METRICS: Final[Mapping[str, Metric]] = {
    "return": Metric("returnPercent"),
    "sharpe": Metric("sharpePerHour", hours_min=HOURS_MIN),
    "sortino": Metric("sortinoPerHour", hours_min=HOURS_MIN),
    "calmar": Metric("calmar", hours_min=HOURS_MIN),
    "drawdown": Metric("maxDrawdownPercent", is_less_better=True),
    "gross": Metric("gross"),
    "fees": Metric("fees", is_less_better=True),
    "trades": Metric("trades"),
}
"""The metrics by which a sweep chooses, by the name of the option."""

_FIGURES: Final = tuple(
    dict.fromkeys([*(metric.figure for metric in METRICS.values()), "funding", "decisions", "equity"])
)


def read_run(run: SweepRun, folder: Path) -> Done | None:
    """Return a finished run; None: it has yet to be executed, or its result is damaged."""
    try:
        value = decode_json(read_regular(folder / RESULT, below=folder.parents[1]), dict[str, Any])
        return _done(run, value) if value["complete"] is True else None
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError):  # includes errors of msgspec
        return None


def _done(run: SweepRun, value: Mapping[str, Any]) -> Done:
    own = [account for account in value["accounts"] if account["provider"] == "strategy"] or value["accounts"]
    hours = [np.array(account["hourlyReturns"], dtype=np.float64) for account in own]
    # JSON has no infinity, which is the ratio of a gain without risk.
    own = [account | figures_of_hours(each) for account, each in zip(own, hours, strict=True)]
    figures = {}
    for name in _FIGURES:
        values = [account[name] for account in own]
        figures[name] = None if None in values else mean(values)
    returns = np.mean(hours, axis=0)
    return Done(run, figures, returns, traded=(value["from"], value["to"]))


def ranked(done: Sequence[Done], metric: Metric) -> list[tuple[Mapping[str, str], list[Done]]]:
    """Return the parameters with their runs, the best mean of the metric first, without failed runs."""
    runs: dict[tuple[tuple[str, str], ...], list[Done]] = {}
    for each in done:
        if each.failure is None:
            runs.setdefault(tuple(each.run.params.items()), []).append(each)

    def place(runs: Sequence[Done]) -> tuple[bool, float]:
        value = metric.of(runs)
        return value is None, 0.0 if value is None else value if metric.is_less_better else -value

    return sorted(((dict(params), each) for params, each in runs.items()), key=lambda pair: place(pair[1]))


def sweep_value(done: Sequence[Done], by: str, known: KnownTrials) -> dict[str, Any]:
    """Return the content of `sweep.json`."""
    tried = [each for each in done if each.run.role.endswith("-try")]
    rows = ranked(tried or done, METRICS[by])
    return {
        "by": by,
        "runs": [
            {"name": each.run.name, "params": each.run.params, "seed": each.run.seed, "role": each.run.role,
             "from": each.period[0], "to": each.period[1],
             "returnPercent": each.figures.get("returnPercent"), "failure": each.failure}
            for each in done
        ],
        "parameters": [
            {"params": params, "runs": len(runs), "metric": METRICS[by].of(runs), **_returns(runs)}
            for params, runs in rows
        ],
        "failed": [each.run.name for each in done if each.failure is not None],
        "overfitting": None if tried else _overfitting(rows),
        "walkForward": _walk_forward(tried),
        "trials": known.trials,
        "bestSharpePerHour": known.best,
        "expectedBestSharpePerHour": None if known.spread is None else expected_best(known.spread, known.trials),
    }  # fmt: skip


def _returns(runs: Sequence[Done]) -> dict[str, Any]:
    values = [value for each in runs if (value := each.figures["returnPercent"]) is not None]
    return {
        "meanReturnPercent": mean(values),
        "deviation": stdev(values) if len(values) > 1 else None,
        "worst": min(values),
        "best": max(values),
    }


def _walk_forward(tried: Sequence[Done]) -> dict[str, Any] | None:
    """Return the return of all test periods, compounded for each seed; None without them, or if a run failed."""
    growths: dict[int, list[float]] = {}
    for each in tried:
        if (gain := each.figures.get("returnPercent")) is None:
            return None
        growths.setdefault(each.run.seed, []).append(1 + gain / 100)
    values = [100 * (prod(of_seed) - 1) for of_seed in growths.values()]
    return {"periods": max(map(len, growths.values())), "meanReturnPercent": mean(values)} if values else None


def _overfitting(rows: Sequence[tuple[Mapping[str, str], Sequence[Done]]]) -> dict[str, Any] | None:
    """Return the probability of overfitting of the parameters, whose returns are means over the seeds."""
    returns = [[each.returns for each in runs if each.returns is not None] for _, runs in rows]
    if len({len(each) for of_seeds in returns for each in of_seeds}) != 1:  # a run that failed, or none
        return None
    found = overfitting(np.array([np.mean(of_seeds, axis=0) for of_seeds in returns]).T)
    return None if found is None else found._asdict()


def write_csv(file: Path, done: Sequence[Done]) -> None:
    """Write a row for each run with its parameters and figures. Raises `OSError`."""
    names = list(dict.fromkeys(name for each in done for name in each.run.params))
    rows: list[list[Any]] = [["run", "role", "seed", "from", "to", *names, *map(_snake, _FIGURES), "failure"]]
    for each in done:
        values = (*(each.run.params.get(name) for name in names), *(each.figures.get(name) for name in _FIGURES))
        rows.append([each.run.name, each.run.role, each.run.seed, *each.period, *values, each.failure])
    tables.write_csv(file, (map(tables.defused, row) for row in rows))


def _snake(name: str) -> str:
    return re.sub(r"(?=[A-Z])", "_", name).lower()


def sweep_page(name: str, value: Mapping[str, Any]) -> str:
    """Return the page of the content of `sweep.json`. JSON has no infinity, so a metric without a bound is a text."""
    parameters = [
        row | {"metric": "Infinity"} if row["metric"] is not None and not isfinite(row["metric"]) else row
        for row in value["parameters"]
    ]
    best = next((each for each in value["runs"] if each.get("name") == value.get("best", "")), None)
    shown = {"by": value["by"], "runs": len(value["runs"]), "lines": list(trial_lines(value)), "parameters": parameters}
    return report_page("sweep", f"Sweep: {name}", {"name": name, "best": best, **shown})


def trial_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the result of a walk-forward, and the significance of the best, given the trials."""
    if found := value["walkForward"]:
        gain = f"{found['meanReturnPercent']:+.2f} %"
        yield f"The {found['periods']} test periods returned {gain} together: compounded, and the mean over the seeds."
    if value["bestSharpePerHour"] is not None:
        count, by_luck = value["trials"], value["expectedBestSharpePerHour"]
        line = f"{count} trials on these candles. Their best Sharpe ratio is {value['bestSharpePerHour']:+.3f} an hour"
        yield f"{line}." if by_luck is None else f"{line}; the best of {count} without skill would have {by_luck:+.3f}."
    if found := value["overfitting"]:
        yield (
            f"Probability of backtest overfitting: {100 * found['probability']:.0f} %. In that share of "
            f"{found['choices']:,} ways to cut the period in halves, the best of {found['configurations']} on one half "
            "is not above the median on the other."
        )
