"""Halts, operator commands and their outcomes.

A halt refuses orders that open or add. Reducing continues: closes, exit plans, liquidation, reduce-only orders.
"""

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from trader.core.money import counted
from trader.exchange.domain.account import Account, RestingOrder, opposing
from trader.exchange.domain.orders import Order, OrderSide, OrderType, Side


class HaltCause(StrEnum):
    """What caused a halt: a person or a rule. Each applies at most once per account, and once for all accounts."""

    OPERATOR = "operator"
    DAILY_LOSS = "daily loss"
    DRAWDOWN = "drawdown"
    HOURLY_BOUND = "hourly bound"
    LADDER = "ladder"


LIMITS: Final = frozenset({HaltCause.DAILY_LOSS, HaltCause.DRAWDOWN})
"""The causes that are loss limits."""

RULES: Final = LIMITS | {HaltCause.HOURLY_BOUND, HaltCause.LADDER}
"""The causes that are rules of the leader: loss limits, the bound of a season on an entrant's hour, and the ladder."""


REASON_MAX: Final = 500
"""The maximum length of the reason that a caller gives for a halt."""


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """A halt in force for one account or, if `account_id` is None, for all. `by` is who requested it."""

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
    """`halt` refuses orders that open, `resume` lifts the halt, `flatten` halts and closes every position.

    `reset` starts a new run of one simulated account; `remove` deletes one that has never traded.
    """

    HALT = "halt"
    RESUME = "resume"
    FLATTEN = "flatten"
    RESET = "reset"
    REMOVE = "remove"


class OperatorCommand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command to the leading process, for one account or, if `account_id` is None, for all.

    `term` is the term in which a loss limit gave the command; None for a person's.
    """

    id: UUID
    verb: Verb
    account_id: str | None
    reason: str
    asked_by: str
    term: int | None = None

    def covers(self, account_id: str) -> bool:
        return self.account_id in (None, account_id)


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """A resting order that a command canceled."""

    account_id: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    limit_price: Decimal


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A fill that closed all or part of a position. `side` is the position's; `gross_pnl` excludes fees."""

    account_id: str
    symbol: str
    side: Side
    quantity: Decimal
    price: Decimal
    gross_pnl: Decimal


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a command that could not be carried out, and why."""

    account_id: str
    what: str
    reason: str


class CommandOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a command, with an optional `note`."""

    cancelled: tuple[Cancelled, ...] = ()
    closed: tuple[Closed, ...] = ()
    left: tuple[Left, ...] = ()
    note: str | None = None

    @property
    def counts(self) -> str:
        """Describe how much was done and is left: a position that closed in several fills counts once."""
        closed = len({(fill.account_id, fill.symbol) for fill in self.closed})
        orders, positions = counted(len(self.cancelled), "order"), counted(closed, "position")
        return f"{orders} cancelled, {positions} closed, {len(self.left)} left"


def scope(account_id: str | None) -> str:
    """Describe the accounts that a halt or a command covers."""
    return "all accounts" if account_id is None else f"account {account_id}"


def refusal_to_open(halts: Iterable[Halt], account_id: str) -> str | None:
    """Return why the account may not open or add now, or None."""
    halt = next((halt for halt in halts if halt.covers(account_id)), None)
    if halt is None:
        return None
    return f"trading is halted for {scope(halt.account_id)} ({halt.cause}: {halt.reason}); only reducing is allowed"


def may_open(account: Account, *orders: Order) -> bool:
    """Return whether an order, or one of a pair, can open or add, now or later.

    A resting order may outlive the position that it reduces, and the first order of a pair may close the position that
    the second would reduce.
    """
    return any(
        order.type is OrderType.LIMIT
        or sum(each.quantity for each in orders if (each.symbol, each.side) == (order.symbol, order.side))
        > opposing(account, order.symbol, order.side)
        for order in orders
        if not order.reduce_only
    )


def opening_orders(account: Account) -> list[RestingOrder]:
    """Return the resting orders that can open or add when they fill."""
    return [order for order in account.resting if not order.reduce_only]
