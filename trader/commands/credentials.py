"""Keys of agents and tokens of operators on the command line: arguments, display and replacement."""

import argparse
from collections.abc import Callable
from typing import Any, Final

import msgspec

from trader.agents.domain.models import ModelId
from trader.core.clock import SystemClock
from trader.database.pool import Connection
from trader.operations.access import reissue
from trader.operations.domain.credentials import SCOPES, Credential, Scope
from trader.operations.sql.credentials import insert_credential, update_credentials_revoked


def argument_of(kind: Any, expected: str) -> Callable[[str], str]:
    """Return a parser for an argument that must match a type of the models file."""

    def parse(text: str) -> str:
        try:
            return str(msgspec.convert(text, kind))
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

    return parse


id_argument: Final = argument_of(ModelId, "1 to 64 letters, digits or any of . _ : -")


def scopes_argument(text: str) -> tuple[Scope, ...]:
    """Return the scopes that an argument names, in canonical order.

    :raises argparse.ArgumentTypeError: it names another, or none
    """
    names = {name.strip() for name in text.split(",")}
    if unknown := names.difference(SCOPES):
        raise argparse.ArgumentTypeError(
            f"there is no scope {min(unknown)!r}; expected any of {', '.join(SCOPES)}, separated by commas"
        )
    return tuple(scope for scope in SCOPES if scope in names)


def shown_secret(key: Credential) -> str:
    """Return the displayed form of a key or token: its first characters, and whether it was revoked."""
    return f"{key.prefix}…" if key.revoked_at is None else f"{key.prefix}… revoked"


async def replace_secret(conn: Connection, before: Credential) -> str:
    """Revoke a key or token and return its holder's new secret."""
    await update_credentials_revoked(conn, before.name, before.account_id)
    secret, credential = reissue(before, SystemClock().now())
    await insert_credential(conn, credential)
    return secret
