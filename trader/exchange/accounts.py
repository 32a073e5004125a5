"""Accounts in memory, equal to their rows: the only place where an account changes.

Every change takes the same steps: lock the account, decide (pure), commit in one transaction, apply to memory, publish.
If a commit is not confirmed, the account is in doubt: before its next change it is reread from its rows and catches up
on the ticks that it has missed, while the other accounts continue.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeVar

import aiojobs
import msgspec

from trader.core import tasks
from trader.core.clock import EPOCH, Clock, dated_origin, iso
from trader.core.errors import DatabaseUnavailable, InternalError, LedgerViolated, StartError, Unavailable
from trader.core.events import EventBus, PositionsChanged, PostingRefused
from trader.database.leadership import update_term
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import Account, AppliedTick, Run, Taken, all_taken, taken_with
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import OrderStatus
from trader.exchange.domain.tick_order import BEFORE_FIRST, DateSpan, DateSpans, add_span, cut_out, resume
from trader.exchange.events import TradesChanged
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.session import Decide
from trader.exchange.sql import accounts as store
from trader.exchange.sql import audit as audit_store

log = logging.getLogger("trader.exchange")

T = TypeVar("T")

_READ_APART_MAX: Final = 50
"""With more changed accounts than this, reading all at once is cheaper than reading each one."""

FINISH_S: Final = 2.0
"""How long a change in progress may take to finish when the term ends."""

CatchUp = Callable[[str], AbstractAsyncContextManager[None]]
"""Apply the ticks that an account in doubt has missed; within it, no tick is applied to any account.

Used under the account's lock, after it was read from its rows.
"""

Within = Callable[[], AbstractAsyncContextManager[None]]
"""A context to enter before the account's lock is taken. It must not be entered while the account is in doubt."""


class Tally:
    """Counts of everything posted since the process started."""

    def __init__(self) -> None:
        self.orders: Counter[OrderStatus] = Counter()
        self.maker_fills = 0
        self.taker_fills = 0
        self.trades = 0

    def add(self, posting: Posting) -> None:
        self.orders.update(answer.status for answer in posting.answers)
        makers = sum(fill.maker for fill in posting.fills)
        self.maker_fills += makers
        self.taker_fills += len(posting.fills) - makers
        self.trades += len(posting.trades)


class LastSeen(NamedTuple):
    """The last tick that an account has certainly been through, and the mark prices as of that tick."""

    tick: AppliedTick
    marks: Mapping[str, Decimal]


class Accounts:
    """Every account as of its last commit, and the ways to change one.

    `version` grows with every change of an account, in memory or, if a commit is in doubt, perhaps only in its rows.
    `processed` is the last tick that every account not in doubt has been through, None before the first, and `marks`
    are the mark prices as of that tick. If the clock of this term began behind, `ahead` are the missed dates that were
    still to come by it. With `shares_depth`, each account meets books that lack what the other accounts
    took.
    """

    log = log
    is_listed = True
    """Whether the accounts have rows in the database. Accounts without rows leave the feed and its recording alone."""

    def __init__(self, database: Database, writer: LedgerWriter, events: EventBus) -> None:
        self._database = database
        self._writer = writer
        self._events = events
        self._accounts: dict[str, Account] = {}
        self._taken: Mapping[str, Taken] = {}
        self.shares_depth = False
        self.tally = Tally()
        self.service_level = writer.service_level
        self.version = 0
        self.processed: AppliedTick | None = None
        self.marks: Mapping[str, Decimal] = {}
        self.ahead: DateSpan | None = None
        self._spans: DateSpans = ()
        self._last_number = 0
        self._catch_up: CatchUp | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._in_doubt: dict[str, LastSeen | None] = {}
        self._under_way: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        self._decided: dict[str, Account] = {}
        """The accounts with all pending decisions applied."""

        self._changes: aiojobs.Scheduler | None = None
        self._term: int | None = None

    async def lead(
        self,
        identity: store.DatabaseIdentity,
        symbols: Collection[str],
        now: datetime,
        catch_up: CatchUp | None = None,
        origin: tuple[str, datetime] | None = None,
    ) -> None:
        """Start a term: rebuild every account and the marks from their rows, and check the ledger.

        Processed ticks are dated by the present clock, whose origin is `origin`. `catch_up` is called for an account
        that was in doubt, after it has been reread. Before anything else, dates `ahead` are to be caught up on.

        :raises StartError: the database belongs to another market or trading mode, its books do not balance, or an
            account holds a market that is not among the followed `symbols`
        """
        async with self._database.transaction() as conn:
            await store.lock_accounts(conn)  # an earlier leader may still post, unaware that it was replaced
            state = await store.upsert_service_state(conn, identity)
            _refuse_foreign(state.identity, identity)
            if differences := await audit_store.select_differences(conn):
                raise StartError(
                    f"The books of this database do not balance: {'; '.join(map(str, differences[:5]))}. "
                    "Run trader audit for the full list. Nothing was changed."
                )
            processed, self.ahead = await _resume(conn, state, now, origin)
            accounts = await store.select_accounts(conn)
            _refuse_unfollowed(accounts, symbols)
            self._accounts = accounts
            self._taken = all_taken(accounts.values())
            self.version += 1
            marks = await store.select_last_marks(conn)
            self._term = await update_term(conn)
        self._in_doubt.clear()
        self._decided.clear()  # a change that was cut off at the end of the last term leaves its decision
        self._catch_up = catch_up
        self.processed, self.marks, self._spans = processed, marks, state.spans
        if processed is not None and not state.spans:  # the database was filled from a past
            self._spans = add_span((), EPOCH, processed.at)
        numbers = [account.seen_tick for account in accounts.values()]
        self._last_number = max(numbers, default=0) if processed is None else max(processed.number, *numbers, 0)
        self._writer.start(self._term)
        self._changes = aiojobs.Scheduler()
        positions = sum(len(account.positions) for account in accounts.values())
        resting = sum(len(account.resting) for account in accounts.values())
        log.info("restored %d accounts with %d positions and %d resting orders", len(accounts), positions, resting)

    async def follow(self, identity: store.DatabaseIdentity) -> Mapping[str, Decimal]:
        """Read what the leader has changed since the last call. Return the last recorded marks. Writes nothing.

        An identity without a venue belongs to a process that has no account there.

        :raises StartError: the database belongs to another market or trading mode
        :raises Unavailable: the database cannot answer now
        """
        async with self._database.reading() as conn:
            known_identity = await store.select_identity(conn)
            if known_identity is not None:  # otherwise the leader is about to begin
                _refuse_foreign(known_identity, identity)
            versions = await store.select_account_versions(conn)
            self._forget(self._accounts.keys() - versions.keys())
            known = {each.id: (each.sequence, each.changed_at, each.seen_until) for each in self._accounts.values()}
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
        """End the term after the changes in progress have finished."""
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
        """Every account by its ID, as of its last commit."""
        return self._accounts

    @property
    def processed_until(self) -> datetime | None:
        """The time of the last processed tick."""
        return None if self.processed is None else self.processed.at

    def next_tick(self, at: datetime) -> AppliedTick:
        """Return the next tick: its number defines the order, since times may repeat after the clock is set back."""
        self._last_number += 1
        return AppliedTick(self._last_number, at)

    def taken(self, account_id: str) -> Mapping[str, Taken]:
        """Return what is missing from the books for an account, by market."""
        account = self._accounts.get(account_id)
        return self._taken if self.shares_depth else {} if account is None else account.taken

    @property
    def in_doubt(self) -> Mapping[str, LastSeen | None]:
        """The accounts whose state is unknown until they are reread, each with what it saw before what it misses."""
        return self._in_doubt

    def is_changing(self, account_id: str) -> bool:
        """Return whether the account is changing now: its state is certain only under its lock."""
        return self._locks[account_id].locked()

    def under_way(self, account_id: str) -> Collection[asyncio.Future[Any]]:
        """Return the account's changes in progress, including those whose callers no longer wait."""
        return tuple(self._under_way.get(account_id, ()))  # callers may name accounts that do not exist

    async def settle(self, account_id: str) -> None:
        """Wait until every change of the account in progress has ended and is certain in the rows.

        :raises Unavailable: the database cannot answer now, or this process has stopped trading
        """
        if under_way := self.under_way(account_id):
            await asyncio.wait(under_way)
        if account_id in self._in_doubt:
            await self.change(account_id, lambda _: None)

    async def open(self, account_id: str, run: Run) -> Account:
        """Return the account; if it does not exist, open it with this first run."""
        async with self._locks[account_id]:
            if account_id not in self._accounts:
                async with self._database.writing() as conn:
                    await store.insert_account(conn, account_id, run)
                async with self._database.reading() as conn:
                    self._accounts.update(await store.select_accounts(conn, account_id))
                self.version += 1
        return self._accounts[account_id]

    async def remove(self, account_id: str, within: Within) -> bool:
        """Remove an account that has never traded, with its rows. Return False if it has traded or belongs to a model.

        It runs to completion even if the caller is canceled.

        :raises Unavailable: the database did not confirm it, or this process has stopped trading
        """
        return await self._to_its_end(account_id, self._remove(account_id, within))

    async def _remove(self, account_id: str, within: Within) -> bool:
        async with self._certain(account_id, within):
            if (term := self._term) is None:
                raise self._ended()
            try:
                async with self._database.transaction() as conn:
                    deletion = await store.delete_account(conn, account_id, term)
            except Unavailable:
                self.mark_missed(account_id)
                raise
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

    async def change(self, account_id: str, decide: Decide, within: Within = nullcontext) -> Posting | None:
        """Lock, decide, commit, apply, publish, all of it `within` a context if one is given.

        It runs to completion even if the caller is canceled. An account removed in the meantime gets no decision.

        :raises Unavailable: the database did not confirm the change; whether it happened is unknown until the account
            is reread, which happens before its next change
        :raises InternalError: a bug ended the write; the account is reread as well
        """
        return await self._to_its_end(account_id, self._change(account_id, decide, within))

    async def apply(self, account_id: str, decide: Decide, tick: AppliedTick) -> Posting | None:
        """Change an account by a tick, as `change` does; one that is in doubt waits for nothing and misses the tick.

        :raises Unavailable: the account is in doubt, or the database did not confirm the change
        """
        return await self._to_its_end(account_id, self._apply(account_id, decide, tick))

    async def _to_its_end(self, account_id: str, work: Coroutine[Any, Any, T]) -> T:
        assert self._changes is not None, "only a leader changes accounts"
        change = asyncio.create_task(work, name=f"change of {account_id}")
        under_way = self._under_way[account_id]
        under_way.add(change)
        change.add_done_callback(under_way.discard)
        try:
            return await self._changes.shield(change)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                change.add_done_callback(tasks.log_failure)
                raise
            raise self._ended() from None  # the change was canceled, not its caller: the term has ended

    def decide(self, account_id: str, decide: Decide, seen: AppliedTick | None = None) -> Posting | None:
        """Return the decision on an account, seeing the depth that others took. Call it like `commit`.

        `seen` is the last tick that the account has seen afterward; by default, the last processed one.
        """
        account, seen = self._accounts[account_id], seen or self.processed
        posting = self.preview(account, decide)
        if posting is not None and seen is not None:
            after = msgspec.structs.replace(posting.account, seen_tick=seen.number, seen_until=seen.at)
            posting = msgspec.structs.replace(posting, account=after)
        if posting is None or not self.shares_depth:
            return posting
        self._taken = posting.account.taken
        own = msgspec.structs.replace(posting.account, taken=taken_with(account.taken, posting.fills))
        self._decided[account_id] = own
        return msgspec.structs.replace(posting, account=own)

    def preview(self, account: Account, decide: Decide) -> Posting | None:
        """Return the decision on an account that may not be open yet; it sees the depth that others took."""
        return decide(msgspec.structs.replace(account, taken=self._taken) if self.shares_depth else account)

    async def commit(self, posting: Posting) -> None:
        """Commit, apply and publish. Call it only under the account's lock: within `change` or its catch-up."""
        account = posting.account
        try:
            await self._writer.write(posting)
        except (Unavailable, InternalError):
            self.mark_missed(account.id)
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
        """Return the quantities of a failed posting to the books; anything that was committed is read again later."""
        if self.shares_depth:
            self._decided.pop(account_id, None)
            self._taken = all_taken({**self._accounts, **self._decided}.values())

    def mark_missed(self, account_id: str) -> None:
        """Record that the account has missed every tick after the last processed one."""
        self._in_doubt.setdefault(account_id, None if self.processed is None else LastSeen(self.processed, self.marks))

    def note_processed(self, tick: AppliedTick) -> None:
        """Note that every account not in doubt has been through a tick, and so through its date."""
        since = tick.at - BEFORE_FIRST if self.processed is None else min(self.processed.at, tick.at)
        self._spans = add_span(self._spans, since, tick.at)
        self.processed = tick

    def follow_jump(self, jump: timedelta) -> None:
        """Date the processed ticks by the clock, which was just set by `jump`."""
        if self.processed is not None:
            self.processed = self.processed._replace(at=self.processed.at + jump)
        for account_id, since in self._in_doubt.items():
            if since is not None:
                self._in_doubt[account_id] = since._replace(tick=since.tick._replace(at=since.tick.at + jump))

    async def record_jump(self, clock: Clock) -> None:
        """Date the processed ticks in the database by the clock, which was set.

        :raises Unavailable: the database did not confirm it
        """
        async with self._database.writing() as conn:
            await store.update_times_seen(conn, None, self._term, dated_origin(clock))

    async def checkpoint(self, clock: Clock) -> None:
        """Record in the database up to which tick every account has been processed, and the marks as of that tick.

        `clock`: the one that dates this tick.

        :raises Unavailable: the database cannot answer now; the next checkpoint covers this one
        """
        term = self._term
        if self.processed is None or term is None:
            return
        doubts = [since for since in self._in_doubt.values() if since is not None]
        first = min([LastSeen(self.processed, self.marks), *doubts], key=lambda seen: seen.tick)
        spans = cut_out(self._spans, first.tick.at, max(first.tick.at, self.processed.at))
        async with self._database.writing() as conn:
            facts = *dated_origin(clock), clock.now() - first.tick.at
            await store.update_processed_until(conn, term, first.tick, first.marks, spans, facts)

    async def _change(self, account_id: str, decide: Decide, within: Within) -> Posting | None:
        async with self._certain(account_id, within):
            return await self._post(account_id, decide)

    async def _apply(self, account_id: str, decide: Decide, tick: AppliedTick) -> Posting | None:
        for_its_end = self._locks[account_id] if account_id not in self._in_doubt else nullcontext()
        async with for_its_end:  # a recovery holds the lock, and waits for the end of this tick
            if account_id in self._in_doubt:
                raise Unavailable(f"The state of the account {account_id} is currently unknown.", 1)
            return await self._post(account_id, decide, tick)

    async def _post(self, account_id: str, decide: Decide, seen: AppliedTick | None = None) -> Posting | None:
        if self._term is None:  # the term ended while the caller waited for a book or for this account
            raise self._ended()
        if account_id not in self._accounts:  # it was removed in the meantime
            return None
        posting = self.decide(account_id, decide, seen)
        if posting is not None:
            await self.commit(posting)
        return posting

    @asynccontextmanager
    async def _certain(self, account_id: str, within: Within) -> AsyncIterator[None]:
        """Hold the account's lock `within` a context, after the account was recovered if it was in doubt.

        The recovery waits for the source, and for the end of a tick: a caller that holds off the next tick must not
        wait for it.
        """
        while True:
            if account_id in self._in_doubt:
                async with self._locks[account_id]:
                    if account_id in self._in_doubt:
                        await self._recover(account_id)
            async with within():
                if account_id in self._in_doubt:
                    continue
                async with self._locks[account_id]:
                    if account_id not in self._in_doubt:
                        yield
                        return

    @property
    def database_trouble(self) -> str | None:
        """Why the database is unusable now, as far as this process has noticed."""
        return self._database.trouble

    def _ended(self) -> Unavailable:
        if self.database_trouble is not None:  # then no other process trades either
            return DatabaseUnavailable(self.database_trouble)
        return Unavailable("This process has stopped trading: another one trades on this database, or is about to.", 5)

    async def _recover(self, account_id: str) -> None:
        if (term := self._term) is None:
            raise self._ended()
        if account_id not in self._accounts:
            del self._in_doubt[account_id]
            return
        async with self._database.writing() as conn:  # fences off whatever is still running at the server
            if not await store.update_account_fenced(conn, account_id, term):
                raise self._ended()
        async with self._database.reading() as conn:
            rows = await store.select_accounts(conn, account_id)
        if not rows:  # its removal was committed without confirmation
            self._forget({account_id})
            return
        self._accounts.update(rows)
        self.version += 1
        self._return_depth(account_id)
        async with nullcontext() if self._catch_up is None else self._catch_up(account_id):
            self._in_doubt.pop(account_id, None)
        log.info("account %s was reread from its rows", account_id)


async def _resume(
    conn: Connection, state: store.ServiceState, now: datetime, origin: tuple[str, datetime] | None
) -> tuple[AppliedTick | None, DateSpan | None]:
    """Date the processed ticks by the present clock, unless it is behind. Return the last one, and what it missed."""
    last, jump = state.processed, None
    if last is None:
        return None, None
    if origin is not None and state.origin == origin[0] and state.origin_at is not None:
        jump = origin[1] - state.origin_at
    at, ahead = resume(state.spans, last.at, now, jump, None if origin is None else state.elapsed)
    if ahead is not None:
        log.warning("the clock is %s behind that of the last applied tick, %s", ahead.until - now, iso(last.at))
        return last, ahead
    if at != last.at:
        log.warning(
            "the last applied tick is dated %s, %s: the clock was set; continuing from %s",
            iso(last.at),
            "in the future" if last.at > now else "by another clock",
            iso(at),
        )
        await store.update_times_seen(conn, at - last.at)
    await store.update_baselines_ahead(conn, min(at, now), now)
    return last._replace(at=at), None


def _refuse_foreign(recorded: store.DatabaseIdentity, wanted: store.DatabaseIdentity) -> None:
    if recorded.market_identity != wanted.market_identity:
        raise StartError(
            f"This database belongs to the market {recorded.market_identity}; MARKET_SOURCE and SIM_SEED select "
            f"{wanted.market_identity}. Prices of two markets never mix: keep the settings that this database "
            "started with, or use another database (DATABASE_URL)."
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
    """Refuse accounts that hold markets without prices: such positions have no value, and nothing could close them."""
    held = {symbol for account in accounts.values() for symbol in account.positions}
    held |= {order.symbol for account in accounts.values() for order in account.resting}
    if missing := sorted(held - set(symbols)):
        raise StartError(
            f"Accounts of this database hold positions or resting orders in {', '.join(missing)}, which MARKETS "
            "leaves out. Add these markets to MARKETS, or close the positions and orders first."
        )
