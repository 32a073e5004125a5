"""Lines that the command backtest prints about counterfactual backtests and sweeps."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trader.backtest.sweep import PAGE, PLAN, RUNS, SWEEP, TABLE, SweepSpec
from trader.backtest.sweep_result import trial_lines
from trader.commands.command import table


def conditions_lines(value: Mapping[str, Any]) -> Iterator[str]:
    causes = [condition["cause"] for condition in value["conditions"]]
    yield f"The same decisions under other conditions: {value['run']}, {value['from']} to {value['to']}"
    changes = [f"other {cause}" for cause in causes]
    heads = ("account", "as recorded", *changes, "equity now", "change", "trades", "refused")
    yield from table(
        heads,
        (
            (
                account["id"],
                f"{account['recorded']:,.2f}",
                *(f"{part['change']:+,.2f}" for part in account["parts"]),
                f"{account['equity']:,.2f}",
                f"{account['change']:+,.2f}",
                _first_to_last(list(account["trades"].values())),
                _first_to_last([sum(refused.values()) for refused in account["refused"].values()]),
            )
            for account in value["accounts"]
        ),
    )
    for account in value["accounts"]:
        before, after = (Counter(account["refused"][cause]) for cause in ("recorded", causes[-1]))
        if more := +(after - before):
            rules = ", ".join(f"{count} by {rule}" for rule, count in more.most_common())
            yield f"{account['id']}: refused only under these conditions: {rules}"
    yield (
        f"The conditions were applied in sequence: {', then '.join(causes)}. Each column is the change that it adds to "
        "the previous ones; in another order the columns would differ, but not their sum."
    )
    yield "An agent trading under these conditions would have decided differently."


def _first_to_last(counts: Sequence[int]) -> str:
    """Format the first and the last of the counts."""
    return f"{counts[0]:,} → {counts[-1]:,}"


def sweep_lines(value: Mapping[str, Any], spec: SweepSpec) -> Iterator[str]:
    by = [] if spec.by == "return" else [spec.by]
    heads = ("parameters", "runs", *by, "mean return", "deviation", "worst", "best")
    rows = [
        (
            " ".join(f"{name}={text}" for name, text in row["params"].items()) or "as they are",
            str(row["runs"]),
            *("" if row["metric"] is None else f"{row['metric']:+.4g}" for _ in by),
            f"{row['meanReturnPercent']:+.2f} %",
            "" if row["deviation"] is None else f"{row['deviation']:.2f}",
            f"{row['worst']:+.2f} %",
            f"{row['best']:+.2f} %",
        )
        for row in value["parameters"]
    ]
    yield from table(heads, rows[:20])
    if len(rows) > 20:
        yield f"and {len(rows) - 20} more in {SWEEP}"
    if spec.walk_forward:
        yield "These are the test periods; the parameters were chosen on the periods before them."
    for run in value["runs"]:
        if run["failure"] is not None:
            yield f"failed: {run['name']}: {run['failure']}"
    yield from trial_lines(value)
    if value["best"] is not None:
        yield f"Evidence and report of the best: {spec.base.out / RUNS / value['best']}"
    yield f"{spec.base.out}: {PLAN}, {SWEEP}, {TABLE}, {PAGE}, {RUNS}/"
