"""SQL for writing postings: all rows of one or more account changes in one statement, and so in one transaction.

The rows travel as one JSON array per table, since a statement with a hundred array parameters would be unreadable. The
statement names only tables that receive rows: inserting an empty set costs as much as inserting two rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import asyncpg
import msgspec

from trader.core.errors import LedgerViolated
from trader.database.pool import Connection
from trader.exchange.domain.ledger import Posting
from trader.exchange.sql.ledger_rows import (
    LedgerRow,
    account_change,
    ledger_row,
    limit_order_row,
    order_rows,
    request_row,
    run_rows,
    venue_order_row,
    venue_trade_row,
)

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
            time_exit = excluded.time_exit,
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
