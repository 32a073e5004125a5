"""Procedures of `operations`: the operator's halt, which works without the database, its end, and the activity."""

from datetime import timedelta
from typing import Final

from msgspec import UNSET

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.schemas.common import Empty
from trader.api.schemas.operations import (
    ApproveInput,
    ApproveOutput,
    GetActivityOutput,
    GetLadderOutput,
    HaltInput,
    HaltOutput,
    LadderRow,
    ResumeInput,
    ResumeOutput,
)
from trader.core.clock import floor_time
from trader.core.errors import NotFound, Precondition, SettingsError, StartError
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


ACTIVITY_DAYS: Final = 7
"""The days that the activity covers, with today (UTC)."""

_DAY: Final = timedelta(days=1)


@procedure("operations.halt", changes=True, operates=True)
async def halt(context: Context, request: HaltInput) -> HaltOutput:
    """Halt an account or, without `accountId`, all: from now on, nothing may open or add; reducing stays allowed.

    The halt is in force before it is written, so it works without the database. It holds until an operator lifts it.

    :raises NotFound: there is no such account.
    :raises Precondition: `place` names other data than this service's.
    """
    account_id = _account_of(context, request)
    taken = await context.operations.halt(account_id, request.reason, request.by)
    return HaltOutput(
        account_id=account_id or UNSET,
        kept_in=taken.kept_in,
        message=f"Halted {scope(account_id)}: {MESSAGES[taken.kept_in]}.",
        command_id=UNSET if taken.command is None else str(taken.command.id),
    )


@procedure("operations.flatten", changes=True, operates=True)
async def flatten(context: Context, request: HaltInput) -> HaltOutput:
    """Halt like `operations.halt`, cancel every resting order, and close every position at market: an addition to the
    specification. It needs the database.

    :raises NotFound: there is no such account.
    :raises Precondition: `place` names other data than this service's.
    """
    account_id = _account_of(context, request)
    command = await context.operations.flatten(account_id, request.reason, request.by)
    message = f"Halted {scope(account_id)}. Orders are being canceled and positions closed."
    return HaltOutput(account_id=account_id or UNSET, kept_in="database", message=message, command_id=str(command.id))


@procedure("operations.resume", changes=True, operates=True)
async def resume(context: Context, request: ResumeInput) -> ResumeOutput:
    """Lift the halt of an account or, without `accountId`, the halt of all accounts: an addition to the specification.

    :raises NotFound: there is no such account.
    """
    account_id = _known_account(context, request.account_id, "changed")
    lifted = await context.operations.resume(account_id, request.reason, request.by)
    whom = scope(account_id)
    message = f"Lifted the halt of {whom} ({', '.join(lifted)})." if lifted else f"No halt of {whom}."
    return ResumeOutput(account_id=account_id or UNSET, lifted=[*lifted], message=message)


@procedure("operations.approve", changes=True, operates=True)
async def approve(context: Context, request: ApproveInput) -> ApproveOutput:
    """Approve an order that waits for a person, an entrant's step up on the ladder, or its return after a step down: an
    addition to the specification.

    :raises NotFound: no order waits under the name, and no entrant has it.
    :raises Precondition: the entrant lacks something.
    """
    try:
        return ApproveOutput(message=await context.approvals.approve(request.name, request.by))
    except (SettingsError, StartError) as error:
        raise Precondition(str(error)) from error


@procedure("operations.getLadder", operates=True, private=True)
async def get_ladder(context: Context, _: Empty) -> GetLadderOutput:
    """Return where each entrant stands between paper and money: an addition to the specification."""
    found = {} if context.settings.ladder_file is None else await context.approvals.standings()
    return GetLadderOutput(
        entrants=[LadderRow(name=name, step=each.step, text=str(each)) for name, each in found.items()]
    )


@procedure("operations.getActivity", operates=True, private=True, long=True)
async def get_activity(context: Context, _: Empty) -> GetActivityOutput:
    """Return costs by day, failures and latencies by model, refusals by rule, halts, alarms and the drift between paper
    and venue of the last seven days (UTC): an addition to the specification.
    """
    since = floor_time(context.clock.now(), _DAY) - (ACTIVITY_DAYS - 1) * _DAY
    drift = await context.approvals.drift(since)
    activity = await context.operations.activity(since)
    return GetActivityOutput.from_attributes(since=since, drift=drift, **activity)


def _account_of(context: Context, request: HaltInput) -> str | None:
    """Return the account to halt, None for all.

    :raises NotFound: there is no such account.
    :raises Precondition: `place` names other data than this service's.
    """
    url = context.settings.database_url
    if request.place is not None and request.place != place_of_data(None if url is None else url.reveal()):
        raise Precondition("This service trades on other data than the caller's. Nothing was halted.")
    return _known_account(context, request.account_id, "halted")


def _known_account(context: Context, account_id: str | None, done: str) -> str | None:
    """Return the account that a request names, None for all of them, if this process trades.

    :raises NotFound: there is no such account.
    """
    if context.exchange.term is None:
        raise not_trading(context.settings, None)
    if account_id is not None and account_id not in {*context.exchange.accounts, *context.models.by_id}:
        raise NotFound(f"There is no account {account_id!r}. Nothing was {done}.")
    return account_id
