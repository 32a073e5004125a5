"""Leader election: of several processes on one database, the holder of an advisory lock trades.

The lock lives on a separate connection, so it ends with the process, however the process ends. Each leader has a term;
`exchange.sql.ledger` refuses postings of an earlier term, so a leader that lost its lock without noticing cannot write.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import asyncpg

from trader.core import tasks
from trader.database.pool import NOT_REACHABLE, SELECT_ALIVE, Connection, connect_alone, transient_cause

log = logging.getLogger("trader.leadership")

_CHECK_EVERY_S: Final = 1.0
_CHECK_TIMEOUT_S: Final = 2.0
_KEEPALIVE: Final = {"tcp_keepalives_idle": "1", "tcp_keepalives_interval": "1", "tcp_keepalives_count": "2"}
"""Lets the server notice within seconds that the leader's machine is gone, and release the lock."""

SILENCE_S: Final = 5.0
"""The server releases the lock of a leader that is silent this long: stopped (SIGSTOP), or on a suspended machine."""

FROZEN_S: Final = 3.0
"""How long the server must have waited for a process within a transaction, which a successor then ends."""

_BEGINNING_SHARE: Final = 6
"""How many times as long it may be silent while it begins to lead, since it is busy catching up."""

# "lead" in ASCII.
LEADER_LOCK: Final = 0x6C656164

# A lock on a replica excludes no one on its primary, and a replica's sessions survive its promotion.
TRY_LEADER_LOCK = "SELECT CASE WHEN pg_is_in_recovery() THEN false ELSE pg_try_advisory_lock($1) END"
SET_SILENCE = "SELECT set_config('idle_session_timeout', $1, false)"

# The server waits for a frozen process in any state, even within a statement (COPY, Parse without Sync), where
# `idle_in_transaction_session_timeout` does not count.
END_FROZEN = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity AS frozen
WHERE datname = current_database() AND usename = current_user AND application_name = 'trader' AND state <> 'idle'
    AND wait_event_type = 'Client' AND state_change < clock_timestamp() - make_interval(secs => $1)
    AND EXISTS (
        SELECT FROM pg_locks
        WHERE pid = frozen.pid AND granted AND locktype IN ('relation', 'advisory') AND mode <> 'AccessShareLock'
    )
"""

# InternalClientError: a query that timed out while the process was stopped leaves asyncpg between states.
_LOST: Final = (
    asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError
)  # fmt: skip


class LeaderLock:
    """The leader's advisory lock: acquired by `try_acquire`, watched by `lost`."""

    def __init__(self, dsn: str, silence_s: float = 0) -> None:
        """Set the silence, in seconds without a query, after which the server releases a watched lock (0: never)."""
        self._dsn = dsn
        self._silence_s = silence_s
        self._connection: asyncpg.Connection[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_beginning = True
        self.trouble: str | None = None
        """Why the lock was lost or could not be requested; None if the server answered, even with another holder."""

    async def try_acquire(self) -> bool:
        """Try to become the leader. False on a replica until it is promoted, and if the database cannot answer.

        It ends what a frozen predecessor left open, which would block this process for as long as that is frozen.
        """
        try:
            if self._connection is None or self._connection.is_closed():
                own = {"application_name": "trader leader", **_KEEPALIVE}
                self._connection = await connect_alone(self._dsn, command_timeout_s=_CHECK_TIMEOUT_S, **own)
            is_acquired = bool(await self._connection.fetchval(TRY_LEADER_LOCK, LEADER_LOCK))
            if is_acquired and await self._connection.fetchval(END_FROZEN, FROZEN_S):
                log.warning("ended the transactions of a process that is frozen")
        except _LOST as error:
            self.trouble = transient_cause(error, is_lost=True) or NOT_REACHABLE
            log.debug("the leader lock cannot be requested: %s", str(error) or type(error).__name__)
            await self.release()
            return False
        self.trouble = None
        if is_acquired:
            self._is_beginning = True
            self._watching = tasks.start(self._watch(self._connection), "leader lock")
        return is_acquired

    async def lost(self) -> None:
        """Wait until the lock is lost: its connection broke, or the database stopped responding.

        A check that times out is repeated once: a busy process may not have read the answer in time. Until now, while
        this process was busy catching up, any number of them was.
        """
        self._is_beginning = False
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def _watch(self, connection: "asyncpg.Connection[Any]") -> None:
        disconnected = asyncio.Event()
        connection.add_termination_listener(lambda _: disconnected.set())
        silence_s: float | None = None
        is_repeated = False
        while self._connection is connection:
            try:
                allowed_s = self._silence_s * (_BEGINNING_SHARE if self._is_beginning else 1)
                if silence_s != allowed_s:
                    await connection.fetchval(SET_SILENCE, str(round(allowed_s * 1000)))
                    silence_s = allowed_s
                await connection.fetchval(SELECT_ALIVE)
                is_repeated = False
            except _LOST as error:
                if isinstance(error, TimeoutError) and (self._is_beginning or not is_repeated):
                    is_repeated = True
                    continue
                if self._connection is connection:
                    log.warning("the leader lock is lost: %s", str(error) or type(error).__name__)
                    self.trouble = transient_cause(error, is_lost=True) or NOT_REACHABLE
                    await self.release()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(disconnected.wait(), _CHECK_EVERY_S)

    async def release(self) -> None:
        """Release the lock, if held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*_LOST):
                await connection.close(timeout=_CHECK_TIMEOUT_S)


UPDATE_TERM = "UPDATE service_state SET term = term + 1 RETURNING term"


async def update_term(conn: Connection) -> int:
    """Begin a new term: from now on, postings of earlier leaders are refused."""
    return int(await conn.fetchval(UPDATE_TERM))


HOLD_TERM = "SELECT FROM service_state WHERE term = $1 FOR SHARE"


async def hold_term(conn: Connection, term: int | None) -> bool:
    """Return whether this is the current term. If it is, no new term begins until the transaction ends."""
    return bool(await conn.fetch(HOLD_TERM, term))


UPDATE_HEARTBEAT = """
UPDATE service_state SET schedulers = $2, key_names = $3, heartbeat_at = now() WHERE term = $1 RETURNING true
"""


async def update_heartbeat(conn: Connection, term: int, schedulers: dict[str, bool], key_names: Iterable[str]) -> bool:
    """Record the leader's heartbeat, schedulers and providers (`Settings.providers`). False if its term is over."""
    return bool(await conn.fetchval(UPDATE_HEARTBEAT, term, schedulers, list(key_names)))


SELECT_LEADER_SCHEDULERS = """
SELECT CASE WHEN heartbeat_at > now() - interval '30 seconds' THEN schedulers END FROM service_state
"""


async def select_leader_schedulers(conn: Connection) -> dict[str, bool] | None:
    """Return which schedulers run on the leader; None if its last heartbeat is older than half a minute."""
    schedulers: dict[str, bool] | None = await conn.fetchval(SELECT_LEADER_SCHEDULERS)
    return schedulers


SELECT_IS_LED = """
SELECT NOT pg_is_in_recovery() AND heartbeat_at > now() - interval '30 seconds' FROM service_state
"""


async def is_led(dsn: str) -> bool:
    """Return whether this is a primary on which a leader writes now; False if it does not answer."""
    with suppress(*_LOST, ValueError):
        connection = await connect_alone(dsn, command_timeout_s=_CHECK_TIMEOUT_S)
        try:
            return bool(await connection.fetchval(SELECT_IS_LED))
        finally:
            await connection.close(timeout=_CHECK_TIMEOUT_S)
    return False
