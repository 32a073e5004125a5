"""The commands accounts and positions: accounts from their rows, valued at the last recorded prices."""

import argparse
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from trader.commands.command import EXIT_DONE, Result, allowed, moment, money, table
from trader.commands.database import FoundDatabase, database_command
from trader.commands.operate import operate
from trader.domain.exchange import account as figures
from trader.domain.exchange.account import Account, Position
from trader.domain.exchange.halts import Verb
from trader.domain.money import format_decimal
from trader.errors import StartError
from trader.store.database.pool import Connection
from trader.store.exchange.accounts import select_accounts, select_last_marks

Marks = Mapping[str, Decimal]


async def known_account(conn: Connection, account_id: str) -> str:
    """Return the id of an account that exists.

    :raises StartError: there is no such account; the message names those that there are
    """
    accounts = await select_accounts(conn)
    if account_id not in accounts:
        raise StartError(f"There is no account {account_id!r}. There are: {allowed(accounts)}.")
    return account_id


@database_command("accounts list", example="trader accounts list")
async def list_accounts(_: argparse.Namespace, found: FoundDatabase) -> Result:
    """List every account in its present run, with its equity at the last recorded prices."""
    accounts, marks = await _read(found)
    heads = ("account", "equity", "cash", "capital", "return %", "positions", "orders", "run")
    rows = []
    for one in accounts.values():
        equity = _equity(one, marks)
        gain = "unknown" if equity is None else f"{100 * (equity / one.run.initial_capital - 1):+.2f}"
        capital, held, resting = money(one.run.initial_capital), str(len(one.positions)), str(len(one.resting))
        rows.append((one.id, money(equity), money(one.cash), capital, gain, held, resting, str(one.run.number)))
    value = {"accounts": [_account_value(one, marks) for one in accounts.values()]}
    return Result(value, table(heads, rows))


def _account_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", metavar="ID", help="the account; that of a model has the model's id")


@database_command("accounts show", example="trader accounts show apex-rules", arguments=_account_argument)
async def show_account(options: argparse.Namespace, found: FoundDatabase) -> Result:
    """Show one account: its sums, positions and resting orders."""
    accounts, marks = await _read(found, options.account)
    one = accounts[options.account]
    return Result({"account": _account_value(one, marks)}, _describe(one, marks))


def _describe(one: Account, marks: Marks) -> Iterator[str]:
    run = one.run
    yield f"account    {one.id}, run {run.number} since {moment(run.started_at)}"
    yield f"equity     {money(_equity(one, marks))} {run.quote_currency}, of {money(run.initial_capital)} at first"
    yield f"cash       {money(one.cash)}"
    yield f"realized   {one.realized:+,.2f} before fees of {money(one.fees)} and funding of {one.funding:+,.2f}"
    if one.insurance:
        yield f"insurance  {money(one.insurance)}, losses beyond equity that were written off"
    if one.positions:
        yield from ("", *_position_table([(one, position) for position in one.positions.values()], marks))
    if one.resting:
        heads = ("market", "side", "left", "limit", "since")
        rows = [
            (
                each.symbol,
                each.side,
                format_decimal(each.remaining),
                format_decimal(each.limit_price),
                moment(each.created_at),
            )
            for each in one.resting
        ]
        yield from ("", *table(heads, rows, text_columns=2))


def _reset_arguments(parser: argparse.ArgumentParser) -> None:
    _account_argument(parser)
    parser.set_defaults(reason="reset by an operator")


@database_command(
    "accounts reset", example="trader accounts reset apex-rules", arguments=_reset_arguments, changes=True
)
async def reset_account(options: argparse.Namespace, found: FoundDatabase) -> Result:
    """Close the run of a simulated account at the market's prices and begin a new one with SIM_INITIAL_CAPITAL.

    The running service does it. What was traded before stays in the records of its run.
    """
    async with found.reading() as conn:
        await known_account(conn, options.account)
    return await operate(Verb.RESET, options, found)


def _positions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="of one account or model; default: all")


@database_command("positions", example="trader positions --account apex-rules", arguments=_positions_arguments)
async def positions(options: argparse.Namespace, found: FoundDatabase) -> Result:
    """List open positions, the oldest first, valued at the last recorded prices."""
    accounts, marks = await _read(found, options.account)
    held = [(account, position) for account in accounts.values() for position in account.positions.values()]
    held.sort(key=lambda pair: (pair[1].opened_at, pair[0].id, pair[1].symbol))
    value = {"positions": [{"accountId": account.id, **_position_value(one, marks)} for account, one in held]}
    return Result(value, _position_table(held, marks), EXIT_DONE)


def _position_table(held: list[tuple[Account, Position]], marks: Marks) -> Iterator[str]:
    heads = ("account", "market", "side", "quantity", "entry", "price", "notional", "unrealized", "stop", "target")
    rows = []
    for account, one in held:
        mark = marks.get(one.symbol)
        notional, gain = (None, None) if mark is None else (one.quantity * mark, one.unrealized(mark))
        stops = ["none" if price is None else f"{price:,.6g}" for price in (one.exit_plan.stop, one.exit_plan.target)]
        prices = [f"{one.entry_price:,.6g}", "unknown" if mark is None else f"{mark:,.6g}"]
        quantity = format_decimal(one.quantity)
        rows.append((account.id, one.symbol, one.side, quantity, *prices, money(notional), money(gain), *stops))
    return table(heads, rows, text_columns=3)


async def _read(found: FoundDatabase, account_id: str | None = None) -> tuple[dict[str, Account], Marks]:
    async with found.reading() as conn:
        if account_id is not None:
            await known_account(conn, account_id)
        return await select_accounts(conn, account_id), await select_last_marks(conn)


def _equity(account: Account, marks: Marks) -> Decimal | None:
    return figures.equity(account, marks) if figures.has_marks(account, marks) else None


def _account_value(one: Account, marks: Marks) -> dict[str, Any]:
    return {
        "accountId": one.id,
        "run": one.run,
        "equity": _equity(one, marks),
        "cashBalance": one.cash,
        "totalRealizedPnl": one.realized,
        "totalFees": one.fees,
        "totalFundingPnl": one.funding,
        "totalInsurance": one.insurance,
        "positions": [_position_value(position, marks) for position in one.positions.values()],
        "openOrders": one.resting,
    }


def _position_value(one: Position, marks: Marks) -> dict[str, Any]:
    mark = marks.get(one.symbol)
    return {
        "symbol": one.symbol,
        "side": one.side,
        "quantity": one.quantity,
        "entryPrice": one.entry_price,
        "leverage": one.leverage if one.leveraged else None,
        "currentPrice": mark,
        "unrealizedPnl": None if mark is None else one.unrealized(mark),
        "exitPlan": one.exit_plan,
        "openedAt": one.opened_at,
    }
