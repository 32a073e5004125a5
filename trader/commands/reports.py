"""The commands report and drift: HTML reports on a season, and on paper prices against venue fills."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from trader.clock import LockstepClock
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, table
from trader.commands.database import TargetDatabase, database_command
from trader.domain.portfolio.evidence import compare, comparisons_among, judge_family, missing_trades, state_return
from trader.domain.portfolio.returns import EquitySeries, ReturnSeries
from trader.domain.portfolio.statistics import EquityPoint, max_drawdown
from trader.errors import StartError
from trader.reports import drift as drift_report
from trader.reports import recorded_books, season_page
from trader.reports.season_page import Season, Standing
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.luck import NoLuck
from trader.services.portfolio.run_statistics import CurrentRuns
from trader.store.live import drift as drift_store
from trader.store.portfolio import season as store


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="of the season, for its title; default: the database")
    parser.add_argument("output", nargs="?", type=Path, default=Path("season.html"), help="default: season.html")


@database_command("report", example="trader report season.html --name Spring", arguments=_report_arguments)
async def report(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Render the current runs as one HTML file: equity curves, drawdowns, trades, costs, leaderboard and evidence.

    Fails when the books do not explain the equity; the report says of which accounts.
    """
    season = await read_season(options.name or target.name, target)
    _write(options.output, season_page.page(season))
    lines = [f"{options.output}: {len(season.standings)} models, {len(season.trades)} trades"]
    if season.unvalued:
        names = ", ".join(model.model_id for model in season.unvalued[:10])
        lines.append(
            f"Without a snapshot in their current run, so in no figure: {len(season.unvalued)} models: {names}"
        )
    if season.unexplained:
        lines.append(f"NOT explained by the books: the equity of {len(season.unexplained)} accounts")
    value = {
        "file": str(options.output),
        "models": len(season.standings),
        "trades": len(season.trades),
        "unvalued": [model.model_id for model in season.unvalued],
        "unexplained": [account.model_id for account in season.unexplained],
    }
    return Result(value, lines, EXIT_FAILED if season.unexplained else EXIT_DONE)


async def read_season(name: str, target: TargetDatabase) -> Season:
    """Return the content of the report on the current runs.

    :raises StartError: there is nothing to report
    """
    async with target.reading() as conn:
        accounts = await store.select_report_accounts(conn)
        hours = await store.select_report_hours(conn, [account.model_id for account in accounts])
        trades = await store.select_report_trades(conn)
        unvalued = await store.select_unvalued_models(conn)
    if not accounts:
        raise StartError(f"{target.place} has no model with a snapshot: there is nothing to report.")
    clock = LockstepClock(max(account.at for account in accounts))  # the time of its market, which may be a replay's
    evidence = await Evidence(target.database, CurrentRuns(target.database), NoLuck(), clock).report("run")
    return Season(name, make_standings(accounts, hours), unvalued, trades, evidence)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from None


def make_standings(
    accounts: Sequence[store.AccountReport], hours: Mapping[str, Sequence[EquityPoint]]
) -> list[Standing]:
    """Return the accounts with their statistics, best return first."""
    standings: list[Standing] = []
    series: dict[str, ReturnSeries | None] = {}
    for account in accounts:
        points, capital = hours.get(account.model_id, ()), float(account.initial_capital)
        fall = max_drawdown([capital, *(point.value for point in points)])
        returns = series[account.model_id] = _returns(points, capital)
        curve = [(point.hour, 100 * point.value / capital - 100) for point in points]
        evidence = state_return(returns, account.trades)
        standings.append(Standing(account, curve, evidence, fall.percent if fall else 0.0))
    standings.sort(
        key=lambda standing: (-standing.account.change / standing.account.initial_capital, standing.account.model_id)
    )
    statements = [
        compare(
            series[account.model_id],
            series[other.model_id],
            missing_trades(account.trades),
            missing_trades(other.trades),
        )
        for account, other in pairwise(standing.account for standing in standings)
    ]
    verdicts = judge_family(statements, comparisons_among(len(standings)))
    return [standing._replace(verdict=verdict) for standing, verdict in zip(standings, [*verdicts, None], strict=True)]


def _returns(points: Sequence[EquityPoint], capital: float) -> ReturnSeries | None:
    if not points:
        return None
    equity = EquitySeries(capital)
    equity.set(points)
    return equity.returns(points[-1].hour + timedelta(hours=1))


def _drift_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, metavar="N", help="only the last N days; default: all")
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="compare the market model with its books, too")
    parser.add_argument("output", nargs="?", type=Path, default=Path("drift.html"), help="default: drift.html")


@database_command("drift", example="trader drift drift.html --days 7", arguments=_drift_arguments)
async def drift(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Report the drift between paper and venue: the error of each fill against its simulation, in basis points.

    Positive is where the venue was dearer than paper. p95 is of the errors without sign, worst the largest of them.
    With the recording of a venue's market, orders of four sizes are tried on its books and on those of the model.
    """
    since = datetime(1970, 1, 1, tzinfo=UTC)
    if options.days is not None:
        since = datetime.now(UTC) - timedelta(days=options.days)
    async with target.reading() as conn:
        figures = await drift_store.select_drift_figures(conn, since)
        uncompared = await drift_store.select_uncompared(conn, since)
    sections = [drift_report.of_fills(figures, uncompared)] if figures else []
    value: dict[str, object] = {"file": str(options.output), "figures": figures, "uncompared": uncompared}
    notes: Sequence[str] = ()
    if options.recording is not None:
        books = await recorded_books.compare(options.recording, since)
        value["books"] = books
        notes = recorded_books.notes_of(books)
        if books.figures:
            sections.append(drift_report.of_books(books.figures, notes))
            notes = []
    if not sections:
        recorded = "" if options.recording is None else f", and {options.recording} no book that can be compared"
        reasons = "; ".join(["there is nothing to compare", *notes])
        raise StartError(f"{target.place} has no fill of a venue that was simulated{recorded}: {reasons}.")
    _write(options.output, drift_report.page(target.name, sections))
    lines = [*(line for section in sections for line in _lines_of(section)), *notes]
    lines.append(
        f"{options.output}: {' and '.join(f'{section.figures[-1].fills} {section.unit}' for section in sections)}"
    )
    return Result(value, lines)


def _lines_of(section: drift_report.Section) -> Iterator[str]:
    columns = [section.unit if column == "fills" else column for column in drift_report.COLUMNS]
    yield from table(columns, map(drift_report.cells, section.figures), text_columns=3)
    yield from section.notes
