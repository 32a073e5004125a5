"""What a venue reports about our orders and positions, and how our order ids map to its own. No I/O.

A missing answer never counts as a failed order. The outcome of sending an order is `Placed` when the venue
shows it, `Refused` when it is not open and never will be, and `Unknown` until one of the two is certain. The table in
`trader.exchange.domain.venue_orders` maps outcomes to order statuses.
"""

from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Final

import msgspec

from trader.exchange.domain.venue_orders import OrderEvent

CLIENT_INDEX_MAX: Final = 2**48 - 1
"""Venues accept client order ids from 1 to this number; each is used once per account."""


class VenueOrderState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one of our orders at the venue. `status` is the venue's own term.

    `is_shown` is False for the final state assumed for an order that the venue no longer knows. `has_fired`: the
    trigger of a stop or target was reached, whether it then filled or not.
    """

    client_index: int
    venue_index: int
    symbol: str
    filled: Decimal
    is_final: bool
    status: str
    is_shown: bool = True
    has_fired: bool = False

    @property
    def event(self) -> OrderEvent:
        if not self.is_shown:
            return OrderEvent.WRITTEN_OFF
        return OrderEvent.ENDED if self.is_final else OrderEvent.SHOWN


class Placed(msgspec.Struct, frozen=True):
    """The venue shows the order."""

    state: VenueOrderState


class Refused(msgspec.Struct, frozen=True):
    """The order is not at the venue and never will be."""

    reason: str


class Busy(msgspec.Struct, frozen=True):
    """The venue was too busy to take the order: nothing was executed, and it may be sent again."""

    reason: str


class Unknown(msgspec.Struct, frozen=True):
    """The order may or may not be open. Until that is known, the account opens nothing else."""

    reason: str


SendOutcome = Placed | Refused | Busy | Unknown


class VenueFunding(msgspec.Struct, frozen=True):
    """Funding that the venue paid to the account (negative: charged) for one position at one whole hour."""

    symbol: str
    boundary: datetime
    quantity: Decimal
    rate: Decimal
    amount: Decimal


def client_index_of(account_id: str, client_order_id: str) -> int:
    """Return the venue's client order id for one of our orders: a hash, so an order always gets the same id."""
    digest = blake2b(f"{account_id}\n{client_order_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) or CLIENT_INDEX_MAX
