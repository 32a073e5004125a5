"""Live exchange: the accounts of the models at a real venue, behind the same interface as the paper exchange.

It keeps the same ledger as the paper exchange, written in the same way, from what the venue filled, charged
and paid. One model trades one account of the venue.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Final

import aiojobs

from trader.core import tasks
from trader.core.clock import dated_origin, interval_elapsed
from trader.core.errors import InvalidInput, Issue, MarketDataError, Precondition, StartError, Unavailable
from trader.core.events import Event, MarketChecked
from trader.core.money import format_decimal
from trader.exchange.domain.account import Account
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer
from trader.exchange.domain.rules import no_position
from trader.exchange.idempotent_orders import IdempotentOrders, order_id_of, present_answer
from trader.exchange.protocol import Exchange, not_trading
from trader.exchange.session import validate_order
from trader.exchange.sql.accounts import DatabaseIdentity
from trader.live.account import LiveAccount
from trader.live.bindings import Bindings, refuse_shared
from trader.live.budget import Priority, spending_as
from trader.live.ledger import LiveContext
from trader.live.sql.venue_orders import Binding
from trader.market.domain.markets import Tick

log = logging.getLogger("trader.live")

FINISH_S: Final = 2.0
"""How long orders may take to finish when the term ends; the next start resolves unfinished ones."""

_FIRST_SYNCHRONIZATION_S: Final = 30.0
"""How long an account's first synchronization may delay the start; the account opens nothing until one succeeds."""

_START_PATIENCE_S: Final = 65.0
"""How long a request at the start may wait for its turn: what a minute allows may suffice for a few accounts only."""

_CHECKPOINT_EVERY: Final = timedelta(minutes=1)


class LiveExchange(Exchange):
    """The exchange of live trading: every account at the venue."""

    def __init__(self, context: LiveContext) -> None:
        market, settings, venue = context.market, context.settings, context.venue
        identity = DatabaseIdentity(market.identity, "live", venue.url, venue.default_account)
        super().__init__(market, settings, context.accounts, context.rules, identity)
        self._context = context
        self._bindings = Bindings(context)
        self._idempotent = IdempotentOrders(context.database, context.accounts)
        self._live_accounts: dict[str, LiveAccount] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: aiojobs.Scheduler | None = None
        self._opening = asyncio.Lock()
        self._checkpoint_due: datetime | None = None
        self._is_live = False
        context.events.subscribe(self._on_event)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Trade: rebuild the accounts from their rows, resolve sent orders, and compare with the venue.

        :raises StartError: the database belongs to another market, mode, venue or account, or its books do not balance;
            two models would trade one account; an account that is new here already holds positions or orders
        """
        now = self._context.clock.now()
        await self._accounts.lead(self._identity, self._settings.markets, now, origin=dated_origin(self._context.clock))
        self._market.restore_marks(self._accounts.marks)
        await self._market.prime()
        self._jobs = aiojobs.Scheduler()
        active, known = await self._bindings.of_active_models(), await self._bindings.known()
        refuse_shared(
            active
            | {account_id: binding.account_index for account_id, binding in known.items() if account_id not in active}
        )
        for account_id in dict.fromkeys((*active, *known)):
            try:
                with spending_as(Priority.READ, _START_PATIENCE_S):
                    await self._start(account_id, active.get(account_id), known.get(account_id))
            except (MarketDataError, Unavailable) as error:
                raise StartError(f"The venue does not report what account {account_id} has: {error}") from error
        for account in self._live_accounts.values():
            try:
                async with asyncio.timeout(_FIRST_SYNCHRONIZATION_S):
                    await account.try_synchronize()
            except TimeoutError:
                log.warning("%s: not compared with the venue yet: it takes too long", account.account_id)
        self._log_accounts()
        self._is_live = True
        if (ladder := self._context.ladder) is not None:
            self._tasks["waiting orders"] = tasks.keep(partial(ladder.follow, self.place_decided), "waiting orders")

    def suspend(self) -> None:
        """Stop sending and writing at once."""
        self._is_live = False
        self._context.venue.halt()
        self._accounts.end_term()

    async def resign(self) -> None:
        """Stop trading after pending operations finish; the next start resolves unfinished ones."""
        self._is_live = False
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=FINISH_S)
        self._tasks.clear()
        if self._jobs is not None:
            await self._jobs.wait_and_close(FINISH_S)
            self._jobs = None
        self._context.venue.halt()
        await self._checkpoint()
        await self._accounts.resign()
        self._live_accounts.clear()

    async def on_tick(self, tick: Tick) -> None:
        """Apply a market update. If the venue changed its rules, the new ones apply from now on."""
        self._rules.markets.update(self._market.markets)
        if not self._is_live:
            return
        self._accounts.note_processed(self._accounts.next_tick(tick.at))
        self._accounts.marks = dict(self._market.marks)
        for account in self._live_accounts.values():
            account.on_marks()
        if self._checkpoint_due is None or interval_elapsed(self._checkpoint_due, _CHECKPOINT_EVERY, tick.at):
            self._checkpoint_due = tick.at + _CHECKPOINT_EVERY
            await self._checkpoint()

    @property
    def term(self) -> int | None:
        return self._accounts.term if self._is_live else None

    # --- reads --------------------------------------------------------------------------------------------------------

    @property
    def troubles(self) -> Mapping[str, str]:
        return {
            account_id: account.trouble
            for account_id, account in self._live_accounts.items()
            if account.trouble is not None
        }

    def undecided(self, account_id: str) -> Collection[str]:
        account = self._live_accounts.get(account_id)
        return frozenset() if account is None else account.undecided

    def account(self, account_id: str) -> Account:
        """Return the account; one that was never opened has the run that it would have, without capital."""
        return self.accounts.get(account_id) or self._bindings.unopened(account_id)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        """Place an order at the venue; after the commit, return its fills.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price, more than one order
        :raises OrderUndecided: the outcome is not known yet; retry with the same client order id
        :raises Unavailable: the database did not confirm the order; retry with the same client order id
        """
        if len(orders) > 1:
            why = "a venue fills each order for itself, so no pair of orders is atomic there; use single orders"
            raise InvalidInput(Issue(("pair",), why))
        order = validate_order(orders[0], self.markets)
        with self._accounts.service_level.order():
            account = self.live_account(order.account_id)

            async def place(orders: Sequence[Order]) -> Sequence[OrderAnswer]:
                return [await self._running_jobs().shield(account.place(order)) for order in orders]

            return await self._idempotent.once([order], place)

    async def place_decided(self, order: Order, is_approved: bool) -> None:
        """Place an order that waited for a person, or refuse it if nobody approved it in time. Raise as `place`."""
        await self._running_jobs().shield(self.live_account(order.account_id).place(order, is_approved))

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order at the venue; return one that no longer rests unchanged. Raise `NotFound`."""
        wanted = order_id_of(account_id, order_id)
        await self._running_jobs().shield(self.live_account(account_id).cancel(str(wanted)))
        return await present_answer(self._context.database, account_id, wanted)

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace a position's exit plan, at the venue first. Return None when set, else why the old one stays."""
        if account_id not in self.accounts:
            return no_position(symbol)
        return await self._running_jobs().shield(self.live_account(account_id).set_plan(symbol, plan))

    async def close_unbooked(self, account_id: str) -> Mapping[str, str]:
        """Close what the venue holds for an account beyond its books. Return what is left, with the reasons."""
        if account_id not in self._live_accounts:
            return {}
        return await self._running_jobs().shield(self.live_account(account_id).close_unbooked())

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """Return a model's account; open it with the venue's balance if the model is active and new here.

        :raises Unavailable: the venue does not report the balance now, or its account belongs to another model
        """
        if account_id not in self._live_accounts and self._is_live:
            async with self._opening:
                active = await self._bindings.of_active_models()
                if account_id in active and account_id not in self._live_accounts:
                    await self._open_new(active)
        return self.account(account_id)

    async def settle(self, account_id: str) -> None:
        account = self._live_accounts.get(account_id)
        if account is not None:
            async with account.lock:  # operations on the account continue without their callers
                if account.undecided:
                    raise Unavailable(f"{account_id} has an order at the venue whose outcome is not known yet.", 5)
        await super().settle(account_id)

    async def reset_account(self, account_id: str) -> Account:
        """End the run of a flat account, and start the next with the venue's balance, as after a deposit."""
        await self._running_jobs().shield(self.live_account(account_id).begin_run())
        return self.account(account_id)

    async def remove_account(self, account_id: str) -> bool:
        raise Precondition("An account at a venue cannot be removed: its money is real. Use TRADING_MODE=simulated.")

    def live_account(self, account_id: str) -> LiveAccount:
        """Return an account that this process trades. Raise `Unavailable` for any other."""
        self._running_jobs()
        account = self._live_accounts.get(account_id)
        if account is None:
            raise Unavailable(f"{account_id} has no account at the venue that is open here.", 60)
        return account

    # --- within -------------------------------------------------------------------------------------------------------

    async def _open_new(self, active: Mapping[str, str]) -> None:
        known, opened = await self._bindings.known(), self._live_accounts
        try:
            refuse_shared({**active, **{account_id: account.account_index for account_id, account in opened.items()}})
            for account_id in active.keys() - opened.keys():
                await self._start(account_id, active[account_id], known.get(account_id))
                opened[account_id].wake()
        except (MarketDataError, StartError) as error:
            raise Unavailable(str(error), 60) from error

    async def _start(self, account_id: str, index: str | None, known: Binding | None) -> None:
        """Start trading an account, known from an earlier start or new at this venue."""
        if known is None and self._context.ladder is not None:
            await self._context.ladder.admit(account_id)
        binding = await self._bindings.bind(account_id, index, known)
        if index is not None:
            try:
                await self._context.venue.account(index)
            except MarketDataError as error:
                log.warning("%s: the venue cannot be asked for its account now: %s", account_id, error)
        account = LiveAccount(self._context, account_id, *binding)
        self._live_accounts[account_id] = account
        self._tasks[account_id] = tasks.keep(account.run, f"live account {account_id}")

    def _running_jobs(self) -> aiojobs.Scheduler:
        if self._jobs is None or self.term is None:
            raise not_trading(self._settings, self._accounts.database_trouble)
        return self._jobs

    def _on_event(self, event: Event) -> None:
        """Synchronize the accounts on every cycle of the price tracker."""
        if self._is_live and isinstance(event, MarketChecked):
            for account in self._live_accounts.values():
                account.wake()

    async def _checkpoint(self) -> None:
        try:
            await self._accounts.checkpoint(self._context.clock)
        except Unavailable as error:
            log.warning("the time until which the market was followed is not recorded: %s", error)

    def _log_accounts(self) -> None:
        log.warning("LIVE: orders go to %s", self._context.venue.url)
        for account_id, live in self._live_accounts.items():
            account = self.accounts[account_id]
            log.warning(
                "LIVE: %s trades account %s in %s; balance %s %s, %d positions, %d orders there%s",
                account_id, live.account_index, ", ".join(self._settings.markets), format_decimal(account.cash),
                account.run.quote_currency, len(account.positions), len(live.sent),
                "" if live.trouble is None else f"; opens nothing: {live.trouble}",
            )  # fmt: skip
