"""Orders and accounts of the simulator on the wire. Every amount is a JSON number in the quote currency."""

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

from msgspec import Meta

from trader.api.schemas.common import UNSET, From, Input, PositiveNumber, Timestamp, UnsetType, Wire
from trader.api.schemas.paging import bounded
from trader.api.schemas.positions import ExitPlanView, Markets
from trader.core.errors import InvalidInput, Issue
from trader.core.money import from_number
from trader.exchange.domain import account as figures
from trader.exchange.domain.account import Account, Marks, Position
from trader.exchange.domain.orders import (
    ExitPlan,
    Order,
    OrderSide,
    OrderStatus,
    OrderType,
    PlanTarget,
    Side,
)

# `$` alone would accept a trailing line feed.
AccountId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:-]{1,64}$(?!\n)",
        description="1 to 64 characters out of letters, digits, `.`, `_`, `:` and `-`",
    ),
]
ClientOrderId = Annotated[str, Meta(pattern=r"^[ -~]{1,128}$(?!\n)", description="1 to 128 printable ASCII characters")]
SymbolText = Annotated[str, Meta(min_length=1, max_length=32, description="the symbol of a market, such as BTC")]
Leverage = Annotated[
    Annotated[int, Meta(ge=1, le=1000)] | Annotated[float, Meta(ge=1, le=1000)],
    Meta(description="a number from 1 to the market's maximum"),
]
Confidence = Annotated[int, Meta(ge=0, le=100)] | Annotated[float, Meta(ge=0, le=100)]
ZonedTime = Annotated[datetime, Meta(tz=True)]
Words = Annotated[str, Meta(max_length=2000)]

DEFAULT_ACCOUNT = "default"

SIDES = {"buy": OrderSide.BUY, "long": OrderSide.BUY, "sell": OrderSide.SELL, "short": OrderSide.SELL}


class TargetInput(Input, kw_only=True):
    """A limit that closes a fraction of the position. `quantity` follows from it; a plan that was read has it."""

    price: PositiveNumber
    fraction: Annotated[float, Meta(gt=0, le=1)]
    quantity: PositiveNumber | None = None


class ExitPlanInput(Input, kw_only=True):
    """When to close the position. A null field is not set, so that a plan can be read and sent back.

    The stop follows the mark at the `trailingDistance`, a difference of prices. `targets` are limits that rest.
    """

    stop: PositiveNumber | None = None
    target: PositiveNumber | None = None
    invalidation: Words | None = None
    invalidation_price: PositiveNumber | None = None
    time_exit: ZonedTime | None = None
    trailing_distance: PositiveNumber | None = None
    targets: Annotated[list[TargetInput], Meta(max_length=3)] | None = None

    def to_plan(self) -> ExitPlan:
        return ExitPlan(
            stop=_decimal(self.stop),
            target=_decimal(self.target),
            invalidation=self.invalidation,
            invalidation_price=_decimal(self.invalidation_price),
            time_exit=None if self.time_exit is None else bounded(self.time_exit, "exitPlan", "timeExit"),
            trailing_distance=_decimal(self.trailing_distance),
            targets=tuple(
                PlanTarget(price=from_number(each.price), fraction=from_number(each.fraction))
                for each in self.targets or ()
            ),
        )


class PlaceOrderInput(Input, kw_only=True):
    account_id: AccountId = DEFAULT_ACCOUNT
    symbol: SymbolText
    side: Literal["buy", "sell", "long", "short"]
    quantity: PositiveNumber
    type: OrderType = OrderType.MARKET
    limit_price: PositiveNumber | UnsetType = UNSET
    leverage: Leverage | UnsetType = UNSET
    reduce_only: bool = False
    post_only: Annotated[bool, Meta(description="refuse a limit order that would take from the book")] = False
    exit_plan: ExitPlanInput | UnsetType = UNSET
    confidence: Confidence | UnsetType = UNSET
    client_order_id: ClientOrderId | UnsetType = UNSET

    def to_order(self) -> Order:
        """Return the requested order. Raises InvalidInput for a missing or superfluous limit price."""
        if self.type is OrderType.LIMIT and self.limit_price is UNSET:
            raise InvalidInput(Issue(("limitPrice",), "required for a limit order: expected a number above 0"))
        if self.type is OrderType.MARKET and self.limit_price is not UNSET:
            raise InvalidInput(Issue(("limitPrice",), 'a market order takes no limit price; use "type": "limit"'))
        return Order(
            account_id=self.account_id,
            symbol=self.symbol,
            side=SIDES[self.side],
            quantity=from_number(self.quantity),
            type=self.type,
            limit_price=_decimal(self.limit_price),
            leverage=_decimal(self.leverage),
            reduce_only=self.reduce_only,
            post_only=self.post_only,
            exit_plan=None if self.exit_plan is UNSET else self.exit_plan.to_plan(),
            confidence=_decimal(self.confidence),
            client_order_id=None if self.client_order_id is UNSET else self.client_order_id,
        )


class CancelOrderInput(Input, kw_only=True):
    account_id: AccountId = DEFAULT_ACCOUNT
    order_id: Annotated[str, Meta(min_length=1, max_length=64)]


class AccountInput(Input, kw_only=True):
    account_id: AccountId = DEFAULT_ACCOUNT


class FillView(Wire, kw_only=True):
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    timestamp: Annotated[Timestamp, From("at")]


class OrderView(Wire, kw_only=True):
    """The status and fills of an order. `realizedPnl` is gross; `averagePrice` is null without a fill.

    `manual` is true for an order placed manually on a model's account.
    """

    id: str
    client_order_id: str | UnsetType = UNSET
    account_id: str
    symbol: str
    side: OrderSide
    type: OrderType
    status: OrderStatus
    reason: str | UnsetType = UNSET
    requested_quantity: Decimal
    total_quantity: Decimal
    average_price: Decimal | None
    total_fees: Decimal
    realized_pnl: Decimal
    fills: list[FillView]
    timestamp: Annotated[Timestamp, From("at")]
    manual: bool | UnsetType = UNSET


class OrderOutput(Wire, kw_only=True):
    order: OrderView


class AccountPosition(Wire, kw_only=True):
    """A position in its account. Market figures are null while the market has no price."""

    symbol: str
    side: Side
    quantity: Decimal
    avg_entry_price: Annotated[Decimal, From("entry_price")]
    mark_price: Decimal | None
    notional: Decimal | None
    margin: Decimal
    leverage: Decimal
    unrealized_pnl: Decimal | None
    realized_pnl: Annotated[Decimal, From("realized")]
    liquidation_price: Decimal | None
    exit_plan: ExitPlanView

    @classmethod
    def of(cls, account: Account, position: Position, marks: Marks, markets: Markets) -> "AccountPosition":
        mark = marks.get(position.symbol)
        return cls.from_attributes(
            position,
            mark_price=mark,
            notional=None if mark is None else position.notional(mark),
            unrealized_pnl=None if mark is None else position.unrealized(mark),
            liquidation_price=figures.liquidation_price(account, position.symbol, marks, markets),
        )


class OpenOrder(Wire, kw_only=True):
    """A limit order, or the rest of one, resting in the book."""

    id: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    remaining: Decimal
    limit_price: Decimal
    reduce_only: bool | UnsetType = UNSET
    created_at: Timestamp


class AccountView(Wire, kw_only=True):
    """An account in its current run. One that does not exist is shown as an order would open it; `runId` is null."""

    account_id: Annotated[str, From("id")]
    run_id: str | None
    exists: bool
    quote_currency: Annotated[str, From("run.quote_currency")]
    initial_capital: Annotated[Decimal, From("run.initial_capital")]
    cash_balance: Annotated[Decimal, From("cash")]
    equity: Decimal | None
    available_cash: Decimal | None
    borrowed_balance: Annotated[Decimal, From("borrowed")]
    margin_balance: Annotated[Decimal, From("margin")]
    maintenance_margin: Decimal | None
    total_realized_pnl: Annotated[Decimal, From("realized")]
    total_unrealized_pnl: Decimal | None
    total_fees: Annotated[Decimal, From("fees")]
    total_funding_pnl: Annotated[Decimal, From("funding")]
    total_insurance: Annotated[
        Decimal,
        Meta(description="Losses beyond equity, written off; part of the cash."),
        From("insurance"),
    ]
    positions: list[AccountPosition]
    open_orders: Annotated[list[OpenOrder], From("resting")]

    @classmethod
    def of(cls, account: Account, marks: Marks, markets: Markets, *, is_open: bool) -> "AccountView":
        def priced(figure: Callable[..., Decimal], *others: Markets) -> Decimal | None:
            return figure(account, marks, *others) if figures.has_marks(account, marks) else None

        held = sorted(account.positions.values(), key=lambda position: (position.opened_at, position.symbol))
        return cls.from_attributes(
            account,
            run_id=account.run.id if is_open else None,
            exists=is_open,
            equity=priced(figures.equity),
            available_cash=priced(figures.available_cash),
            maintenance_margin=priced(figures.maintenance, markets),
            total_unrealized_pnl=priced(figures.unrealized),
            positions=[AccountPosition.of(account, position, marks, markets) for position in held],
        )


class AccountOutput(Wire, kw_only=True):
    account: AccountView


def _decimal(number: float | UnsetType | None) -> Decimal | None:
    return None if number is UNSET or number is None else from_number(number)
