"""SQL for writing postings: all rows of one or more account changes in one statement, and so in one transaction.

The rows travel as one JSON array per table, since a statement with a hundred array parameters would be unreadable. The
statement names only tables that receive rows: inserting an empty set costs as much as inserting two rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
from msgspec.structs import asdict

from trader.core.errors import LedgerViolated
from trader.core.money import ZERO
from trader.database.pool import Connection
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


# If the account has changed since the posting was decided, or the process no longer leads, the posting updates no
# account row, and so none of its rows is written.
UPDATE_ACCOUNTS = """
UPDATE accounts SET sequence = c.sequence, changed_at = c.changed_at, last_order_at = c.last_order_at,
                    liquidating = c.liquidating, partly_liquidated_at = c.partly_liquidated_at,
                    seen_tick = c.seen_tick, seen_until = c.seen_until
FROM json_to_recordset($1) AS c (id text, sequence_before bigint, sequence bigint,
                                 changed_at timestamptz, last_order_at timestamptz, liquidating boolean,
                                 partly_liquidated_at timestamptz, seen_tick bigint, seen_until timestamptz)
WHERE accounts.id = c.id AND accounts.sequence = c.sequence_before
    AND (SELECT term FROM service_state) = $2
RETURNING accounts.id
"""


class _Table(NamedTuple):
    """A table of the ledger, a posting's rows for it, and its ON CONFLICT clause (empty: conflicts are errors)."""

    name: str
    rows: Callable[[Posting], Iterable[LedgerRow]]
    on_conflict: str = ""


# CLOSED orders and ended runs come before the rows that replace them: the partial unique indexes check row by row.
_TABLES: Final = (
    _Table("runs", run_rows, "ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at"),
    _Table("order_requests", lambda posting: (request_row(posting, answer) for answer in posting.answers)),
    _Table(
        "orders",
        order_rows,
        """
        ON CONFLICT (id) DO UPDATE SET
            status = excluded.status, quantity = excluded.quantity, entry_notional = excluded.entry_notional,
            margin = excluded.margin, leveraged = excluded.leveraged, exit_notional = excluded.exit_notional,
            gross_pnl = excluded.gross_pnl, fees = excluded.fees, liquidation_fees = excluded.liquidation_fees,
            funding = excluded.funding, net_pnl = excluded.net_pnl, insurance = excluded.insurance,
            close_reason = excluded.close_reason, closing = excluded.closing,
            closing_at = excluded.closing_at, stop = excluded.stop, target = excluded.target,
            invalidation = excluded.invalidation, invalidation_price = excluded.invalidation_price,
            time_exit = excluded.time_exit, trailing_distance = excluded.trailing_distance, targets = excluded.targets,
            confidence = excluded.confidence, funded_until = excluded.funded_until, closed_at = excluded.closed_at
        """,
    ),
    _Table(
        "limit_orders",
        lambda posting: (limit_order_row(posting, change) for change in posting.resting),
        """
        ON CONFLICT (id) DO UPDATE SET
            status = excluded.status, remaining = excluded.remaining, ahead = excluded.ahead,
            cancel_reason = excluded.cancel_reason,
            closed_at = excluded.closed_at
        """,
    ),
    _Table("fills", lambda posting: (ledger_row(posting, fill) for fill in posting.fills)),
    _Table("funding_payments", lambda posting: (ledger_row(posting, payment) for payment in posting.funding)),
    _Table("insurance_payments", lambda posting: (ledger_row(posting, payment) for payment in posting.insurance)),
    _Table(
        "venue_orders",
        lambda posting: (venue_order_row(sent) for sent in posting.sent),
        """
        ON CONFLICT (account_id, client_index) DO UPDATE SET
            status = excluded.status, venue_index = excluded.venue_index,
            filled = excluded.filled, reason = excluded.reason, changed_at = excluded.changed_at
        """,
    ),
    _Table("venue_trades", lambda posting: (venue_trade_row(posting, fill) for fill in posting.venue_fills)),
)


def posting_rows(posting: Posting) -> Iterator[tuple[str, LedgerRow]]:
    """Yield (table, row) for every row that a posting writes in addition to its account."""
    for table in _TABLES:
        for row in table.rows(posting):
            yield table.name, row


@cache
def _statement(tables: tuple[_Table, ...]) -> str:
    """Return the statement that writes to these tables: $1 the account changes, $2 the term, then each table's rows."""
    inserts = (  # names come from the tables above
        f"""
        , into_{table.name} AS (
            INSERT INTO {table.name}
            SELECT r.* FROM json_populate_recordset(NULL::{table.name}, ${number}) r
            JOIN written ON written.id = r.account_id
            {table.on_conflict}
        )"""  # noqa: S608
        for number, table in enumerate(tables, 3)
    )
    return f"WITH written AS ({UPDATE_ACCOUNTS}){''.join(inserts)} SELECT id FROM written"  # noqa: S608


WRITE_POSTINGS: Final = _statement(_TABLES)
"""The statement for a batch that has rows for every table."""


async def write_postings(conn: Connection, postings: Sequence[Posting], term: int) -> set[str]:
    """Write postings of different accounts in one transaction. Return the IDs of the accounts that were written.

    An account is missing from the result, and nothing of its posting was written, if another process has changed it in
    the meantime or `term` is over.

    :raises LedgerViolated: a row violated a constraint; no posting was written
    """
    changes = _json([account_change(posting) for posting in postings])
    tables, rows = [], []
    for table in _TABLES:
        if of_table := [row for posting in postings for row in table.rows(posting)]:
            tables.append(table)
            rows.append(_json(of_table))
    try:
        records = await conn.fetch(_statement(tuple(tables)), changes, term, *rows)
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError) as error:
        if isinstance(error.__cause__, MemoryError):  # the driver could not encode the rows: nothing is wrong with them
            raise MemoryError(str(error)) from error
        raise LedgerViolated(f"{type(error).__name__}: {error}") from error
    return {record["id"] for record in records}


def _json(rows: list[LedgerRow]) -> str:
    return msgspec.json.encode(rows).decode()
