"""The commands tokens add, list, rotate and revoke: operators' tokens, in addition to those in the settings."""

import argparse
from typing import Any, Final

import asyncpg

from trader.commands.command import Result, allowed, moment, table
from trader.commands.credentials import id_argument, replace_secret, scopes_argument, shown_secret
from trader.commands.database import TargetDatabase, database_command
from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.database.pool import Connection
from trader.operations.access import issue
from trader.operations.domain.credentials import OPERATOR_MARK, Credential, Scope
from trader.operations.sql.credentials import insert_credential, select_credentials, update_credentials_revoked

_ONCE: Final = "This is the only time that the token is shown; the database keeps its digest."


def _name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the token, as `trader tokens list` shows it")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=id_argument, metavar="NAME", help="its user: a person or a program")
    parser.add_argument(
        "--scopes", type=scopes_argument, required=True, help="scopes of the token, with commas: read, trade, operate"
    )


@database_command(
    "tokens add", example="trader tokens add dashboard --scopes read", arguments=_add_arguments, changes=True
)
async def add(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Create a token for an operator or a program, and print it once; it works within a second."""
    token, credential = issue(OPERATOR_MARK, options.name, SystemClock().now(), options.scopes)
    try:
        async with target.database.transaction() as conn:
            await insert_credential(conn, credential)
    except asyncpg.UniqueViolationError:
        raise StartError(
            f"The token {options.name!r} already exists; `trader tokens rotate` replaces it with a new one."
        ) from None
    return _with_token(options.name, token, credential.scopes)


def _with_token(name: str, token: str, scopes: tuple[Scope, ...]) -> Result:
    lines = [f"{name} may {', '.join(scopes)} with the token:", "", f"  {token}", "", _ONCE]
    return Result({"name": name, "scopes": scopes, "token": token}, lines)


@database_command("tokens list", example="trader tokens list")
async def list_tokens(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List the tokens of operators with their first characters and scopes."""
    async with target.reading() as conn:
        tokens = (await _present_tokens(conn)).values()
    heads = ("name", "token", "scopes", "since")
    rows = [(token.name, shown_secret(token), " ".join(token.scopes), moment(token.created_at)) for token in tokens]
    return Result({"tokens": [_token_json(token) for token in tokens]}, table(heads, rows, text_columns=4))


async def _present_tokens(conn: Connection) -> dict[str, Credential]:
    """Return the latest token of each name, which may be revoked."""
    return {token.name: token for token in await select_credentials(conn) if token.account_id is None}


def _token_json(token: Credential) -> dict[str, Any]:
    return {
        "name": token.name,
        "tokenPrefix": token.prefix,
        "scopes": token.scopes,
        "createdAt": token.created_at,
        "revokedAt": token.revoked_at,
    }


@database_command("tokens rotate", example="trader tokens rotate dashboard", arguments=_name_argument, changes=True)
async def rotate(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Replace a token, with the same scopes, and print it once; the old one stops working within a second."""
    async with target.database.transaction() as conn:
        before = await _token_of(conn, options.name)
        token = await replace_secret(conn, before)
    return _with_token(options.name, token, before.scopes)


@database_command("tokens revoke", example="trader tokens revoke dashboard", arguments=_name_argument, changes=True)
async def revoke(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Revoke a token permanently, within a second."""
    async with target.database.transaction() as conn:
        await _token_of(conn, options.name)
        count = await update_credentials_revoked(conn, options.name, None)
    line = f"The token {options.name} is revoked." if count else f"The token {options.name} was already revoked."
    return Result({"name": options.name, "revoked": count}, [line])


async def _token_of(conn: Connection, name: str) -> Credential:
    tokens = await _present_tokens(conn)
    if name not in tokens:
        raise StartError(f"There is no token {name!r}. Existing tokens: {allowed(sorted(tokens))}.")
    return tokens[name]
