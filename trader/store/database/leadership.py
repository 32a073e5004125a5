"""Which of several processes on one database trades: the one that holds an advisory lock.

The lock lives on a connection of its own, so that it ends with the process, however that ends. Each leader has a term;
bookings of an earlier term are refused by `bookings.UPDATE_ACCOUNTS`, so one that has lost its lock without knowing
cannot write any more.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

import asyncpg

from trader.store.database.pool import CONNECT_TIMEOUT_S, Connection

log = logging.getLogger("trader.leadership")

_CHECK_EVERY_S: Final = 1.0
_CHECK_TIMEOUT_S: Final = 2.0
_KEEPALIVE: Final = {"tcp_keepalives_idle": "1", "tcp_keepalives_interval": "1", "tcp_keepalives_count": "2"}
"""Lets the server notice within seconds that the leader's machine is gone, and free the lock."""

SILENCE_S: Final = 5.0
"""A leader that the server has not heard for so long stands still (SIGSTOP, a machine at rest): its lock is freed."""

# "lead" in ASCII.
LEADER_LOCK: Final = 0x6C656164

TRY_LEADER_LOCK = "SELECT pg_try_advisory_lock($1)"
SELECT_ALIVE = "SELECT 1"
SET_SILENCE = "SELECT set_config('idle_session_timeout', $1, false)"

# The third: a question whose time ran out while the process stood still leaves the library between two states.
_LOST: Final = (
    asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError
)  # fmt: skip


class LeaderLock:
    """The advisory lock of the leader, tried for by `try_acquire` and watched by `lost`."""

    def __init__(self, dsn: str, silence_s: float = 0) -> None:
        """The lock ends with a silence of `silence_s` while it is watched; 0 is never."""
        self._dsn = dsn
        self._silence_s = silence_s
        self._connection: asyncpg.Connection[Any] | None = None
        self._cut = asyncio.Event()

    async def try_acquire(self) -> bool:
        """Whether this process leads now. False, too, when the database cannot answer."""
        try:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(
                    self._dsn,
                    timeout=CONNECT_TIMEOUT_S,
                    command_timeout=_CHECK_TIMEOUT_S,
                    server_settings={"application_name": "trader leader", **_KEEPALIVE},
                )
                self._cut.clear()
                self._connection.add_termination_listener(lambda _: self._cut.set())
            return bool(await self._connection.fetchval(TRY_LEADER_LOCK, LEADER_LOCK))
        except _LOST as error:
            log.debug("the leader lock cannot be tried for: %s", str(error) or type(error).__name__)
            await self.release()
            return False

    async def lost(self) -> None:
        """Wait until the lock is lost: its connection was cut, or the database stopped answering.

        The server counts silence from here on only: catching up on a long downtime may keep this process busy before.
        """
        silence_ms: str | None = str(round(self._silence_s * 1000))
        while self._connection is not None:
            try:
                if silence_ms is not None:
                    await self._connection.fetchval(SET_SILENCE, silence_ms)
                    silence_ms = None
                await self._connection.fetchval(SELECT_ALIVE)
            except _LOST as error:
                log.warning("the leader lock is lost: %s", str(error) or type(error).__name__)
                await self.release()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._cut.wait(), _CHECK_EVERY_S)

    async def release(self) -> None:
        """Give the lock up, if it is held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*_LOST):
                await connection.close(timeout=_CHECK_TIMEOUT_S)


UPDATE_TERM = "UPDATE service_state SET term = term + 1 RETURNING term"


async def update_term(conn: Connection) -> int:
    """Begin a new term: what an earlier leader still wants to book is refused from here on."""
    term: int = await conn.fetchval(UPDATE_TERM)
    return term


UPDATE_HEARTBEAT = "UPDATE service_state SET schedulers = $2, heartbeat_at = now() WHERE term = $1"


async def update_heartbeat(conn: Connection, term: int, schedulers: dict[str, bool]) -> None:
    """Tell the standbys which schedulers run here."""
    await conn.execute(UPDATE_HEARTBEAT, term, schedulers)


SELECT_LEADER_SCHEDULERS = """
SELECT CASE WHEN heartbeat_at > now() - interval '30 seconds' THEN schedulers END FROM service_state
"""


async def select_leader_schedulers(conn: Connection) -> dict[str, bool] | None:
    """Which schedulers run on the leader; None when it has not told for half a minute."""
    schedulers: dict[str, bool] | None = await conn.fetchval(SELECT_LEADER_SCHEDULERS)
    return schedulers


SELECT_SEQUENCES = "SELECT id, sequence FROM accounts"


async def select_sequences(conn: Connection) -> dict[str, int]:
    """The sequence of every account, by which a standby sees what has changed."""
    return {record["id"]: record["sequence"] for record in await conn.fetch(SELECT_SEQUENCES)}
