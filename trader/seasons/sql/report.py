"""SQL of season reports: the current runs as of their last snapshots."""

from datetime import datetime
from decimal import Decimal
from typing import Final

import msgspec

from trader.database.pool import Connection

SEASON_TIMEOUT_S: Final = 600.0


class AccountReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A model's current run by its books up to its last snapshot, and that snapshot.

    `equity = initial_capital + gross + unrealized − fees − liquidation_fees + funding + insurance`, if books and
    snapshot agree.
    """

    model_id: str
    name: str
    variant: str
    initial_capital: Decimal
    started_at: datetime
    at: datetime
    equity: Decimal
    unrealized: Decimal
    gross: Decimal
    fees: Decimal
    liquidation_fees: Decimal
    funding: Decimal
    insurance: Decimal
    model_cost: Decimal | None
    invocations: int
    trades: int
    within_minute: int
    """How many of the trades were held for less than a minute."""

    @property
    def explained(self) -> Decimal:
        """The change of equity as the sum of its parts."""
        costs = self.fees + self.liquidation_fees
        return self.gross + self.unrealized - costs + self.funding + self.insurance

    @property
    def change(self) -> Decimal:
        """The change of equity from the snapshot."""
        return self.equity - self.initial_capital


# A snapshot is taken after the postings of its minute, so it reflects the ledger up to its time.
SELECT_REPORT_ACCOUNTS = """
SELECT m.id AS model_id, m.name, m.variant, r.initial_capital, r.started_at, h.last_at AS at, h.last AS equity,
       s.unrealized_pnl AS unrealized,
       coalesce((SELECT sum(gross_pnl) FROM orders WHERE run_id = r.id AND closed_at <= h.last_at), 0) AS gross,
       coalesce(f.fees, 0) AS fees, coalesce(f.liquidation_fees, 0) AS liquidation_fees,
       coalesce((SELECT sum(amount) FROM funding_payments
                 WHERE run_id = r.id AND created_at <= h.last_at), 0) AS funding,
       coalesce((SELECT sum(amount) FROM insurance_payments
                 WHERE run_id = r.id AND created_at <= h.last_at), 0) AS insurance,
       c.cost_usd AS model_cost, coalesce(c.finished, 0) AS invocations,
       t.trades, t.within_minute
FROM models m
JOIN variants v ON v.id = m.variant
JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
CROSS JOIN LATERAL (
    SELECT last, last_at FROM portfolio_hourly WHERE account_id = m.id AND run_id = r.id ORDER BY hour DESC LIMIT 1
) h
JOIN portfolio_snapshots s ON s.account_id = m.id AND s.created_at = h.last_at
CROSS JOIN LATERAL (
    SELECT count(*) AS trades, count(*) FILTER (WHERE closed_at < opened_at + interval '1 minute') AS within_minute
    FROM orders WHERE run_id = r.id AND status = 'CLOSED' AND closed_at <= h.last_at
) t
LEFT JOIN LATERAL (
    SELECT sum(fee) AS fees, sum(liquidation_fee) AS liquidation_fees
    FROM fills WHERE run_id = r.id AND created_at <= h.last_at
) f ON true
LEFT JOIN LATERAL (
    SELECT sum(cost_usd) AS cost_usd, sum(finished)::bigint AS finished
    FROM invocation_counts WHERE model_id = m.id AND run_number = r.number
) c ON true
ORDER BY v.place, m.id
"""


async def select_report_accounts(conn: Connection) -> list[AccountReport]:
    """Return every model with a snapshot in its current run."""
    return [AccountReport(**row) for row in await conn.fetch(SELECT_REPORT_ACCOUNTS, timeout=SEASON_TIMEOUT_S)]
