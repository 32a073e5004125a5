"""Leader election: of several processes on one database, the holder of an advisory lock trades.

The lock lives on a separate connection, so it ends with the process, however the process ends. Each leader has a term;
`exchange.sql.ledger` refuses postings of an earlier term, so a leader that lost its lock without noticing cannot write.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

import asyncpg

from trader.database.pool import NOT_REACHABLE, SELECT_ALIVE, Connection, connect_alone, transient_cause

log = logging.getLogger("trader.leadership")

_CHECK_EVERY_S: Final = 1.0
_CHECK_TIMEOUT_S: Final = 2.0
_KEEPALIVE: Final = {"tcp_keepalives_idle": "1", "tcp_keepalives_interval": "1", "tcp_keepalives_count": "2"}
"""Lets the server notice within seconds that the leader's machine is gone, and release the lock."""

SILENCE_S: Final = 5.0
"""The server releases the lock of a leader that is silent this long: stopped (SIGSTOP), or on a suspended machine."""

# "lead" in ASCII.
LEADER_LOCK: Final = 0x6C656164

# A lock on a replica excludes no one on its primary, and a replica's sessions survive its promotion.
TRY_LEADER_LOCK = "SELECT CASE WHEN pg_is_in_recovery() THEN false ELSE pg_try_advisory_lock($1) END"
SET_SILENCE = "SELECT set_config('idle_session_timeout', $1, false)"

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
        self._disconnected = asyncio.Event()
        self.trouble: str | None = None
        """Why the lock was lost or could not be requested; None if the server answered, even with another holder."""

    async def try_acquire(self) -> bool:
        """Try to become the leader. False on a replica until it is promoted, and if the database cannot answer."""
        try:
            if self._connection is None or self._connection.is_closed():
                own = {"application_name": "trader leader", **_KEEPALIVE}
                self._connection = await connect_alone(self._dsn, command_timeout_s=_CHECK_TIMEOUT_S, **own)
                self._disconnected.clear()
                self._connection.add_termination_listener(lambda _: self._disconnected.set())
            is_acquired = bool(await self._connection.fetchval(TRY_LEADER_LOCK, LEADER_LOCK))
        except _LOST as error:
            self.trouble = transient_cause(error, is_lost=True) or NOT_REACHABLE
            log.debug("the leader lock cannot be requested: %s", str(error) or type(error).__name__)
            await self.release()
            return False
        self.trouble = None
        return is_acquired

    async def lost(self) -> None:
        """Wait until the lock is lost: its connection broke, or the database stopped responding.

        The server counts silence only from here on: until now, this process may have been busy catching up. A check
        that times out is repeated once: a busy process may not have read the answer in time.
        """
        silence_ms: str | None = str(round(self._silence_s * 1000))
        is_repeated = False
        while self._connection is not None:
            try:
                if silence_ms is not None:
                    await self._connection.fetchval(SET_SILENCE, silence_ms)
                    silence_ms = None
                await self._connection.fetchval(SELECT_ALIVE)
                is_repeated = False
            except _LOST as error:
                if isinstance(error, TimeoutError) and not is_repeated:
                    is_repeated = True
                    continue
                log.warning("the leader lock is lost: %s", str(error) or type(error).__name__)
                self.trouble = transient_cause(error, is_lost=True) or NOT_REACHABLE
                await self.release()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._disconnected.wait(), _CHECK_EVERY_S)

    async def release(self) -> None:
        """Release the lock, if held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*_LOST):
                await connection.close(timeout=_CHECK_TIMEOUT_S)


UPDATE_TERM = "UPDATE service_state SET term = term + 1 RETURNING term"


async def update_term(conn: Connection) -> int:
    """Begin a new term: from now on, postings of earlier leaders are refused."""
    term: int = await conn.fetchval(UPDATE_TERM)
    return term


HOLD_TERM = "SELECT FROM service_state WHERE term = $1 FOR SHARE"


async def hold_term(conn: Connection, term: int | None) -> bool:
    """Return whether this is the current term. If it is, no new term begins until the transaction ends."""
    return bool(await conn.fetch(HOLD_TERM, term))


UPDATE_HEARTBEAT = "UPDATE service_state SET schedulers = $2, heartbeat_at = now() WHERE term = $1"


async def update_heartbeat(conn: Connection, term: int, schedulers: dict[str, bool]) -> None:
    """Record the leader's heartbeat and its running schedulers, for the standbys."""
    await conn.execute(UPDATE_HEARTBEAT, term, schedulers)


SELECT_LEADER_SCHEDULERS = """
SELECT CASE WHEN heartbeat_at > now() - interval '30 seconds' THEN schedulers END FROM service_state
"""


async def select_leader_schedulers(conn: Connection) -> dict[str, bool] | None:
    """Return which schedulers run on the leader; None if its last heartbeat is older than half a minute."""
    schedulers: dict[str, bool] | None = await conn.fetchval(SELECT_LEADER_SCHEDULERS)
    return schedulers
