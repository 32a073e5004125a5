"""Halts, the commands of operators, and what limits of losses are measured against."""

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.domain.exchange.halts import Command, Halt, HaltCause, Outcome, Verb
from trader.domain.operations.loss_limits import LossBaseline
from trader.store.database.leadership import LEADER_LOCK
from trader.store.database.pool import Connection

# -- halts -----------------------------------------------------------------------------------------------------------

INSERT_HALT = """
INSERT INTO halts (account_id, cause, reason, halted_by) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING
"""


async def insert_halt(conn: Connection, halt: Halt) -> bool:
    """Put a halt in force. False when the same account is halted for the same cause already."""
    done: str = await conn.execute(INSERT_HALT, halt.account_id, halt.cause, halt.reason, halt.by)
    return done.endswith(" 1")


SELECT_HALTS = """
SELECT account_id, cause, reason, halted_by, halted_at FROM halts WHERE lifted_at IS NULL ORDER BY id
"""


async def select_halts(conn: Connection) -> list[Halt]:
    """The halts in force, the oldest first."""
    return [
        Halt(
            account_id=row["account_id"],
            cause=HaltCause(row["cause"]),
            reason=row["reason"],
            by=row["halted_by"],
            at=row["halted_at"],
        )
        for row in await conn.fetch(SELECT_HALTS)
    ]


UPDATE_HALTS_LIFTED = """
UPDATE halts SET lifted_at = now(), lifted_by = $2
WHERE lifted_at IS NULL AND account_id IS NOT DISTINCT FROM $1
RETURNING cause
"""


async def update_halts_lifted(conn: Connection, account_id: str | None, by: str) -> list[HaltCause]:
    """Lift the halts of one account, or (None) those of all accounts together. Gives their causes."""
    return [HaltCause(row["cause"]) for row in await conn.fetch(UPDATE_HALTS_LIFTED, account_id, by)]


SELECT_NOW = "SELECT now()"


async def select_now(conn: Connection) -> datetime:
    """The database's time."""
    at: datetime = await conn.fetchval(SELECT_NOW)
    return at


# -- commands --------------------------------------------------------------------------------------------------------

INSERT_COMMAND = "INSERT INTO commands (id, verb, account_id, reason, asked_by) VALUES ($1, $2, $3, $4, $5)"


async def insert_command(conn: Connection, command: Command) -> None:
    """Ask the leading process for something."""
    await conn.execute(INSERT_COMMAND, command.id, command.verb, command.account_id, command.reason, command.asked_by)


SELECT_OPEN_COMMANDS = """
SELECT id, verb, account_id, reason, asked_by, asked_at < now() - $1::interval AS expired
FROM commands WHERE finished_at IS NULL ORDER BY asked_at, id LIMIT $2
"""


async def select_open_commands(conn: Connection, good_for: timedelta, limit: int) -> list[tuple[Command, bool]]:
    """The oldest commands that are not finished, each with whether it is older than it may become."""
    return [
        (
            Command(
                id=row["id"],
                verb=Verb(row["verb"]),
                account_id=row["account_id"],
                reason=row["reason"],
                asked_by=row["asked_by"],
            ),
            row["expired"],
        )
        for row in await conn.fetch(SELECT_OPEN_COMMANDS, good_for, limit)
    ]


UPDATE_COMMAND_TAKEN = """
UPDATE commands SET taken_at = coalesce(taken_at, now()), progress = $2 WHERE id = $1 AND finished_at IS NULL
"""


async def update_command_taken(conn: Connection, command_id: UUID, progress: str) -> bool:
    """Say that a command is carried out, and how far that is. False when it was finished or withdrawn meanwhile."""
    done: str = await conn.execute(UPDATE_COMMAND_TAKEN, command_id, progress)
    return done.endswith(" 1")


UPDATE_COMMAND_FINISHED = """
UPDATE commands SET finished_at = now(), outcome = $2 WHERE id = $1 AND finished_at IS NULL
"""


async def update_command_finished(conn: Connection, command_id: UUID, outcome: Outcome) -> None:
    """Record what became of a command."""
    await conn.execute(UPDATE_COMMAND_FINISHED, command_id, outcome)


UPDATE_COMMAND_WITHDRAWN = """
UPDATE commands SET finished_at = now(), outcome = $2 WHERE id = $1 AND finished_at IS NULL AND taken_at IS NULL
"""


async def update_command_withdrawn(conn: Connection, command_id: UUID, outcome: Outcome) -> bool:
    """Take a command back that nobody has begun with. False when somebody has."""
    done: str = await conn.execute(UPDATE_COMMAND_WITHDRAWN, command_id, outcome)
    return done.endswith(" 1")


class CommandState(NamedTuple):
    """How far a command is; `outcome` is there once it is finished."""

    taken: bool
    progress: str | None
    outcome: Outcome | None


SELECT_COMMAND_STATE = "SELECT taken_at IS NOT NULL AS taken, progress, outcome FROM commands WHERE id = $1"


async def select_command_state(conn: Connection, command_id: UUID) -> CommandState | None:
    """How far a command is; None when there is none."""
    row = await conn.fetchrow(SELECT_COMMAND_STATE, command_id)
    if row is None:
        return None
    outcome = None if row["outcome"] is None else msgspec.convert(row["outcome"], Outcome, strict=False)
    return CommandState(row["taken"], row["progress"], outcome)


SELECT_HAS_LEADER = """
SELECT EXISTS (
    SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
        AND l.classid::bigint = $1 >> 32 AND l.objid::bigint = $1 & 4294967295 AND l.objsubid = 1
)
"""


async def select_has_leader(conn: Connection) -> bool:
    """Whether a process trades on this database now."""
    found: bool = await conn.fetchval(SELECT_HAS_LEADER, LEADER_LOCK)
    return found


SELECT_KNOWN_ACCOUNT = """
SELECT EXISTS (SELECT FROM accounts WHERE id = $1) OR EXISTS (SELECT FROM models WHERE id = $1)
"""


async def select_known_account(conn: Connection, account_id: str) -> bool:
    """Whether there is such an account, or a model that will have it."""
    found: bool = await conn.fetchval(SELECT_KNOWN_ACCOUNT, account_id)
    return found


class Exposure(NamedTuple):
    """A position, or (with its limit) a resting order."""

    account_id: str
    symbol: str
    side: str
    quantity: Decimal
    limit_price: Decimal | None


SELECT_HOLDINGS = """
SELECT account_id, symbol, side, quantity, NULL::numeric AS limit_price
FROM orders WHERE status = 'OPEN' AND ($1::text IS NULL OR account_id = $1)
UNION ALL
SELECT account_id, symbol, side, remaining, limit_price
FROM limit_orders WHERE status = 'RESTING' AND ($1::text IS NULL OR account_id = $1)
ORDER BY account_id, symbol, side
"""


async def select_holdings(conn: Connection, account_id: str | None) -> list[Exposure]:
    """What an account, or all (None), hold and have resting."""
    return [Exposure(*row) for row in await conn.fetch(SELECT_HOLDINGS, account_id)]


# -- limits ----------------------------------------------------------------------------------------------------------


class Recalled(NamedTuple):
    """What the rows say of an account: its mark, if there is one of its run, and its equity since.

    `peak_since` and `first_today` are of snapshots, None where there is none.
    """

    account_id: str
    run_id: UUID
    initial_capital: Decimal
    mark: LossBaseline | None
    peak_since: Decimal | None
    first_today: Decimal | None


# Of raw snapshots only the last day's are read; what is older is in the hourly values.
SELECT_RECALLED = """
SELECT r.account_id, r.id AS run_id, r.initial_capital, m.run_id AS marked_run_id, m.day, m.day_start, m.peak, m.last,
       greatest(
           (SELECT max(h.last) FROM portfolio_hourly h
            WHERE h.account_id = r.account_id AND h.run_id = r.id
                AND (m.run_id IS DISTINCT FROM r.id OR h.last_at > m.updated_at)),
           (SELECT max(s.net_portfolio) FROM portfolio_snapshots s
            WHERE s.account_id = r.account_id AND s.run_id = r.id AND s.created_at >= $1
                AND (m.run_id IS DISTINCT FROM r.id OR s.created_at > m.updated_at))
       ) AS peak_since,
       (SELECT s.net_portfolio FROM portfolio_snapshots s
        WHERE s.account_id = r.account_id AND s.run_id = r.id AND s.created_at >= $1
        ORDER BY s.created_at LIMIT 1) AS first_today
FROM runs r
LEFT JOIN equity_marks m ON m.account_id = r.account_id
WHERE r.ended_at IS NULL
"""


async def select_recalled(conn: Connection, midnight: datetime) -> list[Recalled]:
    """What is known of the equity of every account in its run."""
    return [
        Recalled(
            row["account_id"],
            row["run_id"],
            row["initial_capital"],
            None
            if row["marked_run_id"] is None
            else LossBaseline(
                run_id=row["marked_run_id"],
                day=row["day"],
                day_start=row["day_start"],
                peak=row["peak"],
                last=row["last"],
            ),
            row["peak_since"],
            row["first_today"],
        )
        for row in await conn.fetch(SELECT_RECALLED, midnight)
    ]


SELECT_TOTAL_MARK = "SELECT day, day_start, peak, last FROM equity_marks WHERE account_id IS NULL"


async def select_total_mark(conn: Connection) -> LossBaseline | None:
    """The mark of all accounts together."""
    row = await conn.fetchrow(SELECT_TOTAL_MARK)
    return None if row is None else LossBaseline(run_id=None, **row)


UPSERT_MARKS = """
INSERT INTO equity_marks (account_id, run_id, day, day_start, peak, last, updated_at)
SELECT *, $7 FROM unnest($1::text[], $2::uuid[], $3::date[], $4::numeric[], $5::numeric[], $6::numeric[])
ON CONFLICT (account_id) DO UPDATE
SET run_id = excluded.run_id, day = excluded.day, day_start = excluded.day_start, peak = excluded.peak,
    last = excluded.last, updated_at = excluded.updated_at
"""


async def upsert_marks(conn: Connection, marks: Sequence[tuple[str | None, LossBaseline]], at: datetime) -> None:
    """Record marks as of a moment of the service's time."""
    days: list[date] = [mark.day for _, mark in marks]
    await conn.execute(
        UPSERT_MARKS,
        [account_id for account_id, _ in marks],
        [mark.run_id for _, mark in marks],
        days,
        [mark.day_start for _, mark in marks],
        [mark.peak for _, mark in marks],
        [mark.last for _, mark in marks],
        at,
    )


UPDATE_MARKS_RENEWED = """
UPDATE equity_marks SET day_start = NULL, peak = NULL WHERE account_id IS NOT DISTINCT FROM $1
"""


async def update_marks_renewed(conn: Connection, account_id: str | None) -> None:
    """Have losses of an account, or of all together (None), measured from the next equity on."""
    await conn.execute(UPDATE_MARKS_RENEWED, account_id)
