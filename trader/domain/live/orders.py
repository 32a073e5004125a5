"""Orders at a real venue: what is sent, what the venue says of it, and what follows from that. No I/O.

A sent order is never taken for failed because nobody answered. It is *placed* when the venue shows it, *refused* when
the venue said so or can no longer accept it, and *unknown* until one of the two is certain.
"""

from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Final

import msgspec

from trader.domain.exchange.orders import OrderSide
from trader.domain.money import ZERO, divide

CLIENT_INDEX_MAX: Final = 2**48 - 1
"""The venue takes whole numbers from 1 up to this as client order ids, each once per account."""


class VenueOrderState(msgspec.Struct, frozen=True, kw_only=True):
    """What the venue says of one of our orders. `filled_notional` is in quote currency, without fees."""

    client_index: int
    venue_index: int
    symbol: str
    side: OrderSide
    filled: Decimal
    filled_notional: Decimal
    is_final: bool
    status: str

    @property
    def average_price(self) -> Decimal | None:
        """None without a fill."""
        return divide(self.filled_notional, self.filled) if self.filled else None


class Placed(msgspec.Struct, frozen=True):
    """The venue shows the order."""

    state: VenueOrderState


class Refused(msgspec.Struct, frozen=True):
    """The order does not stand at the venue and never will."""

    reason: str


class Unknown(msgspec.Struct, frozen=True):
    """Whether the order stands is not known. Nothing else may trade its market until it is.

    `nonce` is that of the transaction whose answer was lost, as far as one was sent.
    """

    reason: str
    nonce: int | None = None


Outcome = Placed | Refused | Unknown


class VenueFunding(msgspec.Struct, frozen=True):
    """Funding that the venue paid to the account (negative: took from it) for one position at one whole hour."""

    symbol: str
    boundary: datetime
    quantity: Decimal
    rate: Decimal
    amount: Decimal


class VenuePosition(msgspec.Struct, frozen=True):
    """A position as the venue holds it. `quantity` is negative for a short one."""

    symbol: str
    quantity: Decimal
    entry_price: Decimal


def signed_quantity(sign: int, size: Decimal) -> Decimal:
    """A position from the venue's sign and size. A sign is +1, −1, or 0 for none; anything else is an error."""
    if not size.is_finite() or size < 0 or sign not in (1, 0, -1) or (sign == 0 and size != 0):
        raise ValueError(f"a position of sign {sign} and size {size} cannot be")
    return sign * size if size else ZERO


def client_index_of(account_id: str, client_order_id: str) -> int:
    """The venue's client order id for an order of ours: the same for the same order, whoever asks and whenever."""
    digest = blake2b(f"{account_id}\n{client_order_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) or CLIENT_INDEX_MAX
