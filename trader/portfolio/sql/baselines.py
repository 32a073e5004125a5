"""SQL of baselines: their runs and states. Their values are in the portfolio snapshots, under their ids."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from trader.database.pool import Connection, columns_of
from trader.portfolio.domain.baselines import Baseline, BaselineState
from trader.portfolio.sql.analytics import CurrentRun

SELECT_BASELINES = "SELECT id AS model_id, run_id, initial_capital, started_at FROM baselines ORDER BY id"


async def select_baselines(conn: Connection) -> list[CurrentRun]:
    """Return the current run of every baseline."""
    return [CurrentRun(**row) for row in await conn.fetch(SELECT_BASELINES)]


class SavedBaseline(NamedTuple):
    """A saved baseline that includes every tick until `seen_until`."""

    baseline: Baseline
    state: BaselineState
    seen_until: datetime


SELECT_BASELINE_STATES = "SELECT id, name, variant, state, seen_until FROM baselines ORDER BY id"


async def select_baseline_states(conn: Connection) -> list[SavedBaseline]:
    """Return every baseline as it was saved."""
    rows = await conn.fetch(SELECT_BASELINE_STATES)
    saved = [((row["id"], row["name"], row["variant"]), row["state"], row["seen_until"]) for row in rows]
    return msgspec.convert(saved, list[SavedBaseline])


UPSERT_BASELINES = """
INSERT INTO baselines AS b (id, name, variant, run_id, initial_capital, started_at, state, seen_until)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::numeric[], $6::timestamptz[],
                     $7::jsonb[], $8::timestamptz[])
ON CONFLICT (id) DO UPDATE
SET name = excluded.name, run_id = excluded.run_id, initial_capital = excluded.initial_capital,
    started_at = excluded.started_at, state = excluded.state, seen_until = excluded.seen_until
"""


async def upsert_baselines(conn: Connection, baselines: Sequence[SavedBaseline]) -> None:
    """Save the states of baselines."""
    rows = []
    for baseline, state, seen_until in baselines:
        run = state.account.run
        began = run.id, run.initial_capital, run.started_at
        rows.append((*baseline[:3], *began, msgspec.to_builtins(state), seen_until))
    await conn.execute(UPSERT_BASELINES, *columns_of(rows, 8))


UPDATE_BASELINES_SEEN = "UPDATE baselines SET seen_until = $1 WHERE seen_until <> $1"


async def update_baselines_seen(conn: Connection, until: datetime) -> None:
    """Record that every baseline includes every tick until a time."""
    await conn.execute(UPDATE_BASELINES_SEEN, until)
