"""Rows of an account at Lighter, as requests and frames show them: positions, orders, trades and transactions."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.clock import EPOCH
from trader.core.errors import MarketDataError
from trader.core.money import ZERO

_STANDING: Final = ("pending", "open")
_MILLISECOND: Final = timedelta(milliseconds=1)


class PositionRow(msgspec.Struct):
    """A position as the venue shows it."""

    market_id: int
    sign: int
    position: Decimal
    avg_entry_price: Decimal
    position_value: Decimal = ZERO
    symbol: str = ""

    @property
    def quantity(self) -> Decimal:
        """The signed quantity. Raise `MarketDataError` for an impossible one."""
        sign, size = self.sign, self.position
        if not size.is_finite() or size < 0 or sign not in (1, 0, -1) or (sign == 0 and size != 0):
            raise MarketDataError(f"{self.symbol}: a position of sign {sign} and size {size} is impossible")
        return sign * size if size else ZERO


class AccountRow(msgspec.Struct):
    positions: list[PositionRow]
    collateral: Decimal
    total_order_count: int = -1
    account_trading_mode: int = 0


class OrderRow(msgspec.Struct):
    """An order as the venue shows it, changed last at `updated_at` (milliseconds); `seen_s` says when that arrived."""

    order_index: int
    client_order_index: int
    market_index: int
    filled_base_amount: Decimal
    status: str
    type: str = ""
    trigger_price: Decimal = ZERO
    remaining_base_amount: Decimal = ZERO
    parent_order_index: int = 0
    updated_at: int = 0
    seen_s: float = 0.0

    @property
    def is_final(self) -> bool:
        return self.status not in (*_STANDING, "in-progress")

    @property
    def is_standing(self) -> bool:
        return self.status in _STANDING

    @property
    def age(self) -> tuple[bool, Decimal, int]:
        """How far its life has gone: of two rows, the greater one is the newer."""
        return self.is_final, self.filled_base_amount, self.updated_at


class OrderRows(msgspec.Struct):
    orders: list[OrderRow] | None = None


class TradeRow(msgspec.Struct):
    """A trade as the venue shows it. Fees are in millionths of the notional."""

    trade_id: int
    type: str
    market_id: int
    size: Decimal
    price: Decimal
    ask_account_id: int
    bid_account_id: int
    is_maker_ask: bool
    timestamp: int
    ask_id: int = 0
    bid_id: int = 0
    ask_client_id: int = 0
    bid_client_id: int = 0
    taker_fee: int | None = None
    maker_fee: int | None = None


class _Order(msgspec.Struct, rename="pascal"):
    client_order_index: int = 0
    reduce_only: int = 1


class _Info(_Order, rename="pascal"):
    """The text of a transaction: its order, those of a group, or the order that it cancels."""

    orders: list[_Order] = []
    index: int = 0


class Transaction(msgspec.Struct):
    """A transaction that the venue knows. Its status: 0 refused by the sequencer, 1 pending, 2 and 3 executed."""

    hash: str
    status: int
    nonce: int
    api_key_index: int
    executed_at: int = 0
    info: str = "{}"

    @property
    def key(self) -> str:
        """Its hash in one form."""
        return key_of(self.hash)

    @property
    def is_failed(self) -> bool:
        return self.status == 0

    @property
    def is_executed(self) -> bool:
        return self.status >= 2

    @property
    def at(self) -> datetime:
        """When it was executed, by the venue's clock."""
        return EPOCH + self.executed_at * _MILLISECOND

    @property
    def opens(self) -> set[int]:
        """The client indexes of its orders that could open."""
        return {order.client_order_index for order in self._orders() if not order.reduce_only}

    def is_of(self, attempt: str, *, order: int = 0, cancels: int = 0) -> bool:
        """Return whether it is the attempt at an order, or at canceling one: by its hash in any form, or its text."""
        if key_of(attempt.partition(":")[2]) == self.key:
            return True
        placed = {each.client_order_index for each in self._orders()}
        return order in placed - {0} or cancels in {self._orders()[0].index} - {0}

    def _orders(self) -> tuple[_Info, *tuple[_Order, ...]]:
        try:
            info = _INFO.decode(self.info)
        except msgspec.DecodeError as error:
            raise MarketDataError(f"the transaction {self.hash} cannot be decoded: {error}") from error
        return (info, *info.orders)


def key_of(digest: str) -> str:
    """Return the hash of a transaction in one form, whatever the venue puts before it."""
    return digest.lower().lstrip("0x")


_INFO: Final = msgspec.json.Decoder(_Info)
ORDER_ROWS: Final = msgspec.json.Decoder(OrderRows)
