"""Leadership: of several processes on one database, one leads and trades; the others follow it and show its accounts.

A follower stands by to lead, unless it is a reader, which never leads. It polls a few counters for changes. Its
database may be a streaming replica, on which a standby leads once it is promoted.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NamedTuple

import asyncpg

from trader.agents.sql.linked_invocations import select_chain_models
from trader.api.context import Context
from trader.core import tasks
from trader.core.clock import LockstepClock, ScaledClock, interval_elapsed
from trader.core.errors import Unavailable
from trader.core.events import ConversationsChanged, EventBus, LeadershipChanged, MarketChecked, PricesChanged
from trader.core.schedulers import Schedulers
from trader.database.leadership import LeaderLock, select_leader_schedulers, update_heartbeat
from trader.database.pool import Database
from trader.database.relay import RelayReader, RelayWriter
from trader.database.schema import used_tables
from trader.exchange.accounts import Accounts
from trader.exchange.halts import Halts
from trader.exchange.sql.accounts import select_lived_until, update_lived_until
from trader.market.domain.markets import Tick
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.baselines import Baselines
from trader.portfolio.hour_bounds import HourBounds
from trader.portfolio.sql.analytics import Changes, select_changes

log = logging.getLogger("trader")

PRICE_TRACKER_EVERY: Final = timedelta(seconds=10)
"""How often live values are published, by the leader's price tracker and by each follower."""

HEARTBEAT_S: Final = 5.0
"""Real seconds between the leader's heartbeats."""

_RECOVERY_S: Final = 1.0
"""The same while the database cannot be written, so that the end of the fault is soon known."""

_PROBE_BEATS: Final = 12
"""Number of heartbeats between write probes of the database. While writes fail, every heartbeat probes it."""

_LIVED_AHEAD_S: Final = 0.2
_LIVED_AHEAD_LEAST: Final = timedelta(seconds=1)
"""How far ahead the time of a paced replay is reserved: in real seconds, and the minimum in replay seconds."""

_FOLLOW_EVERY_S: Final = 0.5
"""Real seconds between a follower's polls for changes, and between a standby's attempts to lead."""

ProcessRole = Literal["leader", "standby", "reader"]


class TradingParts(NamedTuple):
    """The accounts and their baselines, and the limits on trading.

    These are the halts in force, loss limits, the hourly bounds of a season, and operators' commands.
    """

    accounts: Accounts
    baselines: Baselines
    halts: Halts
    limits: LossLimits
    bounds: HourBounds
    operations: OperatorCommands


class Coordination(NamedTuple):
    """Coordinates the processes on one database: the leader's lock, and the two ends of the relay.

    The writer is used while this process leads, and the reader while it follows. Without a lock, it never leads.
    """

    lock: LeaderLock | None
    writer: RelayWriter
    reader: RelayReader


class Leadership:
    """The role of this process, and the trading that starts and ends with it. Without a lock, it is a reader."""

    def __init__(
        self,
        context: Context,
        database: Database,
        events: EventBus,
        schedulers: Schedulers,
        trading: TradingParts,
        coordination: Coordination,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._market = context.market
        self._exchange = context.exchange
        self._database = database
        self._events = events
        self._schedulers = schedulers
        self._trading = trading
        self._lock = coordination.lock
        self._relay_writer = coordination.writer
        self._relay_reader = coordination.reader
        self._changes: Changes | None = None
        self._started_at = self._shown_at = context.clock.now()
        self._leader_schedulers: Mapping[str, bool] = {}
        self._was_standby = False
        self._applying = asyncio.Lock()
        self._unseated_in: int | None = None

    @property
    def role(self) -> ProcessRole:
        if self._lock is None:
            return "reader"
        return "standby" if self._exchange.term is None else "leader"

    def running_schedulers(self) -> Mapping[str, bool]:
        """Return which schedulers run, in this process or on the leader."""
        here = {name: status.running for name, status in self._schedulers.status().items()}
        return here if self.role == "leader" else {name: self._leader_schedulers.get(name, False) for name in here}

    async def follow_market(self) -> None:
        """Follow the market forever."""
        await self._market.run(self.on_tick, self._trading.accounts.processed_until or self._started_at)

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to the exchange, to the baselines, to the loss limits and to the hourly bounds."""
        async with self._applying:
            await self._exchange.on_tick(tick)
            await self._trading.baselines.on_tick(tick)
            halts = self._trading.halts.in_force
            await self._trading.limits.on_tick(tick)
            await self._trading.bounds.on_tick(tick)
            if isinstance(self._clock, LockstepClock) and self._trading.halts.in_force is not halts:
                # Operator commands are polled in real time, which has no fixed place in a replay.
                await self._trading.operations.sweep()
        self._events.publish(PricesChanged(tick.at))

    async def take_role(self) -> None:
        """Lead if no other process leads and this one may; otherwise begin to follow.

        :raises StartError: the database belongs to another market or trading mode, or its ledger does not balance
        """
        self._hold_time()
        if await self._try_lead():
            return
        log.info("another process leads; %s", "reading" if self._lock is None else "standing by")
        self._was_standby = True
        await self._follow()

    async def _try_lead(self) -> bool:
        """Lead if this process can. A tick of its former term ends first, or it would be applied in this one."""
        if self._lock is None or self._applying.locked() or not await self._lock.try_acquire():
            return False
        await self._lead()
        return True

    async def keep_role(self) -> None:
        """Lead while the lock is held; otherwise follow and try to acquire it. Runs forever."""
        while True:
            try:
                if self.role == "leader":
                    await self._lead_until_lost()
                elif not await self._try_lead():
                    await self._follow()
            except Unavailable as error:
                log.warning("as %s: %s", self.role, error)
            if self.role != "leader":
                await asyncio.sleep(_FOLLOW_EVERY_S)

    async def resign(self) -> None:
        """Stop trading: first the schedulers, then the models, then the exchange."""
        self._trading.limits.stop()
        self._trading.bounds.stop()
        await self._trading.baselines.resign()
        await self._schedulers.close()
        await self._context.agents.close()
        await self._trading.operations.close()
        await self._exchange.resign()
        self._market.end_recording()
        self._relay_writer.close()
        if self._lock is not None:
            await self._lock.release()
        if isinstance(self._clock, ScaledClock):
            self._clock.allow(None)

    async def _lead(self) -> None:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.resign)
            self._changes = None
            self._relay_reader.forget()
            self._relay_writer.open()
            await self._resume_time()
            self._trading.halts.recall()
            await self._trading.halts.load()  # before anything can trade
            self._market.begin_recording()
            await self._exchange.lead()
            # In this term: an earlier leader can no longer record baselines.
            await self._trading.limits.load(self._clock.now())
            await self._trading.bounds.load(self._clock.now())
            await self._trading.baselines.lead(self._trading.accounts.ahead)
            await self._let_time_pass()
            await self._context.agents.start()
            await self._schedulers.start()
            self._trading.operations.start()
            if isinstance(self._clock, LockstepClock):
                self._clock.go_on()
            undo.pop_all()
        log.info("leading, term %s", self._exchange.term)  # None: it has ended meanwhile
        if (warning := self._context.agents.warnings().summary) is not None:
            log.warning(warning)
        if self._was_standby:
            self._was_standby = False
            self._events.publish(LeadershipChanged(f"this process has taken over, term {self._exchange.term}"))

    async def _lead_until_lost(self) -> None:
        term = self._exchange.term
        assert self._lock is not None
        assert term is not None
        async with asyncio.TaskGroup() as group:  # a hanging database delays only their writes, never the shutdown
            writing = (
                group.create_task(self._send_heartbeats(), name="heartbeat"),
                group.create_task(self._keep_time_passing(), name="time of the replay"),
            )
            relaying = tasks.keep(partial(self._relay_writer.run, term), "relay")
            try:
                await self._lock.lost()
            finally:
                await tasks.end(relaying)
            self._database.write_trouble = self._lock.trouble  # so that no error claims that another process leads
            self._hold_time()
            log.error("this process has lost the leading role; trading stops here")
            self._was_standby = True
            self._events.publish(LeadershipChanged("this process has lost the leading role; trading stops here"))
            self._exchange.suspend()
            for task in writing:
                task.cancel()
        await self.resign()

    async def _send_heartbeats(self) -> None:
        beats = 0
        while True:
            beats += 1
            try:
                with self._trading.accounts.service_level.outcomes.watch("heartbeats"):
                    await self._beat()
                    writes = self._database.write_trouble is not None or beats % _PROBE_BEATS == 0
                    await self._database.probe(used_tables(), writes=writes)
                is_well = self._database.write_trouble is None
            except (Unavailable, asyncpg.PostgresError) as error:
                is_well = False
                log.warning("the heartbeat for the standbys was not written: %s", error)
            await asyncio.sleep(HEARTBEAT_S if is_well else _RECOVERY_S)

    async def _beat(self) -> None:
        term, key_names = self._exchange.term, tuple(self._context.settings.providers)
        if term is not None:
            async with self._database.writing() as conn:
                is_current = await update_heartbeat(conn, term, dict(self.running_schedulers()), key_names)
            if not is_current and term == self._exchange.term != self._unseated_in:
                self._unseated_in = term
                text = f"another process leads as well; the term {term} of this one is over, and its trades are refused"
                log.error(text)
                self._events.publish(LeadershipChanged(text))

    def _hold_time(self) -> None:
        """Hold a lockstep replay's clock while this process does not trade, when time would pass without decisions."""
        if self._lock is not None and isinstance(self._clock, LockstepClock):
            self._clock.hold()

    async def _resume_time(self) -> None:
        """Set a replay's clock to the latest time that an earlier leader may have reached, and hold it there."""
        if isinstance(self._clock, ScaledClock | LockstepClock):
            async with self._database.connection() as conn:
                lived_until = await select_lived_until(conn)
            self._clock.skip_to(lived_until or self._clock.now())
        if isinstance(self._clock, ScaledClock):
            self._clock.allow(self._clock.now())

    async def _let_time_pass(self) -> None:
        """Reserve spans of a paced replay's time in the database before they pass, so that a crash repeats none."""
        if isinstance(self._clock, ScaledClock):
            until = self._clock.now() + max(_LIVED_AHEAD_LEAST, self._clock.span_of(_LIVED_AHEAD_S))
            async with self._database.writing() as conn:
                await update_lived_until(conn, until)
            self._clock.allow(until)

    async def _keep_time_passing(self) -> None:
        while isinstance(self._clock, ScaledClock):
            await asyncio.sleep(_LIVED_AHEAD_S / 2)
            try:
                await self._let_time_pass()
            except Unavailable as error:
                log.warning("the replay is paused: %s", error)

    async def _follow(self) -> None:
        """Read the leader's changes, and publish live values at the price tracker's interval."""
        await self._relay_reader.poll()
        async with self._database.connection() as conn:
            changes = await select_changes(conn)
            self._leader_schedulers = await select_leader_schedulers(conn) or {}
        known = self._changes
        now = self._clock.now()
        is_due = interval_elapsed(self._shown_at + PRICE_TRACKER_EVERY, PRICE_TRACKER_EVERY, now)
        if known is None or changes.postings != known.postings or not self._market.quotes():
            await self._exchange.follow()
        if known is None or changes.models != known.models or is_due:
            await self._context.agents.follow()
        if known is None or changes.snapshots != known.snapshots:
            self._context.portfolio.note_written()
        if known is not None and changes.invocations > known.invocations:
            async with self._database.connection() as conn:
                ended = await select_chain_models(conn, known.invocations, changes.invocations)
            for model_id in ended:
                self._events.publish(ConversationsChanged(now, model_id))
        # Whatever the cause, another process writes now, unless none can lead.
        self._database.write_trouble = None if self._lock is None else self._lock.trouble
        self._changes = changes  # only now, so that a failed read is repeated next time
        if is_due:
            self._shown_at = now
            self._events.publish(MarketChecked(now))
