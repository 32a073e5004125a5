"""The books recomputed from the ledger alone, by the average-cost method, to be compared with the rows of `orders`.

And of live trading the ledger compared with the trades of the venue that it was made of. Nothing here is shared with
the exchange that wrote the rows except the rounding of `money.share`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.domain.exchange.orders import Cause, Fill, FundingPayment, InsurancePayment, OrderSide
from trader.domain.money import ZERO, format_decimal, share

Entry = Fill | FundingPayment | InsurancePayment


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a row of `orders` says, as far as the ledger knows it. Exit figures are None while it is open."""

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


class _Holding(msgspec.Struct):
    id: UUID
    side: OrderSide
    quantity: Decimal = ZERO
    entry_notional: Decimal = ZERO
    fees: Decimal = ZERO
    funding: Decimal = ZERO


def recompute(entries: Iterable[Entry]) -> list[OrderFigures]:
    """Every position and trade that the ledger of one run makes, from its entries in the order of `sequence`.

    Funding and insurance of what no fill has made are left out: the figures of that row differ then.
    """
    holdings: dict[str, _Holding] = {}
    closed: dict[UUID, OrderFigures] = {}
    for _, group in groupby(entries, key=lambda e: (type(e), e.order_id, getattr(e, "side", None))):
        batch = list(group)
        for entry in batch:
            if isinstance(entry, FundingPayment):
                if (holding := holdings.get(entry.symbol)) is not None:
                    holding.funding += entry.amount
            elif isinstance(entry, InsurancePayment) and (trade := closed.get(entry.order_id)) is not None:
                closed[entry.order_id] = msgspec.structs.replace(trade, insurance=trade.insurance + entry.amount)
        fills = [entry for entry in batch if isinstance(entry, Fill)]
        if fills:
            _book(holdings, closed, fills)
    return [*closed.values(), *(_open_figures(symbol, holding) for symbol, holding in holdings.items())]


def _book(holdings: dict[str, _Holding], closed: dict[UUID, OrderFigures], fills: Sequence[Fill]) -> None:
    """Book the fills of one row that follow each other: they open, add, or close it together."""
    first = fills[0]
    holding = holdings.get(first.symbol)
    quantity = sum((f.quantity for f in fills), ZERO)
    notional = sum((f.quantity * f.price for f in fills), ZERO)
    fees = sum((f.fee + f.liquidation_fee for f in fills), ZERO)
    if holding is None or holding.side is first.side:
        holding = holdings.setdefault(first.symbol, _Holding(first.order_id, first.side))
        holding.quantity += quantity
        holding.entry_notional += notional
        holding.fees += fees
        return
    entry, entry_fees, funding = (
        share(amount, quantity, holding.quantity) for amount in (holding.entry_notional, holding.fees, holding.funding)
    )
    closed[first.order_id] = OrderFigures(
        id=first.order_id,
        symbol=first.symbol,
        side=holding.side.opens,
        quantity=quantity,
        entry_notional=entry,
        fees=entry_fees + fees,
        liquidation_fees=sum((f.liquidation_fee for f in fills), ZERO),
        funding=funding,
        insurance=ZERO,
        exit_notional=notional,
        gross_pnl=holding.side.direction * (notional - entry),
    )
    holding.quantity -= quantity
    holding.entry_notional -= entry
    holding.fees -= entry_fees
    holding.funding -= funding
    if holding.quantity <= 0:  # below: the ledger closes more than it opened, which the row of this trade contradicts
        del holdings[first.symbol]


def _open_figures(symbol: str, holding: _Holding) -> OrderFigures:
    return OrderFigures(
        id=holding.id,
        symbol=symbol,
        side=holding.side.opens,
        quantity=holding.quantity,
        entry_notional=holding.entry_notional,
        fees=holding.fees,
        liquidation_fees=ZERO,
        funding=holding.funding,
        insurance=ZERO,
    )


def compare(rows: Iterable[OrderFigures], recomputed: Iterable[OrderFigures]) -> list[Mismatch]:
    """Every figure in which the rows and the ledger differ, missing rows included."""
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


class VenueTrade(msgspec.Struct, frozen=True, kw_only=True):
    """A trade of the venue as its row says. `request_id` and `cause` are those of its order; None where it has none."""

    trade_id: int
    request_id: UUID | None
    cause: Cause | None
    kind: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee_rate: Decimal
    maker: bool


class VenueMismatch(msgspec.Struct, frozen=True):
    """What the trades of the venue and the fills that they were booked as do not agree about."""

    what: str
    figure: str
    by_trades: Decimal
    by_books: Decimal

    def __str__(self) -> str:
        traded, booked = format_decimal(self.by_trades), format_decimal(self.by_books)
        return f"{self.what}: {self.figure} is {traded} by the venue's trades and {booked} in the books"


class _Deal(NamedTuple):
    """What a trade has in common with the fills that it was booked as. A trade that flips is booked as two."""

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
    """What of one run in live trading is in the fills and not in the venue's trades, or the other way round.

    A fill without a request has its cause from the order that the service sent, else from the trade itself. Only a
    reset fills without the venue.
    """
    by_trades: defaultdict[_Deal, list[Decimal]] = defaultdict(lambda: [ZERO, ZERO])
    by_fills: defaultdict[_Deal, list[Decimal]] = defaultdict(lambda: [ZERO, ZERO])
    for trade in trades:
        sums = by_trades[_deal(trade, trade.cause or (Cause.ORDER if trade.kind == "trade" else Cause.LIQUIDATION))]
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


def _deal(one: Fill | VenueTrade, cause: Cause) -> _Deal:
    # What a request fills is caused by its order at first, and by its limit once it has rested.
    return _Deal(one.symbol, one.side, one.price, one.maker, one.request_id, cause if one.request_id is None else None)
