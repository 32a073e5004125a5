"""SQL for halts and operator commands."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.database.leadership import LEADER_LOCK
from trader.database.pool import Connection
from trader.exchange.domain.halts import CommandOutcome, Halt, HaltCause, OperatorCommand, Verb
from trader.record.sql.chain import HALT_COLUMNS, insert_rows_record

# -- halts -----------------------------------------------------------------------------------------------------------

INSERT_HALT = f"""
INSERT INTO halts (account_id, cause, reason, halted_by) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING
RETURNING {HALT_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def insert_halt(conn: Connection, halt: Halt) -> bool:
    """Put a halt in force. Return False if the account is already halted for the same cause.

    The connection must be in a transaction: the halt is recorded in the chain.
    """
    rows = await conn.fetch(INSERT_HALT, halt.account_id, halt.cause, halt.reason, halt.by)
    await insert_rows_record(conn, "halts", rows)
    return bool(rows)


SELECT_HALTS = """
SELECT account_id, cause, reason, halted_by AS by, halted_at AS at
FROM halts WHERE lifted_at IS NULL OR $1::boolean ORDER BY id
"""


async def select_halts(conn: Connection, *, lifted: bool = False) -> list[Halt]:
    """Return the halts in force, with `lifted` all that ever were, oldest first."""
    return [msgspec.convert(dict(row), Halt) for row in await conn.fetch(SELECT_HALTS, lifted)]


UPDATE_HALTS_LIFTED = f"""
WITH lifted AS (
    UPDATE halts SET lifted_at = now(), lifted_by = $2
    WHERE lifted_at IS NULL AND coalesce(cause = $3, cause <> 'ladder')
        AND ($3::text IS NOT NULL AND $1::text IS NULL OR account_id IS NOT DISTINCT FROM $1)
    RETURNING {HALT_COLUMNS}
)
SELECT * FROM lifted ORDER BY id
"""  # noqa: S608 - a constant of this module


async def update_halts_lifted(
    conn: Connection, account_id: str | None, by: str, cause: HaltCause | None = None
) -> list[HaltCause]:
    """Lift the halts of one account, or of all accounts together (None), or all of a `cause`. Return their causes.

    Only its cause lifts a step down on the ladder. The connection must be in a transaction: the end of the halts is
    recorded in the chain.
    """
    rows = await conn.fetch(UPDATE_HALTS_LIFTED, account_id, by, cause)
    await insert_rows_record(conn, "halts", rows)
    return [HaltCause(row["cause"]) for row in rows]


SELECT_NOW = "SELECT now()"


async def select_now(conn: Connection) -> datetime:
    """Return the database's current time."""
    at: datetime = await conn.fetchval(SELECT_NOW)
    return at


# -- commands --------------------------------------------------------------------------------------------------------

INSERT_COMMAND = """
INSERT INTO commands (id, verb, account_id, reason, asked_by, term) VALUES ($1, $2, $3, $4, $5, $6)
"""


async def insert_command(conn: Connection, command: OperatorCommand) -> None:
    """Write a command for the leading process."""
    await conn.execute(INSERT_COMMAND, *msgspec.structs.astuple(command))


async def insert_halting_command(conn: Connection, command: OperatorCommand) -> bool:
    """Write a command to halt or flatten, with its halt. Return False if the halt was already in force.

    The connection must be in a transaction.
    """
    halt = Halt(
        account_id=command.account_id,
        cause=HaltCause.OPERATOR,
        reason=command.reason,
        by=command.asked_by,
        at=await select_now(conn),
    )
    is_new = await insert_halt(conn, halt)
    await insert_command(conn, command)
    return is_new


SELECT_OPEN_COMMANDS = """
SELECT id, verb, account_id, reason, asked_by, term, term IS NULL AND asked_at < now() - $1::interval AS expired
FROM commands WHERE finished_at IS NULL ORDER BY asked_at, id LIMIT $2
"""


async def select_open_commands(conn: Connection, expiry: timedelta, limit: int) -> list[tuple[OperatorCommand, bool]]:
    """Return the oldest unfinished commands, each with whether a person gave it longer than `expiry` ago.

    A loss limit's command does not expire.
    """
    return [
        (msgspec.convert(dict(row), OperatorCommand), row["expired"])
        for row in await conn.fetch(SELECT_OPEN_COMMANDS, expiry, limit)
    ]


SELECT_OPEN_COMMAND = """
SELECT id, verb, account_id, reason, asked_by, term
FROM commands WHERE finished_at IS NULL AND account_id = $1 AND verb = $2 ORDER BY asked_at, id LIMIT 1
"""


async def select_open_command(conn: Connection, account_id: str, verb: Verb) -> OperatorCommand | None:
    """Return the oldest unfinished command with this verb for the account, or None."""
    row = await conn.fetchrow(SELECT_OPEN_COMMAND, account_id, verb)
    return None if row is None else msgspec.convert(dict(row), OperatorCommand)


UPDATE_COMMAND_TAKEN = """
UPDATE commands SET taken_at = coalesce(taken_at, now()), progress = $2
WHERE id = $1 AND finished_at IS NULL AND (SELECT term FROM service_state) = $3
"""


async def update_command_taken(conn: Connection, command_id: UUID, progress: str, term: int | None) -> bool:
    """Record the progress of a command. Return False if it was finished or withdrawn, or if the `term` is over."""
    return (await conn.execute(UPDATE_COMMAND_TAKEN, command_id, progress, term)).endswith(" 1")


UPDATE_COMMAND_FINISHED = """
UPDATE commands SET finished_at = now(), outcome = $2
WHERE id = $1 AND finished_at IS NULL AND (SELECT term FROM service_state) = $3
"""


async def update_command_finished(
    conn: Connection, command_id: UUID, outcome: CommandOutcome, term: int | None
) -> bool:
    """Record the outcome of a command. Return False if it was finished before, or if the `term` is over.

    A process that has lost its lock without knowing it sees other accounts than the leader, which must carry it out.
    """
    return (await conn.execute(UPDATE_COMMAND_FINISHED, command_id, outcome, term)).endswith(" 1")


UPDATE_COMMAND_WITHDRAWN = """
UPDATE commands SET finished_at = now(), outcome = $2 WHERE id = $1 AND finished_at IS NULL AND taken_at IS NULL
"""


async def update_command_withdrawn(conn: Connection, command_id: UUID, outcome: CommandOutcome) -> bool:
    """Withdraw a command that no service has started. Return False if one has."""
    return (await conn.execute(UPDATE_COMMAND_WITHDRAWN, command_id, outcome)).endswith(" 1")


UPDATE_ALL_WITHDRAWN = """
WITH withdrawn AS (
    UPDATE commands SET finished_at = now(), outcome = $1 WHERE finished_at IS NULL
    RETURNING id, verb, account_id, reason, asked_by, term, asked_at
)
SELECT id, verb, account_id, reason, asked_by, term FROM withdrawn ORDER BY asked_at, id
"""


async def update_all_withdrawn(conn: Connection, outcome: CommandOutcome) -> list[OperatorCommand]:
    """Withdraw every unfinished command, begun or not, and return them."""
    return [msgspec.convert(dict(row), OperatorCommand) for row in await conn.fetch(UPDATE_ALL_WITHDRAWN, outcome)]


class CommandState(NamedTuple):
    """Progress of a command; `outcome` is set once it is finished."""

    taken: bool
    progress: str | None
    outcome: CommandOutcome | None


SELECT_COMMAND_STATE = "SELECT taken_at IS NOT NULL AS taken, progress, outcome FROM commands WHERE id = $1"


async def select_command_state(conn: Connection, command_id: UUID) -> CommandState | None:
    """Return the state of a command, or None if it does not exist."""
    row = await conn.fetchrow(SELECT_COMMAND_STATE, command_id)
    if row is None:
        return None
    outcome = None if row["outcome"] is None else msgspec.convert(row["outcome"], CommandOutcome, strict=False)
    return CommandState(row["taken"], row["progress"], outcome)


SELECT_HAS_LEADER = """
SELECT EXISTS (
    SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
        AND l.classid::bigint = $1::bigint >> 32 AND l.objid::bigint = $1::bigint & 4294967295 AND l.objsubid = 1
)
"""


async def select_has_leader(conn: Connection) -> bool:
    """Return whether a process leads on this database now."""
    return bool(await conn.fetchval(SELECT_HAS_LEADER, LEADER_LOCK))


SELECT_KNOWN_ACCOUNT = """
SELECT EXISTS (SELECT FROM accounts WHERE id = $1) OR EXISTS (SELECT FROM models WHERE id = $1)
"""


async def select_known_account(conn: Connection, account_id: str) -> bool:
    """Return whether the account exists, or a model whose account will have this ID."""
    return bool(await conn.fetchval(SELECT_KNOWN_ACCOUNT, account_id))


class Exposure(NamedTuple):
    """An open position, or a resting order with its limit price."""

    account_id: str
    symbol: str
    side: str
    quantity: Decimal
    limit_price: Decimal | None


SELECT_EXPOSURES = """
SELECT account_id, symbol, side, quantity, NULL::numeric AS limit_price
FROM orders WHERE status = 'OPEN' AND ($1::text IS NULL OR account_id = $1)
UNION ALL
SELECT account_id, symbol, side, remaining, limit_price
FROM limit_orders WHERE status = 'RESTING' AND ($1::text IS NULL OR account_id = $1)
ORDER BY account_id, symbol, side, limit_price NULLS FIRST, quantity
"""


async def select_exposures(conn: Connection, account_id: str | None) -> list[Exposure]:
    """Return the positions and resting orders of one account, or of all (None)."""
    return [Exposure(**row) for row in await conn.fetch(SELECT_EXPOSURES, account_id)]
