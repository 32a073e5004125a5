"""Halts in force: which accounts may not open positions now, in memory and in the database.

A halt is in force in this process at once, and is written as soon as the database can take it.
"""

import asyncio
import logging
from collections.abc import Sequence
from uuid import uuid4

from trader.clock import Clock
from trader.domain.exchange import halts as rules
from trader.domain.exchange.halts import Halt, HaltCause, OperatorCommand, Verb
from trader.errors import Unavailable
from trader.services.events import EventBus, HaltsChanged
from trader.store.database.pool import Database
from trader.store.operations import halts as store

log = logging.getLogger("trader.safety")


class Halts:
    """The halts in force. The exchange calls `refusal_to_open` before every order that may open or add."""

    def __init__(self, database: Database, clock: Clock, events: EventBus) -> None:
        self._database = database
        self._clock = clock
        self._events = events
        self._halts: tuple[Halt, ...] = ()
        self._unsaved: list[tuple[Halt, OperatorCommand]] = []
        self._rows = asyncio.Lock()

    @property
    def in_force(self) -> Sequence[Halt]:
        """The halts in force, the oldest first."""
        return self._halts

    def refusal_to_open(self, account_id: str) -> str | None:
        """Return why the account may not open or add now, or None. Reducing is never refused."""
        return rules.refusal_to_open(self._halts, account_id)

    def is_limited(self, account_id: str | None) -> bool:
        """Whether a loss limit has halted the account or, with None, all accounts together."""
        return any(halt.account_id == account_id and halt.cause in rules.LIMITS for halt in self._halts)

    async def halt(
        self, account_id: str | None, cause: HaltCause, reason: str, by: str, verb: Verb = Verb.HALT
    ) -> None:
        """Put a halt in force, with a command to cancel opening orders or, with FLATTEN, to close everything.

        While the database is unavailable the halt holds in this process; a later `load` writes it.
        """
        halt = Halt(account_id=account_id, cause=cause, reason=reason, by=by, at=self._clock.now())
        command = OperatorCommand(
            id=uuid4(), verb=verb, account_id=account_id, reason=f"{cause}: {reason}", asked_by=by
        )
        if any(_key(halt) == _key(known) for known in self._halts):
            return
        self._unsaved.append((halt, command))
        self._set((*self._halts, halt))
        try:
            async with self._rows:
                await self._save()
        except Unavailable:  # without its text, which is logged once a minute only
            log.error("the halt of %s is in force, and not yet written to the database", rules.scope(account_id))

    async def load(self) -> list[Halt]:
        """Read the halts from the database. Return those that were lifted since the last call.

        :raises Unavailable: the database cannot answer now; what was in force stays
        """
        async with self._rows:
            await self._save()
            async with self._database.connection() as conn:
                halts = await store.select_halts(conn)
            before = self._halts
            known = {_key(halt) for halt in halts}
            halts += [halt for halt, _ in self._unsaved if _key(halt) not in known]
            self._set(tuple(halts))
        known = {_key(halt) for halt in halts}
        return [halt for halt in before if _key(halt) not in known]

    async def _save(self) -> None:
        while self._unsaved:
            halt, command = self._unsaved[0]
            async with self._database.transaction() as conn:
                if await store.insert_halt(conn, halt):
                    await store.insert_command(conn, command)
            self._unsaved.pop(0)

    def _set(self, halts: tuple[Halt, ...]) -> None:
        before, self._halts = {_key(halt): halt for halt in self._halts}, halts
        after = {_key(halt): halt for halt in halts}
        if before.keys() == after.keys():
            return
        for key in after.keys() - before.keys():
            log.warning("halted, nothing opens: %s (by %s)", after[key], after[key].by)
        for key in before.keys() - after.keys():
            log.warning("no longer halted: %s", before[key])
        self._events.publish(HaltsChanged(self._clock.now(), halts))


def _key(halt: Halt) -> tuple[str | None, HaltCause]:
    return halt.account_id, halt.cause
