"""The commands of seasons: what one can find out before it is run, its opening, its amendments, and its state."""

import argparse
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from trader.commands.command import EXIT_DONE, EXIT_WRONG_SETTINGS, Result, command, moment, print_result, table
from trader.commands.database import TargetDatabase, database_command
from trader.commands.toml_lines import located, read_toml, struct_issues
from trader.domain.models import Line
from trader.domain.portfolio.evidence import comparisons_among
from trader.domain.portfolio.plan import Question, SeasonOutline, plan_season
from trader.domain.portfolio.seasons import (
    Season,
    SeasonRules,
    entrant_issues,
    rule_issues,
    term_issues,
)
from trader.errors import InvalidInput, SettingsError
from trader.services.portfolio import seasons as service
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.pool import Connection
from trader.store.portfolio.analytics import select_account_runs
from trader.store.portfolio.seasons import select_seasons

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


def _file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a TOML file of the rules")
    parser.add_argument("--demo", action="store_true", help="the service runs with --demo")


def _amend_arguments(parser: argparse.ArgumentParser) -> None:
    _file_arguments(parser)
    parser.add_argument("--reason", type=_reason, required=True, help="why, which every board shows")


def _reason(text: str) -> str:
    try:
        return msgspec.convert(text, Line)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@database_command("season open", example="trader season open season.toml", arguments=_file_arguments, changes=True)
async def open_season(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Open a season by the rules of a file, which are frozen from then on.

    It has to begin later. Nothing is opened when a rule is wrong, or not kept by the service.
    """
    return await _change(options, target, "Opened", service.open_season)


@database_command(
    "season amend",
    example='trader season amend season.toml --reason "SOL was delisted"',
    arguments=_amend_arguments,
    changes=True,
)
async def amend_season(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Change the rules of the open season to those of a file; the amendment is shown for good."""
    return await _change(options, target, "Amended", partial(service.amend_season, reason=options.reason))


async def _change(
    options: argparse.Namespace,
    target: TargetDatabase,
    done: str,
    change: Callable[[Connection, SeasonRules], Awaitable[Season]],
) -> Result:
    try:
        text, rules = _read_rules(options)
        async with target.database.transaction() as conn:
            await _check(conn, options.file, text, rules)
            try:
                season = await change(conn, rules)
            except InvalidInput as error:
                raise located(options.file, text, error.issues) from None
    except SettingsError as error:
        lines = ["Nothing was changed:", *(f"  {problem}" for problem in error.problems)]
        return Result({"problems": error.problems}, lines, EXIT_WRONG_SETTINGS)
    return Result(_value(season), [f"{done} {season.title}.", *_lines(season)])


@database_command("season show", example="trader season show")
async def show_seasons(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show every season: its rules, the digest of each record, and its amendments."""
    async with target.reading() as conn:
        seasons = await select_seasons(conn)
    lines = [line for season in seasons for line in (season.title, *_lines(season))]
    return Result({"seasons": list(map(_value, seasons))}, lines or ["There is no season."])


def _read_rules(options: argparse.Namespace) -> tuple[str, SeasonRules]:
    """Return the text of the file and its rules, which by themselves and with the settings are right.

    :raises SettingsError: with every mistake, its line, and what is allowed there
    """
    text, document = read_toml(options.file)
    issues = list(struct_issues(SeasonRules, document))
    if not issues:
        settings = Settings.load(os.environ, options.env_file, demo=options.demo)
        rules = msgspec.convert(document, SeasonRules)
        issues = [*rule_issues(rules), *term_issues(rules, service.terms_of(settings))]
        if not issues:
            return text, rules
    raise located(options.file, text, issues)


async def _check(conn: Connection, file: Path, text: str, rules: SeasonRules) -> None:
    models = await select_models(conn)
    capitals = {run.account_id: run.initial_capital for run in await select_account_runs(conn)}  # the last of each
    if issues := list(entrant_issues(rules, models, capitals)):
        raise located(file, text, issues)


def _value(season: Season) -> dict[str, Any]:
    return {
        "season": season.number,
        "rules": season.rules,
        "digest": season.digest.hex(),
        "openedAt": season.records[0].at,
        "closedAt": season.closed_at,
        "seedDigest": season.records[0].seed_digest,
        "seed": season.seed,
        "amendments": [{**each._asdict(), "digest": each.digest.hex()} for each in season.amendments],
    }


def _lines(season: Season) -> Iterator[str]:
    rules, opened = season.rules, season.records[0]
    yield f"  from {moment(rules.start)} to {moment(rules.end)}, {', '.join(rules.compare)} at α {rules.alpha:g}"
    yield f"  opened at {moment(opened.at)}, SHA-256 {season.digest.hex()}"
    if opened.seed_digest is not None:
        yield f"  seed of the market: secret, SHA-256 {opened.seed_digest}"
    if season.seed is not None:
        yield f"  seed of the market: {season.seed}{', known from the start' if opened.seed else ''}"
    for amendment in season.amendments:
        yield f"  amended at {moment(amendment.at)}: {amendment.reason}, SHA-256 {amendment.digest.hex()}"
        yield from (f"    {name}: {before} → {after}" for name, before, after in amendment.changes)
    if season.closed_at is not None:
        yield f"  closed at {moment(season.closed_at)}"
