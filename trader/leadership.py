"""Leadership: of several processes on one database one leads and trades, the others stand by and show its accounts."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Final, Literal, NamedTuple

from trader.api.context import Context
from trader.clock import LockstepClock, ScaledClock
from trader.domain.market.markets import Tick
from trader.errors import Unavailable
from trader.schedulers import PRICE_TRACKER_EVERY, Schedulers
from trader.services.events import EventBus, LeadershipChanged, MarketChecked
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import OperatorCommands
from trader.services.portfolio.baselines import Baselines
from trader.store.database.leadership import LeaderLock, select_leader_schedulers, update_heartbeat
from trader.store.database.pool import Database
from trader.store.exchange.accounts import select_lived_until, update_lived_until

log = logging.getLogger("trader")

_HEARTBEAT_S: Final = 5.0
"""Real seconds between the leader's heartbeats."""

_PROBE_BEATS: Final = 12
"""Heartbeats between proofs that the database can be written. While it cannot, every heartbeat has one."""

_LIVED_AHEAD_S: Final = 0.2
_LIVED_AHEAD_LEAST: Final = timedelta(seconds=1)
"""How far ahead the time of a paced replay is recorded as lived: in real seconds, and at least of its own time."""

_STANDBY_EVERY_S: Final = 0.5
"""Real seconds between a standby's attempts to lead."""


class TradingControls(NamedTuple):
    """What limits trading: the halts in force, the loss limits, and the operators' commands."""

    halts: Halts
    limits: LossLimits
    operations: OperatorCommands


class Leadership:
    """The role of this process, leader or standby, and the trading that starts and ends with it."""

    def __init__(
        self,
        context: Context,
        database: Database,
        accounts: Accounts,
        events: EventBus,
        schedulers: Schedulers,
        lock: LeaderLock,
        controls: TradingControls,
        baselines: Baselines,
    ) -> None:
        self._clock = context.clock
        self._market = context.market
        self._exchange = context.exchange
        self._agents = context.agents
        self._database = database
        self._accounts = accounts
        self._events = events
        self._schedulers = schedulers
        self._lock = lock
        self._halts, self._limits, self._operations = controls
        self._baselines = baselines
        self._started_at = self._shown_at = context.clock.now()
        self._leader_schedulers: Mapping[str, bool] = {}
        self._was_standby = False

    @property
    def role(self) -> Literal["leader", "standby"]:
        return "standby" if self._exchange.term is None else "leader"

    def running_schedulers(self) -> Mapping[str, bool]:
        """Return which schedulers run, in this process or on the leader."""
        here = {name: status.running for name, status in self._schedulers.status().items()}
        return here if self.role == "leader" else {name: self._leader_schedulers.get(name, False) for name in here}

    async def follow_market(self) -> None:
        """Apply every tick of the market to the exchange and to the loss limits, for ever."""
        is_lockstep = isinstance(self._clock, LockstepClock)

        async def on_tick(tick: Tick) -> None:
            await self._exchange.on_tick(tick)
            await self._baselines.on_tick(tick)
            halts = self._halts.in_force
            await self._limits.on_tick(tick)
            if is_lockstep and self._halts.in_force is not halts:
                # Operator commands are polled in real time, which has no fixed place in a replay.
                await self._operations.sweep()

        await self._market.run(on_tick, self._accounts.processed_until or self._started_at)

    async def take_role(self) -> None:
        """Lead when no other process does, else begin to stand by.

        :raises StartError: the database belongs to another market or trading mode, or its ledger does not balance
        """
        if await self._lock.try_acquire():
            await self._lead()
        else:
            log.info("another process leads on this database; standing by")
            self._was_standby = True
            await self._follow()

    async def keep_role(self) -> None:
        """Lead while the lock is held; otherwise stand by and try to acquire it. For ever."""
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
        """Stop trading: first the schedulers, then the models, then the exchange."""
        self._limits.stop()
        self._baselines.resign()
        await self._schedulers.close()
        await self._agents.close()
        await self._operations.close()
        await self._exchange.resign()
        self._market.end_recording()
        await self._lock.release()
        if isinstance(self._clock, ScaledClock):
            self._clock.allow(None)

    async def _lead(self) -> None:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.resign)
            await self._resume_time()
            await self._halts.load()  # before anything can trade
            await self._limits.load(self._clock.now())
            self._market.begin_recording()
            await self._exchange.lead()
            await self._baselines.lead()
            await self._let_time_pass()
            await self._agents.start()
            await self._schedulers.start()
            self._operations.start()
            undo.pop_all()
        log.info("leading, term %d", self._exchange.term)
        if (warning := self._agents.warning()) is not None:
            log.warning(warning)
        if self._was_standby:
            self._was_standby = False
            self._events.publish(LeadershipChanged(f"this process has taken over, term {self._exchange.term}"))

    async def _lead_until_lost(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a database that hangs delays the heartbeat, never the end
            heartbeat = tasks.create_task(self._send_heartbeats(), name="heartbeat")
            time = tasks.create_task(self._keep_time_passing(), name="time of the replay")
            await self._lock.lost()
            log.error("this process has lost the leading role; trading stops here")
            self._was_standby = True
            self._events.publish(LeadershipChanged("this process has lost the leading role; trading stops here"))
            self._exchange.suspend()
            heartbeat.cancel()
            time.cancel()
        await self.resign()

    async def _send_heartbeats(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            beats += 1
            try:
                await self._beat()
                if self._database.write_trouble is not None or beats % _PROBE_BEATS == 0:
                    await self._database.probe_write()
            except Unavailable as error:
                log.warning("the heartbeat for the standbys was not written: %s", error)

    async def _beat(self) -> None:
        term = self._exchange.term
        if term is not None:
            async with self._database.connection() as conn:
                await update_heartbeat(conn, term, dict(self.running_schedulers()))

    async def _resume_time(self) -> None:
        """Set the clock of a paced replay to where an earlier leader may have lived, and hold it there."""
        if isinstance(self._clock, ScaledClock):
            async with self._database.connection() as conn:
                lived_until = await select_lived_until(conn)
            self._clock.skip_to(lived_until or self._clock.now())
            self._clock.allow(self._clock.now())

    async def _let_time_pass(self) -> None:
        """Record how far the time of a paced replay may pass, then let it: no second is lived twice after a crash."""
        if isinstance(self._clock, ScaledClock):
            until = self._clock.now() + max(_LIVED_AHEAD_LEAST, self._clock.span_of(_LIVED_AHEAD_S))
            async with self._database.connection() as conn:
                await update_lived_until(conn, until)
            self._clock.allow(until)

    async def _keep_time_passing(self) -> None:
        while isinstance(self._clock, ScaledClock):
            await asyncio.sleep(_LIVED_AHEAD_S / 2)
            try:
                await self._let_time_pass()
            except Unavailable as error:
                log.warning("the replay stands still: %s", error)

    async def _follow(self) -> None:
        """Read what the leader has traded, and publish live values at the price tracker's interval."""
        await self._exchange.follow()
        await self._agents.follow()
        now = self._clock.now()
        if now - self._shown_at >= PRICE_TRACKER_EVERY:
            self._shown_at = now
            self._events.publish(MarketChecked(now))
        async with self._database.connection() as conn:
            self._leader_schedulers = await select_leader_schedulers(conn) or {}
