"""The books compared with themselves: sums of `orders` against sums of the ledger."""

from decimal import Decimal

import msgspec

from trader.store.pool import Connection


class Difference(msgspec.Struct, frozen=True):
    """One figure of one run that `orders` and the ledger disagree about."""

    account_id: str
    run_number: int
    figure: str
    by_orders: Decimal
    by_ledger: Decimal

    def __str__(self) -> str:
        return (
            f"account {self.account_id}, run {self.run_number}: {self.figure} is {self.by_orders} by orders "
            f"and {self.by_ledger} by the ledger"
        )


# Fills carry no profit of their own: what was sold minus what was bought is the gross profit once the entry value of
# what is still open is put back.
SELECT_DIFFERENCES = """
WITH by_orders AS (
    SELECT run_id, coalesce(sum(gross_pnl), 0) AS gross, sum(fees) AS fees, sum(liquidation_fees) AS liquidation_fees,
           sum(funding) AS funding, sum(insurance) AS insurance,
           coalesce(sum(CASE side WHEN 'LONG' THEN entry_notional ELSE -entry_notional END)
                    FILTER (WHERE status = 'OPEN'), 0) AS open_notional
    FROM orders GROUP BY run_id
), by_fills AS (
    SELECT run_id, sum(CASE side WHEN 'sell' THEN quantity * price ELSE -quantity * price END) AS flow,
           sum(fee + liquidation_fee) AS fees, sum(liquidation_fee) AS liquidation_fees
    FROM fills GROUP BY run_id
), by_funding AS (
    SELECT run_id, sum(amount) AS funding FROM funding_payments GROUP BY run_id
), by_insurance AS (
    SELECT run_id, sum(amount) AS insurance FROM insurance_payments GROUP BY run_id
)
SELECT r.account_id, r.number AS run_number, d.figure, d.by_orders, d.by_ledger
FROM runs r
LEFT JOIN by_orders o ON o.run_id = r.id
LEFT JOIN by_fills f ON f.run_id = r.id
LEFT JOIN by_funding p ON p.run_id = r.id
LEFT JOIN by_insurance i ON i.run_id = r.id
CROSS JOIN LATERAL (VALUES
    ('gross pnl', coalesce(o.gross, 0), coalesce(f.flow, 0) + coalesce(o.open_notional, 0)),
    ('fees', coalesce(o.fees, 0), coalesce(f.fees, 0)),
    ('liquidation fees', coalesce(o.liquidation_fees, 0), coalesce(f.liquidation_fees, 0)),
    ('funding', coalesce(o.funding, 0), coalesce(p.funding, 0)),
    ('insurance', coalesce(o.insurance, 0), coalesce(i.insurance, 0))
) d (figure, by_orders, by_ledger)
WHERE d.by_orders <> d.by_ledger
ORDER BY r.account_id, r.number, d.figure
"""


async def select_differences(conn: Connection) -> list[Difference]:
    """Every figure of every run that does not agree; empty when the books balance."""
    return [
        Difference(r["account_id"], r["run_number"], r["figure"], r["by_orders"], r["by_ledger"])
        for r in await conn.fetch(SELECT_DIFFERENCES)
    ]
