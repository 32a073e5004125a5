"""What the service asks of an exchange, whether its fills are simulated or real; the composition root chooses which.

`exchange.Exchange` is the paper one, `live.LiveExchange` the one that trades at a real venue. Nothing but the
composition root knows which of them it has.
"""

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Protocol

from trader.domain.exchange.account import Account
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.market.markets import Market, Tick


class Exchange(Protocol):
    """An exchange, and the accounts that trade there."""

    # Life: one process leads and trades, others follow.

    async def lead(self) -> None:
        """Begin to trade. Raises `StartError` when the database, or what is at the venue, does not fit."""
        ...

    async def follow(self) -> None:
        """Read what the leader has changed. Raises `StartError` and `Unavailable`."""
        ...

    def suspend(self) -> None:
        """Trade no more, from this moment on."""
        ...

    async def resign(self) -> None:
        """Trade no more: let what is under way finish."""
        ...

    async def on_tick(self, tick: Tick) -> None:
        """See an update of the markets."""
        ...

    @property
    def term(self) -> int | None:
        """The term in which this process trades; None while it does not."""
        ...

    # What others read

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Every account, as of its last commit."""
        ...

    @property
    def version(self) -> int:
        """A number that grows with every change of an account or of its rows."""
        ...

    @property
    def troubles(self) -> Mapping[str, str]:
        """The accounts for which nothing may be opened since books and venue disagree, each with the reason."""
        ...

    def undecided(self, account_id: str) -> Collection[str]:
        """The markets in which an order that may open is on its way: what it fills is not in the books yet."""
        ...

    def marks(self) -> Mapping[str, Decimal]:
        """The latest mark of each market; before its source has spoken, the last one noted."""
        ...

    def account(self, account_id: str) -> Account:
        """The account, or, when there is none yet, as it would open (`sequence` 0; not stored)."""
        ...

    # What others do

    async def place_order(self, order: Order) -> OrderAnswer:
        """Place an order; a refusal is an answer with status `rejected`. A client order id gets one answer for good.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price
        :raises OrderUndecided: what became of the order is not known yet; ask again with the same client order id
        :raises Unavailable: the database did not confirm the order; the same
        """
        ...

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order. One that no longer rests is answered as it is. Raises `NotFound`."""
        ...

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. None when it is set, else why not: then the old one stays."""
        ...

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """The account, opened with its first run when it does not exist."""
        ...

    async def reset_account(self, account_id: str) -> Account:
        """End the account's run and start the next. Raises `Precondition` where money cannot be made up."""
        ...
