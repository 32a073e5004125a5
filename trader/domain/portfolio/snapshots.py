"""Portfolio snapshots: what an account is worth at one moment."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worth of an account at one moment. `net_portfolio = cash + unrealized_pnl`."""

    account_id: str
    run_id: UUID
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: datetime
