"""SQL for the audit: differences between `orders` and the ledger, and the rows of each run."""

from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.database.pool import SCAN_TIMEOUT_S, Connection
from trader.exchange.domain.audit import LedgerEntry, Mismatch, OrderFigures, VenueMismatch, VenueTrade
from trader.exchange.domain.orders import Fill, FundingPayment, InsurancePayment


class LedgerDifference(msgspec.Struct, frozen=True):
    """One figure of one run in which `orders` and the ledger differ."""

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


# Fills do not record profit: sales minus purchases give the gross profit once the entry value of the open quantity is
# added back.
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


async def select_differences(conn: Connection) -> list[LedgerDifference]:
    """Return every figure of every run that differs; empty if the ledger balances."""
    return [LedgerDifference(**row) for row in await conn.fetch(SELECT_DIFFERENCES)]


class AuditedRun(NamedTuple):
    """A run or, with number 0, the current run of a baseline, which has no ledger."""

    id: UUID
    account_id: str
    number: int
    initial_capital: Decimal


SELECT_RUNS = "SELECT id, account_id, number, initial_capital FROM runs ORDER BY account_id, number"


async def select_runs(conn: Connection) -> list[AuditedRun]:
    """Return every run."""
    return [AuditedRun(**row) for row in await conn.fetch(SELECT_RUNS)]


# The chain has what a tool call reported, unlike the answer in `order_requests`. For a resting order it reported the
# immediate fills. The average price was rounded.
SELECT_MISTOLD = """
SELECT reported.id AS order_id, d.figure, d.by_row, d.by_ledger
FROM (
    SELECT (r.result ->> 'orderId')::uuid AS id, r.result
    FROM tool_calls c
    CROSS JOIN LATERAL jsonb_array_elements(
        CASE jsonb_typeof(c.metadata -> 'results') WHEN 'array' THEN c.metadata -> 'results' END
    ) AS r (result)
    WHERE c.type IN ('CREATE_POSITION', 'CLOSE_POSITION') AND r.result ->> 'status' IN ('filled', 'partial', 'resting')
) reported
LEFT JOIN order_requests q ON q.id = reported.id
LEFT JOIN LATERAL (
    SELECT sum(quantity) AS quantity, sum(quantity * price) AS notional, sum(fee + liquidation_fee) AS fees
    FROM (
        SELECT * FROM fills WHERE request_id = reported.id ORDER BY sequence
        LIMIT CASE reported.result ->> 'status' WHEN 'resting' THEN jsonb_array_length(q.answer -> 'fills') END
    ) first
) f ON true
CROSS JOIN LATERAL (VALUES
    ('filled quantity', (reported.result ->> 'filledQuantity')::numeric, coalesce(f.quantity, 0), 0),
    ('fees', (reported.result ->> 'fees')::numeric, coalesce(f.fees, 0), 0),
    ('average price', (reported.result ->> 'averagePrice')::numeric, f.notional / f.quantity, 1e-12)
) d (figure, by_row, by_ledger, tolerance)
WHERE abs(coalesce(d.by_row, 0) - coalesce(d.by_ledger, 0)) > d.tolerance
ORDER BY order_id, figure, by_row, by_ledger
"""


class MistoldOrder(Mismatch, frozen=True):
    """A figure of an order that was reported differently to its agent."""

    def __str__(self) -> str:
        return f"order {self.order_id}: {self.figure} was reported as {self.by_row}, is {self.by_ledger} by the ledger"


async def select_mistold(conn: Connection) -> list[MistoldOrder]:
    """Return the orders whose fills differ from what the tool reported to the agent."""
    return [MistoldOrder(**record) for record in await conn.fetch(SELECT_MISTOLD, timeout=SCAN_TIMEOUT_S)]


SELECT_FIGURES = """
SELECT id, symbol, side, quantity, entry_notional, fees, liquidation_fees, funding, insurance, exit_notional, gross_pnl
FROM orders WHERE run_id = $1 ORDER BY id
"""


async def select_figures(conn: Connection, run_id: UUID) -> list[OrderFigures]:
    """Return a run's rows of `orders`."""
    return [OrderFigures(**record) for record in await conn.fetch(SELECT_FIGURES, run_id)]


SELECT_FILLS = """
SELECT sequence, order_id, request_id, symbol, side, quantity, price, fee, liquidation_fee, maker, cause,
       created_at AS at
FROM fills WHERE run_id = $1 ORDER BY sequence
"""

SELECT_FUNDING = """
SELECT sequence, order_id, symbol, boundary, quantity, mark, rate, amount, created_at AS at
FROM funding_payments WHERE run_id = $1 ORDER BY sequence
"""

SELECT_INSURANCE = """
SELECT sequence, order_id, amount, created_at AS at FROM insurance_payments WHERE run_id = $1 ORDER BY sequence
"""


async def select_entries(conn: Connection, run_id: UUID) -> list[LedgerEntry]:
    """Return the ledger of a run, ordered by `sequence`."""
    fills = [msgspec.convert({**record}, Fill) for record in await conn.fetch(SELECT_FILLS, run_id)]
    funding = [FundingPayment(**record) for record in await conn.fetch(SELECT_FUNDING, run_id)]
    insurance = [InsurancePayment(**record) for record in await conn.fetch(SELECT_INSURANCE, run_id)]
    return sorted([*fills, *funding, *insurance], key=lambda entry: entry.sequence)


# An order is acknowledged with its immediate fills, which are its first; they are in the ledger exactly once, and an
# order that did not rest has no others. A fill is never worse than the limit of its order.
SELECT_BROKEN_PROMISES = """
SELECT q.id AS order_id, 'acknowledged quantity' AS figure,
       (q.answer ->> 'total_quantity')::numeric AS by_row, coalesce(sum(f.quantity), 0) AS by_ledger
FROM order_requests q LEFT JOIN (
    SELECT request_id, quantity, row_number() OVER (PARTITION BY request_id ORDER BY sequence) AS number
    FROM fills WHERE request_id IS NOT NULL
) f ON f.request_id = q.id
    AND (q.answer ->> 'status' <> 'resting' OR f.number <= jsonb_array_length(q.answer -> 'fills'))
GROUP BY q.id
HAVING (q.answer ->> 'total_quantity')::numeric <> coalesce(sum(f.quantity), 0)
UNION ALL
SELECT l.id, 'limit price', l.limit_price, f.price
FROM limit_orders l JOIN fills f ON f.request_id = l.id
WHERE CASE l.side WHEN 'buy' THEN f.price > l.limit_price ELSE f.price < l.limit_price END
UNION ALL
SELECT l.id, 'filled quantity', l.quantity - l.remaining, coalesce(sum(f.quantity), 0)
FROM limit_orders l LEFT JOIN fills f ON f.request_id = l.id
GROUP BY l.id
HAVING l.quantity - l.remaining <> coalesce(sum(f.quantity), 0)
ORDER BY order_id, figure, by_ledger
"""


async def select_broken_promises(conn: Connection) -> list[Mismatch]:
    """Return the orders whose fills differ from their answer or are worse than their limit."""
    return [Mismatch(**record) for record in await conn.fetch(SELECT_BROKEN_PROMISES)]


SELECT_IS_LIVE = "SELECT EXISTS (SELECT FROM service_state WHERE trading_mode = 'live')"


async def select_is_live(conn: Connection) -> bool:
    """Return whether this database's fills come from a venue."""
    return bool(await conn.fetchval(SELECT_IS_LIVE))


SELECT_TRADES_OF_RUN = """
SELECT t.*, t.traded_at AS at, o.request_id, o.cause AS order_cause
FROM venue_trades t
LEFT JOIN venue_orders o ON o.account_id = t.account_id AND o.client_index = t.client_index
WHERE t.run_id = $1
ORDER BY t.trade_id
"""


async def select_trades_of_run(conn: Connection, run_id: UUID) -> list[VenueTrade]:
    """Return the venue's trades recorded in a run, each with the request and the cause of its order."""
    return [msgspec.convert({**record}, VenueTrade) for record in await conn.fetch(SELECT_TRADES_OF_RUN, run_id)]


# An order's filled quantity at the venue is the sum of its recorded trades.
SELECT_WRONGLY_FILLED = """
SELECT o.account_id, o.client_index, o.filled, coalesce(sum(t.quantity), 0) AS traded
FROM venue_orders o
LEFT JOIN venue_trades t ON t.account_id = o.account_id AND t.client_index = o.client_index
GROUP BY o.account_id, o.client_index
HAVING o.filled <> coalesce(sum(t.quantity), 0)
ORDER BY o.account_id, o.client_index
"""


async def select_wrongly_filled(conn: Connection) -> list[VenueMismatch]:
    """Return the orders at the venue whose filled quantity differs from their recorded trades."""
    return [
        VenueMismatch(f"account {r['account_id']}, order {r['client_index']} at the venue", "filled quantity",
                      r["traded"], r["filled"])
        for r in await conn.fetch(SELECT_WRONGLY_FILLED)
    ]  # fmt: skip
