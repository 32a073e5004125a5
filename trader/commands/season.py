"""The commands of seasons: their opening and amendments, their state and their result."""

import argparse
import asyncio
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from trader.agents.domain.models import Line
from trader.agents.sql.models import select_models
from trader.agents.verification import read_links
from trader.commands.audit import anchors_argument, read_anchors
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_SETTINGS,
    Result,
    command,
    first,
    moment,
)
from trader.commands.database import TargetDatabase, database_command
from trader.commands.season_plan import read_rules
from trader.core.clock import iso
from trader.core.errors import InvalidInput, SettingsError, StartError
from trader.core.money import counted
from trader.database.pool import Connection
from trader.portfolio import seasons as service
from trader.portfolio.domain.seasons import Season, SeasonResult, SeasonRules, entrant_issues
from trader.portfolio.sql.analytics import select_current_runs
from trader.portfolio.sql.seasons import select_seasons
from trader.portfolio.tables import Format, check_format
from trader.seasons.bundle import CARD, RECORD, Basis, CardHead, digest_code, digest_files
from trader.seasons.card import Card, is_decided, judge, make_card, write_files
from trader.seasons.check import check_result
from trader.seasons.record_reader import RecordReader, season_tables
from trader.settings.settings import Settings
from trader.settings.toml_lines import located

DIFFERENCES_MAX: Final = 50
LINKS_MAX: Final = 500


def _file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a TOML file of the rules")
    parser.add_argument("--demo", action="store_true", help="the service runs with --demo")


def _amend_arguments(parser: argparse.ArgumentParser) -> None:
    _file_arguments(parser)
    parser.add_argument("--reason", type=_reason, required=True, help="the reason, which every board shows")


def _reason(text: str) -> str:
    try:
        return msgspec.convert(text, Line)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@database_command("season open", example="trader season open season.toml", arguments=_file_arguments, changes=True)
async def open_season(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Open a season with the rules in a file, which are then frozen.

    It must start in the future. The command fails if a rule is wrong or the service does not comply with it.
    """
    return await _change(options, target, "Opened", service.open_season)


@database_command(
    "season amend",
    example='trader season amend season.toml --reason "SOL was delisted"',
    arguments=_amend_arguments,
    changes=True,
)
async def amend_season(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Change the rules of the open season to those in a file; the amendment stays visible permanently."""
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
    """Close the open season, and write its result into a new folder: card, schema, rows, record and report.

    Anyone with the folder can derive the result again from the record in it with `trader season check`.
    """
    check_format(options.tables)
    if options.folder.exists():
        raise StartError(f"{options.folder} exists already; the result needs a new folder.")
    async with target.database.reading() as conn:
        season = await service.require_open(conn)
    try:
        options.folder.mkdir(parents=True)
    except OSError as error:
        raise StartError(f"{options.folder} cannot be created: {error.strerror}.") from None
    is_closed = False
    try:
        card = await _close(options.folder, options.tables, target, season)
        is_closed = True
    except OSError as error:
        raise StartError(f"{error.filename or options.folder} cannot be written: {error.strerror}.") from None
    finally:
        if not is_closed:  # an open season has no result
            shutil.rmtree(options.folder)
    lines = [
        f"{season.title} is closed with {counted(len(card.accounts), 'model')}, "
        f"{moment(datetime.fromisoformat(card.period.until))}.",
        f"{options.folder}: {', '.join([CARD, RECORD, *card.digests])}",
    ]
    return Result({"folder": str(options.folder), "card": card}, lines)


async def _close(folder: Path, form: Format, target: TargetDatabase, season: Season) -> Card:
    """Write the result of a season as the record has it, then close the season with the digest of its card."""
    reader = RecordReader()
    with (folder / RECORD).open("w", encoding="utf-8", newline="\n") as file:
        await _copy_links(file, reader, target)
        if not reader.seasons[season.number]:
            raise StartError(f"{season.title} is not in the record.")
        complete = reader.complete_until(season.rules)
        if complete is None:
            raise StartError(f"The record of {season.title} has no hour of equity yet.")
        until = min(complete, season.rules.end)
        head = CardHead(position=reader.position, digest=reader.digest.hex())
        code, tables = digest_code(), season_tables(reader, reader.season(season.number), until)
        judged = await judge(Basis(reader.season(season.number), until, head, code, tables))
        write_files(folder, judged, form)
        card = make_card(judged, digest_files(folder, form))
        encoded = msgspec.json.format(msgspec.json.encode(card))
        msgspec.json.decode(encoded, type=Card)  # the season closes only with a card that matches its schema
        (folder / CARD).write_bytes(encoded)
        result = SeasonResult(
            until=iso(until),
            position=head.position,
            head=head.digest,
            card=hashlib.sha256(encoded).hexdigest(),
            version=code.version,
            code=code.digest,
        )
        async with target.database.transaction() as conn:  # a failed write leaves the season open
            await service.close_season(conn, season, result, is_decided=is_decided(judged.report))
            await _copy_links(file, reader, target, conn)
    return card


async def _copy_links(
    file: TextIO, reader: RecordReader, target: TargetDatabase, conn: Connection | None = None
) -> None:
    """Copy the links after the last one read to a file, until the last one.

    :raises StartError: the rows of a decision are gone
    """
    while True:
        async with target.database.reading() if conn is None else nullcontext(conn) as reading:
            links = await read_links(reading, reader.position, LINKS_MAX)
        for link, text in links:
            if text is None:
                raise StartError(f"The decision at position {link.position} of the record is gone: `trader audit`.")
            reader.read(text)
            file.write(f"{text}\n")
        if not links:
            return


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the result of a season")
    anchors_argument(parser)


@command(
    "season check",
    example="trader season check winter --anchors anchors.jsonl",
    arguments=_check_arguments,
    compares=True,
)
def check(options: argparse.Namespace) -> Result:
    """Derive the result of a season again from the record in its folder, and report everything that differs.

    Only the record and the anchors are trusted: tables, card and report must be exactly what follows from them. The
    command needs neither the service nor its database.
    """
    anchors = [] if options.anchors is None else read_anchors(options.anchors)
    checked = asyncio.run(check_result(options.folder, anchors))
    wrong = checked.differences
    lines = [f"  {each.field}: {each.written!r:.200}; by the record {each.computed!r:.200}" for each in wrong]
    lines = first(lines, DIFFERENCES_MAX)
    if checked.judged is not None and (own := digest_code()) != checked.judged.basis.code:
        version = checked.judged.basis.code.version
        lines.append(f"The card was made by another program: trader {version}; this is {own.version}.")
    if checked.anchored < checked.links:
        since = f"after position {checked.anchored} " if checked.anchored else ""
        lines.append(f"No anchor covers the record {since}(--anchors): whether it was rebuilt there is unknown.")
    lines.append(
        f"NOT what the record says: {counted(len(wrong), 'difference')}."
        if wrong or checked.judged is None
        else f"Everything in {options.folder} follows from its record: {checked.judged.basis.season.title}."
    )
    primary = None if checked.judged is None else checked.judged.report.primary
    if checked.judged is not None and primary is not None:
        lines.append(f"Primary comparison, {checked.judged.basis.season.rules.primary}: {primary.word}.")
    value = {
        "isSame": not wrong,
        "differences": [each._asdict() for each in wrong],
        "anchored": checked.anchored,
        "primary": primary and primary.word,
    }
    return Result(value, lines, EXIT_FAILED if wrong else EXIT_DONE)


@database_command("season show", example="trader season show")
async def show_seasons(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show every season: its rules, the digest of each record, and its amendments."""
    async with target.database.reading() as conn:
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
    yield (
        f"  an hour's loss is at most {rules.hour_loss_max_percent:g} %, its gain at most "
        f"{rules.hour_gain_max_percent:g} %"
    )
    if rules.primary is not None:
        yield f"  primary comparison: {rules.primary}; all others are exploratory"
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
