"""What the books hold of one call, for the comparison with its re-execution."""

from collections.abc import Sequence
from uuid import UUID

from trader.domain.agents.invocations import Invocation
from trader.domain.exchange.orders import Cause, Fill, OrderSide
from trader.store.database.pool import Connection

SELECT_INVOCATION = """
SELECT id, model_id, status, failure_reason, response, step_count, input_tokens, output_tokens, cost_usd, started_at,
       finished_at
FROM invocations
WHERE id = $1
"""


async def select_invocation(conn: Connection, invocation_id: UUID) -> Invocation | None:
    """One run."""
    row = await conn.fetchrow(SELECT_INVOCATION, invocation_id)
    return None if row is None else Invocation(**row)


SELECT_FILLS = """
SELECT sequence, order_id, request_id, symbol, side, quantity, price, fee, liquidation_fee, maker, cause,
       created_at AS at
FROM fills
WHERE account_id = $1 AND sequence = ANY($2::bigint[])
ORDER BY sequence
"""


async def select_fills(conn: Connection, account_id: str, sequences: Sequence[int]) -> list[Fill]:
    """The fills of an account with these sequence numbers."""
    rows = [dict(row) for row in await conn.fetch(SELECT_FILLS, account_id, sequences)]
    return [Fill(**{**row, "side": OrderSide(row["side"]), "cause": Cause(row["cause"])}) for row in rows]
