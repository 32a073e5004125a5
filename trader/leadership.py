"""The running service, and its role: of several processes on one database one leads, the others stand by."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final, Literal, NamedTuple

from trader.api import streams
from trader.api.context import Context
from trader.clock import LockstepClock
from trader.domain.market.markets import Tick
from trader.errors import Unavailable
from trader.schedulers import PRICE_TRACKER_EVERY, Schedulers
from trader.services.events import EventBus, MarketChecked
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import Operations
from trader.store.database.leadership import LeaderLock, select_leader_schedulers, update_heartbeat
from trader.store.database.pool import Database

log = logging.getLogger("trader")

_HEARTBEAT_S: Final = 5.0
_STANDBY_EVERY_S: Final = 0.5
"""Seconds of real time: between words to the standbys, and between a standby's tries to lead."""


class Guards(NamedTuple):
    """What keeps trading within what operators and limits allow."""

    halts: Halts
    limits: LossLimits
    operations: Operations


class Service:
    """The running parts, and their role: of several processes on one database one leads, the others stand by."""

    def __init__(
        self,
        context: Context,
        database: Database,
        accounts: Accounts,
        events: EventBus,
        hubs: streams.Hubs,
        schedulers: Schedulers,
        lock: LeaderLock,
        guards: Guards,
    ) -> None:
        self.context = context
        self.database = database
        self.accounts = accounts
        self.hubs = hubs
        self.schedulers = schedulers
        self.halts, self.limits, self.operations = guards
        self.started_at = context.clock.now()
        self._events = events
        self._lock = lock
        self._leader_schedulers: Mapping[str, bool] = {}
        self._shown_at = self.started_at

    @property
    def role(self) -> Literal["leader", "standby"]:
        return "standby" if self.context.exchange.term is None else "leader"

    def running_schedulers(self) -> Mapping[str, bool]:
        """Which schedulers run, here or on the leader."""
        here = {name: status.running for name, status in self.schedulers.status().items()}
        return here if self.role == "leader" else {name: self._leader_schedulers.get(name, False) for name in here}

    async def follow_market(self) -> None:
        """Take every tick of the market to the exchange, for ever."""
        exchange = self.context.exchange
        is_lockstep = isinstance(self.context.clock, LockstepClock)

        async def on_tick(tick: Tick) -> None:
            await exchange.on_tick(tick)
            halts = self.halts.in_force
            await self.limits.on_tick(tick)
            if is_lockstep and self.halts.in_force is not halts:
                # Operators are minded in real time, in which a replay gets as far as it can.
                await self.operations.sweep()

        await self.context.market.run(on_tick, self.accounts.processed_until or self.started_at)

    async def take_role(self) -> None:
        """Lead when nobody does, else begin to stand by.

        :raises StartError: the database is of another market or trading mode, or its books do not balance
        """
        if await self._lock.try_acquire():
            await self._lead()
        else:
            log.info("another process leads on this database; standing by")
            await self._follow()

    async def keep_role(self) -> None:
        """Lead as long as the lock is held; stand by, and try for it, as long as it is not. For ever."""
        while True:
            try:
                if self.role == "leader":
                    await self._lead_until_lost()
                elif await self._lock.try_acquire():
                    await self._lead()
                else:
                    await self._follow()
            except Unavailable as error:
                log.warning("as %s: %s", self.role, error)
            if self.role == "standby":
                await asyncio.sleep(_STANDBY_EVERY_S)

    async def resign(self) -> None:
        """Stop trading: first the schedules, then the models, then the exchange."""
        self.limits.stop()
        await self.schedulers.close()
        await self.context.agents.close()
        await self.operations.close()
        await self.context.exchange.resign()
        await self._lock.release()

    async def _lead(self) -> None:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.resign)
            await self.halts.load()  # before anybody can trade
            await self.limits.load(self.context.clock.now())
            await self.context.exchange.lead()
            await self.context.agents.start()
            await self.schedulers.start()
            self.operations.start()
            undo.pop_all()
        log.info("leading, term %d", self.context.exchange.term)

    async def _lead_until_lost(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a database that hangs holds up the telling, never the end
            telling = tasks.create_task(self._tell_standbys(), name="heartbeat")
            await self._lock.lost()
            log.error("this process leads no more; trading stops here")
            self.context.exchange.suspend()
            telling.cancel()
        await self.resign()

    async def _tell_standbys(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await self._beat()
            except Unavailable as error:
                log.warning("the standbys could not be told: %s", error)

    async def _beat(self) -> None:
        term = self.context.exchange.term
        if term is not None:
            async with self.database.connection() as conn:
                await update_heartbeat(conn, term, dict(self.running_schedulers()))

    async def _follow(self) -> None:
        """Show what the leader trades, with live values at the price tracker's pace."""
        await self.context.exchange.follow()
        await self.context.agents.follow()
        now = self.context.clock.now()
        if now - self._shown_at >= PRICE_TRACKER_EVERY:
            self._shown_at = now
            self._events.publish(MarketChecked(now))
        async with self.database.connection() as conn:
            self._leader_schedulers = await select_leader_schedulers(conn) or {}
