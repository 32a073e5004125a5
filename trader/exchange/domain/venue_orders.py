"""Orders at a real venue and their trades, as recorded in the ledger; a table defines the states of a sent order.

An order is recorded before it is sent, so it starts as SENT. `advance` is the only way to another status::

                                 SHOWN
                                 +--+
                       SHOWN     |  v     ENDED, WRITTEN_OFF
    record -> SENT -----------> STANDING --------------------> DONE
              |  |                                              ^
              |  |                    ENDED                     |
              |  +----------------------------------------------+
              |        REJECTED
              +----------------> REFUSED

DONE and REFUSED are final. While an order is SENT, the account opens nothing else.
"""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import msgspec

from trader.core.money import ZERO
from trader.exchange.domain.orders import Cause, Order, OrderSide


class VenueOrderType(StrEnum):
    """The type of an order at a venue. `stop` and `target` become reduce-only market orders at their trigger price."""

    MARKET = "market"
    LIMIT = "limit"
    STOP = "stop"
    TARGET = "target"


class VenueOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order as sent to a venue.

    `price` is the worst accepted price, `trigger` the trigger price of a stop or target. The venue refuses one that is
    `post_only` rather than let it take.
    """

    client_index: int
    symbol: str
    side: OrderSide
    type: VenueOrderType
    quantity: Decimal
    price: Decimal
    trigger: Decimal | None = None
    reduce_only: bool = False
    post_only: bool = False


class SentStatus(StrEnum):
    """The state of an order that may have reached the venue; the values of `venue_orders.status`."""

    SENT = "SENT"
    STANDING = "STANDING"
    DONE = "DONE"
    REFUSED = "REFUSED"

    @property
    def is_final(self) -> bool:
        return self in (SentStatus.DONE, SentStatus.REFUSED)


class OrderEvent(StrEnum):
    """What the service learned about a sent order."""

    REJECTED = "it is not open at the venue and never will be"
    SHOWN = "the venue shows it, and it is not final"
    ENDED = "the venue shows it, and it is final"
    WRITTEN_OFF = "it was open at the venue, and the venue no longer knows it"


TRANSITIONS: Final[Mapping[tuple[SentStatus, OrderEvent], SentStatus]] = MappingProxyType(
    {
        (SentStatus.SENT, OrderEvent.REJECTED): SentStatus.REFUSED,
        (SentStatus.SENT, OrderEvent.SHOWN): SentStatus.STANDING,
        (SentStatus.SENT, OrderEvent.ENDED): SentStatus.DONE,
        (SentStatus.STANDING, OrderEvent.SHOWN): SentStatus.STANDING,
        (SentStatus.STANDING, OrderEvent.ENDED): SentStatus.DONE,
        (SentStatus.STANDING, OrderEvent.WRITTEN_OFF): SentStatus.DONE,
    }
)


class ImpossibleTransition(Exception):
    """An event that an order cannot receive in its status: a bug of the service, never a fault of the venue."""


class SentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that may have reached the venue: a row of `venue_orders`, written before the order is sent.

    `cause` is the cause of its fills. `request` is the order that a caller placed, or None if the service sent it on
    its own. `filled` is the posted quantity. `attempt` is the venue's reference to the transaction that carries it,
    None before the first; the venue does not accept it after `expires_at`. `parent_index` names the order sent in the
    same transaction whose fills a stop or target protects.
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
    attempt: str | None = None
    parent_index: int | None = None
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
    def is_protective(self) -> bool:
        """Whether it is a stop or target, which waits at the venue for its trigger price."""
        return self.order.type in (VenueOrderType.STOP, VenueOrderType.TARGET)

    @property
    def is_of_plan(self) -> bool:
        """Whether it is a stop or target, or the limit of one of several targets."""
        return self.is_protective or (self.request is None and self.order.type is VenueOrderType.LIMIT)


def advance(sent: SentOrder, event: OrderEvent, **changes: Any) -> SentOrder:
    """Return the order with the status that follows from an event, with other fields changed.

    :raises ImpossibleTransition: the table has no such transition
    """
    status = TRANSITIONS.get((sent.status, event))
    if status is None:
        raise ImpossibleTransition(f"order {sent.client_index} of {sent.account_id} is {sent.status}: {event}")
    return msgspec.structs.replace(sent, status=status, **changes)


class VenueFill(msgspec.Struct, frozen=True, kw_only=True):
    """A trade of the account at the venue. `client_index` identifies its order; None if the venue names none.

    `fee_rate` is a fraction of the notional, negative for a rebate. `kind` is the venue's word, and `cause` the
    cause of a trade that none of our orders made.
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
    cause: Cause = Cause.MANUAL
    order_index: int = 0
    """The venue's index of its order, if it states one."""
