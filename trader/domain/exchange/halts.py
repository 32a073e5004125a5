"""Halts: who may not open positions now, and why. And what operators ask of a running service, and what it did.

A halt stops what opens or adds. What reduces goes on: closing, stops and targets, liquidation, orders that only reduce.
"""

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from trader.domain.exchange.account import Account, RestingOrder, opposing
from trader.domain.exchange.orders import Order, OrderSide, OrderType, Side


class HaltCause(StrEnum):
    """What halted: a person, or a rule. Each is in force at most once for an account, and once for all."""

    OPERATOR = "operator"
    DAILY_LOSS = "daily loss"
    DRAWDOWN = "drawdown"
    RECONCILIATION = "reconciliation"


_HALTED: Final = "trading is halted"

LIMITS: Final = frozenset({HaltCause.DAILY_LOSS, HaltCause.DRAWDOWN})
"""The causes that are limits of losses."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """A halt in force, of one account or, with None, of all. `by` is whoever asked for it."""

    account_id: str | None
    cause: HaltCause
    reason: str
    by: str
    at: datetime

    def covers(self, account_id: str) -> bool:
        return self.account_id in (None, account_id)

    def __str__(self) -> str:
        return f"{scope(self.account_id)}: {self.cause}: {self.reason}"


class Verb(StrEnum):
    """`halt` opens nothing more, `resume` lifts that, `flatten` halts and closes every position."""

    HALT = "halt"
    RESUME = "resume"
    FLATTEN = "flatten"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of the leading process, for one account or, with None, for all."""

    id: UUID
    verb: Verb
    account_id: str | None
    reason: str
    asked_by: str

    def covers(self, account_id: str) -> bool:
        return self.account_id in (None, account_id)


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A resting order that was taken back."""

    account_id: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    limit_price: Decimal


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A fill that closed a position or a part of it. `side` is the position's, `gross_pnl` without fees."""

    account_id: str
    symbol: str
    side: Side
    quantity: Decimal
    price: Decimal
    gross_pnl: Decimal


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What could not be done, and why."""

    account_id: str
    what: str
    reason: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command. `note` is what else there is to say."""

    cancelled: tuple[Cancelled, ...] = ()
    closed: tuple[Closed, ...] = ()
    left: tuple[Left, ...] = ()
    note: str | None = None


def scope(account_id: str | None) -> str:
    """Whom a halt or a command is about, in words."""
    return "all accounts" if account_id is None else f"account {account_id}"


def refusal_to_open(halts: Iterable[Halt], account_id: str) -> str | None:
    """Why the account may not open or add now; None when it may."""
    found = next((halt for halt in halts if halt.covers(account_id)), None)
    if found is None:
        return None
    return f"{_HALTED} for {scope(found.account_id)} ({found.cause}: {found.reason}); only reducing is allowed"


def is_of_halt(reason: str | None) -> bool:
    """Whether an order was refused for a halt: that is not decided by the market and the account alone."""
    return reason is not None and reason.startswith(_HALTED)


def may_open(account: Account, order: Order) -> bool:
    """Whether an order can open or add, now or when it fills: a limit order that rests may outlive what it reduces."""
    if order.reduce_only:
        return False
    return order.type is OrderType.LIMIT or order.quantity > opposing(account, order.symbol, order.side)


def opening_orders(account: Account) -> list[RestingOrder]:
    """The resting orders that can open or add when they fill."""
    return [order for order in account.resting if not order.reduce_only]
