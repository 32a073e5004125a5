"""Read-only exchange: another process's accounts, paper or live, for a process that never leads."""

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from trader.core.clock import Clock
from trader.core.money import ZERO
from trader.database.relay import RelayReader
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.protocol import Exchange, not_trading, rules_of
from trader.exchange.sql.accounts import DatabaseIdentity
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings


class ReadOnlyExchange(Exchange):
    """The leader's accounts, valued at the leader's marks. Every change raises `Unavailable`."""

    def __init__(
        self, market: MarketFeed, clock: Clock, settings: Settings, accounts: Accounts, relay: RelayReader
    ) -> None:
        self._is_live = settings.trading_mode == "live"
        rules = rules_of(settings, market.markets)
        if self._is_live:
            rules = msgspec.structs.replace(rules, liquidation_rate=ZERO)
        super().__init__(market, settings, accounts, rules, DatabaseIdentity(market.identity, settings.trading_mode))
        self._clock = clock
        self._relay = relay

    async def follow(self) -> None:
        """Read the leader's changes since the last call.

        :raises StartError: the database belongs to another market or trading mode
        :raises Unavailable: the database cannot answer now
        """
        self._market.restore_marks(await self._accounts.follow(self._identity))

    def suspend(self) -> None:
        """Do nothing: nothing is traded here."""

    async def resign(self) -> None:
        """Do nothing, like `suspend`."""

    async def on_tick(self, tick: Tick) -> None:
        """Adopt the leader's current market rules."""
        self._rules.markets.update(self._market.markets)

    @property
    def term(self) -> int | None:
        return None

    @property
    def troubles(self) -> Mapping[str, str]:
        """The troubles that the leader reports."""
        return {} if self._relay.view is None else self._relay.view.account_troubles

    def account(self, account_id: str) -> Account:
        """Return the account or, if it does not exist, a new one that is not stored."""
        if account_id in self.accounts:
            return self.accounts[account_id]
        capital = ZERO if self._is_live else self._settings.initial_capital
        return unopened_account(account_id, capital, self._settings.quote_currency, self._clock.now())

    async def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise not_trading(self._settings, None)

    lead = place_orders = cancel_order = set_exit_plan = open_account = reset_account = remove_account = _refuse
