"""What a venue reports of our orders and positions, and how an order is written in its terms. No I/O.

An order is never assumed to have failed because nobody answered. The outcome of sending it is `Placed` when the venue
shows it, `Refused` when it does not stand and never will, and `Unknown` until one of the two is certain. What follows
for the order's status is the table in `trader.domain.exchange.venue_orders`.
"""

from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Final

import msgspec

from trader.domain.exchange.venue_orders import OrderEvent
from trader.domain.money import ZERO

CLIENT_INDEX_MAX: Final = 2**48 - 1
"""The venue accepts whole numbers from 1 up to this as client order ids, each once per account."""


class VenueOrderState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one of our orders at the venue. `status` is the venue's word for it.

    `is_shown` is False for the final state that is assumed of an order which the venue no longer knows.
    """

    client_index: int
    venue_index: int
    symbol: str
    filled: Decimal
    is_final: bool
    status: str
    is_shown: bool = True

    @property
    def event(self) -> OrderEvent:
        if not self.is_shown:
            return OrderEvent.WRITTEN_OFF
        return OrderEvent.ENDED if self.is_final else OrderEvent.SHOWN


class Placed(msgspec.Struct, frozen=True):
    """The venue shows the order."""

    state: VenueOrderState


class Refused(msgspec.Struct, frozen=True):
    """The order does not stand at the venue and never will."""

    reason: str


class Unknown(msgspec.Struct, frozen=True):
    """Whether the order stands is not known. Nothing else may trade its market until it is.

    `nonce` is that of the transaction whose answer was lost; None if none was sent.
    """

    reason: str
    nonce: int | None = None


SendOutcome = Placed | Refused | Unknown


class VenueFunding(msgspec.Struct, frozen=True):
    """Funding that the venue paid to the account (negative: charged) for one position at one whole hour."""

    symbol: str
    boundary: datetime
    quantity: Decimal
    rate: Decimal
    amount: Decimal


def signed_quantity(sign: int, size: Decimal) -> Decimal:
    """Return a position from the venue's sign (+1, −1, or 0 for none) and size. Raise `ValueError` for other values."""
    if not size.is_finite() or size < 0 or sign not in (1, 0, -1) or (sign == 0 and size != 0):
        raise ValueError(f"a position of sign {sign} and size {size} is impossible")
    return sign * size if size else ZERO


def client_index_of(account_id: str, client_order_id: str) -> int:
    """Return the venue's client order id for one of our orders: a hash, so the same order always has the same id."""
    digest = blake2b(f"{account_id}\n{client_order_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) or CLIENT_INDEX_MAX
