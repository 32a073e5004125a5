"""SQL of entrants: a model with one configuration."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import astuple

from trader.agents.domain.entrants import Entrant
from trader.database.pool import Connection
from trader.record.sql.chain import ENTRANT_COLUMNS, MISSED_COLUMNS, insert_rows_record, lock_chain

COLUMNS: Final = ", ".join(Entrant.__struct_fields__)

SELECT_LATEST_ENTRANT = f"""
SELECT {COLUMNS} FROM entrants WHERE model_id = $1 ORDER BY number DESC LIMIT 1
"""  # noqa: S608 - a constant of this module


async def select_latest_entrant(conn: Connection, model_id: str) -> Entrant | None:
    """Return the present entrant of a model; None when it has none."""
    row = await conn.fetchrow(SELECT_LATEST_ENTRANT, model_id)
    return None if row is None else Entrant(**row)


INSERT_ENTRANT = f"""
INSERT INTO entrants ({COLUMNS})
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT DO NOTHING
RETURNING {ENTRANT_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def insert_entrant(conn: Connection, entrant: Entrant) -> None:
    """Insert an entrant, which replaces its model's present one; leave an existing entrant unchanged.

    The connection must be in a transaction: the entrant is also recorded in the chain.
    """
    rows = await conn.fetch(INSERT_ENTRANT, *astuple(entrant))
    await insert_rows_record(conn, "entrants", rows)


UPDATE_ENTRANT_ANSWERED = f"""
UPDATE entrants SET answered_by = $3, fingerprint = $4 WHERE model_id = $1 AND number = $2 AND answered_by IS NULL
RETURNING {ENTRANT_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def update_entrant_answered(conn: Connection, entrant: Entrant) -> None:
    """Record, also in the chain, the model that answered for an entrant, if not yet known. Needs a transaction."""
    values = entrant.model_id, entrant.number, entrant.answered_by, entrant.fingerprint
    await insert_rows_record(conn, "entrants", await conn.fetch(UPDATE_ENTRANT_ANSWERED, *values))


UPSERT_MISSED_CYCLES = f"""
INSERT INTO invocation_counts AS c (model_id, run_number, entrant, season, finished, failed, tool_failed, missed,
                                    missed_at)
SELECT m.id, coalesce(r.number, 0), m.entrant, season_at($3), 0, 0, 0, 1, $3
FROM unnest($1::text[], $2::integer[]) AS m (id, entrant)
LEFT JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
ORDER BY m.id
ON CONFLICT (model_id, run_number, entrant, season) DO UPDATE
SET missed = c.missed + 1, missed_at = excluded.missed_at
RETURNING {MISSED_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def upsert_missed_cycles(conn: Connection, entrants: Sequence[Entrant], at: datetime) -> None:
    """Increment the missed cycles of these entrants in the present runs of their models, for a cycle due at a time.

    The connection must be in a transaction: the new counts are also recorded in the chain.
    """
    models, numbers = [entrant.model_id for entrant in entrants], [entrant.number for entrant in entrants]
    await lock_chain(conn)
    rows = await conn.fetch(UPSERT_MISSED_CYCLES, models, numbers, at)
    await insert_rows_record(conn, "invocation_counts", rows)


UPSERT_CYCLES = """
INSERT INTO invocation_counts AS c (model_id, run_number, entrant, finished, failed, tool_failed, missed)
SELECT $1, r.number, $2, $3, 0, 0, $4
FROM runs r WHERE r.account_id = $1 AND r.ended_at IS NULL
ON CONFLICT (model_id, run_number, entrant, season) DO UPDATE SET finished = excluded.finished, missed = excluded.missed
"""


async def upsert_cycles(conn: Connection, entrant: Entrant, decided: int, missed: int) -> None:
    """Set the decided and missed cycles of an entrant in the present run, for cycles that have no record."""
    await conn.execute(UPSERT_CYCLES, entrant.model_id, entrant.number, decided, missed)


SELECT_ENTRANTS = f"SELECT {COLUMNS} FROM entrants ORDER BY model_id, number"  # noqa: S608 - a constant of this module


async def select_entrants(conn: Connection) -> dict[tuple[str, int], Entrant]:
    """Return every entrant by model id and number."""
    return {(row["model_id"], row["number"]): Entrant(**row) for row in await conn.fetch(SELECT_ENTRANTS)}
