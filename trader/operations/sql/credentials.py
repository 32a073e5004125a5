"""SQL for credentials: the keys of external agents and the tokens of operators."""

import msgspec

from trader.database.pool import Connection
from trader.operations.domain.credentials import Credential, Scope

SELECT_CREDENTIALS = """
SELECT id, name, account_id, scopes, prefix, digest, requests_per_minute, decisions_per_minute, created_at, revoked_at
FROM credentials
ORDER BY created_at, id
"""


async def select_credentials(conn: Connection) -> list[Credential]:
    """Return every credential, including revoked ones, oldest first."""
    return [msgspec.convert(dict(row), Credential) for row in await conn.fetch(SELECT_CREDENTIALS)]


INSERT_CREDENTIAL = """
INSERT INTO credentials (id, name, account_id, scopes, prefix, digest, requests_per_minute, decisions_per_minute,
                         created_at, revoked_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
"""


async def insert_credential(conn: Connection, credential: Credential) -> None:
    """Insert a credential, whose fields are in the order of the columns."""
    await conn.execute(INSERT_CREDENTIAL, *msgspec.structs.astuple(credential))


UPDATE_CREDENTIALS_REVOKED = """
WITH revoked AS (
    UPDATE credentials SET revoked_at = now()
    WHERE name = $1 AND account_id IS NOT DISTINCT FROM $2 AND revoked_at IS NULL
    RETURNING 1
)
SELECT count(*) FROM revoked
"""


async def update_credentials_revoked(conn: Connection, name: str, account_id: str | None) -> int:
    """Revoke every credential with this name and account. Return how many were still valid."""
    return int(await conn.fetchval(UPDATE_CREDENTIALS_REVOKED, name, account_id))


# A restored one may have been created later than now, by another clock.
UPDATE_ALL_REVOKED = "UPDATE credentials SET revoked_at = greatest(now(), created_at) WHERE revoked_at IS NULL"


async def update_all_revoked(conn: Connection) -> None:
    """Revoke every credential."""
    await conn.execute(UPDATE_ALL_REVOKED)


UPDATE_CREDENTIAL_LIMITS = """
UPDATE credentials
SET requests_per_minute = coalesce($2, requests_per_minute), decisions_per_minute = coalesce($3, decisions_per_minute),
    scopes = coalesce($4, scopes)
WHERE account_id = $1 AND revoked_at IS NULL
RETURNING id, name, account_id, scopes, prefix, digest, requests_per_minute, decisions_per_minute, created_at,
          revoked_at
"""


async def update_credential_limits(
    conn: Connection, account_id: str, requests: int | None, decisions: int | None, scopes: tuple[Scope, ...] | None
) -> Credential | None:
    """Change the limits and scopes of an agent's key; None leaves a value unchanged. Return the key, or None."""
    row = await conn.fetchrow(UPDATE_CREDENTIAL_LIMITS, account_id, requests, decisions, scopes)
    return None if row is None else msgspec.convert(dict(row), Credential)
