"""Orders, answers, fills, payments and trades: the values that all exchanges share."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import msgspec

from trader.core.money import ZERO, divide


class Side(StrEnum):
    LONG = "LONG"
    SHORT = "SHORT"

    @property
    def direction(self) -> int:
        """+1 for a long, -1 for a short."""
        return 1 if self is Side.LONG else -1


class OrderSide(StrEnum):
    """The side of an order or a fill."""

    BUY = "buy"
    SELL = "sell"

    @property
    def opens(self) -> Side:
        """The side of the position that this order opens or adds to."""
        return Side.LONG if self is OrderSide.BUY else Side.SHORT

    @property
    def direction(self) -> int:
        return self.opens.direction


CLOSING_SIDE = {Side.LONG: OrderSide.SELL, Side.SHORT: OrderSide.BUY}


class OrderType(StrEnum):
    MARKET = "market"
    LIMIT = "limit"


class OrderStatus(StrEnum):
    """The status of an order in its answer."""

    FILLED = "filled"
    PARTIAL = "partial"
    RESTING = "resting"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Cause(StrEnum):
    """Why a fill happened; for a closed trade, the close reason."""

    ORDER = "order"
    LIMIT = "limit"
    STOP = "stop"
    INVALIDATION = "invalidation"
    TARGET = "target"
    TIME = "time"
    LIQUIDATION = "liquidation"
    RESET = "reset"
    OPERATOR = "operator"
    MANUAL = "manual"
    """Somebody traded the account at its venue, past the service."""

    ENDED = "ended"
    """The market ended."""


AT_MARK = frozenset({Cause.RESET, Cause.ENDED})
"""The causes of fills at the mark, without a book and without fees."""


class PlanTarget(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A limit at which a `fraction` of the position is closed, as by a resting reduce-only order.

    `quantity` is what it still closes, 0 before the position has the plan; `ahead` is that of a resting order.
    """

    price: Decimal
    fraction: Decimal
    quantity: Decimal = ZERO
    ahead: Decimal = ZERO


class ExitPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """When to leave a position. Prices are marks, except those of `targets`; `invalidation` is text for people and
    models. The stop follows the mark at the `trailing_distance`, a difference of prices, and never loosens.
    """

    stop: Decimal | None = None
    target: Decimal | None = None
    invalidation: str | None = None
    invalidation_price: Decimal | None = None
    time_exit: datetime | None = None
    trailing_distance: Decimal | None = None
    targets: tuple[PlanTarget, ...] = ()

    def trailed(self, side: Side, mark: Decimal) -> "ExitPlan":
        """Return the plan after a mark: with the stop at the trailing distance from it, unless it is tighter."""
        if self.trailing_distance is None:
            return self
        stop = mark - side.direction * self.trailing_distance
        if stop <= 0 or (self.stop is not None and (stop - self.stop) * side.direction <= 0):
            return self
        return msgspec.structs.replace(self, stop=stop)

    def trimmed(self, quantity: Decimal) -> "ExitPlan":
        """Return the plan with targets that together close no more than this quantity, the nearest first."""
        if sum((target.quantity for target in self.targets), ZERO) <= quantity:
            return self
        targets = []
        for target in self.targets:
            closes = min(target.quantity, quantity)
            quantity -= closes
            if closes:
                targets.append(msgspec.structs.replace(target, quantity=closes))
        return msgspec.structs.replace(self, targets=tuple(targets))


class OrderContents(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an order asks for, whoever places it.

    A `leverage` of None means 1. `limit_price` is for limit orders only, and so is `post_only`: an order that would
    take from the book is then refused. `confidence` is in percent.
    """

    symbol: str
    side: OrderSide
    quantity: Decimal
    limit_price: Decimal | None = None
    leverage: Decimal | None = None
    reduce_only: bool = False
    post_only: bool = False
    exit_plan: ExitPlan | None = None
    confidence: Decimal | None = None
    client_order_id: str | None = None


class Order(OrderContents, frozen=True, kw_only=True, gc=False):
    """An order as a caller places it.

    `invocation_id` is the model invocation that placed it; `cause` distinguishes an operator's order from one of the
    account itself. `manual` marks an order that a person placed on a model's account.
    """

    account_id: str
    type: OrderType = OrderType.MARKET
    invocation_id: UUID | None = None
    cause: Cause = Cause.ORDER
    manual: bool = False

    def contents_digest(self) -> str:
        """Digest of the order's contents; detects a reused client order id."""
        asked = (
            self.symbol, self.side, self.type, self.quantity, self.limit_price, self.leverage, self.reduce_only,
            self.post_only, self.exit_plan, self.confidence,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]


class Fill(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One execution at one price. `order_id` is the row of `orders` whose quantity it changed; fees are positive.

    `sequence` orders every row posted to an account. `request_id` is the placed order behind it; None if the exchange
    acted on its own. A fill that flips a position is posted as two, the closing part first.
    """

    sequence: int
    order_id: UUID
    request_id: UUID | None
    symbol: str
    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee: Decimal
    liquidation_fee: Decimal
    maker: bool
    cause: Cause
    at: datetime


class FundingPayment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Funding of one position at one hour boundary. `amount` is what the account received (negative: paid)."""

    sequence: int
    order_id: UUID
    symbol: str
    boundary: datetime
    quantity: Decimal
    mark: Decimal
    rate: Decimal
    amount: Decimal
    at: datetime


class InsurancePayment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A written-off loss beyond the account's equity: what the insurance fund paid to bring equity back to zero."""

    sequence: int
    order_id: UUID
    amount: Decimal
    at: datetime


class AnswerFill(msgspec.Struct, frozen=True, gc=False):
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    at: datetime


class OrderAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer to an order; stored, so that the same client order id always gets the same answer.

    `average_price` is None without a fill; `realized_pnl` is gross. `contents_digest` detects a reused client
    order id; None without one.
    """

    id: UUID
    account_id: str
    symbol: str
    side: OrderSide
    type: OrderType
    status: OrderStatus
    requested_quantity: Decimal
    at: datetime
    client_order_id: str | None = None
    contents_digest: str | None = None
    reason: str | None = None
    total_quantity: Decimal = ZERO
    average_price: Decimal | None = None
    total_fees: Decimal = ZERO
    realized_pnl: Decimal = ZERO
    fills: tuple[AnswerFill, ...] = ()
    manual: bool = False

    @classmethod
    def of(
        cls, order: Order, order_id: UUID, status: OrderStatus, at: datetime, reason: str | None = None
    ) -> "OrderAnswer":
        """Return the answer to an order without any fill."""
        return cls(
            id=order_id,
            account_id=order.account_id,
            symbol=order.symbol,
            side=order.side,
            type=order.type,
            status=status,
            requested_quantity=order.quantity,
            at=at,
            client_order_id=order.client_order_id,
            contents_digest=None if order.client_order_id is None else order.contents_digest(),
            reason=reason,
            manual=order.manual,
        )

    def so_far(
        self, status: str, reason: str | None, fills: Sequence[AnswerFill], realized_pnl: Decimal
    ) -> "OrderAnswer":
        """Return the current answer of an order that rests or has rested, by its row's status and all its fills."""
        quantity = sum((fill.quantity for fill in fills), ZERO)
        notional = sum((fill.quantity * fill.price for fill in fills), ZERO)
        return msgspec.structs.replace(
            self,
            status=OrderStatus(status.lower()),
            reason=reason,
            total_quantity=quantity,
            average_price=divide(notional, quantity) if quantity else None,
            total_fees=sum((fill.fee for fill in fills), ZERO),
            realized_pnl=realized_pnl,
            fills=tuple(fills),
        )
