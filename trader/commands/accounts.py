"""The commands accounts and show positions: stored accounts, at the last recorded prices."""

import argparse
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from operator import itemgetter
from typing import Any, NamedTuple

from trader.agents.sql.models import select_models
from trader.commands.command import Result, allowed, listing, moment, money
from trader.commands.database import TargetDatabase, database_command
from trader.commands.operate import add_confirmation, ask_and_operate
from trader.core.errors import StartError
from trader.core.money import counted
from trader.database.pool import Connection
from trader.exchange.domain import account as figures
from trader.exchange.domain.account import Account, Position
from trader.exchange.domain.halts import Verb
from trader.exchange.sql.accounts import select_accounts, select_fill_count, select_last_marks


class Recorded(NamedTuple):
    """The last recorded prices by market, and the ids of the models."""

    marks: Mapping[str, Decimal]
    models: Collection[str]

    def is_manual(self, account: Account, position: Position) -> bool:
        """Return whether this is a model's position that was opened manually."""
        return account.id in self.models and position.invocation_id is None


async def known_account(conn: Connection, account_id: str) -> str:
    """Return the id of an account that exists.

    :raises StartError: there is no such account; the message lists the existing ones
    """
    accounts = await select_accounts(conn)
    if account_id not in accounts:
        raise StartError(f"There is no account {account_id!r}. Existing accounts: {allowed(accounts)}.")
    return account_id


@database_command("accounts list", example="trader accounts list")
async def list_accounts(_: argparse.Namespace, target: TargetDatabase) -> Result:
    """List every account in its current run, with its equity at the last recorded prices."""
    accounts, recorded = await _read(target)
    listed = [_account_value(account, recorded) for account in accounts.values()]
    columns = {
        "account": "accountId", "equity": "equity", "cash": "cashBalance", "capital": "run.initialCapital",
        "return %": "pnlPercent", "positions": "positions", "orders": "openOrders", "run": "run.number",
    }  # fmt: skip
    return Result({"accounts": listed}, listing(listed, columns))


def _account_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", metavar="ID", help="the account; a model's account has the model's id")


@database_command("accounts show", example="trader accounts show apex-rules", arguments=_account_argument)
async def show_account(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show one account: its balances, positions and resting orders."""
    accounts, recorded = await _read(target, options.account)
    account = accounts[options.account]
    return Result({"account": _account_value(account, recorded)}, _describe(account, recorded))


def _describe(account: Account, recorded: Recorded) -> Iterator[str]:
    run = account.run
    yield f"account    {account.id}, run {run.number} since {moment(run.started_at)}"
    equity = money(_equity(account, recorded))
    yield f"equity     {equity} {run.quote_currency}, of {money(run.initial_capital)} at first"
    yield f"cash       {money(account.cash)}"
    fees, funding = money(account.fees), f"{account.funding:+,.2f}"
    yield f"realized   {account.realized:+,.2f} before fees of {fees} and funding of {funding}"
    if account.insurance:
        yield f"insurance  {money(account.insurance)}, losses beyond equity, written off"
    if account.positions:
        yield from ("", *_position_table(_position_values([account], recorded)))
    if account.resting:
        columns = {"market": "symbol", "side": "side", "left": "remaining", "limit": "limitPrice", "since": "createdAt"}
        yield from ("", *listing(account.resting, columns, text_columns=2))


def _reset_arguments(parser: argparse.ArgumentParser) -> None:
    _account_argument(parser)
    add_confirmation(parser)
    parser.set_defaults(reason="reset by an operator")


@database_command(
    "accounts reset", example="trader accounts reset apex-rules", arguments=_reset_arguments, changes=True
)
async def reset_account(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Close the run of a simulated account at market prices and start a new one with SIM_INITIAL_CAPITAL.

    In live trading the account must be flat, and the new run starts with the venue's balance, as after a deposit. Asks
    for confirmation. The running service executes the reset. The trades of the closed run stay recorded.
    """
    async with target.database.reading() as conn:
        await known_account(conn, options.account)
    return await ask_and_operate(Verb.RESET, options, target)


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", metavar="ID", help="an account without a model")
    add_confirmation(parser)
    parser.set_defaults(reason="removed by an operator")


@database_command("accounts remove", example="trader accounts remove typo", arguments=_remove_arguments, changes=True)
async def remove_account(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Remove a simulated account that has never traded, with its resting orders, and free its place.

    Asks for confirmation. The running service removes the account; the next accepted order for its id opens it again.
    Accounts that have traded, and accounts of models, cannot be removed.
    """
    async with target.database.reading() as conn:
        account_id = await known_account(conn, options.account)
        if account_id in {model.id for model in await select_models(conn)}:
            raise StartError(
                f"{account_id!r} is a model's account and stays. `trader models remove {account_id}` removes the model."
            )
        if count := await select_fill_count(conn, account_id):
            raise StartError(f"{account_id!r} has {counted(count, 'fill')}; its record is kept. Nothing was changed.")
    return await ask_and_operate(Verb.REMOVE, options, target)


def _positions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="only this account or model; default: all")


@database_command(
    "show positions", example="trader show positions --account apex-rules", arguments=_positions_arguments
)
async def positions(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List open positions, oldest first, at the last recorded prices."""
    accounts, recorded = await _read(target, options.account)
    held = sorted(_position_values(accounts.values(), recorded), key=itemgetter("openedAt", "accountId", "symbol"))
    return Result({"positions": held}, _position_table(held))


def _position_values(accounts: Iterable[Account], recorded: Recorded) -> list[dict[str, Any]]:
    return [
        {"accountId": account.id, **_position_value(account, position, recorded)}
        for account in accounts
        for position in account.positions.values()
    ]


def _position_table(positions: list[dict[str, Any]]) -> Iterator[str]:
    columns = {
        "account": "accountId", "market": "symbol", "side": "side", "by hand": "manual", "quantity": "quantity",
        "entry": "entryPrice", "price": "currentPrice", "notional": "notional", "unrealized": "unrealizedPnl",
        "stop": "exitPlan.stop", "target": "exitPlan.target",
    }  # fmt: skip
    return listing(positions, columns, text_columns=4)


async def _read(target: TargetDatabase, account_id: str | None = None) -> tuple[dict[str, Account], Recorded]:
    async with target.database.reading() as conn:
        if account_id is not None:
            await known_account(conn, account_id)
        recorded = Recorded(await select_last_marks(conn), {model.id for model in await select_models(conn)})
        return await select_accounts(conn, account_id), recorded


def _equity(account: Account, recorded: Recorded) -> Decimal | None:
    return figures.equity(account, recorded.marks) if figures.has_marks(account, recorded.marks) else None


def _account_value(account: Account, recorded: Recorded) -> dict[str, Any]:
    equity = _equity(account, recorded)
    return {
        "accountId": account.id,
        "run": account.run,
        "equity": equity,
        "pnlPercent": None if equity is None else 100 * (equity / account.run.initial_capital - 1),
        "cashBalance": account.cash,
        "totalRealizedPnl": account.realized,
        "totalFees": account.fees,
        "totalFundingPnl": account.funding,
        "totalInsurance": account.insurance,
        "positions": [_position_value(account, position, recorded) for position in account.positions.values()],
        "openOrders": account.resting,
    }


def _position_value(account: Account, position: Position, recorded: Recorded) -> dict[str, Any]:
    mark = recorded.marks.get(position.symbol)
    return {
        "symbol": position.symbol,
        "side": position.side,
        "quantity": position.quantity,
        "entryPrice": position.entry_price,
        "leverage": position.leverage if position.leveraged else None,
        "currentPrice": mark,
        "notional": None if mark is None else position.notional(mark),
        "unrealizedPnl": None if mark is None else position.unrealized(mark),
        "exitPlan": position.exit_plan,
        "openedAt": position.opened_at,
        "manual": recorded.is_manual(account, position),
    }
