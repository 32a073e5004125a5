"""Commands of the command line beside the service: halt, resume and flatten for operators, and verify.

A command is written into the database: a halt is in force from that moment, over restarts, until it is lifted. The
running service reads it within a second, carries it out and writes the outcome, which the command waits for and prints.
`verify` only reads: the chain of decisions, and the rows that it covers.
"""

import argparse
import asyncio
import getpass
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID, uuid4

import msgspec

from trader.domain.agents.chain import Anchor
from trader.domain.exchange.halts import LIMITS, Command, Halt, HaltCause, Outcome, Verb, scope
from trader.domain.money import format_decimal
from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError, Unavailable
from trader.gateways.agents.anchor_sinks import AnchorLine
from trader.services.agents.chain import verify
from trader.settings import read_database_url
from trader.store.database.pool import Database
from trader.store.database.schema import open_database
from trader.store.operations import halts as store
from trader.store.operations.loss_baselines import update_baselines_reset

_POLL_S: Final = 0.2
_GRACE_S: Final = 5.0
"""How long a command waits for a service that is starting or taking over."""

_RESTART_S: Final = 60.0
"""How long a command that was begun waits for the service to come back."""

_LIMIT_S: Final = 120.0
"""How long a command waits for its outcome; the service goes on with it after that."""

_LINES_MAX: Final = 200
_REASON_MAX: Final = 500
VERIFY: Final = "verify"
_WITHDRAWN: Final = "no service ran; nothing was cancelled or closed"


class Written(NamedTuple):
    """A command as it was written, the halts that it lifted, and whether its halt was in force before."""

    command: Command
    lifted: Sequence[HaltCause]
    was_halted: bool


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands."""
    found = argparse.ArgumentParser(
        prog="trader",
        description="Stop a service from opening positions, let it trade again, or have it close all positions; or "
        "verify its record. Works beside the running service; a halt stays in force until it is lifted.",
    )
    verbs = found.add_subparsers(dest="verb", required=True)
    for verb, meaning in (
        (Verb.HALT, "open no more positions; orders that reduce, stops and closing go on"),
        (Verb.RESUME, "lift the halt of an account or, without --account, the halt of all accounts"),
        (Verb.FLATTEN, "halt, cancel every resting order and close every position at market"),
    ):
        one = verbs.add_parser(verb.value, help=meaning, description=meaning)
        one.add_argument("--account", metavar="ID", help="one account; default: all")
        reason = "reason for the record and for rejected orders"
        one.add_argument("--reason", type=_reason, default="asked by an operator", help=reason)
    meaning = "check whether decisions were changed, inserted, removed or cut off since they were recorded"
    one = verbs.add_parser(VERIFY, help=meaning, description=meaning)
    one.add_argument("--anchors", type=Path, metavar="FILE", help="anchors that were kept outside, as lines of JSON")
    for one in verbs.choices.values():
        add_env_file_option(one)
        one.add_argument("--database", metavar="NAME", help="database of the embedded PostgreSQL, if it has several")
    return found


def _reason(text: str) -> str:
    if not 0 < len(text := text.strip()) <= _REASON_MAX:
        raise argparse.ArgumentTypeError(f"expected 1 to {_REASON_MAX} characters")
    return text


def _operator() -> str:
    """Return the user and the machine, for the record."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the user of a container has no name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


async def run(options: argparse.Namespace) -> int:
    """Run a command; return 0 when it was carried out completely, else 1.

    :raises StartError: there is no such account, or the database cannot be used
    :raises SettingsError: DATABASE_URL is not the address of a database
    """
    if options.verb == VERIFY:
        return await _verify(options)
    verb, account_id = Verb(options.verb), options.account
    async with _open_database(options.database, options.env_file) as (database, is_alone):
        written = await _write(database, verb, account_id, options.reason)
        _print_written(written)
        if verb is Verb.RESUME and not written.lifted:
            await _print_halts(database)
            return 1
        is_served, outcome = (False, None) if is_alone else await _wait(database, written.command.id)
        if outcome is None and (is_served or not await _withdraw(database, written.command)):
            who = "the service" if is_served else "a service that starts soon"
            print(f"It is NOT finished; {who} goes on with it. See the log and the table `commands` for its outcome.")
            return 1
        if outcome is None:
            done = await _print_unserved(database, written.command)
        else:
            done = _print_outcome(outcome, verb)
        await _print_halts(database)
        return 0 if done else 1


async def _verify(options: argparse.Namespace) -> int:
    """Check the chain and print what was found. Return 0 when it is intact, else 1."""
    outside = [] if options.anchors is None else _read_anchors(options.anchors)
    async with _open_database(options.database, options.env_file) as (database, _):
        found = await verify(database, outside)
    print(
        f"{found.links} invocations of the chain were checked, {found.payloads} of them with their payloads, against "
        f"{found.anchors} anchors, {len(outside)} of them from outside."
    )
    if found.before_chain:
        print(f"{found.before_chain} invocations are from before the chain began: nothing can be said about them.")
    for finding in found.findings[:_LINES_MAX]:
        where = "" if finding.position is None else f" at position {finding.position}"
        print(f"  {finding.kind}{where}: {finding.text}")
    if len(found.findings) > _LINES_MAX:
        print(f"  and {len(found.findings) - _LINES_MAX} more")
    if not outside:
        print("Without anchors from outside (--anchors) nobody can tell whether the whole chain was made anew.")
    print("NOT intact." if found.findings else "Intact.")
    return 1 if found.findings else 0


def _read_anchors(file: Path) -> list[Anchor]:
    """Return the anchors of a file.

    :raises StartError: it cannot be read, or a line is no anchor
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=AnchorLine).anchor(f"{file.name}, line {number}"))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StartError(f"{file}, line {number}: expected an anchor as the service sends it: {error}.") from None
    return found


@asynccontextmanager
async def _open_database(name: str | None, env_file: Path) -> AsyncIterator[tuple[Database, bool]]:
    """Open the database of the service, and yield it with whether it is certain that no service runs on it."""
    url = read_database_url(os.environ, env_file)
    if url is not None:
        async with open_database(url) as database:
            yield database, False
        return
    async with EmbeddedPostgres(EMBEDDED_FOLDER).attach() as server:
        names = [name] if name else await server.databases()
        for one in names if len(names) > 1 else []:
            async with open_database(server.dsn(one)) as database, database.connection() as conn:
                if await store.select_has_leader(conn):
                    names = [one]
                    break
        if len(names) != 1:
            raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")
        async with open_database(server.dsn(names[0])) as database:
            yield database, server.is_own


async def _write(database: Database, verb: Verb, account_id: str | None, reason: str) -> Written:
    by = _operator()
    command = Command(id=uuid4(), verb=verb, account_id=account_id, reason=reason, asked_by=by)
    lifted: list[HaltCause] = []
    is_new = True
    async with database.transaction() as conn:
        if account_id is not None and not await store.select_known_account(conn, account_id):
            raise StartError(f"There is no account {account_id!r}. Nothing was changed.")
        if verb is Verb.RESUME:
            lifted = await store.update_halts_lifted(conn, account_id, by)
            if LIMITS.intersection(lifted):
                await update_baselines_reset(conn, account_id)
        else:
            at = await store.select_now(conn)
            halt = Halt(account_id=account_id, cause=HaltCause.OPERATOR, reason=reason, by=by, at=at)
            is_new = await store.insert_halt(conn, halt)
        if verb is not Verb.RESUME or lifted:
            await store.insert_command(conn, command)
    return Written(command, lifted, not is_new)


async def _wait(database: Database, command_id: UUID) -> tuple[bool, Outcome | None]:
    """Wait for the outcome and print the progress. Return whether a service runs, and the outcome if there is one."""
    started_s = alive_s = time.monotonic()
    printed, taken = "", False
    while (now_s := time.monotonic()) - started_s < _LIMIT_S:
        try:
            async with database.connection() as conn:
                state = await store.select_command_state(conn, command_id)
                alive_s = now_s if await store.select_has_leader(conn) else alive_s
        except Unavailable as error:
            news = f"waiting: {error}"
        else:
            assert state is not None, "nobody deletes commands"
            if state.outcome is not None:
                return True, state.outcome
            taken, news = state.taken, state.progress or ""
            if taken and now_s - alive_s > _GRACE_S:
                news = "the service is gone; waiting for it to come back and go on"
        if news not in ("", printed):
            printed = news
            print(f"  {news}", flush=True)
        if now_s - alive_s > (_RESTART_S if taken else _GRACE_S):
            return False, None
        await asyncio.sleep(_POLL_S)
    return True, None


async def _withdraw(database: Database, command: Command) -> bool:
    async with database.connection() as conn:
        return await store.update_command_withdrawn(conn, command.id, Outcome(note=_WITHDRAWN))


def _print_written(written: Written) -> None:
    verb, whom = written.command.verb, scope(written.command.account_id)
    if verb is Verb.RESUME:
        print(f"Lifted the halt of {whom} ({', '.join(written.lifted)})." if written.lifted else f"No halt of {whom}.")
    elif written.was_halted:
        print(f"An operator's halt of {whom} is already in force.")
    else:
        print(f"Halted {whom}, until the halt is lifted with `resume`.")


def _print_outcome(outcome: Outcome, verb: Verb) -> bool:
    """Print what was done. Return whether nothing was left."""
    lines = [
        f"  cancelled: {one.account_id}: {one.side} {format_decimal(one.quantity)} {one.symbol} "
        f"at {format_decimal(one.limit_price)}"
        for one in outcome.cancelled
    ]
    lines += [
        f"  closed: {one.account_id}: {one.side} {format_decimal(one.quantity)} {one.symbol} "
        f"at {format_decimal(round(one.price, 8))}, "
        f"gross {one.gross_pnl:+.2f}"
        for one in outcome.closed
    ]
    lines += [f"  LEFT: {one.account_id}: {one.what}: {one.reason}" for one in outcome.left]
    for line in lines[:_LINES_MAX]:
        print(line)
    if len(lines) > _LINES_MAX:
        print(f"  and {len(lines) - _LINES_MAX} more, in the table `commands`")
    counts = f"{len(outcome.cancelled)} orders cancelled, {len(outcome.closed)} fills closed, {len(outcome.left)} left"
    if verb is Verb.RESUME:
        counts = "the service trades again"
    print(f"NOT all done: {counts}." if outcome.left else f"Done: {counts}.")
    if outcome.note is not None:
        print(outcome.note)
    return not outcome.left and outcome.note is None


async def _print_unserved(database: Database, command: Command) -> bool:
    """Print what remains to be done without a service. Return whether the command is complete all the same."""
    if command.verb is Verb.RESUME:
        print("No service runs; it trades again from its next start on.")
        return True
    async with database.connection() as conn:
        holdings = await store.select_exposures(conn, command.account_id)
    positions = [one for one in holdings if one.limit_price is None]
    print("No service runs. From its next start on the halt holds, and resting orders that could open are cancelled.")
    for one in holdings[:_LINES_MAX]:
        limit = "" if one.limit_price is None else f", resting at {format_decimal(one.limit_price)}"
        print(f"  remains: {one.account_id}: {one.side} {format_decimal(one.quantity)} {one.symbol}{limit}")
    if len(holdings) > _LINES_MAX:
        print(f"  and {len(holdings) - _LINES_MAX} more")
    if command.verb is Verb.FLATTEN and holdings:
        print(f"NOT closed: {len(positions)} positions. Start the service and flatten again.")
        return False
    return True


async def _print_halts(database: Database) -> None:
    async with database.connection() as conn:
        halts = await store.select_halts(conn)
    for halt in halts:
        option = "" if halt.account_id is None else f" --account {halt.account_id}"
        print(f"In force: {halt} (since {halt.at:%Y-%m-%d %H:%M:%S} UTC, by {halt.by}); lift it with: resume{option}")
    if not halts:
        print("Nothing is halted.")


def main(arguments: Sequence[str]) -> int:
    """Run the command of these arguments and return its exit code; wrong arguments exit with 2."""
    options = parser().parse_args(arguments)
    try:
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        print("\nStopped waiting; the command stays written, and the service goes on with it.", file=sys.stderr)
        return 128 + 2
