"""Live trading: the accounts of the models at a real venue, each with a desk of its own.

The books are those of the paper exchange, kept in the same way; what goes into them is what the venue filled, charged
and paid. One model trades one account of the venue.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

import aiojobs

from trader.clock import Clock, comes_up
from trader.domain.exchange.account import Account, Run
from trader.domain.exchange.ledger import Rules, row_id
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.market.markets import Market, Tick
from trader.domain.models import Model
from trader.domain.money import ZERO, format_decimal
from trader.errors import MarketDataError, Precondition, StartError, Unavailable
from trader.gateways.lighter.account import LighterAccounts
from trader.services.events import Event, EventBus, MarketChecked
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.idempotent_orders import IdempotentOrders, checked, order_id_of, present_answer
from trader.services.live.account import LiveAccount
from trader.services.live.drift import DriftRecorder
from trader.services.live.outbox import Floor, Outbox
from trader.services.live.protective_orders import ProtectiveOrders
from trader.services.live.reconciler import Reconciler
from trader.services.market.feed import MarketFeed
from trader.settings import Settings
from trader.store.agents.invocations import select_models
from trader.store.database.pool import Database
from trader.store.exchange import accounts as store
from trader.store.live import venue_orders as venue_store

log = logging.getLogger("trader.live")

_FINISH_S: Final = 2.0
"""How long an order may take to finish when the term ends; the next start finds out about the rest."""

_FIRST_LOOK_S: Final = 30.0
"""How long the first look at an account may hold up the start; nothing is opened for it until one has gone well."""

_CHECKPOINT_EVERY: Final = timedelta(minutes=1)


class LiveExchange:
    """The accounts at the venue, and all that happens to them."""

    def __init__(
        self,
        database: Database,
        market: MarketFeed,
        clock: Clock,
        events: EventBus,
        settings: Settings,
        venue: LighterAccounts,
        accounts: Accounts,
        halts: Halts,
        drift: DriftRecorder,
    ) -> None:
        self._database = database
        self._market = market
        self._clock = clock
        self._settings = settings
        self._venue = venue
        self._identity = store.DatabaseIdentity(market.identity, "live", venue.url, venue.default_index)
        self._rules = Rules(
            markets=dict(market.markets),
            taker_rate=settings.taker_fee_bps
            / 10_000,  # for judging what an order may cost; booked is what was charged
            maker_rate=settings.maker_fee_bps / 10_000,
            liquidation_rate=ZERO,
        )
        self._accounts = accounts
        self._floor = Floor(database, market, clock, accounts, self._rules, events, venue, halts, drift, market.marks)
        self._orders = IdempotentOrders(database)
        self._desks: dict[str, LiveAccount] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: aiojobs.Scheduler | None = None
        self._opening = asyncio.Lock()
        self._checkpoint_due: datetime | None = None
        self._is_live = False
        events.subscribe(self._on_event)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Trade: rebuild the accounts from their rows, find out what became of what was sent, compare with the venue.

        :raises StartError: the database is of another market, mode, venue or account, or its books do not balance; two
            models would trade one account; an account that is new here holds positions or orders already
        """
        self._market.restore_marks(await self._accounts.lead(self._identity, self._settings.market_symbols))
        await self._market.prime()
        self._jobs = aiojobs.Scheduler()
        models = {model.id: model for model in await self._models() if model.active}
        bound = await self._bound()
        indexes = {model.id: self._index_of(model) for model in models.values()}
        _refuse_shared(indexes | {one: index for one, (index, _) in bound.items() if one not in models})
        for account_id in dict.fromkeys((*models, *bound)):
            try:
                await self._open_desk(account_id, indexes.get(account_id), bound.get(account_id))
            except (MarketDataError, Unavailable) as error:
                raise StartError(f"The venue does not tell what account {account_id} has: {error}") from error
        for desk in self._desks.values():
            try:
                async with asyncio.timeout(_FIRST_LOOK_S):
                    await desk.look()
            except TimeoutError:
                log.warning("%s: not compared with the venue yet: it takes too long", desk.account_id)
        self._tell_what_is_traded()
        self._is_live = True

    async def follow(self) -> None:
        """Show what another process trades: read what it has changed since the last time.

        :raises StartError: the database is of another market, mode, venue or account
        :raises Unavailable: the database cannot answer now
        """
        self._market.restore_marks(await self._accounts.follow(self._identity))
        if not self._market.quotes():
            await self._market.prime()

    def suspend(self) -> None:
        """Send and write nothing, from this moment on."""
        self._is_live = False
        self._venue.halt()
        self._accounts.end_term()

    async def resign(self) -> None:
        """Trade no more: let what is under way finish; what does not is found out about at the next start."""
        self._is_live = False
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_FINISH_S)
        self._tasks.clear()
        if self._jobs is not None:
            await self._jobs.wait_and_close(_FINISH_S)
            self._jobs = None
        self._venue.halt()
        await self._checkpoint()
        await self._accounts.resign()
        self._desks.clear()

    async def on_tick(self, tick: Tick) -> None:
        """See an update of the markets. Where the venue has changed its rules, the new ones hold from here on."""
        self._rules.markets.update(self._market.markets)
        if not self._is_live:
            return
        self._accounts.processed_until = tick.at
        for desk in self._desks.values():
            desk.see()
        if self._checkpoint_due is None or comes_up(self._checkpoint_due, _CHECKPOINT_EVERY, tick.at):
            self._checkpoint_due = tick.at + _CHECKPOINT_EVERY
            await self._checkpoint()

    async def check(self) -> None:
        """Have every desk find out, book and compare now. Raises as `LiveAccount.check` does."""
        for desk in list(self._desks.values()):
            await desk.check()

    @property
    def term(self) -> int | None:
        return self._accounts.term if self._is_live else None

    # --- what others read ---------------------------------------------------------------------------------------------

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._rules.markets

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self._accounts.by_id

    @property
    def version(self) -> int:
        return self._accounts.version

    @property
    def troubles(self) -> Mapping[str, str]:
        return {one: desk.trouble for one, desk in self._desks.items() if desk.trouble is not None}

    def undecided(self, account_id: str) -> Collection[str]:
        desk = self._desks.get(account_id)
        return frozenset() if desk is None else desk.undecided

    def marks(self) -> Mapping[str, Decimal]:
        return self._market.marks

    def account(self, account_id: str) -> Account:
        """The account; one that was never opened shows the run that it would have, without any capital."""
        existing = self.accounts.get(account_id)
        if existing is not None:
            return existing
        run = self._first_run(account_id, ZERO)
        return Account(id=account_id, run=run, sequence=0, changed_at=run.started_at)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def place_order(self, order: Order) -> OrderAnswer:
        """Place an order at the venue; the answer is what it filled, after the commit.

        :raises InvalidInput: unknown market, leverage above the market's, missing limit price
        :raises OrderUndecided: what became of the order is not known yet; ask again with the same client order id
        :raises Unavailable: the database did not confirm the order; the same
        """
        order = checked(order, self.markets)
        desk = self._desk(order.account_id)

        async def place(order: Order) -> OrderAnswer:
            return await self._jobs_now().shield(desk.place(order))

        return await self._orders.once(order, place)

    async def cancel_order(self, account_id: str, order_id: str) -> OrderAnswer:
        """Cancel a resting order at the venue. One that no longer rests is answered as it is. Raises `NotFound`."""
        wanted = order_id_of(account_id, order_id)
        await self._jobs_now().shield(self._desk(account_id).cancel(str(wanted)))
        return await present_answer(self._database, account_id, wanted)

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position, at the venue first. None when it is set, else why the old one stays."""
        if account_id not in self.accounts:
            return f"there is no {symbol} position"
        return await self._jobs_now().shield(self._desk(account_id).set_plan(symbol, plan))

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def open_account(self, account_id: str, initial_capital: Decimal | None = None) -> Account:
        """The account of a model, opened when it is active and trades for the first time: its capital is the balance.

        :raises Unavailable: the venue does not tell the balance now, or its account is another model's
        """
        if account_id not in self._desks and self._is_live:
            async with self._opening:
                models = {model.id: model for model in await self._models() if model.active}
                if account_id in models and account_id not in self._desks:
                    await self._open_new(models)
        return self.account(account_id)

    async def reset_account(self, account_id: str) -> Account:
        raise Precondition("An account at a venue cannot be reset: its money is real. Use TRADING_MODE=simulated.")

    # --- within -------------------------------------------------------------------------------------------------------

    async def _open_new(self, models: Mapping[str, Model]) -> None:
        bound = await self._bound()
        indexes = {model.id: self._index_of(model) for model in models.values()}
        try:
            _refuse_shared(indexes | {one: desk.account_index for one, desk in self._desks.items()})
            for account_id in models.keys() - self._desks.keys():
                await self._open_desk(account_id, indexes[account_id], bound.get(account_id))
                self._desks[account_id].wake()
        except (MarketDataError, StartError) as error:
            raise Unavailable(str(error), 60) from error

    async def _open_desk(self, account_id: str, index: int | None, bound: tuple[int, datetime] | None) -> None:
        """The desk of an account: known from earlier, or new at this venue."""
        if bound is None:
            assert index is not None
            bound = index, await self._open_account(account_id, index)
        if index is not None and bound[0] != index:
            raise StartError(
                f"The books of {account_id} are those of the venue's account {bound[0]}; its row in `models` says "
                f"{index}. A model keeps its account: set models.venue_account_index back, or use another model."
            )
        floor = self._floor
        outbox = Outbox(floor, account_id, bound[0])
        legs = ProtectiveOrders(floor, outbox)
        desk = LiveAccount(floor, outbox, Reconciler(floor, outbox, legs, bound[1]), legs)
        self._desks[account_id] = desk
        self._tasks[account_id] = asyncio.create_task(desk.run(), name=f"desk of {account_id}")

    async def _open_account(self, account_id: str, index: int) -> datetime:
        """Open an account with the balance that it has at first sight. Gives when that was."""
        statement = await (await self._venue.account(index)).orders.statement()
        if statement.positions or statement.legs or statement.others:
            held = ", ".join(statement.positions) or "orders"
            raise StartError(
                f"The venue's account {index}, which {account_id} is to trade, holds {held} already. Close all of it "
                "first: what others have begun is not in the books."
            )
        if statement.balance <= 0:
            raise StartError(f"The venue's account {index}, which {account_id} is to trade, has no money")
        existing = self.accounts.get(account_id)
        if existing is not None and existing.run.initial_capital != statement.balance:
            raise StartError(
                f"{account_id} is open in this database with {format_decimal(existing.run.initial_capital)}, "
                f"and the venue's "
                f"account {index} has {format_decimal(statement.balance)}. Use another database (DATABASE_URL)."
            )
        await self._accounts.open(account_id, self._first_run(account_id, statement.balance))
        at = self._clock.now()
        async with self._database.connection() as conn:
            await venue_store.insert_venue_account(conn, account_id, index, at)
        return at

    def _first_run(self, account_id: str, capital: Decimal) -> Run:
        return Run(
            id=row_id(account_id, 1),
            number=1,
            initial_capital=capital,
            quote_currency=self._settings.quote_currency,
            started_at=self._clock.now(),
        )

    def _index_of(self, model: Model) -> int:
        return self._venue.default_index if model.venue_account_index is None else model.venue_account_index

    async def _models(self) -> list[Model]:
        async with self._database.connection() as conn:
            return await select_models(conn)

    async def _bound(self) -> dict[str, tuple[int, datetime]]:
        async with self._database.connection() as conn:
            return await venue_store.select_venue_accounts(conn)

    def _desk(self, account_id: str) -> LiveAccount:
        self._jobs_now()
        desk = self._desks.get(account_id)
        if desk is None:
            raise Unavailable(f"{account_id} has no account at the venue that is open here.", 60)
        return desk

    def _jobs_now(self) -> aiojobs.Scheduler:
        if self._jobs is None or self.term is None:
            raise Unavailable("This process is a standby: another one trades on this database, or is about to.", 5)
        return self._jobs

    def _on_event(self, event: Event) -> None:
        """With every cycle of the price tracker the desks have a look."""
        if self._is_live and isinstance(event, MarketChecked):
            for desk in self._desks.values():
                desk.wake()

    async def _checkpoint(self) -> None:
        try:
            await self._accounts.checkpoint(self._market.marks)
        except Unavailable as error:
            log.warning("could not note how far the market was followed: %s", error)

    def _tell_what_is_traded(self) -> None:
        log.warning("LIVE: orders go to %s", self._venue.url)
        for account_id, desk in self._desks.items():
            account = self.accounts[account_id]
            log.warning(
                "LIVE: %s trades account %d in %s; balance %s %s, %d positions, %d orders there%s",
                account_id, desk.account_index, ", ".join(self._settings.market_symbols), format_decimal(account.cash),
                account.run.quote_currency, len(account.positions), len(desk.sent),
                "" if desk.trouble is None else f"; opens nothing: {desk.trouble}",
            )  # fmt: skip


def _refuse_shared(indexes: Mapping[str, int]) -> None:
    """One model, one account: nobody could tell whose a position is."""
    owners: dict[int, list[str]] = {}
    for account_id, index in indexes.items():
        owners.setdefault(index, []).append(account_id)
    for index, names in owners.items():
        if len(names) > 1:
            raise StartError(
                f"{' and '.join(names)} would trade the venue's account {index} together. Give each active model an "
                "account of its own (models.venue_account_index; the default is VENUE_ACCOUNT_INDEX)."
            )
