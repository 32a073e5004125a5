"""SQL of exports: the rows of each table of a result (`trader.portfolio.tables`), of all accounts and runs, by time."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Final

import asyncpg

from trader.database.pool import Connection

_BATCH: Final = 10_000

EXPORTED: Final[Mapping[str, str]] = {
    "trades": """
SELECT account_id AS account, symbol, side, quantity, entry_notional / quantity AS entry_price,
       exit_notional / quantity AS exit_price,
       CASE WHEN leveraged THEN entry_notional / margin END AS leverage, gross_pnl, fees, funding, net_pnl,
       close_reason, confidence, opened_at, closed_at, NULL AS entry_tag, NULL AS exit_tag
FROM orders
WHERE status = 'CLOSED' AND closed_at >= $1 AND ($2::text IS NULL OR account_id = $2)
ORDER BY closed_at, id
""",
    "fills": """
SELECT created_at AS at, account_id AS account, symbol, side, quantity, price, fee + liquidation_fee AS fee, maker,
       cause
FROM fills
WHERE created_at >= $1 AND ($2::text IS NULL OR account_id = $2)
ORDER BY created_at, account_id, sequence
""",
    "equity": """
SELECT created_at AS at, account_id AS account, net_portfolio AS equity, cash, unrealized_pnl AS unrealized
FROM portfolio_snapshots
WHERE created_at >= $1 AND ($2::text IS NULL OR account_id = $2)
ORDER BY created_at, account_id
""",
    "decisions": """
SELECT t.created_at AS at, i.model_id AS account, coalesce(t.metadata->'raw'->>'name', t.type) AS tool,
       t.metadata->'decisions'->0->>'symbol' AS symbol, t.status, r.result->>'rule' AS rule,
       coalesce(r.result->>'reason', r.result->>'error') AS reason
FROM tool_calls t JOIN invocations i ON i.id = t.invocation_id, LATERAL (SELECT t.metadata->'results'->0 AS result) r
WHERE t.created_at >= $1 AND ($2::text IS NULL OR i.model_id = $2)
  AND t.type IN ('CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN')
ORDER BY t.created_at, i.model_id, t.number
""",
}


async def select_exported(
    conn: Connection, table: str, since: datetime, account_id: str | None
) -> AsyncIterator[asyncpg.Record]:
    """Yield the rows of a table since a time, of all accounts or of one, with the names of its columns."""
    async for row in conn.cursor(EXPORTED[table], since, account_id, prefetch=_BATCH):
        yield row
