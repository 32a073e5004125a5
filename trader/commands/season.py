"""The commands of seasons: their opening and amendments, their state and their result."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from trader.commands.audit import anchors_argument, read_anchors
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_SETTINGS,
    Result,
    command,
    moment,
    print_result,
)
from trader.commands.database import TargetDatabase, database_command
from trader.commands.reports import read_season
from trader.commands.season_plan import read_rules
from trader.commands.toml_lines import located
from trader.domain.models import Line
from trader.domain.portfolio.seasons import (
    Season,
    SeasonRules,
    entrant_issues,
)
from trader.errors import InvalidInput, SettingsError, StartError
from trader.reports import season_page
from trader.reports.season_bundle import (
    CARD,
    Bundle,
    digest_code,
    read_bundle,
    read_facts,
    read_tables,
    records_of,
    write_bundle,
)
from trader.reports.season_card import Card, card_schema, differences, is_decided, make_card
from trader.reports.season_record import compare_record, read_record
from trader.results import Format, check_format
from trader.services.portfolio import seasons as service
from trader.services.portfolio.evidence import last_whole_hour
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.pool import Connection
from trader.store.portfolio.analytics import select_current_runs
from trader.store.portfolio.seasons import select_latest_season, select_seasons

DIFFERENCES_MAX: Final = 50


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
        settings = Settings.load(os.environ, options.env_file, demo=options.demo)
        text, rules = read_rules(options.file, service.terms_of(settings))
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
        record = await read_record(conn)
    bundle = Bundle(facts, await read_tables(target.database, season, until), record)
    decided = season is not None and is_decided(await make_card(bundle))
    async with target.database.transaction() as conn:  # what cannot be written leaves the season open
        if season is not None:
            season = await service.close_season(conn, season, is_decided=decided)
            facts.records = records_of(season)
        try:
            card = await _write_result(options.folder, bundle, options.tables, season_page.page(report))
        except OSError as error:
            raise StartError(f"{error.filename or options.folder} cannot be written: {error.strerror}.") from None
    head = f"{season.title} is closed" if season is not None else "No season is open: the result is that of today"
    lines = [f"{head}, {moment(until)}: {len(card.accounts)} models.", f"{options.folder}: {', '.join(card.digests)}"]
    return Result({"folder": str(options.folder), "card": card}, lines)


async def _write_result(folder: Path, bundle: Bundle, form: Format, report: str) -> Card:
    write_bundle(folder, bundle, form)
    (folder / "report.html").write_text(report, encoding="utf-8")
    (folder / "card.schema.json").write_bytes(msgspec.json.format(msgspec.json.encode(card_schema())))
    card = await make_card(read_bundle(folder))
    (folder / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(card)))
    return card


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the result of a season")
    anchors_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


@command("season check", example="trader season check winter", arguments=_check_arguments)
def check(options: argparse.Namespace) -> int:
    """Compute the card of a season again from the other files of its folder, and report every field that differs.

    Fills, equity, runs, entrants and rules are compared with the record in the folder, and that with anchors. It needs
    neither the service nor its database.
    """
    bundle = read_bundle(options.folder)
    anchors = [] if options.anchors is None else read_anchors(options.anchors)
    try:
        written = msgspec.json.decode((options.folder / CARD).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError([f"{options.folder / CARD} cannot be read: {error}"]) from None
    unrecorded: list[str] = []
    wrong = list(differences(written.get("digests"), bundle.digests, "digests"))
    if not wrong:  # rows that were changed need not fit together
        computed = msgspec.json.decode(msgspec.json.encode(asyncio.run(make_card(bundle))))
        wrong = [*differences(written, computed), *compare_record(bundle, anchors).differences]
        unrecorded = [f"{count} of {name}" for name, count in computed["unrecorded"].items() if count]
    lines = [f"Rows in no record: {', '.join(unrecorded)}."] if unrecorded else []
    lines += [f"  {each.field}: {each.written!r}; computed {each.computed!r}" for each in wrong[:DIFFERENCES_MAX]]
    if len(wrong) > DIFFERENCES_MAX:
        lines.append(f"  and {len(wrong) - DIFFERENCES_MAX} more")
    if (own := digest_code()) != bundle.facts.code:
        lines.append(
            f"The card was made by another program: trader {bundle.facts.code.version}; this is {own.version}."
        )
    lines.append(
        f"NOT the card of these files and their record: {len(wrong)} fields or rows differ."
        if wrong
        else "The card is that of its files, and no row contradicts the record."
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
