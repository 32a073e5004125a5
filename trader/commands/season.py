"""The commands of seasons: what a season can find out before it is run."""

import argparse
from typing import Final

from trader.commands.command import EXIT_DONE, Result, command, print_result, table
from trader.domain.portfolio.evidence import comparisons_among
from trader.domain.portfolio.plan import Question, SeasonOutline, plan_season
from trader.errors import SettingsError

DAYS_SHOWN: Final = (30, 60, 90, 180, 365, 730, 1095)
QUESTIONS: Final[dict[Question, str]] = {
    "holdNothing": "better than holding nothing",
    "otherModel": "better than a model without an edge",
}
_BOUNDS: Final = {
    "models": (1, 1000), "sharpe": (0.1, 50), "days": (30, 1095), "volatility": (0.01, 10), "noise": (0, 100),
    "leverage": (1, 100), "seasons": (10, 1000),
}  # fmt: skip


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=int, required=True, metavar="N", help="entrants, replicates as one")
    parser.add_argument("--sharpe", type=float, required=True, metavar="S", help="annual Sharpe ratio of the edge")
    parser.add_argument("--days", type=int, default=365, metavar="N", help="longest season; default: 365")
    parser.add_argument("--replicates", type=_counts, default=(1, 3, 5), metavar="N,N", help="default: 1,3,5")
    parser.add_argument("--volatility", type=float, default=0.5, metavar="%", help="of an hour; default: 0.5")
    parser.add_argument("--noise", type=float, default=30, metavar="%", help="variance that is own noise; default: 30")
    parser.add_argument("--leverage", type=float, default=1, metavar="X", help="largest of an account; default: 1")
    parser.add_argument("--seasons", type=int, default=100, metavar="N", help="simulated ones; default: 100")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 100 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to 100, such as 1,3,5")
    return tuple(map(int, parts))


@command("season plan", example="trader season plan --models 8 --sharpe 3", arguments=_plan_arguments)
def plan(options: argparse.Namespace) -> int:
    """Say what a season can find out: how soon the boards would call a true edge of this Sharpe ratio.

    Seasons are simulated with the verdicts of the boards: daily looks, both sequences, all comparisons of so many
    entrants corrected together. Every figure is the share of seasons that have called the edge until then.
    """
    problems = [
        f"--{name}: {value:g} is not from {low} to {high}"
        for name, (low, high) in _BOUNDS.items()
        if not low <= (value := getattr(options, name)) <= high
    ]
    if problems:
        raise SettingsError(problems)
    outline = SeasonOutline(
        options.models, options.sharpe, options.volatility / 100, options.noise / 100, options.leverage, options.days
    )
    days = [each for each in DAYS_SHOWN if each < options.days] + [options.days]
    powers = list(plan_season(outline, options.replicates, days, options.seasons))
    rows = [
        (
            QUESTIONS[power.question],
            str(power.replicates),
            *(f"{100 * share:.0f} %" for share in power.called),
            "more" if power.days_needed is None else str(power.days_needed),
        )
        for power in powers
    ]
    heads = ("question", "replicates", *(f"{each} days" for each in days), "days for 80 %")
    family = comparisons_among(options.models)
    lines = [
        f"{options.models} entrants, {family} comparisons, Sharpe ratio {options.sharpe:g}: seasons that call it",
        *table(heads, rows),
    ]
    value = {"comparisons": family, "days": days, "powers": [power._asdict() for power in powers]}
    return print_result(Result(value, lines, EXIT_DONE), as_json=options.json)
