"""The command reproduce: executes the recorded calls of an invocation again and compares the books."""

import argparse
from collections.abc import Iterator
from uuid import UUID

from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result
from trader.commands.database import FoundDatabase, database_command
from trader.services.agents.reproduction import InvocationReproduction, reproduce_invocation

WORDS = {True: "same", False: "DIFFERENT", None: "unknown"}


def _invocation_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("invocation", type=UUID, help="the id of the invocation, as getInvocations returns it")


@database_command(
    "reproduce", example="trader reproduce 0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10", arguments=_invocation_argument
)
async def reproduce(options: argparse.Namespace, found: FoundDatabase) -> Result:
    """Execute the recorded calls of an invocation again and report whether the books come out the same.

    Every call is decoded again from the model's raw arguments, judged again by the guard on the account and marks of
    that moment, and executed again by the rules of the exchange on the recorded order books; the result is compared
    with the recorded one and with the rows of the books, digit for digit. Nothing is written. A call that a venue
    executed in live trading cannot be executed again: only the guard's verdict is compared, and the result stays
    unknown. Fails when they are not the same, or when not all of it is recorded.
    """
    reproduction = await reproduce_invocation(found.database, options.invocation)
    value = {
        "invocationId": reproduction.invocation.id,
        "isSame": reproduction.is_same,
        "calls": [{"number": call.number, "same": one.same, "detail": one.detail} for call, one in reproduction.calls],
    }
    return Result(value, _describe(reproduction), EXIT_DONE if reproduction.is_same else EXIT_FAILED)


def _describe(reproduction: InvocationReproduction) -> Iterator[str]:
    invocation = reproduction.invocation
    started_at = f"{invocation.started_at:%Y-%m-%d %H:%M:%S} UTC"
    yield f"{invocation.model_id}, {started_at}, {invocation.status}, {len(reproduction.calls)} calls"
    for call, found in reproduction.calls:
        name = call.type if call.metadata["raw"] is None else call.metadata["raw"]["name"]
        yield f"  {call.number}. {name} ({call.status}): {WORDS[found.same]}: {found.detail}"
    if reproduction.is_same:
        yield "The books come out the same."
    elif any(found.same is False for _, found in reproduction.calls):
        yield "The books do NOT come out the same."
    else:
        yield "Not all inputs of the invocation are recorded; the rest comes out the same."
