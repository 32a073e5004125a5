"""SQL of entrants: models with one configuration each."""

from collections.abc import Sequence
from typing import Final

import msgspec

from trader.domain.agents.entrants import Entrant
from trader.store.database.chain import insert_rows_record, lock_chain
from trader.store.database.pool import Connection

ENTRANT_COLUMNS: Final = (
    "model_id, number, fingerprint, encode(sha256(convert_to(configuration, 'UTF8')), 'hex') AS configuration_digest, "
    "answered_by, began_at"
)
MISSED_COLUMNS: Final = "model_id, run_number, entrant, missed"
"""The columns of `entrants` and of `invocation_counts` that are recorded in the chain."""

SELECT_LATEST_ENTRANT = """
SELECT model_id, number, fingerprint, configuration, answered_by, began_at
FROM entrants
WHERE model_id = $1
ORDER BY number DESC
LIMIT 1
"""


async def select_latest_entrant(conn: Connection, model_id: str) -> Entrant | None:
    """Return the present entrant of a model; None when it has none."""
    row = await conn.fetchrow(SELECT_LATEST_ENTRANT, model_id)
    return None if row is None else Entrant(**row)


INSERT_ENTRANT = f"""
INSERT INTO entrants (model_id, number, fingerprint, configuration, answered_by, began_at)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT DO NOTHING
RETURNING {ENTRANT_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def insert_entrant(conn: Connection, entrant: Entrant) -> None:
    """Insert an entrant, which ends its model's present one; an existing entrant stays unchanged.

    The connection is in a transaction: the entrant is recorded in the chain.
    """
    rows = await conn.fetch(INSERT_ENTRANT, *msgspec.structs.astuple(entrant))
    await insert_rows_record(conn, "entrants", rows)


UPDATE_ENTRANT_ANSWERED = f"""
UPDATE entrants SET answered_by = $3, fingerprint = $4 WHERE model_id = $1 AND number = $2 AND answered_by IS NULL
RETURNING {ENTRANT_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def update_entrant_answered(conn: Connection, entrant: Entrant) -> None:
    """Record the model that answered for an entrant where it is not known yet, in a transaction, in the chain too."""
    values = entrant.model_id, entrant.number, entrant.answered_by, entrant.fingerprint
    await insert_rows_record(conn, "entrants", await conn.fetch(UPDATE_ENTRANT_ANSWERED, *values))


UPSERT_MISSED_CYCLES = f"""
INSERT INTO invocation_counts AS c (model_id, run_number, entrant, finished, failed, tool_failed, missed)
SELECT m.id, coalesce(r.number, 0), m.entrant, 0, 0, 0, 1
FROM unnest($1::text[], $2::integer[]) AS m (id, entrant)
LEFT JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
ORDER BY m.id
ON CONFLICT (model_id, run_number, entrant) DO UPDATE SET missed = c.missed + 1
RETURNING {MISSED_COLUMNS}
"""  # noqa: S608 - a constant of this module


async def upsert_missed_cycles(conn: Connection, entrants: Sequence[Entrant]) -> None:
    """Increment the missed cycles of these entrants in the present runs of their models.

    The connection is in a transaction: the new counts are recorded in the chain.
    """
    models, numbers = [entrant.model_id for entrant in entrants], [entrant.number for entrant in entrants]
    await lock_chain(conn)
    rows = await conn.fetch(UPSERT_MISSED_CYCLES, models, numbers)
    await insert_rows_record(conn, "invocation_counts", rows)


UPSERT_CYCLES = """
INSERT INTO invocation_counts AS c (model_id, run_number, entrant, finished, failed, tool_failed, missed)
SELECT $1, r.number, $2, $3, 0, 0, $4
FROM runs r WHERE r.account_id = $1 AND r.ended_at IS NULL
ON CONFLICT (model_id, run_number, entrant) DO UPDATE SET finished = excluded.finished, missed = excluded.missed
"""


async def upsert_cycles(conn: Connection, entrant: Entrant, decided: int, missed: int) -> None:
    """Set the decided and missed cycles of an entrant in the present run, where some cycles have no record."""
    await conn.execute(UPSERT_CYCLES, entrant.model_id, entrant.number, decided, missed)
