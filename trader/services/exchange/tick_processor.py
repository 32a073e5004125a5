"""Tick processor: applies every tick to every account as it happens, and afterwards the ticks that were missed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Final

from trader.clock import Clock, ScaledClock, interval_elapsed, iso
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.tick_rules import Moment, apply_tick, is_affected, is_unaffected, price_ranges
from trader.domain.market.markets import STALE_AFTER, Quote, Tick
from trader.errors import InternalError, LedgerViolated, MarketUnavailable, Unavailable
from trader.services.exchange.accounts import Accounts
from trader.services.market.feed import MarketFeed
from trader.store.exchange.accounts import DatabaseIdentity

log = logging.getLogger("trader.exchange")

_ACCOUNTS_PER_TURN: Final = 64
"""How many accounts are checked before the event loop gets its turn."""

_CATCH_UP_EVERY: Final = timedelta(seconds=10)
_CATCH_UP_FOR: Final = timedelta(minutes=2)
"""How often, and for how long, the source is asked for missed ticks before the accounts go on without them."""

CHECKPOINT_EVERY: Final = timedelta(minutes=1)

_TICKS_AT_ONCE: Final = 60
"""How many missed ticks are checked together when catching up."""

_INSTANT: Final = timedelta(milliseconds=1)


class TickProcessor:
    """Applies ticks to the accounts: funding, resting orders, liquidation, exit plans."""

    def __init__(
        self, accounts: Accounts, market: MarketFeed, clock: Clock, rules: Rules, checkpoint_every: timedelta
    ) -> None:
        self._accounts = accounts
        self._market = market
        self._clock = clock
        self._is_paced = isinstance(clock, ScaledClock)
        self._rules = rules
        self._seen_until: datetime | None = None
        self._processed_quotes: Mapping[str, Quote] = {}
        self._processed_marks: Mapping[str, Decimal] = {}
        self._applying: datetime | None = None
        self._deciding = 0
        self._turn = asyncio.Event()
        self._checkpoint_every = checkpoint_every
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
        await self._catch_up_until(self._clock.now())
        await self._market.prime()
        await self._catch_up_until(self._seen_until)
        # Nothing is awaited from here on: the next tick is applied as it happens.
        self._note_processed()
        self._is_live = True

    async def _catch_up_until(self, until: datetime | None) -> None:
        """Catch up, also on the ticks that go on arriving meanwhile. A market that is away leaves a gap for later."""
        since = self._accounts.processed_until
        while since is not None and not self._is_in_gap:
            until = max(filter(None, (until, self._seen_until)), default=since)
            if until <= since:
                return
            try:
                await self._catch_up_all(since, until)
            except MarketUnavailable as error:
                log.warning("catching up waits until the market is back: %s", error)
                self._give_up_at, self._ask_again_at = until + _CATCH_UP_FOR, until
            since = until

    def stop(self) -> None:
        """Stop applying ticks at once."""
        self._is_live = False

    @property
    def is_live(self) -> bool:
        """Whether ticks are applied as they happen, after everything missed was caught up on."""
        return self._is_live

    @property
    def gap_since(self) -> datetime | None:
        """The start of a gap that ended with new prices but is not caught up on yet; else None."""
        since, seen = self._accounts.processed_until, self._seen_until
        if since is None or seen is None:
            return None
        return since if self._is_in_gap or seen - since > STALE_AFTER else None

    @property
    def _is_in_gap(self) -> bool:
        """Whether a gap of the feed has ended that is not caught up on to its last tick."""
        return self._give_up_at is not None

    def seen_until(self) -> datetime:
        """Return until when the accounts have seen the market: now, or the start of a gap."""
        now, until = self._now(), self._accounts.processed_until
        return until if until is not None and (self._is_in_gap or now - until > STALE_AFTER) else now

    def _now(self) -> datetime:
        """Return the date of a decision: after every tick that was applied before it, and before the next one.

        So the date says which ticks the account has seen, and after a crash it misses none and sees none twice.
        """
        now, processed = self._clock.now(), self._accounts.processed_until
        if self._applying is not None:
            return min(now, self._applying - _INSTANT)
        return max(now, processed) if self._is_paced and processed is not None else now

    def moment(self) -> Moment:
        """Return the markets as of the last applied tick, for a decision of now."""
        return Moment(self._now(), self._processed_quotes, self._processed_marks)

    def _note_processed(self) -> None:
        self._processed_quotes, self._processed_marks = dict(self._market.quotes()), dict(self._market.marks)

    @asynccontextmanager
    async def between_ticks(self) -> AsyncIterator[None]:
        """Decide between two ticks: wait until the present one is applied to every account, and hold off the next."""
        while self._applying is not None:
            await self._turn.wait()
        self._deciding += 1
        try:
            yield
        finally:
            self._deciding -= 1
            self._next_turn()

    def _next_turn(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every account: funding, resting orders, liquidation, exit plans."""
        self._seen_until = tick.at
        if not self._is_live or self._was_processed(tick):
            return
        if not await self._close_gap(tick):
            return
        self._applying = tick.at
        try:
            while self._deciding:
                await self._turn.wait()
            quotes, marks = self._market.quotes(), self._market.marks
            moment = Moment(tick.at, quotes, marks, frozenset(tick.quotes), self._processed_marks)
            await self._apply_to_all(moment, list(self._accounts.by_id))
            self._accounts.processed_until = tick.at
        finally:
            self._applying = None
            self._note_processed()
            self._next_turn()
        if self._checkpoint_due is None or interval_elapsed(self._checkpoint_due, self._checkpoint_every, tick.at):
            self._checkpoint_due = tick.at.replace(second=0, microsecond=0) + self._checkpoint_every
            await self.checkpoint()

    def _was_processed(self, tick: Tick) -> bool:
        """Whether the feed is behind the accounts, as in a replay whose leader has changed: no second happens twice."""
        until = self._accounts.processed_until
        return self._is_paced and until is not None and tick.at <= until

    async def _close_gap(self, tick: Tick) -> bool:
        """Catch up on what was missed before a tick. Return False while the source may still answer later."""
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
                log.warning(
                    "accounts wait at %s for missed ticks: %s",
                    iso(self._accounts.processed_until or since),
                    error,
                )
                return False
            log.error("the ticks from %s to %s are lost and were not applied: %s", iso(since), iso(tick.at), error)
        self._give_up_at = self._ask_again_at = None
        return True

    async def checkpoint(self) -> None:
        """Record the last processed tick; when the database is unavailable the next checkpoint covers this one."""
        try:
            await self._accounts.checkpoint(self._market.marks)
        except Unavailable as error:
            log.warning("the last processed tick was not recorded: %s", error)

    async def _apply_to_all(self, moment: Moment, account_ids: Iterable[str], *, missed: bool = False) -> None:
        due = []
        for turn, account_id in enumerate(account_ids, start=1):
            account = self._accounts.by_id.get(account_id)
            if account is None:  # it was removed meanwhile
                continue
            if self._accounts.is_unsettled(account_id) or is_affected(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        due.sort()  # where accounts share the depth of the books, a restart must not change who comes first
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            some = due[start : start + _ACCOUNTS_PER_TURN]
            await asyncio.gather(*(self._apply_to(account_id, moment, missed=missed) for account_id in some))

    async def _apply_to(self, account_id: str, moment: Moment, *, missed: bool) -> None:
        try:
            await self._accounts.change(account_id, partial(self._decide, moment=moment, missed=missed))
        except (Unavailable, LedgerViolated, InternalError) as error:
            # One account must not keep the others from following the market; it is read again at the next tick.
            self._accounts.mark_missed(account_id)
            log.error("account %s missed a tick and will catch up later: %s", account_id, error)

    def _decide(self, account: Account, moment: Moment, *, missed: bool) -> Posting | None:
        if missed and moment.at <= account.changed_at:
            return None  # the account saw this tick before the service stopped, or was changed after it
        try:
            return apply_tick(account, moment, self._rules, self._market.funding_rate)
        except Exception as error:
            # A bug on one account must not end the process, which would meet the same tick again after its restart.
            log.exception("a bug in applying the tick of %s to account %s", iso(moment.at), account.id)
            raise InternalError(f"The account {account.id} cannot follow the market: an internal error.") from error

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Apply the ticks in (since, until] to every account, as if the service had never stopped."""
        if until <= since:
            return
        log.info("catching up on the market from %s to %s", iso(since), iso(until))
        before = sum(account.sequence for account in self._accounts.by_id.values())
        async for moments in missed_moments(self._market, since, until, self._processed_marks, applied=True):
            if all(account.is_idle for account in self._accounts.by_id.values()):
                break
            await self._catch_up_on(moments)
        self._accounts.processed_until = until
        changes = sum(account.sequence for account in self._accounts.by_id.values()) - before
        log.info("caught up on %s of the market: %d rows posted", until - since, changes)

    async def _catch_up_on(self, moments: Sequence[Moment]) -> None:
        """Apply successive ticks to every account; those that their price ranges cannot affect are skipped."""
        ranges = price_ranges(moments)
        affected = [
            account_id
            for account_id, account in self._accounts.by_id.items()
            if self._accounts.is_unsettled(account_id) or not is_unaffected(account, ranges, self._rules)
        ]
        await asyncio.sleep(0)
        for moment in moments:
            self._market.restore_marks(moment.marks)
            await self._apply_to_all(moment, affected, missed=True)
            self._accounts.processed_until, self._processed_marks = moment.at, moment.marks

    async def _catch_up(self, account_id: str, since: datetime) -> None:
        """Catch up one account that was in doubt. Called under the account's lock."""
        if self._accounts.processed_until is None:
            return
        until, marks = self._accounts.processed_until, self._processed_marks
        try:
            async for moments in missed_moments(self._market, since, until, marks):
                for moment in moments:
                    if self._accounts.by_id[account_id].is_idle:
                        return
                    decide = partial(self._decide, moment=moment, missed=True)
                    posting = self._accounts.decide(account_id, decide)
                    if posting is not None:
                        await self._accounts.commit(posting)
        except MarketUnavailable as error:
            raise Unavailable(f"The account {account_id} cannot catch up on the market now: {error}") from error


async def missed_moments(
    market: MarketFeed, since: datetime, until: datetime, marks: Mapping[str, Decimal], *, applied: bool = False
) -> AsyncIterator[Sequence[Moment]]:
    """Yield the moments of the ticks of (since, until] that follow these `marks`, a minute of them at a time.

    With `applied` they are recorded as applied to the accounts of the service.

    :raises MarketUnavailable: the source fails; the moments until then are yielded before
    """
    # Until a market's first tick in the gap its mark is the one before the gap, not that of the tick after it.
    before = {**market.marks, **marks}
    moments: list[Moment] = []
    try:
        async for tick in market.history(since, until, applied=applied):
            present = {**before, **{symbol: quote.mark for symbol, quote in tick.quotes.items()}}
            moments.append(Moment(tick.at, tick.quotes, present, frozenset(tick.quotes), before))
            before = present
            if len(moments) == _TICKS_AT_ONCE:
                yield moments
                moments = []
    except MarketUnavailable:
        if moments:
            yield moments
        raise
    if moments:
        yield moments
