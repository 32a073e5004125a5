"""Paper exchange: fills orders against the books of the market feed, and applies every tick to every account.

The pure rules of `exchange.domain` decide; `Accounts` commits their decisions.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from uuid import uuid4

import msgspec

from trader.core.clock import Clock, iso
from trader.core.errors import InvalidInput, Issue, Unavailable
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import Posting, unopened_account
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer, OrderStatus
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.halts import Halts
from trader.exchange.idempotent_orders import IdempotentOrders, order_id_of, present_answer
from trader.exchange.protocol import Exchange, not_trading, rules_of
from trader.exchange.session import Decide, Session
from trader.exchange.sql import accounts as store
from trader.exchange.tick_processor import TickProcessor
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

log = logging.getLogger("trader.exchange")


class PaperExchange(Exchange):
    """The `Exchange` whose fills are simulated."""

    def __init__(
        self,
        database: Database,
        market: MarketFeed,
        clock: Clock,
        settings: Settings,
        accounts: Accounts,
        halts: Halts,
    ) -> None:
        identity = store.DatabaseIdentity(market.identity, "simulated")
        super().__init__(market, settings, accounts, rules_of(settings, market.markets), identity)
        self._database = database
        self._clock = clock
        accounts.shares_depth = settings.shared_depth == "on"
        self._ticks = TickProcessor(accounts, market, clock, self._rules)
        self._session = Session(
            rules=self._rules,
            rate_of_hour=market.funding_rate,
            moment=self._ticks.moment,
            seen_until=self._ticks.seen_until,
            change=self._change,
            wait=self._wait_for_books,
            refusal_of_price=self._refusal_of_book,
            halted=halts.refusal_to_open,
            once=IdempotentOrders(database, accounts).once,
        )
        self._opening = asyncio.Lock()
        self.answered: Callable[[Sequence[Order], Sequence[OrderAnswer]], None] = lambda _orders, _answers: None
        """Is told of every answered order."""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Start trading: rebuild the accounts from their rows, check the ledger, and catch up on missed ticks.

        :raises StartError: the database belongs to another market or trading mode, its ledger does not balance, or an
            account holds a market that MARKETS leaves out
        """
        await self._ticks.lead(partial(self._accounts.lead, self._identity, self._settings.markets))

    def suspend(self) -> None:
        """Stop trading at once."""
        self._ticks.stop()
        self._accounts.end_term()

    async def resign(self) -> None:
        """Stop trading: let changes in progress finish, and record the last processed tick."""
        self._ticks.stop()
        await self._ticks.checkpoint()
        await self._accounts.resign()

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every account by the source's current market rules."""
        self._rules.markets.update(self._market.markets)
        await self._ticks.on_tick(tick)

    @property
    def term(self) -> int | None:
        """The term in which this process trades; None for a standby and while catching up."""
        return self._accounts.term if self._ticks.is_live else None

    # --- reads --------------------------------------------------------------------------------------------------------

    def account(self, account_id: str) -> Account:
        """Return the account or, if it does not exist, a new one that is not stored (`sequence` 0)."""
        return self.accounts.get(account_id) or self._unopened(account_id)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        """Place an order, or a pair in one transaction. Return the answers after the commit.

        A repeated client order id of the same account gets the first answer again, unless that order was rejected
        before its account was open. With latency, a pair meets the first books of which both markets have one.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price, too many accounts
        :raises Unavailable: the database did not confirm the orders; retry with the same client order ids
        """
        with self._accounts.service_level.order():
            self._refuse_unless_trading()
            answers = await self._session.place(orders)
        self.answered(orders, answers)
        return answers

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order and return its current answer, which no longer changes once the order is not resting.

        :raises NotFound: the account has no such order
        """
        wanted = order_id_of(account_id, order_id)
        self._refuse_unless_trading()
        await self._session.cancel(account_id, wanted)
        return await present_answer(self._database, account_id, wanted)

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, or None."""
        self._refuse_unless_trading()
        return await self._session.set_plan(account_id, symbol, plan)

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """Return the account; if it does not exist, open it with its first run."""
        return await self._accounts.open(account_id, self._unopened(account_id, initial_capital).run)

    async def reset_account(self, account_id: str) -> Account:
        """End the account's run and start the next with SIM_INITIAL_CAPITAL. This never opens an account.

        :raises Unavailable: the database did not confirm it, or the market's moves during a gap are not yet known
        """
        self._refuse_unless_trading()
        if account_id not in self.accounts:
            return self.account(account_id)

        def decide(account: Account) -> Posting:
            if (reason := self._refusal_in_gap()) is not None:  # positions would close at the mark from before the gap
                raise Unavailable(f"The account cannot be reset now: {reason}.", 10)
            settings, moment = self._settings, self._ticks.moment()
            capital, currency = settings.initial_capital, settings.quote_currency
            return rules_of_exchange.reset(account, capital, currency, moment, self._rules, self._market.funding_rate)

        await self._change(account_id, decide)
        return self.account(account_id)

    async def remove_account(self, account_id: str) -> bool:
        """Remove an account that has never traded and belongs to no model; return False for any other account.

        :raises Unavailable: the database did not confirm it
        """
        self._refuse_unless_trading()
        return await self._accounts.remove(account_id, self._ticks.between_ticks)

    # --- the session's ports ------------------------------------------------------------------------------------------

    async def _change(self, account_id: str, decide: Decide) -> Posting | None:
        """Change an account between two ticks; one that does not exist opens with its first accepted order."""
        if account_id not in self.accounts:
            self._refuse_unless_trading()  # the term may have ended while the order waited for its book
            first = self._accounts.preview(self._unopened(account_id), decide)
            if first is None:
                return None
            if first.answers[0].status is OrderStatus.REJECTED:
                # Nothing is stored, so no sequence number can make its ID unique.
                answers = [msgspec.structs.replace(answer, id=uuid4()) for answer in first.answers]
                return msgspec.structs.replace(first, answers=answers)
            await self._open_within_limit(account_id)
        return await self._accounts.change(account_id, decide, self._ticks.between_ticks)

    def _refusal_of_book(self, symbol: str, moment: Moment) -> str | None:
        """Return why an order cannot meet the book of a market, or None.

        Its age was checked before the account was free and the last tick applied, and is checked again.
        """
        if (gap := self._refusal_in_gap()) is not None:
            return gap
        if symbol not in moment.quotes:
            return f"there is no price for {symbol} yet"
        return self.refusal_of_price(symbol, self._clock.now())

    async def _wait_for_books(self, symbols: Sequence[str]) -> str | None:
        return await self._market.books_after(self._clock.now(), self._settings.latency_ms, symbols)

    def _refuse_unless_trading(self) -> None:
        if self.term is None:
            raise not_trading(self._settings, self._accounts.database_trouble)

    def _refusal_in_gap(self) -> str | None:
        """Return why nothing can be decided until the feed's gap has been caught up on, or None."""
        since = self._ticks.gap_since
        return None if since is None else f"the movements of the market since {iso(since)} are not known yet; try again"

    async def _open_within_limit(self, account_id: str) -> Account:
        """Open an account for a caller, one at a time so that SIM_MAX_ACCOUNTS holds; models do not count."""
        async with self._opening:
            limit = self._settings.max_accounts
            if account_id not in self.accounts and len(self.accounts) >= limit:
                async with self._database.connection() as conn:
                    count = await store.select_count_without_model(conn)
                if count >= limit:
                    why = f"{account_id!r} does not exist, and no more than {limit} accounts can be opened"
                    raise InvalidInput(Issue(("accountId",), why))
            return await self.open_account(account_id)

    def _unopened(self, account_id: str, capital: Decimal | None = None) -> Account:
        settings = self._settings
        return unopened_account(
            account_id, capital or settings.initial_capital, settings.quote_currency, self._clock.now()
        )
