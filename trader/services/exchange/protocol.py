"""Protocol and base class of the exchanges: paper, live and read-only.

`PaperExchange` simulates fills, `LiveExchange` trades at a real venue, and `ReadOnlyExchange` shows what another
process trades. Only the composition root knows which of them it made. All begin with the rules of the settings;
`ExchangeBase` has what callers read of each.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, Protocol

import msgspec

from trader.domain.exchange.account import Account, Taken
from trader.domain.exchange.ledger import LimitFills, Rules
from trader.domain.exchange.matching import remaining
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.market.markets import Book, Market, Tick
from trader.errors import DatabaseUnavailable, Unavailable
from trader.services.exchange.accounts import Accounts
from trader.services.market.feed import MarketFeed
from trader.settings import Settings

_BASIS_POINT: Final = Decimal("0.0001")


def rules_of(settings: Settings, markets: Mapping[str, Market]) -> Rules:
    """Return the rules that the settings and the market source give."""
    return Rules(
        markets=dict(markets),
        taker_rate=settings.taker_fee_bps * _BASIS_POINT,
        maker_rate=settings.maker_fee_bps * _BASIS_POINT,
        liquidation_rate=settings.liquidation_fee_bps * _BASIS_POINT,
        funding_interval_h=settings.funding_interval_h,
        book_recovery=timedelta(milliseconds=int(settings.book_recovery_s * 1000)),
        limit_fills=msgspec.convert(settings.limit_fills, LimitFills),
        latency=timedelta(milliseconds=settings.latency_ms),
    )


def not_trading(settings: Settings, database_trouble: str | None) -> Unavailable:
    """Return the error of a change that only the leader can make, with the leader's address if it is known.

    Without a usable database no process leads, and that is what the caller is told.
    """
    if database_trouble is not None:
        return DatabaseUnavailable(database_trouble)
    if settings.role == "reader":
        what = "This process only reads: the leader makes changes"
    else:
        what = "This process is a standby: another one trades on this database, or is about to"
    return Unavailable(f"{what}." if settings.leader_url is None else f"{what}, at {settings.leader_url}", 5)


class Exchange(Protocol):
    """An exchange and the accounts that trade there."""

    # Life: one process leads and trades, others follow.

    async def lead(self) -> None:
        """Begin to trade. Raise `StartError` when the database or the accounts at the venue do not fit."""
        ...

    async def follow(self) -> None:
        """Read what the leader has changed. Raise `StartError` or `Unavailable`."""
        ...

    def suspend(self) -> None:
        """Stop trading at once."""
        ...

    async def resign(self) -> None:
        """Stop trading: let the changes under way finish."""
        ...

    async def on_tick(self, tick: Tick) -> None:
        """Take a tick of the market feed."""
        ...

    @property
    def term(self) -> int | None:
        """The term in which this process trades; None while it does not."""
        ...

    # What others read

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def rules(self) -> Rules:
        """The rules by which orders are judged, those of live trading beforehand."""
        ...

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
        """The accounts that may open nothing since they disagree with the venue, each with the reason."""
        ...

    def undecided(self, account_id: str) -> Collection[str]:
        """Return the markets with an order under way that may open: its fills are not in the account yet."""
        ...

    def marks(self) -> Mapping[str, Decimal]:
        """Return the latest mark of each market; of one without a quote yet, the last recorded one."""
        ...

    def account(self, account_id: str) -> Account:
        """Return the account or, when there is none yet, the account as it would open (`sequence` 0; not stored)."""
        ...

    def order_book(self, account_id: str, symbol: str, at: datetime) -> Book | None:
        """Return the order book that an order of the account would meet at this time; None without a price."""
        ...

    # What others do

    async def place_order(self, order: Order) -> OrderAnswer:
        """Place an order; a refusal is an answer with status `rejected`. A client order id always gets the same answer.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price
        :raises OrderUndecided: the outcome at the venue is not known yet; ask again with the same client order id
        :raises Unavailable: the database did not confirm the order; the same
        """
        ...

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order and return its present answer. Raise `NotFound`."""
        ...

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, which keeps the old plan, or None."""
        ...

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """Return the account; open it with its first run when it does not exist."""
        ...

    async def reset_account(self, account_id: str) -> Account:
        """End the account's run and start the next. Raise `Precondition` where the money is real."""
        ...

    async def remove_account(self, account_id: str) -> bool:
        """Remove an account that has never traded, and belongs to no model; False for another.

        :raises Precondition: where the money is real
        :raises Unavailable: the database did not confirm it
        """
        ...

    async def settle(self, account_id: str) -> None:
        """Wait until every change of the account that is under way has ended and is certain. Raise `Unavailable`."""
        ...


class ExchangeBase:
    """Base class of all exchanges: their rules, their accounts as of the last commit, and the market's marks."""

    def __init__(self, market: MarketFeed, settings: Settings, accounts: Accounts, rules: Rules) -> None:
        self._market = market
        self._settings = settings
        self._accounts = accounts
        self._rules = rules

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._rules.markets

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self._accounts.by_id

    @property
    def version(self) -> int:
        return self._accounts.version

    def marks(self) -> Mapping[str, Decimal]:
        return self._market.marks

    def order_book(self, account_id: str, symbol: str, at: datetime) -> Book | None:
        quote, taken = self._market.quote(symbol), self._accounts.taken(account_id).get(symbol, Taken())
        if quote is None:
            return None
        return remaining(quote.book, taken, at, self._rules.book_recovery, self._rules.markets[symbol].lot)

    async def settle(self, account_id: str) -> None:
        await self._accounts.settle(account_id)
