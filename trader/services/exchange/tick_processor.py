"""Every account taken through every update of the markets: as it happens, and afterwards what was missed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.clock import Clock, interval_elapsed, iso
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.tick_rules import Moment, apply_tick, is_affected, is_unaffected, price_ranges
from trader.domain.market.markets import STALE_AFTER, Tick
from trader.errors import BooksViolated, InternalError, MarketUnavailable, Unavailable
from trader.services.exchange.accounts import Accounts
from trader.services.market.feed import MarketFeed
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
    """Applies ticks to the accounts: funding, resting orders, liquidation, exit plans."""

    def __init__(self, accounts: Accounts, market: MarketFeed, clock: Clock, rules: Rules) -> None:
        self._accounts = accounts
        self._processed_marks: Mapping[str, Decimal] = {}
        self._market = market
        self._clock = clock
        self._rules = rules
        self._seen_until: datetime | None = None
        self._checkpoint_due: datetime | None = None
        self._is_live = False
        self._ask_again_at: datetime | None = None
        self._give_up_at: datetime | None = None

    async def lead(self, identity: DatabaseIdentity, symbols: Collection[str]) -> None:
        """Begin a term: rebuild the accounts, and catch up on the ticks that were missed while no process led.

        :raises StartError: the database is of another market or trading mode, its books do not balance, or an account
            holds what is not among the `symbols` that are followed
        """
        marks = await self._accounts.lead(identity, symbols, self._catch_up)
        self._market.restore_marks(marks)
        self._processed_marks = marks
        self._ask_again_at = self._give_up_at = None
        since = self._accounts.processed_until
        while since is not None and since < (until := max(self._clock.now(), self._seen_until or since)):
            try:
                await self._catch_up_all(since, until)
            except MarketUnavailable as error:
                log.warning("catching up waits until the market is back: %s", error)
                break
            # Ticks went on arriving meanwhile; they are caught up on too, until none is missing.
            since = until if self._seen_until is not None and self._seen_until > until else None
        await self._market.prime()
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
        since, seen = self._accounts.processed_until, self._seen_until
        if since is None or seen is None:
            return None
        return since if self._is_in_gap or seen - since > STALE_AFTER else None

    @property
    def _is_in_gap(self) -> bool:
        """Whether a gap of the feed has ended that the accounts have not gone through to its last moment."""
        return self._give_up_at is not None

    def seen_until(self) -> datetime:
        """Until when the accounts have seen the market: now, but for what a gap of the feed still hides."""
        now, until = self._clock.now(), self._accounts.processed_until
        return until if until is not None and (self._is_in_gap or now - until > STALE_AFTER) else now

    def moment(self, tick: Tick | None = None) -> Moment:
        """The markets as of a tick, or as of now."""
        if tick is None:
            return Moment(self._clock.now(), self._market.quotes(), self._market.marks)
        return Moment(tick.at, self._market.quotes(), self._market.marks, frozenset(tick.quotes))

    async def on_tick(self, tick: Tick) -> None:
        """Apply an update of the markets to every account: funding, resting orders, liquidation, exit plans."""
        self._seen_until = tick.at
        if not self._is_live or not await self._close_gap(tick):
            return
        self._processed_marks = dict(self._market.marks)
        await self._review_all(self.moment(tick), list(self._accounts.by_id))
        self._accounts.processed_until = tick.at
        if self._checkpoint_due is None or interval_elapsed(self._checkpoint_due, _CHECKPOINT_EVERY, tick.at):
            self._checkpoint_due = tick.at.replace(second=0, microsecond=0) + _CHECKPOINT_EVERY
            await self.checkpoint()

    async def _close_gap(self, tick: Tick) -> bool:
        """Go through what was missed before a tick. False while that cannot be known yet, but may be soon."""
        since = self._accounts.processed_until
        if since is None or (not self._is_in_gap and tick.at - since <= STALE_AFTER):
            return True
        if self._give_up_at is None or self._ask_again_at is None:
            self._give_up_at, self._ask_again_at = tick.at + _CATCH_UP_FOR, tick.at
        if not interval_elapsed(self._ask_again_at, _CATCH_UP_EVERY, tick.at):
            return False
        self._ask_again_at = tick.at + _CATCH_UP_EVERY
        try:
            await self._catch_up_all(since, tick.at - _INSTANT)
        except MarketUnavailable as error:
            if tick.at < self._give_up_at:
                log.warning("the accounts stand still at %s: %s", iso(self._accounts.processed_until or since), error)
                return False
            log.error("what the markets did from %s to %s cannot be known: %s", iso(since), iso(tick.at), error)
        self._give_up_at = self._ask_again_at = None
        return True

    async def checkpoint(self) -> None:
        """Note how far the accounts have followed the market; a database that is away is told the next time."""
        try:
            await self._accounts.checkpoint(self._market.marks)
        except Unavailable as error:
            log.warning("could not note how far the market was followed: %s", error)

    async def _review_all(self, moment: Moment, account_ids: Iterable[str], *, missed: bool = False) -> None:
        due = []
        for turn, account_id in enumerate(account_ids, start=1):
            account = self._accounts.by_id[account_id]
            if self._accounts.is_unsettled(account_id) or is_affected(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            some = due[start : start + _ACCOUNTS_PER_TURN]
            await asyncio.gather(*(self._review(one, moment, missed=missed) for one in some))

    async def _review(self, account_id: str, moment: Moment, *, missed: bool) -> None:
        try:
            await self._accounts.change(account_id, lambda account: self._reviewed(account, moment, missed=missed))
        except (Unavailable, BooksViolated, InternalError) as error:
            # One account that cannot follow must not keep the others from it; it is read again at the next update.
            self._accounts.mark_missed(account_id)
            log.error("account %s will follow the market later: %s", account_id, error)

    def _reviewed(self, account: Account, moment: Moment, *, missed: bool) -> Posting | None:
        if missed and moment.at <= account.changed_at:
            return None  # the account saw this update before the service stopped, or was changed after it
        return apply_tick(account, moment, self._rules, self._market.funding_rate)

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Take every account through the ticks in (since, until], as if the service had never stopped."""
        if until <= since:
            return
        log.info("catching up on the market from %s to %s", iso(since), iso(until))
        before = sum(account.sequence for account in self._accounts.by_id.values())
        missed: list[Moment] = []
        async for moment in self._missed_moments(since, until):
            if all(account.is_idle for account in self._accounts.by_id.values()):
                missed.clear()
                break
            missed.append(moment)
            if len(missed) == _STRETCH:
                await self._catch_up_on(missed)
                missed.clear()
        await self._catch_up_on(missed)
        self._accounts.processed_until = until
        events = sum(account.sequence for account in self._accounts.by_id.values()) - before
        log.info("caught up on %s of the market: %d bookings", until - since, events)

    async def _catch_up_on(self, moments: Sequence[Moment]) -> None:
        """Take every account through a stretch of the past; those that it leaves calm need no look at each moment."""
        if not moments:
            return
        stretch = price_ranges(moments)
        stirred = [
            one
            for one, account in self._accounts.by_id.items()
            if self._accounts.is_unsettled(one) or not is_unaffected(account, stretch, self._rules)
        ]
        await asyncio.sleep(0)
        for moment in moments:
            self._market.restore_marks(moment.marks)
            await self._review_all(moment, stirred, missed=True)
            self._accounts.processed_until, self._processed_marks = moment.at, moment.marks

    async def _catch_up(self, account_id: str, since: datetime) -> None:
        """The same for one account, after the database was away. Under the account's lock."""
        if self._accounts.processed_until is None:
            return
        try:
            async for moment in self._missed_moments(since, self._accounts.processed_until):
                account = self._accounts.by_id[account_id]
                if account.is_idle:
                    return
                posting = self._reviewed(account, moment, missed=True)
                if posting is not None:
                    await self._accounts.commit(posting)
        except MarketUnavailable as error:
            raise Unavailable(f"The account {account_id} cannot catch up on the market now: {error}") from error

    async def _missed_moments(self, since: datetime, until: datetime) -> AsyncIterator[Moment]:
        # Until a market is heard of in the gap, its mark is the one before the gap, not that of the update after it.
        marks = {**self._market.marks, **self._processed_marks}
        async for tick in self._market.history(since, until):
            marks.update({symbol: quote.mark for symbol, quote in tick.quotes.items()})
            yield Moment(tick.at, tick.quotes, dict(marks), frozenset(tick.quotes))
