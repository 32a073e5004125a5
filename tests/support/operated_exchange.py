"""An exchange with halts, loss limits and operator commands, driven by the test."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

from support.manual_clock import ManualClock
from support.scripted import ScriptedSource
from support.venue import Venue, running
from support.waiting import until

from trader.core.clock import Clock
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.domain.halts import CommandOutcome, OperatorCommand, Verb
from trader.exchange.halts import Halts
from trader.exchange.protocol import Exchange
from trader.exchange.sql import halts as store
from trader.market.domain.markets import Tick
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands, write_resume
from trader.portfolio.hour_bounds import HourBounds
from trader.settings.settings import Settings


def make_operations(database: Database, exchange: Exchange, clock: Clock, settings: Settings) -> OperatorCommands:
    """Return operator commands that halt only what they know themselves."""
    halts = Halts(database, clock, EventBus())
    return OperatorCommands(database, exchange, halts, LossLimits(database, exchange, halts, settings))


class OperatedExchange:
    """A running exchange, with operator commands, loss limits and hourly bounds, all of which `see` the next tick."""

    def __init__(self, venue: Venue) -> None:
        self.venue = venue
        self.halts = venue.halts
        self.limits = LossLimits(venue.database, venue.exchange, venue.halts, venue.settings)
        self.bounds = HourBounds(venue.database, venue.exchange, venue.halts)
        self.operations = OperatorCommands(venue.database, venue.exchange, venue.halts, self.limits)

    async def start(self) -> None:
        await self.halts.load()
        await self.limits.load(self.venue.clock.now())
        await self.bounds.load(self.venue.clock.now())
        self.operations.start()

    async def see(self, mids: dict[str, str], **more: object) -> None:
        await self.venue.see(mids, **more)  # type: ignore[arg-type]
        tick: Tick = self.venue.source.script[-1]
        await self.limits.on_tick(tick)
        await self.bounds.on_tick(tick)

    async def ask(self, verb: Verb, account_id: str | None = None, reason: str = "looks wrong") -> OperatorCommand:
        """Write a command as the operator's command line does."""
        command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason=reason, asked_by="someone")
        async with self.venue.database.transaction() as conn:
            if verb is Verb.RESUME:
                await write_resume(conn, command)
            elif verb is Verb.REMOVE:  # as `accounts remove`, without a halt
                await store.insert_command(conn, command)
            else:
                await store.insert_halting_command(conn, command)
        return command

    async def state(self, command: OperatorCommand) -> store.CommandState:
        async with self.venue.database.connection() as conn:
            state = await store.select_command_state(conn, command.id)
        assert state is not None
        return state

    async def outcome(self, command: OperatorCommand) -> CommandOutcome:
        """Let the service read and execute it."""

        async def ended() -> CommandOutcome | None:
            await self.operations.poll()
            return (await self.state(command)).outcome

        outcome: CommandOutcome = await until(ended)
        return outcome

    async def polled_until(self, condition: Callable[[], object]) -> None:
        """Let the service look for commands until the condition holds."""

        async def polled() -> object:
            await self.operations.poll()
            return condition()

        await until(polled)

    async def do(self, verb: Verb, account_id: str | None = None) -> CommandOutcome:
        return await self.outcome(await self.ask(verb, account_id))


@asynccontextmanager
async def operating(
    database: Database, source: ScriptedSource | None = None, clock: ManualClock | None = None, **settings: str
) -> AsyncIterator[OperatedExchange]:
    async with running(database, source, clock, **settings) as venue:
        operated = OperatedExchange(venue)
        await operated.start()
        try:
            yield operated
        finally:
            await operated.operations.close()
