"""The paper exchange as a service: it takes orders, and takes every account through every update of the markets.

What becomes of an order or an update is decided by the pure rules of `domain.exchange`; `books` makes it last.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final
from uuid import UUID

import msgspec

from trader.clock import Clock, iso
from trader.domain import exchange as rules_of_exchange
from trader.domain.account import Account, Run
from trader.domain.booking import Booking, Rules, row_id
from trader.domain.exchange import Moment
from trader.domain.market import Market, Quote, Tick, canonical_symbol
from trader.domain.money import ZERO, divide
from trader.domain.orders import ExitPlan, Order, OrderAnswer, OrderStatus, OrderType
from trader.errors import BooksViolated, InvalidInput, Issue, MarketUnavailable, NotFound, Unavailable
from trader.services.books import Books
from trader.services.events import EventBus
from trader.services.market import MarketData
from trader.settings import Settings
from trader.store import trading as store
from trader.store.pool import Database

log = logging.getLogger("trader.exchange")

_ACCOUNTS_PER_TURN: Final = 64
"""How many accounts are looked at before other work gets its turn on the loop."""


class Exchange:
    """The paper exchange: every account, and all that happens to it."""

    def __init__(
        self, database: Database, market: MarketData, clock: Clock, events: EventBus, settings: Settings
    ) -> None:
        self._database = database
        self._market = market
        self._clock = clock
        self._settings = settings
        self._books = Books(database, events, self._catch_up)
        self._rules = Rules(
            markets=dict(market.markets),
            taker_rate=settings.taker_fee_bps / 10_000,
            maker_rate=settings.maker_fee_bps / 10_000,
        )
        self._marks: dict[str, Decimal] = {}
        self._placing: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._checkpoint_due: datetime | None = None
        self._seen_until: datetime | None = None
        self._is_trading = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Trade: rebuild every account from its rows, check the books, and go through what was missed while down.

        :raises StartError: the database is of another market or trading mode, or its books do not balance
        """
        self._marks = {**await self._books.lead(self._market.identity, self._settings.trading_mode), **self._marks}
        since = self._books.reviewed_until
        while since is not None and since < (until := max(self._clock.now(), self._seen_until or since)):
            await self._catch_up_all(since, until)
            # Ticks went on arriving meanwhile; they are caught up on too, until none is missing.
            since = until if self._seen_until is not None and self._seen_until > until else None
        self._prime()
        self._is_trading = True

    async def follow(self) -> None:
        """Show what another process trades: read what it has changed since the last time.

        :raises StartError: the database is of another market or trading mode
        :raises Unavailable: the database cannot answer now
        """
        marks = await self._books.follow(self._market.identity, self._settings.trading_mode)
        self._marks = {**marks, **self._marks}
        if not self._market.quotes():
            self._prime()

    def suspend(self) -> None:
        """Trade no more, from this moment on."""
        self._is_trading = False
        self._books.end_term()

    async def resign(self) -> None:
        """Trade no more: let changes that are under way finish, and note how far the market was followed."""
        self._is_trading = False
        await self._checkpoint()
        await self._books.resign()

    @property
    def term(self) -> int | None:
        """The term in which this process trades; None while it only follows, or is catching up."""
        return self._books.term if self._is_trading else None

    @property
    def followed_until(self) -> datetime | None:
        """The last update of the markets that every account went through; None before the first."""
        return self._books.reviewed_until

    def _prime(self) -> None:
        self._market.prime()
        self._marks.update({symbol: quote.mark for symbol, quote in self._market.quotes().items()})

    # --- what others read ---------------------------------------------------------------------------------------------

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._rules.markets

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Every account, as of its last commit."""
        return self._books.accounts

    def marks(self) -> Mapping[str, Decimal]:
        """The latest mark of each market; before its source has spoken, the last one noted."""
        return self._marks

    def account(self, account_id: str) -> Account:
        """The account, or, when there is none yet, as it would open (`sequence` 0; not stored)."""
        existing = self.accounts.get(account_id)
        if existing is not None:
            return existing
        run = self._first_run(account_id, self._settings.initial_capital)
        return Account(id=account_id, run=run, sequence=0, changed_at=run.started_at)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def place_order(self, order: Order) -> OrderAnswer:
        """Place an order; the answer comes after its commit. A refusal is an answer with status `rejected`.

        The same client order id on the same account gets the first answer again.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price, too many accounts
        :raises Unavailable: the database did not confirm the order; ask again with the same client order id
        """
        self._refuse_unless_trading()
        order = self._checked(order)
        if order.client_order_id is None:
            return await self._place(order)
        key = (order.account_id, order.client_order_id)
        while (earlier := self._placing.get(key)) is not None:
            await asyncio.wait([earlier])
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._placing[key] = finished
        try:
            return await self._first_answer(*key) or await self._place(order)
        except BooksViolated:
            # A placing whose caller was cancelled may have committed between the look-up and now.
            answer = await self._first_answer(*key)
            if answer is None:
                raise
            return answer
        finally:
            del self._placing[key]
            finished.set_result(None)

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order. One that no longer rests is answered as it is.

        :raises NotFound: the account has no such order
        """
        try:
            wanted = UUID(order_id)
        except ValueError:
            raise _no_such_order(account_id, order_id) from None
        self._refuse_unless_trading()
        if account_id in self.accounts:
            await self._books.change(
                account_id, lambda account: rules_of_exchange.cancel(account, wanted, self._clock.now())
            )
        async with self._database.connection() as conn:
            answer = await store.select_answer(conn, account_id, wanted)
            if answer is None:
                raise _no_such_order(account_id, order_id)
            state = await store.select_limit_order_status(conn, account_id, wanted)
            fills = await store.select_fills_of_request(conn, wanted)
        if state is None:
            return answer
        status, reason = state
        quantity = sum((fill.quantity for fill in fills), ZERO)
        return msgspec.structs.replace(
            answer,
            status=OrderStatus.FILLED if status == "FILLED" else OrderStatus.CANCELLED,
            reason=reason,
            total_quantity=quantity,
            average_price=divide(sum((f.quantity * f.price for f in fills), ZERO), quantity) if quantity else None,
            total_fees=sum((fill.fee for fill in fills), ZERO),
            fills=tuple(fills),
        )

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. None when it is set, else why it is refused."""
        refusal: str | None = None

        def decide(account: Account) -> Booking | None:
            nonlocal refusal
            result = rules_of_exchange.set_exit_plan(account, symbol, plan, self._moment(), self._rules)
            if isinstance(result, str):
                refusal = result
                return None
            return result

        self._refuse_unless_trading()
        if account_id not in self.accounts:
            return f"there is no {symbol} position"
        await self._books.change(account_id, decide)
        return refusal

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """The account, opened with its first run when it does not exist."""
        return await self._books.open(
            account_id, self._first_run(account_id, initial_capital or self._settings.initial_capital)
        )

    async def reset_account(self, account_id: str) -> Account:
        """End the account's run and start the next with SIM_INITIAL_CAPITAL."""
        self._refuse_unless_trading()
        if account_id not in self.accounts:
            self._refuse_when_full(account_id)
            return await self.open_account(account_id)
        settings = self._settings
        await self._books.change(
            account_id,
            lambda account: rules_of_exchange.reset(
                account, settings.initial_capital, settings.quote_currency, self._moment(), self._rules
            ),
        )
        return self.accounts[account_id]

    # --- the market ---------------------------------------------------------------------------------------------------

    async def on_tick(self, tick: Tick) -> None:
        """Apply an update of the markets to every account: funding, resting orders, liquidation, exit plans."""
        self._marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
        self._seen_until = tick.at
        if self.term is None:
            return
        await self._review_all(self._moment(tick))
        self._books.reviewed_until = tick.at
        if self._checkpoint_due is None or tick.at >= self._checkpoint_due:
            self._checkpoint_due = tick.at.replace(second=0, microsecond=0) + timedelta(minutes=1)
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        try:
            await self._books.checkpoint(self._marks)
        except Unavailable as error:
            log.warning("could not note how far the market was followed: %s", error)

    async def _review_all(self, moment: Moment, *, missed: bool = False) -> None:
        due = []
        for turn, (account_id, account) in enumerate(list(self.accounts.items()), start=1):
            if self._books.is_unsettled(account_id) or rules_of_exchange.is_due(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            await asyncio.gather(
                *(self._review(one, moment, missed=missed) for one in due[start : start + _ACCOUNTS_PER_TURN])
            )

    async def _review(self, account_id: str, moment: Moment, *, missed: bool) -> None:
        try:
            await self._books.change(account_id, lambda account: self._reviewed(account, moment, missed=missed))
        except (Unavailable, BooksViolated) as error:
            # One account that cannot follow must not keep the others from it; it is read again at the next update.
            self._books.missed(account_id)
            log.error("account %s will follow the market later: %s", account_id, error)

    def _reviewed(self, account: Account, moment: Moment, *, missed: bool) -> Booking | None:
        if missed and moment.at <= account.changed_at:
            return None  # the account saw this update before the service stopped, or was changed after it
        return rules_of_exchange.review(account, moment, self._rules, self._market.funding_rate)

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Take every account through the ticks in (since, until], as if the service had never stopped."""
        if until <= since:
            return
        log.info("catching up on the market from %s to %s", iso(since), iso(until))
        before = sum(account.sequence for account in self.accounts.values())
        for moment in self._missed_moments(since, until):
            if all(account.is_idle for account in self.accounts.values()):
                break
            self._marks.update(moment.marks)
            await self._review_all(moment, missed=True)
            self._books.reviewed_until = moment.at
        self._books.reviewed_until = until
        events = sum(account.sequence for account in self.accounts.values()) - before
        log.info("caught up on %s of the market: %d bookings", until - since, events)

    async def _catch_up(self, account_id: str, since: datetime) -> None:
        """The same for one account, after the database was away. Under the account's lock."""
        if self._books.reviewed_until is None:
            return
        for moment in self._missed_moments(since, self._books.reviewed_until):
            account = self.accounts[account_id]
            if account.is_idle:
                return
            booking = self._reviewed(account, moment, missed=True)
            if booking is not None:
                await self._books.commit(booking)

    def _missed_moments(self, since: datetime, until: datetime) -> Iterator[Moment]:
        marks = dict(self._marks)
        for tick in self._market.history(since, until):
            marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
            yield Moment(tick.at, tick.quotes, dict(marks), frozenset(tick.quotes))

    # --- one order ----------------------------------------------------------------------------------------------------

    async def _place(self, order: Order) -> OrderAnswer:
        if order.account_id not in self.accounts:
            self._refuse_when_full(order.account_id)
            await self.open_account(order.account_id)
        refusal = await self._wait_for_book(order.symbol)

        def decide(account: Account) -> Booking:
            if refusal is not None:
                return rules_of_exchange.refuse(account, order, refusal, self._clock.now())
            return rules_of_exchange.place(account, order, self._moment(), self._rules, self._market.funding_rate)

        booking = await self._books.change(order.account_id, decide)
        assert booking is not None
        assert booking.answer is not None
        return booking.answer

    async def _wait_for_book(self, symbol: str) -> str | None:
        """Wait for the first book at or after now + latency. Gives the reason when there is none to trade on.

        Without latency an order meets the book of the moment.
        """
        now = self._clock.now()
        try:
            if self._settings.latency_ms:
                await self._market.quote_after(symbol, now + timedelta(milliseconds=self._settings.latency_ms))
                return None
        except MarketUnavailable as error:
            return str(error)
        quote: Quote | None = self._market.quote(symbol)
        if quote is None:
            return f"there is no price for {symbol} yet"
        if quote.is_stale(now):
            return f"the last {symbol} price is of {iso(quote.at)}, too old to trade on"
        return None

    def _moment(self, tick: Tick | None = None) -> Moment:
        if tick is None:
            return Moment(self._clock.now(), self._market.quotes(), self._marks)
        return Moment(tick.at, self._market.quotes(), self._marks, frozenset(tick.quotes))

    async def _first_answer(self, account_id: str, client_order_id: str) -> OrderAnswer | None:
        async with self._database.connection() as conn:
            return await store.select_answer_of_client(conn, account_id, client_order_id)

    def _checked(self, order: Order) -> Order:
        symbol = canonical_symbol(order.symbol)
        market = self.markets.get(symbol)
        if market is None:
            known = ", ".join(sorted(self.markets))
            raise InvalidInput(Issue(("symbol",), f"{order.symbol!r} is not traded here; markets are {known}"))
        if order.leverage is not None and not 1 <= order.leverage <= market.leverage_max:
            raise InvalidInput(
                Issue(
                    ("leverage",), f"{order.leverage} is not within 1 to {market.leverage_max}, the range of {symbol}"
                )
            )
        if order.type is OrderType.LIMIT and order.limit_price is None:
            raise InvalidInput(Issue(("limitPrice",), "a limit order needs a limit price"))
        return msgspec.structs.replace(order, symbol=symbol)

    def _refuse_unless_trading(self) -> None:
        if not self._is_trading:
            raise Unavailable("This process is a standby: another one trades on this database, or is about to.", 5)

    def _refuse_when_full(self, account_id: str) -> None:
        limit = self._settings.max_accounts
        if len(self.accounts) >= limit:
            raise InvalidInput(
                Issue(("accountId",), f"{account_id!r} does not exist, and no more than {limit} accounts can be opened")
            )

    def _first_run(self, account_id: str, initial_capital: Decimal) -> Run:
        return Run(
            id=row_id(account_id, 1),
            number=1,
            initial_capital=initial_capital,
            quote_currency=self._settings.quote_currency,
            started_at=self._clock.now(),
        )


def _no_such_order(account_id: str, order_id: str) -> NotFound:
    return NotFound(f"the account {account_id} has no order {order_id}")
