"""Rows of postings: for each table of the ledger, a dict with the names of all its columns."""

from typing import Any

from msgspec.structs import asdict

from trader.core.money import ZERO
from trader.exchange.domain.account import Position, Trade
from trader.exchange.domain.ledger import Posting, RestingChange
from trader.exchange.domain.orders import ExitPlan, Fill, FundingPayment, InsurancePayment, OrderAnswer
from trader.exchange.domain.venue_orders import SentOrder, VenueFill

LedgerRow = dict[str, Any]

_STILL_OPEN: LedgerRow = {
    "parent_id": None,
    "status": "OPEN",
    "exit_notional": None,
    "gross_pnl": None,
    "liquidation_fees": ZERO,
    "net_pnl": None,
    "insurance": ZERO,
    "close_reason": None,
    "closed_at": None,
}


def account_change(posting: Posting) -> LedgerRow:
    """Return the account's new state with the sequence numbers before and after the posting."""
    account = posting.account
    return {
        "id": account.id,
        "sequence_before": posting.sequence_before,
        "sequence": account.sequence,
        "changed_at": account.changed_at,
        "last_order_at": account.last_order_at,
        "liquidating": account.liquidating,
        "partly_liquidated_at": account.partly_liquidated_at,
        "seen_tick": account.seen_tick,
        "seen_until": account.seen_until,
    }


def run_rows(posting: Posting) -> list[LedgerRow]:
    """Return the run that the posting ends and the one that it starts; none unless it is a reset."""
    if not posting.starts_run:
        return []
    old, new, account_id = posting.run, posting.account.run, posting.account.id
    return [
        asdict(old) | {"account_id": account_id, "ended_at": new.started_at},
        asdict(new) | {"account_id": account_id, "ended_at": None},
    ]


def request_row(posting: Posting, answer: OrderAnswer) -> LedgerRow:
    """Return the row of an answered order."""
    return {
        "id": answer.id,
        "account_id": posting.account.id,
        "run_id": posting.run.id,
        "client_order_id": answer.client_order_id,
        "answer": answer,
        "created_at": answer.at,
    }


def order_rows(posting: Posting) -> list[LedgerRow]:
    """Return the closed trades, then the open positions: the order that their unique index admits."""
    closed = [closed_row(posting, trade) for trade in posting.trades]
    return closed + [open_row(posting, position) for position in posting.positions]


def open_row(posting: Posting, position: Position) -> LedgerRow:
    row = {name: getattr(position, name) for name in Position.__struct_fields__}
    del row["realized"]  # the sum over the rows of its closed parts
    plan = asdict(row.pop("exit_plan"))
    return _owner(posting) | row | plan | _STILL_OPEN


def closed_row(posting: Posting, trade: Trade) -> LedgerRow:
    closed = asdict(trade)
    del closed["realized"], closed["exit_plan"]
    state = {"status": "CLOSED", "net_pnl": trade.net_pnl, "closing": None, "closing_at": None}
    return open_row(posting, trade) | closed | state


def limit_order_row(posting: Posting, change: RestingChange) -> LedgerRow:
    row, status = asdict(change.order), asdict(change)
    del row["client_order_id"], status["order"]
    plan: ExitPlan | None = row.pop("exit_plan")
    row["has_exit_plan"] = plan is not None
    return _owner(posting) | row | asdict(plan or ExitPlan()) | status


def ledger_row(posting: Posting, entry: Fill | FundingPayment | InsurancePayment) -> LedgerRow:
    return _owner(posting) | _renamed(asdict(entry), "at", "created_at")


def venue_order_row(sent: SentOrder) -> LedgerRow:
    row = asdict(sent)
    order = _renamed(asdict(row.pop("order")), "trigger", "trigger_price")
    return row | order


def venue_trade_row(posting: Posting, fill: VenueFill) -> LedgerRow:
    row = _renamed(asdict(fill), "at", "traded_at")
    del row["order_index"]
    return _owner(posting) | row


def _owner(posting: Posting) -> LedgerRow:
    return {"account_id": posting.account.id, "run_id": posting.run.id}


def _renamed(row: LedgerRow, field: str, column: str) -> LedgerRow:
    row[column] = row.pop(field)
    return row
