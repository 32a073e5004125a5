"""Accounts: positions, resting orders and cash, and the figures derived from them and the marks.

Every amount is in the quote currency. `marks` maps a symbol to its mark price and must hold each market in which the
account has a position; a missing one raises `KeyError`, since a price is never invented. The formulas are those of
cross-margined linear perpetuals; see docs/exchange.md.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.exchange.orders import Cause, ExitPlan, Fill, Order, OrderSide, Side
from trader.domain.market.markets import Market
from trader.domain.money import ONE, ZERO, divide, share

Marks = Mapping[str, Decimal]

TAKEN_KEPT: Final = timedelta(minutes=20)
"""How long it is known what was taken out of a book: longer than any book needs to recover."""

LIQUIDATED_UNTIL: Final = Decimal("1.1")
"""A liquidation ends when equity is above this multiple of maintenance."""


class Position(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The one net position of an account in a market: a row of `orders` with status OPEN.

    `entry_notional` is the exact Σ quantity × price of what is open, so that averaging never rounds the books.
    `fees` and `funding` are those not yet shared out to closed parts, `realized` the gross pnl of its closed parts.
    `funded_until` is the last hour boundary for which funding was posted (at first: the opening).
    `closing` is the trigger that fired, while the book has not yet taken the whole position. Its order meets no book
    before `closing_at`; None: the next one.
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
    def entry_price(self) -> Decimal:
        """Average entry price; rounded, and for display and ratios only."""
        return divide(self.entry_notional, self.quantity)

    @property
    def leverage(self) -> Decimal:
        """Entry notional / margin."""
        return divide(self.entry_notional, self.margin)

    @property
    def risk(self) -> Decimal | None:
        """The loss before costs when the stop is hit; None without a stop, or with one that has passed the entry."""
        stop = self.exit_plan.stop
        if stop is None:
            return None
        lost = (self.entry_price - stop) * self.side.direction
        return self.quantity * lost if lost > 0 else None

    def unrealized(self, mark: Decimal) -> Decimal:
        """Direction × quantity × (mark − entry)."""
        gain = self.quantity * mark - self.entry_notional
        return gain if self.side is Side.LONG else -gain

    def split(self, quantity: Decimal) -> tuple["Position", "Position | None"]:
        """Return the part of `quantity` and the rest (None when nothing is left), which add up exactly."""
        if quantity == self.quantity:
            return self, None
        names = ("entry_notional", "margin", "fees", "funding")
        parts = {name: share(getattr(self, name), quantity, self.quantity) for name in names}
        rests = {name: getattr(self, name) - part for name, part in parts.items()}
        part = msgspec.structs.replace(self, quantity=quantity, realized=ZERO, closing=None, closing_at=None, **parts)
        return part, msgspec.structs.replace(self, quantity=self.quantity - quantity, **rests)


class RestingOrder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A limit order, or the rest of one, that waits for its price.

    `ahead` is the quantity that stands before it at its price, where the rules count it.
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
        """Return what rests of a placed order."""
        own = {
            "id": order_id, "quantity": quantity, "remaining": remaining, "limit_price": limit_price, "ahead": ahead
        }  # fmt: skip
        return msgspec.convert(msgspec.structs.asdict(order) | own | {"created_at": at}, cls)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an account, from its initial capital to its reset. Numbered from 1."""

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
    """What was taken out of a market's books of late, ascending: by buys (of the asks) and by sells (of the bids).

    It is the sum of the fills of each time, so that it can be read from their rows.
    """

    buy: tuple[Take, ...] = ()
    sell: tuple[Take, ...] = ()

    def of(self, side: OrderSide) -> tuple[Take, ...]:
        """Return what orders of this side have taken."""
        return self.buy if side is OrderSide.BUY else self.sell

    def plus(self, side: OrderSide, take: Take) -> "Taken":
        """Return what was taken with one more, the latest, and without those that are too old to matter."""
        kept = [earlier for earlier in self.of(side) if take.at - earlier.at < TAKEN_KEPT]
        if kept and kept[-1].at == take.at:
            take = take._replace(quantity=kept.pop().quantity + take.quantity)
        takes = (*kept, take)
        return Taken(takes, self.sell) if side is OrderSide.BUY else Taken(self.buy, takes)


def taken_with(taken: Mapping[str, Taken], fills: Iterable[Fill]) -> dict[str, Taken]:
    """Return what an account has taken with these fills, by market. A reset closes at the mark, without a book."""
    sums = dict(taken)
    for fill in fills:
        if fill.cause is not Cause.RESET:
            sums[fill.symbol] = sums.get(fill.symbol, Taken()).plus(fill.side, Take(fill.at, fill.quantity))
    return sums


def all_taken(accounts: Collection["Account"]) -> dict[str, Taken]:
    """Return what all the accounts together have taken, by market."""
    taken: dict[str, Taken] = {}
    for symbol in sorted({symbol for account in accounts for symbol in account.taken}):
        for side in OrderSide:
            takes = [take for account in accounts if symbol in account.taken for take in account.taken[symbol].of(side)]
            for take in sorted(takes):
                taken[symbol] = taken.get(symbol, Taken()).plus(side, take)
    return taken


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """An account in its present run. Every change is a `Posting` with a new value of it.

    `sequence` counts every row ever posted to it; `changed_at` is the time of the last posting that was no refusal: the
    account has seen every tick until then. `last_order_at` is when an order was last placed (None: never).
    `liquidating` says that a liquidation has begun whose end, equity above `LIQUIDATED_UNTIL` × maintenance, the books
    have not allowed yet. `realized`, `fees`, `funding` and `insurance` are sums over the run, and
    `cash = initial capital + realized − fees + funding + insurance`.
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
    taken: Mapping[str, Taken] = {}

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


def has_marks(account: Account, marks: Marks) -> bool:
    """Whether there is a mark of every market in which the account has a position, as its figures need."""
    return account.positions.keys() <= marks.keys()


def unrealized(account: Account, marks: Marks) -> Decimal:
    """Σ direction × quantity × (mark − entry)."""
    return sum((p.unrealized(marks[p.symbol]) for p in account.positions.values()), ZERO)


def equity(account: Account, marks: Marks) -> Decimal:
    """Cash + unrealized; the wire calls it netPortfolio."""
    return account.cash + unrealized(account, marks)


def maintenance(account: Account, marks: Marks, markets: Mapping[str, Market]) -> Decimal:
    """Σ quantity × mark × maintenance rate, by tiers of the notional."""
    return sum((markets[p.symbol].maintenance(p.quantity * marks[p.symbol]) for p in account.positions.values()), ZERO)


def is_liquidable(account: Account, marks: Marks, markets: Mapping[str, Market]) -> bool:
    """Whether positions are to be reduced by force: equity ≤ maintenance, or not yet safe since it was."""
    required = maintenance(account, marks, markets)
    if account.liquidating:
        required *= LIQUIDATED_UNTIL
    return equity(account, marks) <= required


def openings(account: Account) -> Iterator[tuple[RestingOrder, Decimal]]:
    """Yield each resting order with the quantity of it that would open, not reduce.

    What a position can absorb goes to its opposing orders in the order in which they were placed.
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
    """Margin reserved by resting orders: quantity × limit / leverage, nothing for what only reduces."""
    return sum(
        (divide(opening * order.limit_price, order.leverage or ONE) for order, opening in openings(account)), ZERO
    )


def promised_notional(account: Account, symbol: str, side: OrderSide, mark: Decimal) -> Decimal:
    """Return the notional of the position that orders of this side make: what is held of it at the mark, and what the
    resting ones would open at their limits."""
    position = account.positions.get(symbol)
    held = position.quantity if position is not None and position.side is side.opens else ZERO
    waiting = (
        opening * order.limit_price
        for order, opening in openings(account)
        if order.symbol == symbol and order.side is side
    )
    return held * mark + sum(waiting, ZERO)


def free_margin(account: Account, marks: Marks) -> Decimal:
    """Equity − margin − reserved; `availableCash` before its floor of zero."""
    return equity(account, marks) - account.margin - reserved(account)


def available_cash(account: Account, marks: Marks) -> Decimal:
    """max(0, equity − margin − margin reserved by resting orders)."""
    return max(ZERO, free_margin(account, marks))


def liquidation_price(account: Account, symbol: str, marks: Marks, markets: Mapping[str, Market]) -> Decimal | None:
    """Return the mark of `symbol` at which, all else equal, equity meets maintenance.

    None when no positive mark does, and while the mark of a position is missing.
    With direction d, quantity q, rate r and mark m: equity − maintenance changes by q × (d − r) per unit of m, so by
    the line of one tier the price is m − (equity − maintenance) / (q × (d − r)). Maintenance is the largest of the
    lines, so that of a long is met at the highest of these prices, that of a short at the lowest.
    """
    if not has_marks(account, marks):
        return None
    position, market, mark = account.positions[symbol], markets[symbol], marks[symbol]
    notional, direction = position.quantity * mark, position.side.direction
    spare = equity(account, marks) - maintenance(account, marks, markets) + market.maintenance(notional)
    prices = (
        mark - divide(spare - notional * rate + deduction, position.quantity * (direction - rate))
        for rate, deduction in market.maintenance_lines()
    )
    price = max(prices) if position.side is Side.LONG else min(prices)
    return price if price > 0 else None


def opposing(account: Account, symbol: str, side: OrderSide) -> Decimal:
    """The quantity of the position that an order of this side would reduce."""
    position = account.positions.get(symbol)
    return position.quantity if position is not None and position.side is not side.opens else ZERO


def last_boundary(at: datetime, every: int = 1) -> datetime:
    """Return the last time up to `at` that is a multiple of so many hours after 00:00 UTC."""
    return at.replace(hour=at.hour - at.hour % every, minute=0, second=0, microsecond=0)


def hours_crossed(after: datetime, until: datetime, every: int = 1) -> Iterable[datetime]:
    """The boundaries of so many hours in (after, until], ascending."""
    boundary = last_boundary(after, every) + timedelta(hours=every)
    while boundary <= until:
        yield boundary
        boundary += timedelta(hours=every)
