"""Accounts in memory, equal to their rows: the one place where an account changes.

Every change takes the same steps: lock the account, decide (pure), commit in one transaction, apply to memory, publish.
When a commit is not confirmed the account is in doubt: before its next change it is read again from its rows and caught
up on the ticks it has missed.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import datetime
from decimal import Decimal
from typing import Final

import aiojobs
import msgspec

from trader.domain.exchange.account import Account, Run, Taken, all_taken, taken_with
from trader.domain.exchange.ledger import Posting
from trader.domain.exchange.orders import OrderStatus
from trader.errors import DatabaseUnavailable, InternalError, LedgerViolated, StartError, Unavailable
from trader.services.events import EventBus, PositionsChanged, PostingRefused, TradesChanged
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.store.database import leadership as leadership_store
from trader.store.database.pool import Database
from trader.store.exchange import accounts as store
from trader.store.exchange import audit as audit_store

log = logging.getLogger("trader.exchange")

_READ_APART_MAX: Final = 50
"""With more changed accounts than this, reading all at once is cheaper than reading each."""

FINISH_S: Final = 2.0
"""How long a change that is under way may take to finish when the term ends."""

CatchUp = Callable[[str, datetime], Awaitable[None]]
"""Apply the ticks since the given time to an account just read from its rows. Called under the account's lock."""


class Tally:
    """Counts of what was posted since the process started."""

    def __init__(self) -> None:
        self.orders: Counter[OrderStatus] = Counter()
        self.maker_fills = 0
        self.taker_fills = 0
        self.trades = 0

    def add(self, posting: Posting) -> None:
        if posting.answer is not None:
            self.orders[posting.answer.status] += 1
        makers = sum(fill.maker for fill in posting.fills)
        self.maker_fills += makers
        self.taker_fills += len(posting.fills) - makers
        self.trades += len(posting.trades)


class Accounts:
    """Every account, as of its last commit, and the ways to change one.

    `version` grows with every change of an account, in memory or, when a commit is in doubt, perhaps only in its rows.
    `processed_until` is the last tick that every account went through; None before the first. With `shares_depth` every
    account meets the books without what the others took out of them.
    """

    def __init__(self, database: Database, writer: LedgerWriter, events: EventBus) -> None:
        self._database = database
        self._writer = writer
        self._events = events
        self._accounts: dict[str, Account] = {}
        self._taken: Mapping[str, Taken] = {}
        self.shares_depth = False
        self.tally = Tally()
        self.version = 0
        self.processed_until: datetime | None = None
        self._catch_up: CatchUp | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._in_doubt: dict[str, datetime | None] = {}
        self._under_way: defaultdict[str, set[asyncio.Future[Posting | None]]] = defaultdict(set)
        self._decided: dict[str, Account] = {}
        """The accounts as they will be once what was decided is committed."""

        self._changes: aiojobs.Scheduler | None = None
        self._term: int | None = None

    async def lead(
        self, identity: store.DatabaseIdentity, symbols: Collection[str], catch_up: CatchUp | None = None
    ) -> Mapping[str, Decimal]:
        """Begin a term: rebuild every account from its rows and check the ledger. Return the last recorded marks.

        `catch_up` is called for an account that was in doubt, once it has been read again.

        :raises StartError: the database is of another market or trading mode, its books do not balance, or an account
            holds what is not among the `symbols` that are followed
        """
        async with self._database.transaction() as conn:
            await leadership_store.lock_accounts(conn)  # an earlier leader may still book, and not know that it is one
            state = await store.upsert_service_state(conn, identity)
            _refuse_foreign(state.identity, identity)
            if differences := await audit_store.select_differences(conn):
                raise StartError(
                    f"The books of this database do not balance: {'; '.join(map(str, differences[:5]))}. "
                    "Run trader audit for the whole list. Nothing was changed."
                )
            accounts = await store.select_accounts(conn)
            _refuse_unfollowed(accounts, symbols)
            self._accounts = accounts
            self._taken = all_taken(accounts.values())
            self.version += 1
            marks = await store.select_last_marks(conn)
            self._term = await leadership_store.update_term(conn)
        self._in_doubt.clear()
        self._catch_up = catch_up
        self.processed_until = state.processed_until
        self._writer.start(self._term)
        self._changes = aiojobs.Scheduler()
        positions = sum(len(account.positions) for account in accounts.values())
        resting = sum(len(account.resting) for account in accounts.values())
        log.info("restored %d accounts with %d positions and %d resting orders", len(accounts), positions, resting)
        return marks

    async def follow(self, identity: store.DatabaseIdentity) -> Mapping[str, Decimal]:
        """Read what the leader has changed since the last call. Return the last recorded marks. Nothing is written.

        An identity without a venue is that of a process that has no account there.

        :raises StartError: the database is of another market or trading mode
        :raises Unavailable: the database cannot answer now
        """
        async with self._database.reading() as conn:
            known_identity = await store.select_identity(conn)
            if known_identity is not None:  # else the leader is about to begin
                _refuse_foreign(known_identity, identity)
            versions = await leadership_store.select_account_versions(conn)
            self._forget(self._accounts.keys() - versions.keys())
            known = {account.id: (account.sequence, account.changed_at) for account in self._accounts.values()}
            changed = tuple(account_id for account_id, version in versions.items() if known.get(account_id) != version)
            self.version += bool(changed)
            if len(changed) > _READ_APART_MAX:
                self._accounts = await store.select_accounts(conn)
            else:
                for account_id in changed:
                    self._accounts.update(await store.select_accounts(conn, account_id))
            self.version += bool(changed)
            marks = await store.select_last_marks(conn)
        if changed:
            at = max(self._accounts[account_id].changed_at for account_id in changed)
            self._events.publish(PositionsChanged(at, changed))
            self._events.publish(TradesChanged(at, changed))
        return marks

    def end_term(self) -> None:
        """Stop writing at once."""
        self._term = None
        self._writer.halt()

    async def resign(self) -> None:
        """End the term once the changes under way have finished."""
        if self._changes is not None:
            await self._changes.wait_and_close(FINISH_S)
        self._term = None
        await self._writer.close()

    @property
    def term(self) -> int | None:
        """The term in which this process leads; None for a standby."""
        return self._term

    @property
    def by_id(self) -> Mapping[str, Account]:
        """Every account by its id, as of its last commit."""
        return self._accounts

    def taken(self, account_id: str) -> Mapping[str, Taken]:
        """Return what is missing from the books for an account, by market."""
        account = self._accounts.get(account_id)
        return self._taken if self.shares_depth else {} if account is None else account.taken

    def is_unsettled(self, account_id: str) -> bool:
        """Whether the account is changing right now or in doubt: its state is certain only under its lock."""
        return account_id in self._in_doubt or self._locks[account_id].locked()

    def under_way(self, account_id: str) -> Collection[asyncio.Future[Posting | None]]:
        """Return the changes of the account that go on, with or without callers that wait for them."""
        return tuple(self._under_way.get(account_id, ()))  # callers may name accounts that do not exist

    async def settle(self, account_id: str) -> None:
        """Wait until every change of the account that is under way has ended, and is certain in the rows.

        :raises Unavailable: the database cannot answer now, or this process has stopped trading
        """
        if under_way := self.under_way(account_id):
            await asyncio.wait(under_way)
        if account_id in self._in_doubt:
            await self.change(account_id, lambda _: None)

    async def open(self, account_id: str, run: Run) -> Account:
        """Return the account; open it with this first run when it does not exist."""
        async with self._locks[account_id]:
            if account_id not in self._accounts:
                async with self._database.writing() as conn:
                    await store.insert_account(conn, account_id, run)
                async with self._database.reading() as conn:
                    self._accounts.update(await store.select_accounts(conn, account_id))
                self.version += 1
        return self._accounts[account_id]

    async def remove(self, account_id: str, within: AbstractAsyncContextManager[None]) -> bool:
        """Remove an account that has never traded, with its rows. False when it has, or belongs to a model.

        :raises Unavailable: the database did not confirm it, or this process has stopped trading
        """
        async with within, self._locks[account_id]:
            if account_id not in self._accounts:
                return True
            if (term := self._term) is None:
                raise self._ended()
            async with self._database.transaction() as conn:
                if account_id in self._in_doubt:  # what is still under way at the server is refused from here on
                    await store.update_account_fenced(conn, account_id, term)
                deletion = await store.delete_account(conn, account_id, term)
            if not deletion.is_leading:
                raise self._ended()
            if not deletion.is_kept:
                self._forget({account_id})
            return not deletion.is_kept

    def _forget(self, account_ids: Collection[str]) -> None:
        """Drop accounts whose rows are gone."""
        for account_id in account_ids:
            self._accounts = {key: account for key, account in self._accounts.items() if key != account_id}
            self.version += 1
            self._in_doubt.pop(account_id, None)
            self._decided.pop(account_id, None)

    async def change(
        self,
        account_id: str,
        decide: Callable[[Account], Posting | None],
        within: AbstractAsyncContextManager[None] | None = None,
    ) -> Posting | None:
        """Lock, decide, commit, apply, publish, all of it `within` a context if one is given.

        It runs to its end even when the caller is cancelled. An account that was removed meanwhile has no decision.

        :raises Unavailable: the database did not confirm the change; whether it was made is unknown until the account
            is read again, which happens before its next change
        :raises InternalError: a bug ended the write; the account is read again as well
        """
        assert self._changes is not None, "only a leader changes accounts"
        change = asyncio.ensure_future(self._change(account_id, decide, within or nullcontext()))
        under_way = self._under_way[account_id]
        under_way.add(change)
        change.add_done_callback(under_way.discard)
        try:
            return await self._changes.shield(change)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise self._ended() from None  # the change was cancelled, not its caller: the term has ended

    def decide(self, account_id: str, decide: Callable[[Account], Posting | None]) -> Posting | None:
        """Return the decision on an account, which sees the depth that others took. Call it like `commit`."""
        account = self._accounts[account_id]
        posting = self.preview(account, decide)
        if posting is None or not self.shares_depth:
            return posting
        self._taken = posting.account.taken
        own = msgspec.structs.replace(posting.account, taken=taken_with(account.taken, posting.fills))
        self._decided[account_id] = own
        return msgspec.structs.replace(posting, account=own)

    def preview(self, account: Account, decide: Callable[[Account], Posting | None]) -> Posting | None:
        """Return the decision on an account that may not be open yet, which sees the depth that others took."""
        return decide(msgspec.structs.replace(account, taken=self._taken) if self.shares_depth else account)

    async def commit(self, posting: Posting) -> None:
        """Commit, apply and publish. Call it only under the account's lock: within `change` or its catch-up."""
        account = posting.account
        try:
            await self._writer.write(posting)
        except (Unavailable, InternalError):
            self._in_doubt.setdefault(account.id, self.processed_until)
            self.version += 1
            self._return_depth(account.id)
            raise
        except LedgerViolated as error:
            self._events.publish(PostingRefused(account.id, str(error)))
            self._return_depth(account.id)
            raise
        self._decided.pop(account.id, None)
        self._accounts[account.id] = account
        self.version += 1
        self.tally.add(posting)
        if posting.positions or posting.trades or posting.resting or posting.starts_run:
            self._events.publish(PositionsChanged(account.changed_at, (account.id,)))
        if posting.trades:
            self._events.publish(TradesChanged(account.changed_at, (account.id,), tuple(posting.trades)))

    def _return_depth(self, account_id: str) -> None:
        """Give back to the books what was taken by a posting that failed; what has committed is read again later."""
        if self.shares_depth:
            self._decided.pop(account_id, None)
            self._taken = all_taken({**self._accounts, **self._decided}.values())

    def mark_missed(self, account_id: str) -> None:
        """Record that the account has missed every tick after the last processed one."""
        self._in_doubt.setdefault(account_id, self.processed_until)

    async def checkpoint(self, marks: Mapping[str, Decimal]) -> None:
        """Record in the database up to which tick every account has been processed, and the marks of that time.

        :raises Unavailable: the database cannot answer now; the next checkpoint covers this one
        """
        term = self._term
        if self.processed_until is None or term is None:
            return
        doubts = [since for since in self._in_doubt.values() if since is not None]
        async with self._database.writing() as conn:
            await store.update_processed_until(conn, term, min([self.processed_until, *doubts]), marks)

    async def _change(
        self,
        account_id: str,
        decide: Callable[[Account], Posting | None],
        within: AbstractAsyncContextManager[None],
    ) -> Posting | None:
        async with within, self._locks[account_id]:
            if self._term is None:  # it ended while the caller waited, for a book or for this account
                raise self._ended()
            if account_id not in self._accounts:  # it was removed meanwhile
                return None
            if account_id in self._in_doubt:
                await self._recover(account_id)
            posting = self.decide(account_id, decide)
            if posting is not None:
                await self.commit(posting)
            return posting

    @property
    def database_trouble(self) -> str | None:
        """Why the database cannot be used now, as far as this process has noticed."""
        return self._database.trouble

    def _ended(self) -> Unavailable:
        if self.database_trouble is not None:  # then no other process trades either
            return DatabaseUnavailable(self.database_trouble)
        return Unavailable("This process has stopped trading: another one trades on this database, or is about to.", 5)

    async def _recover(self, account_id: str) -> None:
        since, term = self._in_doubt[account_id], self._term
        assert term is not None, "only a leader recovers accounts"
        async with self._database.writing() as conn:  # what is still under way at the server is refused from here on
            if not await store.update_account_fenced(conn, account_id, term):
                raise self._ended()
        async with self._database.reading() as conn:
            self._accounts.update(await store.select_accounts(conn, account_id))
        self.version += 1
        self._return_depth(account_id)
        if since is not None and self._catch_up is not None:
            await self._catch_up(account_id, since)
        del self._in_doubt[account_id]
        log.info("account %s was read again from its rows", account_id)


def _refuse_foreign(recorded: store.DatabaseIdentity, wanted: store.DatabaseIdentity) -> None:
    if recorded.market_identity != wanted.market_identity:
        raise StartError(
            f"This database belongs to the market {recorded.market_identity}; MARKET_SOURCE and SIM_SEED select "
            f"{wanted.market_identity}. Prices of two markets never mix: go on with the settings that this database "
            "began with, or use another one (DATABASE_URL)."
        )
    if recorded.trading_mode != wanted.trading_mode:
        raise StartError(
            f"This database holds {recorded.trading_mode} orders; TRADING_MODE is {wanted.trading_mode}. "
            "Use another database (DATABASE_URL)."
        )
    if wanted.trading_mode == "live" and wanted.venue_url is None:
        return
    if recorded != wanted:
        raise StartError(
            f"This database holds the orders of account {recorded.venue_account_index} at {recorded.venue_url}; "
            f"the settings name account {wanted.venue_account_index} at {wanted.venue_url} "
            "(VENUE_ACCOUNT_INDEX, VENUE_URL). Use another database (DATABASE_URL)."
        )


def _refuse_unfollowed(accounts: Mapping[str, Account], symbols: Collection[str]) -> None:
    """A position without a price would have no value, and nothing would ever stop or liquidate it."""
    held = {symbol for account in accounts.values() for symbol in account.positions}
    held |= {order.symbol for account in accounts.values() for order in account.resting}
    if missing := sorted(held - set(symbols)):
        raise StartError(
            f"Accounts of this database hold positions or resting orders in {', '.join(missing)}, which MARKETS "
            "leaves out. Trade these markets too, or close what is held there first."
        )
