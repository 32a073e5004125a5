"""An exchange with halts, loss limits and operator commands, driven by the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from support.venue import Venue, running

from trader.domain.exchange.halts import OperatorCommand, Outcome, Verb
from trader.domain.market.markets import Tick
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import OperatorCommands
from trader.store.database.pool import Database
from trader.store.operations import halts as store
from trader.store.operations.loss_baselines import update_baselines_reset


class Guarded:
    """A running exchange, and what operators and limits do to it. `see` is the market's next word, limits included."""

    def __init__(self, venue: Venue) -> None:
        self.venue = venue
        self.halts = venue.halts
        self.limits = LossLimits(venue.database, venue.exchange, venue.halts, venue.settings)
        self.operations = OperatorCommands(venue.database, venue.exchange, venue.halts, self.limits)

    async def start(self) -> None:
        await self.halts.load()
        await self.limits.load(self.venue.clock.now())
        self.operations.start()

    async def see(self, mids: dict[str, str], **more: object) -> None:
        await self.venue.see(mids, **more)  # type: ignore[arg-type]
        tick: Tick = self.venue.source.script[-1]
        await self.limits.on_tick(tick)

    async def ask(self, verb: Verb, account_id: str | None = None, reason: str = "looks wrong") -> OperatorCommand:
        """What the operator's command writes."""
        command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason=reason, asked_by="someone")
        async with self.venue.database.transaction() as conn:
            if verb is Verb.RESUME:
                await store.update_halts_lifted(conn, account_id, "someone")
                await update_baselines_reset(conn, account_id)
                await store.insert_command(conn, command)
            elif verb is Verb.REMOVE:  # as `accounts remove`, without a halt
                await store.insert_command(conn, command)
            else:
                await store.insert_halting_command(conn, command)
        return command

    async def outcome(self, command: OperatorCommand) -> Outcome:
        """Let the service see and do it."""
        async with asyncio.timeout(20):
            while True:
                await self.operations.poll()
                async with self.venue.database.connection() as conn:
                    state = await store.select_command_state(conn, command.id)
                if state is not None and state.outcome is not None:
                    return state.outcome
                await asyncio.sleep(0.01)

    async def do(self, verb: Verb, account_id: str | None = None) -> Outcome:
        return await self.outcome(await self.ask(verb, account_id))


@asynccontextmanager
async def guarding(database: Database, source: object, clock: object, **settings: str) -> AsyncIterator[Guarded]:
    async with running(database, source, clock, **settings) as venue:  # type: ignore[arg-type]
        guarded = Guarded(venue)
        await guarded.start()
        try:
            yield guarded
        finally:
            await guarded.operations.close()
