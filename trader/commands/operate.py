"""The operator's commands: halt, resume and flatten.

A command is written into the database: a halt is in force from that moment, over restarts, until it is lifted. The
running service reads it within a second, carries it out and writes the outcome, which the command waits for and prints.
"""

import argparse
import asyncio
import getpass
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import uuid4

from trader.clock import SystemClock
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, moment, show
from trader.commands.database import TargetDatabase, database_command
from trader.domain.exchange.halts import LIMITS, REASON_MAX, HaltCause, OperatorCommand, Outcome, Verb, scope
from trader.domain.money import format_decimal
from trader.errors import StartError, Unavailable
from trader.store.database.pool import Database
from trader.store.exchange.accounts import select_last_marks
from trader.store.operations import halts as store
from trader.store.operations.loss_baselines import update_baselines_reset

_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0
"""How long a command waits for a service that is starting or taking over."""

SILENT_S: Final = 3.0
"""How long a service that leads may take to begin with a command; it looks for commands twice a second."""

_RESTART_S: Final = 60.0
"""How long a command that was begun waits for the service to come back."""

_LIMIT_S: Final = 120.0
"""How long a command waits for its outcome; the service goes on with it after that."""

_BY_THE_SERVICE: Final = {Verb.RESET: "a new run has begun", Verb.REMOVE: "the account is removed"}
"""Commands that only a running service carries out, and what is then true."""

_LINES_MAX: Final = 200
_WITHDRAWN: Final = "no service ran; nothing was cancelled or closed"


class Written(NamedTuple):
    """A command as it was written, and when, the halts that it lifted, and whether its halt was in force before."""

    command: OperatorCommand
    at: datetime
    lifted: Sequence[HaltCause]
    was_halted: bool


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--account", metavar="ID", help="one account; default: all")
    reason = "reason for the record and for rejected orders"
    parser.add_argument("--reason", type=_reason, default="asked by an operator", help=reason)


def _reason(text: str) -> str:
    if not 0 < len(text := text.strip()) <= REASON_MAX:
        raise argparse.ArgumentTypeError(f"expected 1 to {REASON_MAX} characters")
    return text


@database_command(
    "halt", example='trader halt --account apex-rules --reason "strange prices"', arguments=_arguments, changes=True
)
async def halt(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Halt trading: no position is opened or increased; reducing orders, stops and closing stay allowed."""
    return await operate(Verb.HALT, options, target)


@database_command("resume", example="trader resume --account apex-rules", arguments=_arguments, changes=True)
async def resume(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Lift the halt of an account or, without --account, the halt of all accounts."""
    return await operate(Verb.RESUME, options, target)


def _flatten_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    add_confirmation(parser)


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that closes positions: it shows them, and asks first."""
    parser.add_argument("--yes", action="store_true", help="do not ask, for scripts")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be closed, and at which price")


@database_command("flatten", example="trader flatten --dry-run", arguments=_flatten_arguments, changes=True)
async def flatten(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Halt, cancel every resting order and close every position at market, after a question."""
    return await ask_and_operate(Verb.FLATTEN, options, target)


async def ask_and_operate(verb: Verb, options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show what a command would close, ask, and carry it out; with --dry-run only show it.

    :raises StartError: nobody can be asked, or the answer is no; nothing was changed
    """
    async with target.reading() as conn:
        if options.account is not None and not await store.select_known_account(conn, options.account):
            raise StartError(f"There is no account {options.account!r}. Nothing was changed.")
        exposures, marks = await store.select_exposures(conn, options.account), await select_last_marks(conn)
    lines = [_describe_exposure(exposure, marks) for exposure in exposures] or ["  nothing is held, nothing rests"]
    if len(lines) > _LINES_MAX:
        lines[_LINES_MAX:] = [f"  and {len(lines) - _LINES_MAX} more"]
    title = f"{verb} of {scope(options.account)} would close or cancel, at about the last recorded prices:"
    if options.dry_run:
        return Result({"wouldClose": exposures, "prices": marks}, [title, *lines, "Nothing was changed."])
    if not options.yes:
        show("\n".join([title, *lines]), on_stderr=True)
        if not sys.stdin.isatty():
            raise StartError(f"`{verb}` asks first, and nobody can answer here: add --yes. Nothing was changed.")
        show("Type yes to go on:", on_stderr=True)
        if (await asyncio.to_thread(sys.stdin.readline)).strip().lower() != "yes":
            raise StartError("Not confirmed. Nothing was changed.")
    return await operate(verb, options, target)


def _describe_exposure(exposure: store.Exposure, marks: Mapping[str, Decimal]) -> str:
    what = f"{exposure.account_id}: {exposure.side} {format_decimal(exposure.quantity)} {exposure.symbol}"
    if exposure.limit_price is not None:
        return f"  cancel {what}, resting at {format_decimal(exposure.limit_price)}"
    mark = marks.get(exposure.symbol)
    return f"  close {what} at " + ("an unknown price" if mark is None else format_decimal(mark))


def operator() -> str:
    """Return the user and the machine that give the command, for the audit trail."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the user of a container has no name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


async def operate(verb: Verb, options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Write a command, and wait for its outcome where a service may run.

    :raises StartError: there is no such account
    """
    database = target.database
    written = await _write(database, verb, options.account, options.reason)
    # What is in force already is said at once: the outcome may take a minute.
    show(_describe_written(written), on_stderr=options.json)
    value = {"command": written.command, "lifted": written.lifted, "outcome": None}
    if verb is Verb.RESUME and not written.lifted:
        return await _with_halts(database, Result(value, [], EXIT_FAILED))
    try:
        is_served, outcome = (False, None) if target.is_alone else await _wait(database, written)
    except asyncio.CancelledError:  # by Ctrl+C
        show("\nStopped waiting; the command stays written, and the service goes on with it.", on_stderr=True)
        raise
    if outcome is None and (is_served or not await _withdraw(database, written.command)):
        who = "the service" if is_served else "a service that starts soon"
        line = f"It is NOT finished; {who} goes on with it. See the log and the table `commands` for its outcome."
        return Result(value, [f"It is recorded since {moment(written.at)}.", line], EXIT_FAILED)
    if outcome is None:
        done, lines = await _describe_unserved(database, written.command)
    else:
        done, lines = not outcome.left and outcome.note is None, list(_describe_outcome(outcome, verb))
    result = Result({**value, "outcome": outcome}, lines, EXIT_DONE if done else EXIT_FAILED)
    return await _with_halts(database, result)


async def _write(database: Database, verb: Verb, account_id: str | None, reason: str) -> Written:
    by = operator()
    command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason=reason, asked_by=by)
    lifted: list[HaltCause] = []
    is_new = True
    async with database.transaction() as conn:
        at = await store.select_now(conn)
        if account_id is not None and not await store.select_known_account(conn, account_id):
            raise StartError(f"There is no account {account_id!r}. Nothing was changed.")
        if verb is Verb.RESUME:
            lifted = await store.update_halts_lifted(conn, account_id, by)
            if LIMITS.intersection(lifted):
                await update_baselines_reset(conn, account_id)
        if verb in (Verb.HALT, Verb.FLATTEN):
            is_new = await store.insert_halting_command(conn, command)
        elif verb in _BY_THE_SERVICE or lifted:
            await store.insert_command(conn, command)
    return Written(command, at, lifted, not is_new)


async def _wait(database: Database, written: Written) -> tuple[bool, Outcome | None]:
    """Wait for the outcome and print the progress. Return whether a service runs, and the outcome if there is one.

    A service that leads and does not answer is reported: the command is recorded, and not yet obeyed.
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
                show(f"  obeyed at {moment(SystemClock().now())}", on_stderr=True)
            if state.outcome is not None:
                return True, state.outcome
            taken, news = state.taken, state.progress or ""
            if not taken and now_s - started_s > SILENT_S:
                was_silent = True
                news = f"recorded at {moment(written.at)}, and not yet obeyed: the service does not answer"
            if taken and now_s - alive_s > _GRACE_S:
                news = "the service is gone; waiting for it to come back and go on"
        if news not in ("", printed):
            printed = news
            show(f"  {news}", on_stderr=True)
        if now_s - alive_s > (_RESTART_S if taken else _GRACE_S):
            return False, None
        await asyncio.sleep(_POLL_S)
    return True, None


async def _withdraw(database: Database, command: OperatorCommand) -> bool:
    async with database.connection() as conn:
        return await store.update_command_withdrawn(conn, command.id, Outcome(note=_WITHDRAWN))


def _describe_written(written: Written) -> str:
    verb, whom = written.command.verb, scope(written.command.account_id)
    if verb is Verb.RESUME:
        return f"Lifted the halt of {whom} ({', '.join(written.lifted)})." if written.lifted else f"No halt of {whom}."
    if verb in _BY_THE_SERVICE:
        return f"Asked the service to {verb} {whom}."
    if written.was_halted:
        return f"An operator's halt of {whom} is already in force."
    return f"Halted {whom}, until the halt is lifted with `resume`."


def _describe_outcome(outcome: Outcome, verb: Verb) -> Iterator[str]:
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
    yield from lines[:_LINES_MAX]
    if len(lines) > _LINES_MAX:
        yield f"  and {len(lines) - _LINES_MAX} more, in the table `commands`"
    counts = f"{len(outcome.cancelled)} orders cancelled, {len(outcome.closed)} fills closed, {len(outcome.left)} left"
    if verb is Verb.RESUME:
        counts = "the service trades again"
    elif verb in _BY_THE_SERVICE:
        counts = _BY_THE_SERVICE[verb]
    yield f"NOT all done: {counts}." if outcome.left else f"Done: {counts}."
    if outcome.note is not None:
        yield outcome.note


async def _describe_unserved(database: Database, command: OperatorCommand) -> tuple[bool, list[str]]:
    """Return whether the command is complete although no service runs, and lines on the remaining work."""
    if command.verb is Verb.RESUME:
        return True, ["No service runs; it trades again from its next start on."]
    if command.verb in _BY_THE_SERVICE:
        return False, [f"No service runs, so NOTHING was done. Start the service and {command.verb} again."]
    async with database.connection() as conn:
        holdings = await store.select_exposures(conn, command.account_id)
    lines = [
        "No service runs. From its next start on the halt holds, and resting orders that could open are cancelled."
    ]
    for exposure in holdings[:_LINES_MAX]:
        limit = "" if exposure.limit_price is None else f", resting at {format_decimal(exposure.limit_price)}"
        what = f"{exposure.side} {format_decimal(exposure.quantity)} {exposure.symbol}"
        lines.append(f"  remains: {exposure.account_id}: {what}{limit}")
    if len(holdings) > _LINES_MAX:
        lines.append(f"  and {len(holdings) - _LINES_MAX} more")
    if command.verb is Verb.FLATTEN and holdings:
        positions = sum(exposure.limit_price is None for exposure in holdings)
        return False, [*lines, f"NOT closed: {positions} positions. Start the service and flatten again."]
    return True, lines


async def _with_halts(database: Database, result: Result) -> Result:
    """Return the result with the halts in force appended."""
    async with database.connection() as conn:
        halts = await store.select_halts(conn)
    lines = list(result.lines)
    for halt in halts:
        option = "" if halt.account_id is None else f" --account {halt.account_id}"
        lines.append(
            f"In force: {halt} (since {halt.at:%Y-%m-%d %H:%M:%S} UTC, by {halt.by}); lift it with: resume{option}"
        )
    if not halts:
        lines.append("Nothing is halted.")
    return result._replace(value={**result.value, "halts": halts}, lines=lines)
