"""Procedures of `operations`: the operator's halt, which works without the database."""

from typing import Final

from msgspec import UNSET

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.schemas.operations import HaltInput, HaltOutput
from trader.core.errors import NotFound, Precondition
from trader.database.embedded.server import place_of_data
from trader.exchange.domain.halts import scope
from trader.exchange.halts import Keeper
from trader.exchange.protocol import not_trading

MESSAGES: Final[dict[Keeper, str]] = {
    "database": "it is in the database and holds until it is lifted",
    "file": "the database does not accept it yet; a file keeps it through a restart of this service on this machine",
    "memory": (
        "it is only in memory: the database does not accept it, and its file cannot be written. A restart would "
        "lose it. To be certain, stop the service"
    ),
}


@procedure("operations.halt", changes=True, operates=True)
async def halt(context: Context, request: HaltInput) -> HaltOutput:
    """Halt an account or, without `accountId`, all: from now on, nothing may open or add; reducing stays allowed.

    The halt is in force before it is written, so it works without the database. It holds until an operator lifts it.

    :raises NotFound: there is no such account.
    :raises Precondition: `place` names other data than this service's.
    """
    url = context.settings.database_url
    if request.place is not None and request.place != place_of_data(None if url is None else url.reveal()):
        raise Precondition("This service trades on other data than the caller's. Nothing was halted.")
    if context.exchange.term is None:
        raise not_trading(context.settings, None)
    account_id = request.account_id
    if account_id is not None and account_id not in {*context.exchange.accounts, *context.models.by_id}:
        raise NotFound(f"There is no account {account_id!r}. Nothing was halted.")
    taken = await context.operations.halt(account_id, request.reason, request.by)
    return HaltOutput(
        account_id=account_id or UNSET,
        kept_in=taken.kept_in,
        message=f"Halted {scope(account_id)}: {MESSAGES[taken.kept_in]}.",
        command_id=UNSET if taken.command is None else str(taken.command.id),
    )
