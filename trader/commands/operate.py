"""The operator's commands: halt, resume and flatten.

A command is a row in the database: a halt takes effect at once and survives restarts until it is lifted. The running
service reads the row within a second, executes it and writes the outcome, which the command waits for and prints. A
halt is first sent to the service, which enforces it even without the database.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

import aiohttp
import msgspec

from trader.api.schemas.common import ErrorBody
from trader.api.schemas.operations import HaltOutput
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    Result,
    command,
    first,
    moment,
    operator,
    service_addresses,
    show,
)
from trader.commands.database import TargetDatabase, add_database_options, database_command, run_in_database
from trader.core.clock import SystemClock
from trader.core.errors import DatabaseUnavailable, SettingsError, StartError, Unavailable
from trader.core.money import counted, format_decimal
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import place_of_data
from trader.database.pool import DENIED, Database
from trader.exchange.domain.halts import REASON_MAX, CommandOutcome, HaltCause, OperatorCommand, Verb, scope
from trader.exchange.sql import halts as store
from trader.exchange.sql.accounts import select_last_marks
from trader.operations.operator_commands import write_resume
from trader.operations.sql.status import select_obstacles
from trader.operations.supervisor import ServiceAddress
from trader.settings.settings import read_database_url

_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0
"""How long a command waits for a service that is starting or taking over."""

SILENT_S: Final = 3.0
"""How long a leading service may take to start a command; it checks for commands twice a second."""

_RESTART_S: Final = 60.0
"""How long a started command waits for the service to come back."""

_LIMIT_S: Final = 120.0
"""How long a command waits for its outcome; the service continues it after that."""

_BY_THE_SERVICE: Final = {Verb.RESET: "a new run has started", Verb.REMOVE: "the account is removed"}
"""Commands that only a running service executes, with their confirmation texts."""

_HALT_S: Final = 15.0
"""How long the service may take to halt at once: a second for the database, ten for a resting order that is locked."""

_WITHDRAWN: Final = "no service was running; nothing was cancelled or closed"


class Written(NamedTuple):
    """A written command and its time, the halts that it lifted, and whether its halt was already in force."""

    command: OperatorCommand
    at: datetime
    lifted: Sequence[HaltCause]
    was_halted: bool


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="one account; default: all")
    reason = "reason for the record and for rejected orders"
    parser.add_argument("--reason", type=_reason, default="requested by an operator", help=reason)


def _reason(text: str) -> str:
    if not 0 < len(text := text.strip()) <= REASON_MAX:
        raise argparse.ArgumentTypeError(f"expected 1 to {REASON_MAX} characters")
    return text


def _halt_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    add_database_options(parser)


@command("halt", example='trader halt --account apex-rules --reason "strange prices"', arguments=_halt_arguments)
async def halt(options: argparse.Namespace) -> Result:
    """Halt trading: no position is opened or increased.

    Orders that reduce, stops and closes stay allowed.

    The running service puts the halt in force at once, even if the database does not accept it. If no service answers
    at HOST and PORT, at SERVER_URL, or where this folder's services listen, the halt is written to the database.
    """
    taken = await _halt_at_service(options)
    if taken is None:
        return await run_in_database(partial(operate, Verb.HALT), options, changes=True)
    show(taken.message, on_stderr=options.json)
    value: dict[str, Any] = {"keptIn": taken.kept_in, "outcome": None}
    if taken.kept_in != "database" or not taken.command_id:
        return Result(value, [], EXIT_FAILED if taken.kept_in == "memory" else EXIT_DONE)
    halting = OperatorCommand(
        id=UUID(taken.command_id),
        verb=Verb.HALT,
        account_id=options.account,
        reason=options.reason,
        asked_by=operator(),
    )
    written = Written(halting, SystemClock().now(), [], was_halted=False)
    value["command"] = halting
    url = options.database_url or read_database_url(os.environ, options.env_file)
    if url is None and not EMBEDDED_FOLDER.exists():
        return Result(value, ["Its database is not known here; `trader status` shows what the service reports."])

    async def finish(_: argparse.Namespace, target: TargetDatabase) -> Result:
        return await _finish(written, value, target)

    return await run_in_database(finish, options)


async def _halt_at_service(options: argparse.Namespace) -> HaltOutput | None:
    """Have the service that leads on this database halt at once. Return None if none answers here.

    :raises StartError: the service knows no such account
    """
    url = options.database_url or read_database_url(os.environ, options.env_file)
    content = {"reason": options.reason, "by": operator()}
    if options.account is not None:
        content["accountId"] = options.account
    addresses: list[ServiceAddress] = []
    if options.database is None:  # the embedded one of several that it names may not be the service's
        with suppress(SettingsError):
            addresses = service_addresses(options)
    for address in addresses:
        # The service of this folder is meant, whatever database it uses, unless the caller names one.
        if not (address.is_of_folder and url is None):
            content["place"] = place_of_data(url)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HALT_S), headers=address.headers) as http,
                http.post(f"{address.url}/api/rpc/operations.halt", json=content, allow_redirects=False) as response,
            ):
                answer = await response.read()
            if response.status == HTTPStatus.OK:
                return msgspec.json.decode(answer, type=HaltOutput)
            refusal = msgspec.json.decode(answer, type=ErrorBody).error
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            continue  # nothing, or something else, answers there
        if response.status == HTTPStatus.NOT_FOUND:
            raise StartError(refusal)
        show(f"{address.url}: {refusal}", on_stderr=True)
    return None


@database_command("resume", example="trader resume --account apex-rules", arguments=_arguments, changes=True)
async def resume(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Lift the halt of an account or, without --account, the halt of all accounts."""
    return await operate(Verb.RESUME, options, target)


def _flatten_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    add_confirmation(parser)


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that shows the positions to close and asks for confirmation."""
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation, for scripts")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be closed, and at what price")


@database_command("flatten", example="trader flatten --dry-run", arguments=_flatten_arguments, changes=True)
async def flatten(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Halt, cancel all resting orders and close all positions at market, after confirmation."""
    return await ask_and_operate(Verb.FLATTEN, options, target)


async def ask_and_operate(verb: Verb, options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show what a command would close, ask for confirmation, and execute it; with --dry-run only show it.

    :raises StartError: there is no terminal, or the answer is no; nothing was changed
    """
    async with target.database.reading() as conn:
        if options.account is not None and not await store.select_known_account(conn, options.account):
            raise StartError(f"There is no account {options.account!r}. Nothing was changed.")
        exposures, marks = await store.select_exposures(conn, options.account), await select_last_marks(conn)
    lines = [_describe_exposure(exposure, marks) for exposure in exposures] or ["  no positions and no resting orders"]
    lines = first(lines)
    title = f"{verb} of {scope(options.account)} would close or cancel, at about the last recorded prices:"
    if options.dry_run:
        return Result({"wouldClose": exposures, "prices": marks}, [title, *lines, "Nothing was changed."])
    if not options.yes:
        show("\n".join([title, *lines]), on_stderr=True)
        if not sys.stdin.isatty():
            raise StartError(f"`{verb}` needs confirmation, and there is no terminal: add --yes. Nothing was changed.")
        show("Type yes to continue:", on_stderr=True)
        if (await asyncio.to_thread(sys.stdin.readline)).strip().lower() != "yes":
            raise StartError("Not confirmed. Nothing was changed.")
    return await operate(verb, options, target)


def _describe_exposure(exposure: store.Exposure, marks: Mapping[str, Decimal]) -> str:
    what = f"{exposure.account_id}: {exposure.side} {format_decimal(exposure.quantity)} {exposure.symbol}"
    if exposure.limit_price is not None:
        return f"  cancel {what}, resting at {format_decimal(exposure.limit_price)}"
    mark = marks.get(exposure.symbol)
    return f"  close {what} at " + ("an unknown price" if mark is None else format_decimal(mark))


async def operate(verb: Verb, options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Write a command, and wait for its outcome if a service may be running.

    :raises StartError: there is no such account
    """
    try:
        written = await _write(target.database, verb, options.account, options.reason)
    except DatabaseUnavailable as error:
        if error.cause == DENIED:
            raise
        raise StartError(await _describe_unwritten(target, verb, error)) from error
    # Report at once which halts are already in force: the outcome may take a minute.
    show(_describe_written(written), on_stderr=options.json)
    value = {"command": written.command, "lifted": written.lifted, "outcome": None}
    if verb is Verb.RESUME and not written.lifted:
        return await _with_halts(target.database, Result(value, [], EXIT_FAILED))
    return await _finish(written, value, target)


async def _describe_unwritten(target: TargetDatabase, verb: Verb, error: DatabaseUnavailable) -> str:
    """Return why a command was not written, who holds the locks, and how to stop trading now."""
    state = {Verb.HALT: "NOT halted, trading continues", Verb.FLATTEN: "NOT flattened, trading continues"}
    text = f"{state.get(verb, 'NOT done')}. {error}"
    with suppress(Unavailable):
        async with target.database.connection() as conn:
            text = " ".join([text, *(f"{each}." for each in await select_obstacles(conn))])
    if verb in (Verb.HALT, Verb.FLATTEN):
        text += " To stop now: `trader halt` in the folder of the service, or stop the service (SIGTERM)."
    return text


async def _finish(written: Written, value: dict[str, Any], target: TargetDatabase) -> Result:
    """Wait for the outcome of a written command if a service may be running, and describe it."""
    database, verb = target.database, written.command.verb
    try:
        is_served, outcome = (False, None) if target.is_alone else await _wait(database, written)
    except asyncio.CancelledError:  # by Ctrl+C
        show("\nStopped waiting; the command stays recorded, and the service continues it.", on_stderr=True)
        raise
    if outcome is None and (is_served or not await _withdraw(database, written.command)):
        who = "the service" if is_served else "a service that starts soon"
        line = f"It is NOT finished; {who} will continue it. See the log and the table `commands` for its outcome."
        return Result(value, [f"It was recorded at {moment(written.at)}.", line], EXIT_FAILED)
    if outcome is None:
        done, lines = await _describe_unserved(database, written.command)
    else:
        done, lines = not outcome.left and outcome.note is None, list(_describe_outcome(outcome, verb))
    result = Result({**value, "outcome": outcome}, lines, EXIT_DONE if done else EXIT_FAILED)
    return await _with_halts(database, result)


async def _write(database: Database, verb: Verb, account_id: str | None, reason: str) -> Written:
    by = operator()
    command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason=reason, asked_by=by)
    lifted: Sequence[HaltCause] = []
    is_new = True
    async with database.transaction() as conn:
        at = await store.select_now(conn)
        if account_id is not None and not await store.select_known_account(conn, account_id):
            raise StartError(f"There is no account {account_id!r}. Nothing was changed.")
        if verb is Verb.RESUME:
            lifted = await write_resume(conn, command)
        elif verb in (Verb.HALT, Verb.FLATTEN):
            is_new = await store.insert_halting_command(conn, command)
        else:
            await store.insert_command(conn, command)
    return Written(command, at, lifted, not is_new)


async def _wait(database: Database, written: Written) -> tuple[bool, CommandOutcome | None]:
    """Wait for the outcome and print the progress. Return whether a service is running, and the outcome if any.

    If a leading service does not respond, report that the command is recorded but not yet executed.
    """
    started_s = alive_s = time.monotonic()
    printed, taken, was_silent = "", False, False
    while (now_s := time.monotonic()) - started_s < _LIMIT_S:
        try:
            async with database.connection() as conn:
                state = await store.select_command_state(conn, written.command.id)
                alive_s = now_s if await store.select_has_leader(conn) else alive_s
        except Unavailable as error:
            news = f"waiting: {error}"
        else:
            assert state is not None, "nobody deletes commands"
            if state.taken and not taken and was_silent:
                show(f"  executed at {moment(SystemClock().now())}", on_stderr=True)
            if state.outcome is not None:
                return True, state.outcome
            taken, news = state.taken, state.progress or ""
            if not taken and now_s - started_s > SILENT_S:
                was_silent = True
                news = f"recorded at {moment(written.at)}, but not yet executed: the service does not respond"
            if taken and now_s - alive_s > _GRACE_S:
                news = "the service is gone; waiting for it to come back and continue"
        if news not in ("", printed):
            printed = news
            show(f"  {news}", on_stderr=True)
        if now_s - alive_s > (_RESTART_S if taken else _GRACE_S):
            return False, None
        await asyncio.sleep(_POLL_S)
    return True, None


async def _withdraw(database: Database, command: OperatorCommand) -> bool:
    async with database.connection() as conn:
        return await store.update_command_withdrawn(conn, command.id, CommandOutcome(note=_WITHDRAWN))


def _describe_written(written: Written) -> str:
    verb, whom = written.command.verb, scope(written.command.account_id)
    if verb is Verb.RESUME:
        return f"Lifted the halt of {whom} ({', '.join(written.lifted)})." if written.lifted else f"No halt of {whom}."
    if verb in _BY_THE_SERVICE:
        return f"Asked the service to {verb} {whom}."
    if written.was_halted:
        return f"An operator's halt of {whom} is already in force."
    return f"Halted {whom}, until the halt is lifted with `trader resume`."


def _describe_outcome(outcome: CommandOutcome, verb: Verb) -> Iterator[str]:
    """Yield lines on the completed and the remaining work of a command."""
    lines = [
        f"  cancelled: {order.account_id}: {order.side} {format_decimal(order.quantity)} {order.symbol} "
        f"at {format_decimal(order.limit_price)}"
        for order in outcome.cancelled
    ]
    lines += [
        f"  closed: {fill.account_id}: {fill.side} {format_decimal(fill.quantity)} {fill.symbol} "
        f"at {format_decimal(round(fill.price, 8))}, "
        f"gross {fill.gross_pnl:+.2f}"
        for fill in outcome.closed
    ]
    lines += [f"  LEFT: {leftover.account_id}: {leftover.what}: {leftover.reason}" for leftover in outcome.left]
    yield from first(lines, where=", in the table `commands`")
    counts = outcome.counts
    if verb is Verb.RESUME:
        counts = "the service trades again"
    elif verb in _BY_THE_SERVICE:
        counts = _BY_THE_SERVICE[verb]
    yield f"NOT complete: {counts}." if outcome.left else f"Done: {counts}."
    if outcome.note is not None:
        yield outcome.note


async def _describe_unserved(database: Database, command: OperatorCommand) -> tuple[bool, list[str]]:
    """Return whether the command is complete although no service is running, and lines on the remaining work."""
    if command.verb is Verb.RESUME:
        return True, ["No service is running; it trades again from its next start."]
    if command.verb in _BY_THE_SERVICE:
        return False, [f"No service is running, so NOTHING was done. Start the service and {command.verb} again."]
    async with database.connection() as conn:
        holdings = await store.select_exposures(conn, command.account_id)
    lines = [
        "No service is running. The next start applies the halt and cancels resting orders that could open positions."
    ]
    remaining = []
    for exposure in holdings:
        limit = "" if exposure.limit_price is None else f", resting at {format_decimal(exposure.limit_price)}"
        what = f"{exposure.side} {format_decimal(exposure.quantity)} {exposure.symbol}"
        remaining.append(f"  remains: {exposure.account_id}: {what}{limit}")
    lines += first(remaining)
    if command.verb is Verb.FLATTEN and holdings:
        positions = sum(exposure.limit_price is None for exposure in holdings)
        return False, [*lines, f"NOT closed: {counted(positions, 'position')}. Start the service and flatten again."]
    return True, lines


async def _with_halts(database: Database, result: Result) -> Result:
    """Return the result with the halts in force appended."""
    async with database.connection() as conn:
        halts = await store.select_halts(conn)
    lines = list(result.lines)
    for halt in halts:
        lift = "trader resume" if halt.account_id is None else f"trader resume --account {halt.account_id}"
        lift = f"trader approve {halt.account_id}" if halt.cause is HaltCause.LADDER else lift
        lines.append(f"In force: {halt} (since {halt.at:%Y-%m-%d %H:%M:%S} UTC, by {halt.by}); lift it with `{lift}`")
    if not halts:
        lines.append("Nothing is halted.")
    return result._replace(value={**result.value, "halts": halts}, lines=lines)
