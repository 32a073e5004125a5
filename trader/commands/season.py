"""The commands of seasons: what one can find out before it is run, its opening and amendments, its state and result."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_SETTINGS,
    Result,
    command,
    moment,
    print_result,
    table,
)
from trader.commands.database import TargetDatabase, database_command
from trader.commands.reports import read_season
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
from trader.errors import InvalidInput, SettingsError, StartError
from trader.reports import season_page
from trader.reports.season_bundle import (
    CARD,
    Bundle,
    SeasonFacts,
    digest_code,
    read_bundle,
    read_facts,
    read_tables,
    records_of,
    write_bundle,
)
from trader.reports.season_card import Card, card_schema, differences, is_decided, make_card
from trader.results import Format, Table, check_format
from trader.services.portfolio import seasons as service
from trader.services.portfolio.evidence import last_whole_hour
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.pool import Connection
from trader.store.portfolio.analytics import select_current_runs
from trader.store.portfolio.seasons import select_latest_season, select_seasons

DIFFERENCES_MAX: Final = 50
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


def _close_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--tables", choices=["csv", "parquet"], default="csv", help="form of the tables; default: csv")
    parser.add_argument("--demo", action="store_true", help="the service runs with --demo")


@database_command("season close", example="trader season close winter", arguments=_close_arguments, changes=True)
async def close_season(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Close the open season, and write its result into a new folder: card, schema, rows, and the report.

    Without an open season nothing is closed: the result is that of the current runs until the last whole hour. Whoever
    has the folder can compute the card again with `trader season check`.
    """
    check_format(options.tables)
    settings = Settings.load(os.environ, options.env_file, demo=options.demo)
    if options.folder.exists():
        raise StartError(f"{options.folder} exists already; the result needs a new folder.")
    report = await read_season(target.name, target)
    until = last_whole_hour(max(account.at for account in report.accounts))
    async with target.reading() as conn:
        latest = await select_latest_season(conn)
        season = None if latest is None or latest.closed_at is not None else latest
        if season is not None:
            report, until = report._replace(name=season.rules.name), min(until, season.rules.end)
        facts = await read_facts(conn, settings, report.name, season, until)
    tables = await read_tables(target.database, until)
    decided = season is not None and is_decided(await make_card(Bundle(facts, tables, {})), season.rules.compare)
    async with target.database.transaction() as conn:  # what cannot be written leaves the season open
        if season is not None:
            season = await service.close_season(conn, is_decided=decided)
            facts.records = records_of(season)
        try:
            card = await _write_result(options.folder, facts, tables, options.tables, season_page.page(report))
        except OSError as error:
            raise StartError(f"{error.filename or options.folder} cannot be written: {error.strerror}.") from None
    head = f"{season.title} is closed" if season is not None else "No season is open: the result is that of today"
    lines = [f"{head}, {moment(until)}: {len(card.accounts)} models.", f"{options.folder}: {', '.join(card.digests)}"]
    return Result({"folder": str(options.folder), "card": card}, lines)


async def _write_result(
    folder: Path, facts: SeasonFacts, tables: Mapping[str, Table], form: Format, report: str
) -> Card:
    write_bundle(folder, facts, tables, form)
    (folder / "report.html").write_text(report, encoding="utf-8")
    (folder / "card.schema.json").write_bytes(msgspec.json.format(msgspec.json.encode(card_schema())))
    card = await make_card(read_bundle(folder))
    (folder / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(card)))
    return card


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the result of a season")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


@command("season check", example="trader season check winter", arguments=_check_arguments)
def check(options: argparse.Namespace) -> int:
    """Compute the card of a season again from the other files of its folder, and report every field that differs.

    It needs neither the service nor its database.
    """
    bundle = read_bundle(options.folder)
    try:
        written = msgspec.json.decode((options.folder / CARD).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError([f"{options.folder / CARD} cannot be read: {error}"]) from None
    wrong = list(differences(written.get("digests"), bundle.digests, "digests"))
    if not wrong:  # rows that were changed need not fit together
        computed = msgspec.json.decode(msgspec.json.encode(asyncio.run(make_card(bundle))))
        wrong = list(differences(written, computed))
    lines = [f"  {each.field}: {each.written!r}; computed {each.computed!r}" for each in wrong[:DIFFERENCES_MAX]]
    if len(wrong) > DIFFERENCES_MAX:
        lines.append(f"  and {len(wrong) - DIFFERENCES_MAX} more")
    if (own := digest_code()) != bundle.facts.code:
        lines.append(
            f"The card was made by another program: trader {bundle.facts.code.version}; this is {own.version}."
        )
    lines.append(
        f"NOT the card of these files: {len(wrong)} fields differ." if wrong else "The card is that of its files."
    )
    value = {"isSame": not wrong, "differences": [each._asdict() for each in wrong]}
    return print_result(Result(value, lines, EXIT_FAILED if wrong else EXIT_DONE), as_json=options.json)


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
    capitals = {model_id: run.initial_capital for model_id, run in (await select_current_runs(conn)).items()}
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
