"""The commands report and drift: HTML reports on a season, and on paper prices versus venue fills."""

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from trader.agents.sql.models import select_models
from trader.api.dashboard.reports import report_page
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, table
from trader.commands.database import TargetDatabase, database_command
from trader.core.errors import StartError
from trader.core.files import replace_file
from trader.core.money import counted
from trader.live import recorded_books
from trader.live.domain.drift import LATENCIES, SIZES
from trader.live.sql import drift as drift_store
from trader.live.sql.drift import DriftFigures, Uncompared
from trader.portfolio.evidence import Field, last_whole_hour, make_report
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.seasons import read_accounts
from trader.seasons.page import page
from trader.seasons.sql import report as store
from trader.seasons.standings import SeasonReport, make_standings


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="name of the season, for the title; default: the database")
    parser.add_argument("output", nargs="?", type=Path, default=Path("season.html"), help="default: season.html")


@database_command("report", example="trader lab report season.html --name Spring", arguments=_report_arguments)
async def report(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Render the current runs as one HTML file.

    It has equity curves, drawdowns, trades, costs, the leaderboard and evidence. The result of a season has its own
    report.

    Fails if the books do not explain the equity; the report names the accounts.
    """
    season = await read_season(options.name or target.name, target)
    _write(options.output, page(season))
    lines = [f"{options.output}: {counted(len(season.standings), 'model')}, {counted(len(season.trades), 'trade')}"]
    if season.unvalued:
        names = ", ".join(model.id for model in season.unvalued[:10])
        lines.append(
            f"Excluded from all figures, without a snapshot yet: {counted(len(season.unvalued), 'model')}: {names}"
        )
    if season.unexplained:
        lines.append(f"NOT explained by the books: the equity of {counted(len(season.unexplained), 'account')}")
    value = {
        "file": str(options.output),
        "models": len(season.standings),
        "trades": len(season.trades),
        "unvalued": [model.id for model in season.unvalued],
        "unexplained": [account.model_id for account in season.unexplained],
    }
    return Result(value, lines, EXIT_FAILED if season.unexplained else EXIT_DONE)


async def read_season(name: str, target: TargetDatabase) -> SeasonReport:
    """Return the content of the report on the current runs.

    :raises StartError: there is nothing to report
    """
    current = CurrentRuns(target.database)
    runs = await current.refresh()
    async with target.database.reading() as conn:
        models, past = {model.id: model for model in await select_models(conn)}, await read_accounts(conn)
        accounts = await store.select_report_accounts(conn, models, runs)
    if not accounts:
        raise StartError(f"{target.place} has no model with a snapshot: there is nothing to report.")
    until = last_whole_hour(max(account.at for account in accounts))  # in market time, which may be a replay's
    evidence = await make_report(Field(until, models, runs, current.baselines, accounts=past))
    return SeasonReport(name, make_standings(accounts, runs), models, runs, evidence)


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from None


COLUMNS: Final = ("market", "side", "size", "latency", "fills", "mean", "median", "p95", "worst")

FILLS = "Each fill of the venue, simulated on the book at which its order was sent."
SHADOW = "Each order in shadow, signed and not sent, on the venue's book 300 ms later, against its fill on paper."
BOOKS = (
    "Orders of 500, 5,000, 50,000 and 500,000 on the recorded book, every 10 seconds, and on the book that the "
    "market model generates around the same mid."
)


class DriftSection(NamedTuple):
    """A table of the drift. `compared` describes the comparison, `unit` the items. The last figures are totals."""

    title: str
    compared: str
    unit: str
    figures: Sequence[DriftFigures]
    notes: Sequence[str]


def _drift_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, metavar="N", help="only the last N days; default: all")
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="also compare the market model with its books")
    parser.add_argument("output", nargs="?", type=Path, default=Path("drift.html"), help="default: drift.html")


@database_command("drift", example="trader lab drift drift.html --days 7", arguments=_drift_arguments)
async def drift(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Report the drift between paper and venue.

    It is the error of each fill against its simulation, in basis points.

    Positive means that the venue was more expensive than paper. p95 and worst refer to absolute errors.

    With a recording of the venue's market, it also simulates orders of four sizes on the recorded and the model books.
    """
    since = datetime(1970, 1, 1, tzinfo=UTC)
    if options.days is not None:
        since = datetime.now(UTC) - timedelta(days=options.days)
    async with target.database.reading() as conn:
        figures = await drift_store.select_drift_figures(conn, since)
        shadow = await drift_store.select_drift_figures(conn, since, of_shadow=True)
        uncompared = await drift_store.select_uncompared(conn, since)
    sections = [DriftSection("Fills of the venue", FILLS, "fills", figures, _notes_of(uncompared))] if figures else []
    sections += [DriftSection("Orders in shadow", SHADOW, "orders", shadow, ())] if shadow else []
    value: dict[str, object] = {"file": str(options.output), "figures": figures, "uncompared": uncompared}
    value["shadow"] = shadow
    notes: Sequence[str] = ()
    if options.recording is not None:
        books = await recorded_books.compare(options.recording, since)
        value["books"] = books
        notes = recorded_books.notes_of(books)
        if books.figures:
            sections.append(DriftSection("Recorded books", BOOKS, "orders", books.figures, notes))
            notes = []
    if not sections:
        recorded = "" if options.recording is None else f", and {options.recording} has no comparable book"
        reasons = "; ".join(["there is nothing to compare", *notes])
        raise StartError(f"{target.place} has no simulated venue fill{recorded}: {reasons}.")
    shown = [each._asdict() | {"figures": [figures._asdict() for figures in each.figures]} for each in sections]
    data = {"name": target.name, "sizes": SIZES, "latencies": LATENCIES, "sections": shown}
    _write(options.output, report_page("drift", f"Paper versus venue: {target.name}", data))
    lines = [*(line for section in sections for line in _lines_of(section)), *notes]
    lines.append(
        f"{options.output}: {' and '.join(f'{section.figures[-1].fills} {section.unit}' for section in sections)}"
    )
    return Result(value, lines)


def _notes_of(uncompared: Uncompared) -> list[str]:
    counts = (
        (uncompared.too_large, "fills were larger than the visible book: no price on paper"),
        (uncompared.unsimulated, "fills were never simulated (in paper trading none are)"),
        (uncompared.unfilled, "orders were ended by the venue before they filled"),
    )
    charged = "" if uncompared.fees_bps is None else f"{uncompared.fees_bps:.2f} bp in fees, "
    charged += f"{uncompared.funding:.2f} in funding were charged"
    return [*(f"{count} {words}" for count, words in counts if count), charged]


def _lines_of(section: DriftSection) -> Iterator[str]:
    columns = [section.unit if column == "fills" else column for column in COLUMNS]
    yield from table(columns, (each.cells for each in section.figures), text_columns=4)
    yield from section.notes
