"""The rows of postings have exactly the columns of their tables: a misspelled one would be dropped silently."""

from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from support.books import START
from support.paper_bench import BUY, SELL, PaperBench

from trader.core.errors import LedgerViolated
from trader.database.pool import Database
from trader.exchange.domain.orders import Cause, InsurancePayment
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder, VenueOrderType
from trader.exchange.sql import ledger as rows
from trader.exchange.sql.ledger import write_postings

D = Decimal


def sample_rows() -> dict[str, list[rows.LedgerRow]]:
    bench = PaperBench()
    bench.order(BUY, "1", leverage=5)
    bench.order(SELL, "2", limit="2500", leverage=5)
    bench.order(SELL, "0.5", reduce_only=True)
    bench.eth(2_000, after=timedelta(hours=1))
    opening, resting, closing, funding = bench.postings
    insurance = InsurancePayment(sequence=9, order_id=uuid4(), amount=D(1), at=START)
    order = VenueOrder(client_index=1, symbol="ETH", side=BUY, type=VenueOrderType.MARKET, quantity=D(1), price=D(1))
    sent = SentOrder(
        account_id="a", run_id=uuid4(), order=order, cause=Cause.ORDER, status=SentStatus.SENT, expires_at=START,
        created_at=START, changed_at=START,
    )  # fmt: skip
    fill = VenueFill(
        trade_id=1, client_index=1, kind="trade", symbol="ETH", side=BUY, quantity=D(1), price=D(1), fee_rate=D(0),
        maker=False, at=START,
    )  # fmt: skip
    return {
        "orders": [*rows.order_rows(opening), *rows.order_rows(closing)],
        "order_requests": [rows.request_row(opening, answer) for answer in opening.answers],
        "limit_orders": [rows.limit_order_row(resting, change) for change in resting.resting],
        "fills": [rows.ledger_row(opening, fill) for fill in opening.fills],
        "funding_payments": [rows.ledger_row(funding, payment) for payment in funding.funding],
        "insurance_payments": [rows.ledger_row(opening, insurance)],
        "venue_orders": [rows.venue_order_row(sent)],
        "venue_trades": [rows.venue_trade_row(opening, fill)],
        "runs": rows.run_rows(bench.reset()),
    }


async def test_every_row_has_exactly_the_columns_of_its_table(database: Database) -> None:
    async with database.connection() as conn:
        for table, samples in sample_rows().items():
            columns = await conn.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_name = $1 AND is_generated = 'NEVER'",
                table,
            )
            assert samples, table
            for row in samples:
                assert sorted(row) == sorted(name for (name,) in columns), table


@pytest.mark.parametrize(("cause", "raised"), [(MemoryError(), MemoryError), (ValueError(), LedgerViolated)])
async def test_rows_that_find_no_memory_do_not_violate_the_books(cause: Exception, raised: type[Exception]) -> None:
    """The driver reports everything that keeps it from encoding an argument as a `DataError`."""

    class Connection:
        async def fetch(self, *_: object) -> None:
            raise asyncpg.DataError("invalid input for query argument $3") from cause

    bench = PaperBench()
    bench.order(BUY, "1")
    conn: Any = Connection()
    with pytest.raises(raised):
        await write_postings(conn, bench.postings, 1)
