"""Every account taken through every update of the markets: as it happens, and afterwards what was missed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.clock import Clock, comes_up, iso
from trader.domain.exchange.account import Account
from trader.domain.exchange.catch_up import is_calm, stretch_of
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.rules import Moment, is_due, review
from trader.domain.market.markets import STALE_AFTER, Tick
from trader.errors import BooksViolated, MarketUnavailable, Unavailable
from trader.services.events import EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.market.feed import MarketFeed
from trader.store.database.pool import Database
from trader.store.exchange.accounts import DatabaseIdentity

log = logging.getLogger("trader.exchange")

_ACCOUNTS_PER_TURN: Final = 64
"""How many accounts are looked at before other work gets its turn on the loop."""

_CATCH_UP_EVERY: Final = timedelta(seconds=10)
_CATCH_UP_FOR: Final = timedelta(minutes=2)
"""How often, and for how long, a source is asked for what was missed before the accounts go on without it."""

_CHECKPOINT_EVERY: Final = timedelta(minutes=1)

_STRETCH: Final = 60
"""How many missed updates are looked at together when catching up."""

_INSTANT: Final = timedelta(milliseconds=1)


class TickProcessor:
    """Applies updates of the markets to the books: funding, resting orders, liquidation, exit plans.

    `marks` holds the latest mark of each market; before its source has spoken, the last one noted.
    """

    def __init__(self, database: Database, market: MarketFeed, clock: Clock, events: EventBus, rules: Rules) -> None:
        self.books = Accounts(database, events, self._catch_up)
        self.marks: dict[str, Decimal] = {}
        self._reviewed_marks: Mapping[str, Decimal] = {}
        self._market = market
        self._clock = clock
        self._rules = rules
        self._seen_until: datetime | None = None
        self._checkpoint_due: datetime | None = None
        self._is_live = False
        self._ask_again_at: datetime | None = None
        self._give_up_at: datetime | None = None

    async def lead(self, holding: DatabaseIdentity, symbols: Collection[str]) -> None:
        """Begin a term: rebuild the books, and go through what was missed while nobody led.

        :raises StartError: the database is of another market or trading mode, its books do not balance, or an account
            holds what is not among the `symbols` that are followed
        """
        noted = await self.books.lead(holding, symbols)
        self.marks = {**noted, **self.marks}
        self._reviewed_marks = dict(noted)
        self._ask_again_at = self._give_up_at = None
        since = self.books.reviewed_until
        while since is not None and since < (until := max(self._clock.now(), self._seen_until or since)):
            try:
                await self._catch_up_all(since, until)
            except MarketUnavailable as error:
                log.warning("catching up waits until the market is back: %s", error)
                break
            # Ticks went on arriving meanwhile; they are caught up on too, until none is missing.
            since = until if self._seen_until is not None and self._seen_until > until else None
        await self.prime()
        self._is_live = True

    def stop(self) -> None:
        """Apply nothing from this moment on."""
        self._is_live = False

    @property
    def is_live(self) -> bool:
        """Whether the accounts follow the market as it happens, with nothing missing."""
        return self._is_live

    @property
    def gap_since(self) -> datetime | None:
        """From when on the accounts do not know what the market did, though its prices are here again; else None."""
        since, seen = self.books.reviewed_until, self._seen_until
        if since is None or seen is None:
            return None
        return since if self._is_in_gap or seen - since > STALE_AFTER else None

    @property
    def _is_in_gap(self) -> bool:
        """Whether a gap of the feed has ended that the accounts have not gone through to its last moment."""
        return self._give_up_at is not None

    def seen_until(self) -> datetime:
        """Until when the accounts have seen the market: now, but for what a gap of the feed still hides."""
        now, until = self._clock.now(), self.books.reviewed_until
        return until if until is not None and (self._is_in_gap or now - until > STALE_AFTER) else now

    async def prime(self) -> None:
        """Take the prices of this moment, so that nobody starts blind."""
        await self._market.prime()
        self.marks.update({symbol: quote.mark for symbol, quote in self._market.quotes().items()})

    def moment(self, tick: Tick | None = None) -> Moment:
        """The markets as of a tick, or as of now."""
        if tick is None:
            return Moment(self._clock.now(), self._market.quotes(), self.marks)
        return Moment(tick.at, self._market.quotes(), self.marks, frozenset(tick.quotes))

    async def on_tick(self, tick: Tick) -> None:
        """Apply an update of the markets to every account: funding, resting orders, liquidation, exit plans."""
        self.marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
        self._seen_until = tick.at
        if not self._is_live or not await self._close_gap(tick):
            return
        self._reviewed_marks = dict(self.marks)
        await self._review_all(self.moment(tick), list(self.books.accounts))
        self.books.reviewed_until = tick.at
        if self._checkpoint_due is None or comes_up(self._checkpoint_due, _CHECKPOINT_EVERY, tick.at):
            self._checkpoint_due = tick.at.replace(second=0, microsecond=0) + _CHECKPOINT_EVERY
            await self.checkpoint()

    async def _close_gap(self, tick: Tick) -> bool:
        """Go through what was missed before a tick. False while that cannot be known yet, but may be soon."""
        since = self.books.reviewed_until
        if since is None or (not self._is_in_gap and tick.at - since <= STALE_AFTER):
            return True
        if self._give_up_at is None or self._ask_again_at is None:
            self._give_up_at, self._ask_again_at = tick.at + _CATCH_UP_FOR, tick.at
        if not comes_up(self._ask_again_at, _CATCH_UP_EVERY, tick.at):
            return False
        self._ask_again_at = tick.at + _CATCH_UP_EVERY
        try:
            await self._catch_up_all(since, tick.at - _INSTANT)
        except MarketUnavailable as error:
            if tick.at < self._give_up_at:
                log.warning("the accounts stand still at %s: %s", iso(self.books.reviewed_until or since), error)
                return False
            log.error("what the markets did from %s to %s cannot be known: %s", iso(since), iso(tick.at), error)
        self._give_up_at = self._ask_again_at = None
        return True

    async def checkpoint(self) -> None:
        """Note how far the accounts have followed the market; a database that is away is told the next time."""
        try:
            await self.books.checkpoint(self.marks)
        except Unavailable as error:
            log.warning("could not note how far the market was followed: %s", error)

    async def _review_all(self, moment: Moment, account_ids: Iterable[str], *, missed: bool = False) -> None:
        due = []
        for turn, account_id in enumerate(account_ids, start=1):
            account = self.books.accounts[account_id]
            if self.books.is_unsettled(account_id) or is_due(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            some = due[start : start + _ACCOUNTS_PER_TURN]
            await asyncio.gather(*(self._review(one, moment, missed=missed) for one in some))

    async def _review(self, account_id: str, moment: Moment, *, missed: bool) -> None:
        try:
            await self.books.change(account_id, lambda account: self._reviewed(account, moment, missed=missed))
        except (Unavailable, BooksViolated) as error:
            # One account that cannot follow must not keep the others from it; it is read again at the next update.
            self.books.missed(account_id)
            log.error("account %s will follow the market later: %s", account_id, error)

    def _reviewed(self, account: Account, moment: Moment, *, missed: bool) -> Posting | None:
        if missed and moment.at <= account.changed_at:
            return None  # the account saw this update before the service stopped, or was changed after it
        return review(account, moment, self._rules, self._market.funding_rate)

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Take every account through the ticks in (since, until], as if the service had never stopped."""
        if until <= since:
            return
        log.info("catching up on the market from %s to %s", iso(since), iso(until))
        before = sum(account.sequence for account in self.books.accounts.values())
        missed: list[Moment] = []
        async for moment in self._missed_moments(since, until):
            if all(account.is_idle for account in self.books.accounts.values()):
                missed.clear()
                break
            missed.append(moment)
            if len(missed) == _STRETCH:
                await self._catch_up_on(missed)
                missed.clear()
        await self._catch_up_on(missed)
        self.books.reviewed_until = until
        events = sum(account.sequence for account in self.books.accounts.values()) - before
        log.info("caught up on %s of the market: %d bookings", until - since, events)

    async def _catch_up_on(self, moments: Sequence[Moment]) -> None:
        """Take every account through a stretch of the past; those that it leaves calm need no look at each moment."""
        if not moments:
            return
        stretch = stretch_of(moments)
        stirred = [
            one
            for one, account in self.books.accounts.items()
            if self.books.is_unsettled(one) or not is_calm(account, stretch, self._rules)
        ]
        await asyncio.sleep(0)
        for moment in moments:
            if not self._is_live:  # else they are those of the update that ended the gap, which is applied next
                self.marks.update(moment.marks)
            await self._review_all(moment, stirred, missed=True)
            self.books.reviewed_until, self._reviewed_marks = moment.at, moment.marks

    async def _catch_up(self, account_id: str, since: datetime) -> None:
        """The same for one account, after the database was away. Under the account's lock."""
        if self.books.reviewed_until is None:
            return
        try:
            async for moment in self._missed_moments(since, self.books.reviewed_until):
                account = self.books.accounts[account_id]
                if account.is_idle:
                    return
                posting = self._reviewed(account, moment, missed=True)
                if posting is not None:
                    await self.books.commit(posting)
        except MarketUnavailable as error:
            raise Unavailable(f"The account {account_id} cannot catch up on the market now: {error}") from error

    async def _missed_moments(self, since: datetime, until: datetime) -> AsyncIterator[Moment]:
        # Until a market is heard of in the gap, its mark is the one before the gap, not that of the update after it.
        marks = {**self.marks, **self._reviewed_marks}
        async for tick in self._market.history(since, until):
            marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
            yield Moment(tick.at, tick.quotes, dict(marks), frozenset(tick.quotes))
