"""The commands show trades, show board and export: completed trades, the leaderboard and tables of the database."""

import argparse
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, get_args

from trader.agents.models_file import variant_argument
from trader.agents.sql.models import select_models
from trader.api.schemas.analytics import LeaderboardDetails, LeaderboardRow
from trader.api.schemas.common import chosen_variant
from trader.api.schemas.trades import TradeView
from trader.commands.accounts import known_account
from trader.commands.command import Result, argument_of, listing, moment
from trader.commands.database import TargetDatabase, database_command
from trader.core.errors import StartError
from trader.database.pool import Page
from trader.exchange.sql.accounts import select_accounts, select_last_marks, select_lived_until
from trader.exchange.sql.trades import select_account_trades, select_trades
from trader.portfolio.analytics import in_window
from trader.portfolio.domain.histories import WINDOWS, minute_end, value_account
from trader.portfolio.leaderboard import RankedEntrant, SortKey, make_board, make_entries
from trader.portfolio.run_statistics import CurrentRuns, count_contenders
from trader.portfolio.seasons import read_standing
from trader.portfolio.sql.export import select_exported
from trader.portfolio.tables import check_format, empty
from trader.settings.forms import whole_number

_ALL: Final = 10**9
"""More trades than a database has."""


def _trades_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="only this account or model; default: all")
    parser.add_argument(
        "--limit", type=argument_of(whole_number(1, _ALL)), metavar="N", help="only the latest N; default: all"
    )


@database_command(
    "show trades", example="trader show trades --account apex-rules --limit 5", arguments=_trades_arguments
)
async def trades(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List completed trades, newest first."""
    page = Page(_ALL if options.limit is None else options.limit)
    async with target.database.reading() as conn:
        if options.account is None:
            listed = await select_trades(conn, page)
        else:
            listed = await select_account_trades(conn, [await known_account(conn, options.account)], page)
    shown = [TradeView.of(trade) for trade in listed]
    columns = {
        "closed": "closedAt", "account": "modelId", "market": "symbol", "side": "side", "why": "closeReason",
        "by hand": "manual", "quantity": "quantity", "entry": "entryPrice", "exit": "exitPrice", "net": "netPnl",
        "held": "holdingTime",
    }  # fmt: skip
    return Result({"trades": shown}, listing(shown, columns, text_columns=6))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--tables", choices=["csv", "parquet"], default="csv", help="form of the tables; default: csv")
    parser.add_argument("--account", metavar="ID", help="of one account or model; default: all")
    parser.add_argument("--days", type=float, metavar="N", help="only the last N days; default: all")


@database_command("export", example="trader export season --tables parquet", arguments=_export_arguments)
async def export(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Write trades, fills, equity by minute and decisions into a new folder.

    The tables are those of a backtest; `trader.results.load(FOLDER)` reads them as typed columns and DataFrames.
    """
    check_format(options.tables)
    since = datetime(1970, 1, 1, tzinfo=UTC)
    if options.days is not None:
        since = datetime.now(UTC) - timedelta(days=options.days)
    tables = empty()
    async with target.database.reading() as conn:
        account_id = None if options.account is None else await known_account(conn, options.account)
        for each in tables:
            async for row in select_exported(conn, each.name, since, account_id):
                each.add_row(dict(row))
    try:
        options.folder.mkdir(parents=True)
        for each in tables:
            each.write(options.folder, options.tables)
    except OSError as error:
        raise StartError(f"{error.filename or options.folder} cannot be written: {error.strerror}.") from None
    counts = {each.name: len(each) for each in tables}
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    return Result({"folder": str(options.folder), "rows": counts}, [f"{options.folder}: {listed}"])


def _board_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", choices=[*WINDOWS, "run"], default="7d", help="default: 7d")
    parser.add_argument("--sort-by", choices=get_args(SortKey), default="pnlPercent", help="default: pnlPercent")
    parser.add_argument("--variant", type=_variant_or_all, default="all", help="default: all")


def _variant_or_all(text: str) -> str:
    return "all" if text.lower() == "all" else variant_argument(text).value


@database_command("show board", example="trader show board --window 24h", arguments=_board_arguments)
async def board(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Rank the models by their results within a window, at the last recorded prices."""
    async with target.database.reading() as conn:
        models = await select_models(conn)
        accounts = await select_accounts(conn)
        marks = await select_last_marks(conn)
        now = await select_lived_until(conn)
        standing = await read_standing(conn, datetime.min.replace(tzinfo=UTC) if now is None else minute_end(now))
    runs = await CurrentRuns(target.database, standing.scope).refresh()
    present = [(model, runs[model.id]) for model in models if standing.has(model) and model.id in runs]
    variant, window, ended_at = chosen_variant(options.variant), options.window, standing.ended_at
    entries = []
    if now is not None:
        at = ended_at or minute_end(now)
        entrants = [
            RankedEntrant(
                model, run, run.worth_at(ended_at) if ended_at else value.net_portfolio, standing.absence_of(run)
            )
            for model, run in present
            if variant in (None, model.variant) and (value := value_account(accounts[model.id], marks, now)) is not None
        ]
        async with target.database.reading() as conn:
            entrants = await in_window(conn, entrants, window, at)
        single = make_entries(entrants, window, at, standing.rules)
        contenders = count_contenders(run for _, run in present)
        entries = make_board(single, window, options.sort_by, at, contenders, standing.board)
    columns = {
        "rank": "rank", "model": "modelId", "variant": "variant", "return %": "pnlPercent", "95 % from": "ci95.low",
        "to": "ci95.high", "pnl": "pnlAbsolute", "drawdown %": "maxDrawdown", "value": "endValue",
        "trades": "tradesCount", "under 1 min": "details.withinMinute",
    }  # fmt: skip
    listed = [
        LeaderboardRow.from_attributes(entry, details=LeaderboardDetails.of(entry, options.sort_by))
        for entry in entries
    ]
    as_of = ended_at or now
    result = {"window": window, "asOf": as_of, "entries": listed}
    lines = [f"{window} up to {moment(as_of)}", *([] if standing.season is None else [standing.season.summary])]
    return Result(result, [*lines, *listing(listed, columns, text_columns=3)])
