"""The command that plans a season: what its boards could detect, before it is opened."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from trader.commands.command import EXIT_DONE, Result, argument_of, command, table
from trader.commands.progress import Progress
from trader.core.errors import SettingsError
from trader.core.intervals import HOURS_PER_DAY
from trader.portfolio.domain.board import NO_SEASON
from trader.portfolio.domain.seasons import SeasonRules, ServiceTerms, rule_issues, term_issues
from trader.seasons.domain.plan import Power, Question, SeasonOutline, plan_season
from trader.settings.forms import Form
from trader.settings.toml_lines import located, read_toml, struct_issues

DAYS_SHOWN: Final = (7, 14, 30, 60, 90, 180, 365, 730, 1095)
SHOWN_MAX: Final = 6
"""The table's columns, in days; the last one is the longest season."""

QUESTIONS: Final[dict[Question, str]] = {
    "primary": "the primary comparison",
    "holdNothing": "better than holding nothing",
    "baseline": "better than a baseline",
    "otherModel": "better than another model",
}
_BOUNDS: Final = {
    "models": (1, 1000), "sharpe": (0.1, 50), "days": (1, 1095), "replicates": (1, 100), "volatility": (0.01, 10),
    "noise": (0, 100), "leverage": (1, 100), "seasons": (10, 1000),
}  # fmt: skip
_DAYS: Final = 365
_REPLICATES: Final = (1, 3, 5)
_SHARPES: Final = (1.0, 2.0, 3.0, 5.0, 8.0)


def _numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    return argument_of(Form("a list of numbers, such as 1,3,5", ".+", lambda text: tuple(map(kind, text.split(",")))))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="?", help="a TOML file of the rules; default: no season")
    parser.add_argument("--models", type=int, metavar="N", help="entrants, replicates as one; default: the file's")
    sharpes = "annual Sharpe ratios of the edge; default: 1,2,3,5,8"
    parser.add_argument("--sharpe", type=_numbers(float), default=_SHARPES, metavar="S,S", help=sharpes)
    parser.add_argument("--days", type=int, metavar="N", help="longest season; default: the file's, or 365")
    parser.add_argument("--replicates", type=_numbers(int), metavar="N,N", help="default: the file's, or 1,3,5")
    parser.add_argument("--volatility", type=float, default=0.5, metavar="%", help="hourly volatility; default: 0.5")
    parser.add_argument("--noise", type=float, default=30, metavar="%", help="own noise in the variance; default: 30")
    parser.add_argument("--leverage", type=float, default=1, metavar="X", help="largest leverage; default: 1")
    parser.add_argument("--seasons", type=int, default=100, metavar="N", help="simulated seasons; default: 100")


@command("season-plan", example="trader lab season-plan season.toml", arguments=_arguments)
def plan(options: argparse.Namespace) -> Result:
    """Estimate what a season can detect: how soon its boards would call a true edge of a given Sharpe ratio.

    The command simulates seasons with the verdicts of the boards: daily looks, both sequences, all comparisons
    corrected together. A file supplies the season's comparisons, α, days and replicates. Every figure is the share of
    seasons that have called the edge by that day.
    """
    rules = None if options.file is None else read_rules(options.file)[1]
    _fill(options, rules)
    outline = SeasonOutline(
        options.models,
        options.sharpe[0],
        options.volatility / 100,
        options.noise / 100,
        options.leverage,
        options.days,
        NO_SEASON if rules is None else rules.board,
    )
    days = [*(each for each in DAYS_SHOWN if each < options.days), options.days][-SHOWN_MAX:]
    powers: list[tuple[float, Power]] = []
    progress = Progress(0, len(options.sharpe) * len(options.replicates) * len(outline.questions), "plans")
    for sharpe in options.sharpe:
        for power in plan_season(outline._replace(sharpe=sharpe), options.replicates, days, options.seasons):
            powers.append((sharpe, power))
            progress.show(len(powers))
    progress.end()
    value = {
        "comparisons": outline.family,
        "alpha": outline.rules.level,
        "days": days,
        "powers": [{"sharpe": sharpe, **power._asdict()} for sharpe, power in powers],
    }
    return Result(value, list(_lines(outline, days, powers)), EXIT_DONE)


def _lines(outline: SeasonOutline, days: Sequence[int], powers: Sequence[tuple[float, Power]]) -> Iterator[str]:
    entrants = "1 entrant" if outline.models == 1 else f"{outline.models} entrants"
    yield f"{entrants}, {outline.family} comparisons at α {outline.rules.level:g}: seasons that call the edge"
    heads = ("question", "Sharpe ratio", "replicates", *(f"{each} days" for each in days), "days for 80 %")
    rows = [
        (
            QUESTIONS[power.question],
            f"{sharpe:g}",
            str(power.replicates),
            *(f"{100 * share:.0f} %" for share in power.called),
            "more" if power.days_needed is None else str(power.days_needed),
        )
        for sharpe, power in powers
    ]
    yield from table(heads, rows)


def _fill(options: argparse.Namespace, rules: SeasonRules | None) -> None:
    """Fill missing options from the rules.

    :raises SettingsError: an option is missing or out of range
    """
    if options.models is None and rules is not None and rules.entrants:
        options.models = len(rules.entrants)
    if options.days is None:
        options.days = _DAYS if rules is None else max(1, rules.hours // HOURS_PER_DAY)
    if options.replicates is None:
        options.replicates = _REPLICATES if rules is None else (rules.replicates,)
    if options.models is None:
        whose = "the file names no entrants, so" if rules is not None else "without a file"
        raise SettingsError([f"--models is needed: {whose} the number of entrants is unknown"])
    problems = [
        f"--{name}: {value:g} is not from {low} to {high}"
        for name, (low, high) in _BOUNDS.items()
        for value in np.atleast_1d(getattr(options, name))
        if not low <= value <= high
    ]
    if problems:
        raise SettingsError(problems)


def read_rules(file: Path, terms: ServiceTerms | None = None) -> tuple[str, SeasonRules]:
    """Return the text of a season file and its rules, validated on their own and for a service (None: any).

    :raises SettingsError: the rules are wrong; lists every error, its line, and the allowed values
    """
    text, document = read_toml(file)
    issues = list(struct_issues(SeasonRules, document))
    if not issues:
        rules = msgspec.convert(document, SeasonRules)
        issues = [*rule_issues(rules), *(() if terms is None else term_issues(rules, terms))]
        if not issues:
            return text, rules
    raise located(file, text, issues)
