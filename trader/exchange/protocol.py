"""What every exchange is: paper, live and read-only.

`PaperExchange` simulates fills, `LiveExchange` trades at a real venue, and `ReadOnlyExchange` shows what another
process trades. Only the composition root knows which one it created. All start with the rules from the settings.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.errors import DatabaseUnavailable, Unavailable
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import ExchangeRules, LimitFills, Liquidation
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer
from trader.exchange.domain.rules import book_met
from trader.exchange.idempotent_orders import refusal_of_price
from trader.exchange.sql.accounts import DatabaseIdentity
from trader.market.domain.markets import Book, Market, Tick
from trader.market.feed import MarketFeed
from trader.settings.settings import PRESET_VENUES, Settings

_BASIS_POINT: Final = Decimal("0.0001")

LIQUIDATIONS: Final[Mapping[str, Liquidation]] = {
    "default": Liquidation(),
    **{
        preset: msgspec.convert(venue.liquidation, Liquidation)
        for venue in PRESET_VENUES.values()
        for preset in venue.presets
    },
}
"""How each VENUE_PRESET liquidates."""


def rules_of(settings: Settings, markets: Mapping[str, Market]) -> ExchangeRules:
    """Return the rules that the settings and the market source define."""
    return ExchangeRules(
        markets=dict(markets),
        taker_rate=settings.taker_fee_bps * _BASIS_POINT,
        maker_rate=settings.maker_fee_bps * _BASIS_POINT,
        liquidation_rate=settings.liquidation_fee_bps * _BASIS_POINT,
        funding_interval_h=settings.funding_interval_h,
        limit_fills=msgspec.convert(settings.limit_fills, LimitFills),
        latency=timedelta(milliseconds=settings.latency_ms),
        liquidation=LIQUIDATIONS[settings.venue_preset],
    )


def not_trading(settings: Settings, database_trouble: str | None) -> Unavailable:
    """Return the error for a change that only the leader can make, with the leader's address if known.

    Without a usable database no process leads, and the error says so instead.
    """
    if database_trouble is not None:
        return DatabaseUnavailable(database_trouble)
    if settings.role == "reader":
        what = "This process is read-only: the leader makes changes"
    else:
        what = "This process is a standby: another one trades on this database, or is about to"
    return Unavailable(f"{what}." if settings.leader_url is None else f"{what}, at {settings.leader_url}", 5)


class Exchange(ABC):
    """An exchange and the accounts that trade on it, as of their last commit."""

    def __init__(
        self,
        market: MarketFeed,
        settings: Settings,
        accounts: Accounts,
        rules: ExchangeRules,
        identity: DatabaseIdentity,
    ) -> None:
        self._market = market
        self._settings = settings
        self._accounts = accounts
        self._rules = rules
        self._identity = identity

    # Lifecycle: one process leads and trades, others follow.

    @abstractmethod
    async def lead(self) -> None:
        """Start trading. Raise `StartError` if the database or the accounts at the venue do not fit."""

    async def follow(self) -> None:
        """Read what the leading process has changed since the last call.

        :raises StartError: the database belongs to another market, mode, venue or account
        :raises Unavailable: the database cannot answer now
        """
        self._market.restore_marks(await self._accounts.follow(self._identity))
        if not self._market.quotes():
            await self._market.prime()

    @abstractmethod
    def suspend(self) -> None:
        """Stop trading at once."""

    @abstractmethod
    async def resign(self) -> None:
        """Stop trading: let changes in progress finish."""

    @abstractmethod
    async def on_tick(self, tick: Tick) -> None:
        """Process a tick of the market feed."""

    @property
    @abstractmethod
    def term(self) -> int | None:
        """The term in which this process trades; None while it does not."""

    # Reads

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._rules.markets

    @property
    def rules(self) -> ExchangeRules:
        """The rules by which orders are judged; in live trading, they judge an order before it is sent."""
        return self._rules

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Every account, as of its last commit."""
        return self._accounts.by_id

    @property
    def version(self) -> int:
        """A number that grows with every change of an account or of its rows."""
        return self._accounts.version

    @property
    def troubles(self) -> Mapping[str, str]:
        """The accounts that may not open anything because they disagree with the venue, with the reason for each."""
        return {}

    def undecided(self, account_id: str) -> Collection[str]:
        """Return the markets with an order in progress that may open: its fills are not in the account yet.

        There is none where an order is filled and posted in one step, under the halts in force at that moment.
        """
        return ()

    def marks(self) -> Mapping[str, Decimal]:
        """Return the latest mark of each market; before its first quote, the last recorded mark."""
        return self._market.marks

    @abstractmethod
    def account(self, account_id: str) -> Account:
        """Return the account or, if it does not exist, a new one that is not stored (`sequence` 0)."""

    def order_book(self, account_id: str, symbol: str, at: datetime) -> Book | None:
        """Return the order book that an order of the account would meet at this time; None without a price."""
        return book_met(self._market.quote(symbol), self._accounts.taken(account_id), symbol, at, self._rules)

    def refusal_of_price(self, symbol: str, at: datetime) -> str | None:
        """Return why a market has no price to trade on at this time, or None."""
        return refusal_of_price(self._market, symbol, at)

    # Writes

    @abstractmethod
    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        """Place an order, or a pair of market orders of an account: at the same moment, the second after the first.

        A refusal is an answer with status `rejected`; both of a pair fill completely, or both are rejected. A client
        order id always gets the same answer.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price; a pair at a venue
        :raises OrderUndecided: the outcome at the venue is not yet known; retry with the same client order id
        :raises Unavailable: the database did not confirm the orders; retry likewise
        """

    @abstractmethod
    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order and return its current answer. Raise `NotFound`."""

    @abstractmethod
    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, which keeps the old plan, or None."""

    async def close_unbooked(self, account_id: str) -> Mapping[str, str]:
        """Close what the account holds at its venue beyond its books. Return what is left, with the reasons."""
        return {}

    @abstractmethod
    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """Return the account; if it does not exist, open it with its first run."""

    @abstractmethod
    async def reset_account(self, account_id: str) -> Account:
        """End the account's run and start the next. Raise `Precondition` if the money is real."""

    @abstractmethod
    async def remove_account(self, account_id: str) -> bool:
        """Remove an account that has never traded and belongs to no model; return False for any other account.

        :raises Precondition: the money is real
        :raises Unavailable: the database did not confirm it
        """

    async def settle(self, account_id: str) -> None:
        """Wait until every change of the account in progress has ended and is certain. Raise `Unavailable`."""
        await self._accounts.settle(account_id)
