"""Lines that the command backtest prints about counterfactual backtests and sweeps."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trader.backtest.sweep import PLAN, RUNS, SWEEP, SweepSpec
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
    heads = ("parameters", "runs", "mean return", "deviation", "worst", "best")
    rows = [
        (
            " ".join(f"{name}={text}" for name, text in row["params"].items()) or "as they are",
            str(row["runs"]),
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
    if value["bestSharpePerHour"] is not None:
        count, by_luck = value["trials"], value["expectedBestSharpePerHour"]
        line = f"{count} trials on these candles. Their best Sharpe ratio is {value['bestSharpePerHour']:+.3f} an hour"
        yield f"{line}." if by_luck is None else f"{line}; the best of {count} without skill would have {by_luck:+.3f}."
    yield f"{spec.base.out}: {PLAN}, {SWEEP}, {RUNS}/"
