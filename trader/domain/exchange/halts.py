"""Halts, operator commands and their outcomes.

A halt refuses orders that open or add. What reduces goes on: closing, exit plans, liquidation, reduce-only orders.
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
    """What caused a halt: a person or a rule. Each is in force at most once per account, and once for all accounts."""

    OPERATOR = "operator"
    DAILY_LOSS = "daily loss"
    DRAWDOWN = "drawdown"


_HALTED: Final = "trading is halted"

LIMITS: Final = frozenset({HaltCause.DAILY_LOSS, HaltCause.DRAWDOWN})
"""The causes that are loss limits."""


REASON_MAX: Final = 500
"""The length of the reason of a halt that somebody asks for."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """A halt in force for one account or, with None, for all. `by` is who asked for it."""

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
    """`halt` refuses orders that open, `resume` lifts that, `flatten` halts and closes every position.

    `reset` begins a new run of one simulated account, `remove` ends one that has never traded.
    """

    HALT = "halt"
    RESUME = "resume"
    FLATTEN = "flatten"
    RESET = "reset"
    REMOVE = "remove"


class OperatorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command to the leading process, for one account or, with None, for all."""

    id: UUID
    verb: Verb
    account_id: str | None
    reason: str
    asked_by: str

    def covers(self, account_id: str) -> bool:
        return self.account_id in (None, account_id)


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A resting order that a command cancelled."""

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
    """A part of a command that could not be done, and why."""

    account_id: str
    what: str
    reason: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a command, with an optional `note`."""

    cancelled: tuple[Cancelled, ...] = ()
    closed: tuple[Closed, ...] = ()
    left: tuple[Left, ...] = ()
    note: str | None = None


def scope(account_id: str | None) -> str:
    """Return the accounts of a halt or a command in words."""
    return "all accounts" if account_id is None else f"account {account_id}"


def refusal_to_open(halts: Iterable[Halt], account_id: str) -> str | None:
    """Return why the account may not open or add now; None when it may."""
    halt = next((halt for halt in halts if halt.covers(account_id)), None)
    if halt is None:
        return None
    return f"{_HALTED} for {scope(halt.account_id)} ({halt.cause}: {halt.reason}); only reducing is allowed"


def is_of_halt(reason: str | None) -> bool:
    """Whether an order was refused by a halt, not by the market and the account alone."""
    return reason is not None and reason.startswith(_HALTED)


def may_open(account: Account, order: Order) -> bool:
    """Whether an order can open or add, now or later: a resting order may outlive the position that it reduces."""
    if order.reduce_only:
        return False
    return order.type is OrderType.LIMIT or order.quantity > opposing(account, order.symbol, order.side)


def opening_orders(account: Account) -> list[RestingOrder]:
    """Return the resting orders that can open or add when they fill."""
    return [order for order in account.resting if not order.reduce_only]
