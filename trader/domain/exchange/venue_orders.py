"""Orders sent to a real venue and its trades, as the ledger books them."""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import msgspec

from trader.domain.exchange.orders import Cause, Order, OrderSide
from trader.domain.money import ZERO


class VenueOrderType(StrEnum):
    """`stop` and `target` are triggers: at their price they become market orders that only reduce."""

    MARKET = "market"
    LIMIT = "limit"
    STOP = "stop"
    TARGET = "target"


class VenueOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order as it goes to a venue. `price` is the worst that is accepted, `trigger` that of a stop or target."""

    client_index: int
    symbol: str
    side: OrderSide
    type: VenueOrderType
    quantity: Decimal
    price: Decimal
    trigger: Decimal | None = None
    reduce_only: bool = False


class SentStatus(StrEnum):
    """How far an order that may have gone to the venue is known, as its row says; see `venue_orders` of schema.sql."""

    SENT = "SENT"
    STANDING = "STANDING"
    DONE = "DONE"
    REFUSED = "REFUSED"


class SentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that may have gone to the venue: a row of `venue_orders`, written before it is sent.

    `cause` is why its fills happen. `request` is the order that a caller placed, None for what the service sends by
    itself. `filled` is what of it is booked. After `expires_at` the venue takes it no more.
    """

    account_id: str
    run_id: UUID
    order: VenueOrder
    cause: Cause
    status: SentStatus
    expires_at: datetime
    created_at: datetime
    changed_at: datetime
    request_id: UUID | None = None
    request: Order | None = None
    nonce: int | None = None
    venue_index: int | None = None
    filled: Decimal = ZERO
    reason: str | None = None

    @property
    def symbol(self) -> str:
        return self.order.symbol

    @property
    def client_index(self) -> int:
        return self.order.client_index

    @property
    def is_leg(self) -> bool:
        """Whether it is a stop or target that waits for its trigger at the venue."""
        return self.order.type in (VenueOrderType.STOP, VenueOrderType.TARGET)


class VenueFill(msgspec.Struct, frozen=True, kw_only=True):
    """A trade of the account at the venue. `client_index` is that of its order; None when the venue names none.

    `fee_rate` is a fraction of the notional. `kind` is the venue's word: `trade` for one that an order made, anything
    else (a liquidation) for one that the venue made by itself.
    """

    trade_id: int
    client_index: int | None
    kind: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee_rate: Decimal
    maker: bool
    at: datetime

    @property
    def is_forced(self) -> bool:
        return self.kind != "trade"
