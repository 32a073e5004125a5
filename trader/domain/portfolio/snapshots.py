"""Portfolio snapshots: what an account is worth at one moment."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from trader.domain.exchange.account import Account, unrealized


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worth of an account at one moment. `net_portfolio = cash + unrealized_pnl`."""

    account_id: str
    run_id: UUID
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: datetime


def value_account(account: Account, marks: Mapping[str, Decimal], at: datetime) -> Snapshot | None:
    """Return the account's worth at the marks; None when one of its markets has no price yet."""
    if not account.positions.keys() <= marks.keys():
        return None
    gain = unrealized(account, marks)
    return Snapshot(
        account_id=account.id,
        run_id=account.run.id,
        net_portfolio=account.cash + gain,
        cash=account.cash,
        unrealized_pnl=gain,
        created_at=at,
    )
