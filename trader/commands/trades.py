"""The commands trades and board: completed trades and the leaderboard, read from the database."""

import argparse
from typing import get_args

from trader.api.schemas.analytics import LeaderboardDetails, LeaderboardRow
from trader.api.schemas.common import chosen_variant
from trader.api.schemas.trades import TradeView
from trader.commands.accounts import known_account
from trader.commands.command import Result, moment, money, table
from trader.commands.database import TargetDatabase, database_command
from trader.commands.models_file import variant_argument
from trader.domain.money import format_decimal
from trader.domain.portfolio.histories import WINDOWS, minute_end, value_account
from trader.services.portfolio.leaderboard import RankedEntrant, SortKey, make_board, make_entries
from trader.services.portfolio.run_statistics import CurrentRuns, count_contenders
from trader.store.agents.models import select_models
from trader.store.database.pool import Page
from trader.store.exchange.accounts import select_accounts, select_last_marks, select_lived_until
from trader.store.exchange.trades import select_account_trades, select_trades


def _trades_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="of one account or model; default: all")
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="the latest N, 1 to 500; default: 20")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 500:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 500, got {text!r}")
    return int(text)


@database_command("trades", example="trader trades --account apex-rules --limit 5", arguments=_trades_arguments)
async def trades(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List completed trades, the latest first."""
    page = Page(options.limit)
    async with target.reading() as conn:
        if options.account is None:
            listed = await select_trades(conn, page)
        else:
            listed = await select_account_trades(conn, [await known_account(conn, options.account)], page)
    heads = ("closed", "account", "market", "side", "why", "quantity", "entry", "exit", "net", "held")
    shown = [TradeView.of(trade) for trade in listed]
    rows = [
        (
            moment(trade.closed_at),
            trade.account_id,
            trade.symbol,
            trade.side,
            trade.close_reason,
            format_decimal(trade.quantity),
            f"{trade.entry_price:,.6g}",
            f"{trade.exit_price:,.6g}",
            f"{trade.net_pnl:+,.2f}",
            view.holding_time,
        )
        for trade, view in zip(listed, shown, strict=True)
    ]
    return Result({"trades": shown}, table(heads, rows, text_columns=5))


def _board_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", choices=list(WINDOWS), default="7d", help="default: 7d")
    parser.add_argument("--sort-by", choices=get_args(SortKey), default="pnlPercent", help="default: pnlPercent")
    parser.add_argument("--variant", type=_variant_or_all, default="all", help="default: all")


def _variant_or_all(text: str) -> str:
    return "all" if text.lower() == "all" else variant_argument(text).value


@database_command("board", example="trader board --window 24h", arguments=_board_arguments)
async def board(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Rank the models by their results within a window, at the last recorded prices."""
    runs = await CurrentRuns(target.database).refresh()
    async with target.reading() as conn:
        models = await select_models(conn)
        accounts = await select_accounts(conn)
        marks = await select_last_marks(conn)
        now = await select_lived_until(conn)
    variant = chosen_variant(options.variant)
    entrants = [
        RankedEntrant(model, runs[model.id], value.net_portfolio)
        for model in models
        if variant in (None, model.variant) and model.id in runs and now is not None
        if (value := value_account(accounts[model.id], marks, now)) is not None
    ]
    window, at = options.window, None if now is None else minute_end(now)
    entries = []
    if at is not None:
        single, contenders = make_entries(entrants, window, at), count_contenders(runs.values())
        entries = make_board(single, window, options.sort_by, at, contenders)
    heads = ("rank", "model", "variant", "return %", "95 % interval", "pnl", "drawdown %", "value", "trades")
    listed = [LeaderboardRow.of(entry, LeaderboardDetails.of(entry, options.sort_by)) for entry in entries]
    rows = [
        (
            "-" if row.rank is None else str(row.rank),
            row.model_id,
            row.variant,
            "unknown" if row.pnl_percent is None else f"{row.pnl_percent:+.2f}",
            "not yet" if row.ci95 is None else f"{row.ci95.low:+.2f} to {row.ci95.high:+.2f}",
            f"{row.pnl_absolute:+,.2f}",
            f"{row.max_drawdown:.2f}",
            money(row.end_value),
            str(row.trades_count),
        )
        for row in listed
    ]
    result = {"window": options.window, "asOf": now, "entries": listed}
    return Result(result, [f"{options.window} up to {moment(now)}", *table(heads, rows, text_columns=3)])
