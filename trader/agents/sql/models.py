"""SQL of models: their definitions and activity."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.domain.models import Model, ModelConfiguration, ProviderDefinition
from trader.agents.domain.strategy import StrategyState
from trader.core.errors import StartError
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, part_of_row
from trader.record.domain.results import REMOVED
from trader.record.sql.chain import MODEL_COLUMNS, insert_record, insert_rows_record

SELECT_MODELS = """
SELECT id, name, variant, provider, router_model_name, logo, active, created_at, venue_account_index,
       venue_key_variable, configuration
FROM models
ORDER BY created_at, id
"""


async def select_models(conn: Connection) -> list[Model]:
    """Return every model, oldest first.

    :raises StartError: another program wrote the row of one, so that it cannot be read
    """
    models = []
    for row in await conn.fetch(SELECT_MODELS):
        try:
            variant = VariantId(row["variant"])
            configuration = msgspec.convert(row["configuration"], ModelConfiguration)
        except (ValueError, msgspec.ValidationError) as error:
            raise StartError(f"the row of the model {row['id']} cannot be read: {error}") from None
        models.append(Model(**{**row, "variant": variant, "configuration": configuration}))
    return models


# "history" in ASCII.
HISTORY_LOCK: Final = 0x686973746F7279
HISTORY_TIMEOUT_S: Final = 600.0
NO_LOCK_TIMEOUT = "SET LOCAL lock_timeout = 0"
LOCK_HISTORY = "SELECT pg_advisory_xact_lock($1)"


async def lock_history(conn: Connection) -> None:
    """Wait until no history is being written, and block other callers until the transaction ends.

    A model added meanwhile would trade in the history before its account is open.
    """
    await conn.execute(NO_LOCK_TIMEOUT)
    await conn.execute(LOCK_HISTORY, HISTORY_LOCK, timeout=HISTORY_TIMEOUT_S)


UPDATE_VENUE_ACCOUNT = "UPDATE models SET venue_account_index = $2, venue_key_variable = $3 WHERE id = $1"


async def update_venue_account(conn: Connection, model_id: str, account: str | None, key_variable: str | None) -> None:
    """Set the venue account that a model trades, and the variable with its key; None for the settings'."""
    await conn.execute(UPDATE_VENUE_ACCOUNT, model_id, account, key_variable)


UPDATE_MODEL_ACTIVE = "UPDATE models SET active = $2 WHERE id = $1"


async def update_model_active(conn: Connection, model_id: str, *, is_active: bool) -> None:
    """Set whether a model is invoked in future cycles."""
    await conn.execute(UPDATE_MODEL_ACTIVE, model_id, is_active)


# An account at a venue has real money.
DELETE_MODEL = """
DELETE FROM models WHERE id = $1 AND NOT EXISTS (SELECT FROM fills WHERE account_id = $1)
    AND NOT EXISTS (SELECT FROM service_state WHERE trading_mode = 'live')
"""


async def delete_model(conn: Connection, model_id: str) -> bool:
    """Delete a model whose account has never traded, and record it. Return whether it is gone.

    :raises asyncpg.ForeignKeyViolationError: the model has invocations, a note, a key or a webhook
    """
    if is_gone := await conn.execute(DELETE_MODEL, model_id) == "DELETE 1":
        await insert_record(conn, REMOVED, {"model_id": model_id})
    return is_gone


UPDATE_REACHING_OUT_INACTIVE = """
UPDATE models SET active = false WHERE provider = 'strategy' OR configuration->>'provider_definition' IS NOT NULL
"""


async def update_reaching_out_inactive(conn: Connection) -> None:
    """Deactivate the models that run a file, or send prompts to an address of their own."""
    await conn.execute(UPDATE_REACHING_OUT_INACTIVE)


UPDATE_MODEL_CONFIGURATION = f"""
UPDATE models SET configuration = configuration || $2::jsonb, router_model_name = coalesce($3, router_model_name)
WHERE id = $1
RETURNING {MODEL_COLUMNS}
"""  # noqa: S608 - a constant of this package


async def update_model_configuration(
    conn: Connection, model_id: str, fields: Mapping[str, Any], router_model_name: str | None = None
) -> None:
    """Set fields of a model's configuration, and its provider's name for it unless that is None.

    The connection must be in a transaction: the model is also recorded in the chain.
    """
    rows = await conn.fetch(UPDATE_MODEL_CONFIGURATION, model_id, fields, router_model_name)
    await insert_rows_record(conn, "models", rows)


SELECT_RECORDED_MODEL = f"""
SELECT {MODEL_COLUMNS} FROM models WHERE id = $1
"""  # noqa: S608 - a constant of this package

UPSERT_MODEL = f"""
INSERT INTO models (id, name, variant, provider, router_model_name, logo, active, created_at, configuration)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (id) DO UPDATE
SET name = excluded.name, variant = excluded.variant, provider = excluded.provider,
    router_model_name = excluded.router_model_name, logo = excluded.logo, active = excluded.active,
    configuration = excluded.configuration
RETURNING {MODEL_COLUMNS}
"""  # noqa: S608 - a constant of this package


async def upsert_model(conn: Connection, model: Model) -> None:
    """Insert a model, or update an existing one except its `created_at` and venue account.

    The connection must be in a transaction: what identifies the model is also recorded in the chain when it changes.
    """
    before = await conn.fetch(SELECT_RECORDED_MODEL, model.id)
    after = await conn.fetch(
        UPSERT_MODEL,
        model.id,
        model.name,
        model.variant.value,
        model.provider,
        model.router_model_name,
        model.logo,
        model.active,
        model.created_at,
        msgspec.to_builtins(model.configuration),
    )
    await insert_rows_record(conn, "models", after if after != before else ())


UPDATE_PROVIDER_DEFINITION = """
UPDATE models SET configuration = configuration || jsonb_build_object('provider_definition', $2::jsonb)
WHERE provider = $1
"""


async def update_provider_definition(conn: Connection, provider: str, definition: ProviderDefinition) -> None:
    """Set the definition of a provider for every model that uses it."""
    await conn.execute(UPDATE_PROVIDER_DEFINITION, provider, msgspec.to_builtins(definition))


FILLS_BY_HAND: Final = """
order_requests q JOIN fills f ON f.request_id = q.id WHERE q.run_id = r.id AND q.answer @> '{"manual": true}'
"""
"""FROM clause of the fills of manual orders in the run `r`. Further conditions may follow."""

SELECT_MODEL_ACTIVITY = f"""
SELECT m.id,
       coalesce((SELECT sum(finished) FROM invocation_counts WHERE model_id = m.id), 0)::bigint AS invocation_count,
       (SELECT max(started_at) FROM invocations WHERE model_id = m.id) AS last_invoked_at,
       (SELECT min(f.created_at) FROM {FILLS_BY_HAND}) AS manual_since
FROM models m
LEFT JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
ORDER BY m.id
"""  # noqa: S608 - a constant of this module


class ModelActivity(NamedTuple):
    """A model's count of finished invocations, the start of the last one, and the time of its first manual order."""

    invocation_count: int = 0
    last_invoked_at: datetime | None = None
    manual_since: datetime | None = None


async def select_model_activity(conn: Connection) -> dict[str, ModelActivity]:
    """Return the activity of each model."""
    rows = await conn.fetch(SELECT_MODEL_ACTIVITY)
    return {row["id"]: part_of_row(row, ModelActivity) for row in rows}


SELECT_STRATEGY_STATE = "SELECT state, decided_at FROM strategy_states WHERE model_id = $1"


async def select_strategy_state(conn: Connection, model_id: str) -> StrategyState | None:
    """Return the state of a model's strategy; None when there is none."""
    row = await conn.fetchrow(SELECT_STRATEGY_STATE, model_id)
    return None if row is None else StrategyState(**row)


UPSERT_STRATEGY_STATE = """
INSERT INTO strategy_states AS s (model_id, state, decided_at) VALUES ($1, coalesce($2, 'null'::jsonb), $3)
ON CONFLICT (model_id) DO UPDATE SET state = excluded.state,
    decided_at = greatest(excluded.decided_at, s.decided_at + interval '1 microsecond')
WHERE s.decided_at = $4
RETURNING decided_at
"""


async def upsert_strategy_state(
    conn: Connection, model_id: str, state: Any, decided_at: datetime, replaced: datetime | None
) -> datetime | None:
    """Replace the state of this version (None: there is none), and return the new version; None if it is another."""
    saved: datetime | None = await conn.fetchval(UPSERT_STRATEGY_STATE, model_id, state, decided_at, replaced)
    return saved


SELECT_HAS_KEYLESS_PROVIDER = """
SELECT EXISTS (
    SELECT FROM models
    WHERE configuration ? 'provider_definition' AND NOT configuration -> 'provider_definition' ? 'key_variable'
)
"""


async def select_has_keyless_provider(conn: Connection) -> bool:
    """Return whether any model defines its own provider that needs no key."""
    has_one: bool = await conn.fetchval(SELECT_HAS_KEYLESS_PROVIDER)
    return has_one
