"""Event bus within the process: services publish after their commit, streams listen."""

import logging
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec

from trader.domain.exchange.halts import Halt
from trader.domain.exchange.ledger import ClosedTrade
from trader.domain.exchange.orders import Cause
from trader.domain.money import divide, format_decimal, round_to

log = logging.getLogger("trader.exchange")

WorkflowType = Literal[
    "workflow:started", "workflow:step", "workflow:call", "workflow:complete", "workflow:failed", "batch:complete"
]


class MarketChecked(msgspec.Struct, frozen=True):
    """The price tracker's interval has passed; live values are due."""

    at: datetime


class PricesChanged(msgspec.Struct, frozen=True):
    """A tick was applied: the markets have new prices."""

    at: datetime


class PositionsChanged(msgspec.Struct, frozen=True):
    """A position or a resting order of these accounts was opened, changed or closed."""

    at: datetime
    account_ids: tuple[str, ...]


class TradesChanged(msgspec.Struct, frozen=True):
    """A trade of these accounts was completed. `trades` are those that this process booked; a standby has none."""

    at: datetime
    account_ids: tuple[str, ...]
    trades: tuple[ClosedTrade, ...] = ()


class ConversationsChanged(msgspec.Struct, frozen=True):
    """An invocation of this model was recorded."""

    at: datetime
    model_id: str


class VenueDiffers(msgspec.Struct, frozen=True):
    """The account differs from its venue account; published once per difference. `text` includes the rule."""

    at: datetime
    account_id: str
    kind: str
    text: str


class HaltsChanged(msgspec.Struct, frozen=True):
    """A halt came into force or was lifted; `halts` are those in force now."""

    at: datetime
    halts: tuple[Halt, ...]


class PostingRefused(msgspec.Struct, frozen=True):
    """A posting of the account broke a constraint of the schema, a bug; nothing of it was written."""

    account_id: str
    text: str


class LeadershipChanged(msgspec.Struct, frozen=True):
    """A standby has begun to lead, or a leader has lost its role; `text` says which."""

    text: str


class WorkflowProgress(msgspec.Struct, frozen=True):
    """A step of the trading workflow. `details` holds what the wire adds (`modelId`, `modelIds`, …)."""

    type: WorkflowType
    at: datetime
    details: dict[str, Any]


Event = (
    MarketChecked
    | PricesChanged
    | PositionsChanged
    | TradesChanged
    | ConversationsChanged
    | HaltsChanged
    | VenueDiffers
    | PostingRefused
    | LeadershipChanged
    | WorkflowProgress
)


class EventBus:
    """Calls every listener, in the order of subscription, within `publish`. Listeners only note and return."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def publish(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def log_trades(event: Event) -> None:
    """Log each completed trade that this process booked; a listener of the event bus."""
    if not isinstance(event, TradesChanged):
        return
    for trade in event.trades:
        level = logging.WARNING if trade.close_reason is Cause.LIQUIDATION else logging.INFO
        log.log(level, "closed by %s: %s", trade.close_reason, describe_trade(event.account_ids[0], trade))


def describe_trade(account_id: str, trade: ClosedTrade) -> str:
    """Return a completed trade as one line of text."""
    part = trade.part
    exit_price = round_to(divide(trade.exit_notional, part.quantity), Decimal("1e-8"))
    net = format_decimal(trade.gross_pnl - part.fees + part.funding)
    return (
        f"{account_id}: {part.side} {format_decimal(part.quantity)} {part.symbol} at {format_decimal(exit_price)}, "
        f"net {net if net.startswith('-') else f'+{net}'}"
    )
