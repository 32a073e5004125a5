"""The figures of a ledger of fills: average-cost positions, completed trades and sums, from the first line on.

Numbers are fractions; the only rounding is the rounding of the books: divisions, half-even to 16 decimals.
"""

from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction

UNIT = 10**16


def rounded(value: Fraction) -> Fraction:
    """Half-even to 16 decimals (`round` of a fraction is half-even)."""
    return Fraction(round(value * UNIT), UNIT)


@dataclass(frozen=True)
class Entry:
    """A line of the ledger. Lines of one `act` belong together: one order met one book.

    `quantity` is signed: buys are positive. `amount` is the amount paid in by funding or the insurance fund.
    """

    act: int
    at: datetime
    symbol: str
    quantity: Fraction = Fraction(0)
    price: Fraction = Fraction(0)
    fee: Fraction = Fraction(0)
    leverage: Fraction = Fraction(1)
    amount: Fraction = Fraction(0)
    kind: str = "fill"
    reason: str = ""


@dataclass
class Holding:
    """A net position, computed from the ledger. `quantity` is signed."""

    opened_at: datetime
    quantity: Fraction = Fraction(0)
    cost: Fraction = Fraction(0)
    margin: Fraction = Fraction(0)
    fees: Fraction = Fraction(0)
    funding: Fraction = Fraction(0)
    realized: Fraction = Fraction(0)


@dataclass(frozen=True)
class Trade:
    symbol: str
    quantity: Fraction
    cost: Fraction
    proceeds: Fraction
    gross: Fraction
    fees: Fraction
    funding: Fraction
    reason: str


@dataclass
class Books:
    """All figures of the ledger."""

    holdings: dict[str, Holding] = field(default_factory=dict)
    trades: list[Trade] = field(default_factory=list)
    realized: Fraction = Fraction(0)
    fees: Fraction = Fraction(0)
    funding: Fraction = Fraction(0)
    insurance: Fraction = Fraction(0)


def post(books: Books, lines: list[Entry]) -> None:
    """Post one act: funding and insurance unchanged; fills close open positions before they open new ones."""
    first = lines[0]
    if first.kind == "funding":
        books.funding += first.amount
        books.holdings[first.symbol].funding += first.amount
        return
    if first.kind == "insurance":
        books.insurance += first.amount
        return
    books.fees += sum(line.fee for line in lines)
    held = books.holdings.get(first.symbol)
    closing = abs(held.quantity) if held is not None and held.quantity * first.quantity < 0 else Fraction(0)
    closed = opened = proceeds = cost = exit_fees = entry_fees = Fraction(0)
    for line in lines:
        size, fee_of_unit = abs(line.quantity), line.fee / abs(line.quantity)
        closes = min(size, closing - closed)
        closed += closes
        proceeds += closes * line.price
        exit_fees += closes * fee_of_unit
        opened += size - closes
        cost += (size - closes) * line.price
        entry_fees += (size - closes) * fee_of_unit
    sign = 1 if first.quantity > 0 else -1
    if held is not None and closed:
        _close(books, held, first, closed, proceeds, exit_fees)
        held = books.holdings.get(first.symbol)
    if opened and held is None:
        held = Holding(first.at)
        books.holdings[first.symbol] = held
    if opened and held is not None:
        held.quantity += sign * opened
        held.cost += cost
        held.margin += rounded(cost / first.leverage)
        held.fees += entry_fees


def _close(
    books: Books, held: Holding, first: Entry, closed: Fraction, proceeds: Fraction, exit_fees: Fraction
) -> None:
    size = abs(held.quantity)
    cost, margin, fees, funding = (
        whole if closed == size else rounded(whole * closed / size)
        for whole in (held.cost, held.margin, held.fees, held.funding)
    )
    gross = proceeds - cost if held.quantity > 0 else cost - proceeds
    books.realized += gross
    books.trades.append(Trade(first.symbol, closed, cost, proceeds, gross, fees + exit_fees, funding, first.reason))
    if closed == size:
        del books.holdings[first.symbol]
        return
    held.quantity -= closed if held.quantity > 0 else -closed
    held.cost -= cost
    held.margin -= margin
    held.fees -= fees
    held.funding -= funding
    held.realized += gross
