"""How the tables of an earlier version become those of this one.

Each version of the schema has one step from the version before. A step changes tables that are there already, and
their data; what is new, and every function and trigger, comes from schema.sql, which is applied after the steps. A
step may meet what it does done already. All steps and schema.sql are one transaction: an upgrade happens whole, or
not at all.
"""

from collections.abc import Mapping
from typing import Final

TO_VERSION_2: Final = """
ALTER TABLE invocation_counts
    ADD COLUMN IF NOT EXISTS input_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS output_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS cost_usd amount;
UPDATE invocation_counts c
SET input_tokens = s.input_tokens, output_tokens = s.output_tokens, cost_usd = s.cost_usd
FROM (
    SELECT i.model_id, r.number, sum(i.input_tokens) AS input_tokens, sum(i.output_tokens) AS output_tokens,
           sum(i.cost_usd) AS cost_usd
    FROM invocations i
    CROSS JOIN LATERAL (
        SELECT coalesce(max(number), 0) AS number FROM runs
        WHERE account_id = i.model_id AND started_at <= i.started_at
    ) r
    WHERE i.status <> 'running'
    GROUP BY i.model_id, r.number
) s
WHERE s.model_id = c.model_id AND s.number = c.run_number;
"""
"""Tokens and costs of each run."""

CLOSED_BY_OPERATOR: Final = """
ALTER TABLE orders DROP CONSTRAINT IF EXISTS orders_close_reason_check;
ALTER TABLE orders ADD CONSTRAINT orders_close_reason_check CHECK (
    close_reason IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time', 'liquidation', 'reset', 'operator')
);
ALTER TABLE fills DROP CONSTRAINT IF EXISTS fills_cause_check;
ALTER TABLE fills ADD CONSTRAINT fills_cause_check CHECK (
    cause IN ('order', 'limit', 'stop', 'invalidation', 'target', 'time', 'liquidation', 'reset', 'operator')
);
"""
"""Positions that an operator closed say so."""

VENUE_ACCOUNTS: Final = """
ALTER TABLE models ADD COLUMN IF NOT EXISTS venue_account_index bigint CHECK (venue_account_index >= 0);
ALTER TABLE service_state
    ADD COLUMN IF NOT EXISTS venue_url text,
    ADD COLUMN IF NOT EXISTS venue_account_index bigint CHECK (venue_account_index >= 0),
    DROP CONSTRAINT IF EXISTS live_has_a_venue,
    DROP CONSTRAINT IF EXISTS live_has_an_account,
    ADD CONSTRAINT live_has_a_venue CHECK ((trading_mode = 'live') = (venue_url IS NOT NULL)),
    ADD CONSTRAINT live_has_an_account CHECK ((trading_mode = 'live') = (venue_account_index IS NOT NULL));
"""
"""Which account of a venue a model trades, and whose orders a database holds."""

MIGRATIONS: Final[Mapping[int, str]] = {2: TO_VERSION_2, 3: CLOSED_BY_OPERATOR, 4: VENUE_ACCOUNTS}
"""By the version that a step leads to."""
