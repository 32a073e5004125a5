"""Writing bookings: every row of one or many changes in one statement, and so in one transaction.

The rows travel as one JSON array per table, since a statement with a hundred array parameters could not be read. The
statement has only the tables for which there are rows: what it costs to begin an insert into an empty set is what it
costs to write two rows.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

import asyncpg
import msgspec

from trader.domain.exchange.ledger import Posting
from trader.errors import BooksViolated
from trader.store.database.pool import Connection
from trader.store.exchange.ledger_rows import (
    account_change,
    fill_row,
    funding_row,
    insurance_row,
    limit_order_row,
    order_rows,
    request_row,
    run_rows,
    venue_order_row,
    venue_trade_row,
)

# A booking whose account has moved on since it was decided, or whose process leads no more, updates no account row,
# and with it writes nothing.
UPDATE_ACCOUNTS = """
UPDATE accounts SET sequence = c.sequence, changed_at = c.changed_at, last_order_at = c.last_order_at
FROM json_to_recordset($1) AS c (id text, sequence_before bigint, sequence bigint,
                                 changed_at timestamptz, last_order_at timestamptz)
WHERE accounts.id = c.id AND accounts.sequence = c.sequence_before
    AND (SELECT term FROM service_state) = $2
RETURNING accounts.id
"""


class _Table(NamedTuple):
    """A table of bookings: its rows of one, and what a row does that is there already (nothing: an error)."""

    name: str
    rows: Callable[[Posting], Iterable[msgspec.Struct]]
    on_conflict: str = ""


# Of the rows in conflict CLOSED orders and ended runs come first, since the partial unique indexes look at each row in
# turn.
_TABLES: Final = (
    _Table("runs", run_rows, "ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at"),
    _Table("order_requests", lambda b: () if b.answer is None else (request_row(b, b.answer),)),
    _Table(
        "orders",
        order_rows,
        """
        ON CONFLICT (id) DO UPDATE SET
            status = excluded.status, quantity = excluded.quantity, entry_notional = excluded.entry_notional,
            margin = excluded.margin, leveraged = excluded.leveraged, exit_notional = excluded.exit_notional,
            gross_pnl = excluded.gross_pnl, fees = excluded.fees, liquidation_fees = excluded.liquidation_fees,
            funding = excluded.funding, net_pnl = excluded.net_pnl, insurance = excluded.insurance,
            close_reason = excluded.close_reason, closing = excluded.closing, stop = excluded.stop,
            target = excluded.target, invalidation = excluded.invalidation,
            invalidation_price = excluded.invalidation_price, time_exit = excluded.time_exit,
            confidence = excluded.confidence, funded_until = excluded.funded_until, closed_at = excluded.closed_at
        """,
    ),
    _Table(
        "limit_orders",
        lambda b: (limit_order_row(b, change) for change in b.resting),
        """
        ON CONFLICT (id) DO UPDATE SET
            status = excluded.status, remaining = excluded.remaining, cancel_reason = excluded.cancel_reason,
            closed_at = excluded.closed_at
        """,
    ),
    _Table("fills", lambda b: (fill_row(b, fill) for fill in b.fills)),
    _Table("funding_payments", lambda b: (funding_row(b, payment) for payment in b.funding)),
    _Table("insurance_payments", lambda b: (insurance_row(b, payment) for payment in b.insurance)),
    _Table(
        "venue_orders",
        lambda b: (venue_order_row(sent) for sent in b.sent),
        """
        ON CONFLICT (account_id, client_index) DO UPDATE SET
            status = excluded.status, nonce = excluded.nonce, venue_index = excluded.venue_index,
            filled = excluded.filled, reason = excluded.reason, changed_at = excluded.changed_at
        """,
    ),
    _Table("venue_trades", lambda b: (venue_trade_row(b, fill) for fill in b.venue_fills)),
)


@cache
def _statement(tables: tuple[_Table, ...]) -> str:
    """The statement that writes to these tables: $1 the changes of accounts, $2 the term, then the rows of each."""
    inserts = (  # names are those of the tables above
        f"""
        , written_{table.name} AS (
            INSERT INTO {table.name}
            SELECT r.* FROM json_populate_recordset(NULL::{table.name}, ${number}) r
            JOIN booked ON booked.id = r.account_id
            {table.on_conflict}
        )"""  # noqa: S608
        for number, table in enumerate(tables, 3)
    )
    return f"WITH booked AS ({UPDATE_ACCOUNTS}){''.join(inserts)} SELECT id FROM booked"  # noqa: S608


WRITE_BOOKINGS: Final = _statement(_TABLES)
"""The statement of a batch that has rows for every table."""


async def write_bookings(conn: Connection, postings: Sequence[Posting], term: int) -> set[str]:
    """Write bookings of different accounts, all in one transaction. Gives the ids of the accounts that were booked.

    An account that is missing in the answer was changed by somebody else since, or `term` is over: nothing of its
    booking was written.

    :raises BooksViolated: a row broke a constraint; nothing of any booking was written
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
        raise BooksViolated(f"{type(error).__name__}: {error}") from error
    return {record["id"] for record in records}


def _json(rows: list[msgspec.Struct]) -> str:
    return msgspec.json.encode(rows).decode()
