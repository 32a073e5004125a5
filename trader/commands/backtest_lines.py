"""Lines that the command backtest prints about a result, a counterfactual backtest and a sweep."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trader.backtest.domain.selection import Deflated
from trader.backtest.result import contamination_text, listing_lines
from trader.backtest.sweep import PAGE, PLAN, RUNS, SWEEP, TABLE, SweepSpec
from trader.backtest.sweep_result import trial_lines
from trader.commands.command import table

_WORDS: Mapping[str, str] = {
    "after cut-off": "the period is after the end of its training data, {cutoff}",
    "before cut-off": "the period begins before the end of its training data, {cutoff}: it may know these prices",
    "unknown": "the models file does not give the end of its training data: it may know these prices",
}


def capacity_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text line about the trade size at which simulated order books begin to matter."""
    if not value:
        return
    sizes = (
        f"{symbol} {each['calmDepth']:,.0f}, of which the largest execution took "
        f"{100 * float(each['largestExecution']) / each['calmDepth']:.1f} %"
        for symbol, each in value.items()
    )
    yield f"Capacity, the depth of a calm book within 2 basis points: {'; '.join(sizes)}"


def _masked_lines(value: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the text lines about the effect of the mask."""
    if value is None:
        return
    hidden = ", ".join(value["hidden"])
    for each in value["maskedMinusPlain"]:
        yield (
            f"{each['id']}: masked ({hidden}) minus plain: {each['equity']:+,.2f}, "
            f"{each['returnPercent']:+.2f} %, {each['trades']:+d} trades"
        )


def refused_line(account: Mapping[str, Any]) -> str:
    """Return the text line about an account's refused decisions: the rules, each with its last reason."""
    rules = (f"{each['count']:,} {each['rule']} ({each['reason']})" for each in account["refused"])
    return f"{account['id']}: refused: {'; '.join(rules)}"


def ended_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text line about what ended a run before its period did: it is the first and the last line."""
    if value["ended"] is not None:
        yield f"Ended at {value['to']}: {value['ended']}"


def model_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text lines about the models."""
    yield from _masked_lines(value["masked"])
    yield from listing_lines(value["listings"])
    for account in value["accounts"]:
        if account["contamination"] is not None:
            words = _WORDS[account["contamination"]].format(cutoff=account["trainingCutoff"])
            yield f"{account['id']}: {contamination_text(account['contamination'])}: {words}"
    answers = value["answers"]
    if answers is not None:
        cost = answers["costUsd"]
        yield f"{answers['asked']} answers were requested, at {cost} USD; all are in {answers['cassette']}"
    if not value["complete"] and answers is not None and answers["budgetUsd"] is not None:
        yield (
            f"With --cassette {answers['cassette']} and another --out the same command continues from there, "
            "without repeating requests."
        )


def deflated_line(account_id: str, deflated: Deflated | None) -> str:
    """Describe the significance of an account's result after this many trials."""
    if deflated is None:
        return f"{account_id}: too few hours, or no variation, for a deflated Sharpe ratio"
    ratio, chance = f"{account_id}: Sharpe ratio {deflated.sharpe_per_hour:+.3f} an hour", 100 * deflated.probability
    if deflated.trials == 1:
        return f"{ratio}, in the first trial on these candles; probability of being above 0: {chance:.0f} %"
    return (
        f"{ratio}; the best of {deflated.trials} trials without skill on these candles would have "
        f"{deflated.expected_best:+.3f}; probability of being above it: {chance:.0f} %"
    )


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
