"""Page of a sweep: its parameters, a heat map of each pair of them, and the probability of overfitting."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import combinations
from math import isfinite
from statistics import mean
from typing import Any, Final

from trader.api.dashboard.document import document, minus, table

_ROWS_MAX: Final = 200
_MAPS_MAX: Final = 6
_SHADE_MAX: Final = 45
"""The accent's share of the color of the best cell, in percent; text stays readable on it."""


def sweep_page(name: str, value: Mapping[str, Any]) -> str:
    """Return the page of the content of `sweep.json`."""
    rows, by = value["parameters"], value["by"]
    body = f"<h1>Sweep</h1><p>{escape(name)}: {len(value['runs'])} runs, parameters by {by}.</p>"
    body += "".join(f"<p>{escape(line)}</p>" for line in trial_lines(value))
    body += "".join(_maps(rows, by))
    body += f"<section><h2>Parameters</h2>{_table(rows[:_ROWS_MAX], by)}</section>"
    return document(f"Sweep: {name}", body)


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


def _maps(rows: Sequence[Mapping[str, Any]], by: str) -> Iterator[str]:
    """Yield a heat map of each two parameters that vary."""
    names = [name for name in (rows[0]["params"] if rows else ()) if len({row["params"][name] for row in rows}) > 1]
    for number, (down, across) in enumerate(combinations(names, 2)):
        if number == _MAPS_MAX:
            return
        cells: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["metric"] is not None:
                cells.setdefault((row["params"][down], row["params"][across]), []).append(row["metric"])
        means = {key: mean(values) for key, values in cells.items()}
        words = "" if len(names) == 2 else " Each cell is the mean over the other parameters."
        title = f"{escape(down)} and {escape(across)}"
        yield (
            f"<section><h2>{title}</h2><p>The mean {by}: the stronger the color, the higher.{words}</p>"
            f"{_map(down, across, means)}</section>"
        )


def _map(down: str, across: str, means: Mapping[tuple[str, str], float]) -> str:
    finite = [value for value in means.values() if isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        share = _SHADE_MAX * min(1.0, (value - least) / ((most - least) or 1.0))
        return (
            f'<td style="background:color-mix(in srgb,var(--accent) {share:.0f}%,var(--panel))" title="{value}">'
            f"{minus(_figure(value))}</td>"
        )

    columns, lines = (sorted({key[place] for key in means}, key=_order) for place in (1, 0))
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row" class="text">{escape(line)}</th>'
        f"{''.join(cell(means.get((line, column))) for column in columns)}</tr>"
        for line in lines
    )
    return (
        '<div class="panel scroll"><table><thead><tr>'
        f'<th class="text">{escape(down)} ↓ {escape(across)} →</th>{head}</tr></thead><tbody>'
        f"{body}</tbody></table></div>"
    )


def _order(text: str) -> tuple[bool, float, str]:
    """Return a key that orders numbers by value, before other texts."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _table(rows: Sequence[Mapping[str, Any]], by: str) -> str:
    names = list(rows[0]["params"]) if rows else []
    figures = ["meanReturnPercent", "deviation", "worst", "best"]
    metric = {} if by == "return" else {"metric": by}
    cells = [
        (
            *(escape(row["params"][name]) for name in names),
            str(row["runs"]),
            *("" if row[figure] is None else minus(_figure(row[figure])) for figure in [*metric, *figures]),
        )
        for row in rows
    ]
    heads = (*map(escape, names), "runs", *metric.values(), "mean return, %", "deviation", "worst, %", "best, %")
    return table(heads, cells, text_columns=len(names))


def _figure(value: float) -> str:
    """Format with four digits at most."""
    if not isfinite(value):
        return "∞"
    return f"{value:+.4g}" if abs(value) < 1_000 else f"{value:+,.0f}"
