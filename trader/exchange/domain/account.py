"""Accounts: positions, resting orders and cash, and the figures derived from them and the marks.

All amounts are in the quote currency. `marks` maps a symbol to its mark price and must contain every market in which
the account has a position; a missing one raises `KeyError`, since a price is never invented. The formulas are the usual
ones for cross-margined linear perpetuals; see docs/exchange.md.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.core.money import ONE, ZERO, divide, share
from trader.exchange.domain.orders import AT_MARK, Cause, ExitPlan, Fill, Order, OrderSide, Side
from trader.market.domain.markets import Market

Marks = Mapping[str, Decimal]

TAKEN_KEPT: Final = timedelta(minutes=20)
"""How long depth taken from a book is remembered: longer than any book needs to recover."""


class Position(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An account's single net position in a market: a row of `orders` with status OPEN.

    `entry_notional` is the exact Σ quantity × price of the open quantity, so averaging never rounds the books. `fees`
    and `funding` are the amounts not yet allocated to closed parts; `realized` is the gross pnl of closed parts.
    `funded_until` is the last hour boundary for which funding was posted (initially the opening). `closing` is the
    trigger that fired, until the book has taken the whole position. Its order meets no book before `closing_at`; None
    means the next one.
    """

    id: UUID
    symbol: str
    side: Side
    quantity: Decimal
    entry_notional: Decimal
    margin: Decimal
    opened_at: datetime
    funded_until: datetime
    leveraged: bool = False
    fees: Decimal = ZERO
    funding: Decimal = ZERO
    realized: Decimal = ZERO
    exit_plan: ExitPlan = ExitPlan()
    confidence: Decimal | None = None
    invocation_id: UUID | None = None
    closing: str | None = None
    closing_at: datetime | None = None

    @property
    def is_long(self) -> bool:
        return self.side is Side.LONG

    @property
    def entry_price(self) -> Decimal:
        """Average entry price, rounded; for display and ratios only."""
        return divide(self.entry_notional, self.quantity)

    @property
    def leverage(self) -> Decimal:
        """Entry notional / margin."""
        return divide(self.entry_notional, self.margin)

    @property
    def given_leverage(self) -> Decimal | None:
        """The leverage; None when no order of the position gave one."""
        return self.leverage if self.leveraged else None

    @property
    def risk(self) -> Decimal | None:
        """The loss before costs if the stop is hit; None without a stop, or if the stop is past the entry."""
        stop = self.exit_plan.stop
        if stop is None:
            return None
        lost = (self.entry_price - stop) * self.side.direction
        return self.quantity * lost if lost > 0 else None

    def notional(self, mark: Decimal) -> Decimal:
        """Quantity × mark."""
        return self.quantity * mark

    def unrealized(self, mark: Decimal) -> Decimal:
        """Direction × quantity × (mark − entry)."""
        gain = self.notional(mark) - self.entry_notional
        return gain if self.is_long else -gain

    def split(self, quantity: Decimal) -> tuple["Position", "Position | None"]:
        """Return the part of `quantity` and the rest (None if nothing remains), which add up exactly."""
        if quantity == self.quantity:
            return self, None
        names = ("entry_notional", "margin", "fees", "funding")
        parts = {name: share(getattr(self, name), quantity, self.quantity) for name in names}
        rests = {name: getattr(self, name) - part for name, part in parts.items()}
        part = msgspec.structs.replace(self, quantity=quantity, realized=ZERO, closing=None, closing_at=None, **parts)
        return part, msgspec.structs.replace(self, quantity=self.quantity - quantity, **rests)


class Trade(Position, frozen=True, kw_only=True, gc=False):
    """A completed trade: the closed share of a position and its exit; a row of `orders` with status CLOSED.

    `quantity`, entry notional, margin and funding are the closed share's; `fees` cover both entry and exit, including
    `liquidation_fees`. `parent_id` is the position if only a part of it was closed.
    """

    account_id: str
    run_id: UUID
    parent_id: UUID | None
    exit_notional: Decimal
    gross_pnl: Decimal
    liquidation_fees: Decimal
    close_reason: Cause
    closed_at: datetime
    insurance: Decimal = ZERO

    @property
    def exit_price(self) -> Decimal:
        """Average exit price; rounded, and for display and ratios only."""
        return divide(self.exit_notional, self.quantity)

    @property
    def net_pnl(self) -> Decimal:
        """The gross pnl minus entry and exit fees, plus funding."""
        return self.gross_pnl - self.fees + self.funding


class RestingOrder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A limit order, or the rest of one, that is waiting for its price.

    `ahead` is the quantity ahead of it at its price, if the rules count it.
    """

    id: UUID
    symbol: str
    side: OrderSide
    quantity: Decimal
    remaining: Decimal
    limit_price: Decimal
    created_at: datetime
    ahead: Decimal = ZERO
    leverage: Decimal | None = None
    reduce_only: bool = False
    exit_plan: ExitPlan | None = None
    confidence: Decimal | None = None
    client_order_id: str | None = None
    invocation_id: UUID | None = None

    @classmethod
    def of(
        cls,
        order: Order,
        order_id: UUID,
        quantity: Decimal,
        remaining: Decimal,
        limit_price: Decimal,
        at: datetime,
        ahead: Decimal = ZERO,
    ) -> "RestingOrder":
        """Return the resting part of a placed order."""
        own = {
            "id": order_id, "quantity": quantity, "remaining": remaining, "limit_price": limit_price, "ahead": ahead
        }  # fmt: skip
        return msgspec.convert(msgspec.structs.asdict(order) | own | {"created_at": at}, cls)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an account, from its initial capital to its reset. Runs are numbered from 1."""

    id: UUID
    number: int
    initial_capital: Decimal
    quote_currency: str
    started_at: datetime


class Take(NamedTuple):
    """A quantity taken out of one side of a market's books at one time."""

    at: datetime
    quantity: Decimal


class Taken(msgspec.Struct, frozen=True):
    """Recent takes from a market's books, ascending: by buys (from the asks) and by sells (from the bids).

    Fills at the same time are summed, so that the takes can be rebuilt from the rows of the fills.
    """

    buy: tuple[Take, ...] = ()
    sell: tuple[Take, ...] = ()

    def of(self, side: OrderSide) -> tuple[Take, ...]:
        """Return the takes of orders of this side."""
        return self.buy if side is OrderSide.BUY else self.sell

    def plus(self, side: OrderSide, take: Take) -> "Taken":
        """Add the latest take, and drop takes that are too old to matter, or were dated by a clock that was ahead."""
        takes = self.of(side)
        if takes and takes[-1].at > take.at:
            takes = tuple(earlier for earlier in takes if earlier.at <= take.at)
        if takes and take.at - takes[0].at >= TAKEN_KEPT:
            takes = tuple(earlier for earlier in takes if take.at - earlier.at < TAKEN_KEPT)
        if takes and takes[-1].at == take.at:
            takes, take = takes[:-1], take._replace(quantity=takes[-1].quantity + take.quantity)
        takes = (*takes, take)
        return Taken(takes, self.sell) if side is OrderSide.BUY else Taken(self.buy, takes)

    @classmethod
    def of_all(cls, takes: Iterable[tuple[OrderSide, Take]]) -> "Taken":
        """Return takes in any order as adding them one by one in order of time would: of many, in much less time."""
        sums: dict[OrderSide, dict[datetime, Decimal]] = {side: {} for side in OrderSide}
        for side, take in sorted(takes, key=lambda each: each[1].at):
            sums[side][take.at] = sums[side].get(take.at, ZERO) + take.quantity
        kept = {
            side: tuple(Take(at, total) for at, total in of_side.items() if next(reversed(of_side)) - at < TAKEN_KEPT)
            for side, of_side in sums.items()
        }
        return cls(kept[OrderSide.BUY], kept[OrderSide.SELL])


def taken_with(taken: Mapping[str, Taken], fills: Iterable[Fill]) -> dict[str, Taken]:
    """Add what these fills took to an account's `taken`, by market."""
    sums = dict(taken)
    for fill in fills:
        if fill.cause not in AT_MARK:
            sums[fill.symbol] = sums.get(fill.symbol, Taken()).plus(fill.side, Take(fill.at, fill.quantity))
    return sums


def all_taken(accounts: Collection["Account"]) -> dict[str, Taken]:
    """Return the takes of all accounts together, by market."""
    takes: defaultdict[str, list[tuple[OrderSide, Take]]] = defaultdict(list)
    for account in accounts:
        for symbol, taken in account.taken.items():
            takes[symbol] += [(side, take) for side in OrderSide for take in taken.of(side)]
    return {symbol: Taken.of_all(each) for symbol, each in takes.items()}


class AppliedTick(NamedTuple):
    """A tick by its place in the order in which ticks were applied: a clock that is set may repeat or skip times."""

    number: int
    at: datetime


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """An account in its current run. Every change is a `Posting` with a new value of it.

    `sequence` counts every row ever posted to it; `changed_at` is the time of the last posting other than a refusal.
    `seen_tick` and `seen_until` are the number and the time of the last tick that it had seen at its last posting
    (0 and None: there was none). `last_order_at` is when an order was last placed (None: never).
    `liquidating` says that a liquidation has begun but the books have not yet allowed it to end.
    `partly_liquidated_at` is when a liquidation last left a part of a position on purpose (None: never in this run).
    `realized`, `fees`, `funding` and `insurance` are sums over the run, and `cash =
    initial capital + realized − fees + funding + insurance`.
    """

    id: str
    run: Run
    sequence: int
    changed_at: datetime
    realized: Decimal = ZERO
    fees: Decimal = ZERO
    funding: Decimal = ZERO
    insurance: Decimal = ZERO
    positions: Mapping[str, Position] = {}
    resting: tuple[RestingOrder, ...] = ()
    last_order_at: datetime | None = None
    liquidating: bool = False
    partly_liquidated_at: datetime | None = None
    taken: Mapping[str, Taken] = {}
    seen_tick: int = 0
    seen_until: datetime | None = None

    @property
    def cash(self) -> Decimal:
        return self.run.initial_capital + self.realized - self.fees + self.funding + self.insurance

    @property
    def borrowed(self) -> Decimal:
        """max(0, −cash)."""
        return max(ZERO, -self.cash)

    @property
    def margin(self) -> Decimal:
        """Σ quantity × entry / leverage."""
        return sum((position.margin for position in self.positions.values()), ZERO)

    @property
    def is_idle(self) -> bool:
        """Whether no tick can change the account."""
        return not self.positions and not self.resting

    def seen_to(self, since: AppliedTick) -> datetime:
        """Return the time of the last tick that the account has seen, if it has seen every tick up to `since`."""
        own = self.seen_until if self.seen_tick > since.number else None
        return since.at if own is None else own


def has_marks(account: Account, marks: Marks) -> bool:
    """Return whether every market in which the account has a position has a mark, as its figures require."""
    return all(symbol in marks for symbol in account.positions)


def unrealized(account: Account, marks: Marks) -> Decimal:
    """Σ direction × quantity × (mark − entry)."""
    return sum((p.unrealized(marks[p.symbol]) for p in account.positions.values()), ZERO)


def exposure(account: Account, marks: Marks) -> Decimal:
    """Σ quantity × mark."""
    return sum((p.notional(marks[p.symbol]) for p in account.positions.values()), ZERO)


def equity(account: Account, marks: Marks) -> Decimal:
    """Cash + unrealized; the wire calls it netPortfolio."""
    return account.cash + unrealized(account, marks)


def maintenance(account: Account, marks: Marks, markets: Mapping[str, Market]) -> Decimal:
    """Σ quantity × mark × maintenance rate, by tiers of the notional."""
    return sum((markets[p.symbol].maintenance(p.notional(marks[p.symbol])) for p in account.positions.values()), ZERO)


def is_liquidable(account: Account, marks: Marks, markets: Mapping[str, Market], until: Decimal) -> bool:
    """Return whether positions must be reduced by force: equity ≤ maintenance, or after that not yet above `until` ×
    maintenance."""
    required = maintenance(account, marks, markets)
    if account.liquidating:
        required *= until
    return equity(account, marks) <= required


def openings(account: Account) -> Iterator[tuple[RestingOrder, Decimal]]:
    """Yield each resting order with the quantity of it that would open rather than reduce.

    A position's quantity is absorbed by its opposing orders in the order in which they were placed.
    """
    reducible = {p.symbol: p.quantity for p in account.positions.values()}
    for order in account.resting:
        if order.reduce_only:
            continue
        opening = order.remaining
        position = account.positions.get(order.symbol)
        if position is not None and position.side is not order.side.opens:
            absorbed = min(reducible[order.symbol], opening)
            reducible[order.symbol] -= absorbed
            opening -= absorbed
        yield order, opening


def reserved(account: Account) -> Decimal:
    """Margin reserved by resting orders: quantity × limit / leverage, nothing for the quantity that only reduces."""
    return sum(
        (divide(opening * order.limit_price, order.leverage or ONE) for order, opening in openings(account)), ZERO
    )


def promised_notional(account: Account, symbol: str, side: OrderSide, mark: Decimal) -> Decimal:
    """Return the notional of the position that orders of this side build: the held quantity at the mark, and the
    resting orders' opening quantity at their limits."""
    position = account.positions.get(symbol)
    held = position.quantity if position is not None and position.side is side.opens else ZERO
    waiting = (
        opening * order.limit_price
        for order, opening in openings(account)
        if order.symbol == symbol and order.side is side
    )
    return held * mark + sum(waiting, ZERO)


def free_margin(account: Account, marks: Marks) -> Decimal:
    """Equity − margin − reserved, i.e. `availableCash` before its floor of zero."""
    return equity(account, marks) - account.margin - reserved(account)


def available_cash(account: Account, marks: Marks) -> Decimal:
    """max(0, equity − margin − margin reserved by resting orders)."""
    return max(ZERO, free_margin(account, marks))


def liquidation_price(account: Account, symbol: str, marks: Marks, markets: Mapping[str, Market]) -> Decimal | None:
    """Return the mark of `symbol` at which, all else equal, equity meets maintenance.

    None if no positive mark does, or while a position has no mark. With direction d, quantity q, rate r and mark m,
    equity − maintenance changes by q × (d − r) per unit of m, so by the line of one tier the price is m − (equity −
    maintenance) / (q × (d − r)). Maintenance is the largest of the lines, so a long meets it at the highest of these
    prices and a short at the lowest.
    """
    if not has_marks(account, marks):
        return None
    position, market, mark = account.positions[symbol], markets[symbol], marks[symbol]
    notional, direction = position.notional(mark), position.side.direction
    spare = equity(account, marks) - maintenance(account, marks, markets) + market.maintenance(notional)
    prices = (
        mark - divide(spare - notional * rate + deduction, position.quantity * (direction - rate))
        for rate, deduction in market.maintenance_lines()
    )
    price = max(prices) if position.is_long else min(prices)
    return price if price > 0 else None


def opposing(account: Account, symbol: str, side: OrderSide) -> Decimal:
    """Return the quantity of the position that an order of this side would reduce."""
    position = account.positions.get(symbol)
    return position.quantity if position is not None and position.side is not side.opens else ZERO


def last_boundary(at: datetime, every: int = 1) -> datetime:
    """Return the last time up to `at` that is a multiple of `every` hours after 00:00 UTC."""
    return at.replace(hour=at.hour - at.hour % every, minute=0, second=0, microsecond=0)


def hours_crossed(after: datetime, until: datetime, every: int = 1) -> Iterable[datetime]:
    """Yield the `every`-hour boundaries in (after, until], ascending."""
    boundary = last_boundary(after, every) + timedelta(hours=every)
    while boundary <= until:
        yield boundary
        boundary += timedelta(hours=every)
