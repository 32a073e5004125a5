"""Halts in force: which accounts may not open positions now, in memory and in the database.

A halt takes effect in this process at once, and is written as soon as the database can accept it. Until then a file
next to the data preserves a person's halt if the process is killed. A halt by a rule of this process belongs to the
term of its measurement: it is not written in a later one.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple
from uuid import uuid4

import msgspec

from trader.core.clock import Clock
from trader.core.errors import StartError, Unavailable
from trader.core.events import EventBus
from trader.core.files import replacing
from trader.database.leadership import hold_term
from trader.database.pool import Database
from trader.exchange.domain import halts as rules
from trader.exchange.domain.halts import Halt, HaltCause, OperatorCommand, Verb
from trader.exchange.events import HaltsChanged
from trader.exchange.sql import halts as store

log = logging.getLogger("trader.safety")


SAVE_WAIT_S: Final = 1.0
"""How long a person's halt, which is already in force, waits for the database before it is saved to a file."""

Keeper = Literal["database", "file", "memory"]
"""What preserves a halt: the database, a file that survives a kill of this process, or only this process."""


class HaltTaken(NamedTuple):
    """A person's halt in force, and the command that cancels opening orders; None if it was already in force."""

    kept_in: Keeper
    command: OperatorCommand | None


class _Unsaved(NamedTuple):
    """A halt and its command that are in force here but perhaps not yet in the database."""

    halt: Halt
    command: OperatorCommand


class Halts:
    """The halts in force. The exchange calls `refusal_to_open` before every order that may open or add.

    `file` keeps the halts of people that the database does not have yet; without it, a kill loses them.
    """

    def __init__(self, database: Database, clock: Clock, events: EventBus, file: Path | None = None) -> None:
        self._database = database
        self.clock = clock
        self._events = events
        self._file = file
        self.in_force: tuple[Halt, ...] = ()
        """The halts in force, oldest first."""

        self._unsaved: list[_Unsaved] = []
        self._was_saved = asyncio.Event()
        self._rows = asyncio.Lock()
        self._filing = asyncio.Lock()

    @property
    def is_ahead(self) -> bool:
        """Whether a halt is in force that is not in the database yet."""
        return bool(self._unsaved)

    def refusal_to_open(self, account_id: str) -> str | None:
        """Return why the account may not open or add now, or None. Reducing is never refused."""
        return rules.refusal_to_open(self.in_force, account_id)

    def is_limited(self, account_id: str | None) -> bool:
        """Return whether a rule has halted the account or, if None, all accounts together."""
        return any(halt.account_id == account_id and halt.cause in rules.RULES for halt in self.in_force)

    async def lift(self, cause: HaltCause, by: str, *, term: int) -> None:
        """Lift all halts of one cause, which a rule of the leader requested in this term.

        :raises Unavailable: the database cannot answer now; they stay in force
        """
        async with self._rows:
            await self._save()
            async with self._database.transaction() as conn:
                if not await hold_term(conn, term):
                    return
                await store.update_halts_lifted(conn, None, by, cause)
            self._set(tuple(halt for halt in self.in_force if halt.cause is not cause))

    async def halt(
        self,
        account_id: str | None,
        cause: HaltCause,
        reason: str,
        by: str,
        verb: Verb = Verb.HALT,
        *,
        term: int | None = None,
    ) -> None:
        """Put a halt in force, with a command to cancel opening orders or, with FLATTEN, to close everything.

        `term` is the term in which a rule of the leader requested it; None for a person, whose halt binds every term.
        While the database is unavailable, the halt applies in this process only; a later `load` writes it, or drops it
        if its term is over.
        """
        if self._put_in_force(account_id, cause, reason, by, verb, term) is not None:
            try:
                async with self._rows:
                    await self._save()
            except Unavailable:  # without the error text, which is logged only once a minute
                log.error("the halt of %s is in force but not yet written to the database", rules.scope(account_id))

    async def halt_at_once(self, account_id: str | None, reason: str, by: str) -> HaltTaken:
        """Put a person's halt in force before anything is written, and return what preserves it.

        `load`, which runs twice a second, writes it to the database. Does not wait longer than `SAVE_WAIT_S` for that.
        """
        command = self._put_in_force(account_id, HaltCause.OPERATOR, reason, by, Verb.HALT, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVE_WAIT_S):
                while any(_key(each.halt) == (account_id, HaltCause.OPERATOR) for each in self._unsaved):
                    self._was_saved.clear()
                    await self._was_saved.wait()
                return HaltTaken("database", command)
        return HaltTaken("file" if await self._keep() else "memory", command)

    def _put_in_force(
        self, account_id: str | None, cause: HaltCause, reason: str, by: str, verb: Verb, term: int | None
    ) -> OperatorCommand | None:
        """Put a halt in force in this process, and return its command; None if it was in force."""
        halt = Halt(account_id=account_id, cause=cause, reason=reason, by=by, at=self.clock.now())
        command = OperatorCommand(
            id=uuid4(), verb=verb, account_id=account_id, reason=f"{cause}: {reason}", asked_by=by, term=term
        )
        if any(_key(halt) == _key(known) for known in self.in_force):
            return None
        self._unsaved.append(_Unsaved(halt, command))
        self._set((*self.in_force, halt))
        return command

    def recall(self) -> None:
        """Before this process trades, put the halts in force that an earlier process saved to the file.

        :raises StartError: the file cannot be read; trading without knowing the halts would be worse
        """
        if self._file is None or not self._file.exists():
            return
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=list[_Unsaved])
        except (OSError, msgspec.MsgspecError) as error:
            raise StartError(
                f"{self._file} keeps halts that are not in the database yet, and cannot be read: {error}. If you know "
                "that nothing has to stay halted, remove the file and start again."
            ) from error
        known = {_key(halt) for halt in self.in_force}
        self._unsaved += [each for each in kept if _key(each.halt) not in known]
        self._set((*self.in_force, *(each.halt for each in kept if _key(each.halt) not in known)))

    async def _keep(self) -> bool:
        """Save people's halts that are not in the database yet to the file. Return whether it succeeded."""
        if self._file is None:
            return False
        async with self._filing:
            kept = [each for each in self._unsaved if each.command.term is None]
            try:
                await asyncio.to_thread(_write_file, self._file, kept)  # a disk that hangs must not stop the service
            except OSError as error:
                log.error("%s cannot keep the halts that are not in the database yet: %s", self._file, error.strerror)
                return False
        return True

    async def load(self) -> list[Halt]:
        """Read the halts from the database. Return those lifted since the last call.

        :raises Unavailable: the database cannot answer now; halts in force stay in force
        """
        async with self._rows:
            await self._save()
            async with self._database.connection() as conn:
                halts = await store.select_halts(conn)
            known = {_key(halt) for halt in halts}
            halts += [unsaved.halt for unsaved in self._unsaved if _key(unsaved.halt) not in known]
            return self._set(tuple(halts))

    async def _save(self) -> None:
        while self._unsaved:
            await self._write(*self._unsaved[0])
            self._unsaved.pop(0)
            if self._file is not None and self._file.exists():
                await self._keep()
            self._was_saved.set()

    async def _write(self, halt: Halt, command: OperatorCommand) -> None:
        async with self._database.transaction() as conn:
            if command.term is not None and not await hold_term(conn, command.term):
                log.warning("dropped, the term %d in which it was decided is over: halt of %s", command.term, halt)
                return
            if await store.select_command_state(conn, command.id) is not None:
                return  # only its acknowledgement was lost, and the halt may have been lifted since
            if await store.insert_halt(conn, halt):
                await store.insert_command(conn, command)

    def _set(self, halts: tuple[Halt, ...]) -> list[Halt]:
        """Set the halts in force. Return those that are lifted."""
        before, self.in_force = {_key(halt): halt for halt in self.in_force}, halts
        after = {_key(halt): halt for halt in halts}
        for key in after.keys() - before.keys():
            log.warning("halted, no position may be opened: %s (by %s)", after[key], after[key].by)
        lifted = [halt for key, halt in before.items() if key not in after]
        for halt in lifted:
            log.warning("no longer halted: %s", halt)
        if before.keys() != after.keys():
            self._events.publish(HaltsChanged(self.clock.now(), halts))
        return lifted


def _write_file(file: Path, kept: Sequence[_Unsaved]) -> None:
    if not kept:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as written:
        written.write(msgspec.json.encode(kept))
        written.flush()
        os.fsync(written.fileno())


def _key(halt: Halt) -> tuple[str | None, HaltCause]:
    return halt.account_id, halt.cause
