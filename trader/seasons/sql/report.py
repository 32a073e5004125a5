"""SQL of season reports: the current runs as of their last snapshots."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final, Self

import msgspec

from trader.agents.domain.models import Model
from trader.database.pool import Connection
from trader.portfolio.run_statistics import RunStatistics

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

    @classmethod
    def of(
        cls, model: Model, run: RunStatistics, valued: tuple[datetime, Decimal] | None = None, **booked: Decimal
    ) -> Self:
        """Return a model's account with its equity at a time (None: its last snapshot's).

        `booked` are the parts of its change.
        """
        at, equity = valued or (run.hours[-1].last_at, run.hours[-1].last)
        return cls(
            model_id=model.id,
            name=model.name,
            variant=model.variant.value,
            initial_capital=run.run.initial_capital,
            started_at=run.run.started_at,
            at=at,
            equity=equity,
            model_cost=run.run.totals.cost_usd,
            invocations=run.run.totals.finished,
            trades=len(run.trades),
            within_minute=run.brief[-1],
            **booked,
        )

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
SELECT_BOOKED = """
SELECT r.account_id, s.unrealized_pnl AS unrealized,
       coalesce((SELECT sum(gross_pnl) FROM orders WHERE run_id = r.run_id AND closed_at <= r.at), 0) AS gross,
       coalesce(f.fees, 0) AS fees, coalesce(f.liquidation_fees, 0) AS liquidation_fees,
       coalesce((SELECT sum(amount) FROM funding_payments
                 WHERE run_id = r.run_id AND created_at <= r.at), 0) AS funding,
       coalesce((SELECT sum(amount) FROM insurance_payments
                 WHERE run_id = r.run_id AND created_at <= r.at), 0) AS insurance
FROM unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS r (account_id, run_id, at)
JOIN portfolio_snapshots s ON s.account_id = r.account_id AND s.created_at = r.at
JOIN models m ON m.id = r.account_id
JOIN variants v ON v.id = m.variant
LEFT JOIN LATERAL (
    SELECT sum(fee) AS fees, sum(liquidation_fee) AS liquidation_fees
    FROM fills WHERE run_id = r.run_id AND created_at <= r.at
) f ON true
ORDER BY v.place, m.id
"""


async def select_report_accounts(
    conn: Connection, models: Mapping[str, Model], runs: Mapping[str, RunStatistics]
) -> list[AccountReport]:
    """Return every model with a snapshot in its current run, in these statistics, as of that snapshot."""
    valued = {key: run for key, run in runs.items() if run.hours}
    times = [run.hours[-1].last_at for run in valued.values()]
    run_ids = [run.run.run_id for run in valued.values()]
    rows = await conn.fetch(SELECT_BOOKED, list(valued), run_ids, times, timeout=SEASON_TIMEOUT_S)
    return [
        AccountReport.of(models[account_id], valued[account_id], **booked)
        for account_id, booked in ((row["account_id"], dict(list(row.items())[1:])) for row in rows)
    ]
