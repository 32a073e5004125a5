"""Audit rules: positions and trades recomputed from the ledger alone, by the average-cost method.

They are compared with the rows of `orders` and, in live trading, the fills with the venue's trades. The only code
shared with the exchange that wrote the rows is the rounding of `money.share`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.core.money import ZERO, format_decimal, share
from trader.exchange.domain.orders import Cause, Fill, FundingPayment, InsurancePayment, OrderSide
from trader.exchange.domain.venue_orders import VenueFill

LedgerEntry = Fill | FundingPayment | InsurancePayment


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a row of `orders` that follow from the ledger. Exit figures are None while the row is open."""

    id: UUID
    symbol: str
    side: str
    quantity: Decimal
    entry_notional: Decimal
    fees: Decimal
    liquidation_fees: Decimal
    funding: Decimal
    insurance: Decimal
    exit_notional: Decimal | None = None
    gross_pnl: Decimal | None = None


class Mismatch(msgspec.Struct, frozen=True):
    """One figure of one row that the ledger contradicts."""

    order_id: UUID
    figure: str
    by_row: object
    by_ledger: object

    def __str__(self) -> str:
        return f"order {self.order_id}: {self.figure} is {self.by_row} in the row and {self.by_ledger} by the ledger"


class _OpenPosition(msgspec.Struct):
    id: UUID
    side: OrderSide
    quantity: Decimal = ZERO
    entry_notional: Decimal = ZERO
    fees: Decimal = ZERO
    funding: Decimal = ZERO


def recompute(entries: Iterable[LedgerEntry]) -> list[OrderFigures]:
    """Return every position and trade that follows from the ledger of one run, with its entries ordered by `sequence`.

    Funding and insurance of a position without fills are skipped, so the figures of that row will differ.
    """
    open_positions: dict[str, _OpenPosition] = {}
    closed: dict[UUID, OrderFigures] = {}
    for _, group in groupby(entries, key=lambda e: (type(e), e.order_id, getattr(e, "side", None))):
        batch = list(group)
        for entry in batch:
            if isinstance(entry, FundingPayment):
                if (position := open_positions.get(entry.symbol)) is not None:
                    position.funding += entry.amount
            elif isinstance(entry, InsurancePayment) and (trade := closed.get(entry.order_id)) is not None:
                closed[entry.order_id] = msgspec.structs.replace(trade, insurance=trade.insurance + entry.amount)
        fills = [entry for entry in batch if isinstance(entry, Fill)]
        if fills:
            _apply(open_positions, closed, fills)
    return [*closed.values(), *(_open_figures(symbol, position) for symbol, position in open_positions.items())]


def _apply(open_positions: dict[str, _OpenPosition], closed: dict[UUID, OrderFigures], fills: Sequence[Fill]) -> None:
    """Apply successive fills of one row: together they open it, add to it or close it."""
    first = fills[0]
    position = open_positions.get(first.symbol)
    quantity = sum((f.quantity for f in fills), ZERO)
    notional = sum((f.quantity * f.price for f in fills), ZERO)
    fees = sum((f.fee + f.liquidation_fee for f in fills), ZERO)
    if position is None or position.side is first.side:
        position = open_positions.setdefault(first.symbol, _OpenPosition(first.order_id, first.side))
        position.quantity += quantity
        position.entry_notional += notional
        position.fees += fees
        return
    amounts = (position.entry_notional, position.fees, position.funding)
    entry, entry_fees, funding = (share(amount, quantity, position.quantity) for amount in amounts)
    closed[first.order_id] = OrderFigures(
        id=first.order_id,
        symbol=first.symbol,
        side=position.side.opens,
        quantity=quantity,
        entry_notional=entry,
        fees=entry_fees + fees,
        liquidation_fees=sum((f.liquidation_fee for f in fills), ZERO),
        funding=funding,
        insurance=ZERO,
        exit_notional=notional,
        gross_pnl=position.side.direction * (notional - entry),
    )
    position.quantity -= quantity
    position.entry_notional -= entry
    position.fees -= entry_fees
    position.funding -= funding
    if position.quantity <= 0:  # negative: the ledger closes more than it opened, which this trade's row contradicts
        del open_positions[first.symbol]


def _open_figures(symbol: str, position: _OpenPosition) -> OrderFigures:
    return OrderFigures(
        id=position.id,
        symbol=symbol,
        side=position.side.opens,
        quantity=position.quantity,
        entry_notional=position.entry_notional,
        fees=position.fees,
        liquidation_fees=ZERO,
        funding=position.funding,
        insurance=ZERO,
    )


def compare(rows: Iterable[OrderFigures], recomputed: Iterable[OrderFigures]) -> list[Mismatch]:
    """Return every figure in which the rows and the ledger differ, including missing rows."""
    by_row = {row.id: row for row in rows}
    by_ledger = {row.id: row for row in recomputed}
    mismatches = []
    for order_id in sorted(by_row.keys() | by_ledger.keys()):
        row, ledger = by_row.get(order_id), by_ledger.get(order_id)
        if row is None or ledger is None:
            mismatches.append(Mismatch(order_id, "existence", row is not None, ledger is not None))
            continue
        mismatches += [
            Mismatch(order_id, figure, getattr(row, figure), getattr(ledger, figure))
            for figure in OrderFigures.__struct_fields__
            if getattr(row, figure) != getattr(ledger, figure)
        ]
    return mismatches


# --- the venue's trades -----------------------------------------------------------------------------------------------


class VenueTrade(VenueFill, frozen=True, kw_only=True):
    """A recorded trade of the venue. `request_id` and `order_cause` come from its order; None if it has none."""

    request_id: UUID | None
    order_cause: Cause | None


class VenueMismatch(msgspec.Struct, frozen=True):
    """A figure in which the venue's trades and the resulting fills differ."""

    what: str
    figure: str
    by_trades: Decimal
    by_books: Decimal

    def __str__(self) -> str:
        traded, booked = format_decimal(self.by_trades), format_decimal(self.by_books)
        return f"{self.what}: {self.figure} is {traded} by the venue's trades and {booked} in the books"


class _Deal(NamedTuple):
    """The facts that a venue's trade shares with its fills. A trade that flips a position makes two fills."""

    symbol: str
    side: OrderSide
    price: Decimal
    maker: bool
    request_id: UUID | None
    cause: Cause | None

    def __str__(self) -> str:
        role = "maker" if self.maker else "taker"
        whose = f"of order {self.request_id}" if self.cause is None else f"for {self.cause}"
        return f"{self.side} of {self.symbol} at {format_decimal(self.price)} as {role} {whose}"


def compare_with_venue(fills: Iterable[Fill], trades: Iterable[VenueTrade]) -> list[VenueMismatch]:
    """Return the differences between the fills and the venue's trades of one live run.

    A fill without a request takes its cause from the order that the service sent, or else from the trade itself. Only a
    reset fills without the venue.
    """
    by_trades: defaultdict[_Deal, list[Decimal]] = defaultdict(lambda: [ZERO, ZERO])
    by_fills: defaultdict[_Deal, list[Decimal]] = defaultdict(lambda: [ZERO, ZERO])
    for trade in trades:
        sums = by_trades[_deal(trade, trade.order_cause or trade.cause)]
        sums[0] += trade.quantity
        sums[1] += trade.price * trade.quantity * trade.fee_rate
    for fill in fills:
        if fill.cause is not Cause.RESET:
            sums = by_fills[_deal(fill, fill.cause)]
            sums[0] += fill.quantity
            sums[1] += fill.fee + fill.liquidation_fee
    return [
        VenueMismatch(str(deal), figure, of_trades, of_fills)
        for deal in sorted(by_trades.keys() | by_fills.keys(), key=str)
        for figure, of_trades, of_fills in zip(("quantity", "fee"), by_trades[deal], by_fills[deal], strict=True)
        if of_trades != of_fills
    ]


def _deal(fill: Fill | VenueTrade, cause: Cause) -> _Deal:
    # A request's fills are first caused by its order, and by its limit once it has rested.
    return _Deal(
        fill.symbol, fill.side, fill.price, fill.maker, fill.request_id, cause if fill.request_id is None else None
    )
