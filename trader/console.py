"""The operator's commands: halt, resume, flatten. Each writes what is wanted, and tells what came of it.

The database is the durable truth: a halt holds from the moment it is written, over restarts, until it is lifted. A
running service sees it within a second, cancels what could open, and writes what it did; the command waits for that.
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

from trader.domain.exchange.halts import LIMITS, Command, Halt, HaltCause, Outcome, Verb, scope
from trader.domain.money import format_decimal
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError, Unavailable
from trader.settings import read_database_url
from trader.store.database.pool import Database
from trader.store.database.schema import open_database
from trader.store.operations import halts as store
from trader.store.operations.loss_baselines import update_baselines_reset

_LOOK_S: Final = 0.2
_GRACE_S: Final = 5.0
"""How long a command waits for a service that is just starting, or taking over."""

_RESTART_S: Final = 60.0
"""How long, when it has begun, it waits for the service to be there again."""

_LIMIT_S: Final = 120.0
"""How long it waits for its outcome; the service goes on with it all the same."""

_LINES_MAX: Final = 200
_REASON_MAX: Final = 500
_WITHDRAWN: Final = "no service ran; nothing was cancelled or closed"


class Asked(NamedTuple):
    """A command as it was written: what it found, and what the service is asked to do."""

    command: Command
    lifted: Sequence[HaltCause]
    was_halted: bool


def parser() -> argparse.ArgumentParser:
    """The arguments of the three commands."""
    found = argparse.ArgumentParser(
        prog="trader",
        description="Stop a service from opening positions, let it trade again, or have it close everything. "
        "Works beside the running service; a halt holds until it is lifted, restarts included.",
    )
    verbs = found.add_subparsers(dest="verb", required=True)
    for verb, meaning in (
        (Verb.HALT, "open nothing more; reducing, stops and closing go on"),
        (Verb.RESUME, "lift a halt of an account or, without --account, of all together"),
        (Verb.FLATTEN, "halt, cancel every resting order and close every position at market"),
    ):
        one = verbs.add_parser(verb.value, help=meaning, description=meaning)
        one.add_argument("--account", metavar="ID", help="one account; default: all")
        reason = "for the record, and for whoever is refused"
        one.add_argument("--reason", type=_reason, default="asked by an operator", help=reason)
        one.add_argument("--database", metavar="NAME", help="of the embedded PostgreSQL, if it has several")
    return found


def _reason(given: str) -> str:
    if not 0 < len(words := given.strip()) <= _REASON_MAX:
        raise argparse.ArgumentTypeError(f"expected 1 to {_REASON_MAX} characters")
    return words


def _operator() -> str:
    """Who asks, and where."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user has no name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


async def run(options: argparse.Namespace) -> int:
    """Carry a command out; 0 when all that was asked is done, else 1.

    :raises StartError: there is no such account, or the database cannot be used
    :raises SettingsError: DATABASE_URL is no address of a database
    """
    verb, account_id = Verb(options.verb), options.account
    async with _open_database(options.database) as (database, is_alone):
        asked = await _ask(database, verb, account_id, options.reason)
        _say_asked(asked)
        if verb is Verb.RESUME and not asked.lifted:
            await _say_halts(database)
            return 1
        is_served, outcome = (False, None) if is_alone else await _wait(database, asked.command.id)
        if outcome is None and (is_served or not await _withdraw(database, asked.command)):
            when = "the service goes on with it" if is_served else "a service that starts soon goes on with it"
            print(f"It is NOT finished; {when}. The log and the table `commands` will tell what came of it.")
            return 1
        if outcome is None:
            done = await _say_unserved(database, asked.command)
        else:
            done = _say_outcome(outcome, verb)
        await _say_halts(database)
        return 0 if done else 1


@asynccontextmanager
async def _open_database(name: str | None) -> AsyncIterator[tuple[Database, bool]]:
    """The database of the service, and whether it is certain that no service runs on it."""
    url = read_database_url(os.environ, Path(".env"))
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


async def _ask(database: Database, verb: Verb, account_id: str | None, reason: str) -> Asked:
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
    return Asked(command, lifted, not is_new)


async def _wait(database: Database, command_id: UUID) -> tuple[bool, Outcome | None]:
    """Wait for the outcome, saying how far it is. False when no service is there; None when it is not finished."""
    started_s = alive_s = time.monotonic()
    said, taken = "", False
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
                news = "the service is gone; waiting for it to be there again and go on"
        if news not in ("", said):
            said = news
            print(f"  {news}", flush=True)
        if now_s - alive_s > (_RESTART_S if taken else _GRACE_S):
            return False, None
        await asyncio.sleep(_LOOK_S)
    return True, None


async def _withdraw(database: Database, command: Command) -> bool:
    async with database.connection() as conn:
        return await store.update_command_withdrawn(conn, command.id, Outcome(note=_WITHDRAWN))


def _say_asked(asked: Asked) -> None:
    verb, whom = asked.command.verb, scope(asked.command.account_id)
    if verb is Verb.RESUME:
        print(f"Lifted the halt of {whom} ({', '.join(asked.lifted)})." if asked.lifted else f"No halt of {whom}.")
    elif asked.was_halted:
        print(f"An operator has halted {whom} before; that stays as it is.")
    else:
        print(f"Halted {whom}: written, and in force until lifted with `resume`.")


def _say_outcome(outcome: Outcome, verb: Verb) -> bool:
    """Say what was done. Whether nothing was left."""
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
        counts = "the service knows"
    print(f"NOT all done: {counts}." if outcome.left else f"Done: {counts}.")
    if outcome.note is not None:
        print(outcome.note)
    return not outcome.left and outcome.note is None


async def _say_unserved(database: Database, command: Command) -> bool:
    """Say what there is to do without a service. Whether what was asked is done all the same."""
    if command.verb is Verb.RESUME:
        print("No service runs; it trades again from its next start on.")
        return True
    async with database.connection() as conn:
        holdings = await store.select_exposures(conn, command.account_id)
    positions = [one for one in holdings if one.limit_price is None]
    print("No service runs. The halt holds from its next start on; resting orders that could open are cancelled then.")
    for one in holdings[:_LINES_MAX]:
        limit = "" if one.limit_price is None else f", resting at {format_decimal(one.limit_price)}"
        print(f"  remains: {one.account_id}: {one.side} {format_decimal(one.quantity)} {one.symbol}{limit}")
    if len(holdings) > _LINES_MAX:
        print(f"  and {len(holdings) - _LINES_MAX} more")
    if command.verb is Verb.FLATTEN and holdings:
        print(f"NOT closed: {len(positions)} positions. Start the service and flatten again.")
        return False
    return True


async def _say_halts(database: Database) -> None:
    async with database.connection() as conn:
        halts = await store.select_halts(conn)
    for halt in halts:
        option = "" if halt.account_id is None else f" --account {halt.account_id}"
        print(f"In force: {halt} (since {halt.at:%Y-%m-%d %H:%M:%S} UTC, by {halt.by}); lift it with: resume{option}")
    if not halts:
        print("Nothing is halted.")


def main(arguments: Sequence[str]) -> int:
    """Parse and run; mistakes in the arguments end with exit code 2."""
    options = parser().parse_args(arguments)
    try:
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        print("\nNot waiting any longer; what was written stays, and the service goes on with it.", file=sys.stderr)
        return 128 + 2
